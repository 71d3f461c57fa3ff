"""The training library: everything around `fit` that a whole run needs, on each backend.

    keras_vit.train.train("digits", "runs/digits")          # a recipe, by name, file or object

    recipe.py          what a recipe is; recipe_files.py loads one, build.py makes its model
    fit.py             a recipe as plain Keras: builds, compiles, fits, leaves a run folder;
                       run_batches.py makes its batches, finish.py what it leaves
    gallery.py         augmented training images, before a run
    evaluation.py      accuracy of a model or a run; few_shot.py the linear evaluation,
                       knn.py neighbors by features
    flexivit.py        a random patch size for each batch
    recomputation.py   gradient checkpointing
    objectives/        training without labels, or with more than labels
    data/              where images come from, their order, batches
    augment/           what is done to training images
    optim/             optimizers, schedules, layer-wise decay
    checkpoint/        a killed run resumes bit for bit: `Checkpoint`
    distribution/      several devices and machines: `scope`
    run/               the run folder, logs, the report

Each name is imported when it is first asked for. Images are read by tf.data on every backend, so
that what makes batches needs TensorFlow; `Checkpoint`, `scope` and the optimizers do not.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_vit.train.augment.image import augment_image
    from keras_vit.train.augment.mixing import mix_batch
    from keras_vit.train.augment.multi_crop import multi_crop
    from keras_vit.train.build import build_model, build_objective, compile_model
    from keras_vit.train.checkpoint.checkpoint import Checkpoint
    from keras_vit.train.data.batching import test_batches, train_batches
    from keras_vit.train.data.multi_crop_batching import multi_crop_batches
    from keras_vit.train.data.sources import open_source
    from keras_vit.train.distribution import scope
    from keras_vit.train.evaluation import evaluate
    from keras_vit.train.few_shot import evaluate_few_shot
    from keras_vit.train.fit import train
    from keras_vit.train.flexivit import FlexiViT
    from keras_vit.train.gallery import preview
    from keras_vit.train.knn import KNNAccuracy, evaluate_knn
    from keras_vit.train.objectives.dino import DINO
    from keras_vit.train.objectives.distillation import Distillation
    from keras_vit.train.objectives.mae import MAE
    from keras_vit.train.objectives.patch_prediction import MaskedPatchPrediction
    from keras_vit.train.objectives.simmim import SimMIM
    from keras_vit.train.optim.layer_decay import layer_factors, with_layer_factors
    from keras_vit.train.optim.muon import Muon
    from keras_vit.train.optim.optimizer import decays, make_optimizer
    from keras_vit.train.optim.schedule import make_schedule
    from keras_vit.train.recipe import Augment, Data, Recipe
    from keras_vit.train.recipe_files import list_recipes, load_recipe
    from keras_vit.train.recomputation import remat

__all__ = [
    "Augment",
    "Checkpoint",
    "DINO",
    "Data",
    "Distillation",
    "FlexiViT",
    "KNNAccuracy",
    "MAE",
    "MaskedPatchPrediction",
    "Muon",
    "Recipe",
    "SimMIM",
    "augment_image",
    "build_model",
    "build_objective",
    "compile_model",
    "decays",
    "evaluate",
    "evaluate_few_shot",
    "evaluate_knn",
    "layer_factors",
    "list_recipes",
    "load_recipe",
    "make_optimizer",
    "make_schedule",
    "mix_batch",
    "multi_crop",
    "multi_crop_batches",
    "open_source",
    "preview",
    "remat",
    "scope",
    "test_batches",
    "train",
    "train_batches",
    "with_layer_factors",
]

_LATER = {
    "Augment": "recipe",
    "Checkpoint": "checkpoint.checkpoint",
    "DINO": "objectives.dino",
    "Data": "recipe",
    "Distillation": "objectives.distillation",
    "FlexiViT": "flexivit",
    "KNNAccuracy": "knn",
    "MAE": "objectives.mae",
    "MaskedPatchPrediction": "objectives.patch_prediction",
    "Muon": "optim.muon",
    "Recipe": "recipe",
    "SimMIM": "objectives.simmim",
    "augment_image": "augment.image",
    "build_model": "build",
    "build_objective": "build",
    "compile_model": "build",
    "decays": "optim.optimizer",
    "evaluate": "evaluation",
    "evaluate_few_shot": "few_shot",
    "evaluate_knn": "knn",
    "layer_factors": "optim.layer_decay",
    "list_recipes": "recipe_files",
    "load_recipe": "recipe_files",
    "make_optimizer": "optim.optimizer",
    "make_schedule": "optim.schedule",
    "mix_batch": "augment.mixing",
    "multi_crop": "augment.multi_crop",
    "multi_crop_batches": "data.multi_crop_batching",
    "open_source": "data.sources",
    "preview": "gallery",
    "remat": "recomputation",
    "scope": "distribution",
    "test_batches": "data.batching",
    "train": "fit",
    "train_batches": "data.batching",
    "with_layer_factors": "optim.layer_decay",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    return globals()[name]
