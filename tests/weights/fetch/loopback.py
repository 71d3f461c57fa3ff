"""A local server for the tests of fetching: plain files, the Hub's routes, and faults."""

import contextlib
import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np

COMMIT = "c0ffee" + "0" * 34
ROOT = Path(__file__).parents[3]
DATA = np.random.default_rng(7).bytes(50_021)
SHA256 = hashlib.sha256(DATA).hexdigest()
REPO = {"config.json": b'{"a": 1}', "preprocessor_config.json": b"{}", "model.safetensors": DATA}


@dataclass
class File:
    """A served file, and its faults."""

    data: bytes
    etag: str | None = '"1"'
    ranges: bool = True
    """Whether Range requests are supported."""
    status: int = 200
    cut: list[int] = field(default_factory=list)
    """How many bytes each of the next answers sends before it is cut off."""
    length: int | None = None
    """A wrong Content-Length; -1 omits it."""
    headers: dict[str, str] = field(default_factory=dict)
    pause: float = 0.0
    """Seconds between two pieces of an answer."""
    piece: int = 1 << 20
    shift: int = 0
    """By how many bytes a Range answer starts too late."""
    silent: bool = False
    """Whether the server accepts the connection and never answers."""


class Server:
    """Serves `files` by path and records the requests."""

    def __init__(self):
        self.files: dict[str, File] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.closing = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                server.answer(self, body=True)

            def do_HEAD(self):
                server.answer(self, body=False)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def answer(self, handler, body: bool) -> None:
        """Answers one request, with the faults."""
        path = unquote(urlsplit(handler.path).path)
        wanted = handler.headers.get("Range")
        self.requests.append((handler.command, handler.path, wanted))
        code = "RepoNotFound" if path.startswith("/api/") else "EntryNotFound"
        file = self.files.get(path, File(b"", status=404, headers={"X-Error-Code": code}))
        if file.silent:
            self.closing.wait(30)
            return
        start = 0
        status = file.status
        if wanted and file.ranges and status == 200:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            status = 206 if start < len(file.data) else 416
            start += file.shift
        data = file.data[start:] if status != 416 else b""
        handler.send_response(status)
        length = len(data) if file.length is None else file.length
        if length >= 0:
            handler.send_header("Content-Length", str(length))
        if status in (206, 416):
            shown = f"{start}-{len(file.data) - 1}" if status == 206 else "*"
            handler.send_header("Content-Range", f"bytes {shown}/{len(file.data)}")
        if file.etag:
            handler.send_header("ETag", file.etag)
        for name, value in file.headers.items():
            handler.send_header(name, value)
        handler.send_header("Connection", "close")
        handler.close_connection = True
        handler.end_headers()
        if not body:
            return
        end = file.cut.pop(0) if file.cut else len(data)
        with contextlib.suppress(ConnectionError):  # the client may be killed
            for at in range(0, end, file.piece):
                handler.wfile.write(data[at : min(at + file.piece, end)])
                handler.wfile.flush()
                time.sleep(file.pause)

    def ranges(self, path: str) -> list[str | None]:
        """The Range of every GET of `path`, or None."""
        return [r for command, p, r in self.requests if command == "GET" and p == path]


class Hub(Server):
    """The Hub's routes that its client uses to fetch a model."""

    def put(self, repo: str, files: dict[str, bytes], revision: str = "main") -> None:
        """Publishes a repository. Weights are on another host, as on the Hub."""
        siblings = []
        for name, data in files.items():
            sha256 = hashlib.sha256(data).hexdigest()
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entry = {"rfilename": name, "size": len(data), "blobId": blob}
            large = not name.endswith(".json")
            if large:
                entry["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 130}
            siblings.append(entry)
            for wanted in (revision, COMMIT):
                path = f"/{repo}/resolve/{wanted}/{name}"
                head = {"X-Repo-Commit": COMMIT}
                if large:
                    place = f"/cdn/{repo}/{name}"
                    self.files.setdefault(place, File(data, etag=f'"{sha256}"'))
                    head |= {
                        "Location": f"http://localhost:{self.port}{place}",
                        "X-Linked-Etag": f'"{sha256}"',
                        "X-Linked-Size": str(len(data)),
                    }
                    self.files[path] = File(b"", status=302, headers=head)
                else:
                    self.files[path] = File(data, etag=f'"{blob}"', headers=head)
        info = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}
        answer = File(json.dumps(info).encode(), headers={"Content-Type": "application/json"})
        for wanted in (revision, COMMIT):
            self.files[f"/api/models/{repo}/revision/{wanted}"] = answer

    def refuse(self, repo: str, status: int, code: str, revision: str = "main") -> None:
        """Makes the Hub answer with an error."""
        self.files[f"/api/models/{repo}/revision/{revision}"] = File(
            b"{}", status=status, headers={"X-Error-Code": code} if code else {}
        )


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    """Runs the server inside the block."""
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.http.shutdown()
        server.http.server_close()
        thread.join()


def left(folder: Path) -> list[str]:
    """The files in a cache, without locks."""
    return sorted(
        p.name
        for p in folder.rglob("*")
        if p.is_file() and p.suffix != ".lock" and p.name[0] != "."
    )


def closed_port() -> int:
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
