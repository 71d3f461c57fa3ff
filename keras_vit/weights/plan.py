"""`make_plan`: decides what becomes of every array of a checkpoint before one is read."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from keras_vit.config import ViTConfig
from keras_vit.model_weights import weight_shapes
from keras_vit.weights import adapt
from keras_vit.weights.formats.table import Format, Header, Reading, Row, Shape

# Fields of the checkpoint that a caller may correct, because arrays do not show them. All other
# fields describe the requested model.
ABOUT_SOURCE = (
    *("num_heads", "head_dim", "norm_epsilon", "gelu", "block_norm", "position_embedding"),
    *("rope_base", "rope_coordinates", "rope_order", "rope_pairs", "rope_offset", "rope_grid"),
)

# Fields that the arrays show. Those that a file of ours states are compared with the arrays first:
# no loop and no allocation may depend on a number that the arrays contradict.
SHOWN = (
    *("width", "depth", "mlp_dim", "num_registers", "num_classes"),
    *("stem", "stem_depths", "stem_width"),
)

# What no array shows, of no format. The default may be wrong, so it is never silent.
STATISTICS = ("pixel_mean", "pixel_std")


@dataclasses.dataclass
class Plan:
    """Which arrays are read into which weights, and why the others are not."""

    format: Format
    source: ViTConfig
    """The checkpoint's config."""
    target: ViTConfig
    """The requested model's config."""
    shapes: Mapping[str, Shape]
    """Shapes of our weights in the checkpoint's config."""
    names: dict[str, str]
    """Names in the file by name in the table."""
    rows: list[Row] = dataclasses.field(default_factory=list)
    """The rows that are read."""
    loaded: set[str] = dataclasses.field(default_factory=set)
    """Arrays that are read, by their names in the table."""
    dropped: dict[str, str] = dataclasses.field(default_factory=dict)
    """Arrays that are not needed, by their names in the file, and why."""
    new_head: bool = False
    """Whether the head is new."""
    assumed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Assumed values of fields that nothing in the checkpoint states."""
    missing: list[str] = dataclasses.field(default_factory=list)
    extra: list[str] = dataclasses.field(default_factory=list)
    misshaped: list[str] = dataclasses.field(default_factory=list)

    def differences(self) -> list[str]:
        """Why the checkpoint cannot be loaded, one line per array."""
        missing = [f"missing: {name!r}" for name in self.missing]
        return missing + [f"extra: {name!r}" for name in self.extra] + self.misshaped


def make_plan(
    format: Format,
    prefix: str,
    shapes: Mapping[str, tuple[int, ...]],
    given: Mapping[str, Any],
    *,
    config: Mapping[str, Any],
    pixels: Mapping[str, Any],
    stated: Mapping[str, Any],
) -> Plan:
    """The plan for a file of arrays with these shapes.

    Args:
        format: The file's format.
        prefix: The prefix of its names.
        shapes: Shapes by name, as in the file.
        given: Fields of a `ViTConfig` that the caller passed.
        config: Its `config.json`, or an empty object.
        pixels: The image processor of its `processor_config.json` or `preprocessor_config.json`, or
            an empty object.
        stated: The `ViTConfig` that a file of ours states, or an empty object.
    """
    names: dict[str, str] = {}
    for name in sorted(shapes, key=lambda name: not name.startswith(prefix)):
        short = name.removeprefix(prefix)
        # Of two names that differ by the prefix, only one can be without it.
        names[f"/{name}" if short in names else short] = name
    hints = {**stated, **given}
    if "image_size" in stated:
        hints["image_size"] = stated["image_size"]
    header = Header({short: shapes[name] for short, name in names.items()}, config, pixels, hints)
    _refuse_other_models(format, header)
    reading = format.read_config(header)
    about = {k: v for k, v in given.items() if k in ABOUT_SOURCE}
    shown = {name: reading.fields.get(name, getattr(ViTConfig, name)) for name in SHOWN}
    wrong = [name for name in SHOWN if name in stated and _plain(stated[name]) != shown[name]]
    if shown["stem"] is None and "stem_width" in wrong:  # nothing is as wide
        wrong.remove("stem_width")
    believed = {name: value for name, value in stated.items() if name not in wrong}
    source = _source(reading, {**believed, **about})
    target, new_head = adapt.target_config(source, given)
    plan = Plan(format, source, target, weight_shapes(source), names, new_head=new_head)
    known = {*reading.fields, *believed, *(k for k, v in given.items() if v is not None)}
    silent = {*reading.assumed, *(name for name in STATISTICS if name not in known)}
    plan.assumed = {name: getattr(source, name) for name in sorted(silent)}
    plan.misshaped += [
        f"wrong number: {name}={stated[name]!r} is stated, but the arrays show {shown[name]}"
        for name in wrong
    ]
    _assign(plan, header, format.rows(source, **reading.style))
    return plan


def _plain(value: Any) -> Any:
    """JSON has no tuples."""
    return tuple(value) if isinstance(value, list) else value


def _refuse_other_models(format: Format, header: Header) -> None:
    for pattern, what in format.refused.items():
        if header.has(pattern):
            name = next(name for name in header.shapes if re.match(pattern, name))
            raise ValueError(
                f"source must be a plain ViT. This {format.name} checkpoint has {what}, which ViT "
                f"does not have. Received: an array {name!r}"
            )


def _source(reading: Reading, about: Mapping[str, Any]) -> ViTConfig:
    fields = {**reading.fields, **about}
    labels = fields.get("labels")
    if labels is not None and len(labels) != fields["num_classes"]:
        fields = fields | {"labels": None}
    for name in ("image_size", "patch_size"):
        if fields[name] is None:
            raise ValueError(f"{name} must be stated by the checkpoint. Received: {name}=None")
    sides = zip(_pair(fields["image_size"]), _pair(fields["patch_size"]), strict=True)
    if any(side % patch for side, patch in sides):
        fields["ignore_remainder"] = True  # as a convolution without padding does
    return ViTConfig.from_dict(fields)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _assign(plan: Plan, header: Header, rows: Iterable[Row]) -> None:
    """Assigns arrays of the file to weights of the model, and notes every array that is left."""
    wanted = weight_shapes(plan.target)
    if plan.new_head:
        wanted = {path: shape for path, shape in wanted.items() if not adapt.in_head(path)}
    seen: set[str] = set()
    made: set[str] = set()
    for row in rows:
        expected = row.source_shapes(plan.shapes)
        if row.paths and not any(path in wanted for path in row.paths):
            for name in expected:
                if name in header.shapes:
                    _leave_out(plan, name, row.paths[0])
                    seen.add(name)
            continue
        made.update(row.paths)
        plan.rows.append(row)
        for name, shape in expected.items():
            if name not in header.shapes:
                plan.missing += [name] if name not in plan.missing else []
            elif header.shapes[name] != shape and name not in seen:
                plan.misshaped.append(
                    f"wrong shape: {plan.names[name]!r} {header.shapes[name]}, expected {shape}"
                )
            else:
                plan.loaded.add(name)
            seen.add(name)
    _compare(plan, wanted, made)
    for name in sorted(header.shapes.keys() - seen):
        reasons = (why for pattern, why in plan.format.dropped.items() if re.match(pattern, name))
        if reason := next(reasons, None):
            plan.dropped[plan.names[name]] = reason
        else:
            plan.extra.append(plan.names[name])


def _leave_out(plan: Plan, name: str, path: str) -> None:
    """Notes why the requested model does not have the weight of an array."""
    target = plan.target
    reasons = {
        "head": f"replaced by a new head of {target.num_classes} classes"
        if target.num_classes
        else "no head: num_classes=0",
        "pre_logits": f"replaced: representation_size={target.representation_size}",
        "encoder_norm": f"not used: final_norm={target.final_norm!r}",
        "pooling": f"not used: pooling={target.pooling!r}",
    }
    reason = reasons.get(path.split("/")[0])
    kept = adapt.in_head(path) and target.num_classes and not plan.new_head
    if reason is None or kept:
        plan.extra.append(plan.names[name])
    else:
        plan.dropped[plan.names[name]] = reason


def _compare(plan: Plan, wanted: Mapping[str, Shape], made: set[str]) -> None:
    """Notes weights without an array, and weights whose shape the passed fields change."""
    plan.missing += [f"(for {path})" for path in wanted if path not in made]
    for path in made & wanted.keys():
        saved, new = plan.shapes[path], wanted[path]
        if path in (adapt.PATCHES, adapt.pixel_kernel(plan.source)) or path.endswith(
            adapt.RELATIVE
        ):
            saved = adapt.adapted_shape(path, saved, plan.source, plan.target)
        if saved != new and path != adapt.TABLE:
            plan.misshaped.append(f"wrong shape: {path} is {saved}, but {new} was requested")
    if adapt.TABLE in made & wanted.keys():
        rows, new_rows = plan.source.num_prefix_rows, plan.target.num_prefix_rows
        if rows != new_rows or plan.source.width != plan.target.width:
            plan.misshaped.append(
                f"wrong shape: {adapt.TABLE} has {rows} rows before the patches, "
                f"requested: {new_rows}"
            )
