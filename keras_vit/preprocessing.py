"""From pictures to what a model was trained on, as its config's pixel contract says.

Two ways to the same pixels: `preprocess` on NumPy arrays and PIL images, and `layer`, a Keras layer
for models and for tf.data on any backend. Both resize (with antialiasing), cut out the centre and
compute `(pixel / 255 - mean) / std`.
"""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_vit.config import ViTConfig

if TYPE_CHECKING:
    from PIL import Image

MODES = {1: "L", 3: "RGB"}
KERAS_METHODS = {"lanczos": "lanczos3"}  # PIL's kernel by Keras' name; torch has none


def preprocess(images: Any, config: ViTConfig, *, rescale: bool = True) -> np.ndarray:
    """Turns pictures into a batch for a model.

    Args:
        images: One picture or a sequence of them, of any size: PIL images, or arrays `(H, W)`,
            `(H, W, C)` or `(B, H, W, C)` with pixels from 0 to 255, integers or floats.
        config: The model's config; `image_size`, `in_channels` and the pixel contract count.
        rescale: False for floats that are normalised already, which are then only resized and cut.

    Returns:
        float32 array `(B, height, width, in_channels)`.

    Example:

    >>> images = keras_vit.preprocessing.preprocess(PIL.Image.open("cat.jpg"), model.config)
    >>> model.predict(images)
    """
    arrays = [_pixels(image, config) for image in _as_list(images)]
    _check_range(arrays, config, rescale)
    batch = np.stack([_resize(array, config) for array in arrays])
    if not rescale:
        return batch
    mean = np.asarray(config.pixel_mean, "float32")
    std = np.asarray(config.pixel_std, "float32")
    return (batch / np.float32(255) - mean) / std


def layer(config: ViTConfig, *, dtype: Any = None, name: str = "preprocessing") -> keras.layers.Layer:
    """The same as a Keras layer, for the head of a model or for `tf.data` on any backend.

    It takes `(B, H, W, C)` or `(H, W, C)` pixels from 0 to 255. Resizing runs on the backend, which
    does not round to whole pixel values as PIL does: the two ways differ by about one pixel value.

    Args:
        config: The model's config.
        dtype: dtype policy of the layer.
        name: Name of the layer.

    Returns:
        A `keras.layers.Pipeline`.

    Example:

    >>> dataset = dataset.map(lambda x, y: (keras_vit.preprocessing.layer(config)(x), y))
    """
    height, width = config.image_size
    covered = _covered(config)
    steps: list[keras.layers.Layer] = [
        keras.layers.Resizing(
            *covered,
            interpolation=KERAS_METHODS.get(config.resize_method, config.resize_method),
            crop_to_aspect_ratio=config.crop_fraction is not None,
            antialias=config.resize_method != "nearest",
            data_format="channels_last",
            dtype=dtype,
        )
    ]
    if covered != config.image_size:
        steps.append(
            keras.layers.CenterCrop(height, width, data_format="channels_last", dtype=dtype)
        )
    mean, std = (np.asarray(v, "float64") for v in (config.pixel_mean, config.pixel_std))
    scale, offset = 1 / (255 * std), -mean / std
    steps.append(keras.layers.Rescaling(scale.tolist(), offset.tolist(), dtype=dtype))
    return keras.layers.Pipeline(steps, name=name)


def _covered(config: ViTConfig) -> tuple[int, int]:
    """The size a picture is resized to before the centre is cut out."""
    r = config.crop_fraction or 1.0
    height, width = (int(size / r) for size in config.image_size)
    return height, width


def _as_list(images: Any) -> list:
    if isinstance(images, np.ndarray):
        if images.ndim not in (2, 3, 4):
            raise ValueError(
                "images must be (H, W), (H, W, C) or (B, H, W, C). "
                f"Received: an array of shape {images.shape}"
            )
        return list(images) if images.ndim == 4 else [images]
    items = list(images) if isinstance(images, Sequence) else [images]
    if not items:
        raise ValueError(f"images must hold at least one picture. Received: images={images!r}")
    return items


def _pixels(image: Any, config: ViTConfig) -> np.ndarray:
    """One picture as an array (H, W, C) with the channels of the model."""
    channels = config.in_channels
    if hasattr(image, "convert") and hasattr(image, "getbands"):  # a PIL image
        if channels not in MODES:
            raise ValueError(
                f"images must be arrays for in_channels={channels}; a PIL image has 1 or 3. "
                f"Received: a PIL image of mode {image.mode!r}"
            )
        array = np.asarray(image.convert(MODES[channels]))
    else:
        array = np.asarray(image)
    if array.dtype.kind not in "uif":
        raise ValueError(
            f"images must hold numbers or be PIL images. Received: dtype {array.dtype}"
        )
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or 0 in array.shape:
        raise ValueError(f"images must be (H, W, C). Received: a picture of shape {array.shape}")
    if array.shape[-1] == 1 and channels == 3:
        array = np.repeat(array, 3, axis=-1)
    if array.shape[-1] != channels:
        raise ValueError(
            f"images must have in_channels={channels} on the last axis. "
            f"Received: a picture of shape {array.shape}"
        )
    return array


def _check_range(arrays: list[np.ndarray], config: ViTConfig, rescale: bool) -> None:
    low = min(float(a.min()) for a in arrays)
    high = max(float(a.max()) for a in arrays)
    if rescale:
        if low < 0 or high > 255:
            raise ValueError(
                "images must have pixels from 0 to 255, or be passed with rescale=False. "
                f"Received: values in [{low:.3g}, {high:.3g}]"
            )
        if 0 < high <= 1 and all(a.dtype.kind == "f" for a in arrays):
            warnings.warn(
                f"These images look scaled already (values in [{low:.3g}, {high:.3g}]), and will "
                "be divided by 255 once more. Pass pixels from 0 to 255, or rescale=False.",
                stacklevel=3,
            )
        return
    top = float(np.max((1 - np.asarray(config.pixel_mean)) / np.asarray(config.pixel_std)))
    bottom = float(np.min((0 - np.asarray(config.pixel_mean)) / np.asarray(config.pixel_std)))
    if high > 2 * top + 1:
        warnings.warn(
            f"These images look like pixels from 0 to 255 (values in [{low:.3g}, {high:.3g}]), but "
            f"the model was made for values in [{bottom:.3g}, {top:.3g}]. Leave rescale=True.",
            stacklevel=3,
        )


def _resize(array: np.ndarray, config: ViTConfig) -> np.ndarray:
    """(H, W, C) to (height, width, C) in float32, with PIL's resampling."""
    height, width = config.image_size
    h, w = array.shape[:2]
    if config.crop_fraction is None:
        return _pil_resize(array, height, width, config.resize_method)
    # The picture covers the target in its own proportions; what stands over is cut off evenly.
    target_h, target_w = _covered(config)
    scale = max(target_h / h, target_w / w)
    array = _pil_resize(
        array, max(int(h * scale), target_h), max(int(w * scale), target_w), config.resize_method
    )
    top = round((array.shape[0] - height) / 2)
    left = round((array.shape[1] - width) / 2)
    return array[top : top + height, left : left + width]


def _pil_resize(array: np.ndarray, height: int, width: int, method: str) -> np.ndarray:
    from PIL import Image

    if array.shape[:2] == (height, width):
        return array.astype("float32")
    resample = Image.Resampling[method.upper()]
    if array.dtype == np.uint8 and array.shape[-1] in MODES:
        image: Image.Image = Image.fromarray(array if array.shape[-1] == 3 else array[..., 0])
        resized = np.asarray(image.resize((width, height), resample), "float32")
        return resized.reshape(height, width, -1)
    planes = [
        np.asarray(Image.fromarray(plane).resize((width, height), resample))
        for plane in np.moveaxis(array.astype("float32"), -1, 0)
    ]
    return np.stack(planes, axis=-1)
