"""Reading and writing weight files: sound ones, of every kind. Hostile ones are in security/."""

import json
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from keras_vit.weights.files import arrays, writers
from keras_vit.weights.files.rules import DTYPES, Refused

pytestmark = pytest.mark.backend_free

FORMATS = ("stored.npz", "deflated.npz", "weights.safetensors")
NUMPY_DTYPES = [name for name in DTYPES if name != "bfloat16"]
# Every special value of bfloat16, and some that float16 would read as others.
BFLOAT16 = [0.0, -0.0, 1.5, -3.0e38, 1e-40, np.inf, -np.inf, np.nan]


@pytest.fixture
def sample():
    rng = np.random.default_rng(0)
    return {
        "embedding/kernel": rng.standard_normal((8, 8, 3, 20)).astype("float32"),
        "blocks.0.norm1.weight": rng.standard_normal(20).astype("float16"),
        "step": np.array(7, "int64"),
        "none": np.zeros((0, 20), "float32"),
        "größe": rng.standard_normal((5, 3)),
    }


def save(path, values):
    if path.suffix == ".npz":
        writers.write_npz(path, values, compressed="deflated" in path.name)
    else:
        writers.write_safetensors(path, values, {"format": "pt"})
    return path


def read(path):
    with arrays.open_arrays(path) as file:
        return dict(file)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# -- reading


@pytest.mark.parametrize("name", FORMATS)
def test_open_arrays_tells_shapes_and_gives_values(tmp_path, sample, name):
    path = save(tmp_path / name, sample)
    with arrays.open_arrays(path) as file:
        assert file.path == path
        assert file.shapes == {k: v.shape for k, v in sample.items()}
        assert file.dtypes == {k: v.dtype.name for k, v in sample.items()}
        assert file.nbytes == sum(v.nbytes for v in sample.values())
        assert file.metadata == ({"format": "pt"} if name.endswith("safetensors") else {})
        assert len(file) == len(sample) and set(file) == set(sample)
        assert "step" in file and "stop" not in file
        for key, value in sample.items():
            assert same(file[key], value), key
        assert not same(file["größe"], sample["größe"][::-1])
        with pytest.raises(KeyError, match="stop"):
            file["stop"]


@pytest.mark.parametrize("name", FORMATS)
def test_open_arrays_gives_arrays_of_ones_own(tmp_path, sample, name):
    path = save(tmp_path / name, sample)
    before = path.read_bytes()
    with arrays.open_arrays(path) as file:
        mine = file["größe"]
        mine += 1
        assert not same(mine, file["größe"])
    assert path.read_bytes() == before
    path.write_bytes(b"\0" * len(before))  # nor is an array a view of the file
    assert same(mine - 1 + 1, mine) and np.allclose(mine, sample["größe"] + 1)
    with pytest.raises(ValueError, match="arrays must be open"):
        file["größe"]
    assert file.shapes["step"] == ()


@pytest.mark.parametrize("name", FORMATS[:2])
def test_open_arrays_reads_an_array_when_it_is_asked_for(tmp_path, sample, name):
    path = save(tmp_path / name, {"good": sample["größe"], "bad": sample["embedding/kernel"]})
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # within "bad", which is by far the longest
    path.write_bytes(data)
    with arrays.open_arrays(path) as file:  # opening reads headers only
        assert same(file["good"], sample["größe"])
        assert "bad" in file and len(list(file)) == 2
        with pytest.raises(Refused, match=r"path must hold every array whole.*member='bad.npy'"):
            file["bad"]


def test_open_arrays_reads_what_numpy_and_safetensors_write(tmp_path, sample):
    np.savez(tmp_path / "a.npz", **sample)
    np.savez_compressed(tmp_path / "b.npz", **sample)
    safetensors.numpy.save_file(sample, tmp_path / "c.safetensors", {"k": "v"})
    for name in ("a.npz", "b.npz", "c.safetensors"):
        got = read(tmp_path / name)
        assert got.keys() == sample.keys()
        assert all(same(got[k], sample[k]) for k in sample), name


@pytest.mark.parametrize("limit", [0, 1500, 1 << 31])
def test_npz_of_any_size_is_read(tmp_path, sample, monkeypatch, limit):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", limit)  # from where zipfile writes 64-bit sizes
    writers.write_npz(tmp_path / "x.npz", sample)
    monkeypatch.undo()
    content = (tmp_path / "x.npz").read_bytes()
    assert (b"PK\6\6" in content) == (limit < 1 << 31)
    got = read(tmp_path / "x.npz")
    assert all(same(got[k], sample[k]) for k in sample)
    (tmp_path / "x.npz").write_bytes(content[:-23] + content[-22:])  # within the last records
    with pytest.raises(Refused):
        arrays.open_arrays(tmp_path / "x.npz")


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_dtype_is_kept_both_ways(tmp_path, name, dtype):
    value = np.random.default_rng(1).integers(0, 2 if dtype == "bool" else 100, (3, 5))
    value = value.astype(dtype)
    path = save(tmp_path / name, {"x": value})
    assert same(read(path)["x"], value)
    theirs = np.load(path) if path.suffix == ".npz" else safetensors.numpy.load_file(path)
    assert same(theirs["x"], value)


@pytest.mark.parametrize("name", FORMATS)
def test_bfloat16_becomes_the_same_number_in_float32(tmp_path, name):
    value = np.array(BFLOAT16, ml_dtypes.bfloat16).reshape(2, 4)
    path = save(tmp_path / name, {"x": value})
    with arrays.open_arrays(path) as file:
        assert file.dtypes == {"x": "bfloat16"}
        assert file.nbytes == 16
        got = file["x"]
    assert got.dtype == np.float32 and got.shape == (2, 4)
    if path.suffix == ".npz":
        np.savez(tmp_path / "numpys.npz", x=value)
        theirs, ours = np.load(tmp_path / "numpys.npz")["x"], np.load(path)["x"]
        assert ours.dtype == theirs.dtype == "V2" and ours.tobytes() == theirs.tobytes()
    np.testing.assert_array_equal(got, value.astype("float32"))
    assert not np.array_equal(got[0, 1:], value.view("float16").astype("float32")[0, 1:])


def test_bfloat16_of_numpy_alone_is_two_bytes_of_void(tmp_path):
    value = np.array([[1.5, -2.0, 0.25]], ml_dtypes.bfloat16)
    np.savez(tmp_path / "x.npz", x=value.view("V2"))
    np.testing.assert_array_equal(read(tmp_path / "x.npz")["x"], [[1.5, -2.0, 0.25]])


@pytest.mark.parametrize("compress", [np.savez, np.savez_compressed])
def test_npz_of_any_order_is_read_in_the_machines(tmp_path, compress):
    value = np.random.default_rng(2).standard_normal((3, 4, 5)).astype("float32")
    orders = {
        "fortran": np.asfortranarray(value),
        "big": value.astype(">f4"),
        "both": np.asfortranarray(value.astype(">f4")),
    }
    compress(tmp_path / "x.npz", **orders)
    got = read(tmp_path / "x.npz")
    for name in orders:
        assert got[name].dtype == np.float32 and got[name].dtype.isnative
        np.testing.assert_array_equal(got[name], value)
    assert not np.array_equal(got["fortran"], value.reshape(5, 4, 3).T)


def test_safetensors_with_unaligned_data_are_read(tmp_path):
    value = np.arange(5, dtype="float32")
    entry = {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}
    for spaces in range(4):  # the format recommends a multiple of 8, and does not ask for it
        header = json.dumps({"x": entry}).encode() + b" " * spaces
        data = struct.pack("<Q", len(header)) + header + value.tobytes()
        (tmp_path / "x.safetensors").write_bytes(data)
        got = read(tmp_path / "x.safetensors")["x"]
        assert same(got, value) and got.flags.aligned


def test_safetensors_that_begin_like_a_pickle_are_read(tmp_path):
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"x": entry}).encode().ljust(0x0280)
    data = struct.pack("<Q", len(header)) + header + struct.pack("<f", 2.5)
    assert data[:2] == b"\x80\x02"
    (tmp_path / "x.bin").write_bytes(data)
    assert read(tmp_path / "x.bin")["x"] == [2.5]


# -- folders and shards


def shards(folder, **files):
    """Writes shards and their index; a value maps names to arrays."""
    names = {}
    for stem, values in files.items():
        safetensors.numpy.save_file(values, folder / f"{stem}.safetensors", {"from": stem})
        names |= dict.fromkeys(values, f"{stem}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))
    return index


def test_shards_are_one_mapping(tmp_path, sample):
    first, second = dict(list(sample.items())[:2]), dict(list(sample.items())[2:])
    index = shards(tmp_path, one=first, two=second)
    for path in (index, tmp_path):
        with arrays.open_arrays(path) as file:
            assert file.path == index
            assert file.metadata == {"from": "one"}
            assert file.shapes == {k: v.shape for k, v in sample.items()}
            assert all(same(file[k], v) for k, v in sample.items())


def test_folder_stands_for_its_weight_file(tmp_path, sample):
    with pytest.raises(Refused, match="hold an .npz or .safetensors file"):
        arrays.open_arrays(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(Refused, match="pickle"):
        arrays.open_arrays(tmp_path)
    save(tmp_path / "a.npz", {"x": np.ones(1)})
    assert read(tmp_path)["x"] == 1
    save(tmp_path / "b.safetensors", {"x": np.ones(1) * 2})
    assert read(tmp_path)["x"] == 2
    save(tmp_path / "c.safetensors", {"x": np.ones(1) * 3})
    with pytest.raises(Refused, match=r"hold one \*.safetensors.*'b.safetensors', 'c.safe"):
        arrays.open_arrays(tmp_path)
    save(tmp_path / "model.safetensors", {"x": np.ones(1) * 4})
    assert read(tmp_path)["x"] == 4


def test_missing_file_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"path must be a file or folder.*nowhere"):
        arrays.open_arrays(tmp_path / "nowhere.npz")


def test_non_finite_counts_or_is_silent():
    good = np.random.default_rng(3).standard_normal((4, 5)).astype("float16")
    assert arrays.non_finite("x", good) is None
    assert arrays.non_finite("x", np.array([1, 2])) is None
    assert arrays.non_finite("x", np.full(3, 3e38, "float32")) is None
    assert arrays.non_finite("x", np.full(3, 1.5e308)) is None  # whose sum overflows
    assert arrays.non_finite("x", np.zeros((0, 3))) is None
    bad = good.copy()
    bad[1, 2], bad[0, 0], bad[3, 3] = np.nan, np.inf, -np.inf
    assert arrays.non_finite("x", bad) == "x: 1 NaN and 2 Inf among 20 values"


# -- writing


def test_write_safetensors_writes_the_librarys_bytes(tmp_path):
    rng = np.random.default_rng(4)
    values = {
        f"{d}.{i}é\n": (rng.random((i, 3)) * 9).astype(d) for d in NUMPY_DTYPES for i in (2, 1)
    }
    for metadata in (None, {"format": 'p"t'}):
        writers.write_safetensors(tmp_path / "ours", values, metadata)
        safetensors.numpy.save_file(values, tmp_path / "theirs", metadata)
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_write_npz_is_stored_and_the_same_each_time(tmp_path, sample):
    first = save(tmp_path / "a.npz", sample).read_bytes()
    assert save(tmp_path / "b.npz", sample).read_bytes() == first
    assert sample["embedding/kernel"].tobytes() in first
    small = save(tmp_path / "deflated.npz", {"x": np.zeros((99, 99))})
    assert small.stat().st_size < 1000
    assert same(read(small)["x"], np.zeros((99, 99)))


@pytest.mark.parametrize("name", FORMATS)
def test_writers_take_arrays_of_any_layout(tmp_path, name):
    base = np.random.default_rng(5).standard_normal((6, 4, 2)).astype("float32")
    values = {
        "transposed": base.T,
        "strided": base[::2, 1:3],
        "reversed": base[::-1],
        "broadcast": np.broadcast_to(base[:1], (3, 4, 2)),
        "big": base.astype(">f4"),
        "scalar": np.float32(3.5),
    }
    path = save(tmp_path / name, values)
    got = read(path)
    assert b"'fortran_order': True" not in path.read_bytes()  # not every reader of .npy knows it
    assert got.keys() == values.keys()
    for key, value in values.items():
        assert got[key].shape == np.shape(value)
        np.testing.assert_array_equal(got[key], value)


def test_writers_ask_a_lazy_mapping_for_one_array_at_a_time(tmp_path, sample):
    source = save(tmp_path / "a.npz", sample)
    with arrays.open_arrays(source) as file:
        writers.write_safetensors(tmp_path / "b.safetensors", file)
    with arrays.open_arrays(tmp_path / "b.safetensors") as file:
        writers.write_npz(tmp_path / "c.npz", {k: file[k] for k in sample})
    assert (tmp_path / "c.npz").read_bytes() == source.read_bytes()


class Failing(dict):
    """Arrays of which the one named "bad" cannot be had."""

    def __getitem__(self, name):
        if name == "bad":
            raise RuntimeError("half way")
        return super().__getitem__(name)


class FailingLater(Failing):
    """The same, once the shapes have been asked for."""

    calls = 0

    def __getitem__(self, name):
        self.calls += 1
        return super().__getitem__(name) if self.calls > 2 else np.ones((2, 3))


@pytest.mark.parametrize(
    "name, kind", [*((name, Failing) for name in FORMATS), ("weights.safetensors", FailingLater)]
)
@pytest.mark.parametrize("existing", [False, True])
def test_writers_that_fail_leave_everything_as_it_was(tmp_path, name, kind, existing):
    path = tmp_path / name
    if existing:
        save(path, {"x": np.ones(3)})
    before = [(p.name, p.read_bytes()) for p in tmp_path.iterdir()]
    with pytest.raises(RuntimeError, match="half way"):
        save(path, kind(good=np.ones((2, 3)), bad=np.ones((2, 3))))
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == before


@pytest.mark.parametrize("name", FORMATS)
def test_writers_replace_what_is_there(tmp_path, name):
    path = save(tmp_path / "deep" / name, {"x": np.ones(3)})
    save(path, {"y": np.zeros(2)})
    assert read(path).keys() == {"y"}
    assert [p.name for p in path.parent.iterdir()] == [name]


@pytest.mark.parametrize("name", FORMATS)
def test_writers_refuse_what_no_reader_takes(tmp_path, name):
    path = tmp_path / name
    for value in (np.array([{}]), np.array(["a"]), np.zeros(2, "complex64"), np.zeros(1, "V3")):
        with pytest.raises(ValueError, match=r"arrays must have one of these dtypes.*name='x'"):
            save(path, {"x": value})
    assert list(tmp_path.iterdir()) == []


def test_writers_refuse_names_that_the_format_cannot_hold(tmp_path):
    for name in ("../x", "/x", "a//b", "a\\b", "", "C:/x"):
        with pytest.raises(ValueError, match="arrays must .*name="):
            writers.write_npz(tmp_path / "x.npz", {name: np.ones(1)})
    with pytest.raises(ValueError, match="not be named '__metadata__'"):
        writers.write_safetensors(tmp_path / "x", {"__metadata__": np.ones(1)})
    with pytest.raises(ValueError, match="metadata must hold strings"):
        writers.write_safetensors(tmp_path / "x", {"x": np.ones(1)}, {"a": 1})
    assert list(tmp_path.iterdir()) == []
