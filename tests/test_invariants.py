"""What is opened is what was saved: config, dtypes, flags, weights, labels, in whatever file.

The states of dropout's seeds are not in a `.keras` file, as Keras has it: a loaded model draws by
the seed of its process. The checkpoints of a run have them (tests/faults/test_resume.py).
"""

import keras
import pytest
from conformance import CONFIGS, flags, freeze_some, quick_if_covering, tiny_model, to_numpy

import keras_vit
from keras_vit import Classifier, ViT, runtime

LABELS = ("cat", "élan <&", "emu")
UNUSUAL = {
    "labels": LABELS,
    "num_classes": 3,
    "dropout": 0.2,
    "drop_path": 0.1,
    "pixel_mean": 0.25,
    "pixel_std": 0.75,
}
EXPORTS = {
    "m.onnx": "export_onnx",
    "m.tflite": "export_tflite",
    "m.xml": "export_openvino",
    "saved_model": "export_saved_model",
}


def state(model):
    """What a file has to keep, a line for each fact."""
    found = {f"config {name}": value for name, value in model.config.to_dict().items()}
    trains, of_weights = flags(model)
    found |= {"trains": trains, **{f"flag {path}": value for path, value in of_weights.items()}}
    for layer in model._flatten_layers():
        found[f"dtype {layer.path}"] = layer.dtype_policy.name
    for weight in model.weights:
        value = to_numpy(weight.value)
        found[f"value {weight.path}"] = (str(value.dtype), value.shape, value.tobytes())
    return found


def differences(model, again):
    expected, found = state(model), state(again)
    return sorted(
        name for name in expected | found if expected.get(name, "-") != found.get(name, "-")
    )


def unusual(kind, dtype):
    """A partly frozen model with every optional field."""
    config = CONFIGS[kind]
    changes = UNUSUAL if config.num_classes else {**UNUSUAL, "labels": None, "num_classes": 0}
    return freeze_some(tiny_model(kind, dtype=dtype, **changes))


@pytest.mark.backend_free
@pytest.mark.parametrize("kind", quick_if_covering(CONFIGS))
def test_keras_file_keeps_everything(kind, tmp_path):
    model = unusual(kind, "mixed_bfloat16")
    model.save(tmp_path / "m.keras")
    assert differences(model, keras.saving.load_model(tmp_path / "m.keras")) == []


def test_classifier_file_keeps_everything(tmp_path):
    model = Classifier(unusual("registers", "mixed_bfloat16"))
    model.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    assert differences(model.vit, again.vit) == []
    assert again.get_config() == model.get_config()


@pytest.mark.backend_free
@pytest.mark.parametrize("loses", ["labels", "trainable_parts", "dtype", "drop_path"])
def test_a_file_that_loses_something_is_noticed(loses, tmp_path, monkeypatch):
    model = unusual("registers", "mixed_bfloat16")
    kept = ViT.get_config

    def less(self):
        config = kept(self)
        for fields in (config, config.get("config", {})):
            fields.pop(loses, None)
        return config

    monkeypatch.setattr(ViT, "get_config", less)
    model.save(tmp_path / "m.keras")
    assert differences(model, keras.saving.load_model(tmp_path / "m.keras"))


@pytest.mark.backend_free
def test_another_weight_is_noticed(tmp_path):
    model = unusual("registers", "float32")
    model.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    bias = again.get_layer("head").bias
    bias.assign(to_numpy(bias.value) + 1)
    assert differences(model, again) == ["value head/bias"]


@pytest.mark.only_on("tensorflow")
@pytest.mark.parametrize("name", EXPORTS)
def test_exports_keep_the_config_and_the_labels(name, tmp_path):
    model = unusual("registers", "float32")
    getattr(keras_vit, EXPORTS[name])(model, tmp_path / name)
    opened = runtime.open(tmp_path / name)
    assert opened.config == model.config and opened.labels == LABELS
    changed = model.config.replace(labels=("cat", "élan &<", "emu"))
    assert opened.config != changed
