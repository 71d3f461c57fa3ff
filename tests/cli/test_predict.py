"""The `predict` command: its scores, its output, and damaged images."""

import functools
import io
import json
import os
import struct
import zlib

import keras
import numpy as np
import pytest
from conformance import run, tiny_model
from PIL import Image
from typer.testing import CliRunner

from keras_vit import preprocessing, runtime
from keras_vit.export.saved_model.export import export_saved_model
from keras_vit.images import IMAGE_FORMATS, find_images, read_image, read_pixels
from keras_vit_cli import main

pytestmark = pytest.mark.backend_free

LABELS = ("cat", "dog\t[red]", "élan")


@pytest.fixture(scope="module")
def model():
    return tiny_model(labels=LABELS, pixel_mean=(0.4, 0.5, 0.6), crop_fraction=0.9)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict")
    model.save(folder / "model.keras")
    (folder / "photos" / "inside" / ".hidden").mkdir(parents=True)
    for i, name in enumerate(("c.png", "a.jpg", "inside/b.webp", "inside/.hidden/d.png")):
        photo(i).save(folder / "photos" / name, quality=95)
    (folder / "photos" / "notes.txt").write_text("not an image")
    return folder


@pytest.fixture(scope="module")
def opening():
    """`runtime.open` with a cache, so that a model compiles once and not in every test."""
    return functools.cache(runtime.open)


@pytest.fixture
def call(folder, opening, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(runtime, "open", opening)

    def call(*arguments):
        return CliRunner().invoke(main.app, ["predict", *map(str, arguments)])

    return call


def photo(seed, size=(40, 30)):
    pixels = np.random.default_rng(seed).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(size)


def wanted(model, *files):
    """The probabilities that the model itself gives for preprocessed files."""
    images = preprocessing.preprocess([Image.open(file) for file in files], model.config)
    return np.asarray(keras.ops.softmax(run(model, images)))


# -- the predictions


def test_predict_json_has_the_model_s_probabilities(call, model):
    done = call("model.keras", "photos", "--json", "--batch-size", 2)
    assert done.exit_code == 0, done.exception
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    files = ["photos/a.jpg", "photos/c.png", "photos/inside/b.webp"]
    assert [line["image"] for line in lines] == files
    rows = wanted(model, *files)
    assert np.abs(rows - rows[::-1]).max() > 0.01
    for line, row in zip(lines, rows, strict=True):
        assert [c["class"] for c in line["classes"]] == np.argsort(-row).tolist()
        for found in line["classes"]:
            assert found["label"] == LABELS[found["class"]]
            assert found["score"] == pytest.approx(row[found["class"]], abs=1e-5)


def test_predict_prints_columns_for_a_pipe(call, model):
    done = call("model.keras", "photos/c.png", "--top-k", 2)
    (row,) = wanted(model, "photos/c.png")
    best = np.argsort(-row)[:2]
    assert done.exit_code == 0 and done.stderr == ""
    fields = [line.split("\t") for line in done.stdout.splitlines()]
    names = [LABELS[i].replace("\t", "\\t") for i in best]
    assert [(image, label) for image, label, _ in fields] == [("photos/c.png", n) for n in names]
    np.testing.assert_allclose([float(score) for *_, score in fields], row[best], atol=1e-5)


@pytest.mark.parametrize("columns", [50, 120])
def test_predict_draws_bars_on_a_terminal(call, terminal, columns):
    console = terminal("out", columns, file=io.StringIO())
    done = call(".", "photos/inside", "photos/a.jpg")
    assert done.exit_code == 0, done.exception
    text = console.file.getvalue()
    assert text.index("photos/inside/b.webp") < text.index("photos/a.jpg")
    assert "dog\\t[red]" in text and "━" in text
    assert all(len(line) <= columns + 8 for line in text.splitlines())  # and the codes for bold


def test_predict_progress_stays_out_of_the_results(call, terminal):
    console = terminal("err", file=io.StringIO())
    done = call("model.keras", "nothing.png", "photos", "--json", "--batch-size", 1)
    assert done.exit_code == 1  # although the last batches are valid
    assert [set(json.loads(line)) for line in done.stdout.splitlines()] == [
        {"image", "error"},
        *[{"image", "classes"}] * 3,
    ]
    assert "3/4" in console.file.getvalue() and "nothing.png: there is" in console.file.getvalue()


def test_predict_with_sigmoid_scores_and_unnamed_classes(call, tmp_path):
    model = tiny_model(classifier_activation="sigmoid", in_channels=1)
    model.save(tmp_path / "model.keras")
    done = call(tmp_path, "photos/a.jpg", "--json")
    (line,) = map(json.loads, done.stdout.splitlines())
    row = run(model, preprocessing.preprocess(Image.open("photos/a.jpg"), model.config))[0]
    assert abs(row.sum() - 1) > 0.01
    scores = {c["label"]: c["score"] for c in line["classes"]}
    assert scores == pytest.approx({str(i): float(row[i]) for i in range(3)}, abs=1e-5)


@pytest.mark.slow
def test_predict_passes_pixels_to_an_export_for_pixels(call, tmp_path, model):
    export_saved_model(model, tmp_path / "export", images="uint8", labels=("a", "b", "c"))
    done = call(tmp_path / "export", "photos/a.jpg", "photos/c.png", "--json")
    assert done.exit_code == 0, done.exception
    rows = wanted(model, "photos/a.jpg", "photos/c.png")
    for line, row in zip(map(json.loads, done.stdout.splitlines()), rows, strict=True):
        scores = {c["label"]: c["score"] for c in line["classes"]}
        assert scores == pytest.approx(dict(zip("abc", row.tolist(), strict=True)), abs=1e-4)


def test_pixels_agree_with_preprocess(model, folder):
    for name in ("a.jpg", "c.png"):
        pixels = read_pixels(str(folder / "photos" / name), model.config)
        image = preprocessing.preprocess(Image.open(folder / "photos" / name), model.config)[0]
        assert pixels.dtype == np.uint8
        np.testing.assert_allclose(preprocessing.normalize(pixels, model.config), image, atol=1e-6)
        assert np.abs(preprocessing.normalize(pixels[::-1], model.config) - image).max() > 0.1


def test_predict_passes_pixels_to_a_runtime(call, model, monkeypatch):
    given = []

    class Recorder(runtime.KerasRuntime):
        def probabilities(self, images):
            given.append((images.dtype, images.shape))
            return super().probabilities(images)

    monkeypatch.setattr(runtime, "open", lambda path: Recorder(model, path))
    assert call("tiny", "photos", "nothing.png", "photos/a.jpg", "--batch-size", 2).exit_code == 1
    assert given == [(np.uint8, (2, 24, 16, 3))] * 2  # a failed file takes no place in a batch


# -- what is refused


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"num_classes": 0}, "must have a head"),
        ({"pooling": None}, "must pool its tokens"),
        ({"in_channels": 4}, "Received: tiny, with in_channels=4"),
    ],
)
def test_predict_refuses_a_model_without_predictions(call, monkeypatch, changes, text):
    model = tiny_model(**changes)
    monkeypatch.setattr(runtime, "open", lambda path: runtime.KerasRuntime(model, path))
    done = call("tiny", "photos")
    assert done.exit_code == 1 and isinstance(done.exception, ValueError)
    assert text in str(done.exception)


def test_predict_refuses_scores_that_are_not_finite(call, monkeypatch):
    model = tiny_model()
    head = model.get_layer("head").bias
    head.assign(np.array([0, np.nan, 0]))
    monkeypatch.setattr(runtime, "open", lambda path: runtime.KerasRuntime(model, path))
    done = call("tiny", "photos/a.jpg", "--json")
    assert done.exit_code == 1 and "not a finite number" in json.loads(done.stdout)["error"]


@pytest.mark.parametrize(
    "arguments", [["model.keras"], [], ["model.keras", "a.png", "--top-k", "0"]]
)
def test_usage_error_of_predict_is_exit_code_2(call, arguments):
    assert call(*arguments).exit_code == 2


def test_predict_without_any_image_opens_no_model(call, tmp_path):
    done = call("there/is/no/model", "none.png", "photos/*.bmp", tmp_path, "/dev/null")
    assert done.exit_code == 1 and done.stdout == ""
    for line, text in zip(
        done.stderr.splitlines(),
        ("no such file", "no file matches", "no image is in this folder", "neither a file nor"),
        strict=True,
    ):
        assert line.startswith("keras-vit: error: ") and text in line


def test_predict_continues_after_a_damaged_image(call, tmp_path):
    broken = hostile(tmp_path)
    photo(7).save(tmp_path / "right.png")
    done = call("model.keras", tmp_path, "--json", "--batch-size", 3)
    assert done.exit_code == 1
    lines = {line["image"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert "classes" in lines.pop(str(tmp_path / "right.png"))
    errors = {os.path.basename(name): line["error"] for name, line in lines.items()}
    assert set(errors) == set(broken)
    for name, text in broken.items():
        assert text in errors[name], name
    assert len(done.stderr.splitlines()) == len(broken)  # and nothing from libraries
    assert "steers\\x1b[2J.jpg" in done.stderr and "\x1b" not in done.stderr


def hostile(folder):
    """Writes files that cannot be read; returns the error for each, by name."""
    file = io.BytesIO()
    photo(0, (200, 150)).save(file, "JPEG")
    jpeg = file.getvalue()
    photo(0, (200, 150)).save(file := io.BytesIO(), "PNG")
    flipped = bytearray(file.getvalue())
    flipped[len(flipped) // 2] ^= 255
    contents = {
        "empty.jpg": (b"", "the file is empty"),
        "text.jpg": (b"no image", "not an image that can be read (JPEG, PNG, WEBP"),
        "steers\x1b[2J.jpg": (b"not an image", "not an image"),
        "eps.png": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        "half.jpg": (jpeg[: len(jpeg) // 2], "cut off or damaged"),
        "header.jpg": (jpeg[:100], "cut off or damaged"),
        "bit.png": (bytes(flipped), "cut off or damaged"),
        "bomb.png": (_png(65_500, 65_500), "too many pixels; at most 89,478,485"),
        "large.png": (_png(12_000, 9_000), "too many pixels"),  # Pillow only warns of this one
        "narrow.png": (_png(1, 2_000_000), "which becomes"),
    }
    for name, (content, _) in contents.items():
        (folder / name).write_bytes(content)
    Image.fromarray(np.zeros((4, 5), "float32")).save(folder / "float.tif")
    return {"float.tif": "32-bit numbers", **{name: text for name, (_, text) in contents.items()}}


def _png(width, height):
    """A black PNG of any size in a few hundred bytes."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    data = zlib.compress(b"\0" * (min(width * height, 10**6) * 4))
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def test_read_image_reads_every_format(tmp_path):
    original = np.asarray(photo(3))
    for kind, endings in IMAGE_FORMATS.items():
        path = tmp_path / f"picture{endings[0]}"
        photo(3).save(path, kind, **({"lossless": True} if kind == "WEBP" else {}))
        found = np.asarray(read_image(path).convert("RGB"), "float32")
        exact = kind not in ("JPEG", "GIF")
        assert np.abs(found - original).mean() <= (0 if exact else 12), kind
        assert np.abs(found - original[::-1]).mean() > 20


def test_find_images_keeps_the_order_of_its_arguments(folder, monkeypatch):
    monkeypatch.chdir(folder / "photos")
    (folder / "photos" / "x[1].png").write_bytes(b"")
    names = [item.path for item in find_images(["x[1].png", "notes.txt", "**/*.webp", "c.png"])]
    assert names == ["x[1].png", "notes.txt", os.path.join("inside", "b.webp"), "c.png"]
    (folder / "photos" / "x[1].png").unlink()
