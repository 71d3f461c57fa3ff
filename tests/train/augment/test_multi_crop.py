"""Views of an image: sizes, chances, and that all of it depends on the seed alone."""

import colorsys
import io

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

from keras_vit import ViTConfig
from keras_vit.train import Data, multi_crop, multi_crop_batches, open_source
from keras_vit.train.augment import multi_crop as views_of

pytestmark = pytest.mark.backend_free
CONFIG = ViTConfig(image_size=(24, 16), patch_size=4, width=20, num_heads=5, mlp_dim=28, depth=1)


def picture(height=40, width=50, channels=3):
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 9 + c) + np.cos(y / (7 + c)) for c in range(channels)], -1)
    return np.clip(125 + 60 * waves, 0, 255).astype("uint8")


def views(image, config=CONFIG, count=6, **arguments):
    arguments = {"local_size": 12, "local_crops": 3, **arguments}
    numbers = tf.data.Dataset.range(count)
    made = numbers.map(lambda i: multi_crop(image, config, tf.stack([7, i]), **arguments))
    return list(made.as_numpy_iterator())


def crops_alone(monkeypatch, **changes):
    """Leaves only the crop, and what is given."""
    for name in ("JITTER_CHANCE", "GRAY_CHANCE"):
        monkeypatch.setattr(views_of, name, changes.get(name, 0.0))
    monkeypatch.setattr(
        views_of, "GLOBAL_CHANCES", changes.get("GLOBAL_CHANCES", ((0.0, 0.0),) * 2)
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_views_are_a_function_of_the_seed(channels):
    config, image = CONFIG.replace(in_channels=channels), picture(channels=channels)
    first, again = views(image, config), views(image, config)
    for one, other in zip(first, again, strict=True):
        assert one["global"].shape == (2, 24, 16, channels)
        assert one["local"].shape == (3, 12, 12, channels) and one["local"].dtype == np.uint8
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name])
    different = [v for one in first for v in (*one["global"], one["global"][0] + 1)]
    assert len({v.tobytes() for v in different}) == len(different)
    assert len({v.tobytes() for one in first for v in one["local"]}) == 18
    assert {*views(image, config, local_size=None)[0]} == {"global"}


def test_encoded_images_have_the_views_of_their_pixels():
    buffer = io.BytesIO()
    PIL.Image.fromarray(picture()).save(buffer, "PNG")
    for one, other in zip(views(picture()), views(buffer.getvalue()), strict=True):
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name])


def test_areas_are_those_asked_for(monkeypatch):
    # Each pixel says where it is, so a view's least and greatest ones say which part it shows.
    crops_alone(monkeypatch)
    y, x = np.mgrid[:100, :100]
    image = np.stack([y, x, x], -1).astype("uint8")
    for method in ("bicubic", "bilinear"):
        shares = {"global": [], "local": []}
        for made in views(image, count=40, resize_method=method):
            for name, found in shares.items():
                # n samples of a range reach over (n - 1) / n of it.
                height, width = (n / (n - 1) for n in made[name].shape[1:3])
                rows, columns = (np.ptp(made[name][..., c].astype(int), (1, 2)) for c in (0, 1))
                found += list(height * rows * width * columns / 1e4)
        assert 0.3 < min(shares["global"]) < 0.5 and 0.85 < max(shares["global"]) < 1.1
        assert 0.02 < min(shares["local"]) < 0.1 and 0.3 < max(shares["local"]) < 0.5


def test_chances_are_the_authors(monkeypatch):
    # The chances that an operation is called for, counted with operations that leave a mark.
    image = np.full((24, 24, 3), (200, 90, 40), "uint8")
    marks = {"gray": 1, "solarize": 2, "blur": 4}

    def marking(name):
        def operation(image, **_):
            return tf.concat([image[:, :1] * 0 + marks[name], image[:, 1:]], 1)

        return operation

    def counted(name):
        for other in marks:
            module = views_of if other == "blur" else views_of.rand_augment
            kept = marking(other) if other == name else lambda image, **_: image
            monkeypatch.setattr(module, other, kept)
        monkeypatch.setattr(views_of, "JITTER_CHANCE", 0.0)
        made = views(image, count=300, local_crops=1)
        marked = [[(v == marks[name]).any() for v in (*m["global"], *m["local"])] for m in made]
        return np.mean(marked, 0)

    for name, chances in (
        ("gray", (0.2, 0.2, 0.2)),
        ("blur", (1.0, 0.1, 0.5)),
        ("solarize", (0.0, 0.2, 0.0)),
    ):
        np.testing.assert_allclose(counted(name), chances, atol=0.09, err_msg=name)


def test_jitter_multiplies_within_its_range(monkeypatch):
    crops_alone(monkeypatch, JITTER_CHANCE=0.8)
    monkeypatch.setattr(
        views_of, "JITTER", {"brightness": 0.4, "contrast": 0.0, "color": 0.0, "hue": 0.0}
    )
    image = np.full((24, 24, 3), 100, "uint8")
    values = [v[3, 3, 0] for m in views(image, count=100, local_crops=1) for v in m["global"]]
    changed = np.array([v for v in values if v != 100], "float64")
    assert 0.68 < len(changed) / 200 < 0.9
    assert 60 <= changed.min() < 65 and 135 < changed.max() <= 140
    assert abs(changed.mean() - 100) < 5


def test_hue_turns_the_color_circle():
    color = (200, 90, 40)
    for turns in (0.1, -0.07):
        hue, saturation, value = colorsys.rgb_to_hsv(*(c / 255 for c in color))
        expected = 255 * np.array(colorsys.hsv_to_rgb((hue + turns) % 1, saturation, value))
        image = tf.constant(np.full((2, 2, 3), color, "uint8"))
        got = views_of._turn_hue(image, tf.constant(turns)).numpy()[0, 0]
        np.testing.assert_allclose(got, expected, atol=1)
        assert np.abs(got - np.array(color)).max() > 10


def test_batches_resume_at_any_step_and_split_over_processes():
    source, config = open_source(Data("digits")), CONFIG.replace(image_size=8, in_channels=1)
    arguments = dict(config=config, batch_size=6, seed=3, local_size=4, local_crops=2)

    def batches(count, **more):
        made = multi_crop_batches(source, **arguments, **more)
        return list(made.take(count).as_numpy_iterator())

    whole, rest = batches(4), batches(2, start_step=2)
    halves = [batches(2, start_step=2, process=i, processes=2) for i in (0, 1)]
    for number, (images, targets) in enumerate(whole[2:]):
        assert images["global"].shape == (6, 2, 8, 8, 1) and targets.shape == (6, 10)
        assert images["local"].shape == (6, 2, 4, 4, 1) and images["local"].dtype == np.float32
        for name, value in images.items():
            np.testing.assert_array_equal(rest[number][0][name], value)
            parts = [half[number][0][name] for half in halves]
            np.testing.assert_array_equal(np.concatenate(parts), value)
        np.testing.assert_array_equal(rest[number][1], targets)
    assert np.abs(whole[0][0]["global"] - whole[2][0]["global"]).max() > 0
    assert -1.01 < whole[0][0]["global"].min() < -0.5  # in the range of the model


def test_bad_arguments_are_refused():
    image, seed = tf.zeros((8, 8, 3), tf.uint8), tf.constant([0, 0])
    with pytest.raises(ValueError, match="image must be an encoded string or uint8"):
        multi_crop(tf.zeros((8, 8, 3)), CONFIG, seed)
    with pytest.raises(ValueError, match="in_channels must be 1 or 3"):
        multi_crop(image, CONFIG.replace(in_channels=4), seed)
    with pytest.raises(ValueError, match="local_crops must be a positive int"):
        multi_crop(image, CONFIG, seed, local_size=8, local_crops=0)
    with pytest.raises(ValueError, match="global_area must be two shares"):
        multi_crop(image, CONFIG, seed, global_area=(0.5, 0.4))
    source = open_source(Data("digits"))
    with pytest.raises(ValueError, match="batch_size must be from 1 to"):
        multi_crop_batches(source, CONFIG.replace(in_channels=1), 0, 0)
