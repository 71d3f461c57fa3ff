"""Model parallelism on JAX: how a ViT's weights are split (Megatron-LM, arXiv 1909.08053, sec. 3).

Attention is split by heads, the MLP by its hidden units: the first product of each pair gives every
device columns of its own, the second one takes them as rows, and a branch costs one all-reduce. The
residual stream stays whole. The embeddings are split by the width, the pre-logits by their units,
and the head by its inputs, so that any number of classes will do. The rest is small and stays
whole: norms, tokens, and the biases of what is summed.

    mesh = keras.distribution.DeviceMesh((2, 4), ("batch", "model"))
    keras.distribution.set_distribution(ModelParallel(mesh))
    model = keras_vit.vit_b16()
    model.compile(...)
    check_layouts(model, mesh)
"""

import math
import re
from collections.abc import Iterable, Sequence

import keras
from keras.src.utils import jax_utils

import keras_vit

BATCH, MODEL = "batch", "model"
WHOLE = 2**16
"""Size of the largest variable that every device may hold in full."""

_BLOCK = r"(?:.*/)?encoder_block_\d+/"
_HEADS, _HIDDEN, _UNITS = "num_heads", "mlp_dim", "representation_size"
# Path of a weight -> its axes, and the config field of the axis that is split.
_RULES = {
    _BLOCK + "attention/(?:query|key|value)/kernel": ((None, MODEL, None), _HEADS),  # (D, h, d)
    _BLOCK + "attention/(?:query|key|value)/bias": ((MODEL, None), _HEADS),  # (h, d)
    _BLOCK + "attention/(?:query|key|value)/lora_kernel_a": ((None, MODEL, None), _HEADS),
    _BLOCK + "attention/attention_output/kernel": ((MODEL, None, None), _HEADS),  # (h, d, D)
    _BLOCK + "attention/attention_output/lora_kernel_a": ((MODEL, None, None), _HEADS),
    _BLOCK + "mlp/dense_1/kernel": ((None, MODEL), _HIDDEN),  # (D, M)
    _BLOCK + "mlp/dense_1/bias": ((MODEL,), _HIDDEN),
    _BLOCK + "mlp/dense_1/lora_kernel_b": ((None, MODEL), _HIDDEN),
    _BLOCK + "mlp/gate/kernel": ((None, MODEL), _HIDDEN),  # (D, M)
    _BLOCK + "mlp/gate/bias": ((MODEL,), _HIDDEN),
    _BLOCK + "mlp/gate/lora_kernel_b": ((None, MODEL), _HIDDEN),
    _BLOCK + "mlp/dense_2/kernel": ((MODEL, None), _HIDDEN),  # (M, D)
    _BLOCK + "mlp/dense_2/lora_kernel_a": ((MODEL, None), _HIDDEN),
    "(?:.*/)?patches/projection/kernel": ((None, None, None, MODEL), "width"),  # (p, p, C, D)
    "(?:.*/)?position_embedding/table": ((None, MODEL), "width"),  # (T, D)
    "(?:.*/)?pre_logits/kernel": ((None, MODEL), _UNITS),  # (D, R)
    "(?:.*/)?pre_logits/bias": ((MODEL,), _UNITS),
    "(?:.*/)?head/kernel": ((MODEL, None), "width"),  # (D, K) or (R, K)
}


def layout_map(mesh: keras.distribution.DeviceMesh) -> keras.distribution.LayoutMap:
    """Keras' map from the paths of weights to their layouts; other weights stay whole.

    Args:
        mesh: Has axes "batch" and "model".
    """
    layouts = keras.distribution.LayoutMap(mesh)
    for pattern, (axes, _) in _RULES.items():
        layouts[pattern] = axes
    # Otherwise the residual stream would be split like the embeddings.
    layouts["(?:.*/)?position_embedding/output"] = (BATCH, None, None)
    return layouts


class ModelParallel(keras.distribution.ModelParallel):
    """Keras' `ModelParallel` with the layouts of this file.

    Args:
        mesh: Has axes "batch" and "model".
    """

    def __init__(self, mesh: keras.distribution.DeviceMesh):
        super().__init__(layout_map=layout_map(mesh), batch_dim_name=BATCH)

    def get_variable_layout(self, variable):
        layout = super().get_variable_layout(variable)
        if getattr(variable, "_layout", None) is None and MODEL in layout.axes:
            parts = _parts(self.device_mesh)
            size = variable.shape[layout.axes.index(MODEL)]
            if size % parts:
                field = next(f for p, (_, f) in _RULES.items() if re.fullmatch(p, variable.path))
                raise ValueError(
                    f"{field} must be a multiple of {parts}, the devices that share the weights. "
                    f"Received: {field}={size}, with {variable.path} of shape "
                    f"{tuple(variable.shape)}"
                )
        return layout

    def get_tensor_layout(self, path):
        # Outside a compiled step a model may be called on any number of images, and JAX cannot
        # split three images over two devices.
        return super().get_tensor_layout(path) if jax_utils.is_in_jax_tracing_scope() else None


def check_layouts(
    model: keras.Model, mesh: keras.distribution.DeviceMesh, whole: int = WHOLE
) -> None:
    """Raises if a rule for this model fits no weight, or anything large is not split.

    The state of the optimizer is checked too: moments, averages, sums of gradients.

    Args:
        model: A built and compiled `ViT`. For other models only the sizes are checked.
        mesh: The mesh that it was built on.
        whole: Size of the largest variable that every device may hold in full.
    """
    paths = [weight.path for weight in model.weights]
    if isinstance(getattr(model, "config", None), keras_vit.ViTConfig):
        unused = [p for p in expected(model.config) if not any(re.fullmatch(p, x) for x in paths)]
        if unused:
            raise ValueError(
                "Every layout must fit a weight of the model. "
                f"Received: model={model.name!r}, where none is called {' or '.join(unused)}"
            )
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer else ())]
    if left := unsplit(variables, _parts(mesh), whole):
        names = ", ".join(f"{v.path} {tuple(v.shape)}" for v in left)
        raise ValueError(
            f"Variables of more than {whole:,} values must be split over the {_parts(mesh)} "
            f"devices that share the weights. Received: {names}"
        )


def expected(config: keras_vit.ViTConfig) -> Iterable[str]:
    """Patterns of `layout_map` that must fit a weight of a model with this config."""
    absent = ["lora_kernel"]  # adapters are optional
    if not config.qkv_bias:
        absent.append("value)/bias")
    if not config.dense_bias:
        absent += ["mlp/dense_1/bias", "mlp/gate/bias"]
    if config.mlp != "swiglu":
        absent.append("mlp/gate")
    if config.position_embedding != "learned":
        absent.append("/table")
    if config.representation_size is None:
        absent.append("pre_logits")
    if not config.num_classes:
        absent.append("head/")
    return [pattern for pattern in _RULES if not any(word in pattern for word in absent)]


def unsplit(variables: Sequence[keras.Variable], parts: int, whole: int) -> list[keras.Variable]:
    """Variables of more than `whole` values of which a device holds more than its share."""
    return [
        variable
        for variable in variables
        if math.prod(variable.shape) > whole
        and math.prod(variable.value.sharding.shard_shape(tuple(variable.shape))) * parts
        > math.prod(variable.shape)
    ]


def _parts(mesh):
    return mesh.shape[list(mesh.axis_names).index(MODEL)]
