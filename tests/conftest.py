"""What every test needs: a known seed, and a torchvision that imports beside a CPU torch."""

import importlib.util
import os

if os.environ.get("KERAS_BACKEND") == "jax":
    # A tiny model is compiled for longer than it runs: a quarter of the time of these tests.
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    )

import keras
import pytest


def pytest_configure():
    """Imports torchvision, whose usual build registers operators that a CPU torch does not have."""
    if importlib.util.find_spec("torch") and importlib.util.find_spec("torchvision"):
        import torch

        real = torch.library.register_fake
        torch.library.register_fake = lambda *args, **kwargs: lambda function: function
        try:
            import torchvision  # noqa: F401
        finally:
            torch.library.register_fake = real


@pytest.fixture(autouse=True)
def _seed():
    keras.utils.set_random_seed(0)
