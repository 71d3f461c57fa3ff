"""How weights are split: the patterns, and their effect on a model on four devices.

The functions `on_four_devices_...` run in a child process, which is this file as a program.
"""

import json
import sys
import traceback
from pathlib import Path

import keras
import numpy as np
import pytest
from processes import forced_devices, run_together

import keras_vit

pytestmark = pytest.mark.only_on("jax")

TINY = {
    "image_size": (24, 16),
    "patch_size": 8,
    "width": 20,
    "depth": 2,
    "num_heads": 4,
    "mlp_dim": 28,
    "num_classes": 3,
}
# Together these configs have every weight that a ViT can have.
CONFIGS = [
    {},
    {"num_registers": 3, "layer_scale": 1e-5, "qk_norm": True, "representation_size": 12},
    {"class_token": False, "pooling": "mean", "qkv_bias": False, "position_embedding": "sincos_2d"},
    {"position_embedding": "learned_2d", "patch_norm": True, "num_classes": 0},
    {"stem": "resnet", "stem_depths": (2,), "stem_width": 32},
    {"stem": "conv", "stem_width": 16},
    {"position_embedding": "learned+relative_bias", "key_bias": False, "image_size": 64},
    {"position_embedding": "relative", "num_registers": 1},
    {"position_embedding": "relative_mlp", "relative_mlp_dim": 6},
    {"class_token": False, "pooling": "map", "pooling_heads": 20, "pooling_mlp_dim": 24},
    {"mlp": "swiglu", "mlp_inner_norm": True, "embedding_norm": True, "patch_bias": False},
    {"mlp": "swiglu", "dense_bias": False, "norm": "rms"},
    {"patch_shift": True, "patch_norm": "before", "score_scale": "learned"},
]


def split_model(mesh, **fields):
    from keras_vit.train.distribution import model_parallel

    keras.distribution.set_distribution(model_parallel.ModelParallel(mesh))
    return keras_vit.ViT(keras_vit.ViTConfig(**{**TINY, **fields}))


def mesh(batch=1, model=4):
    import jax

    return keras.distribution.DeviceMesh((batch, model), ("batch", "model"), jax.devices())


@pytest.fixture(autouse=True)
def no_distribution():
    yield
    keras.distribution.set_distribution(None)


@pytest.mark.parametrize("fields", CONFIGS)
def test_patterns_match_the_weights_of_each_config(fields):
    from keras_vit.train.distribution import model_parallel

    model = split_model(mesh(model=1), **fields)
    model_parallel.check_layouts(model, mesh(model=1))
    keys = model_parallel.layout_map(mesh(model=1))
    large = [w for w in model.weights if len(w.shape) > 1 and np.prod(w.shape) > 200]
    assert large
    assert all(keys[w.path] is not None for w in large)


def test_check_names_a_pattern_that_matches_nothing(monkeypatch):
    from keras_vit.train.distribution import model_parallel

    model = split_model(mesh(model=1))
    wrong = {"(?:.*/)?encoder_block_\\d+/mlp/dense_3/kernel": ((None, "model"), "mlp_dim")}
    monkeypatch.setattr(model_parallel, "_RULES", {**model_parallel._RULES, **wrong})
    with pytest.raises(ValueError, match=r"must fit a weight.*dense_3/kernel"):
        model_parallel.check_layouts(model, mesh(model=1))


def test_lora_is_split_by_heads():
    from keras_vit.train.distribution import model_parallel

    keras.distribution.set_distribution(model_parallel.ModelParallel(mesh(model=1)))
    model = keras_vit.ViT(keras_vit.ViTConfig(**TINY))
    model.enable_lora(2, ("query", "attention_output", "mlp"))
    keys = model_parallel.layout_map(mesh(model=1))
    axes = {
        w.path.removeprefix("encoder_block_0/"): keys[w.path] and keys[w.path].axes
        for w in model.weights
        if w.path.startswith("encoder_block_0/") and "lora" in w.path
    }
    assert axes == {
        "attention/query/lora_kernel_a": (None, "model", None),
        "attention/query/lora_kernel_b": None,
        "attention/attention_output/lora_kernel_a": ("model", None, None),
        "attention/attention_output/lora_kernel_b": None,
        "mlp/dense_1/lora_kernel_a": None,
        "mlp/dense_1/lora_kernel_b": (None, "model"),
        "mlp/dense_2/lora_kernel_a": ("model", None),
        "mlp/dense_2/lora_kernel_b": None,
    }


# -- on four devices


def on_four_devices_each_device_holds_a_quarter():
    model = split_model(mesh(), representation_size=12)
    held = {w.path: w.value.sharding.shard_shape(tuple(w.shape)) for w in model.weights}
    assert held["encoder_block_1/attention/query/kernel"] == (20, 1, 5)
    assert held["encoder_block_1/attention/value/bias"] == (1, 5)
    assert held["encoder_block_1/attention/attention_output/kernel"] == (1, 5, 20)
    assert held["encoder_block_1/mlp/dense_1/kernel"] == (20, 7)
    assert held["encoder_block_1/mlp/dense_1/bias"] == (7,)
    assert held["encoder_block_1/mlp/dense_2/kernel"] == (7, 20)
    assert held["patches/projection/kernel"] == (8, 8, 3, 5)
    assert held["position_embedding/table"] == (7, 5)
    assert held["pre_logits/kernel"] == (20, 3)
    assert held["head/kernel"] == (3, 3)
    assert held["encoder_norm/gamma"] == (20,)


def on_four_devices_sizes_that_do_not_divide_are_named():
    for field, value, size in (
        ("num_heads", 5, 5),
        ("mlp_dim", 30, 30),
        ("width", 21, 21),
        ("representation_size", 10, 10),
    ):
        with pytest.raises(ValueError, match=f"{field} must be a multiple of 4.*{field}={size},"):
            split_model(mesh(), **{field: value, **({"num_heads": 3} if field == "width" else {})})
    split_model(mesh(), num_classes=7)  # any number of classes is allowed


def on_four_devices_state_of_optimizers_is_split():
    from keras_vit.train import Muon
    from keras_vit.train.distribution import model_parallel

    for make in (
        lambda: keras.optimizers.AdamW(use_ema=True, gradient_accumulation_steps=2),
        lambda: Muon(weight_decay=0.1),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(momentum=0.9)),
    ):
        model = split_model(mesh(2, 2))
        model.compile(make(), "mse")
        model.optimizer.build(model.trainable_variables)
        # The smallest kernel of a block has 20 * 20 values.
        model_parallel.check_layouts(model, mesh(2, 2), whole=399)
        kernels = [v for v in model.optimizer.variables if np.prod(v.shape) > 399]
        assert len(kernels) >= 12
        for v in kernels:
            assert np.prod(v.value.sharding.shard_shape(tuple(v.shape))) * 2 == np.prod(v.shape)


def on_four_devices_unsplit_state_is_found():
    from keras_vit.train.distribution import model_parallel

    model = split_model(mesh())
    model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    model_parallel.check_layouts(model, mesh(), whole=399)
    extra = model.optimizer.add_variable((20, 28), name="moment_of_somebody")
    with pytest.raises(ValueError, match=r"more than 399 values.*moment_of_somebody \(20, 28\)"):
        model_parallel.check_layouts(model, mesh(), whole=399)
    assert model_parallel.unsplit([extra], 4, 399) == [extra]
    assert model_parallel.unsplit([extra], 4, 560) == []


def on_four_devices_embeddings_do_not_split_the_residual_stream():
    import jax

    model = split_model(mesh(2, 2))
    tokens = keras.Model(model.inputs, model.get_layer("position_embedding").output)
    values = [v.value for v in tokens.trainable_variables]
    rest = [v.value for v in tokens.non_trainable_variables]
    images = np.zeros((4, 24, 16, 3), "float32")
    held = []
    for _ in range(2):
        out = jax.jit(lambda *a: tokens.stateless_call(*a)[0])(values, rest, images)
        held.append(out.sharding.shard_shape(out.shape))
        # Negative control: without the layout of that output, the tokens are split by width.
        layouts = keras.distribution.distribution()._layout_map
        for key in [key for key in layouts if key.endswith("/output")]:
            del layouts[key]
    assert held == [(2, 7, 20), (4, 7, 10)], held


def main():
    import jax

    assert len(jax.devices()) == 4
    errors = {}
    for name, function in sorted(globals().items()):
        if name.startswith("on_four_devices_"):
            try:
                function()
            except BaseException:
                errors[name] = traceback.format_exc()
            else:
                errors[name] = None
            keras.distribution.set_distribution(None)
    Path(sys.argv[1]).write_text(json.dumps(errors))


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """The error of each function in the child, or None."""
    out = tmp_path_factory.mktemp("layout") / "errors.json"
    command = [sys.executable, __file__, str(out)]
    ((code, said),) = run_together([command], [forced_devices(4)])
    assert code == 0, said[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", [n for n in globals() if n.startswith("on_four_devices_")])
def test_layout(errors, name):
    assert errors[name] is None, errors[name]


if __name__ == "__main__":
    main()
