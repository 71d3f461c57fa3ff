import functools

import keras
import numpy as np
import pytest

import keras_vit
from keras_vit.layers import EncoderBlock
from keras_vit.train import Distillation, FlexiViT, recomputation, remat

RATES = dict(dropout=0.2, attention_dropout=0.1, drop_path=0.4)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def tiny(dtype=None, **fields):
    config = {
        **dict(image_size=16, patch_size=8, width=16, depth=2, num_heads=2, mlp_dim=24),
        **dict(num_classes=3, head_init="truncated_normal"),
        **fields,
    }
    return keras_vit.ViT(config, dtype=dtype)


def toy(count=12):
    images = np.random.default_rng(0).normal(size=(count, 16, 16, 3))
    return images.astype("float32"), np.arange(count) % 3


def state(model):
    return [np.array(keras.ops.convert_to_numpy(v)) for v in model.variables]


def trained(model, start, shift=0, wrap=None, epochs=2, **arguments):
    """The variables after some steps from `start`, with all seeds shifted."""
    for variable, value in zip(model.variables, start, strict=True):
        seed = "seed" in variable.path
        variable.assign(value + np.array([shift, 0], value.dtype) if seed else value)
    whole = wrap(model) if wrap else model
    loss = None if isinstance(whole, Distillation) else LOSS
    whole.compile(keras.optimizers.SGD(0.1), loss, **arguments)
    keras.utils.set_random_seed(shift)  # most dropout on torch reads torch's own generator
    whole.fit(*toy(), batch_size=4, epochs=epochs, shuffle=False, verbose=0)
    return state(model)


def farthest(first, second):
    """The largest difference of two weights, and of two states of seed generators."""
    pairs = list(zip(first, second, strict=True))
    distances = [[], [0.0]]
    for a, b in pairs:
        distances[a.dtype != np.float32].append(np.abs(a.astype("float64") - b).max())
    return [max(part) for part in distances]


def compare(make, bound=1e-5, **arguments):
    """Trains with and without `remat` from one state, and returns that and two states after it."""
    start, results = state(make()), []
    for on in (False, True):
        model = make()
        if on:
            remat(model)
        results.append(trained(model, start, **arguments))
    weights, seeds = farthest(*results)
    assert weights < bound and seeds == 0
    return model, start, results[1]


def test_training_is_the_same_with_dropout_and_stochastic_depth():
    model, start, after = compare(lambda: tiny(**RATES))
    assert farthest(start, after)[1] == 6  # one draw a step
    assert farthest(after, trained(model, start, 7))[0] > 1e-3  # the masks matter


def test_frozen_weights_stay_and_the_others_learn():
    """With rotary positions, whose random scale is another input of a block."""

    def make():
        rope = dict(position_embedding="learned+rope", rope_rescale=2.0, head_dim=8)
        model = tiny(**rope, **RATES)
        model.blocks[1].attention.trainable = False
        return model

    model, start, after = compare(make)
    block = {w.path for w in model.blocks[1].weights}
    for variable, old, new in zip(model.variables, start, after, strict=True):
        if variable.path in block:
            moved = np.abs(new - old).max() > 1e-6
            assert moved == ("attention/" not in variable.path), variable.path


@pytest.mark.only_on("torch", "tensorflow")  # JAX rounds bfloat16 elsewhere in another program
def test_training_in_mixed_precision_is_the_same():
    compare(lambda: tiny("mixed_bfloat16", **RATES), bound=1e-6, epochs=1)


def test_objectives_train_the_same():
    teacher = tiny()
    compare(lambda: tiny(**RATES), wrap=lambda vit: Distillation(vit, teacher), epochs=1)


@pytest.mark.only_on("torch")  # the same code on each backend
def test_flexivit_trains_the_same():
    compare(lambda: tiny(**RATES), wrap=lambda vit: FlexiViT(vit, [8], seed=1))


# -- that blocks are computed again


def counted(monkeypatch):
    """The list to which each computation of a block is added."""
    calls, call = [], EncoderBlock.call

    @functools.wraps(call)
    def counting(self, *args, **kwargs):
        calls.append(self.name)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(EncoderBlock, "call", counting)
    return calls


@pytest.mark.only_on("torch", "tensorflow")
def test_chosen_blocks_are_computed_twice(monkeypatch):
    counts = {}
    for name, blocks in {"none": (), "last": [-1], "all": None}.items():
        model = tiny()
        remat(model)
        remat(model, blocks)
        model.compile("sgd", LOSS)
        with monkeypatch.context() as patch:
            calls = counted(patch)
            model.train_on_batch(*toy())
        counts[name] = np.array([calls.count(f"encoder_block_{i}") for i in range(2)])
    assert (counts["all"] - counts["none"]).tolist() == [1, 1]
    assert (counts["last"] - counts["none"]).tolist() == [0, 1]


@pytest.mark.only_on("jax")
def test_compiled_step_of_jax_needs_less_memory():
    """Of XLA's plan for a CPU, where `jax.checkpoint` saves nothing."""
    import jax

    images, _ = toy()
    needed = {}
    for on in (False, True):
        model = tiny(depth=6, patch_size=2, **RATES)
        if on:
            remat(model)

        def loss(weights, others, model=model):
            logits, others = model.stateless_call(weights, others, images, training=True)
            return logits.sum(), others

        weights, others = (
            [v.value for v in part]
            for part in (model.trainable_variables, model.non_trainable_variables)
        )
        step = jax.jit(jax.grad(loss, has_aux=True)).lower(weights, others).compile()
        needed[on] = step.memory_analysis().temp_size_in_bytes
    assert needed[True] < 0.5 * needed[False]


@pytest.mark.only_on("torch")
def test_torch_remembers_less():
    import torch

    images, labels = toy()
    saved = {}
    for on in (False, True):
        model, sizes = tiny(depth=6, **RATES), []
        if on:
            remat(model)
        weights = {v.value.data_ptr() for v in model.weights}

        def pack(tensor, sizes=sizes, weights=weights):
            if tensor.data_ptr() not in weights:
                sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            LOSS(labels, model(images, training=True))
        saved[on] = sum(sizes)
    assert saved[True] < 0.2 * saved[False]


@pytest.mark.only_on("torch")
def test_blocks_that_draw_again_train_otherwise(monkeypatch):
    """What Keras' own remat does: the seeds go on between the two computations."""
    start = state(tiny(**RATES))
    plain = trained(tiny(**RATES), start)
    monkeypatch.setattr(recomputation, "_seeds", lambda block: [])
    monkeypatch.setattr(recomputation.keras, "StatelessScope", _NoScope)
    model = tiny(**RATES)
    remat(model)
    assert farthest(plain, trained(model, start))[0] > 1e-4


class _NoScope:
    def __init__(self, mapping):
        del mapping

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass


# -- what does not change


def test_nothing_changes_outside_of_training(tmp_path):
    model, (images, _) = tiny(**RATES), toy()
    logits, config = model.predict(images, verbose=0), model.get_config()
    remat(model)
    np.testing.assert_array_equal(model.predict(images, verbose=0), logits)
    assert model.get_config() == config
    tokens = keras.ops.ones((2, 5, 16))
    _, scores = model.blocks[0](tokens, training=True, return_attention_scores=True)
    assert tuple(scores.shape) == (2, 2, 5, 5)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(images, verbose=0), logits, atol=1e-6)
    assert "call" not in loaded.blocks[0].__dict__
    remat(model, ())
    assert all("call" not in block.__dict__ for block in model.blocks)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="model must be a keras_vit.ViT"):
        remat(keras.Sequential())
    for blocks in ([2], [-3], ["0"]):
        with pytest.raises(ValueError, match=r"blocks must be in \[-2, 1\]"):
            remat(tiny(), blocks)
