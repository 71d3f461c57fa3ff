"""Files and folders are written atomically."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keras_vit import atomic
from keras_vit.atomic import TEMPORARY, atomic_path, temporary_name
from keras_vit.export.one_file import new_file
from keras_vit.export.saved_model.versions import new_version

pytestmark = pytest.mark.backend_free


def test_atomic_path_shows_a_file_only_when_it_is_complete(tmp_path):
    target = tmp_path / "a.weights.h5"
    with atomic_path(target) as temporary:
        assert temporary.parent == tmp_path and temporary.name.endswith("a.weights.h5")
        temporary.write_text("new")
        assert not target.exists()
    assert target.read_text() == "new"
    with pytest.raises(KeyboardInterrupt), atomic_path(target) as temporary:
        temporary.write_text("newer")
        raise KeyboardInterrupt
    assert target.read_text() == "new"
    with pytest.raises(FileNotFoundError), atomic_path(target):
        pass  # the block wrote nothing
    assert [p.name for p in tmp_path.iterdir()] == ["a.weights.h5"]


def test_atomic_path_moves_a_complete_folder(tmp_path):
    def write(text, **files):
        with atomic_path(tmp_path / "out") as temporary:
            (temporary / "sub").mkdir(parents=True)
            for name in files:
                (temporary / name).write_text(text)
            (temporary / "sub" / "c").write_text(text)
            if "fail" in files:
                raise RuntimeError("halfway")

    def texts():
        found = (p for p in (tmp_path / "out").rglob("*") if p.is_file())
        return {p.relative_to(tmp_path / "out").as_posix(): p.read_text() for p in found}

    with pytest.raises(RuntimeError):
        write("0", a=1, fail=1)
    assert list(tmp_path.iterdir()) == []
    write("1", a=1, b=1)
    assert texts() == {"a": "1", "b": "1", "sub/c": "1"}
    with pytest.raises(RuntimeError):
        write("2", a=1, fail=1)
    assert texts() == {"a": "1", "b": "1", "sub/c": "1"}
    write("3", a=1)  # files that are not written again stay
    assert texts() == {"a": "3", "b": "1", "sub/c": "3"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.fixture(scope="module")
def left_over(tmp_path_factory):
    """Three folders where a process was killed while it wrote a file and a folder."""
    folders = [tmp_path_factory.mktemp("killed") for _ in range(3)]
    code = (
        "import os, signal, sys, pathlib\n"
        "from keras_vit.atomic import temporary_name\n"
        "for folder in map(pathlib.Path, sys.argv[1:]):\n"
        "    (folder / temporary_name('a.onnx')).write_bytes(b'half')\n"
        "    (folder / temporary_name() / 'variables').mkdir(parents=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    for folder in folders:
        assert len([path for path in folder.iterdir() if path.name.startswith(TEMPORARY)]) == 2
    return folders


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux' /proc")
def test_left_over_files_are_removed_and_nothing_else(left_over, caplog):
    folder = left_over[0]
    dead = sorted(path.name for path in folder.iterdir())
    mark, pid, started, rest = dead[0].removeprefix(TEMPORARY).split("-", 3)
    living = [
        temporary_name("b.onnx"),  # of this process, perhaps of another thread
        f"{TEMPORARY}{mark}-{os.getppid()}-{atomic._started(os.getppid())}-{rest}",
        f"{TEMPORARY}{'0' * 6}-{pid}-{started}-{rest}",  # of another machine
        f"{TEMPORARY}4711-abcd-other",  # of another program
        "a.onnx",
    ]
    for name in living:
        (folder / name).write_text("")
    # Another process has the number of the one that was killed.
    reused = f"{TEMPORARY}{mark}-{os.getppid()}-{int(started) + 1}-{rest}"
    (folder / reused).write_text("")
    caplog.set_level(logging.INFO, "keras_vit")
    with atomic_path(folder / "c.txt") as temporary:
        temporary.write_text("")
    assert {path.name for path in folder.iterdir()} == {*living, "c.txt"}
    assert all(name in caplog.text for name in (*dead, reused))
    assert "another machine may be writing it" in caplog.text


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux' /proc")
def test_exports_remove_what_killed_exports_left(left_over):
    _, files, versions = left_over
    with new_file(files / "b.onnx", overwrite=False) as beside:
        beside.write_bytes(b"")
    assert [path.name for path in files.iterdir()] == ["b.onnx"]
    with new_version(versions, None) as (folder, _):
        (folder / "saved_model.pb").write_bytes(b"")
    assert [path.name for path in versions.iterdir()] == ["1"]
