"""Hostile .weights.h5 files (S5), and those that Keras writes."""

import struct

import h5py
import keras
import numpy as np
import pytest

from keras_vit.weights.files import arrays
from keras_vit.weights.files.rules import Refused


@pytest.fixture
def h5(tmp_path):
    """Writes a small .weights.h5 and gives its path and an open handle to spoil it with."""
    path = tmp_path / "x.weights.h5"
    with h5py.File(path, "w") as file:
        file["layers/dense/vars/0"] = np.ones((20, 3), "float32")
        file["layers/dense/vars/1"] = np.ones(3, "float32")
        file["optimizer/vars/0"] = np.array(5, "int32")
        file["layers/dense/vars"].attrs["name"] = "head"
    return path


EXPECTED = {"layers/dense/vars/0": (20, 3), "layers/dense/vars/1": (3,)}


def test_sound_weights_h5_is_accepted(h5):
    assert arrays.check_weights_h5(h5) == EXPECTED
    assert arrays.check_weights_h5(h5, EXPECTED) == EXPECTED
    assert arrays.check_weights_h5(h5, [[3], (20, 3)]) == EXPECTED
    assert arrays.check_weights_h5(h5, ignored=()) == {**EXPECTED, "optimizer/vars/0": ()}


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16", "bfloat16"])
def test_weights_h5_that_keras_writes_is_accepted(tmp_path, dtype):
    def build(seed):
        keras.utils.set_random_seed(seed)
        dense, head = (keras.layers.Dense(n, dtype=dtype) for n in (5, 3))
        return keras.Sequential([keras.Input((4,)), dense, keras.layers.Dropout(0.5), head])

    model, other = build(0), build(1)
    path = tmp_path / "x.weights.h5"
    model.save_weights(path)
    shapes = arrays.check_weights_h5(path, [tuple(w.shape) for w in model.weights])
    assert sorted(shapes.values()) == [(3,), (4, 5), (5,), (5, 3)]
    other.load_weights(path)
    for ours, theirs in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(
            keras.ops.convert_to_numpy(ours), keras.ops.convert_to_numpy(theirs)
        )


def test_weights_h5_with_other_arrays_is_refused_with_all_of_them(h5):
    with h5py.File(h5, "a") as file:
        file["layers/extra/vars/0"] = np.ones(2)
    with pytest.raises(Refused) as error:
        arrays.check_weights_h5(h5, {"layers/dense/vars/0": (3, 20), "layers/gone/vars/0": (1,)})
    assert str(error.value).split("\n  ")[1:] == [
        "missing: 'layers/gone/vars/0' (1,)",
        "extra: 'layers/dense/vars/1' (3,)",
        "extra: 'layers/extra/vars/0' (2,)",
        "other shape: 'layers/dense/vars/0' (20, 3), expected (3, 20)",
    ]
    with pytest.raises(Refused, match=r"shape \(2,\): 0 expected, 1 found"):
        arrays.check_weights_h5(h5, list(EXPECTED.values()))


def soft_link(file, folder):
    file["layers/dense/vars/2"] = h5py.SoftLink("/layers/dense/vars/0")


def soft_link_to_group(file, folder):
    file["layers/other"] = h5py.SoftLink("/layers/dense")


def dangling_link(file, folder):
    file["layers/other"] = h5py.SoftLink("/nowhere")


def external_link(file, folder):
    with h5py.File(folder / "secret.h5", "w") as other:
        other["x"] = np.ones(3)
    file["layers/dense/vars/2"] = h5py.ExternalLink("secret.h5", "/x")


def link_loop(file, folder):
    file["layers/dense/loop"] = file["layers"]


def link_to_root(file, folder):
    file["layers/root"] = file["/"]


def alias(file, folder):
    file["layers/dense/vars/2"] = file["layers/dense/vars/0"]


def external_storage(file, folder):
    (folder / "secret").write_bytes(bytes(12))
    storage = [(str(folder / "secret"), 0, 12)]
    file.create_dataset("layers/dense/vars/2", (3,), "float32", external=storage)


def virtual_dataset(file, folder):
    with h5py.File(folder / "secret.h5", "w") as other:
        other["x"] = np.ones(3)
    layout = h5py.VirtualLayout((3,), "float64")
    layout[:] = h5py.VirtualSource(folder / "secret.h5", "x", (3,))
    file.create_virtual_dataset("layers/dense/vars/2", layout)


def shape_without_bytes(file, folder):
    file.create_dataset("layers/dense/vars/2", (1 << 20, 1 << 20), "float32")


def shape_beyond_everything(file, folder):
    file.create_dataset("layers/dense/vars/2", (1 << 30, 1 << 30), "float32")


def chunks_without_bytes(file, folder):
    file.create_dataset("layers/dense/vars/2", (1 << 20, 1 << 20), "float32", chunks=(64, 64))


def small_shape_without_bytes(file, folder):
    file.create_dataset("layers/dense/vars/2", (2, 2), "float32")


def compressed(file, folder):
    file.create_dataset("layers/dense/vars/2", data=np.zeros(1 << 20), compression="gzip")


def shuffled(file, folder):
    file.create_dataset("layers/dense/vars/2", data=np.zeros(1 << 10), shuffle=True)


def strings(file, folder):
    file["layers/dense/vars/2"] = ["a", "b"]


def fixed_strings(file, folder):
    file["layers/dense/vars/2"] = np.array([b"a"])


def references(file, folder):
    file["layers/dense/vars/2"] = file["layers"].ref


def records(file, folder):
    file["layers/dense/vars/2"] = np.zeros(2, [("a", "f4"), ("b", "f4")])


def empty_space(file, folder):
    file["layers/dense/vars/2"] = h5py.Empty("f4")


def named_type(file, folder):
    file["layers/dense/vars/2"] = np.dtype("float32")


def long_attribute(file, folder):
    file["layers/dense/vars/0"].attrs["dtype"] = np.zeros(5000)


def long_root_attribute(file, folder):
    file.attrs["x"] = np.zeros(5000)


SPOILERS = {
    **dict.fromkeys(
        (soft_link, soft_link_to_group, dangling_link, external_link), "no soft, external or other"
    ),
    **dict.fromkeys((link_loop, link_to_root, alias), "every object in one place"),
    external_storage: "no external storage",
    virtual_dataset: "no virtual datasets",
    shape_without_bytes: "hold the 4398046511104 bytes|at most",
    shape_beyond_everything: "at most",
    chunks_without_bytes: "hold the 4398046511104 bytes|at most",
    small_shape_without_bytes: "hold the 16 bytes",
    **dict.fromkeys((compressed, shuffled), "without compression"),
    **dict.fromkeys((strings, fixed_strings, references, records), "of these dtypes only"),
    empty_space: "integers >= 0",
    named_type: "groups and datasets only",
    **dict.fromkeys((long_attribute, long_root_attribute), "one short value"),
}


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda f: f.__name__)
def test_weights_h5_that_is_spoilt_is_refused(h5, tmp_path, spoil):
    with h5py.File(h5, "a") as file:
        spoil(file, tmp_path)
    with pytest.raises(Refused, match=SPOILERS[spoil]) as error:
        arrays.check_weights_h5(h5)
    assert str(error.value).startswith("path must ") and str(h5) in str(error.value)


def test_weights_h5_whose_chunks_are_longer_than_the_file_is_refused(h5):
    with h5py.File(h5, "a") as file:
        file.create_dataset("x", data=np.ones(3, "float32"), chunks=(3,))
    content = h5.read_bytes()
    chunk = struct.pack("<LLQQ", 12, 0, 0, 0)  # bytes, filters, position, end
    assert content.count(chunk) == 1
    assert "x" in arrays.check_weights_h5(h5)  # chunks alone are no harm
    h5.write_bytes(content.replace(chunk, struct.pack("<LLQQ", 1 << 31, 0, 0, 0)))
    with pytest.raises(Refused, match=r"hold the 12 bytes.*stored=2147483648"):
        arrays.check_weights_h5(h5)


def test_weights_h5_cut_short_or_prefixed_is_refused(h5):
    content = h5.read_bytes()
    for length in [*range(0, len(content), 199), len(content) - 1]:
        h5.write_bytes(content[:length])
        with pytest.raises(Refused, match="^path must"):
            arrays.check_weights_h5(h5)
    h5.write_bytes(bytes(512) + content)
    assert h5py.is_hdf5(h5)  # which HDF5 would accept
    with pytest.raises(Refused, match="from its first byte"):
        arrays.check_weights_h5(h5)
