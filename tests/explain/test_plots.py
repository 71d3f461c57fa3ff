"""Figures show the arrays, and maps lie on the right part of the image, read from the figure."""

import functools
import warnings

import keras
import numpy as np
import pytest
from conformance import TINY, run, tiny_model
from PIL import Image

from keras_vit import explain
from keras_vit.config import ViTConfig
from keras_vit.explain import panels, plots
from keras_vit.preprocessing import preprocess

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"

HEIGHT, WIDTH = 40, 60


@functools.cache
def model_of(kind="registers", **changes):
    return tiny_model(kind, **changes)


@functools.cache
def pixels(height=HEIGHT, width=WIDTH, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype="uint8")


def drawn(figure):
    """The maps on the first axis, in the order of drawing."""
    return [shown for shown in figure.axes[0].images if shown.get_array().ndim == 2]


def values_of(figure):
    return np.stack([np.asarray(shown.get_array()) for shown in drawn(figure)])


def texts_of(figure):
    return [text.get_text() for axis in figure.axes for text in axis.texts]


def render(figure):
    """Draws a figure, with warnings as errors, and returns the pixels."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())


# -- numbers


@pytest.mark.backend_free
@pytest.mark.parametrize("kind", ["registers", "no_class_token", "pre_logits", "all_tokens"])
def test_plots_hold_the_arrays(kind):
    model = model_of(kind)
    channels = model.config.in_channels
    image = pixels(channels=channels)
    images = preprocess(image, model.config)
    other = explain.rollout_map(model, preprocess(255 - image, model.config))[0]

    figure = plots.plot_attention_rollout(model, image)
    rollout = explain.rollout_map(model, images)[0]
    np.testing.assert_allclose(values_of(figure)[0], 100 * rollout, rtol=1e-6)
    assert np.abs(other - rollout).max() > 1e-4

    figure = plots.plot_class_token_maps(model, image)
    maps = explain.class_token_maps(model, images)[:, 0]
    np.testing.assert_allclose(
        values_of(figure), 100 * maps.reshape(-1, *maps.shape[2:]), rtol=1e-6
    )
    names = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    assert names == [f"head {i}" for i in range(5)]

    figure = plots.plot_attention_maps(model, image, 0)
    np.testing.assert_allclose(values_of(figure), 100 * maps[0], rtol=1e-6)

    figure = plots.plot_region_similarity(model, image, (2, 1))
    similar = explain.region_similarity(model, images)[0, 2, 1]
    np.testing.assert_array_equal(values_of(figure)[0], similar)

    figure = plots.plot_patch_pca(model, [image, image[::-1]])
    both = np.concatenate([images, preprocess(image[::-1], model.config)])
    colors = [i for i in figure.axes[0].images if np.shape(i.get_array())[:2] == model.config.grid]
    found = np.stack([np.asarray(i.get_array()) for i in colors])
    np.testing.assert_array_equal(found, explain.patch_pca(model, both))


@pytest.mark.backend_free
def test_plot_attention_maps_of_a_patch_is_its_row():
    model, image = model_of("registers"), pixels()
    images = preprocess(image, model.config)
    figure = plots.plot_attention_maps(model, image, -1, query=(2, 1))
    token = 3 + 2 * 2 + 1  # class token, two registers, two rows of two patches
    row = 100 * explain.attention_maps(model, images, -1)[0, 0, :, token]
    np.testing.assert_allclose(values_of(figure), row[:, 3:].reshape(5, 3, 2), rtol=1e-5)
    assert texts_of(figure)[0] == f"head 0 ({row[0, 3:].sum():.0f} %)"
    frame = figure.axes[0].patches[-1].get_bbox()
    left, right, bottom, top = drawn(figure)[-1].get_extent()
    np.testing.assert_allclose(frame.x0, (left + right) / 2)
    np.testing.assert_allclose([frame.y0, frame.y1], [top + (bottom - top) * 2 / 3, bottom])


@pytest.mark.backend_free
@pytest.mark.parametrize("name", ["attention_distance", "attention_entropy"])
def test_plots_by_depth_hold_the_arrays(name):
    model = model_of("registers")
    many = [pixels(seed=1), Image.fromarray(pixels(seed=2))]
    figure = getattr(plots, f"plot_{name}")(model, many)
    axis = figure.axes[0]
    points = np.asarray(axis.collections[0].get_offsets())
    expected = getattr(explain, name)(model, preprocess(many, model.config))
    np.testing.assert_array_equal(points[:, 0], [0] * 5 + [1] * 5)
    np.testing.assert_allclose(points[:, 1].reshape(2, 5), expected, rtol=1e-6)
    np.testing.assert_allclose(axis.lines[1].get_ydata(), expected.mean(1), rtol=1e-6)
    assert figure.get_suptitle().endswith("2 images")
    unit, most = {
        "attention_distance": ("pixels", explain.attention.patch_distances((3, 2), (8, 8)).mean()),
        "attention_entropy": ("nats", np.log(9)),
    }[name]
    assert unit in axis.get_ylabel()
    np.testing.assert_allclose(axis.lines[0].get_ydata(), most, rtol=1e-6)


@pytest.mark.backend_free
def test_plot_position_similarity_is_arranged_like_the_patches():
    model = model_of("learned_2d")
    expected = explain.position_similarity(model)  # (3, 2, 3, 2)
    whole = np.asarray(plots.plot_position_similarity(model).axes[0].images[0].get_array())
    assert whole.shape == (11, 5)
    for row in range(3):
        for column in range(2):
            cell = whole[4 * row : 4 * row + 3, 3 * column : 3 * column + 2]
            np.testing.assert_array_equal(cell, expected[row, column])
    assert np.isnan(whole[3]).all() and np.isnan(whole[:, 2]).all()


@pytest.mark.backend_free
def test_plot_position_similarity_of_a_large_grid_omits_rows():
    model = tiny_model(image_size=(48, 16), patch_size=(2, 8))
    figure = plots.plot_position_similarity(model)
    assert "one of 2 patches" in figure.get_suptitle()
    labels = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert labels == [str(i) for i in range(0, 24, 2)]


@pytest.mark.backend_free
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_plot_patch_filters_are_the_filters(channels):
    model = model_of("paper", in_channels=channels)
    filters = explain.patch_filters(model, 9)
    whole = np.asarray(plots.plot_patch_filters(model, 9).axes[0].images[0].get_array())
    wide = 16 if channels == 2 else 8
    assert whole.shape == (17, 7 * (wide + 1) - 1, 4)
    second = whole[:8, wide + 1 : 2 * wide + 1, :3]
    ninth = whole[9:, wide + 1 : 2 * wide + 1, :3]
    for cell, expected in ((second, filters[1]), (ninth, filters[8])):
        if channels == 2:
            np.testing.assert_array_equal(cell[:, 8:, 0], expected[..., 1])
        np.testing.assert_array_equal(cell[:, :8, 0], expected[..., 0])
    assert not whole[9:, 2 * (wide + 1) :, 3].any()  # there is no tenth


@pytest.mark.backend_free
@pytest.mark.parametrize("name", ["grad_cam", "attention_gradient"])
def test_plots_of_classes_hold_the_arrays_and_name_them(name):
    labels = ("cat", "$x$ of a very long name that no panel has any room for", "dog")
    model, image = model_of("registers", labels=labels), pixels()
    images = preprocess(image, model.config)
    best = int(np.argmax(run(model, images)))
    plot, array = getattr(plots, f"plot_{name}"), getattr(explain, name)

    figure = plot(model, image)
    np.testing.assert_allclose(values_of(figure)[0], array(model, images)[0], atol=1e-6)
    assert texts_of(figure)[1].startswith(f"for {labels[best]}"[:20])
    figure = plot(model, image, ["dog", 0, 1])
    expected = np.stack([array(model, images, i)[0] for i in (2, 0, 1)])
    np.testing.assert_allclose(values_of(figure), expected, atol=1e-6)
    assert np.abs(expected[0] - expected[1]).max() > 0
    assert [text.split()[1] for text in texts_of(figure)[1:]] == ["dog", "cat", "$x$"]
    assert texts_of(figure)[3].endswith("…")
    render(figure)


# -- places


@pytest.mark.backend_free
@pytest.mark.parametrize("size", [(30, 100), (90, 40), (24, 16)])
@pytest.mark.parametrize("crop", [None, 0.5, 1.0])
def test_seen_part_agrees_with_preprocessing(size, crop):
    """Preprocessing a ramp shows where each pixel of the model's input comes from."""
    config = ViTConfig(
        image_size=(24, 16),
        patch_size=8,
        in_channels=1,
        crop_fraction=crop,
        pixel_mean=0.0,
        pixel_std=1.0,
    )
    height, width = size
    left, right, top, bottom = panels.seen_part(height, width, config)
    assert 0 <= left < right <= width + 1e-9 and 0 <= top < bottom <= height + 1e-9
    for axis, length, start, stop, count in (
        (1, width, left, right, 16),
        (0, height, top, bottom, 24),
    ):
        ramp = (np.indices(size)[axis] + 0.5).astype("float32")
        got = 255 * preprocess(ramp, config)[0, ..., 0]
        line = got.mean(1 - axis)
        step = (stop - start) / count
        places = start + (np.arange(count) + 0.5) * step
        inner = (places > step) & (places < length - step)  # away from the edges
        assert inner.sum() > 3
        np.testing.assert_allclose(line[inner], places[inner], atol=0.05)  # a sampled kernel


@pytest.mark.backend_free
def test_overlay_covers_the_marked_patch():
    """A bright square, drawn where the figure shows a patch, is in that patch only."""
    model = model_of("paper", crop_fraction=0.8)
    figure = plots.plot_attention_rollout(model, pixels())
    base, whole, shown = figure.axes[0].images
    assert base.get_extent() == [0, WIDTH, HEIGHT, 0]
    luma = np.asarray(Image.fromarray(pixels()).convert("L"))
    expected = np.interp(luma, (0, 255), panels.GRAY)
    np.testing.assert_allclose(whole.get_array()[..., 0], expected, atol=1)
    shift = whole.get_extent()[0]
    left, right, bottom, top = shown.get_extent()
    across, down = (right - left) / 2, (bottom - top) / 3
    x, y = round(left - shift + across), round(top + down)  # patch (1, 1)
    black = np.zeros((HEIGHT, WIDTH, 3), "uint8")
    black[y : round(y + down), x : round(x + across)] = 255
    got = preprocess(black, model.config)[0].mean(-1).reshape(3, 8, 2, 8).mean((1, 3))
    assert got[1, 1] > 0.85
    got[1, 1] = -1
    assert got.max() < -0.85
    assert 0 < left - shift < right - shift < WIDTH  # and part of the image is cropped


@pytest.mark.backend_free
def test_image_of_another_size_is_scaled_to_fit():
    figure = plots.plot_patch_pca(model_of("paper"), [pixels(), pixels(80, 60)])
    left, right, bottom, top = figure.axes[0].images[3].get_extent()  # image, gray copy, map
    np.testing.assert_allclose([right - left, bottom - top], [30, 40])
    assert left > WIDTH


@pytest.mark.backend_free
def test_cropped_part_is_pale():
    model = model_of("paper", crop_fraction=0.8)
    dark = np.zeros((HEIGHT, WIDTH, 3), "uint8")
    figure = plots.plot_attention_rollout(model, dark)
    canvas = render(figure)
    to_canvas = figure.axes[0].transData.transform
    for x, expected in ((2, 255 * panels.DIMMED), (WIDTH / 2, 0)):
        column, row = to_canvas((x, HEIGHT / 2))
        assert abs(int(canvas[len(canvas) - int(row), int(column), 0]) - expected) < 3


# -- figures


@pytest.mark.backend_free
@pytest.mark.parametrize(
    "kind, channels, size",
    [
        ("registers", 3, (16, 16)),
        ("no_class_token", 1, (16, 16)),
        ("map", 1, (16, 16)),
        ("registers", 3, (20, 200)),
        ("registers", 3, (200, 20)),
    ],
)
def test_figures_fit_their_page(kind, channels, size):
    """Drawing gives no warning, and no text leaves the page."""
    model = model_of(kind, crop_fraction=0.9, in_channels=channels)
    image = pixels(*size, channels)
    makers = {n: getattr(plots, n) for n in explain.__all__ if n.startswith("plot_")}
    if kind != "map":
        del makers["plot_pooling_map"]
    if size != (16, 16):
        makers = {n: makers[n] for n in ("plot_attention_maps", "plot_grad_cam")}
    for name, make in makers.items():
        of_image = name not in ("plot_position_similarity", "plot_patch_filters")
        figure = make(model, image) if of_image else make(model)
        render(figure)
        box = figure.get_tightbbox()
        width, height = figure.get_size_inches()
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, name
        assert figure.get_suptitle()


def test_figure_on_every_backend():
    model = model_of("registers")
    figure = explain.plot_position_similarity(model)  # runs no model: slow on JAX
    assert render(figure).std() > 0


@pytest.mark.backend_free
def test_figures_do_not_use_pyplot():
    from matplotlib import pyplot

    plots.plot_patch_filters(model_of("paper"))
    assert pyplot.get_fignums() == []


# -- what is refused


@pytest.mark.backend_free
def test_images_may_be_paths_or_pil_images(tmp_path):
    model, path = model_of("paper"), tmp_path / "a.png"
    Image.fromarray(pixels()).save(path)
    expected = values_of(plots.plot_attention_rollout(model, pixels()))
    for image in (path, str(path), Image.open(path)):
        figure = plots.plot_attention_rollout(model, image)
        np.testing.assert_array_equal(values_of(figure), expected)
    deep = Image.fromarray(pixels(channels=1)[..., 0].astype("uint16") * 256)
    opened = panels.open_image(deep, TINY)
    np.testing.assert_array_equal(opened.pixels[..., 1], pixels(channels=1)[..., 0])
    with pytest.raises(ValueError, match="no such|cannot be read"):
        plots.plot_attention_rollout(model, tmp_path / "none.png")


@pytest.mark.backend_free
@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("attention_maps", {"layer": 2}, r"layer must .* Received: layer=2"),
        ("attention_maps", {"query": (3, 0)}, r"query must .* Received: query=\(3, 0\)"),
        ("attention_maps", {"query": 1}, "query must .* Received: query=1"),
        ("region_similarity", {"query": (0.0, 1)}, "query must"),
        ("region_similarity", {"block": "last"}, "block must"),
        ("attention_rollout", {"head_fusion": "sum"}, "head_fusion must"),
        ("class_token_maps", {"layers": [0, 5]}, "layers must"),
        ("grad_cam", {"classes": 3}, r"classes must .* Received: classes=3"),
        ("grad_cam", {"classes": "cat"}, r"classes must .* Received: classes='cat'"),
        ("attention_gradient", {"classes": []}, "classes must"),
        ("patch_pca", {"images": []}, "images must"),
        ("attention_distance", {"images": 5}, "images must"),
        ("attention_rollout", {"image": np.zeros((8, 8, 2))}, r"image must .* \(8, 8, 2\)"),
        (
            "attention_rollout",
            {"image": np.full((8, 8, 3), 256)},
            r"image must .* \[256, 256\]",
        ),
        ("attention_rollout", {"image": np.full((8, 8, 3), np.nan)}, "image must"),
        ("attention_rollout", {"image": None}, "image must"),
        ("attention_rollout", {"model": "vit"}, "model must"),
    ],
)
def test_plots_refuse_wrong_arguments(name, arguments, message):
    own = "images" if name in ("patch_pca", "attention_distance") else "image"
    with pytest.raises(ValueError, match=message):
        getattr(plots, f"plot_{name}")(**{"model": model_of(), own: pixels(), **arguments})


@pytest.mark.backend_free
def test_plot_pooling_map_holds_the_mean_and_each_head():
    model = model_of("map")
    image = pixels(channels=model.config.in_channels)
    figure = plots.plot_pooling_map(model, image)
    maps = 100 * explain.pooling_map(model, preprocess(image, model.config))[0]
    found = values_of(figure)
    np.testing.assert_allclose(found[0], maps.mean(0), rtol=1e-5)
    np.testing.assert_allclose(found[1:], maps, rtol=1e-5)
    assert np.abs(maps[0] - maps[1]).max() > 1e-1


@pytest.mark.backend_free
def test_plots_refuse_what_a_model_lacks():
    with pytest.raises(ValueError, match="pooling='token'"):
        plots.plot_pooling_map(model_of("paper"), pixels())
    with pytest.raises(ValueError, match="position_embedding='none'"):
        plots.plot_position_similarity(model_of("no_positions"))
    with pytest.raises(ValueError, match="num_classes=0"):
        plots.plot_grad_cam(model_of("features"), pixels())
    with pytest.raises(ValueError, match="classes must .* Received: classes='cat'"):
        plots.plot_grad_cam(model_of("paper", labels=("cat", "cat", "dog")), pixels(), "cat")
