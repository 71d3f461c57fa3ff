"""The libraries whose models are compared with ours, on one backend in every case."""

import pytest


def pytest_itemcollected(item):
    """What a format names and reads is NumPy, and test_reference.py runs every kind everywhere.

    A test's own marker comes before this one: three libraries' logits are compared everywhere.
    """
    item.add_marker(pytest.mark.sampled(cases=0))


@pytest.fixture(scope="session", autouse=True)
def _torchvision(torchvision):
    """timm, transformers and vit-pytorch import torchvision."""
