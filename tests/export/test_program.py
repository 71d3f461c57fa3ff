"""The program is the model, whatever kind of ViT it is: in NumPy, its plainest target."""

import dataclasses
import inspect

import numpy as np
import pytest
from conformance import CONFIGS, images, run, tiny_model

from keras_vit.export.fold import fold
from keras_vit.export.in_numpy import NumpyOperators
from keras_vit.export.onnx.operators import OnnxOperators
from keras_vit.export.program import Operators, Program
from keras_vit.export.saved_model.operators import TensorFlowOperators
from keras_vit.export.tflite.operators import TFLiteOperators

EVERYWHERE = "registers"  # the others differ in nothing that a backend sees
ACTIVATIONS = ("softmax", "log_softmax", "sigmoid", "linear")


def error(found, expected):
    assert found.shape == expected.shape
    return np.abs(found - expected).max() / np.ptp(expected)


@pytest.mark.parametrize(
    "case",
    [c if c == EVERYWHERE else pytest.param(c, marks=pytest.mark.backend_free) for c in CONFIGS],
)
def test_program_is_the_model(case):
    model = tiny_model(case, seed=3)
    x = images(model.config)
    folded, expected = fold(model), run(model, x)
    program = Program(folded, NumpyOperators())
    assert error(program.output(x), expected) < 1e-5
    assert error(program.features(program.head_input(x)), run(model.features(), x)) < 1e-5
    # Negative control: another bias in one block, in the last one too.
    for index, block in enumerate(folded.blocks):
        mlp_1 = dataclasses.replace(block.mlp_1, bias=block.mlp_1.bias + 0.5)
        blocks = list(folded.blocks)
        blocks[index] = dataclasses.replace(block, mlp_1=mlp_1)
        broken = Program(dataclasses.replace(folded, blocks=tuple(blocks)), NumpyOperators())
        assert error(broken.output(x), expected) > 1e-3


@pytest.mark.backend_free
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_program_applies_the_activation_of_the_model(activation):
    model = tiny_model(classifier_activation=activation)
    x = images(model.config)
    program = Program(fold(model), NumpyOperators())
    logits = program.logits(program.head_input(x))
    assert error(program.output(x), run(model, x)) < 1e-5
    assert (error(logits, run(model, x)) > 1e-2) == (activation != "linear")


@pytest.mark.backend_free
def test_last_block_computes_the_one_token_that_is_read():
    """Where it may: another pooling reads all of them."""
    for kind, rows in (("paper", 3), ("mean", 3 * 7), ("all_tokens", 3 * 7)):
        model = tiny_model(kind)
        program = Program(fold(model), NumpyOperators())
        x, _ = program.encode(program.embed(images(model.config)))
        assert x.shape == (rows, model.config.width)


@pytest.mark.backend_free
def test_program_without_a_head_has_no_logits():
    program = Program(fold(tiny_model("features")), NumpyOperators())
    with pytest.raises(ValueError, match="logits need a model with a head. Received"):
        program.logits(np.zeros((1, 20)))


@pytest.mark.backend_free
def test_every_target_has_the_operators_with_the_same_arguments():
    named = {name for name in vars(Operators) if not name.startswith("_")}
    assert len(named) > 10
    for target in (NumpyOperators, TensorFlowOperators, TFLiteOperators, OnnxOperators):
        for name in named:
            wanted, found = (
                list(inspect.signature(getattr(cls, name)).parameters)
                for cls in (Operators, target)
            )
            assert found == wanted, f"{target.__name__}.{name}"
