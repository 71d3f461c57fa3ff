"""Pixels that were not normalized are refused by one rule wherever images are passed."""

import functools
import warnings

import numpy as np
import pytest
from conformance import tiny_model

import keras_vit
from keras_vit import explain, runtime
from keras_vit.export import accuracy
from keras_vit.preprocessing import check_normalized, model_input, preprocess

CONTRACTS = {
    "half": (0.5, 0.5),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "unit": (0.0, 1.0),
    "bytes": (0.0, 1 / 255),
    "centered": ((0.48, 0.46, 0.41), 1 / 255),
}
REFUSED = r"hold pixels normalized for the model, in \[-1, 1\]. Received: values in \[.*, 25\d\]"


@functools.cache
def model(contract="half"):
    mean, std = CONTRACTS[contract]
    return tiny_model(depth=1, pixel_mean=mean, pixel_std=std)


@functools.cache
def attention_pooled():
    return tiny_model("map", depth=1)


@functools.cache
def pixels():
    return np.random.default_rng(0).integers(0, 256, (4, *model().config.input_shape), "uint8")


def normalized():
    return preprocess(pixels(), model().config)


def raw():
    """Images as `keras.utils.image_dataset_from_directory` makes them: float32, 0 to 255."""
    from PIL import Image

    height, width, _ = model().config.input_shape
    sizes = [(width, height), (width // 2, height)]  # the first is the model's own
    photos = [Image.fromarray(one).resize(size) for one in pixels()[:2] for size in sizes]
    made = np.stack([np.asarray(one.resize((width, height)), "float32") for one in photos])
    return made + np.float32(0.25) * (made < 255)


# -- the rule


def spread(low, high):
    return np.linspace(low, high, 48).astype("float32").reshape(2, 4, 2, 3)


def noise():
    return np.random.default_rng(0).normal(size=(100, 100, 100)).astype("float32")


@pytest.mark.backend_free
@pytest.mark.parametrize(
    "contract, images, found",
    [
        ("half", spread(-1, 1), "silent"),
        ("half", noise(), "silent"),
        ("half", spread(-1.6, 1.8), "silent"),  # brighter and darker than an image can be
        ("half", spread(0, 1), "silent"),  # could be a bright image
        ("half", np.zeros((0, 4, 2, 3)), "silent"),
        ("half", spread(0, 8), "warns"),
        ("half", spread(-128, 127), "warns"),
        ("half", spread(-14, 266), "warns"),  # bicubic interpolation leaves 0 to 255
        ("half", spread(-200, 1), "warns"),
        ("half", spread(0, 255), "raises"),
        ("half", spread(0, 16), "raises"),
        ("half", spread(0, 255).astype("float16"), "raises"),
        ("half", np.where(spread(0, 1) > 0.5, np.inf, 0), "not finite"),
        ("half", np.where(spread(0, 1) > 0.5, np.nan, 0), "not finite"),
        ("imagenet", spread(-2.1, 2.6), "silent"),
        ("imagenet", noise(), "silent"),
        ("imagenet", spread(0, 20), "warns"),
        ("imagenet", spread(0, 255), "raises"),
        ("unit", spread(0, 1), "silent"),
        ("unit", noise(), "silent"),
        ("unit", spread(0, 255), "raises"),
        ("bytes", spread(0, 255), "silent"),
        ("bytes", spread(-20, 275), "silent"),
        ("bytes", noise(), "silent"),
        ("bytes", spread(0, 1), "warns"),
        ("bytes", spread(0, 65535), "raises"),
        ("centered", spread(-122, 150), "silent"),
        ("centered", spread(0, 65535), "raises"),
    ],
)
def test_check_normalized(contract, images, found):
    config = model(contract).config
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if found == "silent":
            check_normalized(images, config)
        elif found == "warns":
            with pytest.warns(UserWarning, match=r"^x should hold pixels .* Received: values in"):
                check_normalized(images, config, "x")
        else:
            says = {"raises": "hold pixels normalized", "not finite": "hold finite numbers"}[found]
            with pytest.raises(ValueError, match=f"^x must {says}.*Received"):
                check_normalized(images, config, "x")


@pytest.mark.backend_free
def test_message_says_what_to_do():
    with pytest.raises(ValueError, match=r"preprocess\(images, model\.config\), or pass uint8"):
        check_normalized(raw(), model().config)
    with pytest.raises(ValueError, match=r"pixel_mean=0\.0 and pixel_std=1/255"):
        check_normalized(raw(), model().config)


@pytest.mark.backend_free
def test_arrays_of_several_sizes_are_checked_together():
    check_normalized([spread(-1, 1), spread(0, 1)[:1]], model().config)
    with pytest.raises(ValueError, match=r"values in \[0, 255\]"):
        check_normalized([spread(0, 1), spread(0, 255)[1:]], model().config)


@pytest.mark.backend_free
def test_model_input_normalizes_only_uint8():
    config = model().config
    np.testing.assert_array_equal(model_input(pixels(), config), normalized())
    np.testing.assert_array_equal(model_input(normalized(), config), normalized())
    assert model_input(normalized().astype("float64"), config).dtype == np.float32


@pytest.mark.backend_free
def test_warning_names_the_line_that_called_the_package():
    opened = runtime.KerasRuntime(model())
    with pytest.warns(UserWarning, match="^images should") as seen:
        opened.logits(raw() - 128)
    ours = [warning.filename for warning in seen if "normalized" in str(warning.message)]
    assert ours == [__file__]


# -- where images are passed


ENTRIES = {
    "preprocess": lambda x: preprocess(x, model().config, rescale=False),
    "measure": lambda x: accuracy.measure(runtime.KerasRuntime(model()), [(x, np.arange(4) % 3)]),
    **{
        f"keras {name}": lambda x, name=name: getattr(runtime.KerasRuntime(model()), name)(x)
        for name in ("logits", "probabilities", "features")
    },
    **{
        f"explain {name}": lambda x, name=name: getattr(explain, name)(model(), x)
        for name in (
            "attention_distance attention_entropy attention_gradient attention_maps "
            "attention_rollout class_token_maps grad_cam patch_pca region_similarity rollout_map"
        ).split()
    },
    "explain pooling_map": lambda x: explain.pooling_map(attention_pooled(), x),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_pixels_that_were_not_normalized_are_refused(entry):
    with pytest.raises(ValueError, match=REFUSED):
        ENTRIES[entry](raw())


# All explanations normalize in one place, so one of them runs on every backend.
def _once(entry):
    free = entry.startswith("explain") and entry != "explain attention_maps"
    return pytest.param(entry, marks=pytest.mark.backend_free) if free else entry


@pytest.mark.parametrize("entry", [_once(entry) for entry in ENTRIES])
def test_normalized_pixels_and_uint8_cause_no_warning(entry):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = ENTRIES[entry](normalized())
        if entry == "preprocess":  # it normalizes uint8 unless rescale=False
            np.testing.assert_array_equal(preprocess(pixels(), model().config), found)
            return
        again = ENTRIES[entry](pixels())
    if entry != "measure":
        assert np.isfinite(found).all()
        np.testing.assert_allclose(again, found, atol=1e-5)
    assert entry != "measure" or again == found


@pytest.mark.backend_free
def test_every_explanation_of_images_is_an_entry():
    import inspect

    takes = {
        name
        for name in explain.__all__
        if not name.startswith("plot_")
        and "images" in inspect.signature(getattr(explain, name)).parameters
    }
    assert {f"explain {name}" for name in takes} == {e for e in ENTRIES if "explain" in e}


# -- exports, which are written and run on TensorFlow


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """A file of each kind for float32 images, and the function for inference."""
    folder = tmp_path_factory.mktemp("exports")
    keras_vit.export_tflite(model(), folder / "m.tflite", output="logits")
    keras_vit.export_onnx(model(), folder / "m.onnx")
    keras_vit.export_saved_model(model(), folder / "saved")
    opened = {name: runtime.open(folder / name) for name in ("m.tflite", "m.onnx", "saved")}
    return {**opened, "fused": keras_vit.fused(model())}


CALLS = {
    **{
        f"{file} {name}": lambda exports, x, file=file, name=name: getattr(exports[file], name)(x)
        for file in ("m.tflite", "m.onnx", "saved")
        for name in ("logits", "probabilities", "features")
        if (file, name) != ("m.tflite", "features")
    },
    "fused": lambda exports, x: exports["fused"](x),
}
RUNS = {
    "m.tflite": lambda exports, x: exports["m.tflite"].run(x),
    "m.onnx": lambda exports, x: exports["m.onnx"].run(x)["logits"],
    "saved": lambda exports, x: exports["saved"].run("serving_default", images=x)["logits"],
}


@pytest.mark.backend_free
@pytest.mark.parametrize("call", CALLS)
def test_exports_refuse_pixels_that_were_not_normalized(exports, call):
    with pytest.raises(ValueError, match=REFUSED):
        CALLS[call](exports, raw())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        wanted = CALLS[call](exports, normalized())
        np.testing.assert_allclose(CALLS[call](exports, pixels()), wanted, atol=1e-5)


@pytest.mark.backend_free
@pytest.mark.parametrize("file", RUNS)
def test_run_of_an_export_refuses_pixels_that_were_not_normalized(exports, file):
    with pytest.raises(ValueError, match=REFUSED + r".*preprocess\(images, model\.config\)\. "):
        RUNS[file](exports, raw())
    found = RUNS[file](exports, normalized())
    np.testing.assert_allclose(found, exports[file].logits(normalized()), atol=1e-6)


@pytest.mark.backend_free
def test_export_for_uint8_accepts_pixels(tmp_path):
    keras_vit.export_onnx(model(), tmp_path / "m.onnx", images="uint8")
    opened = runtime.open(tmp_path / "m.onnx")
    assert opened.run(pixels())["logits"].shape == (4, 3)
    with pytest.raises(ValueError, match="must be uint8 pixels"):
        opened.logits(normalized())


@pytest.mark.backend_free
def test_fused_refuses_other_integers(exports):
    with pytest.raises(ValueError, match="floats as the model takes them, or uint8.*, int32$"):
        exports["fused"](pixels().astype("int32"))


@pytest.fixture
def untimed(monkeypatch):
    from keras_vit.export import file_export

    monkeypatch.setattr(file_export, "latencies_of_both", lambda *_: [1.0, 1.0])


INT8 = {"quantize": "int8"}
LABELS = np.arange(4) % 3
ARGUMENTS = {
    "calibration": lambda path, x: keras_vit.export_tflite(model(), path, **INT8, calibration=x),
    "verify": lambda path, x: keras_vit.export_tflite(model(), path, verify=x),
    "verify of ONNX": lambda path, x: keras_vit.export_onnx(
        model(), path.with_suffix(".onnx"), verify=x
    ),
    "verify of a SavedModel": lambda path, x: keras_vit.export_saved_model(
        model(), path.parent, verify=x
    ),
    "data, in accuracy_data": lambda path, x: keras_vit.export_tflite(
        model(), path, accuracy_data=(x, LABELS), max_drop=100
    ),
    "calibration of a sweep": lambda path, x: keras_vit.quantization_sweep(model(), x),
    "data of a sweep": lambda path, x: keras_vit.quantization_sweep(model(), pixels(), (x, LABELS)),
}


@pytest.mark.backend_free
@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_images_passed_to_an_export_are_refused_by_name(tmp_path, argument):
    name = argument.split(" ")[0].strip(",")
    with pytest.raises(ValueError, match=f"^{name} must {REFUSED}"):
        ARGUMENTS[argument](tmp_path / "m.tflite", raw())
    assert not list(tmp_path.iterdir())


@pytest.mark.backend_free
@pytest.mark.usefixtures("untimed")
def test_normalized_images_passed_to_an_export_cause_no_warning(tmp_path):
    x = normalized()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*normalized", UserWarning)
        keras_vit.export_tflite(
            model(),
            tmp_path / "m.tflite",
            **INT8,
            calibration=x,
            verify=x,
            accuracy_data=(x, LABELS),
            max_drop=100,
        )
        keras_vit.quantization_sweep(model(), x, (x, LABELS))
    assert (tmp_path / "m.tflite").exists()
