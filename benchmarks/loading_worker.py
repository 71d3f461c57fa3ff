"""The child of `benchmarks.loading`: one contender loads one file in a fresh process.

The job in JSON is the only argument; the result is printed as JSON. Imports come before the clock
starts, and the peak is the memory that loading adds to that of the imports.
"""

import gc
import json
import os
import pathlib
import resource
import sys
import time

from benchmarks import contenders, machine

GOOGLE, TIMM, FOLDER = "google.npz", "timm.safetensors", "huggingface"
FILES = (GOOGLE, TIMM, FOLDER)
READERS = ("numpy.load", "safetensors.safe_open", "open_arrays")
"""Reads every array into memory once, one after another."""
CONTENDERS = {
    GOOGLE: ("numpy.load", "open_arrays", "keras_vit", "timm", "keras_hub"),
    TIMM: ("safetensors.safe_open", "open_arrays", "keras_vit", "timm", "keras_hub"),
    FOLDER: ("keras_vit", "keras_hub", "transformers"),
}
NO_LOADER = {(GOOGLE, "keras_hub"), (TIMM, "keras_hub")}
"""KerasHub reads neither .npz files nor timm's ViT files."""
STATUS = pathlib.Path("/proc/self/status")


def main():
    job = json.loads(sys.argv[1])
    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    with result:
        if job["stage"] == "write":
            json.dump(write(pathlib.Path(job["path"])), result)
        else:
            json.dump(measure(job["contender"], pathlib.Path(job["path"]), job["stage"]), result)


def measure(contender, path, stage):
    """Seconds, and the peak of memory that the stage adds.

    "load" and "build" (only the model) run first in their process. "warm" builds once unmeasured,
    which compiles, then builds and loads: the difference is what loading adds.
    "refill" loads into an existing model and reads the .npz with NumPy, in turns.
    """
    build, load = prepare(contender, path)
    _read_once(path)
    if stage == "refill":
        return _refill(path)
    if stage == "warm":
        build()
        return {"build": _timed(build), "load": _timed(load)}
    gc.collect()
    before = _start_peak()
    seconds = _timed(load if stage == "load" else build)
    return {"seconds": seconds, "peak_mb": (_peak() - before) / 1e6}


def _refill(path):
    from keras_vit.weights import load
    from keras_vit.weights.files import arrays

    model = load.from_pretrained(path)
    numpy_load = _reader("numpy.load", path, touch=False)

    def refill():
        with arrays.open_arrays(path) as file:
            load._assign(model, file, load._plan(file, path, {}))

    rounds = [(_timed(numpy_load), _timed(refill)) for _ in range(9)][2:]
    numpy_seconds, seconds = (min(column) for column in zip(*rounds, strict=True))
    return {"seconds": seconds, "of_numpy": seconds / numpy_seconds}


def _timed(function):
    begin = time.perf_counter()
    _use(function())
    return time.perf_counter() - begin


def prepare(contender, path):
    """Two functions: one builds the model, one builds and loads it. Their imports are done here."""
    if contender in READERS:
        return None, _reader(contender, path)
    if contender in contenders.TORCH:
        machine.import_torchvision()
    return {
        "keras_vit": _keras_vit,
        "keras_hub": _keras_hub,
        "timm": _timm,
        "transformers": _transformers,
    }[contender](path)


def write(folder):
    """Writes the checkpoints, with random numbers in every array."""
    import numpy as np

    import keras_vit

    rng = np.random.default_rng(0)
    for format, target, fields in (
        ("google", GOOGLE, {"gelu": "tanh"}),
        ("timm", "timm", {}),
        ("huggingface", FOLDER, {}),
    ):
        model = keras_vit.vit_b16(num_classes=1000, **fields)
        for weight in model.weights:
            weight.assign(rng.normal(0, 0.02, weight.shape).astype("float32"))
        keras_vit.save_pretrained(model, folder / target, format=format)
    os.replace(folder / "timm" / "model.safetensors", folder / TIMM)  # a bare file, for both
    return {}


def nbytes(path):
    """Bytes of a file, or of the files of a folder."""
    files = path.iterdir() if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files)


def _reader(contender, path, touch=True):
    import numpy as np
    import safetensors

    from keras_vit.weights.files import arrays

    def read(file, names):
        for name in names:
            # A memory-mapped array is read only when its numbers are used.
            array = np.asarray(file[name])
            if touch:
                array.sum()

    def numpy_load():
        with np.load(path) as file:
            read(file, file.files)

    def safe_open():
        with safetensors.safe_open(path, "np") as file:
            for name in file.keys():
                file.get_tensor(name).sum()

    def open_arrays():
        with arrays.open_arrays(path) as file:
            read(file, file)

    return {
        "numpy.load": numpy_load,
        "safetensors.safe_open": safe_open,
        "open_arrays": open_arrays,
    }[contender]


def _keras_vit(path):
    import keras_vit
    from keras_vit.weights import load

    del load  # otherwise imported on first use, within the measured time
    return keras_vit.vit_b16, lambda: keras_vit.from_pretrained(path)


def _keras_hub(path):
    import keras_hub

    def build():
        backbone = keras_hub.models.ViTBackbone(
            image_shape=(224, 224, 3),
            patch_size=(16, 16),
            num_layers=12,
            num_heads=12,
            hidden_dim=768,
            mlp_dim=3072,
        )
        return keras_hub.models.ViTImageClassifier(backbone, num_classes=1000)

    return build, lambda: keras_hub.models.ViTImageClassifier.from_preset(str(path))


def _timm(path):
    import timm

    def build(**kwargs):
        return timm.create_model("vit_base_patch16_224", pretrained=False, **kwargs)

    return build, lambda: build(checkpoint_path=str(path))


def _transformers(path):
    import transformers

    kind = transformers.ViTForImageClassification
    config = transformers.ViTConfig.from_pretrained(path)
    return lambda: kind(config), lambda: kind.from_pretrained(path)


def _use(model):
    """Adds up every weight: a framework may map a file and read it only in the first step."""
    if hasattr(model, "parameters"):
        return [float(p.detach().sum()) for p in model.parameters()]
    import keras

    return [float(keras.ops.sum(w.value)) for w in getattr(model, "weights", ())]


def _read_once(path):
    """Reads the files into the system's cache, so that no contender waits for the disk."""
    for file in path.iterdir() if path.is_dir() else (path,):
        with file.open("rb") as handle:
            while handle.read(1 << 16):  # larger reads would raise the peak of the process
                pass


def _start_peak():
    """Resets the peak to the current memory, and returns it in bytes."""
    if not STATUS.exists():  # elsewhere the peak cannot be reset, and includes the imports
        return _peak()
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak():
    if STATUS.exists():
        return _status("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(key):
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
