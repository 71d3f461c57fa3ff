"""What the exports to a file share: their arguments, the comparison with the model, the result."""

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit.export.accuracy import Drop, check_accuracy_data, check_drop
from keras_vit.export.arguments import IMAGES, check_bound, check_choice, class_names
from keras_vit.export.fold import check_model
from keras_vit.export.one_file import check_file, new_file
from keras_vit.export.quantization import CALIBRATED, calibration_images, check_quantizing
from keras_vit.export.record import package_versions
from keras_vit.export.verify import (
    Verification,
    checked_pictures,
    float32_model,
    latencies_of_both,
    merging_model,
    verify_export,
)
from keras_vit.model import ViT
from keras_vit.probabilities import chosen_function
from keras_vit.runtime import KerasRuntime
from keras_vit.runtime.base import FORMAT


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileExport:
    """What was written, and how it compares with the model."""

    path: Path
    quantize: str | None
    """The argument of this name."""
    size: int
    """Bytes, of all files."""
    latency: float
    """Milliseconds for one image in the file's runtime, the shortest of several."""
    plain_latency: float
    """The same for the Keras model in float32 on its backend; the two were timed in turns."""
    verification: Verification
    accuracy: Drop | None = None
    """The model's accuracy and the file's on `accuracy_data`, or None."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The arguments that the exports to a file share, checked by `check_task`.

    Attributes:
        model: The model to export; it merges tokens as asked.
        given: The model that the user passed, whose accuracy counts.
        target: The file.
        companions: Suffixes of the files beside it.
        calibration: Images to calibrate with, as the file takes them, or None.
        pictures: Images to compare on, or None.
    """

    model: ViT
    given: ViT
    target: Path
    companions: Sequence[str]
    overwrite: bool
    quantize: str | None
    float_layers: Sequence[str]
    labels: list[str] | None
    activation: str
    images: str
    calibration: np.ndarray | None
    pictures: np.ndarray | None
    accuracy_data: Any
    max_drop: float
    bound: float | None

    def record(self, *packages: str, **facts: Any) -> dict[str, Any]:
        """The metadata of the file, with the versions of these packages."""
        return {
            "format": FORMAT,
            "config": self.model.config.to_dict(),
            "labels": self.labels,
            "activation": self.activation,
            "images": self.images,
            "quantize": self.quantize,
            "versions": package_versions(*packages),
            **facts,
        }

    def new_file(self) -> contextlib.AbstractContextManager[Path]:
        """Yields the path to write to, which becomes `target` when the block ends."""
        return new_file(self.target, self.overwrite, self.companions)

    def compare(self, exported: Any, bound: float, batch_size: int = 1) -> dict[str, Any]:
        """Compares the file, opened in its runtime, with the model.

        Args:
            exported: The runtime.
            bound: The largest difference of a logit if the user named none.
            batch_size: How many images the file takes at a time.

        Returns:
            The fields of a `FileExport`, but for its size.
        """
        bound = bound if self.bound is None else self.bound
        reference = KerasRuntime(float32_model(self.model))
        verification = verify_export(reference, exported, bound, self.pictures)
        accuracy = None
        if self.accuracy_data is not None:
            given = reference
            if self.given is not self.model:
                given = KerasRuntime(float32_model(self.given))
            accuracy = check_drop(given, exported, self.accuracy_data, self.max_drop)
        latency, plain_latency = latencies_of_both(exported, reference.model, batch_size)
        return {
            "path": self.target,
            "quantize": self.quantize,
            "latency": latency,
            "plain_latency": plain_latency,
            "verification": verification,
            "accuracy": accuracy,
        }


def check_task(
    model: ViT,
    path: str | os.PathLike,
    suffix: str,
    *,
    modes: Sequence[str],
    companions: Sequence[str] = (),
    quantize: str | None,
    labels: Sequence[str] | None,
    activation: str | None,
    images: str,
    calibration: Any,
    float_layers: Sequence[str] | None,
    token_merging: int | None,
    accuracy_data: Any,
    max_drop: float,
    bound: float | None,
    verify: Any,
    overwrite: bool,
) -> Task:
    """Checks the arguments before any work is done.

    `suffix` is what `path` must end in, `companions` are the suffixes of the files beside it, and
    `modes` what `quantize` may be beside None. The others are the arguments of `export_onnx`.
    """
    check_model(model)
    given, model = model, merging_model(model, token_merging)
    config = model.config
    target = check_file(path, suffix, overwrite, companions)
    check_choice("quantize", quantize, (None, *modes))
    activation = chosen_function(config, activation)
    check_choice("images", images, IMAGES)
    check_bound(bound)
    names = class_names(config, labels)
    check_accuracy_data(config, accuracy_data, max_drop)
    pictures = None if verify is None else checked_pictures(verify, config, images)
    check_quantizing(quantize, calibration, float_layers)
    if calibration is not None:
        calibration = calibration_images(calibration, config, images)
        pictures = calibration[:CALIBRATED] if pictures is None else pictures
    return Task(
        model=model,
        given=given,
        target=target,
        companions=companions,
        overwrite=overwrite,
        quantize=quantize,
        float_layers=float_layers or (),
        labels=names,
        activation=activation,
        images=images,
        calibration=calibration,
        pictures=pictures,
        accuracy_data=accuracy_data,
        max_drop=max_drop,
        bound=bound,
    )
