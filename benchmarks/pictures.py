"""`python -m benchmarks.pictures`: draws the figures of docs/explain.md and of the front page.

They show the models of two runs, `runs/cifar10_plain` and `runs/fashion`, on the first images of
their test data. Each file is written atomically. `--only rollout` draws those with this in their
name.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

COUNT = 200
"""Test images over which distances and entropies are averaged."""
DPI = 90
HORSE, HORSES, SPARROW = 10, (10, 12, 18, 50), 21
BAG, BOOT, BOOTS = 11, 14, (14, 32, 46, 53)


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__)
    parser.add_argument("--cifar10", type=Path, default=Path("runs/cifar10_plain"))
    parser.add_argument("--fashion", type=Path, default=Path("runs/fashion"))
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--only", default="", help="draw figures with this in their name")
    options = parser.parse_args()
    cifar10 = opened(options.cifar10, "tfds:cifar10")
    fashion = opened(options.fashion, "tfds:fashion_mnist")
    options.out.mkdir(parents=True, exist_ok=True)
    total = 0
    for name, draw in drawings(cifar10, fashion).items():
        if options.only in name:
            path = options.out / f"{name}.png"
            size = save(draw(), path)
            total += size
            print(f"{path}  {size / 1e3:.0f} kB")
    print(f"total: {total / 1e3:.0f} kB")


def opened(run, source):
    """The model of a run, and its first test images."""
    import keras

    import keras_vit  # noqa: F401  its class is in the file
    from keras_vit.train import Data, open_source

    model = keras.saving.load_model(run / "model.keras")
    examples = open_source(Data(source)).test.ordered().take(COUNT)
    return model, [example["image"] for example in examples.as_numpy_iterator()]


def drawings(cifar10, fashion):
    """Functions that draw the figures, by the names of their files."""
    from keras_vit import explain

    def both(name, first, second):
        """One plot for each model; each pair has numbers of images and the plot's options."""
        plot, title = getattr(explain, f"plot_{name}"), name.replace("_", "-")

        def of(model, images, numbers, options):
            many = isinstance(numbers, Sequence)
            return plot(model, [images[i] for i in numbers] if many else images[numbers], **options)

        return {
            f"cifar10-{title}": lambda: of(*cifar10, *first),
            f"fashion-{title}": lambda: of(*fashion, *second),
        }

    every = range(COUNT)
    patch, inside = {"query": (3, 2)}, {"query": (5, 3)}
    bird, boot = {"classes": ("frog", "bird")}, {"classes": ("Ankle boot", "Sneaker", "Sandal")}
    return {
        **both("attention_maps", (HORSE, {**patch, "layer": 0}), (BAG, {**inside, "layer": 1})),
        **both("class_token_maps", (HORSE, {}), (BAG, {})),
        **both("attention_rollout", (HORSE, {}), (BAG, {})),
        **both("attention_distance", (every, {}), (every, {})),
        **both("attention_entropy", (every, {}), (every, {})),
        **both("region_similarity", (HORSE, patch), (BAG, inside)),
        **both("patch_pca", (HORSES, {}), (BOOTS, {})),
        **both("grad_cam", (SPARROW, bird), (BOOT, boot)),
        **both("attention_gradient", (SPARROW, bird), (BOOT, boot)),
        # Both models have the same fixed position embeddings.
        "cifar10-position-similarity": lambda: explain.plot_position_similarity(cifar10[0]),
        "cifar10-patch-filters": lambda: explain.plot_patch_filters(cifar10[0]),
        "fashion-patch-filters": lambda: explain.plot_patch_filters(fashion[0]),
        "readme": lambda: strip(*cifar10),
    }


def strip(model, photos):
    """Six figures side by side, for the front page."""
    import numpy as np

    from keras_vit import explain, preprocessing
    from keras_vit.explain import charts, panels

    figure = panels.new_figure(12, 2.8, "")
    axes = figure.subplots(1, 6)
    shown = preprocessing.preprocess([photos[i] for i in HORSES], model.config)
    first, image = shown[:1], photos[HORSE]
    height, width = image.shape[:2]
    gray = np.repeat(image.mean(-1, keepdims=True) / 2 + 60, 3, -1).astype("uint8")
    heads = explain.class_token_maps(model, first, (1, 3, 5))[:, 0]  # (3, h, rows, columns)
    heads = heads / heads.max((2, 3), keepdims=True)
    whole = {"extent": (0, width, height, 0), "interpolation": "nearest"}
    colored = {"cmap": panels.CMAP}
    axes[0].imshow(image)
    axes[1].imshow(gray, **whole)
    rollout = explain.rollout_map(model, first)[0]
    axes[1].imshow(rollout, alpha=panels.OPACITY, **whole, **colored)
    axes[2].imshow(charts.tile(heads), **colored)
    axes[3].imshow(explain.patch_pca(model, shown)[0], **whole)
    axes[4].imshow(charts.tile(explain.position_similarity(model)), **colored)
    titles = (
        ("image", f"CIFAR-10, {width} x {height} pixels"),
        ("attention rollout", "bright: contributes most"),
        ("attention heads", "blocks 1, 3, 5"),
        ("patch features", "components as colors"),
        ("position similarity", "a map for each patch"),
        ("attention distance", "block"),
    )
    for axis, (title, note) in zip(axes, titles, strict=True):
        axis.set(box_aspect=1, xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
        axis.set_title(title, size=12)
        axis.set_xlabel(note, size=9.5)
    images = preprocessing.preprocess(photos, model.config)
    distance = explain.attention_distance(model, images)  # (L, h)
    depth, heads = distance.shape
    axes[5].scatter(np.arange(depth).repeat(heads), distance, s=30, color=charts.BLUE, alpha=0.7)
    axes[5].set(xticks=range(depth), yticks=range(0, 21, 5), ylim=(0, 20))
    axes[5].set_ylabel("pixels, one dot a head", size=9.5)
    axes[5].spines[["left", "bottom"]].set_visible(True)
    return figure


def save(figure, path):
    """Writes a figure with a white background, and returns the size of the file."""
    beside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    dpi = 100 if path.stem == "readme" else DPI
    figure.savefig(beside, dpi=dpi, format="png", facecolor="white", pil_kwargs={"optimize": True})
    os.replace(beside, path)
    return path.stat().st_size


if __name__ == "__main__":
    main()
