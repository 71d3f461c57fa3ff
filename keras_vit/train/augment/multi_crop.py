"""The views of one image for self-distillation: large and small crops, each changed on its own.

Everything is stateless TensorFlow, as in `image`: the views of an image are a function of its seed.
"""

import dataclasses
import functools

import tensorflow as tf

from keras_vit import ViTConfig
from keras_vit.train.augment import rand_augment
from keras_vit.train.augment.image import CROP_DRAWS, blur, inception_crop
from keras_vit.train.data.decoding import decode

GLOBAL_VIEWS = 2
JITTER = {"brightness": 0.4, "contrast": 0.4, "color": 0.2, "hue": 0.1}
"""How far factors are from 1, and hues from themselves, in turns of the color circle."""
JITTER_CHANCE, GRAY_CHANCE = 0.8, 0.2
GLOBAL_CHANCES = ((1.0, 0.0), (0.1, 0.2))
"""Of blur and solarization in the two global views."""
LOCAL_CHANCES = (0.5, 0.0)
SIGMA = (0.1, 2.0)
"""Of the blur, in pixels."""
DRAWS = {
    "crop": CROP_DRAWS,
    "flip": 1,
    "jitter": 1,
    "factors": len(JITTER),
    "order": len(JITTER),
    "gray": 1,
    "blur": 2,
    "solarize": 1,
}
"""Random numbers of a view."""


def multi_crop(
    image: tf.Tensor,
    config: ViTConfig,
    seed: tf.Tensor,
    *,
    local_size: int | tuple[int, int] | None = None,
    local_crops: int = 8,
    global_area: tuple[float, float] = (0.4, 1.0),
    local_area: tuple[float, float] = (0.05, 0.4),
    resize_method: str = "bicubic",
) -> dict[str, tf.Tensor]:
    """The views of an image by DINO's recipe; only `normalize_batch` is missing for the model.

    Each view is a random crop, perhaps flipped; with chance .8 brightness, contrast, saturation and
    hue change, in random order; with chance .2 it is gray. The first global view is blurred, the
    second with chance .1, and solarized with chance .2; a local view is blurred with chance .5.

    Args:
        image: An encoded image (a scalar string), or uint8 (H, W, C).
        config: The model's config; `image_size` and `in_channels` are used.
        seed: Two integers; all randomness comes from them.
        local_size: An int or (height, width) of the local views; None means that there are none.
        local_crops: How many there are.
        global_area: The least and the largest share of the image in a global view.
        local_area: The same of a local view.
        resize_method: "bicubic", as the authors have it, or "bilinear", which is faster.

    Returns:
        A dict of uint8 "global" (2, height, width, C) and "local" (local_crops, h, w, C).

    Reference:
        arXiv 2104.14294, Section 3.1; the changes of a view are BYOL's (arXiv 2006.07733).

    Example:

    >>> dataset = dataset.map(lambda image, seed: multi_crop(image, config, seed, local_size=96))
    """
    image = tf.convert_to_tensor(image)
    if image.dtype not in (tf.string, tf.uint8):
        raise ValueError(
            f"image must be an encoded string or uint8. Received: image of dtype {image.dtype}"
        )
    if config.in_channels not in (1, 3):
        raise ValueError(f"in_channels must be 1 or 3. Received: in_channels={config.in_channels}")
    if local_size is not None and (not isinstance(local_crops, int) or local_crops < 1):
        raise ValueError(f"local_crops must be a positive int. Received: local_crops={local_crops}")
    for name, area in (("global_area", global_area), ("local_area", local_area)):
        if not 0 < area[0] <= area[1] <= 1:
            raise ValueError(
                f"{name} must be two shares of an image, the smaller one first. "
                f"Received: {name}={area}"
            )
    image = decode(image, config.in_channels)  # once for all views
    views = GLOBAL_VIEWS + (0 if local_size is None else local_crops)
    draws = tf.random.stateless_uniform([views, sum(DRAWS.values())], seed)
    sized = functools.partial(dataclasses.replace, config, resize_method=resize_method)
    large, small = draws[:GLOBAL_VIEWS], draws[GLOBAL_VIEWS:]
    result = {"global": _views(image, sized(), global_area, large, GLOBAL_CHANCES)}
    if local_size is not None:
        local = sized(image_size=local_size)
        result["local"] = _views(image, local, local_area, small, [LOCAL_CHANCES] * local_crops)
    return result


def _views(image, config, area, draws, chances):
    """A loop, so that the graph has each operation once."""

    def view(given):
        draws, chances = given
        parts = tf.split(draws, list(DRAWS.values()))
        return _view(image, config, area, dict(zip(DRAWS, parts, strict=True)), chances)

    given = (draws, tf.constant(chances))
    views = tf.map_fn(view, given, fn_output_signature=tf.uint8)
    return tf.ensure_shape(views, (len(chances), *config.image_size, config.in_channels))


def _view(image, config, area, draws, chances):
    image = inception_crop(image, config, area, draws["crop"])  # (height, width, C)
    image.set_shape((*config.image_size, config.in_channels))
    flipped = tf.stack([False, draws["flip"][0] < 0.5, False])
    image = tf.raw_ops.Reverse(tensor=image, dims=flipped)
    changes = functools.partial(_jitter, draws=draws["factors"], order=draws["order"])
    image = _perhaps(changes, image, draws["jitter"][0], JITTER_CHANCE)
    image = _perhaps(rand_augment.gray, image, draws["gray"][0], GRAY_CHANCE)
    sigma = SIGMA[0] + (SIGMA[1] - SIGMA[0]) * draws["blur"][1]
    image = _perhaps(functools.partial(blur, sigma=sigma), image, draws["blur"][0], chances[0])
    solarize = functools.partial(rand_augment.solarize, threshold=128)
    return _perhaps(solarize, image, draws["solarize"][0], chances[1])


def _perhaps(change, image, draw, chance):
    return tf.cond(draw < chance, lambda: change(image), lambda: tf.identity(image))


def _jitter(image, draws, order):
    """Changes brightness, contrast, saturation and hue, in random order."""
    amounts = tf.constant(list(JITTER.values())) * (2 * draws - 1)
    changes = [
        lambda image: rand_augment.brightness(image, 1 + amounts[0]),
        lambda image: rand_augment.contrast(image, 1 + amounts[1]),
        lambda image: rand_augment.color(image, 1 + amounts[2]),
        lambda image: _turn_hue(image, amounts[3]),
    ]
    shape = image.shape
    for number in tf.unstack(tf.argsort(order)):
        branches = [functools.partial(change, image) for change in changes]
        image = tf.ensure_shape(tf.switch_case(number, branches), shape)
    return image


def _turn_hue(image, turns):
    """Turns the color circle."""
    # Deviation: PIL rounds hue, saturation and value to 8 bits in between.
    return tf.image.adjust_hue(image, turns) if image.shape[-1] == 3 else tf.identity(image)
