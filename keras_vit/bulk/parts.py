"""What a run has computed so far: parts of its rows on disk, so that a killed run resumes.

Beside the file to write is a folder, `NAME.parts`: `job.json`, which says what is computed, and the
parts, each named by its first row and the row after its last. A part is written whole. At the end
the parts are joined to the file, which gets its name when it is whole, and the folder is removed.
"""

import contextlib
import hashlib
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_vit.atomic import atomic_path, remove
from keras_vit.bulk.formats import Format, final_files
from keras_vit.bulk.rows import Row
from keras_vit.lock import LOCK, Lock
from keras_vit.paths import check_above

LOG = logging.getLogger("keras_vit")
FORMAT = 1
"""Version of the folder."""
JOB = "job.json"
NAME = re.compile(r"(\d{10})-(\d{10})(\..+)")
MOST_ROWS = 4096
MOST_SECONDS = 30.0
"""A part is written after so many rows or seconds. A kill loses no more than that."""


class Parts:
    """The parts of one file, written by one process at a time.

    Args:
        out: The file to write.
        job: What is computed, as JSON. A run resumes only the parts of the same job.
        format: Writes the parts and the file.
        total: Rows of the whole file.
        overwrite: Whether to replace the file, and the parts of another job.

    Attributes:
        done: Rows that are on disk.
        failed: Rows of them with an error.
    """

    def __init__(
        self,
        out: Path,
        job: Mapping[str, Any],
        format: Format,
        total: int,
        *,
        overwrite: bool = False,
    ):
        self.out, self.total = out, total
        self.folder = parts_folder(out)
        self.done = self.failed = 0
        self._job = {"format": FORMAT, **job}
        self._format = format
        self._overwrite = overwrite
        self._files: list[tuple[Path, ...]] = []
        self._buffer: list[Row] = []
        self._since = time.monotonic()

    @contextlib.contextmanager
    def opened(self) -> Iterator["Parts"]:
        """Locks the folder, and finds the parts of the same job in it.

        When the block ends, also by an error, all rows that were added are on disk.
        """
        check_above("out", self.out)
        lock = Lock(self.folder)
        lock.acquire()
        try:
            self._begin()
            try:
                yield self
            finally:
                self._write()
        finally:
            with contextlib.suppress(OSError):  # Windows keeps a file that is open
                if all(path.name == LOCK for path in self.folder.iterdir()):
                    remove(self.folder)
            lock.release()

    def add(self, rows: Sequence[Row]) -> None:
        """Adds the rows of the next images, in their order."""
        self._buffer += rows
        late = time.monotonic() - self._since >= MOST_SECONDS
        if late or len(self._buffer) >= MOST_ROWS:
            self._write()

    def finish(self) -> None:
        """Joins the parts to the file, and removes them."""
        self._write()
        if self.done != self.total:
            raise RuntimeError(f"{self.out} must have {self.total} rows. Received: {self.done}")
        self._format.join(self._files, self.out)
        self._remove()

    # -- the folder

    def _begin(self) -> None:
        if (found := self._read_job()) == self._job:
            self._find()
            if self.done < self.total and not self._overwrite:
                check_free(self.out)  # otherwise it was killed while it removed the parts
            return
        if not self._overwrite:
            if found is not None and self._parts():
                self._refuse(found)
            check_free(self.out)
        self._remove()
        with atomic_path(self.folder / JOB) as temporary:
            temporary.write_text(json.dumps(self._job, indent=1) + "\n", encoding="utf-8")

    def _read_job(self) -> Any:
        """The job of the parts in the folder; None if there is none."""
        try:
            return json.loads((self.folder / JOB).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError:  # damaged, so another one
            return {}

    def _refuse(self, found: Any) -> None:
        same = found if isinstance(found, dict) else {}
        keys = [key for key, value in self._job.items() if same.get(key) != value]
        raise ValueError(
            "out must be that of a new run, or of the same run to resume it; overwrite=True "
            f"removes what is there. Received: {self.folder}, of a run with other {', '.join(keys)}"
        )

    def _find(self) -> None:
        """Finds the parts from row 0 on without a gap; those behind a gap are removed."""
        starts: dict[int, tuple[int, list[Path]]] = {}
        for path in sorted(self.folder.iterdir()):
            if match := NAME.fullmatch(path.name):
                starts.setdefault(int(match[1]), (int(match[2]), []))[1].append(path)
        while self.done in starts:
            start, end = self.done, starts[self.done][0]
            files = self._names(start, end)
            try:
                rows, failed = self._format.count(files)
            except (OSError, ValueError, EOFError) as error:
                LOG.warning("Computed again, because a part cannot be read: %s", error)
                break
            if rows != end - start:
                LOG.warning("Computed again, because rows are missing: %s", files[-1])
                break
            self._files.append(files)
            self.done, self.failed = end, self.failed + failed
        kept = {path for files in self._files for path in files}
        for path in self._parts():
            if path not in kept:
                remove(path)

    def _parts(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if NAME.fullmatch(path.name)]

    def _remove(self) -> None:
        """Removes the job first: parts without one are never resumed."""
        for path in (self.folder / JOB, *self._parts()):
            remove(path)

    def _names(self, start: int, end: int) -> tuple[Path, ...]:
        stem = f"{start:010}-{end:010}"
        return tuple(self.folder / f"{stem}{suffix}" for suffix in self._format.suffixes)

    def _write(self) -> None:
        rows, self._buffer = self._buffer, []
        self._since = time.monotonic()
        if not rows:
            return
        end = self.done + len(rows)
        files = self._names(self.done, end)
        self._format.write(files, rows)
        self._files.append(files)
        self.done, self.failed = end, self.failed + sum(row.error is not None for row in rows)


def parts_folder(out: Path) -> Path:
    """The folder of a file's parts."""
    return out.with_name(out.name + ".parts")


def check_free(out: Path) -> None:
    """Raises if a file that a run would write exists."""
    for file in final_files(out):
        if file.exists():
            raise FileExistsError(f"out must not exist, or overwrite be True. Received: {file}")


def digest(items: Sequence[str]) -> str:
    """A hash of texts and their order."""
    found = hashlib.sha256()
    for item in items:
        found.update(item.encode("utf-8", "surrogateescape") + b"\0")
    return found.hexdigest()
