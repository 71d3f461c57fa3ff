"""Patch kernels of another patch size: timm's rules, and what the resizing is for."""

import numpy as np
import pytest

from keras_vit import ViTConfig
from keras_vit.resample import matrix, resample_kernel, resized_weight, resizing_matrix

pytestmark = [pytest.mark.backend_free, pytest.mark.usefixtures("torchvision")]


def timm_kernel(kernel, size, **kwargs):
    pytest.importorskip("timm")
    import torch
    from timm.layers import resample_patch_embed

    theirs = torch.from_numpy(np.ascontiguousarray(kernel.transpose(3, 2, 0, 1)))
    return resample_patch_embed(theirs, list(size), **kwargs).numpy().transpose(2, 3, 1, 0)


@pytest.mark.parametrize(("old", "new"), [((8, 8), (4, 4)), ((8, 6), (12, 15)), ((5, 5), (3, 7))])
@pytest.mark.parametrize(
    ("preset", "kwargs"), [("timm", {}), ("timm_npz", {"interpolation": "bilinear"})]
)
def test_kernel_equals_timm(old, new, preset, kwargs):
    kernel = np.random.default_rng(0).standard_normal((*old, 3, 5)).astype("float32")
    kwargs = kwargs | ({"antialias": False} if kwargs else {})
    ours = resample_kernel(kernel, new, preset)
    assert ours.dtype == kernel.dtype
    assert np.abs(ours - timm_kernel(kernel, new, **kwargs)).max() < 1e-4
    other = resample_kernel(kernel, new, "timm" if preset == "timm_npz" else "timm_npz")
    assert np.abs(other - ours).max() > 1e-2


def test_kernel_gives_enlarged_patches_the_same_tokens():
    """What FlexiViT's resizing is for: <B x, w'> = <x, w> where B enlarges the patch."""
    rng = np.random.default_rng(0)
    patch, kernel = rng.standard_normal((6, 5, 3)), rng.standard_normal((6, 5, 3, 4))
    rule = "timm_npz"
    larger = np.einsum("ih,jw,hwc->ijc", matrix(6, 9, rule), matrix(5, 16, rule), patch)
    token = np.tensordot(patch, kernel, 3)
    new = np.tensordot(larger, resample_kernel(kernel, (9, 16), rule), 3)
    np.testing.assert_allclose(new, token, atol=1e-10)
    np.testing.assert_array_equal(resample_kernel(kernel, (6, 5), rule).shape, kernel.shape)


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("patches/projection/kernel", (8, 12, 3, 5)),
        ("position_embedding/table", (1 + 6, 5)),
        ("position_embedding/rows", (3, 5)),
        ("position_embedding/columns", (2, 5)),
        ("position_embedding/class_row", (1, 5)),
        ("encoder_block_0/attention/relative_positions/table", (5 * 3 + 3, 2)),
        ("encoder_block_0/attention/relative_positions/keys", (2 * 7 - 1, 2, 4)),
    ],
)
def test_resizing_matrix_resizes_as_the_weight_is(path, shape):
    old = ViTConfig(image_size=24, patch_size=(8, 12), interpolation="flexivit")
    new = old.replace(patch_size=(4, 6))
    weight = np.random.default_rng(0).standard_normal(shape)
    expected = resized_weight(path, weight, old, new)
    assert expected.shape != shape or path.endswith("class_row")
    product = resizing_matrix(path, shape, old, new)
    product = (product @ weight.reshape(product.shape[1], -1)).reshape(expected.shape)
    np.testing.assert_allclose(product, expected, atol=1e-12)
    assert resizing_matrix("patches/projection/bias", (5,), old, new) is None
    assert resizing_matrix("encoder_block_0/mlp/dense_1/kernel", (5, 9), old, new) is None
