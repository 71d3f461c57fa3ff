"""The documentation site: its reference has every public name, and it builds without a warning."""

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.backend_free

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "site"
OUTSIDE = re.compile(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=\"?(?:https?:)?//[^>]*>")


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


api_reference = load("api_reference")


def shown(pages):
    return {name for text in pages.values() for name in re.findall(r"^::: (.+)$", text, re.M)}


def test_reference_has_every_public_name():
    public = set()
    for name in api_reference.MODULES:
        module = importlib.import_module(name)
        public |= {f"{name}.{public_name}" for public_name in module.__all__}
    pages = api_reference.reference()
    assert len(public) > 100
    assert shown(pages) | api_reference.MODULES.keys() == public | {"keras_vit"}


def test_reference_without_a_name_is_found(monkeypatch):
    names = api_reference.public_names
    monkeypatch.setattr(api_reference, "public_names", lambda module: names(module)[1:])
    assert "keras_vit.Classifier" not in shown(api_reference.reference())


def test_modules_are_all_in_the_reference():
    """Every module that `keras_vit.__all__` names has a page."""
    package = importlib.import_module("keras_vit")
    modules = {n for n in package.__all__ if type(getattr(package, n)).__name__ == "module"}
    assert {f"keras_vit.{name}" for name in modules} < api_reference.MODULES.keys()


def build(root, folder):
    """Builds the site of a checkout as `make docs` does."""
    pytest.importorskip("mkdocs", reason="the dependency group docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built") / "site"
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stderr[-3000:]
    return folder


@pytest.mark.slow
def test_site_has_pages_and_names_and_loads_nothing_from_elsewhere(site):
    pages = {p.relative_to(site).as_posix(): p.read_text("utf-8") for p in site.rglob("*.html")}
    guides = {f"docs/{p.stem}/index.html" for p in (ROOT / "docs").glob("*.md")}
    assert guides | {"index.html", "README.zh-CN/index.html"} <= pages.keys()
    reference = "".join(text for path, text in pages.items() if path.startswith("reference/"))
    names = shown(api_reference.reference())
    assert [name for name in names if f'id="{name}"' not in reference] == []
    assert {path: found for path, text in pages.items() if (found := OUTSIDE.findall(text))} == {}
    assert "&gt;&gt;&gt;" in reference and "<blockquote>" not in reference  # examples are code
    assert "hf://org/name[@revision][/file]" in reference
    assert "<math " in pages["docs/vit/index.html"]
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        page = pages[f"notebooks/{notebook.name}/index.html"]
        first = site / "notebooks" / f"{notebook.stem}-1.png"
        assert f"{notebook.stem}-1.png" in page and first.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_site_with_mistakes_is_not_built(tmp_path):
    """Links to a missing page, a missing heading, and a name that does not exist."""
    root = tmp_path / "checkout"
    root.mkdir()
    for folder in (
        "benchmarks",
        "docs",
        "keras_vit",
        "keras_vit_cli",
        "notebooks",
        "tests",
        "training",
    ):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("node_modules"))
    for file in (*ROOT.glob("*.md"), *ROOT.glob("mkdocs.yml"), ROOT / "savedmodels" / "README.md"):
        place = root / file.relative_to(ROOT)
        place.parent.mkdir(exist_ok=True)
        shutil.copy(file, place)
    with (root / "README.md").open("a") as page:
        page.write("\n[a](docs/none.md) [b](docs/vit.md#none) [c][keras_vit.none]\n")
    built = build(root, tmp_path / "site")
    assert built.returncode == 1
    for mistake in ("'docs/none.md'", "'docs/vit.md#none'", "'keras_vit.none'"):
        assert mistake in built.stderr, built.stderr[-3000:]
