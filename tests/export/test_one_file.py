"""A file that is whole or not there: what may stand at its path, and what is left of a failure."""

import os

import pytest

from keras_vit.export.one_file import check_file, new_file

pytestmark = pytest.mark.backend_free


def write(target, content=b"new"):
    with new_file(target, True) as beside:
        beside.write_bytes(content)
        assert beside.parent == target.parent and beside.suffix == target.suffix
        assert not target.exists() or target.read_bytes() == b"old"


def test_new_file_appears_with_its_folders_and_replaces_another(tmp_path):
    target = tmp_path / "a" / "b" / "x.onnx"
    write(target)
    assert [p.name for p in target.parent.iterdir()] == ["x.onnx"]
    target.write_bytes(b"old")
    write(target)
    assert target.read_bytes() == b"new"
    plain = tmp_path / "plain"
    plain.touch()
    assert target.stat().st_mode == plain.stat().st_mode  # what the user's umask says


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_new_file_that_fails_leaves_what_was_there(tmp_path, error):
    for target in (tmp_path / "old.onnx", tmp_path / "a" / "b" / "x.onnx"):
        (tmp_path / "old.onnx").write_bytes(b"old")
        with pytest.raises(error), new_file(target, True) as beside:
            beside.write_bytes(b"half")
            raise error
        assert [p.name for p in tmp_path.iterdir()] == ["old.onnx"]
        assert (tmp_path / "old.onnx").read_bytes() == b"old"
    with pytest.raises(FileNotFoundError), new_file(tmp_path / "x.onnx", True):
        pass  # nothing was written
    assert [p.name for p in tmp_path.iterdir()] == ["old.onnx"]


def test_new_file_keeps_the_folder_that_another_uses_by_now(tmp_path):
    with pytest.raises(ValueError), new_file(tmp_path / "a" / "x.onnx", True) as beside:
        beside.write_bytes(b"half")
        (tmp_path / "a" / "y.onnx").write_bytes(b"another")
        raise ValueError
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["y.onnx"]


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_link_is_replaced_and_what_it_leads_to_stays(tmp_path):
    real, link, dead = (tmp_path / name for name in ("real", "link.onnx", "dead.onnx"))
    real.write_bytes(b"old")
    link.symlink_to(real)
    dead.symlink_to(tmp_path / "nowhere")
    for path in (link, dead):
        with pytest.raises(FileExistsError, match="overwrite be True. Received: path="):
            check_file(path, ".onnx", False)
        write(check_file(path, ".onnx", True))
        assert not path.is_symlink() and path.read_bytes() == b"new"
    assert real.read_bytes() == b"old"


def test_path_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder.onnx").mkdir()
    for path, message in (
        (tmp_path / "x.tflite", "must end in .onnx"),
        (tmp_path / "folder.onnx", "must not be a folder"),
        (tmp_path / "file" / "x.onnx", "must be in a folder, and .*file is a file"),
        (tmp_path / "file" / "a" / "x.onnx", "must be in a folder, and .*file is a file"),
    ):
        with pytest.raises(ValueError, match=message + ".* Received: path="):
            check_file(path, ".onnx", True)
    assert check_file(tmp_path / "a" / "x.onnx", ".onnx", False) == tmp_path / "a" / "x.onnx"


def test_file_that_came_meanwhile_stays(tmp_path):
    target = tmp_path / "x.onnx"
    with pytest.raises(FileExistsError, match="overwrite be True"), new_file(target, False) as new:
        new.write_bytes(b"new")
        target.write_bytes(b"another's")
    assert target.read_bytes() == b"another's" and list(tmp_path.iterdir()) == [target]
