"""What every test needs: a known seed, the backends that it is about, and quick collections."""

import gc
import logging
import os
import re
import time
from collections import Counter

from processes import QUICK_JAX

if os.environ.get("KERAS_BACKEND") == "jax":
    for name, value in QUICK_JAX.items():
        os.environ.setdefault(name, value)

import keras
import pytest
from cpu_torchvision import import_torchvision

CLOCK = {name: getattr(time, name) for name in ("monotonic", "perf_counter", "sleep", "time")}


BACKEND_FREE = re.compile(r"^pytestmark = (pytest\.mark\.backend_free$|\[[^]]*backend_free)", re.M)


def pytest_ignore_collect(collection_path):
    """Leaves out the files of which all tests ran on a backend before, without importing them."""
    if not os.environ.get("TESTED_BACKENDS") or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text("utf-8")
    return True if BACKEND_FREE.search(text) and "only_on" not in text else None


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around what pytest deselects by marker
def pytest_collection_modifyitems(config, items):
    select(config, items)
    yield
    longest_first(items)


def select(config, items):
    """Deselects the tests of other backends, and those that run.py ran on one before."""
    before = set(os.environ.get("TESTED_BACKENDS", "").split())
    kept, left_out, ran = [], [], Counter()
    for item in items:
        free = item.get_closest_marker("backend_free")
        only = item.get_closest_marker("only_on")
        again = before and (only is None or not before.isdisjoint(only.args))
        run = (only is None or keras.backend.backend() in only.args) and not (free and again)
        (kept if run else left_out).append(item)
        sampled = item.get_closest_marker("sampled")
        if again and run and sampled and not item.get_closest_marker("slow"):
            function = item.nodeid.partition("[")[0]
            if ran[function] == sampled.kwargs.get("cases", 1):
                item.add_marker(pytest.mark.slow)
            else:
                ran[function] += 1
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def longest_first(items):
    """Orders the files, so that no process is alone with a long one at the end."""
    tests = Counter(item.path for item in items)
    long = {item.path for item in items if item.get_closest_marker("timeout")}
    items.sort(key=lambda item: (item.path not in long, -tests[item.path]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Fails a test that replaced the clock of the process.

    The event loop of a server in another thread, which some tests share, would wait for an hour
    that never comes. Give the module under test a `time` of its own.
    """
    yield
    replaced = [name for name in CLOCK if getattr(time, name) is not CLOCK[name]]
    assert not replaced, f"replaced for all threads: time.{', time.'.join(replaced)}"


@pytest.fixture(scope="session")
def torchvision():
    """Imports torchvision; for tests that import timm or transformers, before they do."""
    import_torchvision()


@pytest.fixture(autouse=True)
def _seed():
    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def _log():
    """Lets `caplog` see the log again after a test of the command, which keeps it to itself."""
    yield
    logging.getLogger("keras_vit").propagate = True


@pytest.fixture(autouse=True, scope="module")
def _quick_collections():
    """Takes what the session keeps, mostly imported modules, out of garbage collection.

    Keras collects whenever an attribute of a layer is deleted, as `quantize` does many times. With
    three backends imported, a collection of everything takes seconds. A model is thousands of
    objects: by Python's own thresholds, collections are a twentieth of the time that it takes.
    """
    gc.set_threshold(10_000, 20, 20)
    gc.collect()
    gc.freeze()
