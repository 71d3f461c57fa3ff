"""Checks that every layer and every model must pass, and the tiny models they are run on."""

import dataclasses
import inspect
import json

import keras
import numpy as np
import pytest
from keras import ops

from keras_vit import ViT, ViTConfig

TINY = ViTConfig(
    image_size=(24, 16),
    patch_size=8,
    width=20,
    depth=2,
    num_heads=5,
    mlp_dim=28,
    num_classes=3,
)
PLAIN_HEAD = {"class_token": False, "pooling": "mean"}

# One tiny config for every kind of model that a checkpoint or a paper knows.
KINDS = {
    "paper": TINY,
    "post_norm": TINY.replace(block_norm="post", final_norm="none"),
    "res_post": TINY.replace(block_norm="res_post", qkv_bias=False, **PLAIN_HEAD),
    "mean": TINY.replace(pooling="mean", final_norm="after_pooling"),
    "mean_all": TINY.replace(pooling="mean_all", position_class_row=False),
    "no_class_token": TINY.replace(**PLAIN_HEAD),
    "map": TINY.replace(
        class_token=False, pooling="map", pooling_heads=4, pooling_mlp_dim=24, gelu="tanh"
    ),
    "map_registers": TINY.replace(pooling="map", num_registers=1, final_norm="after_pooling"),
    "map_all": TINY.replace(pooling="map_all", final_norm="none"),
    "token_mean": TINY.replace(pooling="token_mean", num_registers=1),
    "distilled": TINY.replace(distillation_token=True, pooling="token_pair"),
    "no_head_bias": TINY.replace(head_bias=None),
    "all_tokens": TINY.replace(pooling=None),
    "registers": TINY.replace(num_registers=2, layer_scale=0.3),
    "registers_only": TINY.replace(num_registers=2, **PLAIN_HEAD),
    "learned_2d": TINY.replace(position_embedding="learned_2d"),
    "sincos_2d": TINY.replace(position_embedding="sincos_2d", **PLAIN_HEAD),
    "no_positions": TINY.replace(position_embedding="none"),
    "relative": TINY.replace(position_embedding="relative", num_registers=1),
    "relative_bias": TINY.replace(position_embedding="relative_bias", key_bias=False),
    "relative_mlp": TINY.replace(
        position_embedding="relative_mlp", relative_mlp_dim=7, **PLAIN_HEAD
    ),
    "qk_norm": TINY.replace(qk_norm=True, qkv_bias=False),
    "no_key_bias": TINY.replace(key_bias=False),
    "wide_heads": TINY.replace(head_dim=3, gelu="tanh", norm_epsilon=1e-3),
    "patch_norm": TINY.replace(patch_norm=True, patch_size=(8, 4)),
    "remainder": TINY.replace(image_size=(27, 21), ignore_remainder=True),
    "swiglu": TINY.replace(mlp="swiglu", mlp_dim=22, layer_scale=0.3),
    "mlp_inner_norm": TINY.replace(mlp_inner_norm=True),
    "attention_inner_norm": TINY.replace(attention_inner_norm=True, mlp_inner_norm=True),
    "rms": TINY.replace(
        norm="rms",
        qkv_bias=False,
        dense_bias=False,
        mlp="swiglu",
        patch_norm="after",
        **PLAIN_HEAD,
    ),
    "embedding_norm": TINY.replace(embedding_norm=True, patch_bias=False, gelu="quick"),
    "pre_logits": TINY.replace(representation_size=11, in_channels=1),
    "features": TINY.replace(num_classes=0),
    "rope": TINY.replace(
        position_embedding="rope", num_registers=1, layer_scale=0.3, norm_epsilon=1e-5, head_dim=8
    ),
    "learned_rope": TINY.replace(
        position_embedding="learned+rope",
        rope_base=50.0,
        rope_coordinates="index",
        rope_pairs="neighbors",
        rope_grid=(2, 4),
        pooling="mean",
        head_dim=8,
    ),
    "rope_mixed": TINY.replace(
        position_embedding="rope_mixed",
        rope_base=10.0,
        rope_coordinates="index",
        rope_order="columns_first",
        rope_pairs="neighbors",
        head_dim=8,
    ),
    "shifted": TINY.replace(patch_shift=True, patch_norm="before", patch_size=(8, 4)),
    "locality": TINY.replace(score_scale="learned", score_diagonal=False, qkv_bias=False),
    "conv_stem": TINY.replace(stem="conv", stem_width=16, **PLAIN_HEAD),
    "resnet_stem": TINY.replace(stem="resnet", stem_depths=(2, 1), stem_width=32),
}

# Combinations that no kind above has: a kind, and what is changed in it.
COMBINATIONS = {
    "post_norm_layer_scale": ("post_norm", {"layer_scale": 0.3, "num_registers": 1}),
    "res_post_token": ("res_post", {"class_token": True, "pooling": "token", "qk_norm": True}),
    "post_norm_final_norm": ("post_norm", {"final_norm": "before_pooling", "qk_norm": True}),
    "pre_norm_no_final_norm": ("paper", {"final_norm": "none"}),
    "after_pooling_features": ("mean", {"num_classes": 0}),
    "pre_logits_features": ("pre_logits", {"num_classes": 0}),
    "patch_norm_no_positions": ("patch_norm", {"position_embedding": "none"}),
    "nothing_in_front": ("no_class_token", {"position_embedding": "none"}),
    "learned_2d_no_class_row": ("learned_2d", {"position_class_row": False, "num_registers": 2}),
    "all_tokens_features": ("all_tokens", {"num_classes": 0, "final_norm": "none"}),
    "rope_qk_norm": ("learned_rope", {"qk_norm": True, "rope_offset": 1.0}),
    "rope_rescale": ("rope", {"rope_rescale": 2.0, "pooling": None}),
    "distilled_features": ("distilled", {"num_classes": 0, "position_class_row": False}),
    "distilled_2d": ("distilled", {"position_embedding": "learned_2d", "num_registers": 2}),
    "distilled_class_token": ("distilled", {"pooling": "token", "final_norm": "none"}),
    "distilled_softmax": ("distilled", {"classifier_activation": "softmax"}),
    "token_mean_pre_logits": ("token_mean", {"representation_size": 11}),
    "softmax": ("paper", {"classifier_activation": "softmax", "in_channels": 5, "depth": 1}),
    "swiglu_inner_norm": ("swiglu", {"mlp_inner_norm": True, "layer_scale": None, **PLAIN_HEAD}),
    "quick_inner_norm": ("mlp_inner_norm", {"gelu": "quick", "norm_epsilon": 1e-3}),
    "quick_map": ("map", {"gelu": "quick"}),
    "embedding_norm_post_norm": ("post_norm", {"embedding_norm": True, "patch_bias": False}),
    "embedding_norm_alone": (
        "no_class_token",
        {"embedding_norm": True, "position_embedding": "none", "gelu": "quick"},
    ),
    "attention_inner_norm_post_norm": ("post_norm", {"attention_inner_norm": True}),
    "rms_everywhere": (
        "paper",
        {"norm": "rms", "qk_norm": True, "attention_inner_norm": True, "mlp_inner_norm": True},
    ),
    "rms_res_post": ("res_post", {"norm": "rms"}),
    "rms_embedding_norm": ("embedding_norm", {"norm": "rms", "layer_scale": 0.3}),
    "patch_norm_after": ("paper", {"patch_norm": "after"}),
    "swiglu_post_norm": ("post_norm", {"mlp": "swiglu", "mlp_inner_norm": True}),
    "normed_keys_without_bias": ("qk_norm", {"qkv_bias": True, "key_bias": False}),
    "relative_normed": ("relative", {"qk_norm": True}),
    "relative_mlp_prefix": (
        "relative_mlp",
        {"class_token": True, "num_registers": 1, "pooling": "mean_all"},
    ),
    "learned_and_relative_bias": (
        "relative_bias",
        {"position_embedding": "learned+relative_bias", "patch_size": 4, "pooling": "mean"},
    ),
    "relative_one_patch": (
        "no_class_token",
        {"position_embedding": "relative", "image_size": 8},
    ),
    "sincos_and_relative": (
        "no_class_token",
        {"position_embedding": "sincos_2d+relative", "depth": 1},
    ),
    "shifted_remainder": (
        "remainder",
        {"patch_shift": True, "patch_size": 5, "pooling": "mean", "in_channels": 2},
    ),
    "shifted_locality": (
        "shifted",
        {"score_scale": "learned", "score_diagonal": False, "pooling": "mean"},
    ),
    "locality_normed": ("locality", {"qk_norm": True, "qkv_bias": True}),
    "locality_rope": ("rope_mixed", {"score_scale": "learned", "qk_norm": True}),
    "locality_relative": ("relative", {"score_scale": "learned", "score_diagonal": False}),
    "locality_relative_bias": ("relative_bias", {"score_diagonal": False}),
    "resnet_root": ("resnet_stem", {"stem_depths": (), "stem_standardization": "variance"}),
    "conv_stem_deep": (
        "conv_stem",
        {"stem_depths": (1, 2), "stem_width": 32, "score_diagonal": False, "in_channels": 2},
    ),
    "square_image": ("mean_all", {"image_size": 32, "patch_size": (16, 4), "dropout": 0.5}),
}

CONFIGS = {**KINDS, **{name: KINDS[kind].replace(**c) for name, (kind, c) in COMBINATIONS.items()}}


def covering(configs):
    """The names of few of these configs, which have every value that a field has in any of them."""
    values = {name: set(dataclasses.asdict(c).items()) for name, c in configs.items()}
    missing, names = set().union(*values.values()), []
    while missing:
        names.append(max(values, key=lambda name: len(values[name] & missing)))
        missing -= values[names[-1]]
    return names


def quick_if_covering(configs):
    """Parameters: those of `covering`, and the others for `make slow`."""
    quick = covering(configs)
    return [
        name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in configs
    ]


def to_numpy(x):
    return np.asarray(ops.convert_to_numpy(x))


def run(model, x):
    """What the model returns, eagerly: `predict` would compile it once a test."""
    return keras.tree.map_structure(to_numpy, model(x, training=False))


def randomize(model_or_layer, seed=0, scale=0.3):
    """Gives every array a value of its own, those that start as zeros or ones too."""
    rng = np.random.default_rng(seed)
    for v in model_or_layer.weights:
        if "seed" not in v.path:
            center = 1.0 if v.path.endswith("gamma") else 0.0
            v.assign(center + scale * rng.normal(size=v.shape))
    return model_or_layer


def built_at_random(layer, *inputs):
    """A layer that was built by these inputs, with random weights."""
    layer(*inputs)
    return randomize(layer)


def arrays(model_or_layer):
    return {v.path: to_numpy(v.value) for v in model_or_layer.weights}


def images(config, count=3, seed=1):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, *config.input_shape)).astype("float32")


def tiny_model(kind="paper", seed=0, dtype=None, **changes):
    config = CONFIGS[kind].replace(**changes)
    return randomize(ViT(config, dtype=dtype), seed)


def check_layer(cls, arguments, input_shape, *, call=None, exempt=(), drops=False, bad=()):
    """The layer contract: config, shapes, dtypes, gradients, training behavior, errors.

    Args:
        cls: The layer's class.
        arguments: What to make it with.
        input_shape: Shape of its input, batch first.
        call: How to call it, `call(layer, x, **kwargs)`; by default with one input.
        exempt: Endings of the paths of weights whose true gradient is zero.
        drops: Whether it is random in training.
        bad: Arguments that must raise, each a dict.
    """
    call = call or (lambda layer, x, **kwargs: layer(x, **kwargs))
    arguments = {**arguments, "name": "layer"}
    x = np.random.default_rng(0).normal(size=input_shape).astype("float32")

    _check_config(cls, arguments, call, x)
    _check_shapes(cls, arguments, call, x)
    for policy in ("float32", "mixed_float16", "mixed_bfloat16"):
        layer = cls(**arguments, dtype=policy)
        y = call(layer, ops.cast(x, layer.compute_dtype))
        assert keras.backend.standardize_dtype(y.dtype) == layer.compute_dtype
        assert np.isfinite(to_numpy(ops.cast(y, "float32"))).all()
        for sub in layer._flatten_layers():
            assert sub.compute_dtype == layer.compute_dtype, sub.path
        for v in layer.weights:
            assert "seed" in v.path or keras.backend.standardize_dtype(v.dtype) == "float32"
    _check_gradients(cls, arguments, call, x, exempt)
    _check_training(cls, arguments, call, x, drops)
    for wrong in bad:
        try:
            layer = cls(**{**arguments, **wrong})
        except ValueError as error:
            assert "Received" in str(error), f"{wrong}: {error}"
        else:
            raise AssertionError(f"{cls.__name__} took {wrong}")


def _check_config(cls, arguments, call, x):
    layer = cls(**arguments)
    names = set()
    for base in cls.__mro__:
        if base is keras.layers.Layer:
            break
        if "__init__" in vars(base):
            names |= set(inspect.signature(base.__init__).parameters)
    names -= {"self", "kwargs", "args", "flash_attention"}  # Keras leaves flash_attention out
    config = layer.get_config()
    # Keras' LayerNormalization takes rms_scaling among its kwargs.
    assert set(config) - {"name", "trainable", "dtype", "rms_scaling"} == names
    again = cls.from_config(json.loads(json.dumps(config)))
    assert json.dumps(again.get_config()) == json.dumps(config)
    call(layer, x), call(again, x)
    assert [(v.path, v.shape) for v in layer.weights] == [(v.path, v.shape) for v in again.weights]


def _check_shapes(cls, arguments, call, x):
    eager = cls(**arguments)
    y = call(eager, x)
    symbolic = cls(**arguments)
    z = call(symbolic, keras.KerasTensor((None, *x.shape[1:]), dtype="float32"))
    assert tuple(z.shape[1:]) == tuple(y.shape[1:]) and z.shape[0] is None
    assert z.dtype == keras.backend.standardize_dtype(y.dtype)
    assert [(v.path, v.shape) for v in eager.weights] == [
        (v.path, v.shape) for v in symbolic.weights
    ]
    for v, w in zip(symbolic.weights, eager.weights, strict=True):
        v.assign(w.value)
    np.testing.assert_array_equal(to_numpy(call(symbolic, x)), to_numpy(y))


def _check_gradients(cls, arguments, call, x, exempt):
    """One step of `fit` must move every weight that has a true gradient."""
    layer = cls(**arguments)
    inputs = keras.Input(x.shape[1:])
    model = keras.Model(inputs, call(layer, inputs))
    randomize(model)
    before = arrays(model)
    target = np.random.default_rng(3).normal(size=model.compute_output_shape(x.shape))

    def loss(y_true, y_pred):  # one target for all tokens: their number may change in training
        return ops.mean(ops.square(y_pred - ops.cast(y_true[:, :1], y_pred.dtype)))

    model.compile(keras.optimizers.SGD(0.1), loss)
    history = model.fit(x, target.astype("float32"), batch_size=len(x), epochs=1, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    for path, value in arrays(model).items():
        assert np.isfinite(value).all(), path
        moved = np.abs(value - before[path]).max()
        if "seed" not in path and not path.endswith(tuple(exempt)):
            assert moved > 0, f"{path} has no gradient"


def _check_training(cls, arguments, call, x, drops):
    layer = cls(**arguments)
    if "training" not in inspect.signature(layer.call).parameters:
        assert not drops
        return
    first = to_numpy(call(layer, x, training=False))
    np.testing.assert_array_equal(first, to_numpy(call(layer, x, training=False)))
    if drops:
        runs = []
        for seed in (5, 5, 6):
            keras.utils.set_random_seed(seed)
            layer = cls(**arguments)
            runs.append(to_numpy(call(layer, x, training=True)))
            assert runs[-1].shape != first.shape or np.abs(runs[-1] - first).max() > 0
        np.testing.assert_array_equal(runs[0], runs[1])
        assert np.abs(runs[0] - runs[2]).max() > 0
    else:
        np.testing.assert_array_equal(first, to_numpy(call(layer, x, training=True)))


def check_model(config):
    """What holds for a model of any kind, beside the equality with tests/reference.py."""
    model = randomize(ViT(config))
    x = images(config, 4)
    y = run(model, x)
    assert np.isfinite(y).all() and y.shape[1:] == model.output_shape[1:]

    # A batch is its images one by one, and the order of calls does not matter.
    halves = np.concatenate([run(model, x[:1]), run(model, x[1:])])
    np.testing.assert_allclose(y, halves, atol=1e-5)
    assert np.abs(y[0] - y[1]).max() > 1e-3

    # Features, pre-logits and logits are parts of one computation.
    pre_logits = run(model.features(), x)
    if config.num_classes:
        head = model.get_layer("head")
        np.testing.assert_allclose(to_numpy(head(pre_logits)), y, atol=1e-5)
    else:
        np.testing.assert_array_equal(pre_logits, y)
    tokens = run(model.features("tokens"), x)
    assert tokens.shape == (4, config.num_tokens, config.width)
    grid = run(model.features("tokens", grid=True), x)
    flat = grid.reshape(4, config.num_patches, config.width)
    np.testing.assert_array_equal(flat, tokens[:, config.num_prefix_tokens :])

    again = ViT.from_config(json.loads(json.dumps(model.get_config())))
    assert again.config == config and again.get_config() == model.get_config()
    return model


def check_attention(model, x):
    """Explicit and fused attention agree, and the weights are probabilities."""
    config = model.config
    z = run(model.features(blocks=0), x)
    block = model.blocks[1]
    fused = to_numpy(block(z))
    explicit, scores = (to_numpy(v) for v in block(z, return_attention_scores=True))
    np.testing.assert_allclose(fused, explicit, atol=1e-5)
    assert scores.shape == (len(x), config.num_heads, config.num_tokens, config.num_tokens)
    np.testing.assert_allclose(scores.sum(-1), 1.0, atol=1e-5)


def freeze_some(model):
    """Freezes a block with one part of it thawed, parts of another at each depth, and a weight."""
    first, second = model.blocks[0], model.blocks[-1]
    first.trainable = False
    first.mlp.dense_1.trainable = True
    second.attention.query_dense.trainable = False
    second.mlp_norm.trainable = False
    second.mlp.dense_2.weights[-1].trainable = False  # its bias, if it has one
    model.get_layer("patches").projection.trainable = False
    return model


def flags(model):
    """What trains, and the flag of every weight, which a model around this one goes by."""
    return [v.path for v in model.trainable_weights], {v.path: v.trainable for v in model.weights}


def check_flags(model, path):
    """Every way to save the model, or to copy it, keeps the `trainable` flags.

    Args:
        model: A `ViT`, changed after it was made.
        path: Where a `.keras` file may be written.
    """
    wanted = flags(model)
    assert wanted != flags(ViT(model.config))
    model.save(path)
    config = json.loads(json.dumps(model.get_config()))
    for again in (
        keras.saving.load_model(path),
        keras.models.model_from_json(model.to_json()),
        ViT.from_config(config),
    ):
        assert flags(again) == wanted
        assert again.get_config() == model.get_config()
    # The field is what does it, and a file from before it was there still loads.
    older = ViT.from_config({k: v for k, v in config.items() if k != "trainable_parts"})
    assert ("trainable_parts" in config) == (flags(older) != wanted)
    return again
