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

_BLOCK, _POOLING = r"(?:.*/)?encoder_block_\d+/", "(?:.*/)?pooling/"
_RELATIVE = _BLOCK + "attention/relative_positions/"
_UNITS = "representation_size"


def _attention_and_mlp(where: str, heads: str, hidden: str) -> dict:
    """The rules of a `MultiHeadAttention` and an `MLP`, by head and by hidden unit."""
    return {
        where + "attention/(?:query|key|value)/kernel": ((None, MODEL, None), heads),  # (D, h, d)
        where + "attention/(?:query|key|value)/bias": ((MODEL, None), heads),  # (h, d)
        where + "attention/(?:query|key|value)/lora_kernel_a": ((None, MODEL, None), heads),
        where + "attention/attention_output/kernel": ((MODEL, None, None), heads),  # (h, d, D)
        where + "attention/attention_output/lora_kernel_a": ((MODEL, None, None), heads),
        where + "mlp/dense_1/kernel": ((None, MODEL), hidden),  # (D, M)
        where + "mlp/dense_1/bias": ((MODEL,), hidden),
        where + "mlp/dense_1/lora_kernel_b": ((None, MODEL), hidden),
        where + "mlp/dense_2/kernel": ((MODEL, None), hidden),  # (M, D)
        where + "mlp/dense_2/lora_kernel_a": ((MODEL, None), hidden),
    }


# Path of a weight -> its axes, and the config field of the axis that is split.
_RULES = {
    **_attention_and_mlp(_BLOCK, "num_heads", "mlp_dim"),
    **_attention_and_mlp(_POOLING, "pooling_heads", "pooling_mlp_dim"),
    _BLOCK + "attention/score_scale": ((MODEL,), "num_heads"),  # (h,)
    _RELATIVE + "table": ((None, MODEL), "num_heads"),  # (P, h)
    _RELATIVE + "keys": ((None, MODEL, None), "num_heads"),  # (2T - 1, h, d)
    _BLOCK + "mlp/gate/kernel": ((None, MODEL), "mlp_dim"),  # (D, M)
    _BLOCK + "mlp/gate/bias": ((MODEL,), "mlp_dim"),
    _BLOCK + "mlp/gate/lora_kernel_b": ((None, MODEL), "mlp_dim"),
    "(?:.*/)?stem/.*conv(?:_[0-9]+)?/kernel": ((None, None, None, MODEL), "stem_width"),
    "(?:.*/)?patches/projection/kernel": ((None, None, None, MODEL), "width"),  # (p, p, C, D)
    "(?:.*/)?position_embedding/table": ((None, MODEL), "width"),  # (T, D)
    "(?:.*/)?pre_logits/kernel": ((None, MODEL), _UNITS),  # (D, R)
    "(?:.*/)?pre_logits/bias": ((MODEL,), _UNITS),
    "(?:.*/)?head/kernel": ((MODEL, None), "width"),  # (D, K) or (R, K)
    "(?:.*/)?head/(?:class|distillation)/kernel": ((MODEL, None), "width"),  # (D, K)
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
    if not config.stem:
        absent.append("stem/")
    if not config.qkv_bias:
        absent.append(_BLOCK + "attention/(?:query|key|value)/bias")
    if not config.dense_bias:
        absent += [_BLOCK + "mlp/dense_1/bias", _BLOCK + "mlp/gate/bias"]
    if config.mlp != "swiglu":
        absent.append("mlp/gate")
    if not config.attention_pooling:
        absent.append(_POOLING)
    if config.position_table != "learned":
        absent.append("position_embedding/table")
    if config.score_scale != "learned":
        absent.append("attention/score_scale")
    if config.attention_positions != "relative_bias":
        absent.append("relative_positions/table")
    if config.attention_positions != "relative":
        absent.append("relative_positions/keys")
    if config.representation_size is None:
        absent.append("pre_logits")
    if not config.num_classes:
        absent.append("head/")
    absent.append("head/kernel" if config.pooling == "token_pair" else "head/(?:class")
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
