"""The blocks of the guides that are marked as run here, in order, on tiny models and images.

A tiny file stands in for a published one, and a tiny size for a published size. `SMALLER` has what
else is smaller than on the page. The blocks of a page share their names, as in a notebook.
"""

import inspect
import re
import shlex
import textwrap
from pathlib import Path

import keras
import numpy as np
import pytest
import running_server
from conformance import randomize
from PIL import Image

import keras_vit
from keras_vit_cli import main

pytestmark = [pytest.mark.slow, pytest.mark.backend_free, pytest.mark.timeout(900)]

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(
    r"<!-- run: tests/test_docs_runs.py -->\n(?:<!--[^\n]*\n)?```(\w+)\n(.*?)^```$", re.M | re.S
)
TINY = {"image_size": 32, "patch_size": 8, "width": 20, "depth": 2, "num_heads": 2, "mlp_dim": 12}
DIGITS = [
    *("model.config.patch_size=4", "model.config.width=16", "model.config.depth=1"),
    *("model.config.num_heads=2", "model.config.mlp_dim=24", "schedule.warmup_steps=1"),
    *("run.steps=4", "run.batch_size=700"),
]
SETTINGS = " ".join(f"--set {setting}" for setting in DIGITS)
SMALLER = {
    "choosing.md": {"[1, 5, 10]": "[1, 2]", "[2, 5, 8, 11]": "[0, 1]"},
    "deploy.md": {
        "token_merging=8": "token_merging=1",
        "max_drop=1.0": "max_drop=100",
        "keras-vit benchmark runs/flowers --calibration photos --accuracy-data flowers/test": (
            "keras-vit benchmark runs/flowers --seconds 0.1 --accuracy-data test --only onnx"
        ),
        "--batch-size 1 16": "--seconds 0.1 --batch-size 1 16",
        'only=["onnx", "saved_model"]': 'only=["onnx", "saved_model"], seconds=0.1',
        " | jq -r 'select(.error | not) | [.image, .classes[0].label] | @tsv'": "",
    },
    "faq.md": {'from_pretrained("model.keras"': 'from_pretrained("tiny"'},
    "distributed.md": {
        "--workdir runs/x   ": "--workdir runs/y   ",
        "epochs=10": "epochs=1, verbose=0",
    },
    "reliability.md": {"else 20": "else 1, verbose=0", "per_epoch=45": "per_epoch=2"},
    "serving.md": {
        "keras-vit export ViT-B_16.npz": "keras-vit export tiny",
        "keras-vit request cat.jpg --url grpc": "# grpc",
        ":8501/": ":PORT/",
    },
    "weights.md": {"patch_size=12": "patch_size=12, image_size=240"},
    "training.md": {
        '["run.epochs=10"]': f"[*{DIGITS}]",
        "[5, 10]": "[1]",
        "keras-vit train --recipe cifar10_scratch": "# cifar10",
        "keras-vit train --data flowers": "# flowers",
        "keras-vit evaluate runs/cifar10": "# cifar10",
        'Data("tfds:cifar10")': 'Data("folder", path="flowers", train=".[:90%]", test=".[90%:]")',
        "vit_ti16(num_classes=10": "vit_ti16(num_classes=2",
        "batch_size=128": "batch_size=4",
        "steps_per_epoch=390": "steps_per_epoch=1",
        "epochs=10,": "epochs=1,",
        "500, 10)": "4, 2)",
        "batches = batches.map(lambda images, labels": "mapped = raw.map(lambda images, labels",
        "(8, 10, 12, 15, 16, 20, 24, 30, 40, 48)": "(40, 48)",
        "flexi.fit(images, labels, epochs=90)": "flexi.fit(large, labels, verbose=0)",
        "train.remat(model)": "model = small; train.remat(model)",
    },
}


def run(page, names):
    """Runs the blocks of a page, and returns how many there were."""
    found = BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    text = "".join(code for _, code in found)
    for there, smaller in SMALLER.get(page, {}).items():
        assert there in text, there
        found = [(language, code.replace(there, smaller)) for language, code in found]
    for language, code in found:
        if language == "python":
            exec(compile(textwrap.dedent(code), page, "exec"), names)
        else:
            for line in re.findall(r"^keras-vit .*$", code.replace("\\\n", " "), re.M):
                command(line)
    return len(found)


def command(line):
    words = shlex.split(line, comments=True)[1:]
    if words[:3] == ["train", "--recipe", "digits"]:
        words += shlex.split(SETTINGS)
    with pytest.raises(SystemExit) as end:
        main.main(words)
    assert not end.value.code, line


@pytest.fixture
def names(tmp_path, monkeypatch):
    """A folder with the files that the pages name, and what their code takes for given."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    files = ["horse.png", "cat.jpg", "dog.png", "holiday/1.jpg", "more/a/2.png"]
    files += [f"flowers/{label}/{i}.jpg" for label in ("daisy", "rose") for i in range(12)]
    for file in files:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 50, 3), "uint8")).save(file)
    config = keras_vit.ViTConfig(**TINY, num_classes=3, labels=("bird", "frog", "horse"))
    model = randomize(keras_vit.ViT(config))
    keras_vit.save_pretrained(model, "tiny", format="timm")
    load = keras_vit.from_pretrained
    monkeypatch.setattr(
        keras_vit, "from_pretrained", lambda source, **fields: load("tiny", **fields)
    )
    for name in ("vit_b16", "vit_s16", "vit_ti16"):
        monkeypatch.setattr(keras_vit, name, tiny(getattr(keras_vit, name)))
    return {
        "keras": keras,
        "keras_vit": keras_vit,
        "model": model,
        "image": Image.open("horse.png"),
        "images": rng.normal(size=(12, 32, 32, 3)).astype("float32"),
        "labels": rng.integers(0, 3, 12),
        "photos": rng.integers(0, 256, (2, 40, 50, 3), "uint8"),
        "source": "tiny",  # of a checkpoint
    }


def tiny(factory):
    """A factory that checks its arguments as the real one, and makes a tiny model."""

    def make(num_classes=None, weights=None, **fields):
        inspect.signature(factory).bind(num_classes=num_classes, weights=weights, **fields)
        return factory(num_classes, **{**TINY, **fields})

    return make


def saved(model, *runs):
    for name in runs:
        Path("runs", name).mkdir(parents=True)
        model.save(f"runs/{name}/model.keras")


@pytest.mark.parametrize(
    ("page", "count"),
    [("choosing.md", 2), ("faq.md", 2), ("fetching.md", 1), ("gpu.md", 1), ("weights.md", 8)],
)
def test_page_runs(page, count, names):
    assert run(page, names) == count


def test_deploy_runs(names):
    saved(names["model"], "cifar10", "flowers")
    Path("test").mkdir()
    Path("flowers/rose").rename("test/frog")
    assert run("deploy.md", names) == 13
    assert names["export"].accuracy and np.isfinite(names["logits"]).all()


def test_bulk_runs(names):
    Path("holiday").rename("photos")
    Path("list.txt").write_text("cat.jpg\nflowers/rose/1.jpg\n")
    saved(names["model"], "flowers")
    assert run("bulk.md", names) == 2
    assert names["summary"].images == 1 and len(names["good"]) == 1
    assert np.load("features.npy").shape == (1, names["model"].config.width)


def test_distributed_runs(names):
    import tensorflow as tf

    data = (names["images"], names["labels"])
    names["dataset"] = tf.data.Dataset.from_tensor_slices(data).batch(4)
    assert run("distributed.md", names) == 2


def test_explain_runs(names):
    pooled = randomize(keras_vit.ViT(names["model"].config.replace(pooling="map")))
    saved(pooled, "cifar10_plain")
    names["other"] = names["image"].rotate(90)
    names["images"] = [names["image"], names["other"]]
    assert run("explain.md", names) == 12
    assert names["numbers"].shape == (1, 4, 4)


def test_reliability_runs(names):
    assert run("reliability.md", names) == 2
    assert Path("runs/own/model.keras").is_file()


def test_training_runs(names):
    import tensorflow as tf

    pixels = np.full((4, 30, 30, 3), 99, "uint8")
    names["raw"] = tf.data.Dataset.from_tensor_slices((pixels, [0, 1, 0, 1])).batch(2)
    names["large"] = np.zeros((12, 240, 240, 3), "float32")
    names["small"] = names["model"]
    names["small"].compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert run("training.md", names) == 6
    assert names["exact"].config.grid == (20, 20)


def test_serving_runs(names, monkeypatch):
    saved(names["model"], "digits", "flowers")
    keras_vit.export_onnx(names["model"], "digits.onnx")
    with running_server.running({"digits": "digits.onnx"}, engine="keras") as server:
        monkeypatch.setitem(SMALLER["serving.md"], ":8501/", f":{server.port}/")
        keras_vit.export_saved_model(names["model"], "savedmodels/flowers")
        assert run("serving.md", names) == 7
    assert Path("savedmodels/models.config").is_file()
