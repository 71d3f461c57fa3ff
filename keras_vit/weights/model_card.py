"""The README.md of a saved model: what it is, how to load it, its images and its classes."""

import re
from collections.abc import Mapping
from typing import Any

from keras_vit.config import ViTConfig
from keras_vit.model import ViT

CARD = "README.md"
LISTED = 1000
"""Most classes that are listed."""
LIBRARIES = {
    "timm": "timm",
    "beit": "timm",
    "huggingface": "transformers",
    "huggingface_clip": "transformers",
    "huggingface_dinov3": "transformers",
}
"""The Hub's name of the library that reads a format."""
LOADERS = {
    "timm": 'import timm\n\nmodel = timm.create_model("{timm}", pretrained=True)',
    "transformers": "from transformers import AutoModel{task}\n\n"
    'model = AutoModel{task}.from_pretrained("{plain}")',
}


def model_card(
    model: ViT,
    format: str,
    *,
    repo: str | None = None,
    results: Mapping[str, Any] | None = None,
    license: str | None = None,
) -> str:
    """The text of a model card, Markdown with the Hub's header.

    Args:
        model: The model.
        format: The format that its folder is written in.
        repo: Its name on the Hub, "organization/name"; None for a local folder.
        results: What the model reaches, by what was measured; floats from 0 to 1 are shares.
        license: A license of the Hub's list, such as "apache-2.0".
    """
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", license):
        raise ValueError(
            "license must be an identifier of the Hub's list, such as 'apache-2.0'. "
            f"Received: license={license!r}"
        )
    config = model.config
    sections = [
        _header(config, format, license),
        _title(model, repo),
        _usage(config, format, repo),
        _images(config),
        _results(results),
        _classes(config),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _header(config: ViTConfig, format: str, license: str | None) -> str:
    task = "image-classification" if config.num_classes else "image-feature-extraction"
    lines = [f"library_name: {LIBRARIES.get(format, 'keras')}", f"pipeline_tag: {task}"]
    lines += [f"license: {license}"] * (license is not None)
    return "\n".join(["---", *lines, "tags:", "- keras", "- keras_vit", "- vit", "---"])


def _title(model: ViT, repo: str | None) -> str:
    config = model.config
    name = (repo or model.name).rpartition("/")[2]
    sizes = f"{config.depth} blocks of width {config.width}, {config.num_heads} heads"
    (height, width), (rows, columns) = config.image_size, config.patch_size
    return (
        f"# {_plain(name)}\n\nA Vision Transformer for Keras 3: {model.count_params():,} "
        f"parameters, {sizes}, images of {height} x {width} pixels, patches of {rows} x {columns}."
    )


def _usage(config: ViTConfig, format: str, repo: str | None) -> str:
    source = f"hf://{repo}" if repo else "path/of/this/folder"
    head = "Classifier" if config.num_classes and config.pooling else ""
    lines = ["import keras_vit", "", f'model = keras_vit.from_pretrained("{source}")']
    if head:
        lines += ['keras_vit.Classifier(model).classify("image.jpg", top_k=5)']
    else:
        lines += ["images = keras_vit.preprocessing.preprocess(pictures, model.config)"]
        lines += ["features = model.predict(images)"]
    blocks = ["\n".join(lines)]
    if (library := LIBRARIES.get(format)) is not None:
        task = "ForImageClassification" if config.num_classes else ""
        timm = f"hf-hub:{repo}" if repo else f"local-dir:{source}"
        blocks.append(LOADERS[library].format(task=task, timm=timm, plain=repo or source))
    return "\n\n".join(["## Use", *(f"```python\n{block}\n```" for block in blocks)])


def _images(config: ViTConfig) -> str:
    crop = "the whole image, squashed"
    if config.crop_fraction is not None:
        crop = f"the center, after resizing to cover the size divided by {config.crop_fraction:g}"
    channels = {1: "gray", 3: "RGB"}.get(config.in_channels, f"{config.in_channels} channels")
    rows = {
        "size": f"{config.image_size[0]} x {config.image_size[1]}, {channels}",
        "resizing": f"{config.resize_method}, antialiased; {crop}",
        "values": f"(pixel / 255 - mean) / std, mean {config.pixel_mean}, std {config.pixel_std}",
    }
    return "\n".join(["## Images", "", "| | |", "|---|---|", *_rows(rows)])


def _results(results: Mapping[str, Any] | None) -> str:
    if not results:
        return ""
    shown = {
        _plain(name): f"{v:.2%}" if isinstance(v, float) and 0 <= v <= 1 else _plain(v)
        for name, v in results.items()
        if v is not None
    }
    return "\n".join(["## Results", "", "| | |", "|---|---|", *_rows(shown)])


def _classes(config: ViTConfig) -> str:
    if not config.labels:
        return ""
    lines = [f"{i}. {_plain(label)}" for i, label in enumerate(config.labels[:LISTED])]
    more = len(config.labels) - len(lines)
    return "\n".join(["## Classes", "", *lines, *[f"\nand {more:,} more"] * (more > 0)])


def _rows(rows: Mapping[str, str]) -> list[str]:
    return [f"| {name} | {value} |" for name, value in rows.items()]


def _plain(text: Any) -> str:
    """A text on one line that Markdown and HTML leave as it is."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(str(text).split()))
