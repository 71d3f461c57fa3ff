"""The `export` command: what it reads, writes and prints."""

import json

import numpy as np
import pytest
from conformance import images, run, tiny_model
from PIL import Image
from typer.testing import CliRunner

import keras_vit
from keras_vit import images as image_files
from keras_vit import runtime
from keras_vit_cli import export, main

pytestmark = pytest.mark.only_on("tensorflow")


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        return CliRunner().invoke(main.app, ["export", *map(str, arguments)])

    return call


def test_export_of_a_run_folder(call, tmp_path):
    model = tiny_model()
    (tmp_path / "runs" / "flowers").mkdir(parents=True)
    model.save(tmp_path / "runs" / "flowers" / "model.keras")
    (tmp_path / "labels.txt").write_text("Rose\nÉglantine\nFern\n", encoding="utf-8")
    done = call("runs/flowers", "--to", "saved_model", "--labels", "labels.txt", "--top-k", 2)
    assert done.exit_code == 0, done.exception
    rows = dict(line.split("\t") for line in done.stdout.splitlines())
    assert rows["file"] == "savedmodels/flowers/1"
    assert rows["same top class"] == "100.0% of 16 images"
    assert rows["verified on"].startswith("TensorFlow 2.")
    assert {"size", "latency", "largest difference", "picture files"} < set(rows)
    assert "; the model itself in float32 " in rows["latency"]
    opened = runtime.open("savedmodels/flowers")
    assert opened.labels == ("Rose", "Églantine", "Fern")
    x = images(model.config)
    np.testing.assert_allclose(opened.logits(x), run(model, x), atol=1e-4)
    assert call("savedmodels/flowers", "--to", "saved_model").exit_code == 1


def test_export_for_phones(call, tmp_path):
    model = tiny_model(labels=("cat", "dog", "emu"))
    model.save(tmp_path / "pets.keras")
    answers = runtime.open(tmp_path / "pets.keras")
    for i in range(6):  # each image in the folder of its predicted class: an accuracy of 100 %
        pixels = np.random.default_rng(i).integers(0, 256, (24, 16, 3), dtype=np.uint8)
        name = model.config.labels[answers.logits(pixels[None])[0].argmax()]
        (tmp_path / "photos" / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i}.png")
    options = ("--quantize", "int8", "--calibration", "photos", "--accuracy-data", "photos")
    done = call("pets.keras", "--to", "tflite", *options, "--max-drop", 100, "--batch-size", 0)
    assert done.exit_code == 0, done.exception
    rows = dict(line.split("\t") for line in done.stdout.splitlines())
    assert rows["file"] == "pets.tflite" and rows["size"].endswith("MB, int8")
    assert "the model's 100.00%, on 6 images" in rows["accuracy"]
    assert runtime.open("pets.tflite").labels == ("cat", "dog", "emu")
    again = call("pets.keras", "--to", "tflite")
    assert isinstance(again.exception, FileExistsError)
    (tmp_path / "empty").mkdir()
    for wrong, message in (
        (("--max-drop", 1), "--max-drop must come with --accuracy-data"),
        (("--quantize", "int8", "--calibration", "empty"), "empty: no image is in this folder"),
        (("--accuracy-data", "pets.keras"), "--accuracy-data must be a folder. Received: pets"),
    ):
        done = call("pets.keras", "--to", "tflite", "--overwrite", *wrong)
        assert done.exit_code == 1 and message in str(done.exception)
    (tmp_path / "photos" / "fox").mkdir()
    wrong = call("pets.keras", "--to", "tflite", "--overwrite", "--accuracy-data", "photos")
    assert "photos must contain folders named as classes: cat, dog, emu. Received: fox" in str(
        wrong.exception
    )


def test_export_of_a_model_without_a_head(call, tmp_path):
    tiny_model("features", depth=1).save(tmp_path / "eyes.keras")
    done = call("eyes.keras", "--to", "tflite")
    assert done.exit_code == 0, done.exception
    assert runtime.open("eyes.tflite").outputs == ("features",)
    (tmp_path / "photos").mkdir()
    wrong = call("eyes.keras", "--to", "tflite", "--overwrite", "--accuracy-data", "photos")
    assert "labeled images must be left out for a model without a head" in str(wrong.exception)


def test_calibration_images_are_chosen_evenly(monkeypatch):
    for files, count in ((3, 200), (200, 200), (399, 200), (1000, 200), (9, 5)):
        monkeypatch.setattr(image_files, "read_pixels", lambda path, config: int(path))
        monkeypatch.setattr(
            image_files, "find_images", lambda _, n=files: map(image_files.FoundImage, _names(n))
        )
        chosen = image_files.sample_images("photos", tiny_model().config, count)
        assert len(set(chosen)) == min(files, count)
        assert (chosen[0], chosen[-1]) == (0, files - 1)
        assert np.ptp(np.diff(chosen)) <= 1


def _names(count):
    return [str(number) for number in range(count)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "2"], "--batch-size must be left out with --to onnx"),
        (["--calibration", "photos"], "--calibration must be a folder. Received: photos"),
        (["--top-k", "2"], "--top-k must be left out with --to onnx. Received: --top-k"),
        (["--labels", "labels.txt"], "--labels must be a text in UTF-8. Received: labels.txt"),
        (["--labels", "none.txt"], "--labels must be a text file with the name of a class in each"),
        (["--labels", "none.txt"], "Received: none.txt, which does not exist"),
        (["--labels", "."], "Received: ., a folder"),
        (["--out", "labels.onnx"], "--out must not exist, or overwrite be True"),
        (["--out", "labels.txt/x.onnx"], "--out must be in a folder, and "),
        (["--out", "s3://bucket/x.onnx"], "--out must be a path on this machine and not a URL"),
        (["--out", "x.tflite"], "--out must end in .onnx. Received: --out='x.tflite'"),
    ],
)
def test_wrong_option_is_named_before_the_model_is_opened(call, tmp_path, options, message):
    (tmp_path / "labels.txt").write_bytes("Églantine".encode("latin-1"))
    (tmp_path / "labels.onnx").touch()
    done = call("no such model", "--to", "onnx", *options)
    assert done.exit_code == 1 and message in str(done.exception)


def test_export_of_an_onnx_file(call, tmp_path):
    model = tiny_model()
    model.save(tmp_path / "pets.keras")
    done = call("pets.keras", "--to", "onnx", "--dtype", "float16", "--out", "a/b.onnx", "--json")
    assert done.exit_code == 0, done.exception
    facts = json.loads(done.stdout)
    assert (facts["path"], facts["dtype"], facts["opset"]) == ("a/b.onnx", "float16", 20)
    wrong = call("pets.keras", "--to", "onnx", "--quantize", "float16")
    assert "quantize must be one of None, 'dynamic', 'int8'" in str(wrong.exception)


@pytest.mark.parametrize(("target", "suffix"), [("onnx", "onnx"), ("openvino", "xml")])
def test_export_in_int8_for_servers_and_its_info(call, tmp_path, target, suffix):
    pytest.importorskip(target)
    tiny_model(labels=("cat", "dog", "emu")).save(tmp_path / "pets.keras")
    (tmp_path / "photos").mkdir()
    for i in range(4):
        pixels = np.random.default_rng(i).integers(0, 256, (24, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{i}.png")
    options = ("--quantize", "int8", "--calibration", "photos", "--float-layers", "head")
    done = call("pets.keras", "--to", target, *options)
    assert done.exit_code == 0, done.exception
    rows = dict(line.split("\t") for line in done.stdout.splitlines())
    assert rows["file"] == f"pets.{suffix}" and rows["size"].endswith("MB, int8")
    said = CliRunner().invoke(main.app, ["info", f"pets.{suffix}"])
    assert said.exit_code == 0 and "int8, the rest in float32" in said.stdout
    assert "cat, dog, emu" in said.stdout
    facts = json.loads(CliRunner().invoke(main.app, ["info", f"pets.{suffix}", "--json"]).stdout)
    assert (facts["kind"], facts["quantize"]) == (target, "int8")
    shown = CliRunner().invoke(main.app, ["predict", f"pets.{suffix}", "photos", "--json"])
    assert shown.exit_code == 0 and len(shown.stdout.splitlines()) == 4


def test_export_without_tensorflow_says_how_to_get_it(call, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = call("none", "--to", "saved_model")
    assert isinstance(done.exception, ImportError)
    assert "pip install 'keras3-vit[export]'" in str(done.exception)


def test_export_of_a_checkpoint_as_json(call, tmp_path):
    model = tiny_model()
    keras_vit.save_pretrained(model, tmp_path / "tiny", "timm")
    done = call("tiny", "--to", "saved_model", "--out", "x/y", "--version", 7, "--json")
    assert done.exit_code == 0, done.exception
    facts = json.loads(done.stdout)
    assert (facts["path"], facts["version"], facts["dtype"]) == ("x/y/7", 7, "float32")
    assert facts["verification"]["same_top_class"] == 1
    again = call("tiny", "--to", "saved_model", "--out", "x/y", "--version", 7)
    assert again.exit_code == 1 and "Received: version=7" in str(again.exception)


@pytest.mark.parametrize(
    "source, name",
    [
        ("runs/flowers", "flowers"),
        ("runs/flowers/model.keras", "flowers"),
        ("ViT-B_16.npz", "ViT-B_16"),
        ("a/b.weights.h5", "b"),
        ("vit_b16.dino", "vit_b16.dino"),
        ("hf://timm/vit_base.dino@main", "vit_base.dino_main"),
    ],
)
def test_name_of_the_export(source, name):
    assert export._name(source) == name
