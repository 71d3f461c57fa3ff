"""Attention as arrays, compared with the paper's equations in NumPy."""

import itertools

import explain_cases
import keras
import numpy as np
import pytest
from conformance import arrays, images, tiny_model
from explain_cases import case, weights

from keras_vit import explain
from keras_vit.explain import attention, tokens
from keras_vit.layers import EncoderBlock

# All kinds run on TensorFlow only: they do not differ in backend code, and JAX compiles each
# operation for each number of tokens. One model and one batch are enough there.
EVERYWHERE = ("registers",)
KINDS = (*EVERYWHERE, "qk_norm", "paper", "post_norm", "registers_only", "mean_all", "patch_norm")
TENSORFLOW = keras.backend.backend() == "tensorflow"


def given(monkeypatch, found):
    """Replaces the attention weights that the module computes, `(L, B, h, T, T)`."""

    def made(model, x, wanted):
        for i in range(len(x)):
            for layer in sorted(set(wanted)):
                rows = [row for row, other in enumerate(wanted) if other == layer]
                yield slice(i, i + 1), rows, found[layer, i : i + 1].astype("float32")

    monkeypatch.setattr(attention, "_weights", made)


@pytest.mark.parametrize("kind", KINDS if TENSORFLOW else EVERYWHERE)
def test_attention_maps_agree_with_the_paper(kind):
    model, x, expected = case(kind)
    found = explain.attention_maps(model, x)
    assert found.dtype == "float32" and found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-6)
    # Negative controls: the other axis, another order of heads or layers, another image.
    others = (expected.swapaxes(-1, -2), expected[:, :, ::-1], expected[::-1], expected[:, ::-1])
    for other in others:
        assert np.abs(found - other).max() > 1e-2
    assert np.abs(found.sum(-2) - 1).max() > 1e-2


def test_attention_maps_compute_only_the_requested_layers(monkeypatch):
    model, x, _ = case("registers", depth=3)
    every = explain.attention_maps(model, x)
    calls = []
    call = EncoderBlock.call

    def seen(self, x, training=None, return_attention_scores=False):
        calls.append((self.name[-1], return_attention_scores, training))
        return call(self, x, training=training, return_attention_scores=return_attention_scores)

    monkeypatch.setattr(EncoderBlock, "call", seen)
    found = explain.attention_maps(model, x, layers=1)
    assert calls == [("0", False, False), ("1", True, False)]  # and the last block is not called
    # Other blocks run with the backend's kernel.
    np.testing.assert_allclose(found, every[1:2], atol=1e-6)
    tensor = keras.ops.convert_to_tensor(x)
    if keras.backend.backend() == "torch":
        tensor.requires_grad_()  # NumPy cannot convert such a tensor
    found = explain.attention_maps(model, tensor, layers=[-1, 0, np.int64(2)])
    np.testing.assert_allclose(found, every[[2, 0, 2]], atol=1e-6)
    assert np.abs(found - every[[0, 2, 2]]).max() > 1e-2


def test_attention_maps_have_all_patches_despite_patch_dropout():
    model = tiny_model("registers", patch_dropout=0.5)
    x = images(model.config, count=2)
    expected = weights(model.config, arrays(model), x)
    np.testing.assert_allclose(explain.attention_maps(model, x), expected, atol=1e-5)


@pytest.mark.backend_free
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_attention_maps_in_half_precision(policy):
    model, x = tiny_model("registers", dtype=policy), case("registers")[1]
    found = explain.attention_maps(model, x)
    np.testing.assert_allclose(found, case("registers")[2], atol=4e-2)
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-6)
    # Negative control: the block's own weights sum to 1 only in half precision.
    z = tokens.embedded(model, x)
    _, scores = model.blocks[0](z, return_attention_scores=True)
    assert np.abs(tokens.as_numpy(scores).sum(-1) - 1).max() > 1e-5


def test_attention_maps_with_lora():
    model = tiny_model("registers")
    x = images(model.config, count=2)
    plain = explain.attention_maps(model, x)
    model.enable_lora(2, targets=("query", "key", "value"))
    rng = np.random.default_rng(5)
    for v in model.trainable_variables:
        if "lora" in v.path:
            v.assign(0.5 * rng.normal(size=v.shape))
    values = arrays(model)
    for i, block in enumerate(model.blocks):
        for name in ("query", "key", "value"):
            dense = getattr(block.attention, f"{name}_dense")
            delta = np.einsum(
                "dhr,rk->dhk",
                keras.ops.convert_to_numpy(dense.lora_kernel_a),
                keras.ops.convert_to_numpy(dense.lora_kernel_b),
            )
            values[f"encoder_block_{i}/attention/{name}/kernel"] += delta
    found = explain.attention_maps(model, x)
    np.testing.assert_allclose(found, weights(model.config, values, x), atol=1e-5)
    assert np.abs(found - plain).max() > 1e-2


@pytest.mark.backend_free
def test_attention_maps_of_a_quantized_model():
    model, x, expected = tiny_model("paper"), *case("paper")[1:]
    model.blocks[0].attention.query_dense.quantize("int8")  # then Keras' own path is used
    found = explain.attention_maps(model, x)
    assert 0 < np.abs(found - expected).max() < 0.1
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-6)


@pytest.mark.backend_free
def test_batch_size_changes_nothing(monkeypatch):
    model, _, _ = case("registers")
    x = images(model.config, count=3)
    calls = (
        explain.attention_maps,
        explain.rollout_map,
        explain.attention_distance,
        explain.attention_entropy,
        explain.region_similarity,
        explain.grad_cam,
        explain.attention_gradient,
    )
    whole = [call(model, x) for call in calls]
    parts = []
    embedded = tokens.embedded
    monkeypatch.setattr(tokens, "BATCH_BYTES", 2 * 4 * 5 * 9 * 9)
    monkeypatch.setattr(tokens, "embedded", lambda m, x: parts.append(len(x)) or embedded(m, x))
    for call, expected in zip(calls, whole, strict=True):
        np.testing.assert_allclose(call(model, x), expected, atol=2e-5)
    assert parts == [2, 1] * len(calls)


@pytest.mark.backend_free
def test_pixels_are_normalized():
    model, _, _ = case("paper")
    pixels = np.random.default_rng(0).integers(0, 256, (1, 24, 16, 3)).astype("uint8")
    found = explain.attention_maps(model, pixels)
    x = (pixels / 255 - 0.5) / 0.5
    np.testing.assert_allclose(found, explain.attention_maps(model, x), atol=1e-5)
    assert np.abs(found - explain.attention_maps(model, -x)).max() > 1e-2


@pytest.mark.backend_free
@pytest.mark.parametrize("kind", ["paper", "registers_only", "mean_all", "mean", "all_tokens"])
def test_class_token_maps(kind):
    model, x, expected = case(kind)
    queries = {
        "paper": [0],
        "registers_only": range(2, 8),
        "mean_all": [0],  # it has a class token, although its head reads all tokens
        "mean": [0],
        "all_tokens": [0],
    }[kind]
    k = model.config.num_prefix_tokens
    rows = np.mean([expected[:, :, :, q, k:] for q in queries], axis=0)
    found = explain.class_token_maps(model, x, layers=[1])
    assert found.shape == (1, 2, 5, 3, 2)
    np.testing.assert_allclose(found, rows[1:].reshape(1, 2, 5, 3, 2), atol=1e-5)
    columns = expected[1:, :, :, k:, 0].reshape(1, 2, 5, 3, 2)
    assert np.abs(found - columns).max() > 1e-2


def rolled_out(found, fuse=np.mean, discard=0, axis=1, order=1):
    """Rollout of one image, computed entry by entry; `found` is (L, h, T, T)."""
    result = np.eye(found.shape[-1])
    for layer in found[::order]:
        fused = fuse(layer, axis=0)
        entries = sorted(itertools.product(*map(range, fused.shape)), key=lambda qk: fused[qk])
        for q, k in entries[:discard]:
            fused[q, k] = 0
        mixed = fused + np.eye(len(fused))
        result = (mixed / mixed.sum(axis, keepdims=True)) @ result
    return result


@pytest.mark.backend_free
@pytest.mark.parametrize("fusion", ["mean", "max", "min"])
def test_rollout_agrees_with_the_paper(fusion):
    model, x, expected = case("registers")
    found = explain.attention_rollout(model, x, head_fusion=fusion)
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-6)
    for i in range(2):
        one, fuse = expected[:, i], getattr(np, fusion)
        np.testing.assert_allclose(found[i], rolled_out(one, fuse), atol=1e-5)
        # Negative controls: divided by the sums of the columns, the first layer leftmost.
        assert np.abs(found[i] - rolled_out(one, fuse, axis=0)).max() > 1e-2
        assert np.abs(found[i] - rolled_out(one, fuse, order=-1)).max() > 1e-3
    others = {"mean": np.max, "max": np.min, "min": np.mean}
    assert np.abs(found[0] - rolled_out(expected[:, 0], others[fusion])).max() > 1e-3


@pytest.mark.backend_free
@pytest.mark.parametrize("ratio, count", [(0.0, 0), (0.1, 8), (0.5, 40), (0.99, 80)])
def test_rollout_discards_the_smallest_weights_of_each_image_and_layer(ratio, count):
    model, x, expected = case("registers")  # 81 weights
    found = explain.attention_rollout(model, x, discard_ratio=ratio)
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-6)
    for i in range(2):
        np.testing.assert_allclose(found[i], rolled_out(expected[:, i], discard=count), atol=1e-5)
        if count:
            assert np.abs(found[i] - rolled_out(expected[:, i], discard=count - 4)).max() > 1e-4


@pytest.mark.backend_free
@pytest.mark.parametrize(
    "kind, rows, first",
    [
        ("paper", [0], 1),
        ("mean", range(1, 7), 1),
        ("mean_all", range(7), 1),
        ("registers", [0], 3),
        ("registers_only", range(2, 8), 2),
    ],
)
def test_rollout_map_shows_what_the_head_reads(kind, rows, first):
    model, x, _ = case(kind)
    rollout = explain.attention_rollout(model, x)
    expected = np.mean([rollout[:, q, first:] for q in rows], axis=0).reshape(2, 3, 2)
    found = explain.rollout_map(model, x)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    shifted = np.mean([rollout[:, q, first - 1 : -1] for q in rows], axis=0).reshape(2, 3, 2)
    for other in (rollout[:, -1, first:].reshape(2, 3, 2), shifted):
        assert np.abs(found - other).max() > 1e-2


@pytest.mark.backend_free
@pytest.mark.parametrize("kind", ["map", "map_registers", "map_all"])
def test_pooling_map_is_the_attention_of_the_probe(kind):
    model, x, _ = case(kind)
    config, seen = model.config, []
    explain_cases.run(config, arrays(model), x, lambda call, a: seen.append(a))
    heads = config.pooling_heads or config.num_heads
    read = np.stack(seen[-heads:], axis=1)[:, :, 0]  # (B, h, t)
    patches = read[:, :, -config.num_patches :].reshape(2, heads, 3, 2)
    found = explain.pooling_map(model, x)
    np.testing.assert_allclose(found, patches, atol=1e-5)
    assert (found.sum((2, 3)) < 0.99).any() == (kind == "map_all")
    assert np.abs(found - seen[0][:1, :1, -config.num_patches :].reshape(3, 2)).max() > 1e-2

    # What the rollout brings to the tokens that are read, weighted by this attention.
    rows = explain.attention_rollout(model, x)[:, -read.shape[-1] :, config.num_prefix_tokens :]
    expected = np.einsum("bt,btn->bn", read.mean(1), rows).reshape(2, 3, 2)
    rollout = explain.rollout_map(model, x)
    np.testing.assert_allclose(rollout, expected, atol=1e-5)
    assert np.abs(rollout - rows.mean(1).reshape(2, 3, 2)).max() > 1e-3
    largest = np.einsum(
        "bt,btn->bn",
        read.max(1),
        explain.attention_rollout(model, x, head_fusion="max")[
            :, -read.shape[-1] :, config.num_prefix_tokens :
        ],
    ) / read.max(1).sum(-1, keepdims=True)
    found = explain.rollout_map(model, x, head_fusion="max")
    np.testing.assert_allclose(found, largest.reshape(2, 3, 2), atol=1e-5)


@pytest.mark.backend_free
def test_pooling_map_needs_attention_pooling():
    model, x, _ = case("mean")
    with pytest.raises(ValueError, match="pooling='map' or 'map_all'. Received: pooling='mean'"):
        explain.pooling_map(model, x)


def distances(found, config):
    """The mean distance of each head, pair by pair; `found` is (B, h, T, T)."""
    k, (rows, columns), (ph, pw) = config.num_prefix_tokens, config.grid, config.patch_size
    centers = [((r + 0.5) * ph, (c + 0.5) * pw) for r in range(rows) for c in range(columns)]
    total = np.zeros(config.num_heads)
    for image, head, (q, a) in itertools.product(
        range(len(found)), range(config.num_heads), enumerate(centers)
    ):
        row = found[image, head, k + q, k:]
        away = [np.hypot(a[0] - b[0], a[1] - b[1]) for b in centers]
        total[head] += np.average(away, weights=row)
    return total / len(found) / len(centers)


@pytest.mark.backend_free
@pytest.mark.parametrize("kind", ["registers", "patch_norm"])
def test_attention_distance_is_in_pixels(kind):
    model, x, expected = case(kind)
    found = explain.attention_distance(model, x, layers=[1, 0])
    assert found.shape == (2, 5)
    for row, layer in zip(found, (1, 0), strict=True):
        np.testing.assert_allclose(row, distances(expected[layer], model.config), rtol=1e-5)
    # Negative control: another layer, and a constant.
    grid = model.config.grid
    for other in (explain.attention_distance(model, x, 0), np.ones((1, 5))):
        assert np.abs(found[:1] - other).max() > 1e-2
    if kind == "patch_norm":
        right = attention.patch_distances(grid, (8, 4))
        assert right[0, 1] == 4 and right[0, 4] == 8 and right[0, 5] == np.float32(80**0.5)
        assert np.abs(right - attention.patch_distances(grid, (4, 8))).max() > 1


@pytest.mark.backend_free
def test_attention_distance_skips_queries_without_attention_to_patches(monkeypatch):
    model, x, _ = case("paper")
    found = np.zeros((2, 2, 5, 7, 7))
    found[..., 0] = 1  # all attention on the class token
    found[0, :, :, 1] = np.eye(7)[2]  # the first patch looks at its neighbor, 8 pixels away
    given(monkeypatch, found)
    np.testing.assert_array_equal(explain.attention_distance(model, x), [[8] * 5, [0] * 5])


@pytest.mark.only_on("tensorflow")  # compares bits
def test_attention_entropy_is_in_nats(monkeypatch):
    model, x, expected = case("registers")
    found = explain.attention_entropy(model, x)
    rows = -(expected * np.log(expected)).sum(-1)
    np.testing.assert_allclose(found, rows.mean((1, 3)), rtol=1e-5)
    assert np.abs(found - (rows / np.log(2)).mean((1, 3))).max() > 1e-2
    np.testing.assert_array_equal(explain.attention_entropy(model, x, -1), found[1:])
    hard = np.stack([np.full((2, 5, 9, 9), 1 / 9), np.tile(np.eye(9), (2, 5, 1, 1))])
    given(monkeypatch, hard)
    found = explain.attention_entropy(model, x)
    np.testing.assert_allclose(found, [[np.log(9)] * 5, [0] * 5], atol=1e-6)


@pytest.mark.backend_free
@pytest.mark.parametrize(
    "arguments, rule",
    [
        ({"layers": 2}, r"layers must be in \[-2, 1\]. Received: layers=2"),
        ({"layers": [0, -3]}, "Received: layers=-3"),
        ({"layers": []}, "layers must name at least one block"),
        ({"layers": "0"}, "layers must be one int"),
        ({"layers": 1.0}, "layers must be one int"),
        ({"layers": True}, "layers must be one int"),
        ({"images": np.zeros((24, 16, 3))}, "images must be floats"),
        ({"images": np.zeros((1, 16, 24, 3))}, r"Received: images with shape \(1, 16, 24, 3\)"),
        ({"images": np.zeros((0, 24, 16, 3))}, "at least one"),
        ({"images": np.zeros((1, 24, 16, 3), int)}, "int64"),
        ({"model": keras.Sequential()}, "model must be a keras_vit.ViT"),
    ],
)
def test_attention_maps_refuse_wrong_arguments(arguments, rule):
    model, x, _ = case("paper")
    with pytest.raises(ValueError, match=rule):
        explain.attention_maps(**{"model": model, "images": x, **arguments})


@pytest.mark.backend_free
@pytest.mark.parametrize("ratio", [-0.1, 1.0, float("nan"), True, "0.5"])
def test_rollout_refuses_wrong_arguments(ratio):
    model, x, _ = case("paper")
    with pytest.raises(ValueError, match=r"discard_ratio must be .*Received: discard_ratio="):
        explain.attention_rollout(model, x, discard_ratio=ratio)
    with pytest.raises(ValueError, match="head_fusion must be one of mean, max, min"):
        explain.attention_rollout(model, x, head_fusion="sum")
