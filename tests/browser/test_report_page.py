"""The page of `write_report` in a real browser: it loads offline, is correct and usable."""

import json
import re

import chromium_pipe
import numpy as np
import pytest
from conformance import KINDS, randomize
from PIL import Image

from keras_vit import ViT, explain, preprocessing
from keras_vit.explain import report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.backend_free,
    pytest.mark.skipif(chromium_pipe.path() is None, reason="chromium is not installed"),
]

CONFIG = KINDS["paper"].replace(
    image_size=(40, 56), num_registers=1, labels=("cat", "dog", "emu"), crop_fraction=0.8
)
ROWS, COLUMNS = CONFIG.grid
ATTACK = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with chromium_pipe.Chromium(tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


def photo(size=(90, 150)):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 10, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(pixels).resize(size[::-1]))


@pytest.fixture(scope="module")
def model():
    return randomize(ViT(CONFIG))


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    return explain.write_report(model, photo(), tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture
def page(chromium, file):
    page = chromium.page(file)
    yield page
    assert page.problems == []
    page.close()


def caption(page):
    return page.text("#attention-caption")


def chosen(page, group):
    return page.value(f"document.querySelector('input[name={group}]:checked').value")


def focus(page):
    return page.value("document.activeElement.id || document.activeElement.value")


# -- loading


def test_chromium_records_problems_and_requests(chromium, tmp_path):
    (tmp_path / "p.html").write_text(
        "<p>text</p><script>console.log(1); nothing()</script><img src='http://127.0.0.1:9/a.png'>"
    )
    page = chromium.page(tmp_path / "p.html", ready="img")
    assert len(page.problems) >= 2 and "http://127.0.0.1:9/a.png" in page.requests
    assert page.text("p") == "text"
    page.close()


@pytest.mark.parametrize(
    "kind, missing",
    [
        ("all_tokens", {"grad-cam", "attention-gradient", "answer"}),
        ("registers_only", set()),
        ("no_positions", {"positions"}),
        ("one_patch", {"filters", "colors"}),  # of five channels
        ("large", {"queries"}),
        ("map", set()),
    ],
)
def test_page_of_any_model_loads_offline(chromium, tmp_path, monkeypatch, kind, missing):
    one = KINDS["paper"].replace(image_size=8, in_channels=5)
    config = {"one_patch": one, "large": CONFIG}.get(kind) or KINDS[kind]
    if kind == "large":
        monkeypatch.setattr(report, "MOST_ATTENTION", 1)
    pixels = np.random.default_rng(0).integers(0, 256, (60, 40, config.in_channels))
    file = explain.write_report(randomize(ViT(config)), pixels, tmp_path / "page.html")
    page = chromium.page(file)
    assert page.problems == []
    assert [url for url in page.requests if not url.startswith("data:")] == [file.as_uri()]
    hidden = (
        "[...document.querySelectorAll('figure canvas, figure svg, #answer, #queries')]"
        ".filter(e => e.getClientRects().length === 0).map(e => e.id)"
    )
    assert set(page.value(hidden)) == missing | (set() if kind == "map" else {"pooling"})
    assert ("takes more than" in page.text("#attention-note")) == (kind == "large")
    page.close()


def test_page_does_not_run_code_in_labels(chromium, tmp_path):
    model = randomize(ViT(CONFIG.replace(labels=(ATTACK, "b", "c"))))
    page = chromium.page(explain.write_report(model, photo(), tmp_path / "p.html", title=ATTACK))
    assert page.problems == [] and page.value("document.querySelectorAll('img').length") == 0
    assert page.text("h1") == ATTACK and page.value("document.title") == ATTACK
    labels = "[...document.querySelectorAll('#explained-classes span')].map(s => s.textContent)"
    assert ATTACK in page.value(labels)
    assert "".join(re.findall(r"[<>]", page.text("#classes"))) == "<><>"
    page.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_page_fits_its_window_in_light_and_dark(chromium, file, tmp_path, width):
    page = chromium.page(file, width=width)
    shades = {}
    for scheme in ("light", "dark"):
        page.show(scheme)
        with Image.open(page.screenshot(tmp_path / f"{scheme}.png")) as shot:
            assert shot.width == width and shot.height > 1500
            shades[scheme] = np.asarray(shot.convert("L"))
        wide = (
            "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') && "
            "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
        )
        assert page.value(wide) == []
        assert page.value("document.documentElement.scrollWidth") == width
    assert shades["light"][5, 5] > 230 and shades["dark"][5, 5] < 40
    assert page.problems == []
    page.close()


# -- what is drawn


def colors(page, canvas):
    """The color of a canvas near the upper left corner of each patch, where there is no frame."""
    script = """(() => {
      const canvas = document.querySelector(%s), [l, t, w, h] = data.image.seen;
      const {width, height} = canvas;
      const copy = new OffscreenCanvas(width, height).getContext("2d", {willReadFrequently: true});
      copy.drawImage(canvas, 0, 0);
      return Array.from({length: PATCHES}, (_, i) => [
        ...copy.getImageData(
          (l + w * ((i %% COLUMNS) + 0.3) / COLUMNS) * width,
          (t + h * (Math.floor(i / COLUMNS) + 0.3) / ROWS) * height, 1, 1).data,
      ]);
    })()"""
    return np.asarray(page.value(script % json.dumps(canvas)))[:, :3]


def viridis(values):
    from matplotlib import colormaps

    return 255 * np.asarray(colormaps["viridis"](values))[..., :3]


def test_page_draws_the_weights_at_their_patches(page, model):
    page.value("document.querySelector('#strength').focus()")
    page.press("End")
    x = preprocessing.preprocess(photo(), CONFIG)
    maps = explain.attention_maps(model, x)[:, 0]  # (L, h, T, T)
    last = maps[-1].mean(0)[0, 2:]
    found = colors(page, "#attention-map")
    assert np.abs(found - viridis(last / last.max())).max() < 8
    assert np.abs(found - viridis(last[::-1] / last.max())).max() > 60
    page.click("#heads label:nth-child(4)")  # after the mean: head 2
    page.value("document.querySelector('#layer').focus()")
    page.press("Home")
    page.click("#attention-map", 0.5, 0.5)
    one = maps[0, 2, 2 + (ROWS // 2) * COLUMNS + COLUMNS // 2]
    found = colors(page, "#attention-map")
    assert np.abs(found - viridis(one[2:] / one[2:].max())).max() < 8
    assert f"{100 * one[2:].max():.3g} %" in caption(page).replace(".0 %", " %")
    share = float(re.findall(r"([\d.]+) % on tokens that are not patches", caption(page))[0])
    assert share == pytest.approx(100 * one[:2].sum(), rel=0.01)
    rollout = explain.rollout_map(model, x)[0].ravel()
    assert np.abs(colors(page, "#rollout") - viridis(rollout / rollout.max())).max() < 8


# -- using it


def test_page_works_by_mouse(page):
    assert caption(page).startswith("Layer 1, mean of the heads, class token:")
    page.click("#layer", 0.01)
    page.click("#heads label:nth-child(3)")
    assert caption(page).startswith("Layer 0, head 1, class token:")
    page.click("#query-tokens label:nth-child(2)")
    assert caption(page).startswith("Layer 0, head 1, register 0:")
    left, top, width, height = page.value("data.image.seen")
    page.click("#attention-map", left + width * 0.99, top + height * 0.01)
    place = f"row 0, column {COLUMNS - 1}"
    assert f"patch in {place}:" in caption(page) and chosen(page, "query") == "patch"
    assert page.value("document.querySelector('#query-column').value") == str(COLUMNS - 1)
    page.click("#attention-map", left / 2, 0.5)  # outside the part that the model sees
    assert f"patch in {place}:" in caption(page)
    page.click("#similarity", left + width * 0.01, top + height * 0.99)
    label = page.value("document.querySelector('#similarity').getAttribute('aria-label')")
    assert label == f"Similarity with the patch in row {ROWS - 1}, column 0"
    before = page.value("document.querySelector('#grad-cam').toDataURL()")
    page.click("#explained-classes label:nth-child(2)")
    assert page.value("document.querySelector('#grad-cam').toDataURL()") != before
    page.click("#theme")
    assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(19, 20, 22)"
    page.click("#theme")
    assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(246, 246, 244)"
    page.click("summary")
    assert page.value("document.querySelector('#numbers').offsetParent !== null")


def test_page_works_by_keyboard(page):
    seen = []
    for _ in range(12):
        page.press("Tab")
        seen.append(focus(page))
        outlined = page.value(
            "(e => getComputedStyle(e.name === 'head' ? e.nextElementSibling : e).outlineStyle)"
            "(document.activeElement)"
        )
        assert outlined == "solid", seen
        if seen[-1] == "theme":
            page.press(" ")
            assert page.value("document.documentElement.dataset.theme") == "dark"
        elif seen[-1] == "layer":
            page.press("ArrowLeft")
            assert caption(page).startswith("Layer 0,")
        elif seen[-1] == "mean":
            page.press("ArrowRight", "ArrowRight")
            assert chosen(page, "head") == "1" and "head 1," in caption(page)
        elif seen[-1] == "0" and chosen(page, "query") == "0":
            page.press("ArrowDown")
            assert "register 0:" in caption(page)
        elif seen[-1] == "query-row":
            page.press("Backspace", "9")
            assert f"row {ROWS - 1}, column" in caption(page)  # there is no row 9: the last one
        elif seen[-1] == "query-column":
            assert page.value("document.querySelector('#query-row').value") == str(ROWS - 1)
            page.press("Backspace", "0")
            assert f"row {ROWS - 1}, column 0:" in caption(page)
        elif seen[-1] == "strength":
            page.press("ArrowRight")
            assert page.text("#strength-value") == "70 %"
        elif seen[-1] == "alike-column":
            break
    order = ["theme", "layer", "mean", "0", "query-row", "query-column", "strength"]
    assert seen[: len(order)] == order
    assert seen[-2:] == ["alike-row", "alike-column"]
