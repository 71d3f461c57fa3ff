"""Google's and big_vision's .npz files against a NumPy reference of their published code."""

import flax_reference as flax
import numpy as np
import pytest
import scipy.ndimage
from weights_sources import assert_same_logits, images, logits

import keras_vit
from keras_vit.weights.load import inspect

GOOGLE = {
    "token": {},
    "gap": {"token": False},
    "pre_logits": {"representation": 6},
    "old prefix": {"prefix": "opt/target/"},
    "no head": {"classes": 0},
    "not square": {"patch": (8, 6), "rows": 12},
    "resnet root": {"resnet": (), "patch": (2, 2)},
    "resnet": {"resnet": (2, 1), "patch": (1, 1), "old": True, "prefix": "opt/target/"},
    "resnet, three stages": {"resnet": (1, 1, 2), "patch": (1, 1), "rows": 4},
}
BIG_VISION = {
    "gap": {},
    "token": {"token": True},
    "old": {"token": True, "old": True},
    "scan": {"scan": True},
    "sincos": {"positions": False},
    "map": {"pooling": "MAPHead_0/"},
    "map without a module": {"pooling": "", "classes": 0},
    "map of another size": {"pooling": "MAPHead_0/", "pooling_heads": 4, "pooling_mlp": 24},
}


def save(tmp_path, arrays, name="file.npz"):
    np.savez(tmp_path / name, **arrays)
    return tmp_path / name


@pytest.mark.sampled
@pytest.mark.parametrize("kind", GOOGLE)
def test_google_logits_equal_reference(tmp_path, kind):
    params = flax.random_google(**GOOGLE[kind])
    size = {"image_size": (32, 18)} if kind == "not square" else {}
    plain = {k.removeprefix("opt/target/"): v for k, v in params.items()}
    model = assert_same_logits(
        save(tmp_path, params),
        lambda batch: flax.google(plain, batch),
        wrong={"norm_epsilon": 10.0},
        **size,
    )
    assert model.config.interpolation == "google"


def test_google_numerics_are_its_own(tmp_path):
    params = flax.random_google()
    path = save(tmp_path, params)
    expected = flax.google(params, images())
    for wrong in ({"gelu": "exact"}, {"norm_epsilon": 1e-3}):
        model = keras_vit.from_pretrained(path, **wrong)
        assert np.abs(logits(model, images()) - expected).max() > 1e-5, wrong


@pytest.mark.parametrize("kind", BIG_VISION)
@pytest.mark.parametrize("prefix", ["", "params/", "params/img/"])
def test_big_vision_logits_equal_reference(tmp_path, kind, prefix):
    params = flax.random_big_vision(**BIG_VISION[kind])
    arrays = {prefix + name: array for name, array in params.items()}
    if prefix == "params/img/":
        arrays |= {"params/t": np.ones(1, "float32"), "params/txt/Embed_0/embedding": np.ones(3)}
    size = {"image_size": 24} if kind == "sincos" else {}
    path = save(tmp_path, arrays)
    model = assert_same_logits(path, lambda x: flax.big_vision(params, x), **size)
    assert model.config.class_row == (kind == "old")


def test_big_vision_bfloat16_is_read(tmp_path):
    params = flax.random_big_vision(scan=True)
    short = {k: (v.view("uint32") >> 16).astype("uint16").view("V2") for k, v in params.items()}
    cut = {k: (v.view("uint32") & 0xFFFF0000).view("float32") for k, v in params.items()}
    assert_same_logits(save(tmp_path, short), lambda x: flax.big_vision(cut, x))
    difference = flax.big_vision(params, images()) - flax.big_vision(cut, images())
    assert np.abs(difference).max() > 1e-4


def test_big_vision_trunk_loads_without_its_attention_pooling(tmp_path):
    params = flax.random_big_vision(classes=0, pooling="MAPHead_0/")
    path = save(tmp_path, params)
    trunk = {k: v for k, v in params.items() if not k.startswith("MAPHead_0/")}
    assert_same_logits(path, lambda x: flax.big_vision(trunk, x), pooling="mean")
    dropped = inspect(path, pooling="mean").dropped
    assert set(dropped) == set(params) - set(trunk)
    assert set(dropped.values()) == {"not used: pooling='mean'"}


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("token", "size", "fields"),
    [
        (True, 40, {}),
        (False, 56, {}),
        (True, 16, {}),
        (True, 40, {"resnet": (1, 1), "patch": (1, 1)}),
    ],
)
def test_google_resolution_equals_scipy_zoom(tmp_path, token, size, fields):
    params = flax.random_google(token=token, **fields)
    name = "Transformer/posembed_input/pos_embedding"
    table, new = params[name][0], size // 8
    grid = table[int(token) :].reshape(3, 3, -1)
    grid = scipy.ndimage.zoom(grid, (new / 3, new / 3, 1), order=1).reshape(new * new, -1)
    resized = np.concatenate([table[: int(token)], grid])[None]
    assert_same_logits(
        save(tmp_path, params),
        lambda x: flax.google({**params, name: resized}, x),
        wrong={"interpolation": "timm"},
        image_size=size,
    )


@pytest.mark.backend_free
def test_google_pre_logits_leave_with_the_head_they_served(tmp_path):
    path = save(tmp_path, flax.random_google(representation=6))
    assert keras_vit.from_pretrained(path).config.representation_size == 6
    new = inspect(path, num_classes=7)
    assert new.config.representation_size is None
    assert set(new.dropped) == {
        f"{n}/{k}" for n in ("pre_logits", "head") for k in ("kernel", "bias")
    }
    assert inspect(path, num_classes=7, representation_size=6).config.representation_size == 6


def test_google_stem_is_read_from_the_names(tmp_path):
    path = save(tmp_path, flax.random_google(resnet=(1, 1, 2), patch=(2, 1), rows=4))
    config = inspect(path).config
    assert (config.stem, config.stem_depths, config.stem_width) == ("resnet", (1, 1, 2), 32)
    assert (config.patch_size, config.image_size, config.in_channels) == ((32, 16), (64, 32), 3)
    assert (config.stem_epsilon, config.stem_standardization) == (1e-6, "deviation")


def test_google_stem_has_numerics_of_its_own(tmp_path):
    """What is added to a deviation shows where filters are small, each in its own measure."""
    params = flax.random_google(resnet=(2, 1), patch=(1, 1))
    params["block1/unit1/conv3/kernel"] *= np.logspace(-6, -3, 128, dtype="float32")[::-1]
    params["block1/unit2/conv3/kernel"] *= np.tile([1e-6, 1e-5, 1e-4, 1e-3], 32).astype("float32")
    path = save(tmp_path, params)
    for wrong in ({"stem_epsilon": 30.0}, {"stem_standardization": "variance"}):
        assert_same_logits(path, lambda batch: flax.google(params, batch), wrong)


@pytest.mark.backend_free
def test_google_stem_takes_other_channels(tmp_path):
    path = save(tmp_path, flax.random_google(resnet=(), patch=(2, 2)))
    colored = keras_vit.from_pretrained(path)
    gray = keras_vit.from_pretrained(path, in_channels=1)
    kernel, summed = (m.get_layer("stem").root_conv.kernel for m in (colored, gray))
    np.testing.assert_allclose(summed.numpy()[:, :, 0], kernel.numpy().sum(2), rtol=1e-5)


@pytest.mark.backend_free
def test_google_stem_that_is_cut_is_refused(tmp_path):
    whole = flax.random_google(resnet=(2, 1), patch=(1, 1))
    for cut, said in (
        ("block1/unit1/", r"wrong shape: 'block1/unit2/conv1|missing: 'block1/unit1"),
        ("block1/", "stem_depths must be a tuple of positive ints"),
        ("block2/unit1/conv_proj/kernel", "missing: 'block2/unit1/conv_proj/kernel'"),
        ("gn_root/", "missing: 'gn_root/scale'"),
    ):
        arrays = {name: array for name, array in whole.items() if not name.startswith(cut)}
        with pytest.raises(ValueError, match=said):
            keras_vit.from_pretrained(save(tmp_path, arrays))


@pytest.mark.backend_free
@pytest.mark.parametrize("kind", ["google", "google hybrid", "big_vision"])
def test_flax_round_trip_is_bitwise(tmp_path, kind):
    format = kind.split()[0]
    if kind == "google":
        params = flax.random_google(representation=6)
    elif kind == "google hybrid":
        params = flax.random_google(resnet=(2, 1), patch=(1, 1))
    else:
        params = flax.random_big_vision(token=True)
    model = keras_vit.from_pretrained(save(tmp_path, params))
    written = keras_vit.save_pretrained(model, tmp_path / "back.npz", format=format)
    with np.load(written) as back:
        assert set(back) == set(params)
        assert all(np.array_equal(back[name], params[name]) for name in params)
