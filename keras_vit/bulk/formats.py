"""The files that results are written to: JSON lines, Parquet and .npy.

A format writes a part of the rows as files of its own, counts the rows of a part, and joins all
parts. A part's last file is written last, so a part whose last file exists is whole.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit.atomic import atomic_path
from keras_vit.bulk.rows import FEATURES, PROBABILITIES, Row, Score, best_classes

NAMES = ".jsonl"
"""Suffix of the file with the images' names, beside a .npy file."""
GROUP = 16_384
"""Rows of a row group in a joined Parquet file."""
READ = 1 << 20
"""Bytes copied at once."""


class JsonLines:
    """A line for each image: `{"image", "classes"}` or `{"image", "error"}`."""

    suffixes = (".jsonl",)

    def __init__(self, labels: Sequence[str] | None, top_k: int):
        self._labels, self._top_k = labels, top_k

    def write(self, files: Sequence[Path], rows: Sequence[Row]) -> None:
        """Writes the files of a part."""
        _write_lines(files[0], [self._record(row) for row in rows])

    def count(self, files: Sequence[Path]) -> tuple[int, int]:
        """The rows of a part, and those of them with an error."""
        return _count_lines(files[0])

    def join(self, parts: Sequence[Sequence[Path]], out: Path) -> None:
        """Writes all parts as one file, whole or not at all."""
        _join_lines([part[0] for part in parts], out)

    def _record(self, row: Row) -> dict[str, Any]:
        if row.values is None:
            return {"image": row.image, "error": row.error}
        return class_record(row.image, best_classes(row.values, self._labels, self._top_k))


class Parquet:
    """A table with a row for each image.

    The columns are `image` and `error`, then `classes`, `labels` and `scores` with the best classes
    of an image as lists, or `features` as a list of float32. They are null after an error.
    """

    suffixes = (".parquet",)

    def __init__(self, wanted: str, labels: Sequence[str] | None = None, top_k: int = 1):
        self._pyarrow = import_pyarrow()
        self._wanted, self._labels, self._top_k = wanted, labels, top_k

    def write(self, files: Sequence[Path], rows: Sequence[Row]) -> None:
        """Writes the files of a part."""
        pa = self._pyarrow
        schema, columns = self._schema(), self._columns(rows)
        arrays = [pa.array(columns[field.name], field.type) for field in schema]
        with atomic_path(files[0]) as temporary:
            pa.parquet.write_table(pa.Table.from_arrays(arrays, schema=schema), temporary)

    def count(self, files: Sequence[Path]) -> tuple[int, int]:
        """The rows of a part, and those of them with an error."""
        table = self._read(files[0], ["error"])
        return table.num_rows, table.num_rows - table["error"].null_count

    def join(self, parts: Sequence[Sequence[Path]], out: Path) -> None:
        """Writes all parts as one file, whole or not at all."""
        pa = self._pyarrow
        with (
            atomic_path(out) as temporary,
            pa.parquet.ParquetWriter(temporary, self._schema()) as writer,
        ):
            tables, count = [], 0
            for part in parts:
                tables.append(self._read(part[0]))
                count += tables[-1].num_rows
                if count >= GROUP:
                    writer.write_table(pa.concat_tables(tables))
                    tables, count = [], 0
            if tables:
                writer.write_table(pa.concat_tables(tables))

    def _read(self, file: Path, columns: list[str] | None = None) -> Any:
        try:
            return self._pyarrow.parquet.read_table(file, columns=columns)
        except self._pyarrow.ArrowException as error:
            raise ValueError(f"{file} must be a Parquet file. {error}") from error

    def _schema(self) -> Any:
        pa = self._pyarrow
        kinds = {"image": pa.string(), "error": pa.string()}
        if self._wanted == FEATURES:
            kinds["features"] = pa.list_(pa.float32())
        else:
            kinds["classes"] = pa.list_(pa.int32())
            kinds["labels"] = pa.list_(pa.string())
            kinds["scores"] = pa.list_(pa.float32())
        return pa.schema(kinds)

    def _columns(self, rows: Sequence[Row]) -> Mapping[str, Sequence[Any]]:
        columns: dict[str, Sequence[Any]] = {
            "image": [_text(row.image) for row in rows],
            "error": [None if row.error is None else _text(row.error) for row in rows],
        }
        if self._wanted == FEATURES:
            return columns | {"features": [row.values for row in rows]}
        best = [self._best(row) for row in rows]

        def each(value: Callable[[Score], Any]) -> list[Any]:
            return [
                None if scores is None else [value(score) for score in scores] for scores in best
            ]

        return columns | {
            "classes": each(lambda score: score.number),
            "labels": each(lambda score: score.label),
            "scores": each(lambda score: score.score),
        }

    def _best(self, row: Row) -> list[Score] | None:
        if row.values is None:
            return None
        return best_classes(row.values, self._labels, self._top_k)


class Npy:
    """Features `(N, D)` in float32, and beside them a line for each image: `{"image", "error"}`.

    Row i belongs to line i. After an error the row is NaN.
    """

    suffixes = (".npy" + NAMES, ".npy")

    def write(self, files: Sequence[Path], rows: Sequence[Row]) -> None:
        """Writes the files of a part; of one without any features, an array `(n, 0)`."""
        names, array = files
        _write_lines(names, [_named(row) for row in rows])
        width = next((len(row.values) for row in rows if row.values is not None), 0)
        values = np.full((len(rows), width), np.nan, "float32")
        for i, row in enumerate(rows):
            if row.values is not None:
                values[i] = row.values
        with atomic_path(array) as temporary:
            np.save(temporary, values)

    def count(self, files: Sequence[Path]) -> tuple[int, int]:
        """The rows of a part, and those of them with an error."""
        names, array = files
        rows, failed = _count_lines(names)
        found = np.load(array)
        if found.ndim != 2 or len(found) != rows:
            raise ValueError(f"{array} must have a row for each line of {names}")
        return rows, failed

    def join(self, parts: Sequence[Sequence[Path]], out: Path) -> None:
        """Writes the names, then the array, each whole or not at all."""
        arrays = [array for _, array in parts]
        shapes = [_shape(array) for array in arrays]
        count = sum(rows for rows, _ in shapes)
        width = max((width for _, width in shapes), default=0)
        _join_lines([names for names, _ in parts], names_file(out))
        with atomic_path(out) as temporary, temporary.open("wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
            np.lib.format.write_array_header_1_0(file, header)
            for array, (rows, _) in zip(arrays, shapes, strict=True):
                values = np.load(array).astype("<f4", copy=False)
                file.write((values if values.size else np.full((rows, width), np.nan, "<f4")).data)


Format = JsonLines | Parquet | Npy


def format_for(
    out: Path, wanted: str, labels: Sequence[str] | None = None, top_k: int = 1
) -> Format:
    """The format that a file's suffix names.

    Args:
        out: The file to write.
        wanted: "probabilities" or "features".
        labels: Class names, or None.
        top_k: Classes of an image.
    """
    check_suffix(out, wanted)
    if out.suffix == ".parquet":
        return Parquet(wanted, labels, top_k)
    return Npy() if wanted == FEATURES else JsonLines(labels, top_k)


def check_suffix(out: Path, wanted: str) -> None:
    """Raises unless a file's suffix names a format for what is wanted."""
    known = {PROBABILITIES: (".jsonl", ".parquet"), FEATURES: (".parquet", ".npy")}[wanted]
    if out.suffix not in known:
        raise ValueError(f"out must end in {' or '.join(known)}. Received: out={str(out)!r}")


def names_file(out: Path) -> Path:
    """The file with the images' names, beside a .npy file."""
    return out.with_name(out.name + NAMES)


def final_files(out: Path) -> tuple[Path, ...]:
    """All files that a run writes; the last one is written last."""
    return (names_file(out), out) if out.suffix == ".npy" else (out,)


def class_record(image: str, classes: Sequence[Score]) -> dict[str, Any]:
    """The classes of an image as JSON."""
    scores = [{"class": number, "label": label, "score": score} for number, label, score in classes]
    return {"image": image, "classes": scores}


def import_pyarrow() -> Any:
    """Imports pyarrow, or raises an error that says how to install it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "pyarrow must be installed to write Parquet files: pip install 'keras3-vit[bulk]'"
        ) from error
    return pyarrow


def _named(row: Row) -> dict[str, str]:
    return {"image": row.image} | ({} if row.error is None else {"error": row.error})


def _write_lines(file: Path, records: Sequence[Mapping[str, Any]]) -> None:
    with atomic_path(file) as temporary:
        text = "".join(json.dumps(record) + "\n" for record in records)
        temporary.write_text(text, encoding="utf-8")


def _count_lines(file: Path) -> tuple[int, int]:
    rows = failed = 0
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            rows += 1
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError(f"{file} must have an object on each line")
            failed += "error" in record
    return rows, failed


def _join_lines(files: Sequence[Path], out: Path) -> None:
    with atomic_path(out) as temporary, temporary.open("wb") as joined:
        for file in files:
            joined.writelines(_chunks(file))


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as part:
        while chunk := part.read(READ):
            yield chunk


def _shape(array: Path) -> tuple[int, int]:
    with array.open("rb") as file:
        np.lib.format.read_magic(file)
        rows, width = np.lib.format.read_array_header_1_0(file)[0]
    return rows, width


def _text(text: str) -> str:
    """A file name that is not UTF-8, as a text that is: Parquet holds no other."""
    return text.encode("utf-8", "backslashreplace").decode()
