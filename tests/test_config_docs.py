"""`help()` shows the fields of a config, and the factories' arguments, with their docs."""

import dataclasses
import inspect
import sys

import pytest

import keras_vit
from keras_vit import ViTConfig, variants
from keras_vit.config_docs import field_docs, with_fields

pytestmark = pytest.mark.backend_free
NAMES = [f.name for f in dataclasses.fields(ViTConfig)]


def test_every_field_is_documented():
    docs = field_docs(ViTConfig)
    assert list(docs) == NAMES and all(docs.values())
    assert docs["num_classes"].startswith("Number of classes; 0 means no head")
    assert inspect.getdoc(ViTConfig).count("\n    drop_path: Stochastic depth") == 1


@pytest.mark.parametrize("variant", keras_vit.list_variants())
def test_factory_shows_its_fields_and_defaults(variant):
    function = getattr(keras_vit, variant)
    parameters = inspect.signature(function).parameters
    assert {*NAMES, *variants.ARGUMENTS} == parameters.keys()
    assert parameters["width"].default == variants.SIZES[variant].width
    text = inspect.getdoc(function)
    assert all(f"\n    {name}: " in text for name in parameters)


def test_defaults_shown_are_those_of_the_model():
    size = {
        "width": 8,
        "depth": 1,
        "num_heads": 2,
        "mlp_dim": 8,
        "image_size": 28,
        "num_classes": 2,
    }
    for variant in ("vit_giant2_14", "vit_so400m14"):
        parameters = inspect.signature(getattr(keras_vit, variant)).parameters
        config = getattr(keras_vit, variant)(**size).config.to_dict()
        shown = {k: parameters[k].default for k in NAMES if k not in size and k != "patch_size"}
        assert shown == {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()
                         if k in shown}  # fmt: skip


def test_without_a_source_the_names_remain(monkeypatch):
    monkeypatch.setattr(sys.modules["keras_vit.config"].__spec__, "loader", None)
    field_docs.cache_clear()

    def factory(weights=None, **fields):
        """A factory."""

    with_fields(factory, ViTConfig, {"width": 8}, {"weights": "A file.", "name": "Its name."})
    field_docs.cache_clear()
    assert list(inspect.signature(factory).parameters) == ["weights", *NAMES, "name"]
    assert "\n    width:\n" in factory.__doc__ and "Stochastic" not in factory.__doc__
