"""Unknown keywords: the names of other libraries are answered by ours, others by similar ones."""

import dataclasses

import numpy as np
import pytest

import keras_vit
from keras_vit import ViTConfig
from keras_vit.config_names import RENAMED, check_names

pytestmark = pytest.mark.backend_free
KNOWN = [f.name for f in dataclasses.fields(ViTConfig)]


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"include_top": False}, "pass num_classes=0"),
        ({"include_top": True}, "omit include_top"),
        ({"pretrained": True}, "weights='augreg_in21k'"),
        ({"pretrained": False}, "omit pretrained"),
        ({"input_shape": (96, 64, 1)}, r"image_size=\(96, 64\) and in_channels=1"),
        ({"classes": 10}, "for classes pass num_classes"),
        ({"global_pool": "avg"}, "for global_pool='avg' pass pooling='mean'"),
        ({"mlp_ratio": 4.0}, "pass mlp_dim"),
        ({"id2label": {}}, "pass labels"),
        ({"hidden_size": 8, "classes": 2}, "pass width; for classes pass num_classes"),
        ({"nclasses": 3}, r"did you mean num_classes, class_token\? Received: nclasses=3"),
        ({"qqqqq": 3}, r"help\(keras_vit.ViTConfig\) lists them\. Received: qqqqq=3"),
    ],
)
def test_unknown_keyword_is_answered(fields, answer):
    with pytest.raises(ValueError, match=answer):
        check_names(fields, KNOWN)


def test_known_keywords_pass_and_renamed_ones_exist():
    check_names(dict.fromkeys(KNOWN), KNOWN)
    assert set(RENAMED.values()) <= set(KNOWN) and not set(RENAMED) & set(KNOWN)


def test_factory_and_from_pretrained_answer_before_they_read(tmp_path):
    for call in (
        lambda: keras_vit.vit_ti16(include_top=False),
        lambda: keras_vit.vit_ti16(weights=tmp_path / "none", include_top=False),
        lambda: keras_vit.from_pretrained(tmp_path / "none", include_top=False),
    ):
        with pytest.raises(ValueError, match="num_classes=0"):
            call()


def test_pooling_of_keras_applications_is_translated():
    with pytest.raises(ValueError, match=r"pooling must be one of .*\('avg' is 'mean' here\)"):
        ViTConfig(pooling="avg")
    with pytest.raises(ValueError, match="pooling must be one of") as error:
        ViTConfig(pooling="max")
    assert "here" not in str(error.value)


def test_labels_alone_set_the_number_of_classes():
    assert ViTConfig.from_dict({"labels": ["a", "b", "c"]}).num_classes == 3
    array = ViTConfig(num_classes=2, labels=np.array(["a", "b"])).labels
    assert array == ("a", "b") and type(array[0]) is str
    for labels in (np.array([["a", "b"]]), np.arange(2), "ab"):
        with pytest.raises(ValueError, match="labels must be None or a sequence"):
            ViTConfig(num_classes=2, labels=labels)
    with pytest.raises(ValueError, match="num_classes=4 strings"):
        ViTConfig.from_dict({"labels": ["a", "b", "c"], "num_classes": 4})
