"""The models that are compared, all of one config, each named after the package it comes from.

A contender becomes a function that does one forward pass or one training step, from the same NumPy
arrays to NumPy, the way its own users run it. Packages are imported where they are needed: the
parent of the benchmark reads the names without loading a backend.
"""

from benchmarks import machine

KERAS = ("keras_vit", "keras_hub")
TORCH = ("timm", "torchvision", "transformers", "vit_pytorch")
XLA = "+xla"
ADAMW = {"weight_decay": 0.05}
LEARNING_RATE = 1e-4


def names(backend, mode):
    """The names of contenders: packages, or packages under XLA; keras_vit is the first."""
    if backend == "torch":
        return KERAS + TORCH
    # With TensorFlow on a CPU, XLA helps one model and hurts another, and halves the speed of both
    # in bfloat16, so forward is measured in both ways. In training it helped none of them.
    if backend == "tensorflow" and mode == "forward":
        return tuple(name + suffix for name in KERAS for suffix in ("", XLA))
    return KERAS


def package(name):
    """The import name of a contender's package."""
    return name.removesuffix(XLA)


def step(name, config, dtype, mode, images, labels):
    """The function to time, and the number of parameters of its model."""
    model = build(package(name), config, dtype)
    if package(name) in KERAS:
        step = _keras_step(model, name.endswith(XLA), mode, images, labels)
        return step, model.count_params()
    count = sum(p.numel() for p in model.parameters())
    return _torch_step(model, dtype, mode, images, labels), count


def build(name, config, dtype):
    """The model: logits from images, no dropout, no weights loaded."""
    if name in TORCH:
        machine.import_torchvision()
    return _BUILDERS[name](config, dtype)


def _keras_vit(config, dtype):
    import keras_vit

    # With a head of zeros, the first training step would differ from the others.
    return keras_vit.ViT(config.replace(head_init="truncated_normal"), dtype=dtype)


def _keras_hub(config, dtype):
    import keras
    import keras_hub

    backbone = keras_hub.models.ViTBackbone(
        image_shape=config.input_shape,
        patch_size=config.patch_size,
        num_layers=config.depth,
        num_heads=config.num_heads,
        hidden_dim=config.width,
        mlp_dim=config.mlp_dim,
        layer_norm_epsilon=config.norm_epsilon,
        dtype=dtype,
    )
    logits = keras.layers.Dense(config.num_classes, dtype="float32")(backbone.output[:, 0])
    return keras.Model(backbone.input, logits)


def _timm(config, dtype):
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=config.image_size,
        patch_size=config.patch_size,
        in_chans=config.in_channels,
        num_classes=config.num_classes,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.num_heads,
        mlp_ratio=config.mlp_dim / config.width,
    )


def _torchvision(config, dtype):
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=config.image_size[0],
        patch_size=config.patch_size[0],
        num_layers=config.depth,
        num_heads=config.num_heads,
        hidden_dim=config.width,
        mlp_dim=config.mlp_dim,
        num_classes=config.num_classes,
    )


def _transformers(config, dtype):
    import transformers

    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=config.image_size[0],
            patch_size=config.patch_size[0],
            num_channels=config.in_channels,
            hidden_size=config.width,
            num_hidden_layers=config.depth,
            num_attention_heads=config.num_heads,
            intermediate_size=config.mlp_dim,
            layer_norm_eps=config.norm_epsilon,
            num_labels=config.num_classes,
        )
    )


def _vit_pytorch(config, dtype):
    from vit_pytorch import ViT

    return ViT(
        image_size=config.image_size,
        patch_size=config.patch_size,
        channels=config.in_channels,
        num_classes=config.num_classes,
        dim=config.width,
        depth=config.depth,
        heads=config.num_heads,
        dim_head=config.key_dim,
        mlp_dim=config.mlp_dim,
    )


def _keras_step(model, xla, mode, images, labels):
    import keras

    model.compile(
        optimizer=keras.optimizers.AdamW(LEARNING_RATE, **ADAMW),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=xla if keras.backend.backend() == "tensorflow" else "auto",
    )
    if mode == "train":
        return lambda: model.train_on_batch(images, labels)
    return lambda: model.predict_on_batch(images)


def _torch_step(model, dtype, mode, images, labels):
    import torch

    x = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())  # (B, C, H, W)
    y = torch.from_numpy(labels)

    def logits():
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "mixed_bfloat16"):
            output = model(x)
        return getattr(output, "logits", output).float()

    def forward():
        with torch.inference_mode():
            return logits().numpy()

    # `fused` is torch's fastest implementation on a CPU.
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, **ADAMW, fused=True)

    def train():
        loss = torch.nn.functional.cross_entropy(logits(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()  # at the end, so that no gradients are kept between turns
        return loss.item()

    model.train(mode == "train")
    return train if mode == "train" else forward


_BUILDERS = {
    "keras_vit": _keras_vit,
    "keras_hub": _keras_hub,
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
    "vit_pytorch": _vit_pytorch,
}
