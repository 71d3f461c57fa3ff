"""The entry point of the `keras-vit` command.

`import keras_vit` imports Keras and its backend, which takes seconds and needs a backend that is
installed. What the command does first, and often all that it does, needs neither: reading the table
of checkpoints, `--help`, a shell's completion, seeing that a file does not exist. So this module
stands beside the package, and starts the command without the package's `__init__`;
`keras_vit.cli` runs that when it comes to it.
"""

import importlib.util
import sys


def main() -> None:
    """Runs `keras-vit`."""
    spec = importlib.util.find_spec("keras_vit")
    if spec is None:
        raise ModuleNotFoundError("keras_vit must be installed, or be in the current folder")
    sys.modules["keras_vit"] = importlib.util.module_from_spec(spec)
    from keras_vit import cli

    cli.main()


if __name__ == "__main__":
    main()
