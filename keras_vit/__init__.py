"""keras_vit: the Vision Transformer for Keras 3, on TensorFlow, JAX and PyTorch."""

import importlib
from typing import TYPE_CHECKING, Any

from keras_vit import keras_version  # noqa: F401  first, because its error says what to install

# isort: split
from keras_vit import layers, preprocessing
from keras_vit.classifier import Classifier
from keras_vit.config import ViTConfig
from keras_vit.model import ViT
from keras_vit.variants import (
    list_variants,
    vit_7b16,
    vit_b8,
    vit_b16,
    vit_b32,
    vit_g14,
    vit_giant2_14,
    vit_gigantic14,
    vit_h14,
    vit_hplus16,
    vit_l14,
    vit_l16,
    vit_l32,
    vit_m16,
    vit_r26_s32,
    vit_r50_b16,
    vit_r50_l32,
    vit_r_ti16,
    vit_s8,
    vit_s16,
    vit_s32,
    vit_so400m14,
    vit_splus16,
    vit_ti16,
)

if TYPE_CHECKING:
    from keras_vit import benchmark, bulk, explain, runtime, train
    from keras_vit.export.fused import fused
    from keras_vit.export.onnx.export import export_onnx
    from keras_vit.export.openvino.export import export_openvino
    from keras_vit.export.saved_model.export import export_saved_model
    from keras_vit.export.sensitivity import quantization_sweep
    from keras_vit.export.tflite.export import export_tflite
    from keras_vit.model_weights import with_token_merging
    from keras_vit.weights.load import from_pretrained
    from keras_vit.weights.push import push_to_hub
    from keras_vit.weights.save import save_pretrained

__version__ = "0.1.0"

__all__ = [
    "Classifier",
    "ViT",
    "ViTConfig",
    "benchmark",
    "bulk",
    "explain",
    "export_onnx",
    "export_openvino",
    "export_saved_model",
    "export_tflite",
    "from_pretrained",
    "fused",
    "layers",
    "list_variants",
    "preprocessing",
    "push_to_hub",
    "quantization_sweep",
    "runtime",
    "save_pretrained",
    "train",
    "vit_b8",
    "vit_b16",
    "vit_b32",
    "vit_g14",
    "vit_gigantic14",
    "vit_h14",
    "vit_l14",
    "vit_l16",
    "vit_l32",
    "vit_m16",
    "vit_s8",
    "vit_s16",
    "vit_s32",
    "vit_r50_b16",
    "vit_r50_l32",
    "vit_r26_s32",
    "vit_r_ti16",
    "vit_giant2_14",
    "vit_splus16",
    "vit_hplus16",
    "vit_7b16",
    "vit_so400m14",
    "vit_ti16",
    "with_token_merging",
]

# What reads, writes and exports models is imported on first use.
_LATER = {
    "benchmark": "keras_vit",
    "bulk": "keras_vit",
    "explain": "keras_vit",
    "export_onnx": "keras_vit.export.onnx.export",
    "export_openvino": "keras_vit.export.openvino.export",
    "export_saved_model": "keras_vit.export.saved_model.export",
    "export_tflite": "keras_vit.export.tflite.export",
    "from_pretrained": "keras_vit.weights.load",
    "fused": "keras_vit.export.fused",
    "quantization_sweep": "keras_vit.export.sensitivity",
    "push_to_hub": "keras_vit.weights.push",
    "runtime": "keras_vit",
    "save_pretrained": "keras_vit.weights.save",
    "train": "keras_vit",
    "with_token_merging": "keras_vit.model_weights",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'keras_vit' has no attribute {name!r}")
    if _LATER[name] == __name__:  # a module
        return importlib.import_module(f"{__name__}.{name}")
    globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return globals()[name]
