"""Checks a Keras `.weights.h5` before `load_weights` reads it, and reads those of other libraries.

HDF5 is a file system in a file: a dataset may be stored in another file, a name may be a link, a
shape may have no bytes. Keras writes none of these, so a file that has one is refused.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from keras_vit.weights.files.rules import (
    Declared,
    declare,
    decode,
    mismatch,
    refusal,
    refused_as,
)

BROKEN = (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError)
"""What h5py raises on a corrupt file."""
OPTIMIZER = "optimizer/"


def check_weights_h5(
    path: str | os.PathLike, expected: Sequence[Sequence[int]] | None = None
) -> dict[str, tuple[int, ...]]:
    """Checks that a `.weights.h5` is what Keras writes and holds exactly the expected arrays.

    Only the file's structure is read, no array. HDF5 itself is a large C library, and this function
    cannot protect it from a corrupt structure.

    Args:
        path: The file.
        expected: The shapes of all arrays in any order; None compares none.

    Returns:
        The shapes by path, such as `layers/dense/vars/0`, without the optimizer's state.
    """
    path = Path(path)
    size = path.stat().st_size
    if not path.is_file():  # reading a pipe or a device may never end
        raise refusal(path, "be a regular file")
    with path.open("rb") as file:
        found = read_shapes(file, path, size)
    shapes = {name: shape for name, shape in found.items() if not name.startswith(OPTIMIZER)}
    if expected is not None:
        have, want = Counter(shapes.values()), Counter(map(tuple, expected))
        wrong = [
            f"shape {shape}: {want[shape]} expected, {have[shape]} found"
            for shape in {**want, **have}
            if have[shape] != want[shape]
        ]
        if wrong:
            raise mismatch(path, wrong)
    return shapes


class H5Reader:
    """The arrays of an open `.weights.h5` file, for `arrays.open_arrays`; not the optimizer's."""

    def __init__(self, file: BinaryIO, path: Path):
        import h5py

        self.path, self.metadata, self._file = path, {}, file
        found = _declared(file, path, os.fstat(file.fileno()).st_size)
        self.declared = {n: d for n, d in sorted(found.items()) if not n.startswith(OPTIMIZER)}
        self._h5 = h5py.File(file, "r")

    def read_array(self, name: str) -> np.ndarray:
        """Reads one array; bfloat16, which HDF5 knows as two bytes, becomes float32."""
        with refused_as(self.path, "hold the bytes of its arrays", BROKEN, member=name):
            array = np.asarray(self._h5[name])
        if self.declared[name].dtype == "bfloat16":
            return decode(array.view(np.uint16), "bfloat16")
        return array.astype(array.dtype.newbyteorder("="), copy=False)

    def close(self) -> None:
        """Closes the file."""
        self._h5.close()
        self._file.close()


def read_shapes(file: BinaryIO, path: Path, size: int) -> dict[str, tuple[int, ...]]:
    """Checks all rules, and returns the shapes of all arrays by path.

    Args:
        file: An open HDF5 file, or one inside another file.
        path: Its name in errors.
        size: Its bytes.
    """
    found = _declared(file, path, size)
    return {name: declared.shape for name, declared in sorted(found.items())}


def _declared(file: BinaryIO, path: Path, size: int) -> dict[str, Declared]:
    import h5py

    # HDF5 also accepts its signature at a later offset, after another file's bytes.
    if file.read(8) != b"\x89HDF\r\n\x1a\n":
        raise refusal(path, "be an HDF5 file from its first byte", bytes=size)
    with refused_as(path, "be a whole HDF5 file", BROKEN), h5py.File(file, "r") as opened:
        found = dict(_walk(opened, path, size))
    if (total := sum(declared.nbytes for declared in found.values())) > size:
        raise refusal(path, f"hold the bytes its shapes declare, {total}", bytes=size)
    return found


def _walk(file: Any, path: Path, size: int) -> Iterator[tuple[str, Declared]]:
    """Checks every object of the file, and yields the datasets by path."""
    import h5py

    groups, seen = [file], {_address(file)}
    while groups:
        group = groups.pop()
        _check_attributes(group, path)
        for name in group:
            place = f"{group.name}/{name}".lstrip("/")
            with refused_as(path, "hold objects that HDF5 can open", BROKEN, member=place):
                item = _open(group, name, place, path)
                if (address := _address(item)) in seen:  # a loop, or one array under two names
                    raise refusal(path, "hold every object in one place", member=place)
                seen.add(address)
                if isinstance(item, h5py.Group):
                    groups.append(item)
                    continue
                _check_attributes(item, path)
                yield place, _check_dataset(item, place, path, size)


def _open(group: Any, name: str, place: str, path: Path) -> Any:
    """A group or dataset of this file. Refuses links to other places and files (S5)."""
    import h5py

    link = group.get(name, getlink=True)  # does not follow the link
    if not isinstance(link, h5py.HardLink):
        rule = "hold no soft, external or other links"
        raise refusal(path, rule, member=place, link=type(link).__name__)
    item = group[name]
    if not isinstance(item, h5py.Group | h5py.Dataset):
        kind = type(item).__name__
        raise refusal(path, "hold groups and datasets only", member=place, kind=kind)
    return item


def _check_dataset(dataset: Any, name: str, path: Path, size: int) -> Declared:
    """Refuses arrays whose bytes are in another file or in none (S5, S2)."""
    properties = dataset.id.get_create_plist()
    if properties.get_external_count():
        raise refusal(path, "hold its arrays itself, no external storage", member=name)
    if dataset.is_virtual:
        raise refusal(path, "hold its arrays itself, no virtual datasets", member=name)
    if filters := [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]:
        # HDF5 loads unknown filters from plugins, and decompresses without a limit.
        rule = "be written without compression (`h5repack -f NONE` removes it)"
        raise refusal(path, rule, member=name, filters=filters)
    dtype, chunk = dataset.dtype, dataset.chunks
    plain = "bfloat16" if dtype.str == "|V2" and dtype.fields is None else dtype.name
    declared = declare(path, name, dataset.shape, plain)
    stored, offset = dataset.id.get_storage_size(), dataset.id.get_offset() or 0
    whole = declared.nbytes <= stored <= size and offset + declared.nbytes <= size
    if chunk is not None:
        whole = whole and declare(path, name, chunk, plain).nbytes <= size
    if not whole:
        rule = f"hold the {declared.nbytes} bytes that shape {declared.shape} declares"
        raise refusal(path, rule, member=name, stored=stored, bytes=size)
    return declared


def _check_attributes(item: Any, path: Path) -> None:
    """Refuses attributes other than the short strings that Keras writes (S2)."""
    place = (item.name or "/").lstrip("/")
    found = {name: item.attrs.get_id(name) for name in item.attrs}
    if bad := [n for n, a in found.items() if a.shape != () or a.get_storage_size() > 1024]:
        raise refusal(path, "have attributes of one short value", member=place, attributes=bad)


def _address(item: Any) -> int:
    import h5py

    return h5py.h5o.get_info(item.id).addr
