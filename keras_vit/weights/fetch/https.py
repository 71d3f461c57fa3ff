"""Fetching one file from an https:// address into the cache: resumed, checked, whole or not there.

`keras.utils.get_file` writes under the final name: killed, it leaves half a file there, which the
next call takes for the whole one; a wrong hash leaves the wrong file; and a silent server holds it
for ever. So this stands in its place, with a folder of its own in the same cache.
"""

import contextlib
import hashlib
import http.client
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urldefrag, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from keras_vit.weights.fetch import network

ATTEMPTS = 4
"""Connections a call makes, as long as each of them brings more of the file."""
PAUSE = 1.0
"""Seconds between two of them."""
CHUNK = 1 << 20

log = logging.getLogger("keras_vit")


def download(url: str, cache_dir: Path | None = None) -> Path:
    """The file at `url`, from the cache if it is there.

    Args:
        url: An https:// address, or http:// on this machine. It may end in `#sha256=...`, which the
            file is then checked against, also the one in the cache.
        cache_dir: Folder to keep it in; by default `models/keras_vit` in Keras' own.

    Returns:
        Path of the whole file.
    """
    network.check_address(url)
    url, fragment = urldefrag(url)
    sha256 = _read_hash(fragment)
    final = cached_path(url, cache_dir)
    if _is_good(final, sha256):
        return final
    if network.offline():
        raise network.not_cached(url, final.parent)
    with _alone(final):
        if not _is_good(final, sha256):  # another process may have fetched it in the meantime
            part = _Transfer(url, final, sha256).run()
            _check_hash(part, sha256, url)
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(part, final)
    return final


def cached_path(url: str, cache_dir: Path | None = None) -> Path:
    """Where the file of `url` is kept. The address is part of it: many files are `model.npz`."""
    name = unquote(urlsplit(url).path).rpartition("/")[2]
    name = re.sub(r"[^\w.+=@-]", "_", name)[-120:]
    if not name.strip("."):
        raise ValueError(f"source must end in the name of a file. Received: source={url!r}")
    keras_home = os.environ.get("KERAS_HOME") or "~/.keras"
    cache = cache_dir or Path(keras_home, "models", "keras_vit").expanduser()
    return cache / hashlib.sha256(url.encode()).hexdigest()[:16] / name


class _Transfer:
    """A file on its way: the partial file, and the connections that add to it."""

    def __init__(self, url: str, final: Path, sha256: str):
        self.url, self.final, self.sha256 = url, final, sha256
        # Its name holds the size and the version of the whole file (see `_part_for`).
        begun = final.parent.glob(f"{final.name}.*-*.part")
        self.part: Path | None = max(begun, key=os.path.getmtime, default=None)

    @property
    def received(self) -> int:
        return self.part.stat().st_size if self.part and self.part.exists() else 0

    @property
    def _is_versioned(self) -> bool:
        return self.part is not None and self.part.name != f"{self.final.name}.part"

    def run(self) -> Path:
        """The partial file, with all its bytes."""
        for attempt in range(ATTEMPTS):
            before = self.received
            try:
                return self._connect()
            except _Interrupted as interruption:
                if attempt == ATTEMPTS - 1 or self.received <= before:
                    raise self._given_up(interruption) from interruption.__cause__
                log.info("%s: %s; going on from there", self.url, interruption)
            time.sleep(PAUSE)
        raise AssertionError  # the last attempt returns or raises

    def _connect(self) -> Path:
        """Asks for what is missing and writes it down, or raises `_Interrupted`."""
        start = self.received if self._is_versioned else 0
        if self.part and self.part.name.startswith(f"{self.final.name}.{start}-"):
            return self.part  # killed between its last byte and its final name
        try:
            response = self._open(start)
        except HTTPError as error:
            if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE or not self.part:
                raise _answer(self.url, error) from error
            self._drop()  # the file is a shorter one now
            return self._connect()
        with response:
            total, part = self._part_for(response)
            if response.status != http.client.PARTIAL_CONTENT:
                start = 0
            elif part != self.part or _starts_at(response) != start:
                self._drop()  # the file is another one now
                return self._connect()
            if self.part != part:
                self._drop()
            self.part = part
            self._check_room(total, start)
            self._receive(response, part, start, total)
        return part

    def _open(self, start: int) -> Any:
        headers = {"Accept-Encoding": "identity", "User-Agent": "keras_vit"}
        if start:
            headers["Range"] = f"bytes={start}-"
        opener = build_opener(_Redirects)
        try:
            return opener.open(Request(self.url, headers=headers), timeout=network.TIMEOUT)
        except HTTPError:
            raise
        except (OSError, http.client.HTTPException) as error:
            raise _Interrupted(_reason(error)) from error

    def _part_for(self, response: Any) -> tuple[int | None, Path]:
        """The size of the whole file and the name of its partial one.

        A server names a file's version by its ETag or its date. Both and the size are in the name,
        so that a part of one version is never continued with another; without them it has a name
        that is not looked for.
        """
        kind = response.headers.get_content_type()
        coding = response.headers.get("Content-Encoding", "identity")
        if kind == "text/html" or coding != "identity":
            what = "a web page" if kind == "text/html" else f"a {coding} stream"
            raise ConnectionError(
                network.refusal(
                    self.url,
                    f"{what} came in place of the file",
                    "Open the address in a browser: does it ask for a log-in or a consent?",
                )
            )
        length = response.headers.get("Content-Range", "").rpartition("/")[2]
        length = length or response.headers.get("Content-Length", "")
        total = int(length) if length.isdecimal() else None
        if total is None and not response.chunked and not self.sha256:
            raise ConnectionError(
                network.refusal(
                    self.url,
                    "the server does not say how long the file is, so it may come incomplete",
                    "Append its hash to the address: #sha256=...",
                )
            )
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
        if total is None or not tag or tag.startswith("W/"):  # a weak tag is not about bytes
            return total, self.final.with_name(f"{self.final.name}.part")
        version = hashlib.sha256(tag.encode()).hexdigest()[:12]
        return total, self.final.with_name(f"{self.final.name}.{total}-{version}.part")

    def _check_room(self, total: int | None, start: int) -> None:
        free = shutil.disk_usage(self.final.parent).free
        if total is not None and total - start > free:
            raise OSError(
                network.refusal(
                    self.url,
                    f"{total - start} bytes are to come, {self.final.parent} has room for {free}",
                    "Make room, set KERAS_HOME to another folder, or pass cache_dir.",
                )
            )

    def _receive(self, response: Any, part: Path, start: int, total: int | None) -> None:
        from huggingface_hub.utils import tqdm

        bar = tqdm(
            total=total,
            initial=start,
            unit="B",
            unit_scale=True,
            desc=self.final.name[-40:],
            name="keras_vit.download",
            disable=None,  # no bar where nobody watches
        )
        with part.open("ab" if start else "wb") as file, bar:
            while True:
                try:
                    chunk = response.read1(CHUNK)
                except (OSError, http.client.HTTPException) as error:
                    raise _Interrupted(_reason(error)) from error
                if not chunk:
                    break
                start += len(chunk)
                file.write(chunk)
                bar.update(len(chunk))
        if total is not None and start > total:
            self._drop()
            raise _Interrupted(f"{start} bytes came for a file of {total}")
        if total is not None and start < total:
            raise _Interrupted(f"the transfer ended after {start} of {total} bytes")

    def _drop(self) -> None:
        if self.part:
            self.part.unlink(missing_ok=True)
        self.part = None

    def _given_up(self, interruption: "_Interrupted") -> ConnectionError:
        if not self._is_versioned:
            self._drop()  # nobody could go on with it
        kept = f"{self.received} bytes are kept: call again to go on. " if self.received else ""
        return network.unreachable(self.url, interruption, kept)


class _Interrupted(Exception):
    """A connection that could not be made or that broke off."""


class _Redirects(HTTPRedirectHandler):
    """Follows a redirect only where the address itself would have been allowed."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        network.check_address(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@contextlib.contextmanager
def _alone(final: Path) -> Iterator[None]:
    """Keeps out other processes that fetch the same file; the lock dies with its process."""
    from huggingface_hub.utils import WeakFileLock

    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        lock = WeakFileLock(final.with_name(f"{final.name}.lock"))
        with lock:
            yield
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        if error.filename is None:  # a server's 401 or 403
            raise
        raise type(error)(
            f"cache_dir must be a folder that can be written to: set KERAS_HOME to another one or "
            f"pass cache_dir. Received: {final.parent} ({error.strerror})"
        ) from error


def _read_hash(fragment: str) -> str:
    value = fragment.removeprefix("sha256=").lower()
    if fragment and not (fragment.startswith("sha256=") and re.fullmatch("[0-9a-f]{64}", value)):
        raise ValueError(
            "source must end in a file's name, or in #sha256= and 64 hexadecimal digits after it. "
            f"Received: #{fragment}"
        )
    return value


def _is_good(final: Path, sha256: str) -> bool:
    return final.is_file() and (not sha256 or _digest(final) == sha256)


def _check_hash(part: Path, sha256: str, url: str) -> None:
    if sha256 and (found := _digest(part)) != sha256:
        part.unlink()
        raise ValueError(
            network.refusal(
                url,
                f"its sha256 must be {sha256}. Received: sha256={found}; the download was deleted",
                "The file there is another one or was altered: ask whoever gave you the hash.",
            )
        )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _starts_at(response: Any) -> int | None:
    found = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(found[1]) if found else None


def _reason(error: Exception) -> str:
    if isinstance(error, URLError):
        error = error.reason if isinstance(error.reason, Exception) else error
    if isinstance(error, TimeoutError):
        return f"no answer within {network.TIMEOUT:g} seconds"
    return str(error) or type(error).__name__


def _answer(url: str, error: HTTPError) -> OSError:
    """The error for a server that answers, but not with the file."""
    said = f"the server answers {error.code} {error.reason}"
    if error.code in (404, 410):
        remedy = "Check the address, or pass the path of a file."
        return FileNotFoundError(network.refusal(url, said, remedy))
    if error.code in (401, 403):
        remedy = "Fetch it where you are logged in, and pass the path of the file."
        return PermissionError(network.refusal(url, said, remedy))
    return ConnectionError(network.refusal(url, said, "Try again later."))
