"""The mutants of `make mutants`: what is changed, and what is left alone."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.backend_free
# Another run.py is imported by its name.
spec = importlib.util.spec_from_file_location("mutation_run", Path(__file__).with_name("run.py"))
run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run)

SOURCE = """"Doc."
def f(a: int, b=3):
    "Doc."
    if not a < b:
        raise ValueError(f"{a + 1}")
    return a * 2
"""


def test_each_mutant_differs_in_one_place():
    plain = ast.unparse(ast.parse(SOURCE))
    found = {}
    for place in run.places(ast.parse(SOURCE)):
        text, line = run.mutated(ast.parse(SOURCE), place)
        lines = zip(text.split("\n"), plain.split("\n"), strict=True)
        (changed,) = (new for new, old in lines if new != old)
        found[line] = changed.strip()
    assert list(found.values()) == [
        "def f(a: int, b=4):",
        "if not not a < b:",
        "if a < b:",
        "if not a <= b:",
        "pass",
        "return None",
        "return a + 2",
        "return a * 3",
    ]
    assert "4: not a < b  ->  a < b" in found


def test_every_module_has_tests_of_its_name():
    assert len(run.MODULES) == 20 == len(set(run.MODULES))
    for name in run.MODULES:
        module = Path(name)
        assert Path(run.ROOT, "keras_vit", module.parent, f"{module.name}.py").is_file()
        assert Path(run.ROOT, "tests", module.parent, f"test_{module.name}.py").is_file()


@pytest.mark.slow
def test_a_module_is_tried():
    command = [sys.executable, run.__file__, "image_bounds", "--places", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "of 3 noticed" in done.stdout
