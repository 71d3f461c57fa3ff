"""docs/browser in a real browser: an exported file gives the same results as in Python."""

import base64
import json
import shutil
import time
from pathlib import Path

import chromium_pipe
import numpy as np
import pytest
from classifier_visit import Visit
from conformance import TINY, randomize
from PIL import Image

from keras_vit import ViT, preprocessing, runtime
from keras_vit.export.tflite.export import export_tflite
from keras_vit.runtime.tflite import TFLiteRuntime

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.backend_free,
    pytest.mark.skipif(chromium_pipe.path() is None, reason="chromium is not installed"),
]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "browser"
TRAINED = ROOT / "runs" / "cifar10" / "model.keras"
# The largest difference of a probability between two builds of one runtime. Values that are
# scaled by the input round differently if the processor adds up products in another way.
BOUNDS = {None: 1e-5, "float16": 1e-5, "dynamic": 0.03, "int8": 0.03}
CONFIG = TINY.replace(
    num_classes=7,
    labels=("cat", "dog", "élan", "<b>emu</b>", "fox", "gnu", "hen"),
    pixel_mean=(0.4, 0.5, 0.6),
    pixel_std=(0.2, 0.3, 0.25),
)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with chromium_pipe.Chromium(tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


@pytest.fixture(scope="module")
def model():
    return randomize(ViT(CONFIG))


@pytest.fixture(scope="module")
def files(model, tmp_path_factory):
    """The tiny model in several forms, by name."""
    folder, files = tmp_path_factory.mktemp("files"), {}
    for name, options in {
        "plain": {},
        "float16": {"quantize": "float16"},
        "dynamic": {"quantize": "dynamic"},
        "int8": {"quantize": "int8", "calibration": patches(20, seed=9)},
        "pixels": {"output": "logits", "images": "uint8", "activation": "sigmoid"},
        "features": {"output": "features"},
        "four": {"batch_size": 4},
        "any": {"batch_size": None},
    }.items():
        # Random weights are worse for int8 than trained ones.
        files[name] = export_tflite(model, folder / f"{name}.tflite", bound=0.5, **options).path
    return files


@pytest.fixture(scope="module")
def site(npm_install, served, files, tmp_path_factory):
    """The page on a server, with a model beside it."""
    folder = tmp_path_factory.mktemp("site")
    for file in PAGE.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    (folder / "node_modules").symlink_to(npm_install(PAGE / "package.json"))
    shutil.copy(files["plain"], folder / "model.tflite")
    return served(folder)


@pytest.fixture
def visit(chromium, site):
    page = Visit(chromium, site)
    yield page
    assert page.errors == [] and page.outside == []
    page.close()


def saved(folder, photos, kind="png"):
    files = []
    for i, picture in enumerate(photos):
        files.append(folder / f"{i}.{kind}")
        Image.fromarray(picture).save(files[-1])
    return files


def noise(count, size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *size, 3), "uint8")


def patches(count, seed=0):
    """Images of the tiny model's size with one color a patch, which it separates well."""
    return noise(count, CONFIG.grid, seed).repeat(8, axis=1).repeat(8, axis=2)


def compare(found, probabilities, labels, bound):
    """Compares rows with probabilities (B, K): order and numbers, with a negative control."""
    worst, likely = 0, np.sort(probabilities)[:, ::-1]
    for rows, expected, best in zip(found, probabilities, likely, strict=True):
        assert len(rows) == min(5, len(labels))
        values = [value for _, value in rows]
        assert values == sorted(values, reverse=True)
        worst = max(worst, *(abs(value - expected[labels.index(name)]) for name, value in rows))
        assert rows[0][0] == labels[expected.argmax()] or best[0] - best[1] < bound
    assert worst < bound
    assert (likely[:, 0] - likely[:, 1] > bound).mean() > 0.8
    tops = [rows[0] for rows in found]
    others = [
        abs(v - p[labels.index(n)]) for (n, v), p in zip(tops, probabilities[::-1], strict=True)
    ]
    assert max(others) > 3 * bound
    return worst


# -- the predictions


@pytest.mark.parametrize("quantize", list(BOUNDS))
def test_page_classifies_as_python_does(visit, files, tmp_path, quantize):
    model = TFLiteRuntime(files[quantize or "plain"])
    photos = patches(6)
    visit.choose("model", model.path)
    found = []
    for file in saved(tmp_path, photos):
        visit.choose("picture", file)
        found.append(visit.rows())
    compare(found, model.probabilities(photos), CONFIG.labels, BOUNDS[quantize])


def test_page_runs_pixels_to_logits(visit, files, tmp_path):
    model = TFLiteRuntime(files["pixels"])
    photos = patches(4)
    visit.choose("model", model.path)
    found = []
    for file in saved(tmp_path, photos):
        visit.choose("picture", file)
        found.append(visit.rows())
    compare(found, model.probabilities(photos), CONFIG.labels, 1e-5)


@pytest.mark.parametrize("quantize", [None, "dynamic"])
def test_page_classifies_real_images_as_python_does(visit, tmp_path, quantize):
    if not TRAINED.exists():
        pytest.skip("runs/cifar10 has no model: python -m training.train cifar10")
    import tensorflow_datasets as tfds

    if not tfds.builder("cifar10").is_prepared():
        pytest.skip("cifar10 is not prepared")
    batch = tfds.load("cifar10", split="test[:20]", batch_size=-1, download=False)
    photos, classes = batch["image"].numpy(), batch["label"].numpy()
    path = tmp_path / "cifar10.tflite"
    export_tflite(runtime.open(TRAINED).model, path, quantize=quantize, bound=0.2)
    model = TFLiteRuntime(path)
    visit.choose("model", path)
    found = []
    for file in saved(tmp_path, photos):
        visit.choose("picture", file)
        found.append(visit.rows())
    labels = model.labels
    worst = compare(found, model.probabilities(photos), labels, BOUNDS[quantize])
    right = np.mean([rows[0][0] == labels[c] for rows, c in zip(found, classes, strict=True)])
    print(f"{quantize}: largest difference {worst:.2g}, {right:.0%} right")
    assert right > 0.6


def test_page_resizes_as_python_does(visit, files, tmp_path):
    model = TFLiteRuntime(files["plain"])
    smooth = Image.fromarray(noise(1, (5, 6))[0]).resize((131, 97), Image.Resampling.BICUBIC)
    smooth.save(tmp_path / "a.png")
    smooth.convert("L").save(tmp_path / "gray.png")
    smooth.save(tmp_path / "b.jpg", quality=95)
    Image.fromarray(noise(1, (9, 7))[0]).save(tmp_path / "small.bmp")
    for file in sorted(tmp_path.iterdir()):
        with Image.open(file) as picture:
            (expected,) = model.probabilities(preprocessing.preprocess(picture, CONFIG))
        visit.choose("picture", file)
        for name, value in visit.rows():
            # JPEG decoders differ by a level or two, and resizing rounds to one level.
            assert abs(value - expected[CONFIG.labels.index(name)]) < 5e-3, file.name


def test_pixels_agree_with_preprocess(visit):
    """Every way to resize and crop, for color and gray, as floats and as pixels."""
    script = """(async () => {
      const {toInput} = await import('./pixels.js');
      const {size, pixels, records} = %s;
      const data = Uint8ClampedArray.from(atob(pixels), (c) => c.charCodeAt(0));
      return records.map((r) => Array.from(toInput(new ImageData(data, size[1], size[0]), r)));
    })()"""
    configs = [
        CONFIG.replace(resize_method=method, crop_fraction=crop, in_channels=channels, **contract)
        for method in ("nearest", "bilinear", "bicubic", "lanczos")
        for crop in (None, 0.875)
        for channels, contract in ((3, {}), (1, {"pixel_mean": 0.3, "pixel_std": 0.4}))
    ]
    for height, width in ((24, 16), (13, 9), (101, 47), (40, 130)):
        # No value reaches 0 or 255: Pillow clips between its two passes, in an order of its own.
        picture = 64 + noise(1, (height, width), seed=height)[0] // 2
        opaque = np.concatenate([picture, np.full((height, width, 1), 255, "uint8")], axis=-1)
        records = [
            {"config": config.to_dict(), "images": images}
            for config in configs
            for images in ("uint8", "float32")
        ]
        pixels = base64.b64encode(opaque.tobytes()).decode()
        given = {"size": [height, width], "pixels": pixels, "records": records}
        answer = visit.send(
            "Runtime.evaluate",
            expression=script % json.dumps(given),
            awaitPromise=True,
            returnByValue=True,
        )
        found = answer["result"]["value"]
        for config, levels, floats in zip(configs, found[::2], found[1::2], strict=True):
            floats = np.float32(floats).reshape(config.input_shape)
            levels = np.uint8(levels).reshape(config.input_shape)
            expected = preprocessing.preprocess(Image.fromarray(picture), config)
            std = np.asarray(config.pixel_std, "float32")
            difference = abs(floats - expected) * std * 255  # in levels
            assert difference.max() < 1.01 and difference.mean() < 0.25, config
            np.testing.assert_allclose(
                preprocessing.normalize(levels, config), floats, rtol=0, atol=1e-6
            )
            assert (abs(floats[::-1] - expected) * std * 255).max() > 10


# -- using it


def test_page_accepts_dropped_files(visit, files, tmp_path):
    photos = noise(2, (24, 16), seed=5)
    one, other = saved(tmp_path, photos)
    visit.drop(one)
    first = visit.rows()
    visit.drop(other)
    assert visit.rows() != first and visit.said.startswith("1.png: ")
    visit.drop(files["pixels"])
    assert visit.said == "Ready." and visit.text("#about").startswith("pixels.tflite: 7 classes")
    assert not visit.value("document.querySelector('#answer').checkVisibility()")
    visit.drop(one)
    assert visit.rows() != first  # sigmoid, not softmax


@pytest.mark.parametrize("by", ["keyboard", "mouse"])
def test_page_opens_the_dialog(visit, tmp_path, by):
    (file,) = saved(tmp_path, noise(1, (24, 16)))
    visit.send("Page.setInterceptFileChooserDialog", enabled=True)
    if by == "keyboard":
        visit.press("Tab")
        assert visit.value("document.activeElement.id") == "picture"
        outline = "getComputedStyle(document.activeElement.parentElement).outlineStyle"
        assert visit.value(outline) == "solid"
        visit.press("Enter")
    else:
        visit.click("#drop")
    end = time.monotonic() + 60
    while not (opened := visit._events("Page.fileChooserOpened")):
        assert time.monotonic() < end
        time.sleep(0.02)
    node = opened[0]["backendNodeId"]
    visit.send("DOM.setFileInputFiles", files=[str(file)], backendNodeId=node)
    visit.done(file.name)
    rows = visit.rows()
    top, share = rows[0]
    assert visit.said.startswith(f"0.png: {top}, {100 * share:.1f} %, in ")
    size = "[...document.querySelectorAll('.bar')].map(e => e.getBoundingClientRect().width)"
    widths = np.asarray(visit.value(size))
    track = visit.value("document.querySelector('.track').getBoundingClientRect().width")
    np.testing.assert_allclose(widths / track, [value for _, value in rows], atol=0.01)
    assert visit.value("document.querySelectorAll('#classes b').length") == 0  # names are text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_readable_in_light_and_dark(chromium, site, tmp_path, scheme):
    page = Visit(chromium, site, scheme)
    (file,) = saved(tmp_path, noise(1, (24, 16)))
    page.choose("picture", file)
    with Image.open(page.screenshot(tmp_path / "page.png")) as shot:
        shades = np.asarray(shot.convert("L"), "float32")
    back = shades[3, 3]
    assert (back > 230) if scheme == "light" else (back < 40)
    assert (abs(shades - back) > 120).mean() > 0.005  # text that stands out
    page.close()


# -- errors


@pytest.mark.parametrize(
    "field, name, said",
    [
        ("picture", "text.png", "text.png is not a picture that this browser can read."),
        ("model", "text.png", "text.png: This is not a TFLite file. It must be a .tflite file"),
        ("model", "cut.tflite", "cut.tflite: This TFLite file is damaged"),
        ("model", "strange.tflite", "strange.tflite: This TFLite file does not say how it takes"),
        ("model", "features", "gives features, not classes. Export it with output="),
        ("model", "four", "takes 4 photos at a time. Export it with batch_size=1."),
        ("model", "any", "takes any number of photos at a time. Export it with batch_size=1."),
    ],
)
def test_page_reports_a_wrong_file_and_still_works(visit, files, tmp_path, field, name, said):
    content = files["plain"].read_bytes()
    (tmp_path / "text.png").write_text("this is a text, whatever its name says")
    (tmp_path / "cut.tflite").write_bytes(content[:200])
    (tmp_path / "strange.tflite").write_bytes(content.replace(b"keras_vit\0", b"sarek_tiv\0"))
    visit.choose(field, files.get(name, tmp_path / name))
    assert said in visit.problem
    assert visit.value("document.querySelector('#problem').checkVisibility()")
    model = TFLiteRuntime(files["plain"])
    photos = noise(1, (24, 16))
    visit.choose("picture", saved(tmp_path, photos)[0])
    (top,) = model.probabilities(photos).argmax(-1)
    assert visit.rows()[0][0] == CONFIG.labels[top]


@pytest.mark.parametrize("missing", ["model.tflite", "node_modules"])
def test_page_reports_missing_files(chromium, npm_install, served, files, tmp_path, missing):
    for file in PAGE.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    if missing == "node_modules":
        shutil.copy(files["plain"], tmp_path / "model.tflite")
    else:
        (tmp_path / "node_modules").symlink_to(npm_install(PAGE / "package.json"))
    page = Visit(chromium, served(tmp_path))
    page.wait("document.querySelector('#problem').textContent")
    if missing == "node_modules":
        assert 'Run "npm install" in the folder of this page.' in page.problem
        assert page.value("document.querySelector('#picture').disabled")
    else:
        assert page.problem.startswith("There is no model.tflite beside this page")
        assert page.value("document.querySelector('#picture').disabled")
        page.choose("model", files["plain"])
        page.choose("picture", saved(tmp_path, noise(1, (24, 16)))[0])
        assert len(page.rows()) == 5
    page.close()
