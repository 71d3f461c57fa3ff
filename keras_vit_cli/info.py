"""`keras-vit info`: what a checkpoint or a run folder contains, and whether it is complete."""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keras_vit_cli import output
from keras_vit_cli.backend import load_library
from keras_vit_cli.options import CHECKPOINT, EXPORTS, AsJson, Debug, Verbose, check_source

if TYPE_CHECKING:
    from keras_vit.config import ViTConfig
    from keras_vit.weights.fetch.known import Known
    from keras_vit.weights.load import CheckpointInfo


def info(
    source: Annotated[
        str,
        typer.Argument(
            help=f"A run folder, a file of `keras-vit export` or a checkpoint: {CHECKPOINT}"
        ),
    ],
    as_json: AsJson = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Show what a checkpoint, an export or a run folder contains.

    For a checkpoint: its format, model, pixels, and whether every array is used. It is fetched if
    necessary; only the headers of a file are read. For a .tflite, .onnx or .xml file: the model,
    its dtype or quantization, labels and versions. For a run folder: how far the run is, and
    whether its files are intact. If one is damaged, the exit code is 1.
    """
    check_source("source", source)
    load_library()
    if Path(source).suffix in EXPORTS:
        _show_export(Path(source), as_json)
        return
    from keras_vit.train.run import run_status

    if run_status.is_run(source):
        _show_run(Path(source), as_json)
        return
    from keras_vit.weights.fetch import fetch_weights, known

    path = fetch_weights(source)
    checkpoint, row = _inspect(path), known.find(source)
    if as_json:
        output.print_json(checkpoint_json(source, path, row, checkpoint))
        return
    output.print_facts(checkpoint_facts(source, path, row, checkpoint))


def _show_run(folder: Path, as_json: bool) -> None:
    from keras_vit.train.run import run_status

    run, facts = run_status.read_run(folder), []
    path = folder / run_status.MODEL
    run["model"] = None
    if path.is_file():
        try:
            checkpoint = _inspect(path)
        except Exception as error:  # whatever Keras raises for a damaged file
            run["problems"].append(f"{path} cannot be opened: {type(error).__name__}: {error}")
        else:
            run["model"] = checkpoint_json(str(path), path, None, checkpoint)
            facts = list(checkpoint_facts(str(path), path, None, checkpoint))
    if as_json:
        output.print_json(run)
    else:
        output.print_facts([*run_facts(run), *facts])
    if run["problems"]:
        raise typer.Exit(1)


def _show_export(path: Path, as_json: bool) -> None:
    from keras_vit import runtime

    opened: Any = runtime.open(path)
    record = opened.record
    files = [path, path.with_suffix(".bin")] if opened.kind == "openvino" else [path]
    size = sum(file.stat().st_size for file in files)
    if as_json:
        output.print_json({"path": str(path), "kind": opened.kind, "bytes": size, **record})
        return
    dtype, quantize = record.get("dtype") or "float32", record.get("quantize")
    facts = {
        "file": f"{path}, {size / 1e6:,.1f} MB",
        "kind": opened.kind,
        "computes in": dtype if quantize is None else f"{quantize}, the rest in {dtype}",
        "model": _architecture(opened.config),
        "classes": opened.config.num_classes or "none: it returns features",
        "labels": "none" if opened.labels is None else ", ".join(opened.labels),
        "images": record["images"],
        "pixels": pixels(opened.config),
        "made by": ", ".join(f"{name} {v}" for name, v in record.get("versions", {}).items()),
        "runs on": opened.where,
    }
    output.print_facts([*facts.items()])


def _inspect(path: Path) -> "CheckpointInfo":
    from keras_vit.runtime.keras_model import inspect_keras
    from keras_vit.weights import load

    return inspect_keras(path) if path.suffix == ".keras" else load.inspect(path)


def checkpoint_json(
    source: str, path: Path, row: "Known | None", checkpoint: "CheckpointInfo"
) -> dict[str, Any]:
    """What `--json` prints of a checkpoint."""
    fields = {f.name: getattr(checkpoint, f.name) for f in dataclasses.fields(checkpoint)}
    return {
        "source": source,
        "path": str(path),
        "known": row._asdict() if row else None,
        **fields,
        "config": checkpoint.config.to_dict(),
        "loadable": not (checkpoint.missing or checkpoint.extra or checkpoint.misshaped),
    }


def checkpoint_facts(
    source: str, path: Path, row: "Known | None", checkpoint: "CheckpointInfo"
) -> Iterator[tuple[str, object]]:
    """What is printed of a checkpoint: titles and values."""
    config = checkpoint.config
    yield "source", source
    if str(path) != source:
        yield "path", path
    if row:
        yield "stated in", row.reference
        yield "license", row.license or "not stated there"
    yield "format", checkpoint.format
    yield "arrays", f"{checkpoint.num_arrays:,}, {checkpoint.nbytes / 1e6:,.1f} MB"
    yield "parameters", f"{checkpoint.parameters:,}"
    yield "model", _architecture(config)
    yield "classes", config.num_classes or "none: it returns features"
    yield "numerics", _numerics(config)
    yield "positions", _positions(config)
    yield "pixels", pixels(config)
    yield "read", f"{len(checkpoint.loaded)} of {checkpoint.num_arrays} arrays"
    for name, value in checkpoint.assumed.items():
        yield "assumed", f"{name}={value!r}: the file does not state it"
    for name, reason in checkpoint.dropped.items():
        yield "left out", f"{name}: {reason}"
    for title in ("missing", "extra", "misshaped"):
        for line in getattr(checkpoint, title):
            yield title, line


def run_facts(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is printed of the run that `run_status.read_run` describes: titles and values."""
    recipe, data = run["recipe"], run["recipe"].get("data", {})
    yield "run", run["path"]
    yield "recipe", str(recipe.get("name", "not known"))
    yield "data", ", ".join(str(v) for v in (data.get("source"), data.get("path")) if v)
    yield "trains", _model(recipe.get("model", {}))
    yield "state", _state(run)
    for name, value in (run["results"] or {}).items():
        yield "result", f"{name} {_short(value)}"
    for entry in run["checkpoints"]:
        yield "checkpoint", _checkpoint(entry)
    for name in run["set_aside"]:
        yield "set aside", f"{name}: it was corrupt when the run resumed"
    for name in run["left_over"]:
        doing = (
            "being written"
            if run["process"]
            else "left by a killed process, removed when the run resumes"
        )
        yield "unfinished", f"{name}: {doing}"
    if last := run["log"]["last"]:
        yield "log", f"{run['log']['epochs']} epochs; the last:"
        for name, value in last.items():
            yield "", f"{name} {_short(value)}"
    for problem in run["problems"]:
        yield "problem", problem


def _numerics(config: "ViTConfig") -> str:
    """What no shape shows: the epsilon of the norms and the MLP's activation."""
    norm = "RMSNorm" if config.norm == "rms" else "LayerNorm"
    activation = "SiLU" if config.mlp == "swiglu" else f"{config.gelu} GELU"
    return f"{norm} epsilon {config.norm_epsilon:g}, {activation}"


def _positions(config: "ViTConfig") -> str:
    """The position embedding, and what becomes of it at another resolution."""
    kind, in_attention = config.position_embedding, config.attention_positions
    if kind == "none":
        return kind
    stored = config.position_table in ("learned", "learned_2d")
    stored = stored or in_attention in ("relative", "relative_bias")
    rule = f"resampled as {config.interpolation} does" if stored else "computed for any resolution"
    return f"{kind}, {rule}"


def _architecture(config: "ViTConfig") -> str:
    height, width = config.image_size
    patch = "x".join(map(str, dict.fromkeys(config.patch_size)))
    parts = [
        f"{height} x {width} x {config.in_channels}, patch {patch}, width {config.width}, "
        f"depth {config.depth}, {config.num_heads} heads, MLP {config.mlp_dim}",
        "class token" if config.class_token else "no class token",
    ]
    if config.stem:
        parts.insert(1, f"{config.stem} stem {config.stem_stages}")
    if config.num_registers:
        parts.append(f"{config.num_registers} registers")
    if config.distillation_token:
        parts.append("distillation token")
    parts += [name for name, has in _traits(config).items() if has]
    parts.append(f"pooling {config.pooling}")
    return ", ".join(parts)


def _traits(config: "ViTConfig") -> dict[str, Any]:
    """What a block has that the paper's has not."""
    return {
        "LayerScale": config.layer_scale,
        "gated MLP (SwiGLU)": config.mlp == "swiglu",
        "norms after each sum": config.block_norm == "post",
        "norms after each branch": config.block_norm == "res_post",
        "norm before the blocks": config.embedding_norm,
        "norm inside attention": config.attention_inner_norm,
        "norm inside the MLP": config.mlp_inner_norm,
        "q/k norm": config.qk_norm,
        "shifted patches": config.patch_shift,
        "learned scales of the scores": config.score_scale == "learned",
        "scores without the diagonal": not config.score_diagonal,
        "no q/k/v biases": not config.qkv_bias,
        "no key bias": config.qkv_bias and not config.key_bias,
    }


def pixels(config: "ViTConfig") -> str:
    """How an image is resized and normalized."""
    height, width = config.image_size
    how = f"{config.resize_method} to {height} x {width}"
    if (r := config.crop_fraction) is not None:
        cover = f"{int(height / r)} x {int(width / r)}"
        how = f"{config.resize_method} to cover {cover}, the center of {height} x {width}"
    return f"{how}; (pixel / 255 - {config.pixel_mean}) / {config.pixel_std}"


def _model(model: Mapping[str, Any]) -> str:
    config = [f"{name} {value}" for name, value in model.get("config", {}).items()]
    parts = [model.get("variant"), *config]
    if weights := model.get("weights"):
        parts.append(f"starting from {weights}")
    if (method := model.get("method", "full")) != "full":
        parts.append(method)
    return ", ".join(part for part in parts if part)


def _state(run: Mapping[str, Any]) -> str:
    text, at = run["state"], run["position"]
    if run["process"]:
        text += f": {run['process']}"
    if run["state"] == "finished":
        return text
    if at is None:
        return f"{text}; there is no checkpoint to resume from"
    total = f" of {run['steps']:,}" if run["steps"] else ""
    where = f"step {at['step']:,}{total}"
    if at["stopped"]:
        return f"{text}; training ended at {where}, only the report is missing"
    where += f", epoch {at['epoch'] + 1:,}"
    if at["step_in_epoch"]:
        where += f" (step {at['step_in_epoch']:,} of {at['steps_per_epoch']:,})"
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run["saved"]))
    return f"{text}; last saved at {where}, {moment}"


def _checkpoint(entry: Mapping[str, Any]) -> str:
    text = f"step {entry['step']:,}"
    if not entry["whole"]:
        return f"{text}: broken, {entry['bytes'] / 1e6:,.1f} MB"
    at = entry["position"]
    text += f", epoch {at['epoch'] + (at['step_in_epoch'] > 0):,}, {entry['bytes'] / 1e6:,.1f} MB"
    return f"{text}, {_age(entry['time'])} old, whole{', the best' if entry['best'] else ''}"


def _age(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for length, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
