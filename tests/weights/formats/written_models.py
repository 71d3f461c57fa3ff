"""What the libraries themselves compute with the files that `save_pretrained` wrote."""

import json
from collections.abc import Callable
from pathlib import Path

import flax_reference as flax
import numpy as np
import weights_sources as sources


def logits(format: str, path: Path, config) -> Callable[[np.ndarray], np.ndarray]:
    """The library's function from images to logits or features. It must load the file strictly."""
    if format in ("google", "big_vision"):
        with np.load(path) as file:
            params = dict(file)
        return lambda batch: getattr(flax, format)(params, batch)
    module = {
        "timm": _timm,
        "beit": _timm,
        "torchvision": _torchvision,
        "vit_pytorch": _vit_pytorch,
    }.get(format, _transformers)(path, config)
    function = module if callable(module) else module.eval()
    return lambda batch: _features(function, config, batch)


def _features(module, config, batch):
    out = sources.torch_output(module.eval(), batch)
    if not hasattr(out, "last_hidden_state"):
        return getattr(out, "logits", out).numpy()
    if config.representation_size or config.attention_pooling:
        return out.pooler_output.numpy()
    tokens = out.last_hidden_state.numpy()
    return tokens.mean(1) if config.pooling == "mean" else tokens[:, 0]


def _timm(folder, config):
    import timm

    module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    sources.assert_same_file(folder / "model.safetensors", sources.state(module))
    return module


def _transformers(folder, config):
    import transformers

    stated = json.loads((folder / "config.json").read_text())
    (name,) = stated["architectures"]
    # AutoModel has a pooler even where the checkpoint has none.
    without = name in ("ViTModel", "DeiTModel") and config.representation_size is None
    options = {"add_pooling_layer": False} if without else {}
    named = getattr(transformers, name)
    auto = transformers.AutoModelForImageClassification if config.num_classes else named
    loader = named if "WithTeacher" in name else auto
    module, info = loader.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    assert type(module) is named
    return module


def _torchvision(path, config):
    from torchvision.models import VisionTransformer

    return _filled(
        VisionTransformer(
            config.image_size[0],
            config.patch_size[0],
            config.depth,
            config.num_heads,
            config.width,
            config.mlp_dim,
            num_classes=config.num_classes,
            representation_size=config.representation_size,
        ),
        path,
    )


def _vit_pytorch(path, config):
    from vit_pytorch import ViT

    return _filled(
        ViT(
            image_size=config.image_size,
            patch_size=config.patch_size,
            num_classes=config.num_classes,
            dim=config.width,
            depth=config.depth,
            heads=config.num_heads,
            mlp_dim=config.mlp_dim,
            pool="cls" if config.class_token else "mean",
            channels=config.in_channels,
            dim_head=config.key_dim,
        ),
        path,
    )


def _filled(module, path):
    from safetensors.torch import load_file

    module.load_state_dict(load_file(path), strict=True)
    return module
