"""Derives the table of known checkpoints from the installed timm, torchvision and transformers.

When timm has new checkpoints, regenerate the table:

    python tests/weights/fetch/derive_known.py > keras_vit/weights/fetch/known.csv

`test_known.py` compares the table with what this file derives.
"""

import csv
import re
import sys
from importlib import import_module
from pathlib import Path

from keras_vit.variants import SIZES
from keras_vit.weights.fetch.known import Known
from keras_vit.weights.formats import timm_config

WORDS = {
    **{"tiny": "ti", "small": "s", "medium": "m", "base": "b", "large": "l", "huge": "h"},
    **{"giant": "g", "gigantic": "gigantic", "so400m": "so400m"},
}
"""Our word for a size, by timm's."""

# timm's arguments that a ViTConfig can express, with the values; None means every value.
EXPRESSIBLE = {
    **{"patch_size": None, "embed_dim": None, "depth": None, "num_heads": None, "mlp_ratio": None},
    **{"qkv_bias": None, "qk_norm": None, "init_values": None, "class_token": None},
    **{"no_embed_class": None, "reg_tokens": None, "final_norm": None, "fc_norm": None},
    **{"img_size": None, "dynamic_img_size": None, "pool_include_prefix": None, "distilled": None},
    **{"stem_depths": None},
    **{"global_pool": ("token", "avg", "map"), "act_layer": ("gelu_tanh",)},
}

MODULES = {
    "vision_transformer": "_create_vision_transformer",
    "deit": "_create_deit",
    "vision_transformer_hybrid": "_create_vision_transformer_hybrid",
    **dict.fromkeys(("beit", "eva", "vision_transformer_relpos", "naflexvit")),
}
"""timm's files, and of those with sizes that have factories here the function that makes models."""

DATA = {
    **{"in1k": "ImageNet-1k", "in21k": "ImageNet-21k", "in22k": "ImageNet-22k"},
    **{"in12k": "ImageNet-12k", "lvd142m": "LVD-142M", "webli": "WebLI"},
    **{"lvd1689m": "LVD-1689M", "sat493m": "SAT-493M", "laion2b": "LAION-2B", "openai": "WIT"},
    **{"datacompxl": "DataComp-XL", "dfn2b": "DFN-2B", "dfn5b": "DFN-5B"},
}
"""Names of datasets, by words in the names."""
METHODS = {
    **{"augreg": "AugReg", "augreg2": "AugReg", "sam": "SAM", "dino": "DINO", "dinov2": "DINOv2"},
    **{"mae": "MAE", "miil": "MIIL", "deit": "DeiT", "deit3": "DeiT III", "eva": "EVA"},
    **{
        "flexivit": "FlexiViT",
        "siglip": "SigLIP",
        "siglip2": "SigLIP 2",
        "tipsv2": "TIPSv2",
        "bamboo": "Bamboo",
    },
    **{"intern300m": "InternViT", "swag": "SWAG", "clip": "CLIP", "dinov3": "DINOv3"},
    **{"eva02": "EVA-02", "beit": "BEiT", "beitv2": "BEiT v2", "beit3": "BEiT-3"},
    **{"aimv2": "AIMv2", "lingbot": "LingBot-Vision", "pe": "Perception Encoder"},
    **{"radio": "RADIO", "naflexvit": "NaFlex", "rope": "RoPE-ViT", "relpos": "relative positions"},
}
"""Names of methods, by words in the names."""

HUGGING_FACE = (
    # id, module of transformers that names it, variant, image size, classes, trained on
    ("google/vit-base-patch16-224", "vit/configuration_vit", "vit_b16", 224, 1000, "in21k_ft_in1k"),
    ("google/vit-base-patch16-224-in21k", "vit/modeling_vit", "vit_b16", 224, 0, "in21k"),
    ("facebook/vit-mae-base", "vit_mae/configuration_vit_mae", "vit_b16", 224, 0, "mae"),
    ("facebook/dinov2-base", "dinov2/configuration_dinov2", "vit_b14", 518, 0, "dinov2_lvd142m"),
    ("facebook/dinov2-with-registers-base",
     "dinov2_with_registers/configuration_dinov2_with_registers", "vit_b14", 518, 0,
     "reg4_dinov2_lvd142m"),
)  # fmt: skip
"""The ids in transformers' code. More are only in config.json files and model cards."""


def derive() -> list[Known]:
    """Every row, sorted by variant and name."""
    rows = [*from_timm(), *from_torchvision(), *from_transformers()]
    order = list(SIZES)
    return sorted(
        rows, key=lambda r: (order.index(r.variant) if r.variant in order else 99, r.name)
    )


def from_timm() -> list[Known]:
    """timm's checkpoints whose model a ViTConfig can express, and Google's files of the same."""
    rows = []
    for module, creator in MODULES.items():
        timm = import_module(f"timm.models.{module}")
        for arch, configs in timm.default_cfgs.items():
            if "unlike" in timm_config.architectures()[arch]:
                continue
            arguments = model_arguments(timm, creator, arch) if creator else {}
            plain = bool(creator) and expressible(arch, arguments)
            for tag, config in configs.cfgs.items():
                # FlexiViT's patches of 30 do not go with its architecture's 16.
                if config.hf_hub_id != "timm/" or "patch30" in tag:
                    continue
                if plain and config.input_size[1] % arguments["patch_size"] == 0:
                    rows += list(timm_rows(module, arch, tag, arguments, config))
                else:
                    rows.append(own_row(module, arch, tag, config))
    return rows


def own_row(module, arch, tag, config) -> Known:
    """The row of a checkpoint of a size or family that has no factory here: with timm's name."""
    return Known(
        name=f"{arch}.{tag}",
        source=f"hf://timm/{arch}.{tag}",
        variant=arch,
        image_size=config.input_size[1],
        num_classes=config.num_classes,
        format="timm",
        pretraining=pretraining(f"{arch}_{tag}"),
        license=config.license or "",
        reference=f"timm/models/{module}.py, default_cfgs, {arch}.{tag}",
    )


def timm_rows(module, arch, tag, arguments, config):
    """The row of a checkpoint on the Hub, and of the .npz file that it was converted from."""
    assert config.input_size[1] == config.input_size[2]
    variant = variant_of(arch, arguments)
    label = label_of(arch, tag, variant)
    shared = {
        "variant": variant,
        "image_size": config.input_size[1],
        "num_classes": config.num_classes,
        "license": config.license or "",
    }
    reference = f"timm/models/{module}.py, default_cfgs, {arch}.{tag}"
    yield row(label, source=f"hf://timm/{arch}.{tag}", format="timm", reference=reference, **shared)
    # A FlexiViT file holds patches of 32 and a 7 x 7 table, which timm resizes as it loads them.
    if config.custom_load and "flexivit" not in arch:
        reference += ", url"
        yield row(label, source=config.url, format="google", reference=reference, **shared)


def from_torchvision() -> list[Known]:
    """torchvision's enumerations. They are pickles: listed, but they must be converted."""
    from torchvision.models import vision_transformer as torchvision

    rows = []
    for letter, patch in (("B", 16), ("B", 32), ("L", 16), ("L", 32), ("H", 14)):
        enumeration = getattr(torchvision, f"ViT_{letter}_{patch}_Weights")
        for weights in enumeration:
            rows.append(
                row(
                    weights.name.lower().replace("imagenet1k", "in1k"),
                    source=weights.url,
                    variant=f"vit_{letter.lower()}{patch}",
                    image_size=weights.transforms().crop_size[0],
                    num_classes=len(weights.meta["categories"]),
                    format="torchvision",
                    license=weights.meta.get("license", ""),
                    reference="torchvision/models/vision_transformer.py, "
                    f"{enumeration.__name__}.{weights.name}",
                )
            )
    return rows


def from_transformers() -> list[Known]:
    """The ids in transformers' code."""
    import transformers

    root = Path(transformers.__file__).parent
    rows = []
    for repository, name, variant, size, classes, label in HUGGING_FACE:
        module = f"models/{name}.py"
        assert f'"{repository}"' in (root / module).read_text(), f"{module} lacks {repository}"
        rows.append(
            row(
                label,
                source=f"hf://{repository}",
                variant=variant,
                image_size=size,
                num_classes=classes,
                format="huggingface",
                license="",
                reference=f"transformers/{module}",
            )
        )
    return rows


def row(label: str, *, variant: str, image_size: int, format: str, **fields) -> Known:
    """A row, named by `label`, format and image size."""
    words = [format] * (format != "timm") + [label] + [str(image_size)] * (image_size != 224)
    return Known(
        name=f"{variant}.{'_'.join(words)}",
        variant=variant,
        image_size=image_size,
        format=format,
        pretraining=pretraining(label),
        **fields,
    )


def model_arguments(timm, creator: str, arch: str) -> dict:
    """The arguments that timm's function for `arch` passes to its model."""
    seen = {}

    def record(variant, pretrained=False, *rest, **arguments):
        seen.update(arguments)

    real = getattr(timm, creator)
    setattr(timm, creator, record)
    try:
        getattr(timm, arch)()
    finally:
        setattr(timm, creator, real)
    return with_stem(seen) if "backbone" in seen else seen


def with_stem(arguments: dict) -> dict:
    """A hybrid's arguments, the ResNet as the depths of its stages and patches in pixels."""
    backbone = arguments["backbone"]
    if type(backbone).__name__ not in ("ResNetV2", "Sequential"):
        return arguments
    depths = tuple(len(stage.blocks) for stage in getattr(backbone, "stages", ()))
    stride = 4 * 2 ** max(len(depths) - 1, 0)
    rest = {name: value for name, value in arguments.items() if name != "backbone"}
    return rest | {"stem_depths": depths, "patch_size": stride * arguments.get("patch_size", 1)}


def expressible(arch: str, arguments: dict) -> bool:
    """Whether a ViTConfig can express all arguments."""
    for name, value in arguments.items():
        if name not in EXPRESSIBLE or (EXPRESSIBLE[name] and value not in EXPRESSIBLE[name]):
            return False
    # Registers with rows in the position table; and RADIO, which resizes that table in its own way.
    registers = arguments.get("reg_tokens", 0) and not arguments.get("no_embed_class", False)
    return not registers and "radio" not in arch


def variant_of(arch: str, arguments: dict) -> str:
    """Our name for the size: from `SIZES` if possible, otherwise timm's word and the patch size."""
    patch, width = arguments["patch_size"], arguments["embed_dim"]
    mlp_dim = int(width * arguments.get("mlp_ratio", 4))
    size = (patch, width, arguments["depth"], arguments["num_heads"], mlp_dim)
    stem = ("resnet", arguments["stem_depths"]) if "stem_depths" in arguments else (None, ())
    for name, published in SIZES.items():
        if (*published[:5], published.stem, published.stem_depths) == (*size, *stem):
            return name
    word = re.match(r"(?:vit|deit3?|eva|flexivit)_([a-z0-9]+)", arch)
    return f"vit_{WORDS.get(word[1], word[1])}{patch}" if word else arch


def label_of(arch: str, tag: str, variant: str) -> str:
    """The family, traits and tag in timm's name, without size, patch, stem and pixels."""
    family, _, rest = arch.partition("_")
    words = [
        word
        for word in rest.split("_")
        if word not in WORDS
        and word not in variant
        and not re.fullmatch(r"patch\d+|[rsp]\d+|\d{3}", word)
    ]
    return "_".join([family] * (family not in variant) + words + [tag])


def pretraining(label: str) -> str:
    """ "AugReg: ImageNet-21k, then ImageNet-1k" for "augreg_in21k_ft_in1k"."""
    words = re.sub(r"siglip_(gap_)?(\d{3}_)?v2_", r"siglip2_", label).split("_")
    methods = dict.fromkeys(METHODS[w] for w in words if w in METHODS)
    data = dict.fromkeys(DATA[w] for w in words if w in DATA)
    return ": ".join(filter(None, [" ".join(methods), ", then ".join(data)]))


def write(rows: list[Known], file) -> None:
    """Writes the table as it is in the repository."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(Known._fields)
    writer.writerows(rows)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from cpu_torchvision import import_torchvision

    import_torchvision()
    write(derive(), sys.stdout)
