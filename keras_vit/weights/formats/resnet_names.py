"""The ResNet stem of a hybrid: its names in vision_transformer and in timm, and what they show."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from keras_vit.config import ViTConfig
from keras_vit.weights.formats.layout import Layout
from keras_vit.weights.formats.table import Header, Pair
from keras_vit.weights.formats.torch_names import CONV, norm

# Flax: the standard deviation plus 1e-5, and its GroupNorm's epsilon.
GOOGLE = {"stem_standardization": "deviation", "stem_epsilon": 1e-6}
# timm: StdConv2dSame(eps=1e-8) and GroupNormAct.
TIMM = {"stem_standardization": "variance", "stem_epsilon": 1e-5}

FLAT = Layout("")
OLD_NORM = Layout("c -> 1 1 1 c")
"""Old .npz files hold the gains of a GroupNorm as they are multiplied with (B, H, W, C)."""
TIMM_STEM = r"patch_embed\.backbone\.(stem\.)?conv\.weight$"


def google_fields(header: Header) -> dict[str, Any]:
    """The fields of a stem in an .npz file; none without a stem."""
    if not header.has(r"conv_root/"):
        return {}
    *_, channels, width = header.shape("conv_root/kernel", 4)
    fields = _fields(header, r"block(\d+)/unit(\d+)/conv1/", 1, width, channels)
    return fields | GOOGLE


def google_stem_rows(config: ViTConfig, old_norms: bool = False) -> Iterator[Pair]:
    """The table of names in an .npz file."""
    layout = OLD_NORM if old_norms else FLAT

    def pairs(theirs: tuple[str, str], ours: tuple[str, str]) -> Iterator[Pair]:
        yield Pair(f"{theirs[0]}/kernel", (f"{ours[0]}/kernel",))
        yield Pair(f"{theirs[1]}/scale", (f"{ours[1]}/gamma",), layout)
        yield Pair(f"{theirs[1]}/bias", (f"{ours[1]}/beta",), layout)

    yield from pairs(("conv_root", "gn_root"), ("stem/root_conv", "stem/root_norm"))
    for stage, unit, ours in _units(config):
        theirs = f"block{stage + 1}/unit{unit + 1}"
        names = [(f"conv{i}", f"gn{i}", f"conv_{i}", f"norm_{i}") for i in (1, 2, 3)]
        if unit == 0:
            names.append(("conv_proj", "gn_proj", "shortcut_conv", "shortcut_norm"))
        for conv, group_norm, our_conv, our_norm in names:
            yield from pairs(
                (f"{theirs}/{conv}", f"{theirs}/{group_norm}"),
                (f"{ours}/{our_conv}", f"{ours}/{our_norm}"),
            )


def timm_fields(header: Header) -> dict[str, Any]:
    """The fields of a stem in a state dict; none without a stem."""
    if not header.has(TIMM_STEM):
        return {}
    alone = header.has(r"patch_embed\.backbone\.conv\.")
    name = "patch_embed.backbone." + ("conv.weight" if alone else "stem.conv.weight")
    width, channels, _, _ = header.shape(name, 4)
    pattern = r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.(\d+)\.conv1\."
    return _fields(header, pattern, 0, width, channels) | TIMM


def timm_stem_rows(config: ViTConfig) -> Iterator[Pair]:
    """The table of names in a state dict."""
    backbone = "patch_embed.backbone"
    root = f"{backbone}.stem" if config.stem_depths else backbone
    yield Pair(f"{root}.conv.weight", ("stem/root_conv/kernel",), CONV)
    yield from norm(f"{root}.norm", "stem/root_norm")
    for stage, unit, ours in _units(config):
        theirs = f"{backbone}.stages.{stage}.blocks.{unit}"
        for i in (1, 2, 3):
            yield Pair(f"{theirs}.conv{i}.weight", (f"{ours}/conv_{i}/kernel",), CONV)
            yield from norm(f"{theirs}.norm{i}", f"{ours}/norm_{i}")
        if unit == 0:
            shortcut = f"{theirs}.downsample"
            yield Pair(f"{shortcut}.conv.weight", (f"{ours}/shortcut_conv/kernel",), CONV)
            yield from norm(f"{shortcut}.norm", f"{ours}/shortcut_norm")


def patch_in_pixels(patch: tuple[int, ...], fields: dict[str, Any]) -> tuple[int, int]:
    """The size of a patch in pixels, from that of the patch projection's kernel."""
    stride = 4 * 2 ** max(len(fields["stem_depths"]) - 1, 0) if fields else 1
    return patch[0] * stride, patch[1] * stride


def _fields(header: Header, pattern: str, first: int, width: int, channels: int) -> dict[str, Any]:
    """A stage that is not numbered from `first` on has no units here, which a config refuses."""
    found = {match.groups() for name in header.shapes if (match := re.match(pattern, name))}
    units = Counter(int(stage) for stage, _ in found)
    depths = tuple(units[stage] for stage in range(first, first + len(units)))
    return {
        "stem": "resnet",
        "stem_depths": depths,
        "stem_width": width,
        "in_channels": channels,
    }


def _units(config: ViTConfig) -> Iterator[tuple[int, int, str]]:
    """Stage, unit and our path of every bottleneck."""
    for stage, depth in enumerate(config.stem_depths):
        for unit in range(depth):
            yield stage, unit, f"stem/stage_{stage}_unit_{unit}"
