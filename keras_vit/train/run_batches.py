"""The batches of a run, by its recipe: what its objective trains on, and is evaluated on."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_vit import ViTConfig
from keras_vit.train.data.batching import test_batches, train_batches
from keras_vit.train.data.sources import Source
from keras_vit.train.data.splits import Part, subset
from keras_vit.train.knn import KNNAccuracy
from keras_vit.train.objectives.by_name import split_options
from keras_vit.train.recipe import Recipe

if TYPE_CHECKING:
    from keras_vit.train.fit import RunPlan


def training(plan: "RunPlan") -> Any:
    """The infinite batches of this process, from the step at which the run begins or resumes."""
    recipe, devices = plan.recipe, plan.devices
    one = (devices.process, devices.processes)
    if plan.views is not None:
        return _views(plan, plan.source, recipe.run.batch_size, plan.start.step, one)
    batch, seed = recipe.run.batch_size, recipe.run.seed
    start = plan.start.step
    return train_batches(plan.source, plan.vit.config, recipe.augment, batch, seed, start, *one)


def first_batch(recipe: Recipe, source: Source, config: ViTConfig) -> tuple[Any, np.ndarray]:
    """The images, or views, and targets of the first step of a run, as arrays."""
    size, seed = min(recipe.run.batch_size, source.train.num_examples), recipe.run.seed
    if (views := views_of(recipe)) is not None:
        from keras_vit.train.data.multi_crop_batching import multi_crop_batches

        batches = multi_crop_batches(source, config, size, seed, **views)
    else:
        batches = train_batches(source, config, recipe.augment, size, seed)
    images, targets = next(iter(batches.as_numpy_iterator()))
    return images, targets


def evaluation(plan: "RunPlan", together: bool = True) -> Any:
    """The test data, in batches that an evaluation of the objective reads.

    Args:
        plan: The plan of the run.
        together: Whether all devices of the run share the batches; else one process has them.
    """
    size, devices, source = plan.evaluation_batch, plan.devices, plan.source
    together = together and devices.replicas > 1
    one = (devices.process, devices.processes) if together else (0, 1)
    if plan.views is not None:  # the same random views each time
        count = source.test.num_examples
        size = min(size, count - count % devices.replicas)
        tests = dataclasses.replace(source, train=source.test)
        return _views(plan, tests, size, 0, one).take(count // size)
    part = Part.of(size, *one) if together else None
    return test_batches(source.test, plan.vit.config, size, source.num_classes, part)


def knn(plan: "RunPlan") -> KNNAccuracy:
    """The callback that measures the features in each evaluation."""
    source, config, size = plan.source, plan.vit.config, plan.evaluation_batch
    train, test = (
        test_batches(subset(split, plan.knn), config, size, source.num_classes)
        for split in (source.train, source.test)
    )
    return KNNAccuracy(train, test, every=None)


def views_of(recipe: Recipe) -> dict[str, Any] | None:
    """The arguments of `multi_crop`, for an objective that is trained on views; else None."""
    if recipe.objective.name != "dino":
        return None
    return split_options("dino", recipe.objective.options)[1]


def _views(plan, source, size, start, one) -> Any:
    from keras_vit.train.data.multi_crop_batching import multi_crop_batches

    config, seed = plan.vit.config, plan.recipe.run.seed
    return multi_crop_batches(source, config, size, seed, start, *one, **plan.views)
