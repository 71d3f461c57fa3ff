"""Errors of the library speak of the command's options."""

import pytest
import typer

from keras_vit_cli import wording
from keras_vit_cli.main import app

pytestmark = pytest.mark.backend_free
COMMANDS = typer.main.get_command(app).commands


def test_options_have_the_names_that_are_typed():
    options = wording.options_of(COMMANDS["export"])
    assert options["overwrite"] == "--overwrite" and options["place"] == "--out"
    assert "source" not in options  # an argument, not an option


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("top_k must be 1. Received: top_k=0", "--top-k must be 1. Received: --top-k 0"),
        ("x must not exist, or overwrite be True.", "x must not exist, or --overwrite be given."),
        ("config.top_k must be 1: top_k=3", "config.top_k must be 1: top_k=3"),
    ],
)
def test_arguments_are_said_as_options(text, spoken):
    assert wording.in_options(text, {"top_k": "--top-k", "overwrite": "--overwrite"}) == spoken


def test_command_says_its_option(call, tmp_path):
    code, _, err = call("train", "--recipe", "digits", "--workdir", tmp_path, "--devices", "seven")
    assert code == 1 and err.startswith("keras-vit: error: --devices must")
