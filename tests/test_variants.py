"""The published sizes: parameter counts from their sources, and tables of every array."""

import json
import re
from pathlib import Path

import keras
import pytest

import keras_vit
from keras_vit import ViTConfig, variants

GOLDEN = Path(__file__).parent / "golden_variants.json"

# Counts for 224 px, three channels, 1000 classes, a class token: with and without the head.
PUBLISHED = {
    "vit_ti16": (5_717_416, 5_524_416),
    "vit_s32": (22_878_952, 22_493_952),
    "vit_s16": (22_050_664, 21_665_664),
    "vit_s8": (22_055_272, 21_670_272),
    "vit_m16": (38_837_736, 38_324_736),
    "vit_b32": (88_224_232, 87_455_232),
    "vit_b16": (86_567_656, 85_798_656),
    "vit_b8": (86_576_872, 85_807_872),
    "vit_l32": (306_535_400, 305_510_400),
    "vit_l16": (304_326_632, 303_301_632),
    "vit_l14": (304_203_752, 303_178_752),
    "vit_h14": (632_045_800, 630_764_800),
    "vit_g14": (1_012_611_432, 1_011_202_432),
    "vit_gigantic14": (1_844_440_680, 1_842_775_680),
    "vit_so400m14": (412_442_352 + 1_153_000, 412_442_352),
    "vit_giant2_14": (1_136_306_664, 1_134_769_664),
    "vit_splus16": (29_077_480, 28_692_480),
    "vit_hplus16": (841_872_360, 840_591_360),
    "vit_7b16": (6_720_127_976, 6_716_030_976),
    "vit_r_ti16": (6_337_704, 6_144_704),
    "vit_r26_s32": (36_431_912, 36_046_912),
    "vit_r50_b16": (98_659_112, 97_890_112),
    "vit_r50_l32": (328_994_856, 327_969_856),
}


def without_memory(variant, **fields):
    """The variant with shapes and initializers, but no array."""
    with keras.StatelessScope(initialize_variables=False):
        model = getattr(keras_vit, variant)(**fields)
    keras.utils.clear_session()  # or the next scope would allocate what this one put off
    return model


def table(model):
    """`path: [shape, initializer]` of every array.

    One block stands for all, and one unit of a stem's stage for all but the first.
    """
    rows = {}
    for v in model.weights:
        initializer = type(v._initializer).__name__
        config = v._initializer.get_config()
        numbers = [
            f"{config[k]:.6g}" for k in ("stddev", "minval", "maxval", "value") if k in config
        ]
        row = [list(v.shape), " ".join([initializer, *numbers])]
        path = re.sub(r"(?<=^encoder_block_)\d+|(?<=_unit_)[1-9]\d*", "*", v.path)
        if path != v.path:
            assert rows.setdefault(path, row) == row, v.path
        else:
            rows[v.path] = row
    return rows


def test_variants_are_all_public():
    assert set(keras_vit.list_variants()) == set(PUBLISHED)
    assert set(PUBLISHED) <= set(keras_vit.__all__)


@pytest.mark.backend_free
@pytest.mark.parametrize("variant", PUBLISHED)
def test_variant_has_the_published_parameters(variant):
    with_head, trunk = PUBLISHED[variant]
    assert without_memory(variant).count_params() == with_head
    assert without_memory(variant, num_classes=0).count_params() == trunk


@pytest.mark.backend_free
@pytest.mark.parametrize("variant", PUBLISHED)
def test_variant_matches_its_golden_table(variant):
    """After a change on purpose: `python tests/test_variants.py` writes the tables anew."""
    assert table(without_memory(variant)) == json.loads(GOLDEN.read_text())[variant]


@pytest.mark.backend_free
@pytest.mark.parametrize("variant", PUBLISHED)
def test_variant_cites_its_source(variant):
    size = variants.SIZES[variant]
    assert "arXiv" in size.source or "big_vision" in size.source
    assert getattr(keras_vit, variant).__doc__


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("variant", "count"),
    [
        ("vit_b16", 86_859_496),
        ("vit_r_ti16", 6_355_944),
        ("vit_r26_s32", 36_468_392),
        ("vit_r50_b16", 98_950_952),
        ("vit_r50_l32", 329_092_136),
    ],
)
def test_variant_at_384_has_the_published_parameters(variant, count):
    assert without_memory(variant, image_size=384).count_params() == count


def test_variant_takes_every_field_of_the_config():
    fields = ViTConfig(
        image_size=(24, 16),
        patch_size=8,
        width=20,
        depth=2,
        num_heads=5,
        mlp_dim=28,
        labels=("a", "b"),
        num_classes=2,
        drop_path=0.1,
    ).to_dict()
    model = keras_vit.vit_b16(**fields, name="mine", dtype="mixed_bfloat16", trainable=False)
    assert model.config.to_dict() == fields
    assert model.name == "mine" and model.dtype_policy.name == "mixed_bfloat16"
    assert not model.trainable_weights


def test_variant_refuses_an_unknown_field():
    with pytest.raises(ValueError, match="did you mean patch_size"):
        keras_vit.vit_b16(patchsize=8)


@pytest.mark.backend_free
def test_hybrids_have_the_published_grids():
    """Of R+Ti/16 the root has a stride of 4, and its patches are 8 cells."""
    found = {name: without_memory(name).config for name in PUBLISHED if name.startswith("vit_r")}
    assert {name: (c.grid[0], c.patch_kernel[0]) for name, c in found.items()} == {
        "vit_r_ti16": (7, 8),
        "vit_r26_s32": (7, 1),
        "vit_r50_b16": (14, 1),
        "vit_r50_l32": (7, 1),
    }


def test_so400m14_is_a_trunk_without_class_token():
    config = without_memory("vit_so400m14").config
    assert (config.class_token, config.pooling, config.gelu) == (False, "mean", "tanh")


@pytest.mark.parametrize(
    ("variant", "count"), [("vit_b16", 92_884_224), ("vit_so400m14", 427_680_704)]
)
def test_variant_with_siglips_pooling_has_the_published_parameters(variant, count):
    fields = {"class_token": False, "pooling": "map", "num_classes": 0}
    assert without_memory(variant, **fields).count_params() == count


if __name__ == "__main__":
    tables = {variant: table(without_memory(variant)) for variant in PUBLISHED}
    GOLDEN.write_text(
        json.dumps(tables, indent=None).replace("}, ", "},\n").replace('], "', '],\n  "') + "\n"
    )
