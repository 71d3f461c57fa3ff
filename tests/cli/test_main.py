"""The `keras-vit` command as a whole: help, errors, exit codes, and what it imports."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest
import typer

import keras_vit
from keras_vit.weights.fetch import known
from keras_vit_cli import main

pytestmark = pytest.mark.backend_free

ROOT = Path(__file__).parents[2]
COMMANDS = typer.main.get_command(main.app).commands
HEAVY = (
    *("keras", "keras_vit", "numpy", "tensorflow", "jax", "torch", "huggingface_hub", "PIL"),
    *("pyarrow", "ray"),
)


def test_error_is_one_line(call, tmp_path):
    code, out, err = call("info", tmp_path / "none.npz")
    assert (code, out) == (1, "")
    assert err.startswith("keras-vit: error: source must be a path") and err.count("\n") == 1


def test_error_with_debug_is_a_traceback(tmp_path):
    with pytest.raises(FileNotFoundError):
        main.main(["info", str(tmp_path / "none.npz"), "--debug"])


def test_unexpected_error_mentions_debug(call, monkeypatch):
    monkeypatch.setattr(known, "search", lambda text: 1 / 0)
    code, _, err = call("models")
    assert code == 1 and "ZeroDivisionError: division by zero (see --debug)" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("info",),
        ("convert", "a", "b"),
        ("convert", "a", "b", "--format", "caffe"),
        ("convert", "a", "b", "--format", "timm", "--image-size", "big"),
    ],
)
def test_usage_error_is_exit_code_2(call, arguments):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "") and "Usage: keras-vit" in err


def test_version_is_the_package_s(call):
    code, out, _ = call("--version")
    assert (code, out) == (0, f"keras-vit {keras_vit.__version__}\n")


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_explains_every_command(call, command):
    code, out, _ = call(*([command] if command else []), "--help")
    assert code == 0
    if command is None:
        assert all(f" {name} " in out for name in COMMANDS)
        return
    assert f"Usage: keras-vit {command} " in out
    if command in ("info", "convert", "export"):
        assert "name[@revision][/file]" in out  # not interpreted as markup


# -- what is imported


def start(*arguments, **environment):
    """Runs the command in a separate process; the last line lists its imports."""
    code = (
        "import sys\n"
        "from keras_vit_cli import main\n"
        f"try:\n    main.main({arguments!r})\n"
        f"finally:\n    print([m for m in {HEAVY} if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["export", "--help"], 0),
        (["nonsense"], 2),
        (["info", "none.npz"], 1),
        (["convert", "./none", "a", "--format", "timm"], 1),
        (["predict", "runs", "none.png"], 1),
        (["predict", "none.keras", __file__], 1),
        (["predict", "runs", "--files-from", "none.txt"], 1),
        (["embed", "--help"], 0),
        (["embed", "runs", "none.png", "--out", "none.npy"], 1),
        (["explain", "runs", "none.png"], 1),
        (["export", "none.keras", "--to", "onnx"], 1),
        (["export", "runs", "--to", "tflite", "--accuracy-data", "none"], 1),
        (["serve-config", "none"], 1),
        (["evaluate", "none.keras"], 1),
        (["train", "--recipe", "none.py", "--workdir", "none"], 1),
        (["train", "--recipe", "digits"], 2),
        (["train", "--list"], 0),
    ],
)
def test_help_and_missing_files_import_no_keras(arguments, code):
    done = start(*arguments)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    if code == 1:
        assert done.stderr.startswith("keras-vit: error: ") and done.stderr.count("\n") == 1
        assert "none" in done.stderr


def test_completion_imports_no_keras():
    complete = {"_KERAS_VIT_COMPLETE": "complete_bash", "COMP_WORDS": "keras-vit ex"}
    done = start(**complete, COMP_CWORD="1")
    assert done.stdout.splitlines() == ["explain", "export", "[]"], done.stderr


def test_command_imports_keras_when_it_needs_it(checkpoint):
    """On JAX, because it imports fastest."""
    done = start("info", str(checkpoint), KERAS_BACKEND="jax")
    assert done.returncode == 0, done.stderr
    assert "32 of 32 arrays" in done.stdout and "'keras'" in done.stdout.splitlines()[-1]


def test_module_is_the_command():
    command = [sys.executable, "-m", "keras_vit_cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, f"keras-vit {keras_vit.__version__}\n")


@pytest.mark.slow
def test_command_converts_in_a_separate_process(checkpoint, tmp_path):
    done = start("convert", str(checkpoint), str(tmp_path / "a.keras"), "--format", "keras")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(tmp_path / "a.keras")
    assert keras.saving.load_model(tmp_path / "a.keras").config.width == 20
