"""`make demo`: a small ViT learns to read handwritten digits, from scratch, in under a minute.

It trains the recipe "digits" as `python -m training.train` does, exports the model for TensorFlow
Serving and for phones, runs both exports, and writes a page that shows what the model sees. The
1,797 images (8x8, gray) come with scikit-learn, so nothing is downloaded.
"""

import argparse
import io
import shutil
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from keras_vit_cli.backend import without_greetings

with without_greetings():  # of TensorFlow, which reads the images on each backend
    import keras

    import keras_vit
    from keras_vit import train
    from keras_vit.preprocessing import preprocess
    from keras_vit.train import open_source
    from keras_vit.train.run.run_status import MODEL

OUT = Path("runs/demo")
EXPORTS = Path("savedmodels/digits")


def contact_sheet(images, truth, probabilities, columns: int = 12, size: int = 72) -> Image.Image:
    """The images, each with its predicted class below: green if it is right, red if it is wrong."""
    from PIL import ImageDraw

    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * (size + 8) + 8, rows * (size + 26) + 8), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (image, answer, p) in enumerate(zip(images, truth, probabilities, strict=True)):
        left, top = 8 + i % columns * (size + 8), 8 + i // columns * (size + 26)
        tile = Image.fromarray(255 - image[..., 0]).resize((size, size), Image.Resampling.NEAREST)
        sheet.paste(tile, (left, top))
        guess = int(p.argmax())
        color = (0, 110, 60) if guess == answer else (190, 20, 30)
        text = f"{guess}  {p[guess]:.0%}" + ("" if guess == answer else f"  not {answer}")
        draw.text((left, top + size + 3), text, fill=color)
    return sheet


def serve(model, pixels, probabilities, folder: Path) -> Path:
    """Exports the model for servers, and runs the export on the images as PNG files."""
    export = keras_vit.export_saved_model(model, folder)  # and compares it with the model
    served = keras_vit.runtime.open(export.path)
    files = [as_png(image) for image in pixels]
    answers = served.run("classify", bytes=files)
    labels = answers["labels"][:, 0].astype(str)
    wanted = np.array(model.config.labels)[probabilities.argmax(-1)]
    seen = export.verification
    print(
        f"Its logits differ from the model's by {seen.difference / seen.logits_range:.0e} of their "
        f"range. One image takes {export.latency:.2g} ms;\nthe model itself takes "
        f"{export.plain_latency:.2g} ms in float32. On {len(files)} PNG files its top class is the "
        f"model's in {np.mean(labels == wanted):.1%}.\nThe first file is a {labels[0]} with "
        f"{answers['scores'][0, 0]:.1%}."
    )
    return export.path


def shrink(model, images, truth, path: Path) -> None:
    """Exports the model for phones with int8 weights, and measures the accuracy of the file."""
    export = keras_vit.export_tflite(
        model, path, quantize="dynamic", accuracy_data=(images, truth), overwrite=True
    )
    logits = keras_vit.runtime.open(path).logits(images[:1])
    drop = export.accuracy
    print(
        f"The file has {export.size / 1e3:.0f} kB. One image takes {export.latency:.2g} ms. Its "
        f"accuracy is {drop.export.top_1:.1%}, the model's {drop.reference.top_1:.1%}.\n"
        f"The first image is a {model.config.labels[logits[0].argmax()]}."
    )


def as_png(image) -> bytes:
    """An image (H, W, 1) as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(image[..., 0]).save(file, "PNG")
    return file.getvalue()


def main(argv: list[str] | None = None) -> int:
    """Trains, exports, prints the prediction for one image, and writes figures and a page."""
    parser = argparse.ArgumentParser(prog="python -m training.demo", description=__doc__)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--out", type=Path, default=OUT, help="the run folder, new or empty")
    parser.add_argument(
        "--export", type=Path, default=EXPORTS, help="the folder of the SavedModel's versions"
    )
    options = parser.parse_args(argv)
    if options.out == OUT and (OUT / "recipe.json").exists():
        shutil.rmtree(OUT)  # the demo before
    settings = [] if options.epochs is None else [f"run.epochs={options.epochs}"]
    if options.epochs is not None:
        settings.append("schedule.warmup_steps=1")

    backend = keras.backend.backend()
    print(f"Training a ViT on scikit-learn's digits, Keras {keras.__version__} on {backend}\n")
    reached = train.train("digits", options.out, overrides=settings)

    model = keras.saving.load_model(options.out / MODEL)
    examples = list(open_source(train.Data("digits")).test.ordered().as_numpy_iterator())
    pixels = np.stack([example["image"] for example in examples])
    truth = np.array([example["label"] for example in examples])
    images = preprocess(pixels, model.config)
    logits = model.predict(images, verbose=0)
    probabilities = np.asarray(keras.ops.softmax(logits, axis=-1))
    wrong = np.flatnonzero(probabilities.argmax(-1) != truth)
    order = np.concatenate([wrong[:12], np.setdiff1d(np.arange(len(truth)), wrong)])[:48]
    sheet = contact_sheet(pixels[order], truth[order], probabilities[order])
    sheet.save(options.out / "predictions.png")

    print(
        f"\nTest accuracy {reached['top1']:.1%} on {len(truth)} images, "
        f"after {reached['seconds']:.0f} s of training\n\nOne of the images, a {truth[0]}:\n"
    )
    for row in pixels[0, ..., 0]:
        print("    " + "".join(" .:-=+*#%@"[int(v) * 9 // 255] * 2 for v in row))
    print("\nThe model predicts:")
    for label in np.argsort(-probabilities[0])[:3]:
        p = float(probabilities[0, label])
        print(f"    {model.config.labels[label]}  {p:6.1%}  {'#' * round(40 * p)}")
    print("\nExporting the model for TensorFlow Serving ...")
    exported = serve(model, pixels, probabilities, options.export)
    print("\nExporting the model for phones ...")
    shrink(model, images, truth, options.out / "digits.tflite")
    page = options.out / "seen.html"
    keras_vit.explain.write_report(model, pixels[0], page, title=f"A handwritten {truth[0]}")
    print(
        f"\n{options.out}/model.keras      the model; it was loaded again and compared\n"
        f"{options.out}/report.md        curves, mistakes, and figures of the model\n"
        f"{options.out}/predictions.png  48 test images with their predictions, mistakes first\n"
        f"{options.out}/digits.tflite    the model for phones and browsers\n"
        f"{exported}  the SavedModel; to serve it: keras-vit serve-config {options.export}\n"
        f"{page}        what the model sees in a {truth[0]}: open it in a browser"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
