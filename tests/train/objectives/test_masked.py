"""What SimMIM and masked patch prediction have in common, and `reconstruct`."""

import keras
import numpy as np
import pytest

import keras_vit
from keras_vit.train import Checkpoint, MaskedPatchPrediction, SimMIM

CLASSES = {"simmim": SimMIM, "masked_patch_prediction": MaskedPatchPrediction}
CONFIG = dict(image_size=16, patch_size=4, width=16, depth=1, num_heads=2, mlp_dim=24)


def made(name, dtype=None, arguments=None, **fields):
    vit = keras_vit.ViT({**CONFIG, "num_classes": 3, **fields}, dtype=dtype)
    return CLASSES[name](vit, seed=1, **(arguments or {}))


def compiled(name, dtype=None, **fields):
    keras.utils.set_random_seed(0)
    objective = made(name, dtype, **fields)
    objective.compile(keras.optimizers.Adam(1e-2))
    return objective


def stripes(count=16):
    """Smooth images, whose hidden patches can be told from the others."""
    rng = np.random.default_rng(1)
    rows, columns = np.mgrid[:16, :16][..., None] / 16
    slopes = rng.uniform(-1, 1, size=(2, count, 1, 1, 3))
    return (slopes[0] * rows + slopes[1] * columns).astype("float32")


def arrays(model):
    return {w.path: np.array(keras.ops.convert_to_numpy(w)) for w in model.weights}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CLASSES)
def test_fit_reduces_the_loss_and_trains_all_that_is_read(name):
    objective = compiled(name, "mixed_bfloat16", position_embedding="learned+rope", head_dim=8)
    before, images = arrays(objective), stripes()
    loss = objective.evaluate(images, verbose=0)
    objective.fit(images, batch_size=8, epochs=8, verbose=0)
    assert objective.evaluate(images, verbose=0) < 0.8 * loss
    same = {p for p, value in arrays(objective).items() if np.array_equal(value, before[p])}
    # Of the projection of queries and keys the softmax does not see a common bias.
    assert same - {"encoder_block_0/attention/key/bias"} == {"head/kernel", "head/bias"}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CLASSES)
def test_resuming_and_saving_keep_all_state(name, tmp_path):
    arguments = dict(batch_size=8, shuffle=False, verbose=0)
    whole, second = compiled(name), compiled(name)
    checkpoint = Checkpoint(tmp_path / "run")
    checkpoint.restore(whole)
    whole.fit(stripes(), callbacks=checkpoint.around([]), **arguments)
    assert Checkpoint(tmp_path / "run").restore(second).epoch == 1
    for objective in (whole, second):
        objective.fit(stripes(), epochs=2, initial_epoch=1, **arguments)
    for path, value in arrays(whole).items():
        np.testing.assert_array_equal(arrays(second)[path], value, err_msg=path)
    token = f"{name}/mask_token"
    assert np.abs(arrays(compiled(name))[token] - arrays(whole)[token]).max() > 0
    whole.save(tmp_path / "objective.keras")
    loaded = keras.saving.load_model(tmp_path / "objective.keras")
    assert type(loaded) is CLASSES[name] and loaded.get_config() == whole.get_config()
    for path, value in arrays(whole).items():
        np.testing.assert_array_equal(arrays(loaded)[path], value, err_msg=path)
    whole.vit.save(tmp_path / "vit.keras")
    vit = keras.saving.load_model(tmp_path / "vit.keras")
    assert type(vit) is keras_vit.ViT and vit.output_shape == (None, 3)


@pytest.mark.parametrize("positions", ["learned", "learned+relative_bias", "rope_mixed", "none"])
def test_unmasked_tokens_are_those_of_the_vit(positions):
    head = {} if "rope" not in positions else {"head_dim": 8}
    simmim = made("simmim", position_embedding=positions, num_registers=0, **head)
    images = stripes(2)
    expected = keras.ops.convert_to_numpy(simmim.vit.features("tokens")(images))[:, 1:]
    for mask, same in ((0.0, True), (1.0, False)):
        z = simmim._mixed(simmim._embed(images), simmim.mask_token, mask * np.ones((2, 16)))
        found = keras.ops.convert_to_numpy(simmim._encode_patches(z, False))
        assert np.allclose(found, expected, atol=1e-5) is same


def test_building_an_objective_leaves_the_vit_as_it_was(tmp_path):
    vit = keras_vit.ViT(CONFIG)
    before, paths = vit.get_config(), [w.path for w in vit.weights]
    tokens = keras.ops.convert_to_numpy(vit.features("tokens")(stripes(2)))
    for cls in CLASSES.values():
        cls(vit)
    assert vit.get_config() == before and [w.path for w in vit.weights] == paths
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(vit.features("tokens")(stripes(2))), tokens
    )
    larger = vit.resized(32)
    assert larger.config.grid == (8, 8)
    vit.save(tmp_path / "vit.keras")
    assert keras.saving.load_model(tmp_path / "vit.keras").config == vit.config


def test_simmim_reconstructs_images():
    simmim = made("simmim", pixel_mean=(0.5, 0.4, 0.3), pixel_std=(0.2, 0.3, 0.4))
    pixels = np.random.default_rng(0).uniform(size=(2, 16, 16, 3))
    images = ((pixels - simmim.vit.config.pixel_mean) / simmim.vit.config.pixel_std).astype(
        "float32"
    )
    original, masked, rebuilt = simmim.reconstruct(images.astype("float32"))
    np.testing.assert_allclose(original, pixels, atol=1e-5)
    hidden = (masked == 0.5).all(axis=-1)
    assert hidden.sum() == 2 * 3 * 64  # ceil(0.6 * 4) squares of 8 x 8 pixels
    np.testing.assert_array_equal(rebuilt[~hidden], original[~hidden])
    assert np.abs(rebuilt - original)[hidden].max() > 0.1
    assert not hasattr(MaskedPatchPrediction, "reconstruct")  # it predicts colors


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("name", "fields", "arguments", "message"),
    [
        ("simmim", {"stem": "resnet", "stem_width": 32}, {}, "vit.config.stem must be None"),
        ("simmim", {"patch_shift": True}, {}, "vit.config.patch_shift must be False"),
        ("simmim", {"patch_dropout": 0.5}, {}, "vit.config.patch_dropout must be 0"),
        ("simmim", {"image_size": 4}, {}, "vit.config.image_size must hold at least two"),
        ("simmim", {}, {"block_size": 3}, "block_size must divide the rows and columns"),
        ("simmim", {}, {"block_size": 0}, "block_size must be a positive int"),
        ("simmim", {}, {"mask_ratio": 0.9}, "mask_ratio must leave at least one of the 4 squares"),
        ("simmim", {}, {"mask_ratio": 0}, "mask_ratio must be a number greater than 0"),
        ("masked_patch_prediction", {}, {"bits": 6}, "bits must be at most 5 with 3 channels"),
        ("masked_patch_prediction", {}, {"bits": 0.5}, "bits must be a positive int"),
        ("masked_patch_prediction", {}, {"mask_ratio": 1.0}, "mask_ratio must be a number"),
    ],
)
def test_what_cannot_be_trained_is_refused(name, fields, arguments, message):
    with pytest.raises(ValueError, match=message):
        made(name, arguments=arguments, **fields)
