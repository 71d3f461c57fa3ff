"""What every test needs: a known seed, and the backends that it is about."""

import os

if os.environ.get("KERAS_BACKEND") == "jax":
    # A tiny model is compiled for longer than it runs: a quarter of the time of these tests.
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    )

import keras
import pytest
from cpu_torchvision import import_torchvision


def pytest_collection_modifyitems(config, items):
    """Deselects the tests of other backends, and those that run.py has run on its first one."""
    kept, left_out = [], []
    for item in items:
        free = item.get_closest_marker("backend_free")
        only = item.get_closest_marker("only_on")
        run = (only is None or keras.backend.backend() in only.args) and (
            free is None or "SKIP_BACKEND_FREE" not in os.environ
        )
        (kept if run else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@pytest.fixture(scope="session")
def torchvision():
    """Imports torchvision; for tests that import timm or transformers, before they do."""
    import_torchvision()


@pytest.fixture(autouse=True)
def _seed():
    keras.utils.set_random_seed(0)
