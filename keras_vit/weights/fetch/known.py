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
    """Known names similar to `name`, best match first."""
    variant, dot, tag = name.lower().partition(".")
    near = difflib.get_close_matches(name.lower(), KNOWN, count, 0.6)
    # `vit_b16.dino` matches every DINO of that size better than its letters tell.
    starts = [n for n in KNOWN if dot and tag and n.startswith(f"{variant}.") and tag in n]
    return list(dict.fromkeys([*starts, *near]))[:count]


def _load_table() -> dict[str, Known]:
    path = Path(__file__).with_name("known.csv")
    with path.open(newline="", encoding="utf-8") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        row |= {name: int(row[name]) for name in ("image_size", "num_classes")}
    return {row["name"]: Known(**row) for row in rows}


KNOWN: dict[str, Known] = _load_table()  # milliseconds, and this module is imported lazily
"""Every known checkpoint by its name."""
