"""Importing torchvision beside a CPU torch: its usual build registers operators torch lacks."""

import importlib.util


def import_torchvision():
    """Imports torchvision, where it and torch are installed, and skips what cannot register."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("torchvision")):
        return
    import torch

    real = torch.library.register_fake
    torch.library.register_fake = lambda *args, **kwargs: lambda function: function
    try:
        import torchvision  # noqa: F401
    finally:
        torch.library.register_fake = real
