"""Muon compared with NumPy, and joint updates of kernels with separate ones."""

import numpy as np
import pytest
from conformance import arrays, tiny_model
from optimizer_steps import RATE, apply, make, random_gradients

from keras_vit.train.optim import muon


def newton_schulz(matrix):
    """Five steps of the quintic iteration, on the matrix or its transpose, whichever is wide."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize(
    ("path", "rows"),
    [
        ("encoder_block_1/attention/query/kernel", 20),
        ("encoder_block_0/attention/attention_output/kernel", 15),
        ("encoder_block_0/mlp/dense_1/kernel", 20),
    ],
)
def test_muon_orthogonalizes_kernels_as_matrices(path, rows):
    model = tiny_model("wide_heads")  # 5 heads of size 3: (20, 5, 3) and (5, 3, 20)
    optimizer = make(model, name="muon", momentum=0.8)
    before, gradients = arrays(model), [random_gradients(model, seed) for seed in range(2)]
    for grads in gradients:
        apply(optimizer, model, grads)

    def wanted(rows):
        value, m = before[path].astype("float64"), 0.0
        for grads in gradients:
            m = 0.8 * m + grads[path]
            matrix = (grads[path] + 0.8 * m).reshape(rows, -1)  # Nesterov's
            update = newton_schulz(matrix) * 0.2 * np.sqrt(max(matrix.shape))
            value = value - RATE * update.reshape(value.shape)
        return value

    np.testing.assert_allclose(arrays(model)[path], wanted(rows), atol=1e-5)
    # The negative control: the same numbers as a matrix of another shape.
    assert np.abs(arrays(model)[path] - wanted(rows // 5 if rows != 20 else 4)).max() > 1e-4


def test_muon_updates_the_kernels_of_the_blocks_and_adam_the_rest():
    model = tiny_model("registers", representation_size=11)
    optimizer = make(model, name="muon")
    muon = {
        v.path
        for v in model.trainable_variables
        if optimizer.adam_velocities[optimizer._get_variable_index(v)] is None
    }
    kernels = [path for path in arrays(model) if path.endswith("kernel")]
    assert muon == {path for path in kernels if path.startswith("encoder_block_")}
    assert len(muon) == 2 * 6 and len(kernels) == 2 * 6 + 3


@pytest.mark.parametrize("kind", ["conv_stem", "resnet_stem"])
def test_muon_updates_the_convolutions_of_a_stem_but_the_first(kind):
    model = tiny_model(kind)
    optimizer = make(model, name="muon")
    muon = {
        v.path
        for v in model.trainable_variables
        if optimizer.adam_velocities[optimizer._get_variable_index(v)] is None
    }
    stem = {path for path in arrays(model) if path.startswith("stem/") and "kernel" in path}
    assert len(stem) > 1 and stem - muon == {"stem/root_conv/kernel"}
    path = max(stem & muon)
    before, grads = arrays(model)[path].astype("float64"), random_gradients(model, 0)
    apply(optimizer, model, grads)
    momentum = optimizer.momentum
    matrix = (1 + momentum) * grads[path].reshape(-1, before.shape[-1])  # (k * k * C, F)
    update = newton_schulz(matrix) * 0.2 * np.sqrt(max(matrix.shape))
    np.testing.assert_allclose(
        arrays(model)[path], before - RATE * update.reshape(before.shape), atol=1e-5
    )


def test_iteration_in_half_precision_is_close_and_not_equal():
    path, values = "encoder_block_0/mlp/dense_1/kernel", []
    for dtype in (None, "bfloat16"):
        model = tiny_model("wide_heads")
        optimizer = muon.Muon(learning_rate=RATE, iteration_dtype=dtype)
        assert muon.Muon.from_config(optimizer.get_config()).iteration_dtype == dtype
        optimizer.build(model.trainable_variables)
        before = arrays(model)[path]
        apply(optimizer, model, random_gradients(model, 0))
        values.append(arrays(model)[path] - before)
    error = np.linalg.norm(values[1] - values[0]) / np.linalg.norm(values[0])
    assert 1e-4 < error < 0.1 and values[1].dtype == np.float32


def test_joint_updates_equal_separate_ones(monkeypatch):
    shapes = []
    orthogonalize = muon.Muon.zeropower_via_newtonschulz5

    def spy(self, x, steps):
        shapes.append(tuple(x.shape))
        return orthogonalize(self, x, steps)

    monkeypatch.setattr(muon.Muon, "zeropower_via_newtonschulz5", spy)
    query, key = (f"encoder_block_1/attention/{name}/kernel" for name in ("query", "key"))

    def moved(one_by_one, swap=False):
        """The weights after two updates."""
        monkeypatch.setattr(muon, "in_replica", lambda: one_by_one)
        model = tiny_model("wide_heads")
        optimizer = make(model, name="muon", weight_decay=0.1, ema_momentum=0.5)
        for seed in range(2):
            gradients = random_gradients(model, seed)
            if swap:
                gradients[query], gradients[key] = gradients[key], gradients[query]
            apply(optimizer, model, gradients)
        return arrays(model)

    together = moved(False)
    assert sorted(shapes) == sorted(2 * [(6, 20, 15), (2, 15, 20), (2, 20, 28), (2, 28, 20)])
    shapes.clear()
    alone = moved(True)
    assert len(shapes) == 2 * 12 and {shape[0] for shape in shapes} == {1}
    for path, value in alone.items():
        np.testing.assert_allclose(together[path], value, atol=1e-6, err_msg=path)
    # The negative control: two kernels of one shape that get each other's updates.
    swapped = moved(False, swap=True)
    assert np.abs(swapped[query] - alone[query]).max() > 1e-3
