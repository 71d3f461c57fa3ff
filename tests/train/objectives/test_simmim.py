"""`SimMIM` against transformers' ViTForMaskedImageModeling."""

import keras
import numpy as np
import pytest
import weights_sources as sources

import keras_vit
from keras_vit.train import SimMIM

# Of the 3 x 3 patches of two images; as many of each, so that our mean of means is the mean.
MASK = np.float32([[0, 1, 0, 1, 1, 0, 0, 1, 0], [1, 0, 1, 0, 0, 0, 1, 1, 0]])


class Fixed(SimMIM):
    """A SimMIM whose masks are `MASK`."""

    def call(self, images, training=None):
        return super().call(images, training, mask=keras.ops.convert_to_tensor(MASK))


def from_transformers(source, folder, cls=Fixed):
    """A file of transformers as an encoder, its mask token and its decoder, a 1 x 1 convolution."""
    source.save_pretrained(folder)
    simmim = cls(keras_vit.from_pretrained(folder, representation_size=None), block_size=1)
    state = sources.state(source)
    simmim.mask_token.assign(state["vit.embeddings.mask_token"])
    simmim.pixels.kernel.assign(in_our_order(state["decoder.0.weight"][..., 0, 0]).T)
    simmim.pixels.bias.assign(in_our_order(state["decoder.0.bias"]))
    return simmim


def in_our_order(channels):
    """From the order of a pixel shuffle (c, p, q) to (p, q, c), on the first axis."""
    rest = channels.shape[1:]
    return np.moveaxis(channels.reshape(3, 8, 8, *rest), 0, 2).reshape(-1, *rest)


def arrays(model):
    return {w.path: np.array(keras.ops.convert_to_numpy(w)) for w in model.weights}


@pytest.mark.usefixtures("torchvision")
def test_reconstruction_loss_and_gradients_equal_transformers(tmp_path):
    import torch

    source = sources.huggingface_vit("ViTForMaskedImageModeling", encoder_stride=8)
    batch = sources.images()
    pixels = torch.from_numpy(np.ascontiguousarray(batch.transpose(0, 3, 1, 2)))
    out = source(pixels, bool_masked_pos=torch.from_numpy(MASK).bool())
    out.loss.backward()
    loss = float(out.loss.detach())
    simmim = from_transformers(source, tmp_path / "source")
    outputs = simmim(batch)
    found = keras.ops.convert_to_numpy(simmim.predicted_pixels(batch, outputs))
    images = found.reshape(2, 3, 3, 8, 8, 3).transpose(0, 5, 1, 3, 2, 4).reshape(2, 3, 24, 24)
    np.testing.assert_allclose(images, out.reconstruction.detach().numpy(), atol=1e-4)
    wrong = {**outputs, "mask": 1 - outputs["mask"]}
    other = keras.ops.convert_to_numpy(simmim.image_losses(batch, None, wrong)).mean()
    assert abs(other - loss) > 1e-3

    before = arrays(simmim)
    simmim.compile(keras.optimizers.SGD(1.0))
    np.testing.assert_allclose(simmim.train_on_batch(batch), loss, rtol=1e-5)
    after = arrays(simmim)
    for parameter in source.parameters():
        parameter.data = parameter.data * 0 if parameter.grad is None else parameter.grad
    expected = arrays(from_transformers(source, tmp_path / "gradients"))
    scale = max(np.abs(gradient).max() for gradient in expected.values())
    for path, gradient in expected.items():
        found = before[path] - after[path]
        np.testing.assert_allclose(found, gradient, atol=3e-5 * scale, err_msg=path)
    assert np.abs(expected["simmim/mask_token"]).max() > 1e-4


def test_loss_by_hand():
    """One channel, patches of two pixels: |3 - 1| and |0 - 5| of the hidden one, halved."""
    vit = keras_vit.ViT(
        dict(image_size=(2, 2), patch_size=(1, 2), in_channels=1, width=8, depth=1, num_heads=2)
    )
    simmim = SimMIM(vit, block_size=1, mask_ratio=0.5)
    images = np.float32([[1, 5], [7, 7]])[None, :, :, None]
    outputs = {
        "prediction": keras.ops.convert_to_tensor([[[3.0, 0.0], [9.0, 9.0]]]),
        "mask": keras.ops.convert_to_tensor([[1.0, 0.0]]),
    }
    loss = keras.ops.convert_to_numpy(simmim.image_losses(images, None, outputs))
    np.testing.assert_allclose(loss, [3.5])


def test_squares_of_patches_are_hidden():
    config = dict(image_size=(16, 24), patch_size=4, width=8, depth=1, num_heads=2, mlp_dim=8)
    simmim = SimMIM(keras_vit.ViT(config), block_size=2, mask_ratio=0.6, seed=1)
    images = np.zeros((200, 16, 24, 3), "float32")
    masks = keras.ops.convert_to_numpy(simmim(images, training=True)["mask"])
    squares = masks.reshape(-1, 2, 2, 3, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 6, 4)
    assert (squares.min(axis=-1) == squares.max(axis=-1)).all()
    assert (squares[..., 0].sum(axis=1) == 4).all()  # ceil(0.6 * 6)
    np.testing.assert_allclose(squares[..., 0].mean(axis=0), 4 / 6, atol=0.12)
    one = SimMIM(keras_vit.ViT(config), block_size=1, mask_ratio=0.6)
    masks = keras.ops.convert_to_numpy(one(images)["mask"]).reshape(-1, 2, 2, 3, 2)
    assert (masks.min(axis=(2, 4)) != masks.max(axis=(2, 4))).any()
