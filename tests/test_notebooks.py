"""The notebooks: they are their sources, run; the slow test runs them again."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
LEAST = {  # accuracies in percent that a notebook prints, in order
    "deploy": [85, 85, 85, 85],
    "explain": [80],
    "fine_tune": [0, 60, 60, 60],
    "train": [80],
    "without_labels": [0, 55],
}

spec = importlib.util.spec_from_file_location("build", FOLDER / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


def sources_of(notebook):
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


def printed(notebook):
    """The text that all cells of a notebook print."""
    outputs = [out for cell in notebook["cells"] for out in cell.get("outputs", [])]
    return "".join("".join(out.get("text", "")) for out in outputs)


def accuracies(notebook):
    return [float(found) for found in re.findall(r"accuracy +([\d.]+)%", printed(notebook))]


def enough(name, notebook):
    found = accuracies(notebook)
    assert len(found) == len(LEAST[name]), found
    assert all(a >= b for a, b in zip(found, LEAST[name], strict=True)), found
    if name == "without_labels":
        assert found[1] > found[0] + 5
    if name == "fine_tune":
        assert min(found[1:]) > found[0]


@pytest.mark.backend_free
@pytest.mark.parametrize("name", LEAST)
def test_stored_notebook_is_its_source_with_outputs(name):
    file = FOLDER / f"{name}.ipynb"
    notebook = json.loads(file.read_text(encoding="utf-8"))
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert sources_of(notebook) == build.cells(source)
    assert sources_of(notebook) != build.cells(source.replace("keras", "torch"))
    assert file.stat().st_size < 400_000
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    outputs = [out for cell in code for out in cell["outputs"]]
    assert {out["output_type"] for out in outputs} <= {"display_data", "execute_result", "stream"}
    assert any("image/png" in out.get("data", {}) for out in outputs)
    assert not re.search(r"/(?:tmp|home|root|work)/| at 0x", json.dumps(outputs))
    enough(name, notebook)


@pytest.mark.backend_free
def test_every_source_has_a_notebook_and_a_line():
    assert [path.stem for path in build.SOURCES] == sorted(LEAST)
    page = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\(\.\./notebooks/(\w+)\.ipynb\)", page)
    assert sorted(linked) == sorted(LEAST)


@pytest.mark.backend_free
def test_wrong_cell_is_an_error(tmp_path):
    client = pytest.importorskip("nbclient")
    source = tmp_path / "wrong.py"
    source.write_text("# %% [markdown]\n# # Title\n#\n# text\n\n# %%\n1 / 0\n")
    assert build.cells(source.read_text()) == [("markdown", "# Title\n\ntext"), ("code", "1 / 0")]
    with pytest.raises(client.exceptions.CellExecutionError, match="ZeroDivisionError"):
        build.executed(source)


@pytest.mark.slow
@pytest.mark.only_on("tensorflow")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LEAST)
def test_notebook_runs(name):
    pytest.importorskip("nbclient")
    enough(name, build.executed(FOLDER / f"{name}.py"))
