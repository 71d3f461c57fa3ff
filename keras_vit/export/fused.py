"""`keras_vit.fused`: a model as a function for fast inference in this process."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_vit.classifier import takes_classifier
from keras_vit.export.fold import check_model, fold
from keras_vit.export.saved_model.operators import compile_graph
from keras_vit.export.verify import merging_model
from keras_vit.model import ViT
from keras_vit.preprocessing import model_input


@takes_classifier
def fused(
    model: ViT, dtype: str = "float32", *, token_merging: int | None = None
) -> Callable[..., np.ndarray]:
    """The model as a function for fast inference on TensorFlow, whatever backend Keras runs on.

    The function keeps the weights that the model has now: later training does not change it.

    Args:
        model: A `ViT`, not quantized.
        dtype: "float32", or "bfloat16" for processors that multiply it (AVX512-BF16, AMX). In
            bfloat16, logits differ by about a hundredth of their range.
        token_merging: r: each block merges its r most similar pairs of tokens, for speed; None means
            the config's. Measure what it costs: nothing compares it with the model.

    Returns:
        `predict(images, batch_size=32)`, from images `(B, H, W, C)`, an array or a tensor, to the
        model's output, a float32 array. Images are floats as the model takes them, or uint8 pixels,
        which are normalized first.

    Example:

    >>> predict = keras_vit.fused(model, dtype="bfloat16")
    >>> predict(images).argmax(-1)
    """
    check_model(model)
    model = merging_model(model, token_merging)
    run = compile_graph(fold(model), dtype, constants=dtype == "bfloat16").run
    config, shape = model.config, model.config.input_shape

    def predict(images: Any, batch_size: int = 32) -> np.ndarray:
        array = np.asarray(keras.ops.convert_to_numpy(images))
        other = array.dtype.kind in "iub" and array.dtype != np.uint8
        if other or array.shape[1:] != shape or not len(array):
            raise ValueError(
                "images must be floats as the model takes them, or uint8 pixels, and have shape "
                f"(batch, {', '.join(map(str, shape))}). "
                f"Received: images with shape {array.shape}, {array.dtype}"
            )
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(
                f"batch_size must be a positive int. Received: batch_size={batch_size!r}"
            )
        images = model_input(array, config)
        starts = range(0, len(images), batch_size)
        return np.concatenate([run(images[i : i + batch_size]).numpy() for i in starts])

    return predict
