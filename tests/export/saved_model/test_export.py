"""The SavedModel: it answers as the model does, refuses the rest, and appears whole."""

import hashlib
import io
import json

import keras
import numpy as np
import pytest
from conformance import images, run, tiny_model
from PIL import Image

from keras_vit import ViTConfig, preprocessing, runtime
from keras_vit.export.saved_model import export as saved_model
from keras_vit.export.saved_model import versions
from keras_vit.export.saved_model.export import export_saved_model

TENSORFLOW = keras.backend.backend() == "tensorflow"
LABELS = ("cat", "dog", "élan vital")


def softmax(logits):
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def picture(seed=0, size=(37, 61), kind="JPEG"):
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize(size[::-1]).save(file, kind)
    return file.getvalue()


@pytest.fixture(scope="module")
def model():
    return tiny_model(labels=LABELS)


@pytest.fixture(scope="module")
def export(model, tmp_path_factory):
    return export_saved_model(model, tmp_path_factory.mktemp("savedmodels") / "tiny")


@pytest.fixture(scope="module")
def opened(export):
    return runtime.open(export.path)


@pytest.fixture(scope="module")
def server(export):
    """The signatures in a session, called as a server does: nothing compares the shapes before."""
    import tensorflow as tf

    session = tf.compat.v1.Session(graph=tf.Graph())
    with session.graph.as_default():
        loaded = tf.compat.v1.saved_model.load(session, ["serve"], str(export.path))

    def call(name, values):
        signature = loaded.signature_def[name]
        (spec,) = signature.inputs.values()
        tensor = session.graph.get_tensor_by_name
        fetches = [tensor(output.name) for output in signature.outputs.values()]
        # `run` without its checks, which are Python's.
        feeds = {tensor(spec.name).ref(): np.asarray(values)}
        outputs = session._do_run(None, [], fetches, feeds, None, None)
        return dict(zip(signature.outputs, outputs, strict=True))

    return call


# -- what it answers


@pytest.mark.only_on("tensorflow")
@pytest.mark.parametrize("count", [1, 3, 7])
def test_signatures_are_the_model(model, opened, count):
    x = images(model.config, count)
    logits, found = run(model, x), opened.run("serving_default", images=x)
    bound = 1e-5 * np.ptp(logits)
    assert set(found) == {"logits", "probabilities"}
    assert all(value.dtype == np.float32 for value in found.values())
    np.testing.assert_allclose(found["logits"], logits, atol=max(bound, 1e-5))
    np.testing.assert_allclose(found["probabilities"], softmax(logits), atol=1e-5)
    features = opened.run("features", images=x)
    assert set(features) == {"features"}
    np.testing.assert_allclose(features["features"], run(model.features(), x), atol=1e-4)
    again = opened.run("serving_default", images=x)
    np.testing.assert_array_equal(again["logits"], found["logits"])
    other = run(model, images(model.config, count, seed=9))
    assert np.abs(found["logits"] - other).max() > 100 * bound


@pytest.mark.only_on("tensorflow")
def test_files_are_the_model_behind_preprocess(model, opened):
    files = [picture(0), picture(1, (16, 90), "PNG"), picture(2, (200, 131))]
    x = preprocessing.preprocess([Image.open(io.BytesIO(file)) for file in files], model.config)
    wanted = softmax(run(model, x))
    found = opened.run("serve_bytes", bytes=files)
    assert set(found) == {"logits", "probabilities"}
    np.testing.assert_allclose(found["probabilities"], wanted, atol=0.005)
    assert (found["probabilities"].argmax(-1) == wanted.argmax(-1)).all()
    assert np.abs(found["probabilities"][::-1] - wanted).max() > 0.05

    classes = opened.run("classify", bytes=files)
    assert set(classes) == {"labels", "scores"} and classes["scores"].dtype == np.float32
    order = np.argsort(-found["probabilities"], axis=-1)
    names = [[LABELS[i].encode() for i in row] for row in order]
    assert classes["labels"].tolist() == names
    np.testing.assert_array_equal(
        classes["scores"], np.take_along_axis(found["probabilities"], order, -1)
    )


@pytest.mark.only_on("tensorflow")
def test_export_of_pixels_and_a_sigmoid(tmp_path):
    model = tiny_model(
        pixel_mean=(0.4, 0.5, 0.6), pixel_std=0.3, classifier_activation="sigmoid", num_classes=7
    )
    export = export_saved_model(model, tmp_path, images="uint8", top_k=2, labels=list("abcdefg"))
    opened = runtime.open(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 24, 16, 3), dtype=np.uint8)
    wanted = run(model, preprocessing.preprocess(pixels, model.config))  # sigmoid is in the model
    np.testing.assert_allclose(opened.probabilities(pixels), wanted, atol=1e-5)
    assert np.abs(wanted.sum(-1) - 1).max() > 0.1
    np.testing.assert_allclose(
        runtime.KerasRuntime(model).logits(pixels), opened.logits(pixels), atol=1e-4
    )
    assert opened.run("classify", bytes=[picture()])["scores"].shape == (1, 2)
    assert export.verification.same_top_class == 1
    with pytest.raises(ValueError, match="uint8 pixels"):
        opened.logits(images(model.config))


@pytest.mark.only_on("tensorflow")
def test_export_in_bfloat16_of_a_mixed_model_with_lora(tmp_path):
    model = tiny_model(dtype="mixed_bfloat16", num_registers=2, layer_scale=0.3)
    before = run(model, images(model.config))
    model.enable_lora(2)
    for layer in model._flatten_layers():
        if getattr(layer, "lora_enabled", False):
            layer.lora_kernel_b.assign(2 * np.ones(layer.lora_kernel_b.shape))
    x = images(model.config)
    wanted = run(model, x)
    assert np.abs(wanted - before).max() > 0.1 * np.ptp(wanted)
    for dtype in ("float32", "bfloat16"):  # the bound of float32 shows that it is compared in it
        export = export_saved_model(model, tmp_path, dtype=dtype)
        found = runtime.open(export.path).logits(x)
        assert np.abs(found - wanted).max() < 0.05 * np.ptp(wanted), dtype
    assert [export.version, export.dtype] == [2, "bfloat16"]
    assert export.verification.difference > 1e-5 * export.verification.logits_range


@pytest.mark.only_on("tensorflow")
@pytest.mark.parametrize(
    "kind",
    [
        "features",
        pytest.param("all_tokens", marks=pytest.mark.slow),
        pytest.param("pre_logits", marks=pytest.mark.slow),
    ],
)
def test_export_has_the_signatures_that_make_sense(tmp_path, kind):
    model = tiny_model(kind)
    export_saved_model(model, tmp_path)  # and is verified
    opened = runtime.open(tmp_path)
    signatures = set(opened.manifest["signatures"])
    classify = {"classify"} if kind == "pre_logits" else set()
    assert signatures == {"serving_default", "features", "serve_bytes"} | classify
    x = images(model.config)
    name = "features" if kind == "features" else "logits"
    np.testing.assert_allclose(getattr(opened, name)(x), run(model, x), atol=1e-4)
    if kind == "features":
        with pytest.raises(ValueError, match="must have a head for logits"):
            opened.logits(x)


@pytest.mark.only_on("tensorflow")
def test_export_for_small_requests_and_small_pictures(tmp_path):
    """The least of both limits is verified, and in Python more images are run in parts."""
    import tensorflow as tf

    model = tiny_model(labels=LABELS)
    verify = images(model.config, 5)
    export = export_saved_model(
        model,
        tmp_path,
        max_batch_size=2,
        max_pixels=24 * 16,
        verify=verify,
        labels=np.array(LABELS),  # any sequence of names
    )
    assert export.verification.images == 5 and export.verification.files_difference is not None
    opened = runtime.open(tmp_path)
    x = images(model.config, 7, seed=3)
    wanted = run(model, x)
    np.testing.assert_allclose(opened.logits(x), wanted, atol=1e-4)
    assert np.abs(opened.logits(x[::-1]) - wanted).max() > 0.1
    np.testing.assert_allclose(opened.probabilities(x), softmax(wanted), atol=1e-4)
    files = [picture(seed, (24, 16), "PNG") for seed in range(3)]
    labels = [opened.run("classify", bytes=[file])["labels"][0] for file in files]
    assert (opened.run("classify", bytes=files)["labels"] == labels).all()
    with pytest.raises(tf.errors.InvalidArgumentError, match="at most 2 of `images`"):
        opened.signature("serving_default")(images=tf.constant(x))
    with pytest.raises(tf.errors.InvalidArgumentError, match="at most 384 can be resized"):
        opened.run("classify", bytes=[picture(0, (24, 17))])


# -- what it refuses, and goes on after


@pytest.mark.only_on("tensorflow")
@pytest.mark.parametrize(
    "values, message",
    [
        (np.zeros((24, 16, 3), "float32"), r"shape \(batch, 24, 16, 3\).*Received.*\(24, 16, 3\)"),
        (np.zeros((1, 48, 16, 3), "float32"), r"Received: shape \(1, 48, 16, 3\)"),
        (np.zeros((2, 12, 16, 3), "float32"), r"Received: shape \(2, 12, 16, 3\)"),
        (np.float32(0), r"Received: shape \(\)"),
        (np.zeros((257, 24, 16, 3), "float32"), "a request must hold at most 256 of `images`"),
        (np.full((2, 24, 16, 3), np.nan, "float32"), "finite numbers.*in image 0, 1"),
    ],
)
def test_server_says_what_is_wrong_with_images(model, server, values, message):
    import tensorflow as tf

    for name in ("serving_default", "features"):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            server(name, values)
    x = images(model.config)
    np.testing.assert_allclose(server("serving_default", x)["logits"], run(model, x), atol=1e-4)


@pytest.mark.only_on("tensorflow")
def test_server_names_the_image_that_is_not_finite(model, server):
    import tensorflow as tf

    for value in (np.nan, np.inf, -np.inf):
        x = images(model.config, 4)
        x[2, 5, 7, 1] = value
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"in image 2\]"):
            server("serving_default", x)


@pytest.mark.only_on("tensorflow")
def test_server_says_what_is_wrong_with_files(server):
    import tensorflow as tf

    good = picture()
    wanted = server("classify", np.array([good], object))["scores"]
    for files, message in (
        ([[good]], r"bytes must have shape \(batch\). Received: shape \(1, 1\)"),
        (good, r"Received: shape \(\)"),
        ([good] * 257, "a request must hold at most 256 of `bytes`"),
        ([good, b"GIF89a", good], "image 1: it is neither a JPEG nor a PNG"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            server("classify", np.array(files, object))
        np.testing.assert_array_equal(
            server("classify", np.array([good], object))["scores"], wanted
        )


@pytest.mark.only_on("tensorflow")
def test_server_answers_an_empty_batch_with_an_empty_one(server):
    none = np.zeros((0, 24, 16, 3), "float32")
    found = server("serving_default", none)
    assert {key: value.shape for key, value in found.items()} == {
        "logits": (0, 3),
        "probabilities": (0, 3),
    }
    assert server("features", none)["features"].shape == (0, 20)
    assert server("classify", np.zeros(0, object))["labels"].shape == (0, 3)


# -- the folder


@pytest.mark.only_on("tensorflow")
def test_manifest_describes_every_file(model, export):
    manifest = json.loads((export.path / "MANIFEST.json").read_text(encoding="utf-8"))
    files = {
        p.relative_to(export.path).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in export.path.rglob("*")
        if p.is_file() and p.name != "MANIFEST.json"
    }
    assert {name: entry["sha256"] for name, entry in manifest["files"].items()} == files
    assert {"assets/labels.txt", "assets.extra/tf_serving_warmup_requests"} < set(files)
    assert ViTConfig.from_dict(manifest["config"]) == model.config
    assert tuple(manifest["labels"]) == LABELS
    assert manifest["signatures"]["serving_default"]["inputs"]["images"] == {
        "dtype": "float32",
        "shape": [None, 24, 16, 3],
    }
    assert manifest["verification"]["images"] == export.verification.images == 16
    assert manifest["pixels"]["exif_orientation"] == "applied to JPEG files"
    assert (export.path / "assets" / "labels.txt").read_text("utf-8").split("\n")[2] == LABELS[2]


@pytest.mark.only_on("tensorflow")
def test_warm_up_requests_run(export, opened):
    import tensorflow as tf

    log = pytest.importorskip("tensorflow_serving.apis.prediction_log_pb2")
    path = export.path / "assets.extra" / "tf_serving_warmup_requests"
    seen = []
    for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
        request = log.PredictionLog.FromString(record).predict_log.request
        assert request.model_spec.name == "tiny"
        signature = request.model_spec.signature_name
        inputs = {key: tf.make_ndarray(value) for key, value in request.inputs.items()}
        outputs = opened.run(signature, **inputs)
        seen.append((signature, len(next(iter(outputs.values())))))
    names = ("classify", "features", "serve_bytes", "serving_default")
    assert seen == [(name, 1) for name in names]


@pytest.mark.only_on("tensorflow")
def test_versions_are_numbered_and_never_overwritten(tmp_path):
    for wanted, version in ((1, None), (9, 9), (10, None)):
        with versions.new_version(tmp_path, version) as (folder, placed):
            (folder / "file").write_text("x")
        assert placed == [tmp_path / str(wanted)]
    with pytest.raises(FileExistsError, match="Received: version=9"):
        with versions.new_version(tmp_path, 9) as (folder, _):
            (folder / "file").write_text("y")
    assert (tmp_path / "9" / "file").read_text() == "x"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "10", "9"]


@pytest.mark.only_on("tensorflow")
def test_export_that_differs_leaves_nothing(tmp_path, monkeypatch):
    model = tiny_model()
    whole = saved_model.signatures._compute

    def bent(model, dtype):
        compute, weights = whole(model, dtype)
        return lambda x: {k: 1.001 * v for k, v in compute(x).items()}, weights

    monkeypatch.setattr(saved_model.signatures, "_compute", bent)
    with pytest.raises(ValueError, match=r"logits must be the model's within 1e-05.*at image \d+"):
        export_saved_model(model, tmp_path / "bent")
    assert list(tmp_path.iterdir()) == []
    export_saved_model(model, tmp_path / "bent", bound=0.01)  # which allows it
    assert [p.name for p in (tmp_path / "bent").iterdir()] == ["1"]


@pytest.mark.only_on("tensorflow")
def test_export_of_a_model_with_nan_leaves_nothing(tmp_path):
    model = tiny_model()
    model.get_layer("head").bias.assign([0, np.nan, 0])
    with pytest.raises(ValueError, match=r"^model must give finite logits\. .* image 0, index 1$"):
        export_saved_model(model, tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"dtype": "float16"}, "dtype must be one of 'float32', 'bfloat16'"),
        ({"images": "int8"}, "images must be one of"),
        ({"activation": "relu"}, "activation must be one of"),
        ({"labels": ["a", "b"]}, "labels must be num_classes=3 names"),
        ({"labels": ["a", "b", "c\nd"]}, "labels must be printable names"),
        ({"version": 0}, "version must be a positive int"),
        ({"path": "flowers[1]"}, "path must not hold"),
        ({"path": __file__}, "path must be a folder of versions. Received: .*, a file"),
        ({"path": f"{__file__}/flowers"}, "path must be in a folder, and .* is a file"),
        ({"path": None}, "path must be a path: a str or an os.PathLike. Received: path=None"),
        ({"top_k": 0}, "top_k must be a positive int"),
        ({"max_pixels": 1.5}, "max_pixels must be a positive int"),
        ({"max_pixels": 383}, r"max_pixels must be at least 384.*own size \(24, 16\)"),
        ({"labels": "abc"}, "labels must be a sequence of names"),
        ({"bound": 0}, "bound must be a number greater than 0"),
        ({"bound": "a"}, "bound must be a number greater than 0"),
        (
            {"images": "uint8", "verify": np.zeros((1, 24, 16, 3), "float32")},
            r"verify must be .* of uint8 pixels, for images='uint8'. Received: .*, float32$",
        ),
        ({"verify": np.zeros((1, 24, 16, 3), "int64")}, "or uint8, for images='float32'.*int64$"),
        ({"verify": np.zeros((0, 24, 16, 3), "float32")}, "verify must be at least one image"),
        ({"verify": np.zeros((1, 16, 24, 3), "float32")}, r"Received: shape \(1, 16, 24, 3\)"),
        ({"verify": np.full((1, 24, 16, 3), np.nan)}, "verify must hold finite numbers"),
    ],
)
def test_arguments_are_checked_first(tmp_path, monkeypatch, arguments, message):
    for name in ("export_here", "in_tensorflow"):
        monkeypatch.setattr(saved_model, name, lambda *_, **__: pytest.fail("the export began"))
    with pytest.raises(ValueError, match=message):
        export_saved_model(tiny_model(), **{"path": tmp_path / "x", **arguments})
    assert not (tmp_path / "x").exists()


def test_models_that_cannot_be_exported_are_refused_first(tmp_path):
    with pytest.raises(ValueError, match="model must be a keras_vit.ViT"):
        export_saved_model(keras.Sequential(), tmp_path / "x")
    model = tiny_model()
    model.blocks[1].mlp.dense_2.quantize("int8")
    with pytest.raises(ValueError, match="model must not be quantized"):
        export_saved_model(model, tmp_path / "x")
    assert not (tmp_path / "x").exists()
