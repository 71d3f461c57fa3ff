"""How many Ray workers run a model, and what each of them gets."""

import dataclasses
from typing import Any

from keras_vit.bulk.stream import check_count
from keras_vit.paths import is_path


@dataclasses.dataclass(frozen=True)
class RayWorkers:
    """Workers of a Ray cluster. Each is a process that holds the model.

    They read the model and the images by the same paths as this process: on several machines, from
    a shared file system.

    Attributes:
        count: Workers.
        num_cpus: Cores of a worker: its model's threads, and its threads that decode.
        num_gpus: GPUs of a worker, or a part of one.
        address: The cluster's address, as in `ray.init`; None means RAY_ADDRESS, or this machine.
    """

    count: int
    num_cpus: int = 1
    num_gpus: float = 0
    address: str | None = None

    def __post_init__(self) -> None:
        for name in ("count", "num_cpus"):
            check_count(name, getattr(self, name))
        gpus = self.num_gpus
        if isinstance(gpus, bool) or not isinstance(gpus, int | float) or not gpus >= 0:
            raise ValueError(f"num_gpus must be at least 0. Received: num_gpus={gpus!r}")

    def check_model(self, model: Any) -> None:
        """Raises unless a model is a path, which every worker opens."""
        if not is_path(model):
            raise ValueError(
                "model must be a path for ray, because every worker opens it. "
                f"Received: model={model!r}"
            )
