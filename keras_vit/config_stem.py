"""What the fields of a `ViTConfig` about its stem may be."""

from typing import Any

from keras_vit.config_rules import MAX_DEPTH, MAX_SIZE, is_int, is_number, require


def check_stem(config: Any) -> None:
    """Raises `ValueError` for a config with an impossible stem."""
    epsilon = config.stem_epsilon
    positive = is_number(epsilon) and epsilon > 0
    require(positive, "stem_epsilon", "be a positive number", epsilon)
    v, units = config.stem_depths, MAX_DEPTH
    counts = isinstance(v, tuple) and all(is_int(depth) and depth > 0 for depth in v)
    rule = f"be a tuple of positive ints, at most {units} in sum, and () without a stem"
    require(counts and sum(v) <= units and (config.stem or not v), "stem_depths", rule, v)
    if not config.stem:
        return
    stages, conv = len(config.stem_stages), config.stem == "conv"
    rule = "be even in height and width for stem='conv'"
    require(stages > 0 or not conv, "patch_size", rule, config.patch_size)
    most, unit = MAX_SIZE // 2 ** (stages - 1 if conv else stages + 1), 16 if conv else 32
    rule, v = f"be a multiple of {unit}, at most {most} with {stages} stages", config.stem_width
    require(v % unit == 0 and v <= most, "stem_width", rule, v)
    rule, v = f"be False with stem={config.stem!r}", config.ignore_remainder
    require(not v, "ignore_remainder", rule, v)
    fits = all(side % config.stem_stride == 0 for side in config.patch_size)
    rule = f"be a multiple of {config.stem_stride}, the stride of the stem"
    require(fits, "patch_size", rule, config.patch_size)
