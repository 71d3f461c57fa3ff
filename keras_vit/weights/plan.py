"""What will become of every array of a checkpoint, settled before one of them is read."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from keras_vit.config import ViTConfig
from keras_vit.model import weight_shapes
from keras_vit.weights import adapt
from keras_vit.weights.formats import recognize
from keras_vit.weights.formats.table import (
    Derived,
    Empty,
    Format,
    Header,
    Pair,
    Reading,
    Row,
    Shape,
)

# What a caller may put right about the checkpoint, because arrays do not show it. All else that is
# given describes the model to make of it.
ABOUT_SOURCE = ("num_heads", "head_dim", "norm_epsilon", "gelu", "block_norm", "patch_size")

# Fields that the arrays show. What a file of ours states of them is compared with the arrays first
# of all: nothing may be looped over or made by a number that no array bears out.
SHOWN = ("width", "depth", "mlp_dim", "num_registers", "num_classes")


@dataclasses.dataclass
class Plan:
    """Which arrays are read into which weights, and what was said of all others."""

    format: Format
    source: ViTConfig
    """The config the checkpoint was made with."""
    target: ViTConfig
    """The config of the model to make."""
    shapes: Mapping[str, Shape]
    """Our weights as the checkpoint has them."""
    names: dict[str, str]
    """Names in the file by name in the table."""
    rows: list[Row] = dataclasses.field(default_factory=list)
    """What is read."""
    loaded: set[str] = dataclasses.field(default_factory=set)
    """Names in the table of arrays that are read."""
    dropped: dict[str, str] = dataclasses.field(default_factory=dict)
    """Names in the file of arrays that are left out on purpose, and why."""
    new_head: bool = False
    """Whether the head is new."""
    assumed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the config that nothing in the checkpoint states, as they were assumed."""
    missing: list[str] = dataclasses.field(default_factory=list)
    extra: list[str] = dataclasses.field(default_factory=list)
    misshaped: list[str] = dataclasses.field(default_factory=list)

    def differences(self) -> list[str]:
        """Everything that keeps the checkpoint from being loaded, a line each."""
        missing = [f"missing: {name!r}" for name in self.missing]
        return missing + [f"extra: {name!r}" for name in self.extra] + self.misshaped


def make_plan(
    shapes: Mapping[str, tuple[int, ...]],
    given: Mapping[str, Any],
    *,
    config: Mapping[str, Any],
    pixels: Mapping[str, Any],
    stated: Mapping[str, Any],
) -> Plan:
    """The plan for a file of arrays with these shapes.

    Args:
        shapes: Shapes by name, as the file has them.
        given: Fields of a `ViTConfig` as the caller gave them.
        config: Its `config.json`, or nothing.
        pixels: Its `preprocessor_config.json`, or nothing.
        stated: The `ViTConfig` that a file of ours states, or nothing.
    """
    format, prefix = recognize(shapes, config)
    names: dict[str, str] = {}
    for name in shapes:
        short = name.removeprefix(prefix)
        names[name if short in names else short] = name
    hints = {**stated, **given}
    if "image_size" in stated:
        hints["image_size"] = stated["image_size"]
    header = Header({short: shapes[name] for short, name in names.items()}, config, pixels, hints)
    _refuse(format, header)
    reading = format.read(header)
    about = {k: v for k, v in given.items() if k in ABOUT_SOURCE}
    shown = {name: reading.fields.get(name, getattr(ViTConfig, name)) for name in SHOWN}
    wrong = [name for name in SHOWN if name in stated and stated[name] != shown[name]]
    believed = {name: value for name, value in stated.items() if name not in wrong}
    source = _source(reading, {**believed, **about})
    target, new_head = adapt.target_config(source, given, reading.new_head)
    plan = Plan(format, source, target, weight_shapes(source), names, new_head=new_head)
    plan.assumed = {name: getattr(source, name) for name in reading.assumed}
    plan.misshaped += [
        f"other number: {name}={stated[name]!r} is stated, and the arrays show {shown[name]}"
        for name in wrong
    ]
    _settle(plan, header, format.pairs(source, **reading.style))
    return plan


def _refuse(format: Format, header: Header) -> None:
    for pattern, what in format.refused.items():
        if header.has(pattern):
            name = next(name for name in header.shapes if re.match(pattern, name))
            raise ValueError(
                f"source must be a plain ViT; this {format.name} checkpoint has {what}, which ViT "
                f"has not. Received: an array {name!r}"
            )


def _source(reading: Reading, about: Mapping[str, Any]) -> ViTConfig:
    fields = {**reading.fields, **about}
    labels = fields.get("labels")
    if labels is not None and len(labels) != fields["num_classes"]:
        fields = fields | {"labels": None}
    return ViTConfig.from_dict(fields)


def _settle(plan: Plan, header: Header, rows: Iterable[Row]) -> None:
    """Gives every array of the file, and every weight of the model, its place in the plan."""
    wanted = weight_shapes(plan.target)
    if plan.new_head:
        wanted = {path: shape for path, shape in wanted.items() if path not in adapt.HEAD}
    seen: set[str] = set()
    made: set[str] = set()
    for row in rows:
        expected = _expected(row, plan.shapes)
        paths = _paths(row)
        if paths and not any(path in wanted for path in paths):
            for name in expected:
                if name in header.shapes:
                    _leave_out(plan, name, paths[0])
                    seen.add(name)
            continue
        made.update(paths)
        plan.rows.append(row)
        for name, shape in expected.items():
            if name not in header.shapes:
                plan.missing += [name] if name not in plan.missing else []
            elif header.shapes[name] != shape and name not in seen:
                plan.misshaped.append(
                    f"other shape: {plan.names[name]!r} {header.shapes[name]}, expected {shape}"
                )
            else:
                plan.loaded.add(name)
            seen.add(name)
    _compare(plan, wanted, made)
    for name in header.shapes:
        if name not in seen:
            _explain(plan, name)


def _expected(row: Row, shapes: Mapping[str, Shape]) -> Mapping[str, tuple[int, ...]]:
    if isinstance(row, Pair):
        return {row.source: row.source_shape(shapes)}
    return row.sources if isinstance(row, Derived) else {row.source: row.shape}


def _paths(row: Row) -> tuple[str, ...]:
    if isinstance(row, Empty):
        return ()
    return row.ours if isinstance(row, Pair) else (row.ours,)


def _leave_out(plan: Plan, name: str, path: str) -> None:
    """An array whose weight the model does not have: named, or not expected."""
    target = plan.target
    reasons = {
        "head": f"replaced by a new head of {target.num_classes} classes"
        if target.num_classes
        else "the head, which num_classes=0 leaves out",
        "pre_logits": f"replaced: representation_size={target.representation_size}",
        "encoder_norm": f"left out: final_norm={target.final_norm!r}",
    }
    reason = reasons.get(path.split("/")[0])
    if reason is None:
        plan.extra.append(plan.names[name])
    else:
        plan.dropped[plan.names[name]] = reason


def _compare(plan: Plan, wanted: Mapping[str, Shape], made: set[str]) -> None:
    """Weights that no array fills, or that the given fields make another shape of."""
    free = {adapt.PATCHES, adapt.TABLE}
    plan.missing += [f"(for {path})" for path in wanted if path not in made]
    for path in made & wanted.keys():
        own, asked = plan.shapes[path], wanted[path]
        if own != asked and path not in free:
            plan.misshaped.append(f"other shape: {path} is {own}, but {asked} was asked for")
    own, asked = plan.shapes[adapt.PATCHES], wanted[adapt.PATCHES]
    if own[:2] + own[3:] != asked[:2] + asked[3:]:
        plan.misshaped.append(f"other shape: {adapt.PATCHES} is {own}, but {asked} was asked for")
    if adapt.TABLE in made & wanted.keys():
        rows, new_rows = plan.source.class_row, plan.target.class_row
        if rows != new_rows or plan.source.width != plan.target.width:
            plan.misshaped.append(
                f"other shape: {adapt.TABLE} has a class row: {rows}, asked for: {new_rows}"
            )


def _explain(plan: Plan, name: str) -> None:
    for pattern, reason in plan.format.dropped.items():
        if re.match(pattern, name):
            plan.dropped[plan.names[name]] = reason
            return
    plan.extra.append(plan.names[name])
