"""Writes an export that is a file, or a file and its companions, whole or not at all."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from keras_vit.atomic import flush_folder, remove_left_over, temporary_name
from keras_vit.paths import as_output, check_above


def check_file(
    path: str | os.PathLike,
    suffix: str,
    overwrite: bool,
    companions: Sequence[str] = (),
    name: str = "path",
) -> Path:
    """The path of a file to write, checked before any work is done.

    Args:
        path: The path.
        suffix: What it must end in.
        overwrite: Whether the file may exist.
        companions: Suffixes of files beside it that belong to it.
        name: Name of the argument, for messages.
    """
    target = as_output(name, path)
    if target.suffix != suffix:
        raise ValueError(f"{name} must end in {suffix}. Received: {name}={os.fspath(path)!r}")
    for file in (target, *_beside(target, companions)):
        if file.is_dir():
            raise ValueError(f"{name} must not be a folder. Received: {name}={os.fspath(file)!r}")
        if os.path.lexists(file) and not overwrite:  # a broken link counts too
            raise FileExistsError(
                f"{name} must not exist, or overwrite be True. Received: {name}={os.fspath(file)!r}"
            )
    check_above(name, path)
    return target


@contextlib.contextmanager
def new_file(target: Path, overwrite: bool, companions: Sequence[str] = ()) -> Iterator[Path]:
    """Yields a path beside `target` to write to, which is renamed to it when the block ends.

    The block writes the companions too, under the same name with their suffixes. They are renamed
    first, so that the target is there only if they are. What is replaced is removed before.

    Without `overwrite`, this raises if `target` was created in the meantime.

    If the block raises, the file is removed, and so are the parents that were created for it. A
    killed process leaves a file named `.tmp-*`, which the next call removes. A symbolic link is
    replaced, its target is not.
    """
    target = Path(os.path.abspath(target))
    made = [folder for folder in target.parents if not folder.exists()]
    remove_left_over(target.parent)
    beside = target.with_name(temporary_name(target.name))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        for path in (beside, *_beside(beside, companions)):
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        check_file(target, target.suffix, overwrite, companions)
        if companions:  # the old target must not find new companions
            target.unlink(missing_ok=True)
        for new, old in zip(_beside(beside, companions), _beside(target, companions), strict=True):
            os.replace(new, old)
        os.replace(beside, target)
    except BaseException:
        for path in (beside, *_beside(beside, companions)):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another export may be using them
            for folder in made:
                folder.rmdir()
        raise
    flush_folder(target.parent)


def _beside(path: Path, companions: Sequence[str]) -> list[Path]:
    return [path.with_suffix(suffix) for suffix in companions]
