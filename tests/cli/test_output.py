"""The command's output: names that look like markup, and errors on one line."""

import io

import pytest
from rich.table import Table

from keras_vit_cli import output

pytestmark = pytest.mark.backend_free


def test_tables_do_not_interpret_names_as_markup(terminal):
    console = terminal("out", 200, file=io.StringIO())
    output.print_facts([("file", "a [fish]/1"), ("size", "[/b]")])
    table = Table()
    output.add_score(table, "tench [fish]", "b [/c]", score=0.5)
    console.print(table)
    text = console.file.getvalue()
    assert all(name in text for name in ("a [fish]/1", "[/b]", "tench [fish]", "b [/c]", "0.5000"))


def test_error_with_a_list_is_one_line(capsys):
    output.print_error("a and b must be those of c. Received others:\n  a: 1\n  b: [/x] \x1b[2J")
    line = "keras-vit: error: a and b must be those of c. Received others: a: 1; b: [/x] "
    assert capsys.readouterr().err == line + "\\x1b[2J\n"
