"""What `quantization_sweep` tries for OpenVINO's files."""

from collections.abc import Callable, Iterator

import numpy as np

from keras_vit.export.folded import Folded
from keras_vit.export.openvino.convert import PairedOperators, measure_channels, to_openvino
from keras_vit.export.quantization import product_names, ways_to_quantize
from keras_vit.export.smoothing import whole_ranges
from keras_vit.runtime.openvino import compile_model

Answers = Callable[[np.ndarray], np.ndarray]


def trials(
    folded: Folded, calibration: np.ndarray, num_threads: int | None
) -> Iterator[tuple[str, str, Answers]]:
    """The float32 model, then each way to quantize it: what is int8, its name, and the answers.

    Answers are logits, or without a head features. Layers that stay in float are not tried.
    """
    output = "logits" if folded.config.num_classes else "features"

    def answers(ops: PairedOperators | None) -> Answers:
        made = to_openvino(folded, images="float32", activation="softmax", ops=ops)
        compiled = compile_model(made, "float32", num_threads)
        return lambda images: np.concatenate(
            [compiled({"images": np.ascontiguousarray(image[None])})[output] for image in images]
        )

    yield "file", "float32", answers(None)
    ranges = whole_ranges(measure_channels(folded, calibration))
    for what, name, how in ways_to_quantize(product_names(folded)):
        if "int8" in how.values():
            yield what, name, answers(PairedOperators(how, ranges))
