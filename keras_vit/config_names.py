"""What an unknown keyword was meant to be: names of other libraries, and similar names of ours."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from keras_vit.config_rules import short

RENAMED = {
    # Keras Applications and KerasHub
    "classes": "num_classes",
    "image_shape": "image_size",
    "hidden_dim": "width",
    "num_layers": "depth",
    "dropout_rate": "dropout",
    "class_names": "labels",
    "activation": "classifier_activation",
    # timm
    "img_size": "image_size",
    "in_chans": "in_channels",
    "embed_dim": "width",
    "global_pool": "pooling",
    "drop_rate": "dropout",
    "attn_drop_rate": "attention_dropout",
    "drop_path_rate": "drop_path",
    "patch_drop_rate": "patch_dropout",
    "init_values": "layer_scale",
    "reg_tokens": "num_registers",
    # transformers
    "num_labels": "num_classes",
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_attention_heads": "num_heads",
    "intermediate_size": "mlp_dim",
    "num_channels": "in_channels",
    "hidden_act": "gelu",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "layer_norm_eps": "norm_epsilon",
    "layerscale_value": "layer_scale",
    "num_register_tokens": "num_registers",
    # vit-pytorch
    "dim": "width",
    "heads": "num_heads",
    "dim_head": "head_dim",
    "channels": "in_channels",
    "pool": "pooling",
    "emb_dropout": "dropout",
}
"""Names in other libraries -> ours, where the value means the same."""
POOLINGS = {"avg": "mean", "gap": "mean", "cls": "token", "tok": "token"}
"""Values of `pooling` in other libraries -> ours."""
SOURCES = (
    "pass a checkpoint to the factory, as vit_b16(weights='augreg_in21k'), or to "
    "from_pretrained; `keras-vit models` lists them"
)
LISTED = "help(keras_vit.ViTConfig) lists them"


def check_names(fields: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises one error for all fields that are not `known`, which says what to pass instead."""
    unknown = [name for name in fields if name not in known]
    if not unknown:
        return
    answers = "; ".join(dict.fromkeys(_answer(n, fields[n], known) for n in unknown[:8]))
    answers += "" if answers.endswith("?") else "."
    received = ", ".join(f"{name[:200]}={short(fields[name])}" for name in unknown[:8])
    raise ValueError(f"fields must be those of ViTConfig: {answers} Received: {received}")


def pooling_hint(value: Any) -> str:
    """What a value of `pooling` in another library is called here, as the end of a rule."""
    ours = POOLINGS.get(value) if isinstance(value, str) else None
    return f" ({value!r} is {ours!r} here)" if ours else ""


def _answer(name: str, value: Any, known: Collection[str]) -> str:
    match name, value:
        case "include_top", False:
            return "for include_top=False pass num_classes=0, which leaves out the head"
        case "include_top", _:
            return "omit include_top: a model has a head unless num_classes=0"
        case "pretrained", False:
            return "omit pretrained: without weights= a model is random"
        case (("pretrained" | "load_weights" | "preset" | "checkpoint_path"), _):
            return f"for {name} {SOURCES}"
        case "input_shape", [height, width, channels]:
            return (
                f"for input_shape pass image_size=({short(height)}, {short(width)}) and "
                f"in_channels={short(channels)}"
            )
        case "input_shape", _:
            return "for input_shape pass image_size and in_channels"
        case "input_tensor", _:
            return "for input_tensor call the model: model(tensor)"
        case "mlp_ratio", _:
            return "for mlp_ratio pass mlp_dim, which is the ratio times width"
        case (("id2label" | "label2id"), _):
            return f"for {name} pass labels, the names in order"
        case (("include_rescaling" | "include_preprocessing"), _):
            return (
                f"for {name} wrap the model: keras_vit.Classifier(model) takes pixels from 0 to 255"
            )
        case (("features_only" | "out_indices"), _):
            return f"for {name} call model.features(blocks=[...])"
    if (ours := RENAMED.get(name)) in known:
        if ours == "pooling" and isinstance(value, str):
            return f"for {name}={short(value)} pass pooling={POOLINGS.get(value, value)[:40]!r}"
        return f"for {name} pass {ours}"
    near = difflib.get_close_matches(name[:200], known)
    return f"did you mean {', '.join(near)}?" if near else LISTED
