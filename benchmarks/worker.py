"""The child of a benchmark: all contenders of one backend, dtype and mode, timed in turns.

Each backend needs its own process. The job in JSON is the only argument; the result goes to stdout
as JSON, progress to stderr.
"""

import gc
import importlib.util
import json
import os
import statistics
import sys
import time

import keras
import numpy as np

from benchmarks import contenders, flops, machine, peak
from keras_vit.config import ViTConfig
from keras_vit.variants import SIZES

SMALL = "small"
MIN_ROUNDS = 2
PRODUCTS = 3  # matrix products a round: they take milliseconds


def main():
    job = json.loads(sys.argv[1])
    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    config = variant_config(job.pop("variant"))
    with result:
        json.dump(measure(config, **job), result)


def variant_config(variant):
    """The config of a published size, or of the small ViT of the CIFAR-10 recipe."""
    if variant == SMALL:
        sizes = {"width": 192, "depth": 6, "num_heads": 3, "mlp_dim": 384}
        return ViTConfig(image_size=32, patch_size=4, num_classes=10, **sizes)
    if variant not in SIZES or variant == "vit_so400m14":
        known = ", ".join(name for name in SIZES if name != "vit_so400m14")
        print(
            f"--variant must be {SMALL!r} or a published size with a class token: {known}. "
            f"Received: --variant={variant!r}",
            file=sys.stderr,
        )
        sys.exit(2)
    fields = SIZES[variant]._asdict()
    del fields["source"]
    return ViTConfig(**fields)


def filled(model):
    """Replaces the zeros of a new model, so that no graph can omit a sum."""
    rng = np.random.default_rng(0)
    for v in model.weights:
        if v.path.endswith(("bias", "beta", "tokens")) or v.path.startswith("head"):
            v.assign(0.02 * rng.standard_normal(v.shape, "float32"))
        elif not v.path.endswith("gamma"):
            v.assign(rng.standard_normal(v.shape, "float32") / np.sqrt(v.shape[0]))
    return model


def random_images(config, batch):
    """Floats as the model takes them, `(batch, H, W, C)`."""
    rng = np.random.default_rng(1)
    return rng.standard_normal((batch, *config.input_shape), "float32")


def measure(config, *, dtype, mode, batch, rounds, budget, names=None):
    """Times every contender; one that is not installed or fails gets a row, too."""
    backend = keras.backend.backend()
    names = names or contenders.names(backend, mode)
    rng = np.random.default_rng(0)
    images = rng.random((batch, *config.input_shape), "float32")
    labels = rng.integers(0, config.num_classes, batch)
    rows, steps = {}, {}
    for name in names:
        machine.say(f"{backend} {dtype} {mode}: building {name}")
        rows[name] = {"status": "not installed"}
        if importlib.util.find_spec(contenders.package(name)) is not None:
            rows[name] = _prepare(steps, name, config, dtype, mode, images, labels)
    product, product_flops = peak.matrix_product(config, batch, dtype)
    product()
    times = {name: [] for name in steps}
    products = []
    gc.collect()
    begin = time.perf_counter()
    for i in range(1, rounds + 1):
        products += [machine.seconds(product) for _ in range(PRODUCTS)]
        for name in list(steps):
            try:
                times[name].append(machine.seconds(steps[name]))
            except Exception as error:
                rows[name] = _failed(steps.pop(name), error)
        spent = time.perf_counter() - begin
        machine.say(f"{backend} {dtype} {mode}: round {i} of {rounds}, {spent:.0f} s")
        if i >= MIN_ROUNDS and spent * (i + 1) / i > budget:
            break
    top = product_flops / min(products)
    per_step = batch * flops.per_image(config, mode)
    for name in steps:
        rows[name] |= _summary(times[name], batch, per_step, top)
    return {
        "backend": backend,
        "dtype": dtype,
        "mode": mode,
        "rounds": i,
        "flops_per_image": per_step / batch,
        "peak_flops_per_second": top,
        "contenders": rows,
    }


def _prepare(steps, name, config, dtype, mode, images, labels):
    """Builds and warms up a contender; returns its row."""
    try:
        begin = time.perf_counter()
        step, parameters = contenders.step(name, config, dtype, mode, images, labels)
        step()
        first = time.perf_counter() - begin
        if keras.backend.backend() != "torch":  # which compiles nothing
            step()
    except Exception as error:
        return _failed(name, error)
    steps[name] = step
    return {"status": "measured", "parameters": parameters, "build_and_first_step_s": first}


def _failed(name, error):
    message = f"{type(error).__name__}: {error}"
    machine.say(f"{name} failed: {message}")
    return {"status": "failed", "message": message}


def _summary(times, batch, per_step, top):
    best = min(times)
    return {
        "best_s": best,
        "median_s": statistics.median(times),
        "images_per_second": batch / best,
        "images_per_second_median": batch / statistics.median(times),
        "share_of_peak": per_step / best / top,
    }


if __name__ == "__main__":
    main()
