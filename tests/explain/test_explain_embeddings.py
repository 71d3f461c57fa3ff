"""Position embeddings, patch filters and patch tokens as arrays, compared with NumPy."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import reference
from conformance import arrays, images, run, tiny_model
from explain_cases import case

from keras_vit import explain
from keras_vit.explain import embeddings


def cosine(a, b):
    return a @ b / np.sqrt((a @ a) * (b @ b))


@pytest.mark.backend_free
@pytest.mark.parametrize("kind", ["paper", "mean_all", "registers", "learned_2d", "sincos_2d"])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_position_similarity_is_a_cosine(kind, policy):
    model = case(kind)[0] if policy == "float32" else tiny_model(kind, dtype=policy)
    config = model.config
    found = explain.position_similarity(model)
    assert found.shape == (3, 2, 3, 2) and found.dtype == "float32"
    table = reference.positions(config, arrays(model)).astype("float64")[-6:].reshape(3, 2, 20)
    right = [cosine(table[i], table[j]) for i in np.ndindex(3, 2) for j in np.ndindex(3, 2)]
    # A fixed table has the precision of the model.
    rounded = kind == "sincos_2d" and policy != "float32"
    np.testing.assert_allclose(found.ravel(), right, atol=1e-2 if rounded else 1e-5)
    # Negative control: columns before rows.
    assert np.abs(found[0, 1] - found[1, 0]).max() > 1e-2


@pytest.mark.only_on("tensorflow")  # compares bits
def test_position_similarity_without_positions_and_of_zeros():
    with pytest.raises(ValueError, match="model must add position embeddings.*'none'"):
        explain.position_similarity(case("no_positions")[0])
    model = tiny_model("paper")
    table = model.get_layer("position_embedding").table
    table.assign(keras.ops.zeros_like(table))
    assert not explain.position_similarity(model).any()


@pytest.mark.backend_free
@pytest.mark.parametrize("kind, shape", [("patch_norm", (8, 4, 3)), ("pre_logits", (8, 8, 1))])
def test_patch_filters_are_principal_components(kind, shape):
    model, _, _ = case(kind)
    found = explain.patch_filters(model, 4)
    assert found.shape == (4, *shape) and found.dtype == "float32"
    np.testing.assert_array_equal(found.min((1, 2, 3)), 0)
    np.testing.assert_array_equal(found.max((1, 2, 3)), 1)
    filters = arrays(model)["patches/projection/kernel"].reshape(-1, 20).T.astype("float64")
    values, vectors = np.linalg.eigh(np.cov(filters.T))
    for i, image in enumerate(found):
        right = vectors[:, -1 - i]
        right = right if right[np.abs(right).argmax()] > 0 else -right
        right = (right - right.min()) / np.ptp(right)
        np.testing.assert_allclose(image.ravel(), right, atol=1e-4)
        assert np.abs(image.ravel() - (1 - right)).max() > 1e-2  # the other sign
    # What all filters have in common is not a component.
    moved = tiny_model(kind)
    kernel = moved.get_layer("patches").projection.kernel
    rng = np.random.default_rng(0)
    kernel.assign(kernel + rng.normal(size=(*shape, 1)).astype("float32"))
    np.testing.assert_allclose(explain.patch_filters(moved, 4), found, atol=1e-4)


@pytest.mark.backend_free
def test_patch_filters_of_a_hybrid_are_those_of_its_stem():
    model = tiny_model("resnet_stem")
    found = explain.patch_filters(model, 5)
    assert found.shape == (5, 7, 7, 3)
    kernel = model.get_layer("stem").root_conv.kernel
    kernel.assign(7 * kernel)  # the filters are standardized
    np.testing.assert_allclose(explain.patch_filters(model, 5), found, atol=1e-4)
    kernel.assign(kernel * np.linspace(-1, 1, 32))
    assert np.abs(explain.patch_filters(model, 5) - found).max() > 0.1


@pytest.mark.backend_free
def test_patch_filters_of_shifted_images_are_on_the_image():
    """A filter of each part sees a bright pixel where the convolution of the image sees it."""
    model = tiny_model("shifted", patch_norm=False, patch_size=(4, 2), image_size=(12, 6))
    patches = model.get_layer("patches")
    patches.projection.bias.assign(np.zeros(20))
    image = np.random.default_rng(0).normal(size=(1, 12, 6, 3)).astype("float32")
    tokens = run(model.get_layer("patches"), run(model.get_layer("patch_shift"), image))
    kernel = embeddings._on_image(np.asarray(patches.projection.kernel), model.config)
    assert kernel.shape == (8, 4, 3, 20)
    padded = np.pad(image[0], ((2, 2), (1, 1), (0, 0)))
    for n, (row, column) in enumerate(np.ndindex(3, 3)):
        seen = padded[4 * row : 4 * row + 8, 2 * column : 2 * column + 4]
        np.testing.assert_allclose(tokens[0, n], np.tensordot(seen, kernel, 3), atol=1e-5)
    assert explain.patch_filters(model, 5).shape == (5, 8, 4, 3)


@pytest.mark.backend_free
def test_patch_filters_have_at_most_as_many_as_exist():
    model, _, _ = case("paper")
    assert explain.patch_filters(model).shape == (19, 8, 8, 3)  # 20 points lie in 19 directions
    small = tiny_model("paper", patch_size=2, in_channels=1)
    assert explain.patch_filters(small).shape == (4, 2, 2, 1)
    np.testing.assert_array_equal(explain.patch_filters(model, 2), explain.patch_filters(model)[:2])
    for count in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="count must be a positive int. Received: count="):
            explain.patch_filters(model, count)


@pytest.mark.parametrize("kind, block", [("registers", -1), ("registers", 0), ("post_norm", -1)])
def test_region_similarity_is_a_cosine(kind, block):
    model, x, _ = case(kind)
    found = explain.region_similarity(model, x, block)
    assert found.shape == (2, 3, 2, 3, 2) and found.dtype == "float32"
    # The last tokens pass the final LayerNorm, which a post-norm model does not have.
    last = block == -1 and kind == "registers"
    wanted = {"output": "tokens"} if last else {"blocks": block}
    features = model.features(**wanted, grid=True)
    z = run(features, x)
    for i, a, b in ((0, (0, 1), (2, 0)), (1, (1, 0), (1, 1)), (1, (2, 1), (2, 1))):
        np.testing.assert_allclose(found[(i, *a, *b)], cosine(z[i][a], z[i][b]), atol=1e-5)
    assert np.abs(found[0] - found[1]).max() > 1e-2
    assert np.abs(found[0, 0, 1] - found[0, 1, 0]).max() > 1e-2


def test_patch_pca_is_computed_over_all_images():
    model, x, _ = case("registers")
    found = explain.patch_pca(model, x)
    assert found.shape == (2, 3, 2, 3) and found.dtype == "float32"
    z = run(model.features("tokens", grid=True), x).reshape(12, 20).astype("float64")
    _, vectors = np.linalg.eigh(np.cov(z.T))
    for i in range(3):
        axis = vectors[:, -1 - i]
        axis = axis if axis[np.abs(axis).argmax()] > 0 else -axis
        right = z @ axis
        right = (right - right.min()) / np.ptp(right)
        np.testing.assert_allclose(found[..., i].ravel(), right, atol=1e-4)
    # Negative control: an image analyzed alone has other colors.
    alone = explain.patch_pca(model, np.stack([x[0], x[0]]))
    np.testing.assert_allclose(alone[0], alone[1], atol=1e-5)
    assert np.abs(found[0] - alone[0]).max() > 1e-2
    assert np.abs(found - explain.patch_pca(model, x, 0)).max() > 1e-2


@pytest.mark.backend_free
def test_patch_pca_refuses_too_few_patches_and_nan():
    model = tiny_model("paper", image_size=(8, 16))
    with pytest.raises(ValueError, match="images must have three patches.*2 patches of width 20"):
        explain.patch_pca(model, images(model.config, 1))
    same = np.zeros((2, 8, 16, 3), "float32")
    assert np.isfinite(explain.patch_pca(model, same)).all()
    with pytest.raises(ValueError, match="images must hold finite numbers. Received: NaN"):
        explain.patch_pca(model, np.full_like(same, np.nan))
    with pytest.raises(ValueError, match=r"block must be in \[-2, 1\]. Received: block=-3"):
        explain.region_similarity(model, same, -3)
    model.get_layer("class_token").tokens.assign(np.full((1, 1, 20), np.nan))
    with pytest.raises(ValueError, match="model must give finite numbers. Received: NaN"):
        explain.patch_pca(model, same)


@pytest.mark.backend_free
def test_public_names_have_docstrings():
    for name in explain.__all__:
        assert getattr(explain, name).__doc__, name
    assert explain.__all__ == sorted(explain.__all__)
    with pytest.raises(AttributeError, match="'keras_vit.explain' has no attribute 'rollout'"):
        getattr(explain, "rollout")  # noqa: B009


@pytest.mark.backend_free
@pytest.mark.slow
def test_arrays_do_not_need_matplotlib():
    # Keras imports matplotlib if it is installed, so its import is made to fail.
    code = """
import sys
sys.modules["matplotlib"] = None
import keras_vit
config = dict(image_size=16, patch_size=8, width=20, depth=1, num_heads=5, mlp_dim=28)
model = keras_vit.ViT(config)
print(keras_vit.explain.patch_filters(model, 4).shape)
try:
    keras_vit.explain.plot_patch_filters(model)
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("(4, 8, 8, 3)\n") and "matplotlib" in done.stdout
