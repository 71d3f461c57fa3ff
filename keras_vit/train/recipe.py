"""What a recipe is: everything that a training run is made of, as plain typed fields.

A recipe file has a function that returns a `Recipe` (see `recipe_files.py`). Any field can be
changed by its name (`override`), and the resolved recipe is written to the run folder as JSON.
"""

import dataclasses
import difflib
import json
import math
import os
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from keras_vit import ViTConfig
from keras_vit.train.objectives.by_name import option_types
from keras_vit.train.recipe_section import Section
from keras_vit.weights.files.documents import read_document


@dataclasses.dataclass(frozen=True)
class Data(Section):
    """Which images."""

    source: str
    """"digits", "tfds:NAME" or "folder"."""
    path: str | None = None
    """TFDS' data_dir, or the folder."""
    train: str = "train"
    """A TFDS split or a sub-folder, or a part of either ("train[:98%]")."""
    test: str = "test"


@dataclasses.dataclass(frozen=True)
class Model(Section):
    """Which model, and what of it is trained."""

    variant: str | None = None
    """A name of `keras_vit.list_variants()`; None for a model that `config` describes alone."""
    weights: str | None = None
    """Initial weights: anything that `keras_vit.from_pretrained` takes; None is random."""
    method: Literal["full", "linear_probe", "lora"] = "full"
    """Train everything, the head alone, or LoRA adapters and the head."""
    lora_rank: int = 8
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `ViTConfig`. Classes, labels and channels come from the data."""


@dataclasses.dataclass(frozen=True)
class Optimizer(Section):
    """How weights are updated."""

    ranges = types.MappingProxyType(
        {
            "learning_rate": (0, math.inf),
            "weight_decay": (0, math.inf),
            "momentum": (0, 1),
            "beta_1": (0, 1),
            "beta_2": (0, 1),
            "ema_momentum": (0, 1),
            "base_batch": (1, math.inf),
        }
    )
    positive = ("global_clipnorm", "clipnorm")

    name: Literal["adamw", "adam", "sgd", "lamb", "muon"] = "adamw"
    learning_rate: float = 1e-3
    """The peak, for the whole batch of all devices."""
    base_batch: int | None = None
    """The batch size that `learning_rate` is for; it is scaled in proportion to others
    (arXiv 1706.02677). None: it is for any batch size."""
    weight_decay: float = 0.0
    """Of kernels only. Keras multiplies it by the learning rate."""
    momentum: float = 0.9
    """Of SGD and Muon."""
    beta_1: float = 0.9
    beta_2: float = 0.999
    global_clipnorm: float | None = None
    """Norm to which all gradients together are clipped."""
    clipnorm: float | None = None
    """Norm to which the gradient of each weight is clipped; not both."""
    layer_decay: float = 1.0
    """Factor of the learning rate from each block to the one below it."""
    ema_momentum: float | None = None
    """Momentum per update of an average of the weights, which is evaluated and saved."""
    accumulate: int = 1
    """Batches whose gradients are averaged for one update."""


@dataclasses.dataclass(frozen=True)
class Schedule(Section):
    """The learning rate: linear warm-up, then a cosine."""

    ranges = types.MappingProxyType({"warmup_steps": (0, math.inf), "final": (0, 1)})

    name: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = 0
    """Updates; with `accumulate` = k there is one in k batches."""
    final: float = 0.0
    """Learning rate at the last step, as a share of the peak."""


@dataclasses.dataclass(frozen=True)
class Augment(Section):
    """What is done to training images, in this order."""

    ranges = types.MappingProxyType(
        {
            "crop_padding": (0, math.inf),
            "rand_augment_layers": (0, math.inf),
            "rand_augment_magnitude": (0, 30),
            "color_jitter": (0, 1),
            "erasing": (0, 1),
            "cutout": (0, math.inf),
            "mixup": (0, math.inf),
            "cutmix": (0, math.inf),
            "repeats": (1, math.inf),
        }
    )

    crop: Literal["none", "pad", "inception"] = "none"
    """As in evaluation; a window of the image padded with black; a random part."""
    crop_padding: int = 4
    """Pixels added on each side for "pad"."""
    crop_area: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest part of the image for "inception"."""
    flip: bool = False
    """Mirror half of the images."""
    rand_augment_layers: int = 0
    """RandAugment's operations per image; 0 for none."""
    rand_augment_magnitude: int = 10
    """RandAugment's magnitude, 0 to 30."""
    three_augment: bool = False
    """DeiT III's: one of grayscale, solarization and Gaussian blur."""
    color_jitter: float = 0.0
    """Largest change of brightness, contrast and saturation."""
    keras_cv: Any = ()
    """Layers of `keras_cv.layers` in their order: pairs of a name and arguments, such as
    `(("RandAugment", {"magnitude": 0.3}), ("MixUp", {"alpha": 0.2}))`, or one pair alone. Those
    that mix the images of a batch come last, and are applied to the batch."""
    erasing: float = 0.0
    """Probability that a random box is replaced by noise."""
    cutout: int = 0
    """Side of a square, in pixels, that is replaced by gray."""
    mixup: float = 0.0
    """MixUp's alpha; 0 for none."""
    cutmix: float = 0.0
    """CutMix's alpha; 0 for none. With both, each batch gets one of the two."""
    repeats: int = 1
    """Repeated augmentation: versions of an image in one batch."""

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "keras_cv", _named_layers(self.keras_cv))
        low, high = self.crop_area
        if not 0 < low <= high <= 1:
            raise ValueError(
                "augment.crop_area must be two shares in (0, 1], the smaller first. "
                f"Received: augment.crop_area={self.crop_area}"
            )


def _named_layers(layers: Any) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Pairs of a name and arguments, from one pair or several."""
    if len(layers) == 2 and isinstance(layers[0], str):
        layers = (layers,)
    for pair in layers:
        match pair:
            case [str(), dict()]:
                continue
        raise ValueError(
            "augment.keras_cv must be pairs of a layer's name and its arguments, such as "
            f'[["RandomHue", {{"factor": 0.2}}]]. Received: augment.keras_cv={layers!r}'
        )
    return tuple((name, arguments) for name, arguments in layers)


@dataclasses.dataclass(frozen=True)
class Objective(Section):
    """What the model is trained for. All but "labels" and "distillation" need no labels."""

    name: Literal["labels", "masked_patches", "mae", "simmim", "dino", "distillation"] = "labels"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of the class, such as `mask_ratio` of `keras_vit.train.MAE`; for "dino" those of
    the views too, such as `local_crops`."""
    teacher: str | None = None
    """For "distillation": a `.keras` file, or anything that `keras_vit.from_pretrained` takes."""

    @property
    def needs_labels(self) -> bool:
        """Whether the data must have labels."""
        return self.name in ("labels", "distillation")

    def checked(self) -> "Objective":
        """The same with its options converted to their types. Raises if they do not fit the name.

        It is called once all fields are set: another name has other options.
        """
        if (self.teacher is None) == (self.name == "distillation"):
            rule = "name a model" if self.teacher is None else "be None"
            raise ValueError(
                f"objective.teacher must {rule} for objective.name={self.name!r}. "
                f"Received: objective.teacher={self.teacher!r}"
            )
        if self.name == "labels":
            if self.options:
                raise ValueError(
                    "objective.options must be empty for objective.name='labels'. "
                    f"Received: objective.options={self.options}"
                )
            return self
        kinds = option_types(self.name)
        options = {
            k: _typed(f"objective.options.{k}", v, _known(kinds, k, "objective.options"))
            for k, v in self.options.items()
        }
        return dataclasses.replace(self, options=options)


@dataclasses.dataclass(frozen=True)
class Loss(Section):
    """What is minimized."""

    ranges = types.MappingProxyType({"label_smoothing": (0, 1)})

    name: Literal["softmax", "sigmoid"] = "softmax"
    label_smoothing: float = 0.0


@dataclasses.dataclass(frozen=True)
class Run(Section):
    """How long, and with what precision."""

    batch_size: int
    epochs: float | None = None
    """Passes over the data; give this or `steps`."""
    steps: int | None = None
    precision: Literal["float32", "mixed_bfloat16", "mixed_float16"] = "float32"
    seed: int = 0
    jit_compile: bool | None = None
    """None: Keras' choice, but no XLA for TensorFlow on a CPU, where it is slower."""
    steps_per_execution: int = 1
    remat: bool = False
    """Whether the backward pass computes the encoder blocks again, for less memory."""
    checkpoint_minutes: float = 10.0
    """Minutes between two checkpoints."""


@dataclasses.dataclass(frozen=True)
class Evaluation(Section):
    """What is evaluated, and when."""

    batch_size: int | None = None
    """None: as in training."""
    every: int = 1
    """Epochs between two evaluations; the last epoch always has one."""
    few_shot: tuple[int, ...] = ()
    """Shots of the linear evaluation after training; () for none."""
    knn: int = 5000
    """How many training and test images are compared by their features in each evaluation, if the
    objective needs no labels and the data has them. After training it is all. 0 for none."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A training run."""

    name: str
    data: Data
    model: Model
    run: Run
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    augment: Augment = Augment()
    loss: Loss = Loss()
    evaluation: Evaluation = Evaluation()
    objective: Objective = Objective()

    def __post_init__(self):
        if (self.run.epochs is None) == (self.run.steps is None):
            raise ValueError(
                "run must state either epochs or steps. Received: "
                f"run.epochs={self.run.epochs}, run.steps={self.run.steps}"
            )
        if self.run.epochs is not None and self.run.epochs <= 0:
            raise ValueError(
                f"run.epochs must be greater than 0. Received: run.epochs={self.run.epochs}"
            )
        if self.objective.name == "distillation" and self.loss.name != "softmax":
            raise ValueError(
                "loss.name must be 'softmax' for objective.name='distillation'. "
                f"Received: loss.name={self.loss.name!r}"
            )

    def steps(self, num_examples: int) -> int:
        """Batches in the whole run."""
        if self.run.epochs is None:
            return typing.cast(int, self.run.steps)  # a run states one of the two
        return max(1, round(self.run.epochs * num_examples / self.run.batch_size))

    @property
    def learning_rate(self) -> float:
        """The peak for this run's batch: all samples that are averaged for one update."""
        rate, base = self.optimizer.learning_rate, self.optimizer.base_batch
        if base is None:
            return rate
        return rate * self.run.batch_size * self.optimizer.accumulate / base

    def checked(self) -> "Recipe":
        """The same with checked options of the objective."""
        return dataclasses.replace(self, objective=self.objective.checked())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Recipe":
        """The recipe of `to_dict`."""
        types_ = typing.get_type_hints(cls)
        parts = {}
        for name, value in fields.items():
            part = _known(types_, name, "recipe")
            if isinstance(part, type) and dataclasses.is_dataclass(part):
                if not isinstance(value, Mapping):
                    raise ValueError(f"{name} must be an object. Received: {name}={value!r:.200}")
                inner = typing.get_type_hints(part)
                value = part(
                    **{
                        k: _typed(f"{name}.{k}", v, _known(inner, k, name))
                        for k, v in value.items()
                    }
                )
            parts[name] = value
        return cls(**parts).checked()

    @classmethod
    def from_file(cls, path: str | os.PathLike) -> "Recipe":
        """Reads the recipe.json of a run folder.

        Raises:
            ValueError: The file is not a recipe; the message names it.
        """
        try:
            fields = read_document(path)
        except ValueError as error:
            raise ValueError(f"{path} cannot be read as a recipe: {error}") from error
        return cls.from_file_fields(path, fields)

    @classmethod
    def from_file_fields(cls, path: str | os.PathLike, fields: Mapping[str, Any]) -> "Recipe":
        """The recipe of `to_dict`, which a file states. Errors name the file."""
        try:
            return cls.from_dict(fields)
        except (ValueError, TypeError, ArithmeticError) as error:
            raise ValueError(f"{path} cannot be read as a recipe: {error}") from error


def override(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """The recipe with some fields replaced.

    Args:
        recipe: A recipe.
        settings: "section.field=value", such as "optimizer.learning_rate=3e-4" or
            "model.config.width=192". The value is JSON, or else a string.
    """
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"--set must be NAME=VALUE. Received: {setting!r}")
        try:
            value = json.loads(text, parse_constant=_no_constant)
        except ValueError:
            value = {"None": None, "True": True, "False": False}.get(text, text)
        recipe = _replace(recipe, name.split("."), value, name)
    return recipe.checked()


def changed_fields(old: Recipe, new: Recipe) -> list[str]:
    """The fields in which two recipes differ, one a line."""
    a, b = _flat(old.to_dict()), _flat(new.to_dict())
    return [
        f"{name}: {a.get(name, '(unset)')} -> {b.get(name, '(unset)')}"
        for name in sorted(a.keys() | b.keys())
        if a.get(name, "(unset)") != b.get(name, "(unset)")
    ]


def _no_constant(text):
    raise ValueError(text)


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def _replace(part: Any, path: list[str], value: Any, name: str) -> Any:
    field = path[0]
    if isinstance(part, dict):  # model.config or objective.options
        section = name.removesuffix("." + ".".join(path))
        return {**part, **_typed(section, {".".join(path): value}, dict)}
    kind = _known(typing.get_type_hints(type(part)), field, type(part).__name__.lower())
    if len(path) > 1:
        inner = getattr(part, field)
        if not (dataclasses.is_dataclass(inner) or isinstance(inner, dict)):
            raise ValueError(f"{name} must name a field; {field} has no fields")
        return dataclasses.replace(part, **{field: _replace(inner, path[1:], value, name)})
    if dataclasses.is_dataclass(kind):
        fields = ", ".join(f.name for f in dataclasses.fields(kind))
        raise ValueError(
            f"{name} must name one of its fields: {fields}. Received: {name}={value!r}"
        )
    changes = {field: _typed(name, value, kind)}
    if field in ("epochs", "steps"):  # a run has one of them: it replaces the other
        changes = {"epochs": None, "steps": None, **changes}
    return dataclasses.replace(part, **changes)


def _known(hints: Mapping[str, Any], name: str, where: str) -> Any:
    if name in hints:
        return hints[name]
    near = difflib.get_close_matches(name, hints, n=3, cutoff=0.5)
    # A field of another section is the likeliest mistake.
    for section, kind in typing.get_type_hints(Recipe).items():
        if dataclasses.is_dataclass(kind) and name in typing.get_type_hints(kind):
            near.append(f"{section}.{name}")
    hint = f"near: {', '.join(near)}" if near else f"there are: {', '.join(hints)}"
    raise ValueError(f"{where} has no field {name!r}; {hint}")


def _typed(name: str, value: Any, kind: Any) -> Any:
    """The value converted to the type of its field. Raises if that is not possible."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is Literal:
        if value in arguments:
            return value
    elif origin in (typing.Union, types.UnionType):
        for option in arguments:
            try:
                return _typed(name, value, option)
            except ValueError:
                continue
    elif origin is tuple:
        many = arguments[-1] is Ellipsis
        if isinstance(value, list | tuple) and (many or len(value) == len(arguments)):
            inner = [arguments[0]] * len(value) if many else arguments
            return tuple(_typed(name, v, k) for v, k in zip(value, inner, strict=True))
    elif origin is dict or kind is dict:
        if isinstance(value, dict) and name == "objective.options":  # see `Objective.checked`
            return value
        if isinstance(value, dict):  # model.config
            hints = typing.get_type_hints(ViTConfig)
            return {k: _typed(f"{name}.{k}", v, _known(hints, k, name)) for k, v in value.items()}
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not (isinstance(value, int) and abs(value) > 1e300):  # too large for a float
            return float(value)
    elif kind is type(None):
        if value is None:
            return None
    elif isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    wanted = str(kind).replace("typing.", "") if origin else kind.__name__
    raise ValueError(f"{name} must be {wanted}. Received: {name}={value!r}")
