"""What the tests of the command share: calling it, and a tiny model to call it with."""

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


@pytest.fixture
def terminal(monkeypatch):
    """Makes stdout ("out") or stderr ("err") a terminal, and returns its console."""

    def make(name, width=80, **options):
        console = Console(force_terminal=True, width=width, stderr=name == "err", **options)
        monkeypatch.setattr(output, name, console)
        return console

    return make
