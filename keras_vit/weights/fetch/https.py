"""Downloads one file from an https:// URL into the cache: resumed, verified, atomic.

`keras.utils.get_file` writes under the final name. If it is killed, the next call uses the partial
file; a wrong hash leaves the wrong file; and a silent server blocks it forever. This module avoids
all three, with a folder of its own in the same cache.
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
"""Connections per call, if each of them receives more of the file."""
PAUSE = 1.0
"""Seconds between two connections."""
CHUNK = 1 << 20

log = logging.getLogger("keras_vit")


def download(url: str, cache_dir: Path | None = None) -> Path:
    """The file at `url`, from the cache if possible.

    Args:
        url: An https:// URL, or http:// on this machine. It may end in `#sha256=...`, which is
            verified for downloaded and cached files.
        cache_dir: The cache. Defaults to `models/keras_vit` in Keras' own.

    Returns:
        The path of the complete file.
    """
    network.check_address(url)
    url, fragment = urldefrag(url)
    sha256 = _parse_hash(fragment)
    final = cached_path(url, cache_dir)
    if _is_good(final, sha256):
        return final
    if network.offline():
        raise network.not_cached(url, final.parent)
    with _locked(final):
        if not _is_good(final, sha256):  # another process may have just fetched it
            part = _Transfer(url, final, sha256).run()
            _check_hash(part, sha256, url)
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(part, final)
    return final


def cached_path(url: str, cache_dir: Path | None = None) -> Path:
    """The cached file of `url`, in a folder per URL, because many files are named `model.npz`."""
    name = unquote(urlsplit(url).path).rpartition("/")[2]
    name = re.sub(r"[^\w.+=@-]", "_", name)[-120:]
    if not name.strip("."):
        raise ValueError(f"source must end in a file name. Received: source={url!r}")
    keras_home = os.environ.get("KERAS_HOME") or "~/.keras"
    cache = cache_dir or Path(keras_home, "models", "keras_vit").expanduser()
    return cache / hashlib.sha256(url.encode()).hexdigest()[:16] / name


class _Transfer:
    """A download: the partial file, and the connections that append to it."""

    def __init__(self, url: str, final: Path, sha256: str):
        self.url, self.final, self.sha256 = url, final, sha256
        # Its name holds the size and the version of the complete file (see `_part_for`).
        begun = final.parent.glob(f"{final.name}.*-*.part")
        self.part: Path | None = max(begun, key=os.path.getmtime, default=None)

    @property
    def received(self) -> int:
        return self.part.stat().st_size if self.part and self.part.exists() else 0

    @property
    def _is_versioned(self) -> bool:
        return self.part is not None and self.part.name != f"{self.final.name}.part"

    def run(self) -> Path:
        """Completes the partial file."""
        for attempt in range(ATTEMPTS):
            before = self.received
            try:
                return self._connect()
            except _Interrupted as interruption:
                if attempt == ATTEMPTS - 1 or self.received <= before:
                    raise self._gave_up(interruption) from interruption.__cause__
                log.info("%s: %s; resuming", self.url, interruption)
            time.sleep(PAUSE)
        raise AssertionError  # the last attempt returns or raises

    def _connect(self) -> Path:
        """Requests the missing bytes and appends them, or raises `_Interrupted`."""
        start = self.received if self._is_versioned else 0
        if self.part and self.part.name.startswith(f"{self.final.name}.{start}-"):
            return self.part  # killed before the rename
        try:
            response = self._open(start)
        except HTTPError as error:
            if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE or not self.part:
                raise _http_error(self.url, error) from error
            self._drop()  # the file has become shorter
            return self._connect()
        with response:
            total, part = self._part_for(response)
            if response.status != http.client.PARTIAL_CONTENT:
                start = 0
            elif part != self.part or _starts_at(response) != start:
                self._drop()  # the file has changed
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
        """The size of the complete file, and the name of the partial one.

        The name holds the size and a hash of the version (ETag or date), so that two versions are
        never joined. Without them, the partial file has a name that no later call looks for.
        """
        kind = response.headers.get_content_type()
        coding = response.headers.get("Content-Encoding", "identity")
        if kind == "text/html" or coding != "identity":
            what = "a web page" if kind == "text/html" else f"a {coding} stream"
            raise ConnectionError(
                network.cannot_fetch(
                    self.url,
                    f"{what} was sent instead of the file",
                    "Open the URL in a browser: it may require a login or a consent.",
                )
            )
        length = response.headers.get("Content-Range", "").rpartition("/")[2]
        length = length or response.headers.get("Content-Length", "")
        total = int(length) if length.isdecimal() else None
        if total is None and not response.chunked and not self.sha256:
            raise ConnectionError(
                network.cannot_fetch(
                    self.url,
                    "the server does not state the file's length, so it may be incomplete",
                    "Append its hash to the URL: #sha256=...",
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
                network.cannot_fetch(
                    self.url,
                    f"it needs {total - start} bytes, {self.final.parent} has {free} free",
                    "Free space, set KERAS_HOME to another folder, or pass cache_dir.",
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
            disable=None,  # no bar without a terminal
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
            raise _Interrupted(f"received {start} bytes of a file of {total}")
        if total is not None and start < total:
            raise _Interrupted(f"the transfer ended after {start} of {total} bytes")

    def _drop(self) -> None:
        if self.part:
            self.part.unlink(missing_ok=True)
        self.part = None

    def _gave_up(self, interruption: "_Interrupted") -> ConnectionError:
        if not self._is_versioned:
            self._drop()  # no later call can resume it
        kept = f"{self.received} bytes are kept: call again to resume. " if self.received else ""
        return network.unreachable(self.url, interruption, kept)


class _Interrupted(Exception):
    """A connection that failed or ended early."""


class _Redirects(HTTPRedirectHandler):
    """Follows a redirect only to an allowed URL."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        network.check_address(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@contextlib.contextmanager
def _locked(final: Path) -> Iterator[None]:
    """Excludes other processes that fetch the same file. The lock ends with its process."""
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
            "cache_dir must be a writable folder. Set KERAS_HOME to another one or pass cache_dir. "
            f"Received: {final.parent} ({error.strerror})"
        ) from error


def _parse_hash(fragment: str) -> str:
    value = fragment.removeprefix("sha256=").lower()
    if fragment and not (fragment.startswith("sha256=") and re.fullmatch("[0-9a-f]{64}", value)):
        raise ValueError(
            "source must end in a file name, or in #sha256= and 64 hexadecimal digits. "
            f"Received: #{fragment}"
        )
    return value


def _is_good(final: Path, sha256: str) -> bool:
    return final.is_file() and (not sha256 or _digest(final) == sha256)


def _check_hash(part: Path, sha256: str, url: str) -> None:
    if sha256 and (found := _digest(part)) != sha256:
        part.unlink()
        raise ValueError(
            network.cannot_fetch(
                url,
                f"its sha256 must be {sha256}. Received: sha256={found}; the download was deleted",
                "The file was replaced or modified: ask whoever gave you the hash.",
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


def _http_error(url: str, error: HTTPError) -> OSError:
    """The error for an HTTP status."""
    why = f"the server answered {error.code} {error.reason}"
    if error.code in (404, 410):
        remedy = "Check the URL, or pass the path of a file."
        return FileNotFoundError(network.cannot_fetch(url, why, remedy))
    if error.code in (401, 403):
        remedy = "Download it with a login, and pass the path of the file."
        return PermissionError(network.cannot_fetch(url, why, remedy))
    return ConnectionError(network.cannot_fetch(url, why, "Try again later."))
