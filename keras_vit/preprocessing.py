"""From images of any size to a model's input, as its config says.

`preprocess` takes NumPy arrays and PIL images; `Preprocessing` is a Keras layer, for models and for
tf.data on any backend. Both resize with antialiasing, crop the center and compute
`(pixel / 255 - mean) / std`. `check_normalized` checks such input.
"""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_vit.config import ViTConfig

__all__ = ["Preprocessing", "check_normalized", "normalize", "preprocess"]

MODES = {1: "L", 3: "RGB"}
MAX_PIXELS = 1 << 25
"""Most pixels of one image while it is resized: enough for a 24-megapixel camera."""
NOISE = 6.0
"""Bound of standard normal noise; one value in a billion exceeds it."""
FAR = 10.0
"""Nonnegative values that exceed the model's largest by this factor are not normalized."""
MAKE = "Make them with keras_vit.preprocessing.preprocess(images, model.config)"
MAKE_OR_UINT8 = f"{MAKE}, or pass uint8 pixels of the model's size."
KERAS_METHODS = {"lanczos": "lanczos3"}  # Keras' name for PIL's kernel; torch has none


def preprocess(images: Any, config: ViTConfig, *, rescale: bool = True) -> np.ndarray:
    """Converts images to a batch for a model.

    Args:
        images: One image or a sequence of them, of any size: PIL images, or arrays `(H, W)`,
            `(H, W, C)` or `(B, H, W, C)` with pixels from 0 to 255, integers or floats. The EXIF
            orientation of a PIL image is applied.
        config: The model's config.
        rescale: Whether to normalize. Pass False for normalized floats, which are then only resized
            and cropped.

    Returns:
        float32 array `(B, height, width, in_channels)`.

    Example:

    >>> images = keras_vit.preprocessing.preprocess(PIL.Image.open("cat.jpg"), model.config)
    >>> model.predict(images)
    """
    if not isinstance(config, ViTConfig):
        raise ValueError(f"config must be a ViTConfig. Received: config={config!r}")
    arrays = [_pixels(image, config) for image in _as_list(images)]
    _check_range(arrays, config, rescale)
    batch = np.stack([_resize(array, config) for array in arrays])
    return normalize(batch, config) if rescale else batch


def resized_pixels(image: Any, config: ViTConfig) -> np.ndarray:
    """A PIL image as uint8 pixels `(height, width, in_channels)`, resized and cropped.

    They are the pixels that `preprocess` normalizes.

    Args:
        image: A PIL image without an EXIF orientation, as `keras_vit.images.read_image` returns.
        config: The model's config.
    """
    return _resize(_pil_pixels(image, config), config).astype("uint8")


def oriented(image: Any) -> Any:
    """A PIL image, turned as its EXIF orientation says; the result states none.

    An EXIF block that cannot be read states none, as in browsers.
    """
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # Pillow raises anything on a damaged block
        return image


def normalize(pixels: np.ndarray, config: ViTConfig) -> np.ndarray:
    """Normalizes pixels from 0 to 255, of the model's size, to float32."""
    mean, std = (np.asarray(v, "float32") for v in (config.pixel_mean, config.pixel_std))
    return (pixels.astype("float32", copy=False) / np.float32(255) - mean) / std


def check_normalized(
    images: np.ndarray | Sequence[np.ndarray],
    config: ViTConfig,
    name: str = "images",
    *,
    advice: str = MAKE_OR_UINT8,
) -> None:
    """Checks that values look normalized for a model. The whole package applies this rule.

    A model expects values from `(0 - mean) / std` to `(1 - mean) / std`, with the config's
    `pixel_mean` and `pixel_std`. Augmented pixels and standard normal noise pass as well. Only the
    minimum and the maximum are computed. Floats from 0 to 1 pass for a model that expects -1 to 1,
    because they may be bright images.

    Args:
        images: An array of any shape, or several. An empty one passes.
        config: The model's config.
        name: Name of the argument, for messages.
        advice: What to do, for messages.

    Raises:
        ValueError: A value is not finite; or none is negative and the largest is more than ten
            times the largest normalized value, as for floats from 0 to 255.

    Warns:
        UserWarning: Values are so far out of range that they seem not to be normalized, or to be
            normalized for another model.

    Example:

    >>> check_normalized(batch, model.config)
    """
    arrays = [images] if isinstance(images, np.ndarray) else images
    low, high = _range([array for array in arrays if array.size], name)
    mean, std = np.asarray(config.pixel_mean), np.asarray(config.pixel_std)
    bottom, top = float(np.min((0 - mean) / std)), float(np.max((1 - mean) / std))
    within = min(2 * bottom - top, -NOISE) <= low and high <= max(2 * top + 1, NOISE)
    scaled_only = low >= 0 and 0 < high <= 1 and top > FAR  # by 255, for a model of 0 to 255
    if within and not scaled_only:
        return
    rule = f"hold pixels normalized for the model, in [{bottom:.3g}, {top:.3g}]"
    received = f"values in [{low:.3g}, {high:.3g}]"
    if low >= 0 and high > FAR * max(top, -bottom, 1.0):
        raise ValueError(
            f"{name} must {rule}. Received: {received}, which are not normalized. {advice} (A "
            "model that was trained on pixels from 0 to 255 needs pixel_mean=0.0 and "
            "pixel_std=1/255 in its config.)"
        )
    warnings.warn(
        f"{name} should {rule}. Received: {received}, which seem not to be normalized for the "
        f"model. {advice}",
        stacklevel=_outside(),
    )


def check_pixels(
    images: Sequence[np.ndarray],
    name: str = "images",
    *,
    remedy: str = "because they are normalized here",
    also: str = "",
) -> None:
    """Checks that values look like pixels from 0 to 255, which are to be normalized.

    Args:
        images: Arrays of any shape. Empty ones pass.
        name: Name of the argument, for messages.
        remedy: What else the caller may do, for the error.
        also: The same for the warning.

    Raises:
        ValueError: A value is not finite, negative or above 255, as in normalized images.

    Warns:
        UserWarning: All values are floats from 0 to 1.
    """
    low, high = _range([array for array in images if array.size], name)
    if low < 0 or high > 255:
        raise ValueError(
            f"{name} must have pixels from 0 to 255, {remedy}. "
            f"Received: values in [{low:.3g}, {high:.3g}]"
        )
    if 0 < high <= 1 and all(a.dtype.kind == "f" for a in images):
        warnings.warn(
            f"{name} seem to be scaled already (values in [{low:.3g}, {high:.3g}]), and are "
            f"divided by 255 again. Pass pixels from 0 to 255{f', {also}' if also else ''}.",
            stacklevel=_outside(),
        )


def model_input(images: np.ndarray, config: ViTConfig, name: str = "images") -> np.ndarray:
    """Normalizes uint8 images of the model's size; checks floats and returns them as float32."""
    if images.dtype == np.uint8:
        return normalize(images, config)
    check_normalized(images, config, name)
    return images.astype("float32", copy=False)


@keras.saving.register_keras_serializable("keras_vit")
class Preprocessing(keras.layers.Rescaling):
    """`preprocess` as a Keras layer, for use before a model or in `tf.data` on any backend.

    Results differ from `preprocess` in single pixel values, because PIL rounds and clips after each
    axis and this layer only at the end: by 1, and by tens at hard edges that bicubic or lanczos
    enlarges. With nearest, a point between two pixels may take the other one.

    Args:
        config: The model's `ViTConfig`, or its fields as a dict.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        images: Pixels from 0 to 255, `(B, H, W, C)` or `(H, W, C)`, of any size.

    Returns:
        `(B, height, width, C)` or `(height, width, C)`.

    Example:

    >>> layer = keras_vit.preprocessing.Preprocessing(model.config)
    >>> dataset = dataset.map(lambda image, label: (layer(image), label)).batch(64)
    """

    def __init__(self, config, **kwargs):
        if not isinstance(config, ViTConfig | Mapping):
            raise ValueError(
                f"config must be a ViTConfig or a dict of its fields. Received: config={config!r}"
            )
        self.config = config if isinstance(config, ViTConfig) else ViTConfig.from_dict(config)
        mean, std = (
            np.broadcast_to(np.asarray(v, "float64"), self.config.in_channels)
            for v in (self.config.pixel_mean, self.config.pixel_std)
        )
        super().__init__((1 / (255 * std)).tolist(), (-mean / std).tolist(), **kwargs)

    def call(self, images):
        backend = self.backend  # TensorFlow inside tf.data, whatever Keras runs on
        height, width = backend.shape(images)[-3:-1]
        size = covering(height, width, self.config, where=backend.numpy.where)
        images = backend.cast(images, self.compute_dtype)
        if not (isinstance(height, int) and size == (height, width)):
            method = self.config.resize_method
            images = backend.image.resize(
                images,
                size,
                interpolation=KERAS_METHODS.get(method, method),
                antialias=method != "nearest",
                data_format="channels_last",
            )
        (target_h, target_w), (top, left) = self.config.image_size, corner(size, self.config)
        images = images[..., top : top + target_h, left : left + target_w, :]
        # As PIL does, whose results are uint8.
        images = backend.numpy.clip(backend.numpy.round(images), 0, 255)
        images = backend.numpy.reshape(
            images, (*(-1,) * (len(images.shape) - 3), target_h, target_w, images.shape[-1])
        )
        # Not Rescaling's own: it expects channels where Keras' image_data_format says.
        scale, offset = (backend.cast(v, self.compute_dtype) for v in (self.scale, self.offset))
        return images * scale + offset

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-3], *self.config.image_size, input_shape[-1])

    def get_config(self):
        base = super().get_config()
        del base["scale"], base["offset"]
        return {**base, "config": self.config.to_dict()}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


def uncropped(config: ViTConfig) -> tuple[int, int]:
    """The size that a resized image covers before its center is cropped, rounded down as by timm.

    A `crop_fraction` that was computed as 192 / 225 gives 225 again, and not 224.99999999999997.
    """
    if config.crop_fraction is None:
        return config.image_size
    height, width = (int(size / config.crop_fraction + 1e-9) for size in config.image_size)
    return height, width


def covering(height, width, config: ViTConfig, where: Any = None) -> tuple:
    """The size an image is resized to before its center is cropped; ints, or scalar tensors."""
    if config.crop_fraction is None:
        return config.image_size
    target_h, target_w = uncropped(config)
    covered_h, covered_w = target_w * height // width, target_h * width // height
    if isinstance(height, int) and isinstance(width, int):
        return (target_h, covered_w) if covered_w >= target_w else (covered_h, target_w)
    wide = covered_w >= target_w
    return where(wide, target_h, covered_h), where(wide, covered_w, target_w)


def most_pixels(height: int, width: int, config: ViTConfig) -> int:
    """The most pixels that an image has before, during and after resizing."""
    covered = covering(height, width, config)
    return max(height, covered[0]) * max(width, covered[1])


def corner(size, config: ViTConfig):
    """Top and left of the center crop, with halves rounded to even as in torchvision."""
    spare = [covered - wanted for covered, wanted in zip(size, config.image_size, strict=True)]
    return [n // 2 + (n % 2) * (n // 2 % 2) for n in spare]


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
        raise ValueError(f"images must hold at least one image. Received: images={images!r}")
    return items


def _pixels(image: Any, config: ViTConfig) -> np.ndarray:
    """One image as an array (H, W, C) with the model's channels."""
    channels = config.in_channels
    if hasattr(image, "convert") and hasattr(image, "getbands"):  # a PIL image
        return _pil_pixels(oriented(image), config)
    array = np.asarray(image)
    if array.dtype.kind not in "uif":
        raise ValueError(
            f"images must hold numbers or be PIL images. Received: dtype {array.dtype}"
        )
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or 0 in array.shape:
        raise ValueError(f"images must be (H, W, C). Received: an image of shape {array.shape}")
    if array.shape[-1] == 1 and channels == 3:
        array = np.repeat(array, 3, axis=-1)
    if array.shape[-1] != channels:
        raise ValueError(
            f"images must have in_channels={channels} on the last axis. "
            f"Received: an image of shape {array.shape}"
        )
    return array


def _pil_pixels(image: Any, config: ViTConfig) -> np.ndarray:
    """A PIL image as uint8 pixels (H, W, C) with the model's channels."""
    channels = config.in_channels
    if channels not in MODES:
        raise ValueError(
            f"images must be arrays for in_channels={channels}; a PIL image has 1 or 3. "
            f"Received: a PIL image of mode {image.mode!r}"
        )
    if image.mode in ("I", "F"):  # the value of white is unknown; PIL would clip to 0 to 255
        raise ValueError(
            "images must hold pixels of 8 or 16 bits: convert them, or pass arrays from 0 to 255. "
            f"Received: a PIL image of mode {image.mode!r}"
        )
    if image.mode.startswith("I;16"):  # PIL would clip values above 255
        array = (np.asarray(image) >> 8).astype("uint8")
        return np.repeat(array[..., None], channels, axis=-1)
    array = np.asarray(image.convert(MODES[channels]))
    return array[..., None] if array.ndim == 2 else array


def _check_range(arrays: list[np.ndarray], config: ViTConfig, rescale: bool) -> None:
    if not rescale:
        check_normalized(arrays, config, advice="Leave rescale=True.")
        return
    check_pixels(arrays, remedy="or be passed with rescale=False", also="or rescale=False")


def _range(arrays: Sequence[np.ndarray], name: str) -> tuple[float, float]:
    """The smallest and the largest value; zeros if there are no arrays."""
    low = min((float(array.min()) for array in arrays), default=0.0)
    high = max((float(array.max()) for array in arrays), default=0.0)
    if not np.isfinite([low, high]).all():
        raise ValueError(f"{name} must hold finite numbers. Received: NaN or infinite ones")
    return low, high


def _outside() -> int:
    """The `stacklevel` of the line outside this package, as seen by this function's caller.

    Warnings then name that line, and appear once if several functions check the same images.
    """
    level, frame = 0, inspect.currentframe()
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] == "keras_vit":
        level, frame = level + 1, frame.f_back
    return level


def _resize(array: np.ndarray, config: ViTConfig) -> np.ndarray:
    """(H, W, C) to (height, width, C) in float32, with PIL's resampling."""
    height, width = array.shape[:2]
    size = covering(height, width, config)
    most = most_pixels(height, width, config)
    # A large image is in memory already. A narrow one gets huge when its short side is enlarged.
    if most > max(MAX_PIXELS, height * width):
        raise ValueError(
            f"images must have at most {MAX_PIXELS} pixels while they are resized. Received: an "
            f"image of {height} x {width} pixels, which becomes {size[0]} x {size[1]}: {most}"
        )
    array = _pil_resize(array, size[0], size[1], config.resize_method)
    (height, width), (top, left) = config.image_size, corner(size, config)
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
