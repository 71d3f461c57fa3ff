"""Tiny random models, other libraries' and ours, the files they save, and how they are compared."""

import inspect
import json

import keras
import numpy as np

import keras_vit

TINY = {
    "image_size": 24,
    "patch_size": 8,
    "width": 20,
    "num_heads": 5,
    "mlp_dim": 28,
    "depth": 2,
    "num_classes": 3,
}

# What is only about files and NumPy arrays is the same on every backend.


def randomize(module, seed=0, scale=0.5):
    """Fills every array of a torch module, those initialized with zeros too."""
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


def bare(folder, arrays, name="vit.safetensors"):
    """A file without any JSON beside it."""
    return save(folder / name, arrays)


def images(height=24, width=None, channels=3, count=2, seed=1):
    """Random images, channels last."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, height, width or height, channels)).astype("float32")


def torch_output(function, batch, **arguments):
    """What a torch function returns for images with channels last."""
    import torch

    with torch.no_grad():
        return function(
            torch.from_numpy(np.ascontiguousarray(batch.transpose(0, 3, 1, 2))), **arguments
        )


def torch_logits(module, batch, **arguments):
    """The logits of a torch module, or its class token after pooling if it has no head."""
    out = torch_output(module, batch, **arguments)
    if hasattr(out, "last_hidden_state"):
        pooled = getattr(out, "pooler_output", None)
        out = out.last_hidden_state[:, 0] if pooled is None else pooled
    return getattr(out, "logits", out).numpy()


def flat_patches(batch, patch):
    """The patches of images as transformers flattens them for SigLIP 2."""
    import torch
    from transformers.models.siglip2.image_processing_siglip2 import convert_image_to_patches

    pictures = torch.from_numpy(np.ascontiguousarray(batch.transpose(0, 3, 1, 2)))
    return torch.stack([convert_image_to_patches(picture, patch) for picture in pictures])


def flat_output(source, patch=8):
    """From images to what a SigLIP 2 of transformers returns: logits, or what attention pools.

    It takes flat patches and the grid of each image.
    """

    def run(batch):
        import torch

        function = getattr(source, "get_image_features", source)
        flat = flat_patches(batch, patch)
        grid = [[side // patch for side in batch.shape[1:3]]] * len(batch)
        with torch.no_grad():
            out = function(
                pixel_values=flat,
                pixel_attention_mask=torch.ones(flat.shape[:2], dtype=torch.int32),
                spatial_shapes=torch.tensor(grid),
            )
        return (out.logits if hasattr(out, "logits") else out.pooler_output).numpy()

    return run


def logits(model, batch):
    """The logits of a `ViT`."""
    return keras.ops.convert_to_numpy(model(batch, training=False))


def assert_same_logits(path, source, wrong=None, **fields):
    """Loads a file, and compares the model with its source: a torch module, or its function.

    With `wrong`, another way to load the file, which must give other logits. Returns the model.
    """
    model = keras_vit.from_pretrained(path, **fields)
    batch = images(*model.config.input_shape)
    expected = source(batch) if inspect.isfunction(source) else torch_logits(source, batch)
    np.testing.assert_allclose(logits(model, batch), expected, atol=1e-5)
    if wrong is not None:
        other = keras_vit.from_pretrained(path, **{**fields, **wrong})
        assert np.abs(logits(other, batch) - expected).max() > 1e-3
    return model


def outcome(path, source, **fields):
    """ "exact", "refused", or by how much of the largest logit a loaded model is wrong.

    `source` is the other library's function from images to logits.
    """
    try:
        model = keras_vit.from_pretrained(path, **fields)
    except ValueError:
        return "refused"
    batch = images(*model.config.input_shape, count=1)
    try:
        expected = source(batch)
    except (RuntimeError, ValueError) as error:
        return f"loaded, but its own code raises {error}"
    found = logits(model, batch)
    if expected.shape != found.shape:
        return f"{found.shape} instead of {expected.shape}"
    error = float(np.abs(expected - found).max() / np.abs(expected).max())
    return "exact" if error < 1e-4 else f"wrong by {error:.1e}"


def random_vit(**fields):
    """A tiny `ViT` with every array random."""
    model = keras_vit.ViT(keras_vit.ViTConfig.from_dict({**TINY, **fields}))
    rng = np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(rng.standard_normal(weight.shape) * 0.3)
    return model


def tiny_arguments(names, fields):
    """`TINY` in another library's words, which are in TINY's order."""
    return dict(zip(names.split(), TINY.values(), strict=True)) | fields


def timm_vit(seed=0, **fields):
    from timm.models.vision_transformer import VisionTransformer

    words = "img_size patch_size embed_dim num_heads mlp_ratio depth num_classes"
    return randomize(VisionTransformer(**tiny_arguments(words, {"mlp_ratio": 1.4} | fields)), seed)


def timm_hybrid(depths=(2, 1), patch_size=1, seed=0, **fields):
    """timm's hybrid as its functions build it, with a ResNet of these depths."""
    import functools

    from timm.layers import HybridEmbed
    from timm.models.vision_transformer import VisionTransformer
    from timm.models.vision_transformer_hybrid import _resnetv2

    words = "img_size patch_size embed_dim num_heads mlp_ratio depth num_classes"
    arguments = tiny_arguments(words, {"mlp_ratio": 1.4, "patch_size": patch_size} | fields)
    backbone = _resnetv2(depths, in_chans=fields.get("in_chans", 3))
    embed = functools.partial(HybridEmbed, backbone=backbone)
    return randomize(VisionTransformer(**arguments, embed_layer=embed), seed)


def torchvision_vit(seed=0, **fields):
    from torchvision.models import VisionTransformer

    words = "image_size patch_size hidden_dim num_heads mlp_dim num_layers num_classes"
    return randomize(VisionTransformer(**tiny_arguments(words, fields)), seed)


def huggingface_vit(kind="ViTForImageClassification", seed=0, **fields):
    import transformers

    # Of images and text.
    pairs = ("CLIP", "MetaClip2", "ChineseCLIP", "AltCLIP", "Siglip2", "Siglip", "Aimv2")
    families = (*pairs, "Dinov2WithRegisters", "Dinov2", "IJepa", "ViTMAE", "DeiT", "ViT")
    family = next(family for family in families if kind.startswith(family))
    words = (
        "image_size patch_size hidden_size num_attention_heads intermediate_size num_hidden_layers"
        " num_labels"
    )
    arguments = tiny_arguments(words, {"attn_implementation": "eager"} | fields)
    if family == "Siglip2":
        arguments["num_patches"] = (arguments.pop("image_size") // arguments["patch_size"]) ** 2
    if family in pairs:
        towers = {k: arguments.pop(k) for k in ("num_labels", "attn_implementation")}
        config = getattr(transformers, f"{family}VisionConfig")(**arguments)
        if not kind.startswith(f"{family}VisionModel"):
            sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
            text = {k: arguments[k] for k in sizes} | {"vocab_size": 9}
            siglip = family.startswith("Siglip")
            if not siglip:
                text |= {"projection_dim": 6}
            config = getattr(transformers, f"{family}Config")(
                text_config=text,
                vision_config=arguments,
                num_labels=towers["num_labels"],
                **({} if siglip else {"projection_dim": 6}),
            )
        return randomize(getattr(transformers, kind)(config), seed)
    config = getattr(transformers, f"{family}Config")(**arguments)
    return randomize(getattr(transformers, kind)(config), seed)


def vit_pytorch_vit(seed=0, **fields):
    from vit_pytorch import ViT

    words = "image_size patch_size dim heads mlp_dim depth num_classes"
    return randomize(ViT(**tiny_arguments(words, {"dim_head": 4} | fields)), seed)


def assert_same_file(path, arrays):
    """The file holds these arrays under these names, bit for bit."""
    from safetensors.numpy import load_file

    found = load_file(path)
    assert set(found) == set(arrays)
    different = [name for name in arrays if not np.array_equal(found[name], arrays[name])]
    assert not different
