"""`MAE` against transformers' ViTMAEForPreTraining, from the same files."""

import math

import keras
import numpy as np
import pytest
import weights_sources as sources

import keras_vit
from keras_vit.deferred import deferred
from keras_vit.train import MAE, Checkpoint

PATCHES = 9
NOISE = np.random.default_rng(3).permuted(np.tile(np.linspace(0, 0.9, PATCHES), (2, 1)), axis=1)
DECODER = {
    "decoder_hidden_size": 16,
    "decoder_num_attention_heads": 4,
    "decoder_num_hidden_layers": 2,
    "decoder_intermediate_size": 24,
}


class Fixed(MAE):
    """An MAE whose masks are those of `NOISE`."""

    def call(self, images, training=None):
        return super().call(images, training, noise=NOISE.astype("float32"))


def transformers_mae(folder, normalize=True, **fields):
    source = sources.huggingface_vit(
        "ViTMAEForPreTraining", norm_pix_loss=normalize, mask_ratio=0.6, **DECODER, **fields
    )
    source.save_pretrained(folder)
    return source


def torch_step(source, batch):
    """Loss, prediction and mask; the gradients are in the parameters."""
    import torch

    pixels = torch.from_numpy(np.ascontiguousarray(batch.transpose(0, 3, 1, 2)))
    out = source(pixels, noise=torch.from_numpy(NOISE))
    out.loss.backward()
    return float(out.loss.detach()), out.logits.detach().numpy(), out.mask.numpy()


def arrays(model):
    return {w.path: np.array(keras.ops.convert_to_numpy(w)) for w in model.weights}


def tiny(dtype=None, **fields):
    config = dict(image_size=24, patch_size=8, width=16, depth=2, num_heads=2, mlp_dim=24)
    return keras_vit.ViT({**config, "num_classes": 3, **fields}, dtype=dtype)


def small(vit=None, cls=MAE, **arguments):
    sizes = dict(decoder_width=8, decoder_depth=1, decoder_heads=2)
    return cls(vit or tiny(), **{**sizes, "seed": 1, **arguments})


def step_of_both(folder, normalize):
    """transformers' and our model from one file, and theirs after a step on the same images."""
    source, batch = transformers_mae(folder / "mae", normalize), 2 * sources.images() + 0.5
    source.vit.embeddings.position_embeddings.requires_grad_(True)  # ours is trained
    expected = torch_step(source, batch)
    mae = Fixed.from_pretrained(folder / "mae")
    mae.compile(keras.optimizers.SGD(1.0))
    return source, batch, mae, expected


@pytest.mark.sampled
@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize("normalize", [True, False])
def test_prediction_and_loss_equal_transformers(tmp_path, normalize):
    _, batch, mae, (loss, prediction, mask) = step_of_both(tmp_path, normalize)
    assert mae.normalize_pixels is normalize and mae.num_visible == int(PATCHES * 0.4) == 3
    outputs = mae(batch)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(outputs["mask"]), mask)
    found = keras.ops.convert_to_numpy(outputs["prediction"])
    np.testing.assert_allclose(found, prediction, atol=2e-4)
    for right in (True, False):
        mae.normalize_pixels = normalize is right
        found = keras.ops.convert_to_numpy(mae.compute_loss(batch, None, outputs))
        assert bool(abs(found - loss) < 1e-5 * loss) is right


@pytest.mark.usefixtures("torchvision")
def test_gradients_equal_transformers(tmp_path):
    source, batch, mae, (loss, _, _) = step_of_both(tmp_path, True)
    before = arrays(mae)
    np.testing.assert_allclose(mae.train_on_batch(batch), loss, rtol=1e-5)
    after = arrays(mae)
    # transformers writes the gradients as if they were weights: read back, they have our names.
    for parameter in source.parameters():
        parameter.data = parameter.data * 0 if parameter.grad is None else parameter.grad
    source.save_pretrained(tmp_path / "gradients")
    expected = arrays(Fixed.from_pretrained(tmp_path / "gradients"))
    expected["decoder/positions"] *= 0  # not trained
    scale = max(np.abs(gradient).max() for gradient in expected.values())
    for path, gradient in expected.items():
        found = before[path] - after[path]
        np.testing.assert_allclose(found, gradient, atol=3e-5 * scale, err_msg=path)
    assert scale > 1e-2


def raw_names(arrays):
    """transformers' arrays under the names of facebookresearch/mae."""
    words = {
        "vit.embeddings.patch_embeddings.projection": "patch_embed.proj",
        "vit.embeddings.position_embeddings": "pos_embed",
        "vit.embeddings.cls_token": "cls_token",
        "vit.layernorm": "norm",
        "vit.encoder.layer.": "blocks.",
        "decoder.decoder_encoder.layer.": "decoder_blocks.",
        "decoder.": "",
        "attention.output.dense": "attn.proj",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
        "layernorm_before": "norm1",
        "layernorm_after": "norm2",
    }
    raw = {}
    for name, array in arrays.items():
        for theirs, rawly in words.items():
            name = name.replace(theirs, rawly)
        raw[name] = array
    for name in [name for name in raw if "attention.attention.query" in name]:
        parts = [raw.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        raw[name.replace("attention.attention.query", "attn.qkv")] = np.concatenate(parts)
    return raw


@pytest.mark.backend_free
@pytest.mark.usefixtures("torchvision")
def test_raw_file_is_the_same_model(tmp_path):
    from safetensors.numpy import load_file

    transformers_mae(tmp_path / "mae", layer_norm_eps=1e-6)
    theirs = MAE.from_pretrained(tmp_path / "mae")
    raw = raw_names(load_file(tmp_path / "mae" / "model.safetensors"))
    path = sources.bare(tmp_path, raw)
    ours = MAE.from_pretrained(path, num_heads=5, decoder_heads=4, mask_ratio=0.6)
    for name, value in arrays(theirs).items():
        np.testing.assert_array_equal(arrays(ours)[name], value, err_msg=name)
    batch = sources.images()
    expected = theirs.predict(batch, verbose=0)["prediction"]
    np.testing.assert_allclose(ours.predict(batch, verbose=0)["prediction"], expected, atol=1e-5)
    published = {
        name.replace("decoder_encoder.layer", "decoder_layers"): array
        for name, array in load_file(tmp_path / "mae" / "model.safetensors").items()
    }
    path = sources.bare(tmp_path, published, "published.safetensors")
    again = MAE.from_pretrained(path, num_heads=5, decoder_heads=4)
    for name, value in arrays(theirs).items():
        np.testing.assert_array_equal(arrays(again)[name], value, err_msg=name)
    wrong = MAE.from_pretrained(path, num_heads=5, decoder_heads=2, mask_ratio=0.6)
    assert np.abs(wrong.predict(batch, verbose=0)["prediction"] - expected).max() > 1e-2


def test_pixels_of_hidden_patches_do_not_reach_the_encoder():
    mae = small(tiny(num_registers=1))
    lengths = []
    for block in mae.vit.blocks:
        attend = block.call
        block.call = lambda x, attend=attend, **kw: lengths.append(x.shape[1]) or attend(x, **kw)
    images = sources.images()
    outputs = mae(images)
    assert (
        lengths == [2 + int(PATCHES * 0.25)] * 2
    )  # class token, register, a quarter of the patches
    mask = keras.ops.convert_to_numpy(outputs["mask"])
    assert mask.sum(axis=1).tolist() == [7, 7] and set(mask.ravel()) == {0, 1}
    pixels = mask.reshape(2, 3, 3).repeat(8, axis=1).repeat(8, axis=2)[..., None] > 0
    noise = 100 * np.random.default_rng(0).normal(size=images.shape)
    expected = keras.ops.convert_to_numpy(outputs["prediction"])
    for changed, same in ((pixels, True), (~pixels, False)):
        other = mae(np.where(changed, noise, images).astype("float32"))
        found = keras.ops.convert_to_numpy(other["prediction"])
        assert np.array_equal(found, expected) is same


def test_loss_is_the_error_of_normalized_hidden_patches():
    """By hand: patches of two pixels, 1 and 3, are -1 and 1 over sqrt(2) when normalized."""
    vit = tiny(image_size=(2, 2), patch_size=(1, 2), in_channels=1)
    images = np.float32([[1, 3], [5, 5]])[None, :, :, None]
    prediction = keras.ops.convert_to_tensor([[[1.0, 2.0], [0.0, 4.0]]])
    mae = small(vit, mask_ratio=0.5)
    for mask, expected in (
        # (1 + 0.5^0.5)^2 and (2 - 0.5^0.5)^2, halved; 0 and 4^2, halved
        ([[1, 0]], ((1 + 0.5**0.5) ** 2 + (2 - 0.5**0.5) ** 2) / 2),
        ([[0, 1]], 8.0),
    ):
        outputs = {"prediction": prediction, "mask": keras.ops.convert_to_tensor(mask, "float32")}
        loss = keras.ops.convert_to_numpy(mae.image_losses(images, None, outputs))
        np.testing.assert_allclose(loss, [expected], rtol=1e-5)
    plain = small(vit, mask_ratio=0.5, normalize_pixels=False)
    outputs = {"prediction": prediction, "mask": keras.ops.convert_to_tensor([[1.0, 0.0]])}
    loss = keras.ops.convert_to_numpy(plain.image_losses(images, None, outputs))
    np.testing.assert_allclose(loss, [0.5], rtol=1e-6)  # (1 - 1)^2 and (3 - 2)^2, halved


def test_visible_patches_differ_by_image_and_step_and_each_is_hidden_as_often():
    mae, images = small(), np.zeros((300, 24, 24, 3), "float32")
    masks = [keras.ops.convert_to_numpy(mae(images, training=True)["mask"]) for _ in range(2)]
    assert np.abs(masks[0] - masks[1]).max() == 1 and len(np.unique(masks[0], axis=0)) > 20
    np.testing.assert_allclose(np.mean(masks, axis=(0, 1)), 7 / 9, atol=0.08)


def test_decoder_knows_positions_as_mae_does():
    table = keras.ops.convert_to_numpy(small().decoder.positions)
    assert table.shape == (10, 8) and not table[0].any()
    # The patch in row 1, column 2: frequencies 1 and 10000^-0.5, the columns first.
    expected = [np.sin(2), np.sin(0.02), np.cos(2), np.cos(0.02)]
    expected += [np.sin(1), np.sin(0.01), np.cos(1), np.cos(0.01)]
    np.testing.assert_allclose(table[1 + 3 + 2], expected, atol=1e-6)


@pytest.mark.backend_free
def test_defaults_are_the_published_size():
    """ViTMAEForPreTraining(ViTMAEConfig()) has as many parameters, positions included."""
    with deferred():
        mae = MAE(keras_vit.ViT(keras_vit.ViTConfig(num_classes=0)))
    assert sum(math.prod(weight.shape) for weight in mae.weights) == 111_907_840
    assert mae.num_visible == 49


def stripes(count=16):
    """Smooth images, whose hidden patches can be told from the others."""
    rng = np.random.default_rng(1)
    rows, columns = np.mgrid[:24, :24][..., None] / 24
    slopes = rng.normal(size=(2, count, 1, 1, 3))
    return (slopes[0] * rows + slopes[1] * columns).astype("float32")


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_fit_reduces_the_loss_and_trains_encoder_and_decoder(dtype):
    mae = small(tiny(dtype, num_classes=0, depth=1), mask_ratio=0.5)
    mae.compile(keras.optimizers.Adam(1e-2))
    before, images = arrays(mae), stripes()
    loss = mae.evaluate(images, verbose=0)
    mae.fit(images, epochs=12, verbose=0)
    assert mae.evaluate(images, verbose=0) < 0.75 * loss
    same = {p for p, value in arrays(mae).items() if np.array_equal(value, before[p])}
    assert same == {"decoder/positions"}


def test_resuming_and_saving_keep_all_state(tmp_path):
    def compiled():
        keras.utils.set_random_seed(0)
        mae = small(tiny(depth=1))
        mae.compile(keras.optimizers.Adam(1e-3))
        return mae

    arguments = dict(batch_size=8, shuffle=False, verbose=0)
    whole, second = compiled(), compiled()
    checkpoint = Checkpoint(tmp_path / "run")
    checkpoint.restore(whole)
    whole.fit(stripes(), callbacks=checkpoint.around([]), **arguments)
    checkpoint = Checkpoint(tmp_path / "run")
    checkpoint.restore(second)
    for mae in (whole, second):
        mae.fit(stripes(), epochs=2, initial_epoch=1, **arguments)
    for path, value in arrays(whole).items():
        np.testing.assert_array_equal(arrays(second)[path], value, err_msg=path)
    fresh = arrays(compiled())
    assert np.abs(fresh["decoder/mask_token"] - arrays(whole)["decoder/mask_token"]).max() > 0
    whole.save(tmp_path / "mae.keras")
    loaded = keras.saving.load_model(tmp_path / "mae.keras")
    assert isinstance(loaded, MAE) and loaded.get_config() == whole.get_config()
    for path, value in arrays(whole).items():
        np.testing.assert_array_equal(arrays(loaded)[path], value, err_msg=path)
    whole.vit.save(tmp_path / "vit.keras")
    vit = keras.saving.load_model(tmp_path / "vit.keras")
    assert type(vit) is keras_vit.ViT and vit.output_shape == (None, 3)


def test_reconstruct_returns_images_in_the_unit_range():
    vit = tiny(pixel_mean=(0.5, 0.4, 0.3), pixel_std=(0.2, 0.3, 0.4), ignore_remainder=True)
    vit = keras_vit.ViT(vit.config.replace(image_size=26))
    pixels = np.random.default_rng(0).uniform(size=(2, 26, 26, 3))
    images = ((pixels - vit.config.pixel_mean) / np.array(vit.config.pixel_std)).astype("float32")
    for normalize in (True, False):
        mae = small(vit, normalize_pixels=normalize)
        original, masked, rebuilt = mae.reconstruct(images)
        np.testing.assert_allclose(original, pixels[:, :24, :24], atol=1e-5)
        hidden = (masked == 0.5).all(axis=-1)
        assert hidden.sum() == 2 * 7 * 64
        np.testing.assert_array_equal(masked[~hidden], original[~hidden])
        np.testing.assert_array_equal(rebuilt[~hidden], original[~hidden])
        assert np.abs(rebuilt - original)[hidden].max() > 0.1
        assert 0 <= rebuilt.min() and rebuilt.max() <= 1 and rebuilt.dtype == "float32"
        # Zeros are the mean of a patch where pixels are normalized.
        outputs = {"prediction": keras.ops.zeros((2, 9, 192))}
        found = keras.ops.convert_to_numpy(mae.predicted_pixels(images, outputs))
        mean = original.reshape(2, 3, 8, 3, 8, 3).transpose(0, 1, 3, 2, 4, 5).reshape(2, 9, -1)
        scaled = (np.array(vit.config.pixel_mean), np.array(vit.config.pixel_std))
        mean = ((mean.reshape(2, 9, 64, 3) - scaled[0]) / scaled[1]).mean(axis=(2, 3))
        np.testing.assert_allclose(found[..., 0], mean if normalize else 0 * mean, atol=1e-5)


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        ({"position_embedding": "rope", "head_dim": 8}, {}, "vit.config.position_embedding must"),
        ({"position_embedding": "learned+relative_bias"}, {}, "vit.config.position_embedding must"),
        ({"stem": "resnet", "stem_width": 32}, {}, "vit.config.stem must be None"),
        ({"patch_dropout": 0.5}, {}, "vit.config.patch_dropout must be 0"),
        ({"image_size": 8}, {}, "vit.config.image_size must hold at least two patches"),
        ({}, {"mask_ratio": 1}, "mask_ratio must be a number greater than 0 and less than 1"),
        ({}, {"mask_ratio": 0.95}, "mask_ratio must leave at least one of the 9 patches"),
        ({}, {"decoder_width": 10}, "decoder_width must be a multiple of 4"),
        ({}, {"decoder_heads": 3}, "decoder_heads must divide decoder_width=8"),
        ({}, {"decoder_depth": 0}, "decoder_depth must be a positive int"),
        ({}, {"normalize_pixels": 1}, "normalize_pixels must be True or False"),
    ],
)
def test_what_cannot_be_trained_is_refused(fields, arguments, message):
    with pytest.raises(ValueError, match=message):
        small(tiny(**fields), **arguments)


def decoder_file(folder, image_size=24, **changes):
    """A raw file of a tiny encoder and a decoder of our making."""
    from keras_vit.weights.formats.mae_decoder import read_decoder
    from keras_vit.weights.formats.table import Header
    from keras_vit.weights.formats.timm import timm_rows

    mae = small(tiny(image_size=image_size, num_classes=0))
    values = {w.path: keras.ops.convert_to_numpy(w) for w in mae.vit.weights}
    found = {row.source: row.to_source(values.get) for row in timm_rows(mae.vit.config)}
    values = {
        w.path.removeprefix("decoder/"): keras.ops.convert_to_numpy(w) for w in mae.decoder.weights
    }
    shapes = {"decoder_embed.weight": (8, 16), "decoder_blocks.0.mlp.fc1.weight": (32, 8)}
    for row in read_decoder("mae", Header(shapes)).rows:
        found[row.source] = row.to_source(values.get)
    found |= changes
    found = {name: array for name, array in found.items() if array is not None}
    return mae, sources.bare(folder, found)


@pytest.mark.backend_free
def test_decoder_of_another_grid_gets_new_positions(tmp_path):
    mae, path = decoder_file(tmp_path)
    same = MAE.from_pretrained(path, num_heads=2, decoder_heads=2)
    for name, value in arrays(mae).items():
        np.testing.assert_array_equal(arrays(same)[name], value, err_msg=name)
    larger = MAE.from_pretrained(path, num_heads=2, decoder_heads=2, image_size=32)
    expected = small(tiny(image_size=32)).decoder.positions
    np.testing.assert_array_equal(
        *map(keras.ops.convert_to_numpy, (larger.decoder.positions, expected))
    )
    np.testing.assert_array_equal(
        *map(keras.ops.convert_to_numpy, (larger.decoder.pixels.kernel, mae.decoder.pixels.kernel))
    )


@pytest.mark.backend_free
def test_wrong_files_are_refused_by_the_name_of_the_array(tmp_path):
    rest = {"num_heads": 2, "decoder_heads": 2}
    cases = {
        "missing: 'decoder_norm.bias'": {"decoder_norm.bias": None},
        "wrong shape: 'mask_token'": {"mask_token": np.zeros((1, 1, 9), "float32")},
        "extra: 'decoder_mystery'": {"decoder_mystery": np.zeros(3, "float32")},
        "decoder_pred.bias: 192 NaN": {"decoder_pred.bias": np.full(192, np.nan, "float32")},
    }
    for message, change in cases.items():
        _, path = decoder_file(tmp_path, **change)
        with pytest.raises(ValueError, match=message):
            MAE.from_pretrained(path, **rest)
    path = keras_vit.save_pretrained(tiny(), tmp_path / "encoder", format="timm")
    with pytest.raises(ValueError, match="with its decoder"):
        MAE.from_pretrained(path, **rest)
