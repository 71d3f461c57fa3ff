"""Patch kernels of another patch size: timm's rules, and what the resizing is for."""

import numpy as np
import pytest

from keras_vit.resample import matrix, resample_kernel

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
