"""Accuracy of a model or of a run: top-1 and top-5, or of its features; each sample counts once."""

import dataclasses
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

import keras_vit
from keras_vit.classifier import vit_of
from keras_vit.config_rules import in_other_order
from keras_vit.train.data.batching import test_batches
from keras_vit.train.data.sources import Source, open_source
from keras_vit.train.distribution.devices import jit_compile
from keras_vit.train.few_shot import features_of_both, few_shot_accuracies
from keras_vit.train.knn import knn_accuracy
from keras_vit.train.recipe import Data, Recipe
from keras_vit.train.run import report
from keras_vit.train.run.run_status import MODEL, RECIPE

logger = logging.getLogger(__name__)


def evaluate(
    model: str | os.PathLike,
    *,
    data: str | os.PathLike | None = None,
    path: str | os.PathLike | None = None,
    split: str | None = None,
    batch_size: int | None = None,
    few_shot: Sequence[int] = (),
    knn: int | None = None,
) -> dict[str, Any]:
    """Evaluates a saved model on test data.

    Args:
        model: A run folder, a `.keras` file, or whatever `keras_vit.from_pretrained` takes.
        data: "digits", "tfds:NAME", or a folder of images. None is the data of the run.
        path: Where the data is: TFDS' data_dir, or another folder for a run on a folder.
        split: A TFDS split or a sub-folder; None is the test split of the run, or "test".
        batch_size: None is that of the run, or 128.
        few_shot: Adds the paper's linear evaluation on so many training images a class.
        knn: Adds the accuracy of so many nearest neighbors among the training images, by features.
            None is 20 for a model without a head, and does without for others.

    Returns:
        "model", "data", "samples", "seconds", "top1", with more than five classes "top5", a
        "few_shot_N" for each of `few_shot`, and "knn". A model without a head has no "top1".

    Example:

    >>> keras_vit.train.evaluate("runs/digits", few_shot=[5, 10])
    """
    folder = Path(model)
    run = Recipe.from_file(folder / RECIPE) if (folder / RECIPE).is_file() else None
    chosen = _data(model, run, data, path, split)
    loaded = _load(model if run is None else folder / MODEL)
    source = open_source(chosen)
    headless = not loaded.config.num_classes
    if not headless:
        _check_classes(loaded.config, source)
    of_run = run and (run.evaluation.batch_size or run.run.batch_size)
    batch_size = batch_size or of_run or 128
    tests = test_batches(source.test, loaded.config, batch_size, source.num_classes)
    images = test_batches(source.train, loaded.config, batch_size, source.num_classes)
    start = time.monotonic()
    reached = {}
    if not headless:
        predictions = report.predict(loaded, tests)
        reached["top1"] = predictions.top1
        if predictions.top5 is not None:
            reached["top5"] = predictions.top5
    found = {
        "model": str(model),
        "data": f"{chosen.source}:{chosen.test}",
        "samples": source.test.num_examples,
        "seconds": time.monotonic() - start,
        **reached,
    }
    if few_shot or knn is not None or headless:
        features = features_of_both(loaded, images, tests)
        found |= few_shot_accuracies(*features, few_shot)
        if knn is not None or headless:
            found["knn"] = knn_accuracy(*features, k=20 if knn is None else knn)
        if headless:
            found["seconds"] = time.monotonic() - start
    return found


def _data(model, run: Recipe | None, data, path, split) -> Data:
    """The data of the run, with what the arguments say otherwise."""
    chosen = run.data if run else None
    if data is not None:
        data = os.fspath(data)
        known = data == "digits" or data.startswith("tfds:")
        chosen = Data(data) if known else Data("folder", data)
    if chosen is None:
        raise ValueError(
            "data (--data) must be given where the model is not a run folder (with recipe.json in "
            f"it). Received: {model}"
        )
    if path is not None:
        _check_path(chosen, data, path)
        chosen = dataclasses.replace(chosen, path=os.fspath(path))
    return dataclasses.replace(chosen, test=split or chosen.test)


def _check_path(chosen: Data, data: Any, path: Any) -> None:
    """Raises for a path that would not say where the data is."""
    if chosen.source == "digits":
        raise ValueError(
            "path (--path) must be left out for digits, which scikit-learn contains. "
            f"Received: path={os.fspath(path)!r}"
        )
    if data is not None and chosen.source == "folder":
        raise ValueError(
            "path (--path) must be left out where data (--data) is a folder itself. "
            f"Received: path={os.fspath(path)!r}, data={os.fspath(data)!r}"
        )


def _load(source: str | os.PathLike) -> keras_vit.ViT:
    if Path(source).suffix != ".keras":
        model = keras_vit.from_pretrained(source)
    elif not Path(source).is_file():
        raise FileNotFoundError(f"model must be a file that exists. Received: {source}")
    else:
        model = vit_of(keras.saving.load_model(source, compile=False))
    if not isinstance(model, keras_vit.ViT):
        raise ValueError(f"model must be a ViT. Received: {source}, a {type(model).__name__}")
    if not jit_compile():
        model.jit_compile = False
    return model


def _check_classes(config: keras_vit.ViTConfig, source: Source) -> None:
    if config.num_classes == 1:
        raise ValueError(
            "model must have two classes or more: the top class of one logit is the same for every "
            "image. Received: num_classes=1"
        )
    if config.num_classes != source.num_classes:
        raise ValueError(
            f"data must have the model's {config.num_classes} classes. "
            f"Received: {source.name} with {source.num_classes}"
        )
    ours, theirs = config.labels, source.labels
    if ours and theirs and ours != tuple(theirs):
        if in_other_order(ours, theirs):
            raise ValueError(f"data must have its classes in the model's order: {', '.join(ours)}")
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
        logger.warning(
            "%d classes have other names in the data, such as %r for %r",
            len(pairs),
            pairs[0][1],
            pairs[0][0],
        )
