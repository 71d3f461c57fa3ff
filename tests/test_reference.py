"""The model equals the paper's equations, and no longer does if one term changes."""

import numpy as np
import pytest
import reference
from conformance import KINDS, arrays, check_attention, images, run, tiny_model


@pytest.mark.parametrize("kind", KINDS)
def test_model_equals_the_paper(kind):
    model = tiny_model(kind)
    x = images(model.config)
    y = run(model, x)
    expected = reference.forward(model.config, arrays(model), x)
    np.testing.assert_allclose(y, expected, atol=1e-5 * max(1, np.abs(expected).max()))
    check_attention(model, x)


@pytest.mark.parametrize("kind", ["paper", "post_norm"])
def test_model_depends_on_every_array(kind):
    """The negative control: with one array changed, the reference differs from the model."""
    model = tiny_model(kind)
    x = images(model.config)
    weights = arrays(model)
    y = reference.forward(model.config, weights, x)
    for path, value in weights.items():
        changed = reference.forward(model.config, {**weights, path: value + 0.1 * noise(value)}, x)
        difference = np.abs(changed - y).max()
        if path.endswith("attention/key/bias"):
            assert difference < 1e-9  # softmax ignores it
        else:
            assert difference > 1e-4, path


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("paper", "block_norm", "post"),
        ("paper", "gelu", "tanh"),
        ("paper", "norm_epsilon", 1e-2),
        ("paper", "final_norm", "none"),
        ("paper", "pooling", "mean"),
        ("registers", "num_registers", 0),
        ("mean", "final_norm", "before_pooling"),
    ],
)
def test_model_follows_every_term(kind, field, value):
    model = tiny_model(kind)
    x = images(model.config)
    other = model.config.replace(**{field: value})
    difference = np.abs(reference.forward(other, arrays(model), x) - run(model, x))
    assert difference.max() > 1e-5


def noise(value):
    return np.random.default_rng(9).normal(size=np.shape(value))
