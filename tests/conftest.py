"""What every test needs: a known seed, and a torchvision that imports beside a CPU torch."""

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


def pytest_configure():
    """Imports torchvision before timm and transformers do."""
    import_torchvision()


@pytest.fixture(autouse=True)
def _seed():
    keras.utils.set_random_seed(0)
