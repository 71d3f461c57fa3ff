"""The gallery of a run's first training images."""

import dataclasses

import numpy as np
import pytest
from PIL import Image

from keras_vit import train
from keras_vit.train import gallery, run_batches

pytestmark = pytest.mark.backend_free


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn, and the images in them."""
    figures = []
    draw = gallery._gallery

    def watched(images, titles):
        figures.append((images, titles, draw(images, titles)))
        return figures[-1][2]

    monkeypatch.setattr(gallery, "_gallery", watched)
    return figures


def test_gallery_has_the_images_of_the_first_step(drawn, tmp_path):
    recipe = train.load_recipe("digits")
    path = train.preview(recipe, tmp_path / "digits.png", images=7)
    assert path == tmp_path / "digits.png" and Image.open(path).width > 500
    [(images, titles, figure)] = drawn
    source = train.open_source(recipe.data)
    config = train.build_model(recipe, source).config
    inputs, targets = run_batches.first_batch(recipe, source, config)
    pixels = 255 * (inputs[:7] * config.pixel_std + config.pixel_mean)
    np.testing.assert_allclose(images, np.round(pixels).repeat(3, -1), atol=0.6)
    assert [axis.get_title() for axis in figure.axes][:7] == titles
    assert titles == [str(k) for k in targets[:7].argmax(1)]
    shown = figure.axes[3].images[0].get_array()
    np.testing.assert_array_equal(shown, images[3].astype("uint8"))


def test_mixed_images_have_the_shares_of_their_classes(drawn, tmp_path):
    train.preview("digits", tmp_path / "a.png", overrides=["augment.mixup=1.0"])
    [(_, titles, _)] = drawn
    assert len(titles) == 24 and any("%), " in title for title in titles)


def test_views_are_pictures_of_their_own(drawn, tmp_path):
    options = {"local_size": 4, "local_crops": 3, "num_prototypes": 16}
    settings = [f"objective.options.{name}={value}" for name, value in options.items()]
    settings = ["objective.name=dino", *settings, "model.config.patch_size=4"]
    recipe = train.load_recipe("digits")
    recipe = dataclasses.replace(recipe, augment=train.Augment())
    train.preview(recipe, tmp_path / "a.png", overrides=settings, images=10)
    [(images, titles, _)] = drawn
    assert images.shape == (10, 8, 8, 3)
    kinds = [title.split("(")[-1].rstrip(")") for title in titles]
    assert kinds == (["global"] * 2 + ["local"] * 3) * 2


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("a.bmp", {}, "path must end in .png"),
        ("a.png", {"images": 0}, "images must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(name, options, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        train.preview("digits", tmp_path / name, **options)
    assert not list(tmp_path.iterdir())
