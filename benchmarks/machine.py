"""The machine of a measurement, and the environment of the processes that measure."""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BACKENDS = ("tensorflow", "jax", "torch")
PACKAGES = (
    "keras3-vit keras keras-hub tensorflow jax torch timm torchvision transformers vit-pytorch"
).split()
# bfloat16 is fast only if the processor can multiply it.
BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")


def environment(backend):
    """Variables for a process on one backend. The CPU is measured, also if there is a GPU."""
    return {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **os.environ,
        "KERAS_BACKEND": backend,
        "CUDA_VISIBLE_DEVICES": "-1",
        "JAX_PLATFORMS": "cpu",
    }


def describe():
    """CPU, cores, load and versions."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    model = re.search(r"model name\s*:\s*(.+)", text)
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "bfloat16": [flag for flag in BFLOAT16 if flag in text.split()],
        "load_before": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def begin():
    """A new record of figures, which starts with the machine."""
    described = describe()
    if described["load_before"] > 0.5:
        say("The machine is busy: expect noise.")
    return {"machine": described}


def show(table, record, width=100):
    """Prints a table and the machine."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else width)
    console.print(table)
    console.print(line(record["machine"]), markup=False, highlight=False)


def line(described):
    """The same in a sentence."""
    installed = {name: version for name, version in described["versions"].items() if version}
    versions = ", ".join(f"{name} {v}" for name, v in installed.items())
    return (
        f"{described['cpu']}, {described['cores']} cores, "
        f"bfloat16 {' '.join(described['bfloat16']) or 'emulated'}; "
        f"Python {described['python']}, {versions}"
    )


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def write(path, record):
    """Writes a record as JSON, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(beside, path)


def say(text):
    """Prints a line about the progress."""
    print(text, file=sys.stderr, flush=True)


def seconds(function):
    """How long a call takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def import_torchvision():
    """timm and transformers import it too, and a build for another torch fails on its operators.

    A ViT needs none of them, so a missing one may stay unregistered.
    """
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    import torch

    register = torch.library.register_fake
    torch.library.register_fake = lambda *args, **kwargs: lambda function: function
    try:
        import torchvision  # noqa: F401
    finally:
        torch.library.register_fake = register
