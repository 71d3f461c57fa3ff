"""The checkpoints that have a name here, and where each is published.

The table is `known.csv`, one row per checkpoint. `derive_known.py` in the tests derives it from
timm, torchvision and transformers, and a test compares the two. There are no hashes in it, because
no source publishes whole ones.
"""

import csv
import difflib
from pathlib import Path
from typing import Any, NamedTuple


class Known(NamedTuple):
    """A published checkpoint."""

    name: str
    """`<variant>.<tag>` with timm's tags, and the image size if it is not 224."""
    source: str
    """hf://... or https://..., as `fetch_weights` takes it."""
    variant: str
    """The size, which is a function of `keras_vit` if `keras_vit.list_variants` has it."""
    image_size: int
    """Height and width of the images."""
    num_classes: int
    """Classes of its head; 0 means no head."""
    format: str
    """The names of its arrays: "timm", "google", "huggingface" or "torchvision"."""
    pretraining: str
    """Method and data of its training, as far as its name states them."""
    license: str
    """The license that the source states; empty if it states none."""
    reference: str
    """Where the source states all this."""


def search(text: str = "") -> list[Known]:
    """The checkpoints whose row contains every word of `text`, in any order.

    "siglip2" finds "SigLIP 2" too.

    Example:

    >>> [row.name for row in known.search("b16 dino in21k")]
    []
    """
    words = text.lower().split()
    rows = {row: [str(field).lower() for field in row] for row in KNOWN.values()}
    return [
        row
        for row, fields in rows.items()
        if all(any(w in field or w in field.replace(" ", "") for field in fields) for w in words)
    ]


def find(name: str) -> Known | None:
    """The checkpoint with our name or timm's; None if there is none."""
    if name in KNOWN:
        return KNOWN[name]
    return next((row for row in KNOWN.values() if row.source == f"hf://timm/{name}"), None)


def nearest(name: str, count: int = 5) -> list[str]:
    """Known names that `name` may mean, best match first.

    A name of the Hub, an architecture of timm and a size mean their own checkpoints. Otherwise
    names are compared by their letters.

    Example:

    >>> known.nearest("google/vit-base-patch16-224")
    ['vit_b16.huggingface_in21k_ft_in1k']
    """
    name = name.lower()
    if hosted := [row.name for row in KNOWN.values() if row.source.lower() == f"hf://{name}"]:
        return hosted
    variant, dot, tag = name.partition(".")
    own = [] if dot else [row.name for row in KNOWN.values() if row.variant == name]
    if own or (own := _of_architecture(variant.rpartition("/")[2].replace("-", "_"))):
        tags = {n.partition(".")[2]: n for n in own}
        return [tags[t] for t in difflib.get_close_matches(tag, tags, count, 0.5)] or own[:count]
    if "/" in name:  # the letters of a path or of an organization mean nothing here
        return []
    near = difflib.get_close_matches(name, KNOWN, count, 0.6)
    # `vit_b16.dino` matches every DINO of that size better than its letters tell.
    starts = [n for n in KNOWN if dot and tag and n.startswith(f"{variant}.") and tag in n]
    return list(dict.fromkeys([*starts, *near]))[:count]


def of_variant(variant: str, count: int = 5) -> list[str]:
    """Tags of the checkpoints of a size, those with a head of ImageNet's 1,000 classes first."""
    rows = [row for row in KNOWN.values() if row.variant == variant]
    rows.sort(key=lambda row: row.num_classes != 1000)
    return [row.name.removeprefix(f"{variant}.") for row in rows][:count]


def _of_architecture(name: str) -> list[str]:
    """Names of the checkpoints of timm's architecture with which a name without a tag starts."""
    found: dict[str, list[str]] = {}
    for row in KNOWN.values():
        architecture = row.source.removeprefix("hf://timm/").partition(".")[0]
        if row.format == "timm" and f"{name}_".startswith(f"{architecture}_"):
            found.setdefault(architecture, []).append(row.name)
    return found[max(found, key=len)] if found else []


def _load_table() -> dict[str, Known]:
    path = Path(__file__).with_name("known.csv")
    with path.open(newline="", encoding="utf-8") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        row |= {name: int(row[name]) for name in ("image_size", "num_classes")}
    return {row["name"]: Known(**row) for row in rows}


KNOWN: dict[str, Known] = _load_table()  # milliseconds, and this module is imported lazily
"""Every known checkpoint by its name."""
