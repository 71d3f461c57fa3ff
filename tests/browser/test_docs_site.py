"""The documentation site in a real browser: search, light and dark, on a phone; offline."""

import os
import subprocess
import sys
import time
from pathlib import Path

import chromium_pipe
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.backend_free,
    pytest.mark.skipif(chromium_pipe.path() is None, reason="chromium is not installed"),
]

ROOT = Path(__file__).parents[2]
SHOTS = os.environ.get("KERAS_VIT_SCREENSHOTS")


@pytest.fixture(scope="module")
def address(tmp_path_factory, served):
    pytest.importorskip("mkdocs", reason="the dependency group docs is not installed")
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-3000:]
    return served(folder)


@pytest.fixture
def open_page(tmp_path, address):
    with chromium_pipe.Chromium(tmp_path) as chromium:
        pages = []

        def make(path, width=1280, scheme="light"):
            page = chromium_pipe.Page(
                chromium, address + path, width, 900, scheme, "[data-md-color-scheme]"
            )
            pages.append(page)
            return page

        yield make
        for page in pages:
            assert page.problems == []
            assert [u for u in page.requests if not u.startswith((address, "data:"))] == []


def until(page, expression, wanted=True):
    end = time.monotonic() + 60
    while page.value(expression) != wanted:
        assert time.monotonic() < end, page.value(expression)
        time.sleep(0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_page_follows_the_system_and_fits(open_page, scheme, width):
    page = open_page("docs/vit/", width, scheme)
    wanted = {"light": "default", "dark": "slate"}[scheme]
    until(page, "document.body.dataset.mdColorScheme", wanted)
    assert page.value("document.documentElement.scrollWidth") <= width
    assert page.value("document.querySelectorAll('math').length") > 3
    if SHOTS:
        page.screenshot(Path(SHOTS) / f"docs-{scheme}-{width}.png")


def test_search_finds_a_public_name(open_page):
    page = open_page("")
    until(page, "document.querySelector('.md-search-result__meta') !== null")
    page.click(".md-search__input")
    for key in "export_onnx":
        page.press(key)
    results = "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href).join()"
    until(page, f"({results}).includes('#keras_vit.export_onnx')")
