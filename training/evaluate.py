"""`python -m training.evaluate MODEL_OR_RUN`: top-1 and top-5, every sample once.

A run folder knows its data; any other model (a .keras file, or whatever `keras_vit.from_pretrained`
takes) is given some with --data. `--few-shot 1 5 10` adds the paper's linear evaluation.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

# Keras and TensorFlow are imported when a command has come that far: `--help` is immediate.


def main(argv: list[str] | None = None) -> int:
    """Evaluates, and prints what was found."""
    options = _parser().parse_args(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's greetings
    try:
        found = _evaluate(options)
    except (ValueError, OSError, ImportError) as error:
        if options.debug:
            raise
        print("training.evaluate: error: " + " ".join(str(error).split()), file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    print(f"{found['samples']:,} samples of {found['data']}, {found['seconds']:.1f} s")
    for name, value in found.items():
        if name.startswith(("top", "few_shot")):
            print(f"{name:12} {value:.2%}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.evaluate",
        description="Top-1 and top-5 accuracy of a model, every sample counted once.",
        epilog="example: python -m training.evaluate runs/digits --few-shot 5 10",
    )
    parser.add_argument("model", help="a run folder, a .keras file, or any checkpoint")
    parser.add_argument(
        "--data",
        metavar="SOURCE",
        help='"digits", "tfds:NAME" or a folder of images; a run folder knows its own',
    )
    parser.add_argument("--path", help="where the data is: TFDS' data_dir, or the folder")
    parser.add_argument("--split", help="a TFDS split or a sub-folder (test)")
    parser.add_argument("--batch", type=_positive, metavar="N", help="batch size (128)")
    parser.add_argument(
        "--few-shot",
        type=_positive,
        nargs="+",
        default=[],
        metavar="N",
        help="linear evaluation on N training pictures a class, for each N",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it must be a positive number, not {text!r}")
    return int(text)


def _evaluate(options: argparse.Namespace) -> dict:
    from keras_vit_cli import backend

    backend.choose()
    from training import recipe, report
    from training.data import open_source, test_batches

    folder = Path(options.model)
    is_run = (folder / "recipe.json").is_file()
    run = recipe.read(folder / "recipe.json") if is_run else None
    data = _data(options, run)
    model = _load(folder / "model.keras" if is_run else options.model)
    source = open_source(data)
    _check_classes(model.config, source)
    batch = options.batch or (run.evaluation.batch_size or run.run.batch_size if run else 128)
    tests = test_batches(source.test, model.config, batch, source.num_classes)
    start = time.monotonic()
    predictions = report.predict(model, tests)
    seconds = time.monotonic() - start
    found = {
        "model": options.model,
        "data": f"{data.source}:{data.test}",
        "samples": len(predictions.truth),
        "seconds": seconds,
        "top1": predictions.top1,
    }
    if predictions.top5 is not None:
        found["top5"] = predictions.top5
    if options.few_shot:
        from training import few_shot

        train = test_batches(source.train, model.config, batch, source.num_classes)
        found |= few_shot.evaluate(model, train, tests, options.few_shot)
    return found


def _data(options: argparse.Namespace, run):
    """The data of the run, with what the options say otherwise."""
    from training import recipe

    data = run.data if run else None
    if options.data is not None:
        known = options.data == "digits" or options.data.startswith("tfds:")
        data = recipe.Data(*(options.data,) if known else ("folder", options.data))
    if data is None:
        raise ValueError(
            "--data must be given where the model is not a run folder (with recipe.json in it). "
            f"Received: {options.model}"
        )
    if options.path is not None:
        data = dataclasses.replace(data, path=options.path)
    return dataclasses.replace(data, test=options.split or data.test)


def _load(source: str | Path):
    import keras

    import keras_vit
    from training.distribution.devices import jit_compile

    if Path(source).suffix != ".keras":
        model = keras_vit.from_pretrained(source)
    elif not Path(source).is_file():
        raise FileNotFoundError(f"model must be there. Received: {source}")
    else:
        model = keras.saving.load_model(source, compile=False)
    if not isinstance(model, keras_vit.ViT):
        raise ValueError(f"model must be a ViT. Received: {source}, a {type(model).__name__}")
    if not jit_compile():
        model.jit_compile = False
    return model


def _check_classes(config, source) -> None:
    if config.num_classes != source.num_classes:
        raise ValueError(
            f"data must have the model's {config.num_classes} classes. "
            f"Received: {source.name} with {source.num_classes}"
        )
    ours, theirs = config.labels, source.labels
    if ours and theirs and ours != tuple(theirs):
        if sorted(ours) == sorted(theirs):
            raise ValueError(f"data must have its classes in the model's order: {', '.join(ours)}")
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
        print(
            f"training.evaluate: {len(pairs)} classes have other names in the data, such as "
            f"{pairs[0][1]!r} for {pairs[0][0]!r}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(main())
