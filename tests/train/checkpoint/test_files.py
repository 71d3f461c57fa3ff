"""Checkpoint files: kills, failing writes, full disks, damaged files, concurrent readers."""

import errno
import json
import logging
import os
import resource
import shutil
import signal
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_vit.lock import Lock
from keras_vit.train.checkpoint import files, manifest

pytestmark = pytest.mark.backend_free


def arrays(step, size=1000):
    return {
        "model/0:kernel": np.full((size, 3), step, "float32"),
        "model/1:step": np.array(step, "int64"),
        "optimizer/0:flag": np.array([step % 2 == 0]),
    }


def facts(step, best=None):
    return {
        "time": 1.5,
        "position": {"epoch": 0, "step_in_epoch": step, "step": step, "stopped": False},
        "inside_epoch": True,
        "best": best and {"name": "val_loss", "value": 0.5, "step": best},
        "versions": {},
        "callbacks": [],
        "random": {},
    }


def write(folder, step, size=1000, best=None):
    return files.write(folder, step, arrays(step, size), facts(step, best))


def check_whole(snapshot):
    step = snapshot.facts["position"]["step"]
    assert snapshot.path.name == f"ckpt-{step:06d}"
    for name, array in snapshot.arrays.items():
        wanted = arrays(step, len(snapshot.arrays["model/0:kernel"]))[name]
        assert array.dtype == wanted.dtype and np.array_equal(array, wanted)
    return step


def in_child(function):
    """Runs a function in a forked process, which needs no imports; returns its id."""
    if child := os.fork():
        return child
    try:
        function()
    finally:
        os._exit(0)


def kill_while_saving(folder, kills, seed):
    """Kills a process that saves step after step, at random moments, and restarts it."""
    folder.mkdir()
    progress = folder / "progress"  # grows by a byte with every step that is on the disk
    rng = np.random.default_rng(seed)

    def save():
        files.remove_partial(folder)
        found, _ = files.newest(folder)
        for step in range(check_whole(found) + 1 if found else 1, 10**6):
            write(folder, step, size=200_000)
            files.prune(folder, 2)
            with progress.open("ab") as file:
                file.write(b".")

    interrupted = 0
    for _ in range(kills):
        done = progress.stat().st_size if progress.exists() else 0
        child = in_child(save)
        deadline = time.monotonic() + 60
        while (progress.stat().st_size if progress.exists() else 0) == done:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        last = progress.stat().st_size
        found, broken = files.newest(folder)
        # The recorded step, or the next one, if the kill came before it was recorded.
        assert check_whole(found) - last in (0, 1) and not broken
        interrupted += any(folder.glob("*.tmp-*"))
        progress.write_bytes(b"." * check_whole(found))
    return interrupted


def test_files_kill_keeps_the_last_checkpoint(tmp_path):
    kill_while_saving(tmp_path / "run", kills=3, seed=0)


@pytest.mark.slow
def test_files_thirty_kills_keep_the_last_checkpoint(tmp_path):
    assert kill_while_saving(tmp_path / "run", kills=30, seed=1) >= 3  # kills that hit a save


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs the names of open files")
def test_files_are_on_the_disk_before_their_name_and_the_name_at_the_end(tmp_path, monkeypatch):
    """After a power cut, a checkpoint that has its name is whole, and the newest has its name."""
    calls = []
    fsync, replace = os.fsync, os.replace

    def flush(handle):
        calls.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def rename(old, new):
        calls.append(f"rename to {Path(new).name}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", rename)
    write(tmp_path / "run", 3)
    for name in (manifest.ARRAYS, manifest.FACTS, manifest.MANIFEST):
        at = calls.index(f"rename to {name}")
        assert calls[at - 1].endswith(f"-{name}")  # its hidden name
    assert calls[-2:] == ["rename to ckpt-000003", "run"]


def test_files_failing_call_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    """Every open for writing, write, fsync, rename and mkdir raises in turn."""
    calls = {"count": 0, "fail": None}

    def failing(function):
        def call(*args, **kwargs):
            calls["count"] += 1
            if calls["count"] == calls["fail"]:
                raise OSError(errno.EIO, "Input/output error")
            return function(*args, **kwargs)

        return call

    class File:
        """A file whose writes count."""

        def __init__(self, file):
            self.file = file
            self.write = failing(file.write)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.__exit__(*error)

    real = type(tmp_path).open

    def open_path(path, mode="r", *args, **kwargs):
        if not set(mode) & set("wax"):
            return real(path, mode, *args, **kwargs)
        return File(failing(real)(path, mode, *args, **kwargs))

    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "open", open_path)
        for name in ("fsync", "replace", "mkdir"):
            patch.setattr(os, name, failing(getattr(os, name)))
        write(tmp_path / "counted", 1)
        number = calls["count"]
        raised = 0
        for fail in range(1, number + 1):
            folder = tmp_path / str(fail)
            calls["fail"] = None
            write(folder, 1)
            calls |= {"count": 0, "fail": fail}
            try:
                write(folder, 2)
            except OSError as error:
                assert error.errno == errno.EIO
                raised += 1
                allowed = (1, 2)  # 2, if only the last fsync failed
            else:
                allowed = (2,)  # mkdir of an existing folder
            found, broken = files.newest(folder)
            assert check_whole(found) in allowed and not broken
            assert not list(folder.glob("*.tmp-*"))
        assert raised > 15  # all but mkdir of existing folders


def test_files_full_disk_raises_and_keeps_the_last_checkpoint(tmp_path):
    """A real error of the system: no file may grow beyond 20 kB."""
    write(tmp_path, 1)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write(tmp_path, 2, size=100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    found, _ = files.newest(tmp_path)
    assert check_whole(found) == 1
    assert not list(tmp_path.glob("*.tmp-*"))  # its space is freed


DAMAGES = (
    "truncate 0",
    "truncate 1",
    "truncate 1/4",
    "truncate 1/2",
    "truncate -1",
    "flip",
    "gone",
)


@pytest.mark.parametrize("name", [manifest.ARRAYS, manifest.FACTS, manifest.MANIFEST])
def test_files_damaged_checkpoint_is_skipped(tmp_path, name, caplog):
    caplog.set_level(logging.WARNING)
    write(tmp_path, 1)
    intact = write(tmp_path, 2)
    copy = tmp_path / "copy"
    shutil.copytree(intact, copy)
    assert check_whole(files.newest(tmp_path)[0]) == 2  # so it is the damage that matters
    size = (intact / name).stat().st_size
    sizes = {"0": 0, "1": 1, "1/4": size // 4, "1/2": size // 2, "-1": size - 1}
    rng = np.random.default_rng(0)
    flips = [0, size - 1, *rng.integers(0, size, 20).tolist()]
    for damage in DAMAGES:
        for place in flips if damage == "flip" else [0]:
            file = intact / name
            if damage == "gone":
                file.unlink()
            elif damage == "flip":
                data = bytearray(file.read_bytes())
                data[place] ^= 1 << int(rng.integers(8))
                file.write_bytes(data)
            else:
                os.truncate(file, sizes[damage.split()[1]])
            caplog.clear()
            found, broken = files.newest(tmp_path)
            assert check_whole(found) == 1, (damage, place)
            assert broken == [intact] and str(file) in caplog.text
            shutil.copy(copy / name, file)
    assert check_whole(files.newest(tmp_path)[0]) == 2


def test_files_order_is_numeric_and_pruning_keeps_the_best(tmp_path):
    for step in (9, 10, 100, 1_000_000, 999_999):
        write(tmp_path, step)
    (tmp_path / "ckpt-notes").mkdir()
    assert manifest.steps(tmp_path) == [9, 10, 100, 999_999, 1_000_000]
    assert check_whole(files.newest(tmp_path)[0]) == 1_000_000
    files.prune(tmp_path, 2, best=10)
    assert manifest.steps(tmp_path) == [10, 999_999, 1_000_000]
    assert files.newest(tmp_path / "none") == (None, [])


def test_files_readers_always_get_a_complete_checkpoint(tmp_path):
    write(tmp_path, 1, size=20_000)
    stop, seen, problems = threading.Event(), ([], []), []

    def look(mine):
        while not stop.is_set():
            try:
                found, broken = files.newest(tmp_path)
                mine.append(check_whole(found))
                assert not broken
                listed = manifest.listing(tmp_path)
                assert listed and all(entry["whole"] for entry in listed)
            except BaseException as error:
                problems.append(error)
                return

    readers = [threading.Thread(target=look, args=(mine,)) for mine in seen]
    for reader in readers:
        reader.start()
    # Until each reader has read several; on a busy machine that takes more writes.
    deadline, step = time.monotonic() + 60, 1
    while not problems and time.monotonic() < deadline:
        if step >= 30 and all(len(set(mine)) > 2 for mine in seen):
            break
        step += 1
        write(tmp_path, step, size=20_000)
        files.prune(tmp_path, 1)
    stop.set()
    for reader in readers:
        reader.join()
    assert not problems, problems[0]
    for mine in seen:
        assert mine == sorted(mine) and len(set(mine)) > 2


def test_files_listing_describes_each_checkpoint(tmp_path):
    write(tmp_path, 3, best=3)
    path = write(tmp_path, 12, best=3)
    os.truncate(write(tmp_path, 20) / manifest.ARRAYS, 10)
    first, second, third = manifest.listing(tmp_path)
    assert (first["step"], first["whole"], first["best"]) == (3, True, True)
    assert (second["step"], second["whole"], second["best"]) == (12, True, False)
    assert second["bytes"] == sum(file.stat().st_size for file in path.iterdir())
    assert second["position"] == facts(12)["position"] and second["time"] == 1.5
    assert not third["whole"] and manifest.ARRAYS in third["problem"]
    data = bytearray((path / manifest.ARRAYS).read_bytes())
    data[-1] ^= 1
    (path / manifest.ARRAYS).write_bytes(data)
    assert manifest.listing(tmp_path)[1]["whole"]
    assert not manifest.listing(tmp_path, hashes=True)[1]["whole"]


def test_lock_excludes_a_second_process_until_a_kill(tmp_path):
    lock = Lock(tmp_path)
    child = in_child(lambda: (lock.acquire(), (tmp_path / "ready").touch(), time.sleep(120)))
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(BlockingIOError, match=rf"locked by process {child} on"):
        lock.acquire()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    lock.acquire()
    Lock(tmp_path / "." / ".." / tmp_path.name).acquire()  # one process, one folder
    lock.release()


def test_lock_in_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="The folder must be writable"):
        Lock(tmp_path / "file" / "checkpoints").acquire()
    with pytest.raises(OSError, match="The folder must be writable"):
        Lock(tmp_path / "file").acquire()
    Lock(tmp_path / "folder").acquire()


def test_files_newer_format_is_refused_and_not_set_aside(tmp_path):
    path = files.write(tmp_path, 1, {}, {"format": 2})
    assert json.loads((path / manifest.FACTS).read_text())["format"] == 2
    with pytest.raises(ValueError, match="must have format 1. Received"):
        files.newest(tmp_path)


def test_files_renamed_checkpoint_is_skipped(tmp_path, caplog):
    write(tmp_path, 1)
    os.rename(write(tmp_path, 2), tmp_path / "ckpt-000007")
    found, broken = files.newest(tmp_path)
    assert check_whole(found) == 1 and [path.name for path in broken] == ["ckpt-000007"]
    assert "must be a checkpoint of that step. Received: of 2" in caplog.text


def test_files_bfloat16_is_restored_exactly(tmp_path):
    values = np.asarray(keras.ops.convert_to_numpy(keras.ops.cast([1.5, -0.3, 1e30], "bfloat16")))
    path = files.write(tmp_path, 1, {"model/0:x": values}, facts(1))
    found = files.read(path)
    assert found.dtypes == {"model/0:x": "bfloat16"}
    assert np.array_equal(found.arrays["model/0:x"], values.astype("float32"))
