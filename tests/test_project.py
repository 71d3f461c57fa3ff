"""The shape of the project: its imports, what an import loads, and what the source never does."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest

pytestmark = pytest.mark.backend_free

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "keras_vit"
FILES = sorted(PACKAGE.rglob("*.py"))
COMMAND = sorted((ROOT / "keras_vit_cli").rglob("*.py"))
PROGRAMS = sorted((ROOT / "training").rglob("*.py"))

# Part of the package: the parts of the package it may import.
ARROWS = {
    "paths": set(),
    "atomic": {"paths"},
    "deferred": set(),
    "resample": set(),
    "config_rules": {"resample"},
    "config_docs": set(),
    "config_names": {"config_rules"},
    "config_merging": {"config_rules"},
    "config_stem": {"config_rules"},
    "config": {"config_docs", "config_merging", "config_names", "config_rules", "config_stem"},
    "layers": {"layers"},
    "attention_positions": {"config"},
    "model": {"attention_positions", "config", "deferred", "layers", "resample"},
    "model_weights": {"config", "deferred", "layers", "model"},
    "variants": {"config", "config_docs", "config_names", "model", "weights"},
    "preprocessing": {"config"},
    "probabilities": {"config"},
    "classifier": {"config", "images", "model", "paths", "preprocessing", "probabilities"},
    "weights": {
        *("atomic", "classifier", "config", "config_names", "config_rules", "deferred", "model"),
        *("model_weights", "paths", "preprocessing", "resample", "variants", "weights"),
    },
    "runtime": {
        *("classifier", "config", "config_rules", "model", "paths", "preprocessing"),
        *("probabilities", "runtime", "weights"),
    },
    "export": {
        *(
            "atomic",
            "classifier",
            "config",
            "export",
            "model",
            "model_weights",
            "paths",
            "preprocessing",
            "probabilities",
        ),
        "runtime",
    },
    "image_bounds": set(),
    "pillow_warnings": set(),
    "images": {"image_bounds", "pillow_warnings", "preprocessing"},
    "lock": set(),
    "bulk": {
        *("atomic", "bulk", "classifier", "images", "lock", "model", "paths"),
        *("pillow_warnings", "preprocessing", "runtime"),
    },
    "benchmark": {"benchmark", "export", "model", "preprocessing", "runtime"},
    "explain": {
        *("atomic", "classifier", "config", "explain", "images", "model", "paths"),
        *("preprocessing", "probabilities"),
    },
    "serve": {
        *("classifier", "config", "explain", "export", "images", "model", "model_weights"),
        *("preprocessing", "runtime", "serve"),
    },
}
# `train` may import all of the package but the command. Its rooms, and the rooms they may import:
TRAIN_ARROWS = {
    "recipe": {"objectives", "recipe_section"},
    "recipe_files": {"recipe"},
    "folder_recipe": {"recipe"},
    "distribution": {"distribution"},
    "optim": {"distribution", "optim", "recipe"},
    "augment": {"augment", "data", "recipe"},  # of data, only the decoding of images
    "data": {"augment", "data", "recipe"},
    "checkpoint": {"checkpoint", "distribution"},
    "build": {"distribution", "objectives", "optim", "recipe", "recomputation"},
    "recomputation": set(),
    "few_shot": {"distribution"},
    "knn": {"few_shot"},
    "run": {
        *("build", "checkpoint", "data", "distribution", "few_shot", "folder_recipe", "knn"),
        *("recipe", "run"),
    },
}
BACKENDS = {"tensorflow", "jax", "torch"}
BACKEND_FILES = (
    *("export/", "runtime/", "explain/gradients.py", "train/"),
    *("layers/attention_blocks.py", "layers/group_norm.py"),  # what Keras has no operation for
)
# These belong to one backend and are imported only with it.
OF_ONE_BACKEND = ("train/augment/", "train/data/", *(f"train/distribution/{b}" for b in BACKENDS))
HEAVY = (
    "pyarrow",
    "ray",
    "matplotlib",
    "tensorflow_datasets",
    "huggingface_hub",
    "typer",
    "PIL",
    "safetensors",
)


def imports(path):
    """Every module that a file imports, and whether the import is inside a function."""
    tree = _without_types(ast.parse(path.read_text()))
    inside = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in inside
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            module = node.module or ""
            if module in ("keras_vit", "keras_vit.train"):
                for alias in node.names:
                    yield f"{module}.{alias.name}", id(node) in inside
            else:
                yield module, id(node) in inside


def _without_types(tree):
    """The tree without what only type checkers import."""
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return tree


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_arrows(path):
    name = str(path.relative_to(PACKAGE))
    part = name.removesuffix(".py").split("/")[0]
    for module, in_function in imports(path):
        top, _, rest = module.partition(".")
        outside = ("keras_vit_cli", "training", "tests", "benchmarks")
        assert top not in outside, f"{name} imports {module}"
        if top in BACKENDS:
            allowed = name.startswith(BACKEND_FILES) and in_function
            assert allowed or name.startswith(OF_ONE_BACKEND), f"{name} imports {module}"
        if top == "keras_vit" and part in ARROWS:
            target = rest.split(".")[0]
            assert target in ARROWS[part], f"{name} imports {module}"
        if name.startswith("train/") and rest.startswith("train."):
            room, target = name.removesuffix(".py").split("/")[1], rest.split(".")[1]
            if room in TRAIN_ARROWS:
                assert target in TRAIN_ARROWS[room], f"{name} imports {module}"


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: str(p.relative_to(ROOT)))
def test_programs_import_the_package_and_no_backend(path):
    for module, in_function in imports(path):
        top = module.partition(".")[0]
        assert top not in ("training", "tests", "benchmarks", *BACKENDS), f"{path} imports {module}"
        # `--help` must answer at once; the demo needs Keras in any case.
        if path.name in ("train.py", "evaluate.py") and top in ("keras", "keras_vit"):
            assert in_function, f"{path} imports {module}"


@pytest.mark.parametrize("path", COMMAND, ids=lambda p: p.name)
def test_command_imports_the_library_in_functions(path):
    tree = _without_types(ast.parse(path.read_text()))
    typing = [node for node in tree.body if isinstance(node, ast.If)]
    only_types = {
        child.module
        for node in typing
        for child in ast.walk(node)
        if isinstance(child, ast.ImportFrom)
    }
    for module, in_function in imports(path):
        top = module.partition(".")[0]
        assert top not in ("training", "tests", "benchmarks"), f"{path.name} imports {module}"
        if top in {"keras", "keras_vit", *BACKENDS}:
            assert in_function or module in only_types, f"{path.name} imports {module} at its top"


# Modules that Keras itself imports do not count.
STEPS = """
import json, sys, keras
seen, said = set(sys.modules), {}
def note(name):
    said[name] = sorted(set(sys.modules) - seen)
    seen.update(sys.modules)
import keras_vit
note("package")
said["bound"], said["listed"] = sorted(vars(keras_vit)), dir(keras_vit)
import keras_vit.train as t, keras_vit.train.run.callbacks
t.Checkpoint, t.scope, t.Muon, t.make_optimizer, t.build_model, t.load_recipe("digits")
note("train")
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def imported():
    """The modules that each import adds to Keras'. On JAX, Keras imports no other backend."""
    backend = "jax" if importlib.util.find_spec("jax") else keras.backend.backend()
    environment = {**os.environ, "KERAS_BACKEND": backend}
    done = subprocess.run(
        [sys.executable, "-c", STEPS], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_import_brings_nothing_heavy(imported):
    assert "keras_vit.model" in imported["package"]
    assert not set(imported["package"]) & set(HEAVY)


def test_training_library_imports_no_backend(imported):
    """Code that does not need tf.data works on JAX and torch without TensorFlow."""
    assert "keras_vit.train.optim.muon" in imported["train"]
    assert not set(imported["train"]) & BACKENDS


def test_lazy_names_are_listed_before_they_are_used(imported):
    assert "export_onnx" not in imported["bound"]
    assert {"export_onnx", "from_pretrained", "explain"} <= set(imported["listed"])


@pytest.mark.parametrize("name", ["keras_vit", "keras_vit.train", "keras_vit.explain"])
def test_public_names_exist(name):
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    assert set(module.__all__) <= set(dir(module))
    for public in module.__all__:
        assert getattr(module, public).__doc__, public
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018
    everything: dict = {}
    exec(f"from {name} import *", everything)
    assert set(module.__all__) <= everything.keys()


def test_version_agrees_with_the_distribution():
    import keras_vit

    declared = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert declared and declared[1] == keras_vit.__version__


def test_source_never_executes_data():
    patterns = (
        r"\bLambda\(",
        r"^\s*(import|from) pickle",
        r"\b(eval|exec)\(",
        r"allow_pickle\s*=\s*True",
        r"safe_mode\s*=\s*False",
        r"skip_mismatch\s*=\s*True",
        r"shell\s*=\s*True",
        r"except Exception:\s*pass",
        r"^\s*assert ",
    )
    for path in [*FILES, *COMMAND, *(ROOT / "training").rglob("*.py")]:
        text = path.read_text()
        for pattern in patterns:
            assert not re.search(pattern, text, re.M), f"{path.name}: {pattern}"


def test_files_are_short():
    for folder in ("keras_vit", "keras_vit_cli", "training", "benchmarks", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            assert path.read_text().count("\n") <= 500, path
