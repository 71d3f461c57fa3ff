"""What a run says on the terminal: what is about to be trained, and what was reached."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from keras_vit.train import folder_recipe
from keras_vit.train.distribution import Devices
from keras_vit.train.run.run_status import MODEL, OBJECTIVE

if TYPE_CHECKING:
    from keras_vit.train.fit import RunPlan


def summary_of_plan(plan: "RunPlan") -> str:
    """What is about to be trained, on what."""
    recipe, source, devices = plan.recipe, plan.source, plan.devices
    batch = recipe.run.batch_size
    classes = f"of {source.num_classes} classes" if source.num_classes else "without labels"
    what = recipe.name
    if recipe.objective.name != "labels" and recipe.objective.name not in what:
        what += f" ({recipe.objective.name})"
    lines = [
        f"{what}: {plan.vit.count_params():,} parameters, "
        f"{source.train.num_examples:,} training and {source.test.num_examples:,} test "
        f"images {classes}",
        machine(devices),
    ]
    update = batch * recipe.optimizer.accumulate
    line = f"{plan.steps:,} steps of {batch:,} in {plan.epochs:,} epochs"
    if devices.replicas > 1:
        line += f", {batch // devices.replicas:,} a device"
    if update != batch:
        line += f", an update every {update:,}"
    line += f"; learning rate {recipe.learning_rate:g} for the whole"
    if recipe.optimizer.base_batch is not None:
        given, base = recipe.optimizer.learning_rate, recipe.optimizer.base_batch
        line += f" ({given:g} for {base:,})"
    lines.append(line)
    if recipe.name == "folder":
        lines += ["", "Chosen by the number of images:", folder_recipe.choices(recipe), ""]
    if plan.start.step:
        epoch = min(plan.start.epoch + 1, plan.epochs)
        lines.append(f"resumes at step {plan.start.step:,}, in epoch {epoch:,}")
    return "\n".join(lines)


def summary_of_results(results: dict[str, Any], workdir: Path) -> str:
    """What was reached, and where it is."""
    after = f"after {results['seconds'] / 60:.1f} minutes"
    if "top1" in results:
        top5 = "" if results["top5"] is None else f", top-5 {results['top5']:.2%}"
        return (
            f"\nTest: top-1 {results['top1']:.2%}{top5}, {after}\n"
            f"{workdir}/report.md    curves, mistakes and what to do next\n"
            f"{workdir}/{MODEL}  the model\n\n"
            "To go on:\n"
            f"  keras-vit predict {shlex.quote(str(workdir))} IMAGE\n"
            f"  keras-vit explain {shlex.quote(str(workdir))} IMAGE\n"
            f"  keras-vit export {shlex.quote(str(workdir))} --to saved_model"
        )
    knn = f", k-NN accuracy {results['knn']:.2%}" if "knn" in results else ""
    return (
        f"\nTest: loss {results['val_loss']:.4g}{knn}, {after}\n"
        f"{workdir}/report.md        curves, pictures and what to do next\n"
        f"{workdir}/{MODEL}      the ViT, without a head\n"
        f"{workdir}/{OBJECTIVE}  what it was trained in"
    )


def machine(devices: Devices) -> str:
    """One line: devices and versions."""
    name = keras.backend.backend()
    version = __import__(name).__version__
    return f"{devices}; Keras {keras.__version__} on {name} {version}"
