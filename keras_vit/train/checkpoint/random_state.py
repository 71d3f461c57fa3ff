"""The state of the global random generators: Python's, NumPy's, Keras' and torch's."""

import random
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.random import seed_generator  # Keras' own seeds have no public door

from keras_vit.train.checkpoint.packing import pack, unpack


def collect_random(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The global random generators: Python's, NumPy's, and those of Keras and torch if in use.

    Layers and `keras_vit.train.data` have seeds of their own; these matter to what a user adds.
    """
    version, internal, gauss = random.getstate()
    states = {
        "python": (version, np.array(internal, "uint32"), gauss),
        "numpy": np.random.get_state(),
    }
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    if generator is not None:
        states["keras"] = keras.ops.convert_to_numpy(generator.state)
    if keras.backend.backend() == "torch":
        import torch

        states["torch"] = torch.get_rng_state().numpy()
        states["cuda"] = [state.numpy() for state in torch.cuda.get_rng_state_all()]
    return {name: pack(state, arrays, f"random/{name}") for name, state in states.items()}


def restore_random(entries: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Restores the global random generators."""
    states = {name: unpack(entry, arrays) for name, entry in entries.items()}
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(map(int, internal)), gauss))
    np.random.set_state(states["numpy"])
    if "keras" in states:
        seed_generator.global_seed_generator().state.assign(states["keras"])
    if "torch" in states:
        import torch

        torch.set_rng_state(torch.from_numpy(states["torch"]))
        if len(states["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([torch.from_numpy(s) for s in states["cuda"]])


def torch_generator() -> Any:
    """The state of torch's generator on the torch backend; else None."""
    if keras.backend.backend() != "torch":
        return None
    import torch

    return torch.get_rng_state()


def restore_torch_generator(state: Any) -> None:
    """Restores it, if there is one.

    torch's data loader draws from it when it starts: in each epoch, or in the first one of a
    program. A resumed run must not see the difference.
    """
    if state is not None:
        import torch

        torch.set_rng_state(state)
