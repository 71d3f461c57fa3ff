"""Verifies an export: runs it and its model on the same images, and compares the outputs."""

import dataclasses
import io
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.model import ViT
from keras_vit.model_weights import float32_copy, with_token_merging
from keras_vit.preprocessing import check_normalized, most_pixels, normalize, preprocess
from keras_vit.runtime.base import Runtime
from keras_vit.runtime.saved_model import SavedModelRuntime

BOUNDS = {"float32": 1e-5, "bfloat16": 0.05}
"""The largest difference from the model, as a share of the logits' range."""

FILES_BOUND = 0.01
"""Added for image files, because some pixels round differently than in `preprocess`."""

LEAST_LOGARITHM = -80.0
"""Smaller probabilities vanish in float32."""

BATCHES = (1, 3, 7, 5)
SIZES = ((37, 61), (500, 375), (120, 90), (64, 64))  # of the files, if `max_pixels` allows them


@dataclasses.dataclass(frozen=True)
class Verification:
    """How much an export differs from its model."""

    images: int
    """How many images both were run on."""
    logits_range: float
    """Largest minus smallest logit of the model, or the largest magnitude if that is more."""
    difference: float
    """The largest difference of a logit (without a head, of a feature)."""
    bound: float
    """What the difference had to stay below, as a share of `logits_range`."""
    features_difference: float | None
    """The largest difference of a feature, as a share of their range; None where there are none."""
    same_top_class: float | None
    """Share of the images with the same top class; None without a head."""
    where: str
    """The runtime and the machine."""
    files_difference: float | None = None
    """The same for image files that the export decodes itself, as a share of `logits_range`."""


def float32_model(model: ViT) -> ViT:
    """The model itself if it computes in float32, else a copy that does."""
    return model if model.compute_dtype == "float32" else float32_copy(model)


def merging_model(model: ViT, token_merging: int | None) -> ViT:
    """The model that merges as many tokens: itself where that is None."""
    return model if token_merging is None else with_token_merging(model, token_merging)


def generated_images(config: ViTConfig, count: int = sum(BATCHES)) -> np.ndarray:
    """Soft color gradients with noise: uint8 (count, H, W, C), the same at every call."""
    return np.stack([_picture(seed, config.input_shape) for seed in range(count)])


def checked_pictures(
    images: Any, config: ViTConfig, takes: str, name: str = "verify"
) -> np.ndarray:
    """Images that a user passed to an export as an array, checked before any work is done.

    Args:
        images: The argument.
        config: The model's.
        takes: "float32" or "uint8", what the export's `images` are.
        name: The name of the argument.
    """
    array = np.asarray(images)
    allowed = "uint8 pixels" if takes == "uint8" else "floats as the model takes them or uint8"
    known = array.dtype == np.uint8 or (takes != "uint8" and array.dtype.kind == "f")
    if not known or array.shape[1:] != config.input_shape or array.ndim != 4 or not len(array):
        raise ValueError(
            f"{name} must be at least one image (batch, {', '.join(map(str, config.input_shape))}) "
            f"of {allowed}, for images={takes!r}. Received: shape {array.shape}, {array.dtype}"
        )
    if array.dtype != np.uint8:
        check_normalized(array, config, name)
    return array


def verify_export(
    reference: Runtime, export: Runtime, bound: float, images: Any = None
) -> Verification:
    """Compares an export with its model; raises `ValueError` if they differ by too much.

    Args:
        reference: The model, in float32.
        export: The export, opened from the file or folder that was written.
        bound: The largest difference of a logit, as a share of their range.
        images: Images to run them on, from `checked_pictures`; generated images by default.
    """
    config = export.config
    images = generated_images(config) if images is None else images
    outputs = [name for name in export.outputs if name == "features" or config.num_classes]
    results = {}
    for name in outputs:
        wanted = getattr(reference, name)(images)
        if not np.isfinite(wanted).all():  # otherwise the export would blame the images
            place = tuple(int(i) for i in np.argwhere(~np.isfinite(wanted))[0])
            raise ValueError(
                f"model must give finite {name}. Received: {wanted[place]} at image {place[0]}, "
                f"index {', '.join(map(str, place[1:]))}"
            )
        found = np.concatenate([getattr(export, name)(part) for part in _batches(images)])
        scale = allowed = max(float(np.ptp(wanted)), float(np.abs(wanted).max()))
        if name == "logits" and export.log_probabilities:
            logarithms = _log_probabilities(wanted, export.activation)
            wanted, found = (np.maximum(x, LEAST_LOGARITHM) for x in (logarithms, found))
            allowed = max(scale, 1.0)  # probabilities are rounded even if all logits are 0
        difference = compare(name, wanted, found, bound, allowed)
        results[name] = (wanted, found, difference, scale)
    wanted, found, difference, scale = results[outputs[0]]
    same = None
    if outputs[0] == "logits":
        same = float((wanted.argmax(-1) == found.argmax(-1)).mean())
    features_difference = None
    if "features" in results:
        features_difference = results["features"][2] / (results["features"][3] or 1)
    return Verification(
        images=len(images),
        logits_range=scale,
        difference=difference,
        bound=bound,
        features_difference=features_difference,
        same_top_class=same,
        where=export.where,
    )


def verify_files(export: SavedModelRuntime, bound: float) -> float:
    """Compares image files through `serve_bytes` with the same through `preprocess`.

    Returns:
        The largest difference of a logit, or without a head of a feature, as a share of the range.
    """
    from PIL import Image

    config, most = export.config, export.manifest["pixels"]["max_pixels"]
    output = "logits" if config.num_classes else "features"
    # An image of the model's own size is always allowed.
    sizes = [
        size for size in (*SIZES, config.input_shape[:2]) if most_pixels(*size, config) <= most
    ]
    files, pictures = [], []
    for seed, (height, width) in enumerate(sizes):
        image = Image.fromarray(_picture(seed, (height, width, 3)))
        file = io.BytesIO()
        image.save(file, "PNG" if seed % 2 else "JPEG", quality=90)
        files.append(file.getvalue())
        pictures.append(Image.open(file))
    images = preprocess(pictures, config)
    if export.images == "uint8":
        pixels = config.replace(pixel_mean=0.0, pixel_std=1 / 255)
        images = preprocess(pictures, pixels).round().astype("uint8")
    found = export.run("serve_bytes", bytes=files)[output]
    wanted = getattr(export, output)(images)
    scale = max(float(np.ptp(wanted)), float(np.abs(wanted).max()))
    difference = compare(f"{output} of files", wanted, found, bound + FILES_BOUND, scale)
    return difference / (scale or 1)


def latencies(functions: Sequence[Callable[[], Any]], seconds: float = 1.0) -> list[float]:
    """The shortest time of each function in milliseconds, run in turns for about `seconds`."""
    for function in functions:
        function()
    best = [float("inf")] * len(functions)
    end = time.perf_counter() + seconds
    for turn in range(50):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            best[i] = min(best[i], 1000 * (time.perf_counter() - start))
        if turn >= 2 and time.perf_counter() > end:
            break
    return best


def latencies_of_both(export: Any, model: ViT, batch_size: int = 1) -> list[float]:
    """Milliseconds for one image: of an exported file, and of the Keras model on its backend."""
    pixels = generated_images(model.config, batch_size)
    floats = normalize(pixels, model.config)
    images = pixels if export.images == "uint8" else floats
    plain: Any = model.predict_on_batch
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        # On a processor, faster than what `predict` compiles.
        plain = tf.function(lambda x: model(x, training=False), autograph=False)
        floats = tf.constant(floats)
    found = latencies([lambda: export.run(images), lambda: plain(floats)])
    return [milliseconds / batch_size for milliseconds in found]


def compare(name: str, wanted: np.ndarray, found: np.ndarray, bound: float, scale: float) -> float:
    """The largest difference; raises `ValueError` with its place if it is out of bounds."""
    if wanted.shape != found.shape:
        raise ValueError(
            f"The export's {name} must have the model's shape {wanted.shape}. "
            f"Received: {found.shape}"
        )
    differences = np.abs(wanted.astype("float64") - found)
    differences[~np.isfinite(differences)] = np.inf
    place = np.unravel_index(differences.argmax(), differences.shape)
    difference = float(differences[place])
    if not np.isfinite(scale) or difference > bound * scale:
        raise ValueError(
            f"The export's {name} must be the model's within {bound:g} of their range, which is "
            f"{scale:.4g}. Received: a difference of {difference:.4g} at image {place[0]}, "
            f"index {', '.join(str(i) for i in place[1:])}, where the model says "
            f"{wanted[place]:.6g} and the export {found[place]:.6g}"
        )
    return difference


def _log_probabilities(logits: np.ndarray, activation: str) -> np.ndarray:
    logits = logits.astype("float64")
    if activation == "sigmoid":
        return -np.logaddexp(0, -logits)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def _picture(seed: int, shape: tuple[int, int, int]) -> np.ndarray:
    height, width, channels = shape
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (4, 4, channels)).astype("float64")
    rows, columns = (np.linspace(0, 3, n) for n in (height, width))
    soft = _between(_between(coarse, rows).swapaxes(0, 1), columns).swapaxes(0, 1)
    noise = rng.normal(0, 8, shape)
    return np.clip(soft + noise, 0, 255).round().astype("uint8")


def _between(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Values at fractional row numbers, by linear interpolation."""
    low = np.minimum(places.astype(int), len(values) - 2)
    share = (places - low)[:, None, None]
    return (1 - share) * values[low] + share * values[low + 1]


def _batches(images: np.ndarray) -> list[np.ndarray]:
    """The images in batches of different sizes."""
    sizes = [*BATCHES, *[32] * (len(images) // 32 + 1)]
    parts = np.split(images, np.cumsum(sizes))
    return [part for part in parts if len(part)]
