"""`python -m training.evaluate MODEL_OR_RUN`: top-1 and top-5, every sample once.

A run folder knows its data. Any other model (a .keras file, or whatever `keras_vit.from_pretrained`
takes) needs --data. `--few-shot 1 5 10` adds the paper's linear evaluation.
"""

import argparse
import json
import os
import sys

# Keras and TensorFlow are imported when they are needed, so that `--help` is immediate.


def main(argv: list[str] | None = None) -> int:
    """Evaluates, and prints the results."""
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
        help="linear evaluation on N training images a class, for each N",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive number. Received: {text!r}")
    return int(text)


def _evaluate(options: argparse.Namespace) -> dict:
    from keras_vit_cli import backend

    backend.choose()
    from keras_vit import train

    return train.evaluate(
        options.model,
        data=options.data,
        path=options.path,
        split=options.split,
        batch_size=options.batch,
        few_shot=options.few_shot,
    )


if __name__ == "__main__":
    sys.exit(main())
