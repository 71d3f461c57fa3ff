"""What a model sees: attention, embeddings and gradients as arrays, as pictures and as a page.

Arrays are NumPy float32, from any backend. Names that begin with `plot_` draw them, and
`write_report` puts them on one page; matplotlib is imported when one of these is first asked for.
"""

import importlib
from typing import Any

from keras_vit.explain.attention import (
    attention_distance,
    attention_entropy,
    attention_maps,
    attention_rollout,
    class_token_maps,
    rollout_map,
)
from keras_vit.explain.embeddings import (
    patch_filters,
    patch_pca,
    position_similarity,
    region_similarity,
)
from keras_vit.explain.gradients import attention_gradient, grad_cam

__all__ = [
    "attention_distance",
    "attention_entropy",
    "attention_gradient",
    "attention_maps",
    "attention_rollout",
    "class_token_maps",
    "grad_cam",
    "patch_filters",
    "patch_pca",
    "position_similarity",
    "region_similarity",
    "rollout_map",
]


def __getattr__(name: str) -> Any:
    if name == "write_report":
        module = "report"
    elif name.startswith("plot_"):
        module = "plots"
    else:
        raise AttributeError(f"module 'keras_vit.explain' has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(f"keras_vit.explain.{module}"), name)
    return globals()[name]
