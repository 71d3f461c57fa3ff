"""Hostile .weights.h5 files (S5), and valid ones that Keras writes."""

import struct

import h5py
import keras
import numpy as np
import pytest

from keras_vit.weights.files.h5 import check_weights_h5
from keras_vit.weights.files.rules import Refused


@pytest.fixture
def h5(tmp_path):
    """The path of a small valid .weights.h5 file."""
    path = tmp_path / "x.weights.h5"
    with h5py.File(path, "w") as file:
        file["layers/dense/vars/0"] = np.ones((20, 3), "float32")
        file["layers/dense/vars/1"] = np.ones(3, "float32")
        file["optimizer/vars/0"] = np.array(5, "int32")
        file["layers/dense/vars"].attrs["name"] = "head"
    return path


EXPECTED = {"layers/dense/vars/0": (20, 3), "layers/dense/vars/1": (3,)}


@pytest.mark.backend_free
def test_valid_weights_h5_is_accepted(h5):
    assert check_weights_h5(h5) == EXPECTED
    assert check_weights_h5(h5, [[3], (20, 3)]) == EXPECTED


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16", "bfloat16"])
def test_weights_h5_that_keras_writes_is_accepted(tmp_path, dtype):
    def build(seed):
        keras.utils.set_random_seed(seed)
        dense, head = (keras.layers.Dense(n, dtype=dtype) for n in (5, 3))
        return keras.Sequential([keras.Input((4,)), dense, keras.layers.Dropout(0.5), head])

    model, other = build(0), build(1)
    path = tmp_path / "x.weights.h5"
    model.save_weights(path)
    shapes = check_weights_h5(path, [tuple(w.shape) for w in model.weights])
    assert sorted(shapes.values()) == [(3,), (4, 5), (5,), (5, 3)]
    other.load_weights(path)
    for ours, theirs in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(
            keras.ops.convert_to_numpy(ours), keras.ops.convert_to_numpy(theirs)
        )


@pytest.mark.backend_free
def test_weights_h5_with_other_arrays_is_refused_with_a_list_of_them(h5):
    with h5py.File(h5, "a") as file:
        file["layers/extra/vars/0"] = np.ones(2)
    with pytest.raises(Refused) as error:
        check_weights_h5(h5, [(3, 20), (3,)])
    assert str(error.value).split("\n  ")[1:] == [
        "shape (3, 20): 1 expected, 0 found",
        "shape (20, 3): 0 expected, 1 found",
        "shape (2,): 0 expected, 1 found",
    ]


PLACE = "layers/dense/vars/2"
LINKS, ONE_PLACE = "no soft, external or other", "every object in one place"
DTYPES, COMPRESSED = "of these dtypes only", "without compression"
VALUES = {
    "soft link": (h5py.SoftLink("/layers/dense/vars/0"), LINKS),
    "soft link to a group": (h5py.SoftLink("/layers/dense"), LINKS),
    "dangling link": (h5py.SoftLink("/nowhere"), LINKS),
    "external link": (h5py.ExternalLink("secret.h5", "/x"), LINKS),
    "strings": (["a", "b"], DTYPES),
    "fixed strings": (np.array([b"a"]), DTYPES),
    "records": (np.zeros(2, [("a", "f4"), ("b", "f4")]), DTYPES),
    "empty space": (h5py.Empty("f4"), "integers >= 0"),
    "named type": (np.dtype("float32"), "groups and datasets only"),
}
"""What `PLACE` contains, and what the error says."""
OWN = {
    "loop": (lambda file: file["layers"], ONE_PLACE),
    "root": (lambda file: file["/"], ONE_PLACE),
    "alias": (lambda file: file["layers/dense/vars/0"], ONE_PLACE),
    "reference": (lambda file: file["layers"].ref, DTYPES),
}
"""The same, with objects of the file itself."""
LARGE = {"shape": (1 << 20, 1 << 20), "dtype": "float32"}
DATASETS = {
    "shape without bytes": (LARGE, "hold the 4398046511104 bytes|at most"),
    "chunks without bytes": (LARGE | {"chunks": (64, 64)}, "hold the 4398046511104 bytes|at most"),
    "shape beyond everything": (LARGE | {"shape": (1 << 30, 1 << 30)}, "at most"),
    "small shape without bytes": (LARGE | {"shape": (2, 2)}, "hold the 16 bytes"),
    "compressed": ({"data": np.zeros(1 << 20), "compression": "gzip"}, COMPRESSED),
    "shuffled": ({"data": np.zeros(1 << 10), "shuffle": True}, COMPRESSED),
}
"""Arguments of the dataset at `PLACE`, and what the error says."""


def refuse_h5(path, found):
    with pytest.raises(Refused, match=found) as error:
        check_weights_h5(path)
    assert str(error.value).startswith("path must ") and str(path) in str(error.value)


@pytest.mark.backend_free
@pytest.mark.parametrize("kind", VALUES | OWN)
def test_weights_h5_with_other_objects_is_refused(h5, kind):
    value, found = (VALUES | OWN)[kind]
    with h5py.File(h5.parent / "secret.h5", "w") as other:
        other["x"] = np.ones(3)
    with h5py.File(h5, "a") as file:
        file[PLACE] = value(file) if kind in OWN else value
    refuse_h5(h5, found)


@pytest.mark.backend_free
@pytest.mark.parametrize("kind", DATASETS)
def test_weights_h5_with_hostile_datasets_is_refused(h5, kind):
    arguments, found = DATASETS[kind]
    with h5py.File(h5, "a") as file:
        file.create_dataset(PLACE, **arguments)
    refuse_h5(h5, found)


@pytest.mark.backend_free
def test_weights_h5_with_arrays_in_other_files_is_refused(h5, tmp_path):
    (tmp_path / "secret").write_bytes(bytes(12))
    with h5py.File(h5, "a") as file:
        file.create_dataset(PLACE, (3,), "float32", external=[(str(tmp_path / "secret"), 0, 12)])
    refuse_h5(h5, "no external storage")
    layout = h5py.VirtualLayout((3,), "float64")
    layout[:] = h5py.VirtualSource(tmp_path / "secret.h5", "x", (3,))
    with h5py.File(h5, "a") as file:
        del file[PLACE]
        file.create_virtual_dataset(PLACE, layout)
    refuse_h5(h5, "no virtual datasets")


@pytest.mark.backend_free
@pytest.mark.parametrize("place", ["/", "layers/dense/vars/0"])
def test_weights_h5_with_long_attributes_is_refused(h5, place):
    with h5py.File(h5, "a") as file:
        file[place].attrs["x"] = np.zeros(5000)
    refuse_h5(h5, "one short value")


@pytest.mark.backend_free
def test_weights_h5_whose_chunks_are_longer_than_the_file_is_refused(h5):
    with h5py.File(h5, "a") as file:
        file.create_dataset("x", data=np.ones(3, "float32"), chunks=(3,))
    content = h5.read_bytes()
    chunk = struct.pack("<LLQQ", 12, 0, 0, 0)  # bytes, filters, position, end
    assert content.count(chunk) == 1
    assert "x" in check_weights_h5(h5)  # chunks are allowed
    h5.write_bytes(content.replace(chunk, struct.pack("<LLQQ", 1 << 31, 0, 0, 0)))
    with pytest.raises(Refused, match=r"hold the 12 bytes.*stored=2147483648"):
        check_weights_h5(h5)


@pytest.mark.backend_free
def test_weights_h5_truncated_or_prefixed_is_refused(h5):
    content = h5.read_bytes()
    for length in [*range(0, len(content), 199), len(content) - 1]:
        h5.write_bytes(content[:length])
        with pytest.raises(Refused, match="^path must"):
            check_weights_h5(h5)
    h5.write_bytes(bytes(512) + content)
    assert h5py.is_hdf5(h5)  # HDF5 would accept it
    with pytest.raises(Refused, match="from its first byte"):
        check_weights_h5(h5)
