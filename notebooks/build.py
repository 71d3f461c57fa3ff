"""Builds the notebooks: runs a source, NAME.py, and writes it with its outputs as NAME.ipynb.

    make notebooks                   # all of them
    make notebooks ARGS="deploy"     # one

A source is Python in the percent format, which editors run too: `# %%` begins a cell of code,
`# %% [markdown]` one of text, whose lines begin with `# `. A notebook runs in an empty folder.
"""

import argparse
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SOURCES = [path for path in sorted(FOLDER.glob("*.py")) if path != Path(__file__)]
CELL = re.compile(r"^# %%(?P<text> \[markdown\])?\n(?P<body>.*?)(?=^# %%|\Z)", re.M | re.S)
SECONDS = 900  # for a cell


def cells(source: str) -> list[tuple[str, str]]:
    """The cells of a source: "markdown" or "code", and what is in them."""
    found = []
    for cell in CELL.finditer(source):
        body = cell["body"].strip("\n")
        if cell["text"]:
            found.append(("markdown", re.sub(r"^# ?", "", body, flags=re.MULTILINE)))
        else:
            found.append(("code", body))
    return found


def unexecuted(path: Path) -> Any:
    """The notebook of a source, without outputs."""
    import nbformat

    v4 = nbformat.v4
    make = {"markdown": v4.new_markdown_cell, "code": v4.new_code_cell}
    parts = cells(path.read_text(encoding="utf-8"))
    return v4.new_notebook(
        cells=[make[kind](text, id=f"cell-{i}") for i, (kind, text) in enumerate(parts)],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )


def executed(path: Path) -> Any:
    """The notebook of a source, run from the first cell to the last.

    An error in a cell is raised. What goes to stderr is left out: it is TensorFlow's log.
    """
    import nbclient

    notebook = unexecuted(path)
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook,
            timeout=SECONDS,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": folder}},
        )
        client.execute(env={**os.environ, **environment})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    return notebook


def main() -> None:
    """Runs the sources that are named, or all, and writes their notebooks."""
    import nbformat

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    names = parser.parse_args().names
    known = {path.stem: path for path in SOURCES}
    if unknown := set(names) - known.keys():
        parser.error(f"NAME must be one of {', '.join(known)}. Received: {', '.join(unknown)}")
    for name in names or known:
        start = time.perf_counter()
        notebook = executed(known[name])
        target = FOLDER / f"{name}.ipynb"
        part = target.with_suffix(".part")
        nbformat.write(notebook, part)
        part.replace(target)
        size, seconds = target.stat().st_size / 1000, time.perf_counter() - start
        print(f"{target.name}: {size:.0f} kB, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
