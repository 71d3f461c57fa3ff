"""Every recipe: its schedule, weight decay, augmentation, and a few steps of training."""

import dataclasses
import io

import numpy as np
import pytest
from PIL import Image

import keras_vit
from keras_vit.train import list_recipes, load_recipe, run_batches
from keras_vit.train.build import build_model, build_objective, compile_model
from keras_vit.train.data.sources import Source
from keras_vit.train.data.splits import IndexedSplit
from keras_vit.train.distribution import Devices
from keras_vit.train.fit import RunPlan
from keras_vit.train.optim.optimizer import decays, make_optimizer, make_schedule
from keras_vit.train.recipe import Augment

IMAGENET = dict(num_examples=1_281_167, classes=1000, shape=(None, None, 3))
SETS = {
    "digits": dict(num_examples=1437, classes=10, shape=(8, 8, 1)),
    "fashion_mnist": dict(num_examples=60_000, classes=10, shape=(28, 28, 1)),
    "cifar10_plain": dict(num_examples=50_000, classes=10, shape=(32, 32, 3)),
    "cifar10_scratch": dict(num_examples=50_000, classes=10, shape=(32, 32, 3)),
    "cifar10_scratch_long": dict(num_examples=50_000, classes=10, shape=(32, 32, 3)),
    "cifar10_finetune": dict(num_examples=50_000, classes=10, shape=(32, 32, 3)),
    "cifar10_finetune_b16": dict(num_examples=49_000, classes=10, shape=(32, 32, 3)),
    "cifar100_finetune": dict(num_examples=49_000, classes=100, shape=(32, 32, 3)),
    "flowers_finetune": dict(num_examples=1020, classes=102, shape=(None, None, 3)),
    "imagenet1k_vit_s16": {**IMAGENET, "num_examples": 1_268_355},
    "imagenet1k_deit_s16": IMAGENET,
    "imagenet1k_deit3_b16": IMAGENET,
    "augreg_vit_b16": {**IMAGENET, "num_examples": 1_268_355},
    "cifar10_mae": dict(num_examples=50_000, classes=10, shape=(32, 32, 3)),
    "cifar10_distill": dict(num_examples=50_000, classes=10, shape=(32, 32, 3)),
    "cifar10_few_labels": dict(num_examples=5000, classes=10, shape=(32, 32, 3)),
    "imagenet1k_mae_b16": IMAGENET,
    "imagenet1k_dino_s16": IMAGENET,
    "imagenet1k_deit_distilled_s16": IMAGENET,
    "folder": dict(num_examples=500, classes=4, shape=(None, None, 3)),
}
# Steps of the whole run, the end of warm-up, the peak rate, and the rate of the last step.
RATES = {
    "digits": (1796, 180, 2e-3, 0.0),
    "fashion_mnist": (5625, 300, 5e-3, 0.0),
    "cifar10_plain": (10_156, 400, 5e-3, 0.0),
    "cifar10_scratch": (8398, 200, 6e-3, 0.0),
    "cifar10_scratch_long": (39_062, 3910, 1e-3, 0.0),
    "cifar10_finetune": (2344, 200, 3e-4, 0.0),
    "cifar10_finetune_b16": (10_000, 500, 0.03, 0.0),
    "cifar100_finetune": (10_000, 500, 0.03, 0.0),
    "flowers_finetune": (500, 100, 0.03, 0.0),
    "imagenet1k_vit_s16": (111_477, 10_000, 1e-3, 0.0),
    "imagenet1k_deit_s16": (375_342, 6255, 1e-3, 1e-5),
    "imagenet1k_deit3_b16": (500_456, 3130, 3e-3, 0.0),
    "augreg_vit_b16": (92_897, 10_000, 1e-3, 0.0),
    "cifar10_mae": (11719, 400, 1e-3, 0.0),
    "cifar10_distill": (4297, 400, 5e-3, 0.0),
    "cifar10_few_labels": (1562, 100, 1e-3, 0.0),
    "imagenet1k_mae_b16": (250_228, 12_520, 2.4e-3, 0.0),
    "imagenet1k_dino_s16": (375_342, 12_510, 2e-3, 1e-6),
    "imagenet1k_deit_distilled_s16": (375_342, 6255, 1e-3, 1e-5),
    "folder": (312, 15, 1e-4, 0.0),
}
FINETUNE = Augment(crop="inception", crop_area=(0.05, 1.0), flip=True)
DEIT = Augment(
    crop="inception",
    flip=True,
    rand_augment_layers=2,
    rand_augment_magnitude=9,
    erasing=0.25,
    mixup=0.8,
    cutmix=1.0,
    repeats=3,
)
AUGMENT = {
    "digits": Augment(),
    "fashion_mnist": Augment(crop="pad", crop_padding=2, flip=True),
    "cifar10_plain": Augment(crop="pad", flip=True),
    "cifar10_scratch": Augment(crop="pad", flip=True, cutout=8),
    "cifar10_scratch_long": dataclasses.replace(DEIT, crop="pad"),
    "cifar10_finetune": Augment(crop="pad", crop_padding=10, flip=True),
    "cifar10_finetune_b16": FINETUNE,
    "cifar100_finetune": FINETUNE,
    "flowers_finetune": FINETUNE,
    "imagenet1k_vit_s16": dataclasses.replace(
        FINETUNE, rand_augment_layers=2, rand_augment_magnitude=10, mixup=0.2
    ),
    "imagenet1k_deit_s16": DEIT,
    "imagenet1k_deit3_b16": Augment(
        crop="inception",
        flip=True,
        three_augment=True,
        color_jitter=0.3,
        mixup=0.8,
        cutmix=1.0,
        repeats=3,
    ),
    "augreg_vit_b16": dataclasses.replace(
        FINETUNE, rand_augment_layers=2, rand_augment_magnitude=20, mixup=0.8
    ),
    "cifar10_mae": Augment(crop="pad", flip=True),
    "cifar10_distill": Augment(crop="pad", flip=True),
    "cifar10_few_labels": Augment(
        crop="pad", flip=True, rand_augment_layers=1, rand_augment_magnitude=5
    ),
    "imagenet1k_mae_b16": Augment(crop="inception", crop_area=(0.2, 1.0), flip=True),
    "imagenet1k_dino_s16": Augment(),  # the views are the objective's
    "imagenet1k_deit_distilled_s16": DEIT,
    "folder": Augment(
        crop="inception",
        crop_area=(0.5, 1.0),
        flip=True,
        rand_augment_layers=2,
        rand_augment_magnitude=9,
    ),
}
MORE_KERNELS = {
    "mae": {"embed", "pixels"},
    "dino": {"dense_0", "dense_1", "dense_2", "head"},
    "distillation": {"class", "distillation"},
}
NAMES = tuple(list_recipes())
# AdamW, Muon, SGD and LAMB; softmax and sigmoid; both precisions; arrays and files.
EVERYWHERE = ("digits", "cifar10_scratch", "flowers_finetune", "imagenet1k_deit3_b16")
# Nothing else decays in any recipe, and with SGD nothing decays.
KERNELS = {"patches", "query", "key", "value", "attention_output", "dense_1", "dense_2", "head"}


@pytest.mark.backend_free
def test_every_recipe_has_expected_values_here():
    assert SETS.keys() == RATES.keys() == AUGMENT.keys() == set(NAMES)


@pytest.mark.backend_free
@pytest.mark.parametrize("name", NAMES)
def test_learning_rate(name):
    recipe = load_recipe(name)
    steps, warmup, peak, last = RATES[name]
    assert recipe.steps(SETS[name]["num_examples"]) == steps
    schedule = make_schedule(recipe.schedule, recipe.learning_rate, steps)
    rate = [float(schedule(step)) for step in (0, warmup // 2, warmup, steps - 1)]
    assert rate == pytest.approx([0, peak * (warmup // 2) / warmup, peak, last], rel=1e-4, abs=1e-9)


@pytest.mark.backend_free
@pytest.mark.parametrize("name", NAMES)
def test_augmentation_of_the_recipe(name):
    assert load_recipe(name).augment == AUGMENT[name]


SMALLER = {
    "mae": {"decoder_width": 8, "decoder_depth": 1, "decoder_heads": 2},
    "dino": {"num_prototypes": 12, "hidden_dim": 8, "bottleneck_dim": 8},
}


def small(name, folder=None):
    """The recipe with its own data shapes and options, but a tiny model and three steps."""
    recipe = load_recipe(name)
    config = {
        **recipe.model.config,
        **{"width": 8, "depth": 2, "num_heads": 2, "mlp_dim": 12},
        "patch_size": 2 if name == "digits" else 32,
    }
    if recipe.model.variant is None and name != "digits":
        config["patch_size"] = recipe.model.config.get("patch_size", 14)
    if "stem" in config:
        config["stem_width"] = 16
    if recipe.model.variant:  # a factory's default size
        config.setdefault("image_size", 224)
    if "representation_size" in config:
        config["representation_size"] = 8
    model = dataclasses.replace(recipe.model, variant=None, weights=None, config=config)
    run = dataclasses.replace(recipe.run, batch_size=6, epochs=None, steps=3)
    schedule = dataclasses.replace(recipe.schedule, warmup_steps=1)
    options = recipe.objective.options | SMALLER.get(recipe.objective.name, {})
    objective = dataclasses.replace(recipe.objective, options=options)
    if objective.teacher is not None:
        fields = {k: v for k, v in config.items() if "token" not in k and k != "pooling"}
        objective = dataclasses.replace(objective, teacher=str(folder / "teacher.keras"))
        fields["num_classes"] = SETS[name]["classes"]
        fields.setdefault("image_size", SETS[name]["shape"][0])
        keras_vit.ViT(keras_vit.ViTConfig(**fields)).save(objective.teacher)
    return dataclasses.replace(recipe, model=model, run=run, schedule=schedule, objective=objective)


def build(name, folder):
    """The small recipe, its data, and the model that it trains."""
    recipe, source = small(name, folder), mock(name)
    return recipe, source, build_objective(build_model(recipe, source), recipe, 3)


def mock(name, count=12):
    """Random images of the dataset's shape; of many sizes, as JPEG files, if it has none."""
    classes, (height, width, channels) = SETS[name]["classes"], SETS[name]["shape"]
    rng = np.random.default_rng(0)
    if height is None:
        images = []
        for i in range(count):
            pixels = rng.integers(0, 256, (50 + i, 70 - i, channels), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "JPEG")
            images.append(file.getvalue())
    else:
        images = rng.integers(0, 256, (count, height, width, channels), dtype=np.uint8)
    split = IndexedSplit(images, rng.integers(0, classes, count))
    return Source(name, None, classes, (height, width, channels), split, split)


@pytest.mark.parametrize(
    "name",
    [n if n in EVERYWHERE else pytest.param(n, marks=pytest.mark.backend_free) for n in NAMES],
)
def test_trains_on_mock_data(name, tmp_path):
    recipe, source, model = build(name, tmp_path)
    compile_model(model, recipe, 3)
    before = [np.array(w) for w in model.trainable_weights]
    batches = run_batches.training(RunPlan(recipe, source, Devices(), model, 3, 3, 1))
    losses = model.fit(batches, steps_per_epoch=1, epochs=3, verbose=0, shuffle=False).history
    assert np.isfinite(losses["loss"]).all()
    moved = [not np.array_equal(a, w) for a, w in zip(before, model.trainable_weights, strict=True)]
    assert any(moved)


@pytest.mark.backend_free
@pytest.mark.parametrize("name", NAMES)
def test_weight_decay(name, tmp_path):
    recipe, _, model = build(name, tmp_path)
    trained = {v.path for v in model.trainable_variables}  # not a teacher's
    decaying = {path for path, decay in decays(model).items() if decay and path in trained}
    kept = {path.split("/")[-2] for path in decaying}
    extra = {"pre_logits"} if recipe.model.config.get("representation_size") else set()
    extra |= MORE_KERNELS.get(recipe.objective.name, set())
    if "stem" in recipe.model.config:
        extra |= {"root_conv", *(f"conv_{i}" for i in range(1, 8))}
    assert {part for part in kept if part != "projection"} <= KERNELS | extra
    no_head = {"patches"} | ({"head"} if recipe.objective.name != "labels" else set())
    assert (KERNELS - no_head) | MORE_KERNELS.get(recipe.objective.name, set()) <= kept
    optimizer = make_optimizer(recipe, model, 3)
    optimizer.build(model.trainable_variables)
    decayed = {v.path for v in model.trainable_variables if optimizer._use_weight_decay(v)}
    assert decayed == decaying
    assert bool(optimizer.weight_decay) == (recipe.optimizer.weight_decay > 0)
