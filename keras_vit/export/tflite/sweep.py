"""What `quantization_sweep` tries for a TFLite file."""

from collections.abc import Callable, Iterator

import numpy as np

from keras_vit.export.folded import Folded
from keras_vit.export.quantization import ways_to_quantize
from keras_vit.export.tflite.operators import to_float32_tflite
from keras_vit.export.tflite.quantize import (
    BETWEEN,
    layer_names,
    measure_ranges,
    quantize_layers,
    read_operators,
)
from keras_vit.probabilities import probability_function
from keras_vit.runtime.tflite_interpreter import open_interpreter

Answers = Callable[[np.ndarray], np.ndarray]


def trials(
    folded: Folded, calibration: np.ndarray, num_threads: int | None
) -> Iterator[tuple[str, str, Answers]]:
    """The float32 file, then each way to quantize it: what is int8, its name, and the answers.

    Answers are logits, or without a head features. Besides the layers, each kind of operator
    between them is tried.
    """
    config = folded.config
    content = to_float32_tflite(
        folded,
        batch_size=1,
        output="logits" if config.num_classes else "features",
        images="float32",
        activation=probability_function(config),
    )

    def answers(file: bytes) -> Answers:
        return lambda images: _run(file, images, num_threads)

    yield "file", "float32", answers(content)
    ranges = measure_ranges(content, calibration)
    layers = layer_names(content)
    present = {operator.kind for operator in read_operators(content)}
    between = [kind for kind in BETWEEN if kind in present]
    for what, name, how in ways_to_quantize(layers):
        yield what, name, answers(quantize_layers(content, how, ranges))
        if (what, name) == ("file", "int8"):
            how = dict.fromkeys(layers, "int8")
            everything = quantize_layers(content, how, ranges, between)
            yield "file", "int8 everywhere", answers(everything)
    for kind in between:
        yield "operator", kind, answers(quantize_layers(content, {}, ranges, [kind]))


def _run(content: bytes, images: np.ndarray, num_threads: int | None) -> np.ndarray:
    """The outputs of a file, run on one image at a time."""
    interpreter = open_interpreter(content, num_threads=num_threads)
    (entry,), (exit_,) = interpreter.get_input_details(), interpreter.get_output_details()
    found = []
    for image in images:
        interpreter.set_tensor(entry["index"], image[None])
        interpreter.invoke()
        found.append(interpreter.get_tensor(exit_["index"]))
    return np.concatenate(found)
