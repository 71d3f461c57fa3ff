"""What a config's `position_embedding` means for the attention of each block."""

from typing import Any

from keras_vit.config import ViTConfig


def rotary(config: ViTConfig) -> dict[str, Any] | None:
    """The arguments of each block's `RotaryEmbedding`, or None."""
    if config.attention_positions not in ("rope", "rope_mixed"):
        return None
    return {
        "grid": config.grid,
        "num_prefix_tokens": config.num_prefix_tokens,
        "learned": config.attention_positions == "rope_mixed",
        "base": config.rope_base,
        "coordinates": config.rope_coordinates,
        "order": config.rope_order,
        "pairs": config.rope_pairs,
        "offset": config.rope_offset,
        "reference_grid": config.rope_grid,
    }


def relative(config: ViTConfig) -> dict[str, Any] | None:
    """The arguments of each block's `RelativePositions`, or None."""
    if not (config.attention_positions or "").startswith("relative"):
        return None
    return {
        "kind": config.attention_positions,
        "grid": config.grid,
        "num_prefix_tokens": config.num_prefix_tokens,
        "mlp_dim": config.relative_mlp_dim,
    }
