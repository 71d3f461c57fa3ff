"""What a model sees: attention, embeddings and gradients, as arrays, figures and a report.

Arrays are NumPy float32, on any backend. Functions named `plot_*` draw them with matplotlib, which
is imported on first use; `write_report` writes them to an HTML file.
"""

import importlib
from typing import TYPE_CHECKING, Any

from keras_vit.explain.attention import (
    attention_distance,
    attention_entropy,
    attention_maps,
    attention_rollout,
    class_token_maps,
    pooling_map,
    rollout_map,
)
from keras_vit.explain.embeddings import (
    patch_filters,
    patch_pca,
    position_similarity,
    region_similarity,
)
from keras_vit.explain.gradients import attention_gradient, grad_cam

if TYPE_CHECKING:
    from keras_vit.explain.plots import (
        plot_attention_distance,
        plot_attention_entropy,
        plot_attention_gradient,
        plot_attention_maps,
        plot_attention_rollout,
        plot_class_token_maps,
        plot_grad_cam,
        plot_patch_filters,
        plot_patch_pca,
        plot_pooling_map,
        plot_position_similarity,
        plot_region_similarity,
    )
    from keras_vit.explain.report import write_report

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
    "plot_attention_distance",
    "plot_attention_entropy",
    "plot_attention_gradient",
    "plot_attention_maps",
    "plot_attention_rollout",
    "plot_class_token_maps",
    "plot_grad_cam",
    "plot_patch_filters",
    "plot_patch_pca",
    "plot_pooling_map",
    "plot_position_similarity",
    "plot_region_similarity",
    "pooling_map",
    "position_similarity",
    "region_similarity",
    "rollout_map",
    "write_report",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name == "write_report":
        module = "report"
    elif name.startswith("plot_"):
        module = "plots"
    else:
        raise AttributeError(f"module 'keras_vit.explain' has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(f"keras_vit.explain.{module}"), name)
    return globals()[name]
