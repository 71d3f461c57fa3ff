"""A `.tflite` file in MediaPipe's ImageClassifier, which is what apps for phones call.

MediaPipe has an environment of its own, because it brings its own versions of much: in the folder
that KERAS_VIT_MEDIAPIPE_CACHE names, if it names one.
"""

import json
import os
import subprocess
import venv
from pathlib import Path

import numpy as np
import pytest
from conformance import TINY, randomize

from keras_vit import ViT, runtime
from keras_vit.export.tflite.export import export_tflite

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.backend_free,
]

HERE = Path(__file__).parent
TRAINED = HERE.parents[2] / "runs" / "cifar10" / "model.keras"
MEDIAPIPE = "mediapipe==1.2.0"
MODES = (None, "float16", "dynamic", "int8")
CONFIG = TINY.replace(labels=("cat", "dog", "élan"))
BY_CHANNEL = {"pixel_mean": (0.4, 0.5, 0.6), "pixel_std": (0.2, 0.3, 0.25)}


@pytest.fixture(scope="module")
def mediapipe(tmp_path_factory):
    """A function that asks MediaPipe: cases in, answers out (`mediapipe_classify.py`)."""
    cache = os.environ.get("KERAS_VIT_MEDIAPIPE_CACHE")
    folder = Path(cache) if cache else tmp_path_factory.mktemp("mediapipe")
    python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    installed = folder / "installed.txt"
    if not installed.exists() or installed.read_text() != MEDIAPIPE:
        venv.create(folder / "venv", clear=True, with_pip=True)
        install = [python, "-m", "pip", "install", "--quiet", MEDIAPIPE]
        subprocess.run(install, check=True, timeout=1200)
        installed.write_text(MEDIAPIPE)
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}

    def ask(*cases):
        given = [{"model": str(model), "pictures": str(pictures)} for model, pictures in cases]
        done = subprocess.run(
            [python, HERE / "mediapipe_classify.py"],
            input=json.dumps(given),
            env=inherited,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    return ask


def exported(model, folder, quantize, calibration, **options):
    """A file whose accuracy is not in question here: only whether MediaPipe sees the same."""
    if quantize == "int8":
        options["calibration"] = calibration
    path = folder / f"{quantize}-{options.get('images', 'float32')}.tflite"
    return export_tflite(model, path, quantize=quantize, bound=1.0, **options).path


def noise(count, size, channels=3, seed=0):
    """Pictures of one color a patch, which the tiny model tells well apart."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (count, size[0] // 8, size[1] // 8, channels), "uint8")
    return pixels.repeat(8, axis=1).repeat(8, axis=2)


def saved(path, pictures):
    np.save(path, pictures)
    return path


def scores(answer, labels):
    """The scores (B, K) by class; their order and names in the answer are checked."""
    found = np.full((len(answer), len(labels)), np.nan)
    for row, classes in zip(found, answer, strict=True):
        assert [labels[index] for index, _, _ in classes] == [name for _, name, _ in classes]
        values = [score for _, _, score in classes]
        assert values == sorted(values, reverse=True)
        for index, _, score in classes:
            row[index] = score
    return found


def check(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert (found.argmax(-1) == expected.argmax(-1)).all()
    assert abs(found[::-1] - expected).max() > 0.1


def test_mediapipe_gives_what_the_model_gives(mediapipe, tmp_path):
    model = randomize(ViT(CONFIG))
    pictures = noise(6, CONFIG.image_size)
    files = [exported(model, tmp_path, quantize, pictures) for quantize in MODES]
    files += [
        exported(randomize(ViT(CONFIG.replace(**BY_CHANNEL))), tmp_path, None, None, images="uint8")
    ]
    small = saved(tmp_path / "small.npy", pictures)
    # Each pixel twice in both directions: seen whole and squashed, it is the same picture.
    large = saved(tmp_path / "large.npy", pictures.repeat(2, axis=1).repeat(2, axis=2))
    answers = mediapipe(*((file, p) for file in files for p in (small, large)))
    for file, one, two in zip(files, answers[::2], answers[1::2], strict=True):
        found = scores(one, CONFIG.labels)
        check(found, runtime.open(file).probabilities(pictures))
        np.testing.assert_array_equal(scores(two, CONFIG.labels), found)
    keras_model = runtime.KerasRuntime(model)
    check(scores(answers[0], CONFIG.labels), keras_model.probabilities(pictures))


def test_mediapipe_classifies_real_pictures_as_the_model_does(mediapipe, tmp_path):
    if not TRAINED.exists():
        pytest.skip("runs/cifar10 has no model: python -m training.train cifar10")
    import tensorflow_datasets as tfds

    if not tfds.builder("cifar10").is_prepared():
        pytest.skip("cifar10 is not prepared")
    parts = ["train[:100]", "test[:100]"]
    train, test = tfds.load("cifar10", split=parts, batch_size=-1, download=False)
    pictures, classes = test["image"].numpy(), test["label"].numpy()
    model = runtime.open(TRAINED)
    # Its mean and deviation differ from channel to channel: pixels, normalized inside, it must be.
    files = [
        exported(model.model, tmp_path, quantize, train["image"].numpy(), images="uint8")
        for quantize in MODES
    ]
    given = saved(tmp_path / "pictures.npy", pictures)
    own = model.probabilities(pictures)
    for quantize, file, answer in zip(
        MODES, files, mediapipe(*((file, given) for file in files)), strict=True
    ):
        found = scores(answer, model.labels)
        check(found, runtime.open(file).probabilities(pictures))
        same = (found.argmax(-1) == own.argmax(-1)).mean()
        right = (found.argmax(-1) == classes).mean()
        print(f"{quantize}: {same:.0%} as the model, {right:.0%} right")
        assert same >= (1.0 if quantize in (None, "float16") else 0.95) and right > 0.7


def test_mediapipe_says_what_it_does_not_take(mediapipe, tmp_path):
    """So that it is noticed when a newer one takes them."""
    pictures = saved(tmp_path / "p.npy", noise(1, CONFIG.image_size))
    by_channel = exported(randomize(ViT(CONFIG.replace(**BY_CHANNEL))), tmp_path, None, None)
    gray_model = randomize(ViT(CONFIG.replace(in_channels=1)))
    gray = exported(gray_model, tmp_path, None, None, images="uint8")
    one, other = mediapipe((by_channel, pictures), (gray, pictures))
    assert "Per-channel image normalization is not available" in one["error"]
    assert "Only RGB color space is supported" in other["error"]
