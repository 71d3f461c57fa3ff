"""The best epoch of a run, by one value in the logs."""

import logging
import math
from collections.abc import Mapping
from typing import Any

import keras

logger = logging.getLogger(__name__)


class BestEpoch:
    """Keeps the best value so far, and its step.

    Args:
        monitor: A name in the logs, such as "val_accuracy", or None: no epoch is the best.
        mode: "min", "max", or "auto" to let the metric decide.

    Attributes:
        found: {"name", "value", "step"}, or None.
    """

    def __init__(self, monitor: str | None, mode: str = "auto"):
        if mode not in ("auto", "min", "max"):
            raise ValueError(f'mode must be "auto", "min" or "max". Received: mode={mode!r}')
        self.monitor = monitor
        self.mode = mode
        self.found: dict[str, Any] | None = None
        self._warned = False

    def update(
        self, model: keras.Model, logs: Mapping[str, float], step: int, last: bool = False
    ) -> bool:
        """Whether the epoch that ended at `step` is the best so far.

        Warns once if the logs lack the name, but not for epochs without an evaluation.
        """
        value = logs.get(self.monitor) if self.monitor else None
        if self.monitor and self.monitor not in logs and self.found is None and not self._warned:
            evaluated = any(name.startswith("val_") for name in logs)
            if last or evaluated or not self.monitor.startswith("val_"):
                self._warned = True
                logger.warning(
                    "No checkpoint is kept as the best: monitor=%r is not in the logs, which have "
                    "%s",
                    self.monitor,
                    ", ".join(logs),
                )
        if self.monitor is None or value is None or not math.isfinite(value):
            return False
        mode = _direction(model, self.monitor) if self.mode == "auto" else self.mode
        if self.found is not None and self.found["name"] != self.monitor:
            logger.warning(
                "The best epoch was chosen by %s, and is now chosen by %s",
                self.found["name"],
                self.monitor,
            )
        elif self.found is not None:
            before = self.found["value"]
            if value >= before if mode == "min" else value <= before:
                return False
        self.found = {"name": self.monitor, "value": value, "step": step}
        return True


def _direction(model: keras.Model, monitor: str) -> str:
    """What "auto" means: "min" for a loss, and a metric knows its direction."""
    name = monitor.removeprefix("val_")
    if name == "loss":
        return "min"
    for metric in model.metrics:
        for one in (metric, *getattr(metric, "metrics", ())):
            if one.name == name and getattr(one, "_direction", None):
                return "max" if one._direction == "up" else "min"
    raise ValueError(f'mode must be "min" or "max" for monitor={monitor!r}. Received: mode="auto"')
