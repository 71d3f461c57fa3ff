"""The libraries whose models are compared with ours."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _torchvision(torchvision):
    """timm, transformers and vit-pytorch import torchvision."""
