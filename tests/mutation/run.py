"""Breaks one place of a module at a time, runs the module's tests, and reports what they miss.

`make mutants` tries ten places of each module below; `make mutants ARGS="atomic --places 50"` fifty
of one. A mutant that no test notices is a survivor: its line is printed, before and after. Which
places are tried follows from the seed and the text of the module.

Each mutant runs in a fork of this process, which has imported Keras but not the package: importing
is what takes the time.
"""

import argparse
import ast
import copy
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from importlib import abc, machinery, util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = (  # on which the promises of README and docs/reliability.md stand
    *("atomic", "config", "image_bounds", "preprocessing", "resample"),
    *("export/accuracy", "export/smoothing", "export/verify"),
    *("layers/attention", "layers/rotary", "runtime/onnx", "runtime/tflite"),
    *("serve/batching", "serve/models", "serve/tensors", "train/augment/mixing"),
    *("train/checkpoint/files", "train/optim/muon", "weights/files/arrays", "weights/save"),
)
BESIDE = {"preprocessing": ["tests/test_pixel_range.py"]}
"""Files of tests of a module that have another name."""
SECONDS = 120.0
"""After which a mutant that does not end counts as noticed."""
SWAPPED = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.MatMult: ast.Mult},
}


def main(argv: list[str]) -> int:
    """Try the modules one after another; return 1 if the tests of one fail as they are."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("modules", nargs="*", default=MODULES, help="such as export/verify")
    parser.add_argument("--places", type=int, default=10, help="tried of each module (10)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    os.chdir(ROOT)
    import keras  # noqa: F401
    import pytest  # noqa: F401

    noticed = tried = 0
    for name in options.modules:
        file = Path("keras_vit", f"{name}.py")
        tests = Path("tests", name).with_name(f"test_{Path(name).name}.py")
        if not file.is_file() or not tests.is_file():
            parser.error(f"modules must have a file and tests of that name. Received: {name}")
        tests = [str(tests), *BESIDE.get(name, [])]
        source = file.read_text(encoding="utf-8")
        if not passes(file, source, tests):
            print(f"{name}: its tests fail as it is")
            return 1
        found = places(ast.parse(source))
        chosen = random.Random(f"{options.seed} {name}").sample(
            found, min(options.places, len(found))
        )
        survivors = []
        for place in sorted(chosen):
            mutant, line = mutated(ast.parse(source), place)
            if passes(file, mutant, tests):
                survivors.append(f"  {file}:{line}")
        noticed, tried = noticed + len(chosen) - len(survivors), tried + len(chosen)
        print(f"{name:<24} {len(chosen) - len(survivors):>3} of {len(chosen)} noticed", flush=True)
        print("".join(f"{line}\n" for line in survivors), end="", flush=True)
    print(f"{noticed} of {tried} noticed, {noticed / max(tried, 1):.0%}")
    return 0


# -- mutants


def places(tree: ast.Module) -> list[tuple[int, int]]:
    """Where something can be changed: the number of the node and of its change."""
    return [
        (number, change)
        for number, node in enumerate(_nodes(tree))
        for change in range(len(list(_changes(node))))
    ]


def mutated(tree: ast.Module, place: tuple[int, int]) -> tuple[str, str]:
    """The text of a mutant, and the line that was changed, before and after."""
    node = list(_nodes(tree))[place[0]]
    before = ast.unparse(node).split("\n")[0]
    new = list(_changes(node))[place[1]]
    line = getattr(node, "lineno", 0)
    node.__class__, node.__dict__ = new.__class__, new.__dict__
    ast.fix_missing_locations(tree)
    return ast.unparse(tree), f"{line}: {before}  ->  {ast.unparse(new).split(chr(10))[0]}"


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are run, without annotations, docstrings, and the texts of errors."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params", "exc"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Import):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            yield child
            yield from _nodes(child)


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Each way to change a node."""
    changed = copy.copy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        changed.ops = [SWAPPED[type(node.ops[0])](), *node.ops[1:]]
        yield changed
    elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in SWAPPED:
        changed.op = SWAPPED[type(node.op)]()
        yield changed
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        changed.test = ast.UnaryOp(ast.Not(), node.test)
        yield changed
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield ast.Constant(value)
    elif isinstance(node, ast.Raise) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield ast.Pass()
    elif isinstance(node, ast.Return) and node.value is not None:
        yield ast.Return(ast.Constant(None))


# -- running


class Replaced(abc.MetaPathFinder, abc.Loader):
    """Imports one module from another text."""

    def __init__(self, file: Path, source: str):
        self.file, self.source = file, source
        self.name = ".".join(file.with_suffix("").parts)

    def find_spec(self, fullname, path, target=None):
        if fullname != self.name:
            return None
        return util.spec_from_loader(fullname, self, origin=str(ROOT / self.file))

    def create_module(self, spec: machinery.ModuleSpec):
        return None

    def exec_module(self, module) -> None:
        module.__file__ = str(ROOT / self.file)
        exec(compile(self.source, module.__file__, "exec"), module.__dict__)


def passes(file: Path, source: str, tests: list[str]) -> bool:
    """Whether the tests pass when a module has this text."""
    child = os.fork()
    if not child:
        _test(file, source, tests)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _test(file: Path, source: str, tests: list[str]) -> None:
    """Runs the tests, and ends the process: with 0 if all passed."""
    import pytest

    code = 1
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        sys.meta_path.insert(0, Replaced(file, source))
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests])
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
