"""The plan of a checkpoint, and the shapes of our weights that it rests on."""

import pytest
from weights_sources import TINY

import keras_vit
from keras_vit.model_weights import weight_shapes
from keras_vit.weights.formats import recognize
from keras_vit.weights.plan import make_plan


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_classes": 0, "class_token": False, "pooling": "mean", "num_registers": 2},
        {"qk_norm": True, "qkv_bias": False, "head_dim": 3, "layer_scale": 0.1},
        {"patch_norm": True, "final_norm": "none", "representation_size": 6},
        {"position_embedding": "learned_2d"},
        {"position_embedding": "sincos_2d", "position_class_row": False},
        {"position_class_row": False, "in_channels": 1, "final_norm": "after_pooling"},
    ],
)
def test_weight_shapes_are_those_of_the_model(fields):
    config = keras_vit.ViTConfig.from_dict({**TINY, "image_size": (24, 16), **fields})
    found = {w.path: tuple(w.shape) for w in keras_vit.ViT(config).weights}
    assert weight_shapes(config) == found


@pytest.mark.backend_free
def test_plan_takes_the_classes_of_a_new_head_from_the_caller_alone():
    """A file with two heads needs `num_classes`, and what the file states is not used."""

    def plan(stated, given):
        shapes = {
            "cls_token": (1, 1, 64),
            "dist_token": (1, 1, 64),
            "pos_embed": (1, 6, 64),
            "patch_embed.proj.weight": (64, 3, 8, 8),
            "blocks.0.norm1.weight": (64,),
            "blocks.0.attn.qkv.weight": (192, 64),
            "blocks.0.mlp.fc1.weight": (8, 64),
            "blocks.0.mlp.fc2.weight": (64, 8),
            "blocks.0.attn.qkv.bias": (192,),
            "head.weight": (3, 64),
        }
        return make_plan(*recognize(shapes, {}), shapes, given, config={}, pixels={}, stated=stated)

    hostile = plan({"num_classes": 2**24}, {})
    assert hostile.target.num_classes == 3
    assert any("num_classes=16777216 is stated" in line for line in hostile.misshaped)
    assert plan({}, {"num_classes": 7}).target.num_classes == 7
