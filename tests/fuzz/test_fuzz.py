"""The short form of `make fuzz`: the first inputs of every target, in this process.

Time and memory are not measured here, only the errors: a busy machine must not fail a test.
"""

import importlib.util
from pathlib import Path

import pytest
import server
from targets import READ, REFUSED, TARGETS, Target, make_input, outcome, place

# Another run.py is imported by its name.
spec = importlib.util.spec_from_file_location("fuzz_run", Path(__file__).with_name("run.py"))
run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run)

pytestmark = pytest.mark.backend_free
# By target; the others need a second an input, or engines that take seconds to import.
INPUTS = {"pictures": 120, "configs": 80, "runs": 40, "weights": 60, "requests": 60}


@pytest.mark.parametrize("name", INPUTS)
def test_damaged_files_are_read_or_refused_with_their_name(name, tmp_path, caplog):
    target = TARGETS[name]
    made = target.seeds()
    outcomes = set()
    for number in range(INPUTS[name]):
        _, files = make_input(target, made, name, number)
        folder = tmp_path / str(number)
        place(files, folder)
        found = outcome(target, folder)
        assert found in (READ, REFUSED), f"make fuzz ARGS='{name} --first {number}'"
        outcomes.add(found)
    assert outcomes == {READ, REFUSED}  # the damage is neither too small nor too large


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("config"), "KeyError: 'config'"),
        (ValueError("no name"), "the file is not named: ValueError: no name"),
        (UnicodeError("{folder}"), "the file is not named"),
    ],
)
def test_other_errors_break_the_property(tmp_path, error, said):
    """Negative control."""

    def read(folder):
        raise error

    target = Target(list, read, {})
    assert outcome(target, tmp_path).startswith(said)
    error = FileNotFoundError(2, "is missing", str(tmp_path / "x"))
    assert outcome(target, tmp_path) == REFUSED


def test_seeds_that_cannot_be_read_are_reported(tmp_path, monkeypatch, capsys):
    script = tmp_path / "run.py"
    script.write_text('print(\'{"at": "seeds"}\')\nraise SystemExit(3)\n')
    monkeypatch.setattr(run, "__file__", str(script))
    assert run.main(["presets", "--keep", str(tmp_path)]) == 1
    assert "the seeds cannot be read: exit code 3" in capsys.readouterr().out


JSON = "application/json"


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ((200, b"{}", JSON), READ),
        ((400, b'{"error": "x must be y"}', JSON), REFUSED),
        ((0, b"", None), REFUSED),
        ((500, b"", "text/plain"), "AssertionError: 500"),
        ((400, b'{"error": ""}', JSON), "AssertionError: 400 without a reason"),
    ],
)
def test_an_answer_of_the_server_is_judged(tmp_path, monkeypatch, answer, found):
    (tmp_path / server.FILE).write_bytes(b"")
    monkeypatch.setattr(server, "_answer", lambda request: answer)
    assert outcome(TARGETS["requests"], tmp_path).startswith(found)
