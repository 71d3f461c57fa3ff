"""What the tests in a browser share: npm's packages and a server on this machine.

The browser itself is `chromium_pipe.Chromium`. A page that must come from a server is opened with

    chromium_pipe.Page(chromium, served(folder) + "index.html", 1280, 900, "light", "#ready")

If KERAS_VIT_BROWSER_CACHE names a folder, npm's packages are kept there.
"""

import functools
import http.server
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def npm_install(tmp_path_factory):
    """Installs what a package.json pins; returns the `node_modules` folder."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    cache = os.environ.get("KERAS_VIT_BROWSER_CACHE")
    root = Path(cache) if cache else tmp_path_factory.mktemp("npm")

    def install(package_json: Path) -> Path:
        wanted = package_json.read_bytes()
        folder = root / package_json.parent.name
        made_of = folder / "package.json"
        if not made_of.exists() or made_of.read_bytes() != wanted:
            # Under another name until it is complete, so that an interrupted one is not used.
            beside = folder.with_name(f"{folder.name}.new")
            for old in (folder, beside):
                shutil.rmtree(old, ignore_errors=True)
            beside.mkdir(parents=True)
            (beside / "package.json").write_bytes(wanted)
            command = [npm, "install", "--no-audit", "--no-fund", "--no-package-lock"]
            done = subprocess.run(command, cwd=beside, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stderr[-3000:]
            beside.rename(folder)
        return folder / "node_modules"

    return install


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def served():
    """Serves folders to this machine only: `served(folder)` is the URL of the folder."""
    servers = []

    def serve(folder: Path) -> str:
        handler = functools.partial(_Quiet, directory=str(folder))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()
