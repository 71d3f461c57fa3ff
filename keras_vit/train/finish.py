"""What a run leaves behind: the trained model, what it reaches, and the report.

Everything here is done once, by one process on one device, after `fit`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

import keras_vit
from keras_vit.atomic import atomic_path
from keras_vit.model_weights import float32_copy, merged_weights
from keras_vit.train import run_batches
from keras_vit.train.data.batching import test_batches
from keras_vit.train.data.splits import Split
from keras_vit.train.distribution.devices import jit_compile
from keras_vit.train.few_shot import features_of_both, few_shot_accuracies
from keras_vit.train.knn import knn_accuracy
from keras_vit.train.run import objective_figures, report, report_figures, trained_model
from keras_vit.train.run.run_status import MODEL, OBJECTIVE, RESULTS
from keras_vit.train.run.summary import machine

if TYPE_CHECKING:
    from keras_vit.train.fit import RunPlan

Weights = Mapping[str, np.ndarray] | Sequence[np.ndarray]


def trained_weights(plan: "RunPlan") -> Weights:
    """Copies what `fit` has trained. Every process must call it."""
    if plan.recipe.objective.needs_labels:
        return merged_weights(plan.vit)
    return [np.array(keras.ops.convert_to_numpy(v)) for v in plan.model.variables]


def finish(
    plan: "RunPlan", workdir: Path, weights: Weights, reached: dict[str, Any]
) -> dict[str, Any]:
    """Saves what was trained, evaluates it and writes the report.

    Args:
        plan: The plan of the run.
        workdir: The run folder.
        weights: What `trained_weights` returned.
        reached: The results so far.

    Returns:
        All results.
    """
    if plan.recipe.objective.needs_labels:
        reached = _finish_classifier(plan, workdir, weights, reached)
    else:
        reached = _finish_objective(plan, workdir, weights, reached)
    with atomic_path(workdir / RESULTS) as temporary:  # last: the run is finished
        temporary.write_text(json.dumps(reached, indent=2) + "\n", encoding="utf-8")
    return reached


def _finish_classifier(plan, workdir, weights, reached) -> dict[str, Any]:
    recipe, source = plan.recipe, plan.source
    model = float32_copy(plan.vit, weights)
    tests = _batches(plan, source.test)
    model = trained_model.save_model(model, workdir / MODEL, recipe.loss.name, tests)
    predictions = report.predict(model, tests)
    reached = {"top1": predictions.top1, "top5": predictions.top5, **reached}
    reached |= _by_features(plan, model, with_knn=False)
    rows = {"top-1 on the test data": f"{predictions.top1:.2%}"}
    if predictions.top5 is not None:
        rows["top-5"] = f"{predictions.top5:.2%}"
    rows["test pictures"] = f"{len(predictions.truth):,}"
    rows |= _facts(plan, model, reached)
    figures = report_figures.draw(model, _pictures(plan), workdir)
    mistakes = report.mistakes(predictions, model.config.labels, workdir, recipe.name)
    report.write(workdir, recipe, rows, [*mistakes, *figures])
    return reached


def _finish_objective(plan, workdir, weights, reached) -> dict[str, Any]:
    recipe, source = plan.recipe, plan.source
    objective = trained_model.save_objective(plan.model, weights, workdir / OBJECTIVE)
    tests = _batches(plan, source.test)
    model = float32_copy(objective.trained_vit)
    model = trained_model.save_model(model, workdir / MODEL, None, tests)
    objective.compile(keras.optimizers.SGD(), jit_compile=jit_compile())
    logs = objective.evaluate(run_batches.evaluation(plan, False), return_dict=True, verbose=0)
    reached = {"val_loss": float(logs["loss"]), **reached}
    rows = {"loss on the test data": f"{reached['val_loss']:.5g}"}
    reached |= _by_features(plan, model, with_knn=plan.knn)
    if plan.knn:
        rows["k-NN accuracy on the test data"] = f"{reached['knn']:.2%}"
    rows["test pictures"] = f"{source.test.num_examples:,}"
    rows |= _facts(plan, model, reached)
    figures = [
        *objective_figures.draw(objective, model, source, workdir),
        *report_figures.draw(model, _pictures(plan), workdir),
    ]
    report.write(workdir, recipe, rows, figures)
    return reached


def _batches(plan: "RunPlan", split: Split) -> Any:
    size, classes = plan.evaluation_batch, plan.source.num_classes
    return test_batches(split, plan.vit.config, size, classes)


def _pictures(plan: "RunPlan") -> Any:
    return plan.source.test.ordered().as_numpy_iterator()


def _by_features(plan: "RunPlan", model: keras_vit.ViT, with_knn: bool) -> dict[str, Any]:
    """The accuracies that the features give, and that the recipe asks for."""
    shots = plan.recipe.evaluation.few_shot
    if not (shots or with_knn):
        return {}
    train, test = (_batches(plan, split) for split in (plan.source.train, plan.source.test))
    data = features_of_both(model, train, test)
    found = {"knn": knn_accuracy(*data)} if with_knn else {}
    return found | ({"few_shot": few_shot_accuracies(*data, shots)} if shots else {})


def _facts(plan: "RunPlan", model: keras_vit.ViT, reached: dict[str, Any]) -> dict[str, str]:
    """Rows of the report that every run has."""
    batch, num_examples = plan.recipe.run.batch_size, plan.source.train.num_examples
    steps = reached["steps"]
    facts = {
        "training": f"{steps:,} steps of {batch}, {steps * batch / num_examples:.4g} "
        f"epochs of {num_examples:,} images",
        "time": f"{reached['seconds'] / 60:.1f} minutes, evaluation included",
        "images a second": f"{reached['images_per_second']:,.0f}, without evaluation",
        "parameters": f"{model.count_params():,}",
        "machine": machine(plan.devices),
    }
    for name, value in reached.get("few_shot", {}).items():
        facts[f"linear, {name.removeprefix('few_shot_')} images a class"] = f"{value:.2%}"
    return facts
