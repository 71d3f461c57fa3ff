"""Models of other libraries, tiny and with every array random, and the files they would save."""

import json

import keras
import numpy as np
import pytest

# What is only about files and NumPy arrays is the same on every backend.
one_backend = pytest.mark.backend_free


def randomise(module, seed=0, scale=0.5):
    """Fills every array of a torch module, the zero-initialised ones too."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return module.eval()


def state(module):
    """A torch module's state dict as NumPy arrays."""
    return {name: value.detach().numpy().copy() for name, value in module.state_dict().items()}


def save(path, arrays, config=None, pixels=None, metadata=None):
    """A folder or file as its source would write it."""
    from safetensors.numpy import save_file

    file = path
    if config is not None:
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        if pixels is not None:
            (path / "preprocessor_config.json").write_text(json.dumps(pixels))
        file = path / "model.safetensors"
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(arrays, file, metadata or {"format": "pt"})
    return path


def images(height=24, width=None, channels=3, count=2, seed=1):
    """Random pictures, channels last."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, height, width or height, channels)).astype("float32")


def torch_logits(module, pictures):
    """What a torch module says of pictures with channels last."""
    import torch

    with torch.no_grad():
        out = module(torch.from_numpy(np.ascontiguousarray(pictures.transpose(0, 3, 1, 2))))
    if hasattr(out, "last_hidden_state"):
        pooled = getattr(out, "pooler_output", None)
        out = out.last_hidden_state[:, 0] if pooled is None else pooled
    return getattr(out, "logits", out).numpy()


def logits(model, pictures):
    """What a `ViT` says."""
    return keras.ops.convert_to_numpy(model(pictures, training=False))


def timm_vit(seed=0, **fields):
    from timm.models.vision_transformer import VisionTransformer

    arguments = {
        "img_size": 24,
        "patch_size": 8,
        "embed_dim": 20,
        "depth": 2,
        "num_heads": 5,
        "mlp_ratio": 1.4,
        "num_classes": 3,
    }
    return randomise(VisionTransformer(**{**arguments, **fields}), seed)


def torchvision_vit(seed=0, **fields):
    from torchvision.models import VisionTransformer

    arguments = {
        "image_size": 24,
        "patch_size": 8,
        "num_layers": 2,
        "num_heads": 5,
        "hidden_dim": 20,
        "mlp_dim": 28,
        "num_classes": 3,
    }
    return randomise(VisionTransformer(**{**arguments, **fields}), seed)


def huggingface_vit(kind="ViTForImageClassification", seed=0, **fields):
    import transformers

    families = ("Dinov2WithRegisters", "Dinov2", "ViTMAE", "DeiT", "ViT")
    family = next(family for family in families if kind.startswith(family))
    arguments = {
        "image_size": 24,
        "patch_size": 8,
        "hidden_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "intermediate_size": 28,
        "num_labels": 3,
        "attn_implementation": "eager",
    }
    config = getattr(transformers, f"{family}Config")(**{**arguments, **fields})
    return randomise(getattr(transformers, kind)(config), seed)


def vit_pytorch_vit(seed=0, **fields):
    from vit_pytorch import ViT

    arguments = {
        "image_size": 24,
        "patch_size": 8,
        "num_classes": 3,
        "dim": 20,
        "depth": 2,
        "heads": 5,
        "dim_head": 4,
        "mlp_dim": 28,
    }
    return randomise(ViT(**{**arguments, **fields}), seed)


def assert_same_file(path, arrays):
    """The file holds these arrays under these names, bit for bit."""
    from safetensors.numpy import load_file

    found = load_file(path)
    assert set(found) == set(arrays)
    different = [name for name in arrays if not np.array_equal(found[name], arrays[name])]
    assert not different
