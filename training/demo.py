"""`make demo`: a small ViT learns to read handwritten digits, from nothing, in under a minute.

The 1,797 pictures (8x8, grey) come with scikit-learn, so nothing is downloaded. Everything here is
plain Keras: `compile`, `fit`, `evaluate`, `predict`, `save`.
"""

import argparse
import sys
import time
from pathlib import Path

import keras
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_vit
from keras_vit.preprocessing import preprocess


def digits_config() -> keras_vit.ViTConfig:
    """A ViT of 0.14 M parameters that looks at 2x2 pixels at a time, 16 patches in all."""
    return keras_vit.ViTConfig(
        image_size=8,
        patch_size=2,
        in_channels=1,
        width=64,
        depth=4,
        num_heads=4,
        mlp_dim=128,
        num_classes=10,
        labels=tuple("0123456789"),
        position_embedding="sincos_2d",
        class_token=False,
        pooling="mean",
        drop_path=0.1,
        patch_dropout=0.25,  # with 1,437 pictures, nothing helps more
    )


def load_data(config: keras_vit.ViTConfig, seed: int = 0):
    """The digits as 0-255 pixels and as the model wants them: (train, test) of each."""
    digits = load_digits()
    pictures = (digits.images * (255 / 16)).round().astype("uint8")[..., None]
    split = train_test_split(
        pictures, digits.target, test_size=0.2, random_state=seed, stratify=digits.target
    )
    pictures_train, pictures_test, labels_train, labels_test = split
    train = preprocess(pictures_train, config), labels_train
    test = preprocess(pictures_test, config), labels_test
    return train, test, pictures_test


def train_digits(epochs: int = 40, verbose: str | int = "auto"):
    """Trains the model; returns it with its accuracy on pictures that it never saw."""
    config = digits_config()
    (x, y), test, _ = load_data(config)
    batch = 32
    steps = epochs * -(-len(x) // batch)
    model = keras_vit.ViT(config, name="digits")
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, steps - steps // 10, warmup_target=2e-3, warmup_steps=steps // 10
    )
    model.compile(
        keras.optimizers.AdamW(schedule, weight_decay=0.2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(x, y, batch, epochs=epochs, validation_data=test, verbose=verbose)
    return model, model.evaluate(*test, batch_size=batch, verbose=0)[1]


def contact_sheet(pictures, truth, probabilities, columns: int = 12, size: int = 72) -> Image.Image:
    """The pictures with what the model read below each: green where it was right, red where not."""
    from PIL import ImageDraw

    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * (size + 8) + 8, rows * (size + 26) + 8), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (picture, answer, p) in enumerate(zip(pictures, truth, probabilities, strict=True)):
        left, top = 8 + i % columns * (size + 8), 8 + i // columns * (size + 26)
        tile = Image.fromarray(255 - picture[..., 0]).resize((size, size), Image.Resampling.NEAREST)
        sheet.paste(tile, (left, top))
        guess = int(p.argmax())
        colour = (0, 110, 60) if guess == answer else (190, 20, 30)
        text = f"{guess}  {p[guess]:.0%}" + ("" if guess == answer else f"  not {answer}")
        draw.text((left, top + size + 3), text, fill=colour)
    return sheet


def main(argv: list[str] | None = None) -> int:
    """Trains, evaluates, reads one picture aloud, and leaves a model and a picture behind."""
    parser = argparse.ArgumentParser(prog="python -m training.demo", description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    options = parser.parse_args(argv)
    keras.utils.set_random_seed(0)

    backend = keras.backend.backend()
    print(f"Training a ViT on scikit-learn's digits, Keras {keras.__version__} on {backend}\n")
    start = time.monotonic()
    verbose = 1 if sys.stdout.isatty() else 2
    model, accuracy = train_digits(options.epochs, verbose)
    seconds = time.monotonic() - start

    _, (x, truth), pictures = load_data(model.config)
    probabilities = np.asarray(keras.ops.softmax(model.predict(x, verbose=0), axis=-1))
    wrong = np.flatnonzero(probabilities.argmax(-1) != truth)
    order = [*wrong[:12].tolist(), *(i for i in range(len(x)) if i not in set(wrong.tolist()))][:48]

    options.out.mkdir(parents=True, exist_ok=True)
    model.save(options.out / "model.keras")
    again = keras.saving.load_model(options.out / "model.keras")
    same = np.array_equal(again.predict(x, verbose=0), model.predict(x, verbose=0))
    if not same:
        raise RuntimeError("the saved model does not predict what the trained one does")
    contact_sheet(pictures[order], truth[order], probabilities[order]).save(
        options.out / "predictions.png"
    )

    print(f"\nTest accuracy {accuracy:.1%} on {len(x)} pictures, after {seconds:.0f} s of training")
    print(f"\nOne of them, a {truth[0]}:\n")
    for row in pictures[0, ..., 0]:
        print("    " + "".join(" .:-=+*#%@"[int(v) * 9 // 255] * 2 for v in row))
    print("\nThe model sees:")
    for label, p in sorted(zip(model.config.labels, probabilities[0], strict=True), key=_second)[
        :3
    ]:
        print(f"    {label}  {p:6.1%}  {'#' * round(40 * float(p))}")
    print(f"\n{options.out}/model.keras      the model; loaded again, it predicts bitwise the same")
    print(f"{options.out}/predictions.png  48 test pictures with what it read, mistakes first")
    return 0


def _second(pair):
    return -pair[1]


if __name__ == "__main__":
    sys.exit(main())
