"""The TFLite executor: the file's answers are the model's, from built-in operators alone."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from conformance import KINDS, TINY, images, run, tiny_model

from keras_vit.export.fold import fold
from keras_vit.export.tflite import operators, quantize
from keras_vit.export.tflite.operators import to_float32_tflite

pytestmark = pytest.mark.backend_free
FLOAT32 = 1e-5  # of the range
# What differs only in how it is folded is tested in `test_program`.
FOLDED_ALIKE = {"learned_2d", "sincos_2d", "registers_only"}
CASES = {kind: (kind, {}) for kind in KINDS if kind not in FOLDED_ALIKE} | {
    "post_norm_final_norm": ("post_norm", {"final_norm": "before_pooling", "qk_norm": True}),
    "pre_norm_no_final_norm": ("paper", {"final_norm": "none"}),
    "patch_norm_no_positions": ("patch_norm", {"position_embedding": "none"}),
    "mean_of_patches_alone": ("no_class_token", {"position_embedding": "none"}),
    "all_tokens_features": ("all_tokens", {"num_classes": 0, "final_norm": "none"}),
    "five_channels": ("paper", {"in_channels": 5, "depth": 1}),
}


def convert(folded, batch_size=3, output=None, takes="float32"):
    output = output or ("logits" if folded.head else "features")
    return to_float32_tflite(
        folded, batch_size=batch_size, output=output, images=takes, activation="softmax"
    )


def interpreter_of(content):
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=content)
    interpreter.allocate_tensors()
    return interpreter


def answer(content, x):
    interpreter = interpreter_of(content)
    (entry,), (result,) = interpreter.get_input_details(), interpreter.get_output_details()
    if tuple(entry["shape"]) != x.shape:
        interpreter.resize_tensor_input(entry["index"], x.shape, strict=True)
        interpreter.allocate_tensors()
    interpreter.set_tensor(entry["index"], x)
    interpreter.invoke()
    return interpreter.get_tensor(result["index"])


def rows(interpreter):
    """The rows of what each operator writes, by the operator's name."""
    tensors = {tensor["index"]: tensor for tensor in interpreter.get_tensor_details()}
    written = [tensors[i] for op in interpreter._get_ops_details() for i in op["outputs"]]
    return {t["name"].split(";")[0]: int(np.prod(t["shape"][:-1])) for t in written}


def error(found, expected):
    assert found.shape == expected.shape and found.dtype == "float32"
    return np.abs(found - expected).max() / np.ptp(expected)


@pytest.mark.parametrize("case", CASES)
def test_file_is_the_model(case):
    kind, changes = CASES[case]
    model = tiny_model(kind, seed=3, **changes)
    x = images(model.config)
    content, expected = convert(fold(model)), run(model, x)
    found = answer(content, x)
    assert error(found, expected) < FLOAT32
    kinds = {operator.kind for operator in quantize.read_operators(content)}
    assert kinds <= {*quantize.PRODUCTS, *quantize.BETWEEN}  # which the sweep tries in int8
    assert error(found[::-1], expected) > 1e-2  # another image is another answer


def test_file_of_another_model_is_not_the_model():
    model = tiny_model()
    x = images(TINY)
    folded = fold(model)
    for index, block in enumerate(folded.blocks):
        mlp_1 = dataclasses.replace(block.mlp_1, bias=np.zeros_like(block.mlp_1.bias))
        blocks = list(folded.blocks)
        blocks[index] = dataclasses.replace(block, mlp_1=mlp_1)
        wrong = convert(dataclasses.replace(folded, blocks=tuple(blocks)))
        assert error(answer(wrong, x), run(model, x)) > 1e-3


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("paper", {}),
        ("patch_norm", {"pooling": "mean_all"}),
        ("resnet_stem", {}),
        ("map_registers", {}),
        ("distilled", {}),
    ],
)
def test_file_without_a_batch_size_takes_any(kind, changes):
    model = tiny_model(kind, **changes)
    content = convert(fold(model), batch_size=None)
    for count in (1, 5):
        x = images(model.config, count)
        assert error(answer(content, x), run(model, x)) < FLOAT32


@pytest.mark.parametrize("kind", ["paper", "patch_norm", "shifted", "conv_stem", "resnet_stem"])
def test_file_takes_pixels(kind):
    config = {"pixel_mean": (0.1, 0.4, 0.2), "pixel_std": (0.3, 0.2, 0.1)}
    config |= {"patch_norm": False} if kind == "shifted" else {}  # the zeros at its edges remain
    model = tiny_model(kind, **config)
    pixels = np.random.default_rng(5).integers(0, 256, (3, *TINY.input_shape), "uint8")
    folded = fold(model)
    found = answer(convert(folded, takes="uint8"), pixels)
    for std, same in ((config["pixel_std"], True), (0.2, False)):
        x = (pixels / 255 - config["pixel_mean"]) / std
        assert (error(found, run(model, x.astype("float32"))) < FLOAT32) == same


def test_file_gives_probabilities():
    model = tiny_model()
    x = images(TINY)
    folded = fold(model)
    logits = run(model, x).astype("float64")
    softmax = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(answer(convert(folded, output="probabilities"), x), softmax, 1e-4)
    sigmoid = to_float32_tflite(
        folded, batch_size=3, output="probabilities", images="float32", activation="sigmoid"
    )
    np.testing.assert_allclose(answer(sigmoid, x), 1 / (1 + np.exp(-logits)), 1e-4)


def test_file_has_few_operators_and_names_that_say_where_they_are():
    model = tiny_model(depth=3)
    interpreter = interpreter_of(convert(fold(model), batch_size=1))
    operators = interpreter._get_ops_details()
    # XNNPACK runs all of it in one piece.
    counts = Counter(operator["op_name"] for operator in operators)
    assert counts.pop("DELEGATE") == 1
    assert counts["GELU"] == counts["SOFTMAX"] == 3
    assert counts["FULLY_CONNECTED"] == 1 + 3 * 6 + 1 and counts["BATCH_MATMUL"] == 3 * 2
    assert counts["MEAN"] == counts["RSQRT"] == 2 * 3 + 1
    assert "SUB" not in counts  # the stream is centered, and every bias is in its product
    assert counts["ADD"] == 1 + 3 * 2 + counts["MEAN"]
    found, tokens = rows(interpreter), TINY.num_tokens
    assert found["encoder_block_1/attention/query/MatMul"] == tokens
    assert found["encoder_block_1/mlp/dense_2/MatMul"] == tokens
    # The last block works for the one token that is read.
    assert found["encoder_block_2/attention/query/MatMul"] == 1
    assert found["encoder_block_2/mlp/dense_2/MatMul"] == 1
    mean = interpreter_of(convert(fold(tiny_model("mean")), batch_size=1))
    assert rows(mean)["encoder_block_1/mlp/dense_2/MatMul"] == tokens


def test_operator_that_is_not_built_in_is_refused(monkeypatch):
    import tensorflow as tf

    spec = tf.TensorSpec([3], tf.float32)
    function = tf.function(tf.math.erf, input_signature=[spec]).get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function], tf.Module())
    converter.target_spec.supported_ops = [tf.lite.OpsSet.SELECT_TF_OPS]
    with pytest.raises(RuntimeError, match=r"built-in operators alone.*FlexErf"):
        operators._check_operators(converter.convert())
    checked = []
    monkeypatch.setattr(operators, "_check_operators", checked.append)
    assert [convert(fold(tiny_model(depth=1)))] == checked  # every file is


def test_bad_arguments_are_named(monkeypatch):
    folded, headless = fold(tiny_model()), fold(tiny_model("features"))
    good = {"batch_size": 1, "output": "logits", "images": "uint8", "activation": "softmax"}
    for model, wrong, words in (
        (folded, {"output": "labels"}, "output must be one of"),
        (folded, {"images": "bytes"}, "images must be one of"),
        (folded, {"activation": "relu"}, "activation must be one of"),
        (headless, {}, "output must be 'features' for"),
    ):
        with pytest.raises(ValueError, match=words + "(.|\n)*Received"):
            to_float32_tflite(model, **{**good, **wrong})
    monkeypatch.setattr(operators, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="must have at most 1000 bytes"):
        to_float32_tflite(folded, **good)
