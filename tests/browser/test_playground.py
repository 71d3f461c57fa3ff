"""The page of `keras-vit serve` in a real browser: by mouse, by keyboard, on a phone."""

import base64
import json
import os
import time
from pathlib import Path

import chromium_pipe
import numpy as np
import pytest
import running_server
from conformance import KINDS, randomize
from PIL import Image

import keras_vit
from keras_vit import ViT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.backend_free,
    pytest.mark.skipif(chromium_pipe.path() is None, reason="chromium is not installed"),
]

ATTACK = "</script><img src=x onerror=alert(1)>"
CONFIG = KINDS["paper"].replace(
    image_size=(40, 56), num_classes=4, labels=("cat", "dog", ATTACK, "emu"), crop_fraction=0.8
)
FOLDER = os.environ.get("KERAS_VIT_SCREENSHOTS")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    model = randomize(ViT(CONFIG))
    model.save(folder / "flowers.keras")
    keras_vit.export_onnx(model, folder / "flowers.onnx")
    headless = randomize(ViT(CONFIG.replace(num_classes=0, labels=None)))
    headless.save(folder / "features.keras")
    models = {
        "flowers": folder / "flowers.keras",
        "export": folder / "flowers.onnx",
        "features": folder / "features.keras",
    }
    with running_server.running(models, engine="keras") as server:
        yield server


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with chromium_pipe.Chromium(tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 10, 3), dtype=np.uint8)
    file = tmp_path_factory.mktemp("pictures") / "photo.jpg"
    Image.fromarray(pixels).resize((640, 400)).save(file)
    return file


@pytest.fixture
def open_page(chromium, server):
    pages = []

    def make(width=1100, height=900, scheme="light"):
        pages.append(
            chromium_pipe.Page(chromium, server.url, width, height, scheme, "[data-ready]")
        )
        return pages[-1]

    yield make
    for page in pages:
        assert page.problems == []
        outside = [url for url in page.requests if not url.startswith((server.url, "data:"))]
        assert outside == []
        page.close()


def choose(page, file):
    """Chooses a file as its dialog does."""
    looked = count(page)
    root = page.send("DOM.getDocument")["root"]["nodeId"]
    node = page.send("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
    page.send("DOM.setFileInputFiles", nodeId=node, files=[str(file)])
    wait(page, looked)


def count(page):
    return int(page.value("document.documentElement.dataset.looked || 0"))


def wait(page, looked):
    end = time.monotonic() + 120
    while count(page) == looked:
        assert time.monotonic() < end, page.text("#status")
        time.sleep(0.05)


def shoot(page, name):
    if FOLDER:
        page.screenshot(Path(FOLDER) / f"{name}.png")


def shown(page):
    return page.value("document.querySelector('#image').ariaLabel")


def test_picture_shows_classes_and_maps(open_page, photo):
    page = open_page()
    assert page.value("document.querySelector('#result').hidden")
    choose(page, photo)
    labels = page.value("[...document.querySelectorAll('#classes li')].map(e => e.textContent)")
    assert len(labels) == 4 and all(label.rstrip().endswith("%") for label in labels)
    assert any(label.startswith(ATTACK) for label in labels)  # as text
    assert page.value("document.querySelectorAll('img').length") == 0
    scores = page.value(
        "[...document.querySelectorAll('#classes i')].map(e => parseFloat(e.style.width))"
    )
    assert scores == sorted(scores, reverse=True) and abs(sum(scores) - 100) < 0.1
    assert shown(page).startswith("The picture with the map Grad-CAM")
    assert "cropped" in page.text("#caption")
    shoot(page, "desktop")
    page.click("#choices label:first-child")
    assert shown(page) == "The picture with the map Attention rollout"
    with_map = page.value("document.querySelector('#image').toDataURL()")
    page.click("#choices label:last-child")
    assert shown(page) == "The picture"
    assert page.value("document.querySelector('#image').toDataURL()") != with_map
    assert page.value("document.querySelector('#scale').hidden")


def test_export_says_why_it_explains_nothing(open_page, photo):
    page = open_page()
    choose(page, photo)
    looked = count(page)
    page.value("document.querySelector('#model').value = '1'")
    page.value("document.querySelector('#model').dispatchEvent(new Event('change'))")
    wait(page, looked)
    assert "This is an export (onnx)" in page.text("#why")
    assert page.value("document.querySelector('#maps').hidden")
    assert page.value("document.querySelectorAll('#classes li').length") == 4
    shoot(page, "export")
    looked = count(page)
    page.value("document.querySelector('#model').value = '2'")
    page.value("document.querySelector('#model').dispatchEvent(new Event('change'))")
    wait(page, looked)
    assert page.value("document.querySelector('#answer').hidden")
    assert shown(page) == "The picture with the map Attention rollout"


def test_page_works_by_keyboard_and_on_a_phone(open_page, photo):
    page = open_page(390, 800, "dark")
    focus = "document.activeElement.id || document.activeElement.name"
    page.press("Tab")
    assert page.value(focus) == "model"
    page.press("Tab")
    assert page.value(focus) == "file"
    choose(page, photo)
    page.press("Tab")
    assert page.value(focus) == "map"
    page.press("ArrowUp")
    assert shown(page) == "The picture with the map Attention, last layer"
    page.press("Tab")
    assert page.value(focus) == "strength"
    before = page.value("document.querySelector('#image').toDataURL()")
    page.press("Home")
    assert page.value("document.querySelector('#image').toDataURL()") != before
    assert page.value("document.documentElement.scrollWidth") <= 390
    small = "[...document.querySelectorAll('select, #drop label, #choices label')]"
    heights = page.value(f"{small}.map(e => e.getBoundingClientRect().height)")
    assert min(heights) >= 40  # to be hit by a thumb
    page.press("End")
    shoot(page, "phone")


def test_dropped_text_is_refused_in_words(open_page, tmp_path, photo):
    page = open_page()
    drop = (
        "(() => {{ const data = new DataTransfer(); data.items.add(new File([Uint8Array.from("
        "atob({}), c => c.charCodeAt(0))], 'x.jpg')); document.dispatchEvent(new DragEvent("
        "'drop', {{ dataTransfer: data, bubbles: true, cancelable: true }})) }})()"
    )
    for content, result in ((b"no picture", False), (photo.read_bytes(), True)):
        looked = count(page)
        page.value(drop.format(json.dumps(base64.b64encode(content).decode())))
        wait(page, looked)
        assert page.value("document.querySelector('#result').hidden") is not result
        assert page.text("#status").startswith("The picture cannot be used") is not result
    errors = [entry for entry in page._events("Log.entryAdded") if "400" in str(entry)]
    page._browser.events[:] = [e for e in page._browser.events if e.get("params") not in errors]
