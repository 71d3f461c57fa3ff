"""What the tests of the command share: a way to call it, and a tiny model."""

import contextlib
import io

import pytest
from conformance import tiny_model
from rich.console import Console

import keras_vit
from keras_vit_cli import main, output


@pytest.fixture(scope="session")
def model():
    return tiny_model()


@pytest.fixture(scope="session")
def checkpoint(model, tmp_path_factory):
    """The model in timm's format."""
    return keras_vit.save_pretrained(model, tmp_path_factory.mktemp("cli") / "tiny", "timm")


@pytest.fixture
def call(capsys):
    """Calls the command in this process: (exit code, stdout, stderr)."""

    def call(*arguments):
        with pytest.raises(SystemExit) as end:
            main.main([*map(str, arguments)])
        captured = capsys.readouterr()
        return end.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture(scope="session")
def digits():
    """The arguments that train a tiny model on the digits."""
    settings = (
        *("model.config.patch_size=4", "model.config.width=16", "model.config.depth=1"),
        *("model.config.num_heads=2", "model.config.mlp_dim=24", "schedule.warmup_steps=1"),
        *("run.steps=4", "run.batch_size=700"),
    )

    def arguments(folder, *more):
        sets = [part for setting in settings for part in ("--set", setting)]
        return ["train", "--recipe", "digits", "--workdir", str(folder), *sets, *more]

    return arguments


@pytest.fixture(scope="session")
def _trained(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits"
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as end:
        main.main(digits(folder))
    assert not end.value.code and (folder / "report.md").is_file()
    return folder, printed.getvalue()


@pytest.fixture(scope="session")
def trained(_trained):
    """The folder of a finished run."""
    return _trained[0]


@pytest.fixture(scope="session")
def printed(_trained):
    """What training the finished run printed."""
    return _trained[1]


@pytest.fixture
def terminal(monkeypatch):
    """Makes stdout ("out") or stderr ("err") a terminal, and returns its console."""

    def make(name, width=80, **options):
        console = Console(force_terminal=True, width=width, stderr=name == "err", **options)
        monkeypatch.setattr(output, name, console)
        return console

    return make
