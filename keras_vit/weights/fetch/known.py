"""The known checkpoints: what can be asked for by name, and where each is published.

The table is `known.csv` beside this file, with one row per checkpoint. A program of the tests,
`derive_known.py`, derives it from timm's `default_cfgs`, torchvision's enumerations and the code of
transformers, and a test compares the two. No source publishes a whole hash of a file, so the table
has none.
"""

import csv
import difflib
from pathlib import Path
from typing import NamedTuple


class Known(NamedTuple):
    """A published checkpoint, and who says so."""

    name: str
    """`<variant>.<tag>`, as timm names tags, with the image size where it is not 224."""
    source: str
    """What `keras_vit.weights.fetch.fetch_weights` takes: hf://... or https://..."""
    variant: str
    """The size; a function of `keras_vit` where `keras_vit.list_variants` has it."""
    image_size: int
    """Height and width of the images."""
    num_classes: int
    """Classes of its head; 0 means that it has none."""
    format: str
    """Whose names the arrays have: "timm", "google", "huggingface" or "torchvision"."""
    pretraining: str
    """How and on what it was trained, as far as its name tells."""
    license: str
    """What the source states; empty where it states nothing."""
    reference: str
    """Where all this is stated."""


def search(text: str = "") -> list[Known]:
    """The checkpoints that have every word of `text` somewhere in their row, in any order.

    Example:

    >>> [row.name for row in known.search("b16 dino in21k")]
    []
    """
    words = text.lower().split()
    return [
        row
        for row in KNOWN.values()
        if all(any(word in str(field).lower() for field in row) for word in words)
    ]


def find(name: str) -> Known | None:
    """The checkpoint of that name, or of the name that timm has for it; None if there is none."""
    if name in KNOWN:
        return KNOWN[name]
    return next((row for row in KNOWN.values() if row.source == f"hf://timm/{name}"), None)


def nearest(name: str, count: int = 5) -> list[str]:
    """Known names that look like `name`, the nearest first."""
    variant, dot, tag = name.lower().partition(".")
    near = difflib.get_close_matches(name.lower(), KNOWN, count, 0.6)
    # `vit_b16.dino` is nearer to every DINO of that size than its letters tell.
    starts = [n for n in KNOWN if dot and tag and n.startswith(f"{variant}.") and tag in n]
    return list(dict.fromkeys([*starts, *near]))[:count]


def _read() -> dict[str, Known]:
    path = Path(__file__).with_name("known.csv")
    with path.open(newline="", encoding="utf-8") as file:
        return {
            row["name"]: Known(
                **{
                    **row,
                    "image_size": int(row["image_size"]),
                    "num_classes": int(row["num_classes"]),
                }
            )
            for row in csv.DictReader(file)
        }


KNOWN: dict[str, Known] = _read()  # some milliseconds, in a module that is imported when needed
"""Every known checkpoint by its name."""
