"""What `quantization_sweep` tries for an ONNX file."""

from collections.abc import Callable, Iterator

import numpy as np

from keras_vit.export.folded import Folded
from keras_vit.export.onnx.operators import to_onnx
from keras_vit.export.onnx.quantize import QuantizedOperators, measure_channels, open_session
from keras_vit.export.quantization import product_names, ways_to_quantize
from keras_vit.export.smoothing import smoothed, whole_ranges

Answers = Callable[[np.ndarray], np.ndarray]


def trials(
    folded: Folded, calibration: np.ndarray, num_threads: int | None
) -> Iterator[tuple[str, str, Answers]]:
    """The float32 file, then each way to quantize it: what is int8, its name, and the answers.

    Answers are logits, or without a head features.
    """
    output = "logits" if folded.config.num_classes else "features"

    def answers(made: object) -> Answers:
        session = open_session(made, num_threads)
        # One image at a time, as "dynamic" scales all images of a batch alike.
        return lambda images: np.concatenate(
            [session.run([output], {"images": image[None]})[0] for image in images]
        )

    yield "file", "float32", answers(to_onnx(folded))
    folded, seen = smoothed(folded, measure_channels(folded, calibration, num_threads=num_threads))
    ranges = whole_ranges(seen)
    for what, name, how in ways_to_quantize(product_names(folded)):
        yield what, name, answers(to_onnx(folded, ops=QuantizedOperators(how, ranges)))
