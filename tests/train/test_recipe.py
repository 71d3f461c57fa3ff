"""Recipes as data: overriding by name, close names, types, and the round trip through JSON."""

import dataclasses
import json

import pytest

from keras_vit.train import recipe as recipes
from keras_vit.train.recipe import Augment, Data, Evaluation, Model, Recipe, Run, override

pytestmark = pytest.mark.backend_free


def example(**changes):
    fields = {
        "name": "example",
        "data": Data("tfds:flowers", "/data", "train[:98%]", "train[98%:]"),
        "model": Model(variant="vit_b16", config={"drop_path": 0.1, "image_size": [24, 16]}),
        "run": Run(batch_size=7, epochs=2.5),
        "evaluation": Evaluation(few_shot=(1, 5)),
    }
    return Recipe(**{**fields, **changes})


@pytest.mark.parametrize(
    ("setting", "section", "field", "value"),
    [
        ("optimizer.learning_rate=3e-4", "optimizer", "learning_rate", 3e-4),
        ("optimizer.learning_rate=1", "optimizer", "learning_rate", 1.0),
        ("optimizer.name=lamb", "optimizer", "name", "lamb"),
        ("optimizer.global_clipnorm=1.5", "optimizer", "global_clipnorm", 1.5),
        ("optimizer.global_clipnorm=None", "optimizer", "global_clipnorm", None),
        ("augment.flip=true", "augment", "flip", True),
        ("augment.flip=False", "augment", "flip", False),
        ("augment.crop_area=[0.2,1]", "augment", "crop_area", (0.2, 1.0)),
        ("evaluation.few_shot=[3,4,5]", "evaluation", "few_shot", (3, 4, 5)),
        ("data.path=/a=b", "data", "path", "/a=b"),
        ("data.train=train[:90%]", "data", "train", "train[:90%]"),
        ("run.jit_compile=null", "run", "jit_compile", None),
        ("model.weights=hf://org/name", "model", "weights", "hf://org/name"),
    ],
)
def test_override_converts_to_the_type_of_the_field(setting, section, field, value):
    before = example()
    after = override(before, [setting])
    got = getattr(getattr(after, section), field)
    assert got == value and type(got) is type(value)
    untouched = {f.name for f in dataclasses.fields(Recipe)} - {section}
    assert all(getattr(after, name) == getattr(before, name) for name in untouched)
    assert before == example()


def test_override_reaches_the_model_config():
    after = override(example(), ["model.config.width=20", "model.config.pooling=mean"])
    assert after.model.config["width"] == 20 and after.model.config["pooling"] == "mean"
    assert after.model.config["drop_path"] == 0.1
    assert "width" not in example().model.config


def test_override_uses_the_last_of_two():
    settings = ["run.seed=1", "run.seed=2"]
    assert override(example(), settings).run.seed == 2


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("optimizer.learning_rat=1", ["learning_rat", "learning_rate"]),
        ("optimiser.learning_rate=1", ["optimiser", "optimizer"]),
        ("run.learning_rate=1", ["learning_rate", "optimizer.learning_rate"]),
        ("learning_rate=1", ["optimizer.learning_rate"]),
        ("model.config.widht=3", ["widht", "width"]),
        ("optimizer.learning_rate=fast", ["optimizer.learning_rate", "float", "'fast'"]),
        ("optimizer.learning_rate=true", ["optimizer.learning_rate", "float"]),
        ("run.batch_size=1.5", ["run.batch_size", "int"]),
        ("run.batch_size=true", ["run.batch_size", "int"]),
        ("augment.flip=1", ["augment.flip", "bool"]),
        ("optimizer.name=adamm", ["optimizer.name", "adamw"]),
        ("augment.crop_area=[1]", ["augment.crop_area"]),
        ("evaluation.few_shot=[1.5]", ["evaluation.few_shot"]),
        ("optimizer=3", ["optimizer", "learning_rate"]),
        ("optimizer.learning_rate.x=3", ["optimizer.learning_rate.x"]),
        ("optimizer.learning_rate", ["NAME=VALUE"]),
        ("run.epochs=null", ["epochs", "steps"]),
        ("optimizer.learning_rate=NaN", ["optimizer.learning_rate"]),
        ("model.config.width.x=3", ["width.x", "width"]),
        ('model.config={"widht": 3}', ["widht", "width"]),
        ('model.config={"width": "wide"}', ["model.config.width", "int", "'wide'"]),
        ("run.epochs=0", ["run.epochs", "greater than 0"]),
        ("augment.repeats=0", ["augment.repeats", "at least 1"]),
        ("augment.mixup=-0.2", ["augment.mixup", "at least 0"]),
        ("augment.erasing=25", ["augment.erasing", "from 0 to 1"]),
        ("augment.rand_augment_magnitude=31", ["augment.rand_augment_magnitude", "from 0 to 30"]),
        ("augment.crop_area=[1,0.08]", ["augment.crop_area", "smaller first"]),
        ("loss.label_smoothing=10", ["loss.label_smoothing", "from 0 to 1"]),
        ("optimizer.clipnorm=-1", ["optimizer.clipnorm", "greater than 0"]),
        ("optimizer.weight_decay=-0.1", ["optimizer.weight_decay", "at least 0"]),
        ("schedule.final=2", ["schedule.final", "from 0 to 1"]),
    ],
)
def test_bad_setting_is_refused_with_the_reason(setting, words):
    with pytest.raises(ValueError) as error:
        override(example(), [setting])
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: recipes.Optimizer("lion"), "optimizer.name must be one of 'adamw'"),
        (lambda: recipes.Schedule("linear"), "schedule.name must be one of 'cosine'"),
        (lambda: recipes.Loss("Sigmoid"), "loss.name must be one of 'softmax'"),
        (lambda: Model(method="LoRA"), "model.method must be one of 'full'"),
        (lambda: Augment(crop="random"), "augment.crop must be one of 'none'"),
    ],
)
def test_unknown_names_are_refused_in_python_too(make, word):
    with pytest.raises(ValueError, match=word):
        make()


def test_epochs_are_converted_to_steps():
    after = override(example(run=Run(7, epochs=1)), ["run.epochs=3"])
    assert after.run.epochs == 3.0
    assert after.steps(100) == round(3 * 100 / 7)
    assert example(run=Run(7, steps=11)).steps(100) == 11
    assert example(run=Run(7, epochs=0.001)).steps(100) == 1


def test_steps_replace_epochs_and_vice_versa():
    after = override(example(), ["run.steps=5"])
    assert after.run.steps == 5 and after.run.epochs is None and after.run.batch_size == 7
    after = override(after, ["run.epochs=3"])
    assert after.run.epochs == 3.0 and after.run.steps is None


def test_json_round_trip(tmp_path):
    before = override(example(), ["augment.crop_area=[0.3,0.9]", "optimizer.ema_momentum=0.9"])
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(before.to_dict()))
    after = recipes.Recipe.from_file(path)
    assert after == before
    assert after.evaluation.few_shot == (1, 5) and after.augment.crop_area == (0.3, 0.9)
    assert after != example()


def test_from_dict_checks_names_and_types():
    fields = example().to_dict()
    with pytest.raises(ValueError, match="batch_sise.*near: batch_size"):
        Recipe.from_dict({**fields, "run": {"batch_sise": 3}})
    with pytest.raises(ValueError, match=r"run\.seed must be int"):
        Recipe.from_dict({**fields, "run": {**fields["run"], "seed": "x"}})
    with pytest.raises(ValueError, match="modle.*near: model"):
        Recipe.from_dict({**fields, "modle": {}})
    with pytest.raises(ValueError, match="widht.*near: width"):
        Recipe.from_dict({**fields, "model": {"config": {"widht": 3}}})


def test_differences_name_each_field_that_changed():
    old = example()
    assert recipes.changed_fields(old, example()) == []
    new = override(old, ["optimizer.learning_rate=0.5", "model.config.width=20"])
    assert recipes.changed_fields(old, new) == [
        "model.config.width: (unset) -> 20",
        "optimizer.learning_rate: 0.001 -> 0.5",
    ]
    assert dataclasses.replace(old, augment=Augment(flip=True)) != old


# -- the objective


def test_override_reaches_the_options_of_an_objective():
    settings = ["objective.options.mask_ratio=0.6", "objective.name=mae"]  # in any order
    after = override(example(), [*settings, "objective.options.decoder_depth=2"])
    assert after.objective.name == "mae" and not after.objective.needs_labels
    assert after.objective.options == {"mask_ratio": 0.6, "decoder_depth": 2}
    assert override(after, ["objective.options.mask_ratio=0.5"]).objective.options == {
        "mask_ratio": 0.5,
        "decoder_depth": 2,
    }
    assert override(after, ["objective.options={}"]).objective.options == {}
    assert example().objective == recipes.Objective() and example().objective.needs_labels
    views = override(
        example(),
        ["objective.name=dino", "objective.options.local_crops=4", "objective.options.local_size=8"]
        + ["objective.options.local_area=[0.1, 0.3]", "objective.options.student_temp=1"],
    ).objective.options
    assert views["local_area"] == (0.1, 0.3) and type(views["student_temp"]) is float


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["objective.name=mea"], ["objective.name", "mae"]),
        (["objective.options.mask_ratio=0.6"], ["must be empty for objective.name='labels'"]),
        (
            ["objective.name=mae", "objective.options.mask_ration=0.6"],
            ["objective.options has no field 'mask_ration'; near: mask_ratio"],
        ),
        (
            ["objective.name=mae", "objective.options.mask_ratio=most"],
            ["objective.options.mask_ratio must be float", "'most'"],
        ),
        (["objective.name=mae", "objective.options.mask_ratio.x=1"], ["mask_ratio.x", "near:"]),
        (["objective.name=mae", "objective.options.seed=1"], ["no field 'seed'", "run.seed"]),
        (["objective.name=dino", "objective.options.local_crop=1"], ["local_crops"]),
        (["objective.name=distillation"], ["objective.teacher must name a model"]),
        (["objective.teacher=x.keras"], ["objective.teacher must be None", "'labels'"]),
        (
            ["objective.name=distillation", "objective.teacher=x", "loss.name=sigmoid"],
            ["loss.name must be 'softmax'"],
        ),
    ],
)
def test_bad_objective_is_refused_with_the_reason(settings, words):
    with pytest.raises(ValueError) as error:
        override(example(), settings)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_objective_survives_json_and_old_recipes_have_none():
    settings = ["objective.name=mae", "objective.options.mask_ratio=0.6", "evaluation.knn=7"]
    before = override(example(), settings)
    fields = json.loads(json.dumps(before.to_dict()))
    assert Recipe.from_dict(fields) == before
    assert recipes.changed_fields(example(), before) == [
        "evaluation.knn: 5000 -> 7",
        "objective.name: 'labels' -> 'mae'".replace("'", ""),
        "objective.options.mask_ratio: (unset) -> 0.6",
    ]
    fields["objective"]["options"]["mask_rate"] = 1
    with pytest.raises(ValueError, match=r"no field 'mask_rate'; near: mask_ratio"):
        Recipe.from_dict(fields)
    old = example().to_dict()
    del old["objective"], old["evaluation"]["knn"], old["optimizer"]["clipnorm"]
    assert Recipe.from_dict(old) == example()
