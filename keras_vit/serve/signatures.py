"""The signatures of a served model: those of an exported SavedModel, whatever file it is.

| name | input | outputs |
|---|---|---|
| `serving_default` | `images` (B, H, W, C) | `probabilities`, `logits` (B, K) |
| `serve_bytes` | `bytes` (B,), JPEG or PNG files | `probabilities`, `logits` (B, K) |
| `classify` | `bytes` (B,) | `labels`, `scores` (B, k), the best first |
| `features` | `images` | `features` (B, D) |

A model without a head returns `features` from the first two. What a file cannot compute, it has no
signature for.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_vit.runtime import Runtime

DEFAULT = "serving_default"
TOP_K = 5
"""Classes that `classify` names, if the file does not say how many."""
TYPES = {"float32": "DT_FLOAT", "uint8": "DT_UINT8", "string": "DT_STRING"}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """The dtype and the shape of an input or an output; -1 is any size."""

    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Signature:
    """One way to call a model."""

    name: str
    input_name: str
    input: Tensor
    outputs: Mapping[str, Tensor]
    wanted: str
    """What the model computes for it: "scores" or "features"."""

    def describe(self) -> dict[str, Any]:
        """The signature as TensorFlow Serving's metadata has it."""
        tensor = f"{self.name}_{self.input_name}:0"
        outputs = {
            name: _info(tensor, f"StatefulPartitionedCall:{i}")
            for i, (name, tensor) in enumerate(sorted(self.outputs.items()))
        }
        return {
            "inputs": {self.input_name: _info(self.input, tensor)},
            "outputs": outputs,
            "method_name": "tensorflow/serving/predict",
            "defaults": {},
        }


def signatures_of(
    runtime: Runtime, computed: Mapping[str, Mapping[str, np.ndarray]]
) -> dict[str, Signature]:
    """The signatures that a model has, by name.

    Args:
        runtime: The opened model.
        computed: What it computes for an image, by kind: "scores", "features" or both. The shapes
            of the outputs are taken from it.
    """
    config = runtime.config
    images = Tensor(runtime.images, (-1, *config.input_shape))
    files = Tensor("string", (-1,))
    outputs = {
        kind: {name: Tensor("float32", (-1, *array.shape[1:])) for name, array in arrays.items()}
        for kind, arrays in computed.items()
    }
    wanted = "scores" if "scores" in outputs else "features"
    found = [Signature(DEFAULT, "images", images, outputs[wanted], wanted)]
    if "features" in outputs:
        found.append(Signature("features", "images", images, outputs["features"], "features"))
    if config.in_channels in (1, 3):
        found.append(Signature("serve_bytes", "bytes", files, outputs[wanted], wanted))
    if config.in_channels in (1, 3) and wanted == "scores" and config.pooling is not None:
        k = top_k_of(runtime)
        best = {"labels": Tensor("string", (-1, k)), "scores": Tensor("float32", (-1, k))}
        found.append(Signature("classify", "bytes", files, best, "scores"))
    return {signature.name: signature for signature in found}


def outputs_of(
    signature: Signature, computed: Mapping[str, np.ndarray], labels: np.ndarray
) -> dict[str, np.ndarray]:
    """The outputs of a signature, from what the model computed.

    Args:
        signature: The signature.
        computed: `probabilities` and `logits`, or `features`.
        labels: The names of all classes, an array of str objects.
    """
    if signature.name != "classify":
        return {name: computed[name] for name in signature.outputs}
    scores = computed["probabilities"]
    best = np.argsort(-scores, axis=-1, kind="stable")
    best = best[:, : signature.outputs["scores"].shape[-1]]
    return {"labels": labels[best], "scores": np.take_along_axis(scores, best, axis=-1)}


def class_labels(runtime: Runtime) -> np.ndarray:
    """The names of all classes; numbers, if the model has no names."""
    count = runtime.config.num_classes
    return np.array(list(runtime.labels or map(str, range(count))), object)


def top_k_of(runtime: Runtime) -> int:
    """How many classes `classify` names: what a SavedModel says, or `TOP_K`."""
    count = TOP_K
    manifest = getattr(runtime, "manifest", {})
    try:
        count = manifest["signatures"]["classify"]["outputs"]["scores"]["shape"][-1]
    except (KeyError, TypeError, IndexError):  # another kind of file
        count = TOP_K
    return min(count, runtime.config.num_classes)


def _info(tensor: Tensor, name: str) -> dict[str, Any]:
    return {
        "dtype": TYPES[tensor.dtype],
        "tensor_shape": {
            "dim": [{"size": str(size), "name": ""} for size in tensor.shape],
            "unknown_rank": False,
        },
        "name": name,
    }
