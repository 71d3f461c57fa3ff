"""What all int8 exports have in common: arguments, images to calibrate with, modes of layers.

A layer is a product with a constant kernel: nearly all of a model's bytes and time. Everything
between the layers stays in float32 in every target: the residual stream, LayerNorm, the products of
attention, softmax and GELU. There int8 costs more accuracy than in all layers together.
"""

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.export.folded import Folded, Product, joined
from keras_vit.export.program import Program
from keras_vit.export.verify import checked_pictures
from keras_vit.preprocessing import normalize

MODES = ("dynamic", "int8")
ENDS = ("stem/root_conv", "patches", "head")
"""Layers whose activations are not calibrated: the first read pixels, the last writes logits."""

CALIBRATED = 64  # images of `calibration` on which an int8 export is compared
BLOCK = re.compile(r"^encoder_block_\d+/")

Ranges = Mapping[str, tuple[float, float]]
"""The smallest and the largest value of each activation, by a name that the target chooses."""


def check_quantizing(quantize: str | None, calibration: Any, float_layers: Any) -> None:
    """Raises `ValueError` for arguments that do not belong to the mode `quantize`."""
    if (calibration is None) == (quantize == "int8"):
        rule = "be typical images" if quantize == "int8" else "be None"
        raise ValueError(
            f"calibration must {rule} for quantize={quantize!r}. "
            f"Received: calibration={'None' if calibration is None else '...'}"
        )
    if isinstance(float_layers, str) or (float_layers and not quantize):
        raise ValueError(
            "float_layers must be names of layers, and None without quantize. "
            f"Received: float_layers={float_layers!r}, quantize={quantize!r}"
        )


def calibration_images(images: Any, config: ViTConfig, takes: str) -> np.ndarray:
    """Images to calibrate with, as the file takes them, checked before any work is done.

    Args:
        images: Floats as the model takes them, or uint8 pixels of its size.
        config: The model's.
        takes: "float32" or "uint8", what the file's `images` are.
    """
    array = checked_pictures(images, config, takes, "calibration")
    if takes == "uint8":
        return array
    return normalize(array, config) if array.dtype == np.uint8 else array.astype("float32")


def mode_of(layer: str, mode: str) -> str:
    """How a layer is treated in a mode: those at the ends are "dynamic" in "int8"."""
    at_end = any(f"{layer}/".startswith(f"{end}/") for end in ENDS)
    return "dynamic" if mode == "int8" and at_end else mode


def kept_layers(float_layers: Collection[str], layers: Sequence[str]) -> set[str]:
    """The layers that the user wants in float32: each name stands for all layers inside it."""
    if isinstance(float_layers, str):  # a collection of letters
        raise ValueError(
            f"float_layers must be a list of names. Received: float_layers={float_layers!r}"
        )
    kept = set()
    for name in float_layers:
        inside = {layer for layer in layers if f"{layer}/".startswith(f"{name}/")}
        if not inside:
            raise ValueError(
                f"float_layers must name layers of the file, which are {', '.join(layers)}. "
                f"Received: {name!r}"
            )
        kept |= inside
    return kept


def modes_of(mode: str, layers: Sequence[str], float_layers: Collection[str]) -> dict[str, str]:
    """The mode of each layer to quantize."""
    kept = kept_layers(float_layers, layers)
    return {layer: mode_of(layer, mode) for layer in layers if layer not in kept}


def ways_to_quantize(layers: Sequence[str]) -> Iterator[tuple[str, str, dict[str, str]]]:
    """What a sweep tries: what is quantized, its name, and the modes of the layers."""
    for mode in MODES:
        yield "file", mode, {layer: mode_of(layer, mode) for layer in layers}
    for name in dict.fromkeys(BLOCK.sub("", layer) for layer in layers if BLOCK.match(layer)):
        yield "kind", name, {layer: "int8" for layer in layers if BLOCK.sub("", layer) == name}
    for layer in layers:
        yield "layer", layer, {layer: mode_of(layer, "int8")}


def product_names(folded: Folded) -> tuple[str, ...]:
    """The products of a target that joins query, key and value, in the order in which they run."""
    names: Any = _Names()
    Program(folded, names).output(None)
    return tuple(dict.fromkeys(names.found))


def check_ranges(ranges: Ranges) -> Ranges:
    """Raises `ValueError` if an activation was not finite."""
    for name, ends in ranges.items():
        if not np.isfinite(ends).all():
            raise ValueError(
                "model must give finite activations for the images of calibration. "
                f"Received: NaN or infinite ones in {name!r}"
            )
    return ranges


def int8_kernel(kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A kernel (inputs, outputs) as int8 and a scale (outputs,): the product of both is near it."""
    scale = np.abs(kernel).max(0) / 127
    scale = np.where(scale > np.finfo("float32").tiny, scale, 1).astype("float32")
    return np.clip(np.round(kernel / scale), -127, 127).astype("int8"), scale


class _Names:
    """Operators that compute nothing and note the names of products."""

    def __init__(self):
        self.found: list[str] = []

    def scope(self, name: str) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def product(self, x: Any, p: Product) -> None:
        self.found.append(p.name)

    def heads(self, x: Any, products: Sequence[Product], *_: Any) -> list[None]:
        self.found.append(joined(products).name)
        return [None] * len(products)

    def merge(self, *_: Any) -> tuple[None, None]:
        return None, None

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None
