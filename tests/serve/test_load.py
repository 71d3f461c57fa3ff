"""Many clients at once, good ones, slow ones, broken ones: nothing is lost, mixed up or kept.

KERAS_VIT_SERVE_REQUESTS is the number of answers that are checked.
"""

import asyncio
import base64
import contextlib
import io
import json
import os
import subprocess
import sys
import urllib.request

import numpy as np
import pytest
from conformance import tiny_model
from PIL import Image

import keras_vit
from benchmarks.serve import answer, machine_memory
from keras_vit import preprocessing, runtime

pytestmark = [pytest.mark.slow, pytest.mark.backend_free, pytest.mark.timeout(3600)]

REQUESTS = int(os.environ.get("KERAS_VIT_SERVE_REQUESTS", "4000"))
PICTURES = 48
GROWTH = 25.0
"""Megabytes that the server may grow by after its first quarter of requests."""


def picture(seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), "uint8")
    file = io.BytesIO()
    Image.fromarray(pixels).resize((30, 20)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("load") / "tiny.onnx"
    keras_vit.export_onnx(tiny_model(num_classes=5, labels=tuple("abcde")), path)
    return path


@pytest.fixture
def server(path):
    command = [sys.executable, "-m", "keras_vit_cli", "serve", str(path), "--port", "0"]
    options = ["--log-level", "error", "--max-batch", "8", "--read-timeout", "20"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            assert url
            yield url, process
            process.terminate()
            assert process.wait(120) == 0
        finally:
            process.kill()


@pytest.fixture(scope="module")
def cases(path):
    """Files, and the probabilities that each must get; no two are alike."""
    files = [picture(seed) for seed in range(PICTURES)]
    opened = runtime.open(path)
    images = [Image.open(io.BytesIO(file)) for file in files]
    expected = opened.probabilities(preprocessing.preprocess(images, opened.config))
    apart = np.abs(expected[:, None] - expected[None]).max(-1) + np.eye(PICTURES)
    assert apart.min() > 1e-3
    return files, expected


def message(files):
    instances = [{"b64": base64.b64encode(file).decode()} for file in files]
    body = json.dumps({"signature_name": "serve_bytes", "instances": instances}).encode()
    head = "POST /v1/models/tiny:predict HTTP/1.1\r\nHost: a\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Clients:
    """All clients of one storm, and what they have seen."""

    def __init__(self, url, cases, most):
        self.host, port = url.removeprefix("http://").rstrip("/").split(":")
        self.port, self.cases, self.most = int(port), cases, most
        self.answered = self.refused = self.cut = self.asked = 0

    async def storm(self):
        good = [asyncio.ensure_future(self.good(seed)) for seed in range(12)]
        others = [
            asyncio.ensure_future(one)
            for one in (self.slow(), self.bad(), self.bad(), self.cutter(), self.cutter())
        ]
        await asyncio.gather(*good)
        for one in others:
            one.cancel()
        for found in await asyncio.gather(*others, return_exceptions=True):
            if not isinstance(found, asyncio.CancelledError) and isinstance(found, BaseException):
                raise found

    @contextlib.asynccontextmanager
    async def connection(self):
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def ask(self, reader, writer, chosen, pieces=1):
        files, expected = self.cases
        data = message([files[i] for i in chosen])
        size = -(-len(data) // pieces)
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await writer.drain()
            if pieces > 1:
                await asyncio.sleep(0.05)
        status, body = await answer(reader)
        assert status == 200, body
        found = [row["probabilities"] for row in json.loads(body)["predictions"]]
        np.testing.assert_allclose(found, expected[chosen], rtol=0, atol=1e-4)
        self.answered += 1

    async def good(self, seed):
        rng = np.random.default_rng(seed)
        async with self.connection() as (reader, writer):
            while self.asked < self.most:
                self.asked += 1
                await self.ask(reader, writer, rng.integers(0, PICTURES, rng.integers(1, 4)))

    async def slow(self):
        while True:
            async with self.connection() as (reader, writer):
                self.asked += 1
                await self.ask(reader, writer, np.arange(3), pieces=6)

    async def bad(self):
        """A whole picture and a broken one: refused, and nobody else's request is."""
        data = message([self.cases[0][0], self.cases[0][1][:60]])
        async with self.connection() as (reader, writer):
            while True:
                writer.write(data)
                status, body = await answer(reader)
                assert status == 400 and b"image 1: its data is cut off" in body
                self.refused += 1

    async def cutter(self):
        data = message(self.cases[0][:2])
        lengths = [10, len(data) // 2, len(data)]
        while True:
            async with self.connection() as (_, writer):
                writer.write(data[: lengths[self.cut % 3]])
                await writer.drain()
                self.cut += 1
            await asyncio.sleep(0.02)


def test_nothing_is_lost_or_mixed_up_and_memory_is_flat(server, cases):
    url, process = server
    first = Clients(url, cases, REQUESTS // 4)
    asyncio.run(first.storm())
    before = machine_memory(process.pid)
    clients = Clients(url, cases, REQUESTS)
    asyncio.run(clients.storm())
    after = machine_memory(process.pid)
    print(
        f"{clients.answered} answered, {clients.refused} refused, {clients.cut} cut; "
        f"{before:.1f} MB, then {after:.1f} MB"
    )
    # The slow client may be in the middle of its last request.
    assert clients.asked - 1 <= clients.answered <= clients.asked and clients.asked >= REQUESTS
    assert clients.refused > 10 and clients.cut > 10
    assert after - before < GROWTH
    with urllib.request.urlopen(f"{url}metrics", timeout=60) as response:
        text = response.read().decode()
    assert 'keras_vit_queue_images{model="tiny"} 0.0' in text
    assert 'status="500"' not in text
