"""Files and folders are written atomically."""

import pytest

from keras_vit.atomic import atomic_path

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
