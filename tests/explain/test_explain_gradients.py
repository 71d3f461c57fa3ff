"""Maps from gradients, compared with finite differences of the paper's equations in NumPy."""

import json

import explain_cases
import keras
import numpy as np
import pytest
from conformance import arrays, images, run, tiny_model
from explain_cases import case, weights

from keras_vit import explain
from keras_vit.explain import gradients

STEP = 1e-4
# All kinds run on TensorFlow only: they do not differ in backend code, and JAX compiles each
# operation for each number of tokens. One model and one batch are enough there.
EVERYWHERE = ("registers",)
KINDS = (*EVERYWHERE, "mean", "post_norm", "mean_all", "qk_norm", "all_tokens", "pre_logits", "map")
TENSORFLOW = keras.backend.backend() == "tensorflow"
each_kind = pytest.mark.parametrize("kind", KINDS if TENSORFLOW else EVERYWHERE)


def logit(config, y, chosen):
    """The logit of a class, `(B,)`; if each token has logits, the mean over the patches."""
    return (y[:, config.num_prefix_tokens :].mean(1) if y.ndim == 3 else y)[:, chosen]


def slopes(of, size):
    """Derivatives of `of`, which maps `(2 * size, size)` shifts to one number each."""
    shifts = STEP * np.eye(size)
    ends = of(np.concatenate([shifts, -shifts]))
    return (ends[:size] - ends[size:]) / (2 * STEP)


def attention_slopes(config, values, image, chosen):
    """d logit / d A by finite differences, `(L, h, T, T)`."""
    length = config.num_tokens
    found = []
    for call in range(config.depth * config.num_heads):

        def of(shifts, call=call):
            def look(n, a):
                return a + shifts.reshape(-1, length, length) if n == call else None

            y = explain_cases.run(config, values, np.repeat(image[None], len(shifts), 0), look)
            return logit(config, y, chosen)

        found.append(slopes(of, length**2).reshape(length, length))
    return np.reshape(found, (config.depth, config.num_heads, length, length))


def token_slopes(config, values, image, chosen, block):
    """The tokens that a block reads and d logit / d z by finite differences, `(T, D)` each."""
    shape = (config.num_tokens, config.width)
    tokens = []

    def of(shifts):
        def before_block(index, z):
            if index != block:
                return z
            tokens.append(z[0])
            return z + shifts.reshape(-1, *shape)

        x = np.repeat(image[None], len(shifts), 0)
        return logit(
            config, explain_cases.run(config, values, x, lambda n, a: None, before_block), chosen
        )

    found = slopes(of, shape[0] * shape[1]).reshape(shape)
    return tokens[0], found


def followed(config, found, slope, positive=True, order=1, read=None):
    """Attention times gradient through the layers, for one image; both are (L, h, T, T).

    `read` is how much of each patch attention pooling reads; None means all the same.
    """
    length = config.num_tokens
    relevance = np.eye(length)
    for a, g in list(zip(found, slope, strict=True))[::order]:
        product = np.maximum(a * g, 0) if positive else a * g
        relevance = relevance + product.mean(0) @ relevance
    first = 0 if config.pooling in ("token", "mean_all") else config.num_prefix_tokens
    last = 1 if config.pooling == "token" else length
    rows = (relevance - np.eye(length))[first:last, config.num_prefix_tokens :]
    return np.average(rows, axis=0, weights=read).reshape(config.grid)


@each_kind
def test_attention_gradient_is_attention_times_its_gradient(kind):
    model, x, expected = case(kind)
    config, values = model.config, arrays(model)
    classes = [2, 1]
    found = explain.attention_gradient(model, x, classes)
    assert found.shape == (2, 3, 2) and found.dtype == "float32" and found.min() >= 0
    for i, chosen in enumerate(classes[:1]):
        slope = attention_slopes(config, values, x[i], chosen)
        read = None
        if config.attention_pooling:
            read = explain.pooling_map(model, x)[i].mean(0).reshape(-1)
        right = followed(config, expected[:, i], slope, read=read)
        np.testing.assert_allclose(found[i], right, atol=1e-4 * right.max())
        # Negative controls: both signs, the layers in the other order, another class.
        for other in (
            followed(config, expected[:, i], slope, positive=False),
            followed(config, expected[:, i], slope, order=-1),
            explain.attention_gradient(model, x, 0)[i],
        ):
            assert np.abs(found[i] - other).max() > 1e-3 * right.max()


@each_kind
@pytest.mark.parametrize("block", [-1, 0])
def test_grad_cam_weights_channels_by_their_gradient(kind, block):
    model, x, _ = case(kind)
    config = model.config
    found = explain.grad_cam(model, x, [2, 1], block)
    assert found.shape == (2, 3, 2) and found.dtype == "float32" and found.min() >= 0
    k = config.num_prefix_tokens
    right = []
    for image, chosen in zip(x, (2, 1), strict=True):
        z, slope = token_slopes(config, arrays(model), image, chosen, block % config.depth)
        right.append((z[k:] @ slope[k:].mean(0)).reshape(config.grid))
    right = np.stack(right)
    np.testing.assert_allclose(found, np.maximum(right, 0), atol=1e-4 * np.abs(right).max())
    # Negative controls: the map has positive and cut values; another class; another block.
    assert found.max() > 1e-3 and right.min() < 0
    assert np.abs(found - explain.grad_cam(model, x, [1, 2], block)).max() > 1e-3
    assert np.abs(found - explain.grad_cam(model, x, [2, 1], -1 - block % 2)).max() > 1e-3


def test_top_class_is_explained_by_default():
    model, x, _ = case("registers")
    top = np.asarray(keras.ops.convert_to_numpy(model(x, training=False))).argmax(-1)
    for explained in (explain.grad_cam, explain.attention_gradient):
        found = explained(model, x)
        np.testing.assert_array_equal(found, explained(model, x, top))
        assert np.abs(found - explained(model, x, (top + 1) % 3)).max() > 1e-3


def test_gradients_through_a_cast_to_half_precision():
    def function(x):
        inner = keras.ops.cast(3 * keras.ops.cast(x, "float32"), "float16")  # as in attention
        return keras.ops.sum(keras.ops.cast(keras.ops.square(inner), "float32")), inner

    found = gradients._gradients(function, keras.ops.cast([1, 2, 4], "float16"))
    for array, right in zip(found, ([18, 36, 72], [3, 6, 12], [6, 12, 24]), strict=True):
        assert array.dtype == "float32"
        np.testing.assert_array_equal(array, right)


@pytest.mark.skipif(
    keras.backend.backend() == "jax", reason="JAX compiles it for long; the cast is tested above"
)
def test_half_precision_points_to_the_same_patches():
    model, x, _ = case("registers")
    for policy in ("mixed_float16", "mixed_bfloat16")[: 1 + TENSORFLOW]:
        half = tiny_model("registers", dtype=policy)
        head = half.get_layer("head")
        for explained in (explain.grad_cam, explain.attention_gradient):
            right, found = explained(model, x, 1), explained(half, x, 1)
            np.testing.assert_allclose(found, right, atol=0.1 * right.max())
        # Negative control: small gradients, which plain float16 would lose.
        head.kernel.assign(keras.ops.multiply(head.kernel, 1e-9))
        np.testing.assert_allclose(
            1e9 * explain.grad_cam(half, x, 1, 0),
            explain.grad_cam(model, x, 1, 0),
            atol=0.1 * explain.grad_cam(model, x, 1, 0).max(),
        )


def test_gradients_include_lora_adapters():
    model = tiny_model("registers")
    x = images(model.config, count=2)
    plain = explain.attention_gradient(model, x, 1)
    model.enable_lora(2)
    np.testing.assert_allclose(explain.attention_gradient(model, x, 1), plain, atol=1e-6)
    for v in model.trainable_variables:
        if v.path.endswith("lora_kernel_b"):
            v.assign(np.random.default_rng(0).normal(size=v.shape))
    assert np.abs(explain.attention_gradient(model, x, 1) - plain).max() > 1e-3


def test_explanations_do_not_change_the_model():
    model = tiny_model("registers", dropout=0.5, attention_dropout=0.5, drop_path=0.5)
    x = images(model.config, count=2)
    before = run(model, x), json.dumps(model.get_config()), arrays(model)
    nodes = [len(layer._inbound_nodes) for layer in model.layers]
    names = set(vars(model))
    first = explain.attention_maps(model, x)
    np.testing.assert_array_equal(first, explain.attention_maps(model, x))  # nothing is dropped
    explain.attention_gradient(model, x)
    explain.grad_cam(model, x)
    explain.region_similarity(model, x)
    after = run(model, x), json.dumps(model.get_config()), arrays(model)
    np.testing.assert_array_equal(before[0], after[0])
    assert before[1] == after[1] and set(vars(model)) == names
    assert nodes == [len(layer._inbound_nodes) for layer in model.layers]
    for path, value in before[2].items():
        np.testing.assert_array_equal(value, after[2][path], err_msg=path)


@pytest.mark.only_on("tensorflow")  # compares bits
def test_zero_head_has_empty_maps():
    for kind in ("paper", "mean"):
        model = tiny_model(kind)
        head = model.get_layer("head")
        head.kernel.assign(keras.ops.zeros_like(head.kernel))
        x = images(model.config)
        assert not explain.grad_cam(model, x).any()
        assert not explain.attention_gradient(model, x).any()
        head.kernel.assign(keras.ops.ones_like(head.kernel))
        assert explain.grad_cam(model, x).any() and explain.attention_gradient(model, x).any()


@pytest.mark.backend_free
def test_activation_of_the_head_is_ignored():
    model, x, _ = case("registers")
    ending = tiny_model("registers", classifier_activation="softmax")
    for explained in (explain.grad_cam, explain.attention_gradient):
        np.testing.assert_allclose(explained(ending, x), explained(model, x), atol=1e-6)
    # Negative control: the gradient of the probability differs.
    tail = [ending.get_layer(name) for name in ("encoder_norm", "pooling", "head")]
    z = ending.features(blocks=-1)(x)

    def probability(z):
        for layer in tail:
            z = layer(z)
        return keras.ops.sum(z[:, 1]), None

    own, _, _ = gradients._gradients(probability, z)
    _, ours = gradients._to_the_head(model, x, np.array([1, 1]))
    assert np.abs(own - ours).max() > 1e-2


@pytest.mark.backend_free
@pytest.mark.parametrize("classes", [3, -1, [0], [0, 3], 1.0, True, [[0, 1]], "cat", [0, None]])
def test_wrong_classes_are_refused(classes):
    model, x, _ = case("paper")
    for explained in (explain.grad_cam, explain.attention_gradient):
        with pytest.raises(ValueError, match=r"classes must be ints in \[0, 2\], one or 2 of them"):
            explained(model, x, classes)


@pytest.mark.backend_free
def test_gradients_of_a_model_without_a_head_are_refused():
    model, x, _ = case("features")
    for explained in (explain.grad_cam, explain.attention_gradient):
        with pytest.raises(ValueError, match="model must have a head.*num_classes=0"):
            explained(model, x)
    with pytest.raises(ValueError, match=r"block must be in \[-2, 1\]. Received: block=2"):
        explain.grad_cam(case("paper")[0], x, block=2)
    with pytest.raises(ValueError, match=r"block must be an int. Received: block=\[0\]"):
        explain.grad_cam(case("paper")[0], x, block=[0])


def test_reference_uses_the_weights_that_it_returns():
    """The finite differences need this: changing the reference's weights changes its output."""
    model, x, expected = case("registers")
    config, values = model.config, arrays(model)
    np.testing.assert_array_equal(expected, weights(config, values, x))
    still = explain_cases.run(config, values, x, lambda n, a: None)
    moved = explain_cases.run(config, values, x, lambda n, a: a + 0.1 if n == 3 else None)
    assert np.abs(still - moved).max() > 1e-3
