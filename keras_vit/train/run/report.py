"""What a run reached: predictions on the test pictures, and a page with figures and pictures."""

import dataclasses
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

BLUE, ORANGE = "#0072B2", "#D55E00"  # Okabe and Ito: told apart by everyone
NUMBERED = 20
"""Classes up to which the confusion matrix has names and numbers."""
DRAWN = 2000
"""Classes up to which it is drawn at all."""


@dataclasses.dataclass(frozen=True)
class Predictions:
    """What a model said of every sample of a split."""

    truth: np.ndarray
    """int `(n,)`."""
    guess: np.ndarray
    """int `(n,)`, the class of the highest logit."""
    among_five: np.ndarray
    """bool `(n,)`, whether the truth has one of the five highest logits."""
    num_classes: int

    @property
    def top1(self) -> float:
        """Share of samples that are right."""
        return float((self.truth == self.guess).mean())

    @property
    def top5(self) -> float | None:
        """Share of samples whose class is among the first five; None for five classes or fewer."""
        return float(self.among_five.mean()) if self.num_classes > 5 else None

    def confusion(self) -> np.ndarray:
        """Counts `(K, K)`: rows are the truth, columns what was said."""
        matrix = np.zeros((self.num_classes, self.num_classes), "int64")
        np.add.at(matrix, (self.truth, self.guess), 1)
        return matrix

    def worst(self, count: int = 10) -> list[tuple[int, int, int, float]]:
        """The commonest mistakes: truth, guess, how often, and as a share of that truth."""
        wrong = self.truth != self.guess
        pairs, often = np.unique(
            np.stack([self.truth[wrong], self.guess[wrong]]), axis=1, return_counts=True
        )
        totals = np.bincount(self.truth, minlength=self.num_classes)
        order = np.argsort(-often, kind="stable")[:count]
        return [
            (
                int(pairs[0, i]),
                int(pairs[1, i]),
                int(often[i]),
                float(often[i] / totals[pairs[0, i]]),
            )
            for i in order
        ]


def predict(model: keras.Model, batches: Iterable[tuple[Any, Any]]) -> Predictions:
    """Runs every batch of (images, one-hot targets) through the model; each sample counts once."""
    truth, guess, among = [], [], []
    for images, targets in batches:
        logits = np.asarray(model.predict_on_batch(np.asarray(images)), "float32")
        classes = np.asarray(targets).argmax(-1)
        own = np.take_along_axis(logits, classes[:, None], axis=-1)
        truth.append(classes)
        guess.append(logits.argmax(-1))
        # Counted against the model where logits are equal or no numbers: an untrained head, and one
        # that broke, would look perfect.
        among.append((~(logits < own)).sum(-1) <= 5)
    if not truth:
        raise ValueError("batches must hold at least one sample. Received: none")
    return Predictions(
        np.concatenate(truth), np.concatenate(guess), np.concatenate(among), logits.shape[-1]
    )


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The lines that `callbacks.JsonLines` wrote."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def write(
    folder: str | Path, recipe: Any, rows: Mapping[str, Any], sections: Sequence[str] = ()
) -> Path:
    """Writes report.md and curves.png into a run folder that has its log.jsonl.

    Args:
        folder: The run folder.
        recipe: The `Recipe` of the run.
        rows: The rows of the table, by name.
        sections: Lines of Markdown to put behind the curves.

    Returns:
        The path of report.md.
    """
    folder = Path(folder)
    log = read_log(folder / "log.jsonl")
    lines = [f"# {recipe.name}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in rows.items()]
    if log:
        names = draw_curves(log, folder / "curves.png", recipe.name)
        lines += ["", f"![{names}](curves.png)"]
    lines += sections
    page = folder / "report.md"
    quoted = shlex.quote(str(folder))
    go_on = _GO_ON if recipe.objective.needs_labels else _GO_ON_FEATURES
    go_on = go_on.format(folder=folder, quoted=quoted, activation=recipe.loss.name)
    page.write_text("\n".join(lines) + go_on + _FILES.format(quoted=quoted), encoding="utf-8")
    return page


def mistakes(
    predictions: Predictions, labels: Sequence[str] | None, folder: str | Path, title: str
) -> list[str]:
    """Draws confusion.png and lists the commonest mistakes.

    Args:
        predictions: What the saved model says of the test pictures.
        labels: Names of the classes.
        folder: The run folder.
        title: Title of the figure.

    Returns:
        Lines of Markdown.
    """
    names = list(labels or map(str, range(predictions.num_classes)))
    lines = ["", "## Mistakes", ""]
    if predictions.num_classes <= DRAWN:
        draw_confusion(predictions, names, Path(folder, "confusion.png"), title)
        lines += ["![Confusion matrix: predictions for each true class](confusion.png)", ""]
    worst = predictions.worst(10 if predictions.num_classes <= NUMBERED else 20)
    if not worst:
        return [*lines, "None."]
    lines += ["| true class | predicted | images | of this class |", "|---|---|---:|---:|"]
    return lines + [
        f"| {_cell(names[a])} | {_cell(names[b])} | {n} | {share:.1%} |" for a, b, n, share in worst
    ]


def draw_curves(log: Sequence[dict[str, Any]], path: str | Path, title: str) -> str:
    """Loss and accuracy of training and test, and the learning rate, by epoch.

    Without labels, the accuracy is that of k-NN, if it was measured.

    Returns:
        What is drawn, in words.
    """
    seen = set().union(*log)
    labeled = "accuracy" in seen
    panels = [("loss", "Loss", "cross-entropy (nats)" if labeled else "loss", 1)]
    if labeled:
        panels.append(("accuracy", "Accuracy", "right answers (%)", 100))
    elif "val_knn" in seen:
        panels.append(("knn", "k-NN accuracy", "right answers (%)", 100))
    panels.append(("learning_rate", "Learning rate", "step size", 1))
    *names, last = (
        heading if i == 0 else heading[0].lower() + heading[1:]
        for i, (_, heading, _, _) in enumerate(panels)
    )
    names = f"{', '.join(names)} and {last}"
    figure, axes = _figure(4 * len(panels), 3.8, len(panels))
    figure.suptitle(f"{title}: {names[0].lower()}{names[1:].replace(' and', ',')}")
    for axis, (key, heading, unit, scale) in zip(axes, panels, strict=True):
        for name, label, color, mark in (
            (key, "training", BLUE, "o"),
            (f"val_{key}", "test", ORANGE, "s"),
        ):
            points = [(e["epoch"], scale * e[name]) for e in log if e.get(name) is not None]
            if points:
                marker = mark if len(points) <= 30 else ""
                x, y = zip(*points, strict=True)
                axis.plot(x, y, color=color, label=label, marker=marker, markersize=3)
        axis.set(title=heading, xlabel="epoch", ylabel=unit)
        axis.grid(alpha=0.3)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.spines[["top", "right"]].set_visible(False)
        if key != "learning_rate":
            axis.legend(frameon=False)
    _save(figure, path)
    return names


def draw_confusion(
    predictions: Predictions, names: Sequence[str], path: str | Path, title: str
) -> None:
    """What was said of each class: names and counts for a few classes, a heat map for many."""
    matrix = predictions.confusion()
    share = 100 * matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    few = len(matrix) <= NUMBERED
    side = 2.2 + 0.5 * len(matrix) if few else 8.0
    figure, axis = _figure(max(side, 5.0) + 1.0, max(side, 4.5))
    from matplotlib.colors import PowerNorm

    # The root lets a handful of mistakes be seen beside the diagonal.
    picture = axis.imshow(share, cmap="Blues", norm=PowerNorm(0.5, 0, 100), interpolation="nearest")
    figure.colorbar(picture, ax=axis, label="share of the true class (%)", shrink=0.8)
    axis.set(title=f"{title}: confusion", xlabel="predicted class", ylabel="true class")
    if few:
        short = [name if len(name) <= 20 else f"{name[:11]}…{name[-8:]}" for name in names]
        turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
        fits = max(map(len, short)) * len(short) <= 40
        axis.set_xticks(range(len(names)), short, **({} if fits else turned))
        axis.set_yticks(range(len(names)), short)
        for i, j in zip(*np.nonzero(matrix), strict=True):
            color = "white" if share[i, j] > 40 else "black"
            axis.text(j, i, f"{matrix[i, j]}", ha="center", va="center", color=color, size=8)
    _save(figure, path)


def _figure(width: float, height: float, columns: int = 1):
    # Not pyplot: it holds state, and would open a window where there is one.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns)


def _save(figure, path: str | Path) -> None:
    figure.savefig(path, dpi=110)


def _cell(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


_GO_ON = """

## To go on

```
keras-vit evaluate {quoted}
```

```python
import keras, keras_vit

model = keras.saving.load_model("{folder}/model.keras")
images = keras_vit.preprocessing.preprocess(pictures, model.config)  # PIL images or arrays
probabilities = keras.ops.{activation}(model.predict(images))
```
"""
_GO_ON_FEATURES = """

## To go on

Fine-tune it on images with labels, by any recipe of such images:

```
keras-vit train --recipe folder --data flowers --workdir runs/flowers \\
    --set model.variant=null --set model.weights={quoted}/model.keras
```

```python
import keras, keras_vit

model = keras.saving.load_model("{folder}/model.keras")
images = keras_vit.preprocessing.preprocess(pictures, model.config)  # PIL images or arrays
features = model.predict(images)
classifier = keras_vit.from_pretrained("{folder}/model.keras", num_classes=10)
```
"""
_FILES = """
`recipe.json` holds every setting of this run, `log.jsonl` its figures, a line an epoch;
`tensorboard --logdir {quoted}/logs` shows them while a run goes.
"""
