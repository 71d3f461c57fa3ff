"""How many tokens each block merges, and which configs can merge any (ToMe, arXiv 2210.09461)."""

from typing import Any

from keras_vit.config_rules import is_int, require

SCHEDULES = ("constant", "decreasing")
POOLINGS = ("token", "token_pair", "token_mean", "mean", "mean_all")
"""Poolings of one vector an image, without attention of their own."""


def merged_tokens(config: Any) -> tuple[int, ...]:
    """How many tokens each block merges: as many fewer follow. At most half of the patches.

    Args:
        config: A `ViTConfig`.
    """
    left, counts = config.num_patches, []
    for wanted in wanted_tokens(config):
        counts.append(mergeable(wanted, left))
        left -= counts[-1]
    return tuple(counts)


def wanted_tokens(config: Any) -> tuple[int, ...]:
    """What `token_merging` asks of each block, before the limit of half of the patches."""
    r, depth = config.token_merging, config.depth
    if config.token_merging_schedule == "constant" or depth == 1:
        return (r,) * depth
    return tuple(2 * r * (depth - 1 - i) // (depth - 1) for i in range(depth))  # 2 r to 0


def mergeable(wanted: int, patches: int) -> int:
    """How many of so many tokens can be merged: each into another of the other half."""
    return min(wanted, patches // 2)


def check_merging(config: Any) -> None:
    """Raises `ValueError` for a config whose tokens cannot be merged."""
    r = config.token_merging
    require(is_int(r) and r >= 0, "token_merging", "be an int >= 0", r)
    if not r:
        return
    where = config.attention_positions
    for holds, why in (
        (
            where is None,
            f"position_embedding={config.position_embedding!r}: attention must know each patch's "
            "place",
        ),
        (config.score_diagonal, "score_diagonal=False: a merged token stands for several patches"),
        (
            config.pooling in POOLINGS,
            f"pooling={config.pooling!r}; it must be one of {', '.join(map(repr, POOLINGS))}",
        ),
    ):
        require(holds, "token_merging", f"be 0 with {why}", r)
