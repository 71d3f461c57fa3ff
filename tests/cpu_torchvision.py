"""Imports torchvision with a CPU build of torch, which lacks operators that it registers."""

import importlib.util


def import_torchvision():
    """Imports torchvision, if installed with torch, without the operators that torch lacks."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("torchvision")):
        return
    import torch

    real = torch.library.register_fake
    torch.library.register_fake = lambda *args, **kwargs: lambda function: function
    try:
        import torchvision  # noqa: F401
    finally:
        torch.library.register_fake = real
