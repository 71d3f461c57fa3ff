"""`python -m benchmarks.serve`: requests a second of `keras-vit serve`, beside its engine alone.

The load generator is ours: asyncio connections that stay open, each sending the next request when
it has the answer. It runs in a process of its own, as the server does. One request is one JPEG of
the model's size, to `classify`. Rounds of the engine alone (images in arrays, batches of 16, no
HTTP) and rounds of each number of clients take turns, so that what disturbs one disturbs all.
"""

import argparse
import asyncio
import base64
import contextlib
import io
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.worker import variant_config

RESULTS = machine.ROOT / "benchmarks" / "results" / "serve.json"
ENGINE_BATCH = 16
KINDS = ("saved_model", "keras", "onnx", "tflite")


def main():
    options = _options()
    if options.child == "engine":
        return _engine(options.path)
    record = {"machine": machine.describe(), "variant": options.variant, "kind": options.kind}
    with tempfile.TemporaryDirectory() as folder:
        path = options.path or export(options.variant, options.kind, pathlib.Path(folder))
        size = variant_config(options.variant).image_size
        record |= measure(path, size, options.clients, options.rounds, options.seconds)
    machine.write(options.json, record)
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table(record))
    console.print(machine.line(record["machine"]), markup=False, highlight=False)


def _options():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__)
    parser.add_argument("--variant", default="vit_s16")
    parser.add_argument("--kind", choices=KINDS, default="saved_model")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10, help="of a round")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--path", help="a file of that variant and kind, not to export one")
    return parser.parse_args()


def export(variant, kind, folder):
    """A model of that size with random weights, as a file of that kind."""
    import keras_vit

    model = getattr(keras_vit, variant)(num_classes=1000)
    if kind == "saved_model":
        keras_vit.export_saved_model(model, folder / "model")
        return folder / "model"
    path = folder / f"model.{kind}"
    if kind == "keras":
        model.save(path)
    elif kind == "onnx":
        keras_vit.export_onnx(model, path)
    else:
        keras_vit.export_tflite(model, path)
    return path


def measure(path, size, clients, rounds, seconds):
    """Rounds of the engine alone and of each number of clients, in turns."""
    body = request_body(size)
    engine, rows = [], {count: [] for count in clients}
    with engine_alone(path) as speed_of_engine, serving(path) as (url, process):
        asyncio.run(load(url, body, 4, 2.0))  # warms up
        for _ in range(rounds):
            engine.append(speed_of_engine(seconds))
            for count in clients:
                rows[count].append(asyncio.run(load(url, body, count, seconds)))
        memory = machine_memory(process.pid)
    best = max(engine)
    return {
        "engine": {"images_per_second": best, "median": statistics.median(engine)},
        "memory_mb": memory,
        "clients": [
            {"clients": count, **summary(found), "of_engine": peak(found) / best}
            for count, found in rows.items()
        ],
    }


def peak(found):
    return max(one["requests_per_second"] for one in found)


def summary(found):
    """The best round's speed and the latencies of all rounds."""
    latencies = np.concatenate([one["latencies"] for one in found])
    return {
        "requests_per_second": peak(found),
        "median": statistics.median(one["requests_per_second"] for one in found),
        "p50_ms": 1e3 * float(np.percentile(latencies, 50)),
        "p99_ms": 1e3 * float(np.percentile(latencies, 99)),
        "requests": len(latencies),
        "errors": sum(one["errors"] for one in found),
    }


def table(record):
    """A line for the engine and one for each number of clients."""
    title = f"keras-vit serve, {record['variant']}, {record['kind']}"
    result = Table(title=title, box=box.SIMPLE, pad_edge=False)
    for i, column in enumerate(("clients", "req/s", "of engine", "p50 ms", "p99 ms", "errors")):
        result.add_column(column, justify="right" if i else "left", no_wrap=True)
    alone = record["engine"]["images_per_second"]
    result.add_row(f"(engine, batch {ENGINE_BATCH})", f"{alone:.2f}", "100%", "", "", "")
    for row in record["clients"]:
        result.add_row(
            str(row["clients"]),
            f"{row['requests_per_second']:.2f}",
            f"{row['of_engine']:.0%}",
            f"{row['p50_ms']:.0f}",
            f"{row['p99_ms']:.0f}",
            str(row["errors"]),
        )
    return result


# -- the server and its engine


class serving:
    """`keras-vit serve` in a process of its own: its URL and the process."""

    def __init__(self, path, *options):
        self._command = [
            *(sys.executable, "-m", "keras_vit_cli", "serve", f"model={path}", "--port", "0"),
            *("--no-playground", "--log-level", "warning", "--timeout", "300", *options),
        ]

    def __enter__(self):
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, text=True, env=machine.environment("tensorflow")
        )
        url = self.process.stdout.readline().strip()
        if not url:
            raise RuntimeError(f"the server ended with {self.process.wait()}")
        return url, self.process

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(120)


@contextlib.contextmanager
def engine_alone(path):
    """A function from seconds to images a second of the engine, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.serve", "--child", "engine", "--path", str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    where = {"cwd": machine.ROOT, "env": machine.environment("tensorflow")}
    with subprocess.Popen(command, **where, **pipes) as process:

        def speed(seconds):
            print(seconds, file=process.stdin, flush=True)
            return float(process.stdout.readline())

        speed(1.0)  # warms up
        yield speed
        process.stdin.close()


def _engine(path):
    """Computes for as many seconds as each line of stdin says, and prints the speed."""
    from keras_vit.serve.engines import open_engine

    engine = open_engine(path, explain=False)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (ENGINE_BATCH, *engine.runtime.config.input_shape), "uint8")
    engine.run(images, "scores")
    for line in sys.stdin:
        done, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < float(line):
            engine.run(images, "scores")
            done += len(images)
        print(done / (time.perf_counter() - begin), flush=True)


def machine_memory(pid):
    """Resident megabytes of a process."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


# -- the load generator


def request_body(size):
    """A request for the classes of one JPEG."""
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), "uint8")
    file = io.BytesIO()
    Image.fromarray(pixels).resize(size[::-1]).save(file, "JPEG", quality=90)
    encoded = base64.b64encode(file.getvalue()).decode()
    return json.dumps({"signature_name": "classify", "instances": [{"b64": encoded}]}).encode()


async def load(url, body, clients, seconds):
    """Keeps so many clients busy for so many seconds."""
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    head = (
        f"POST /v1/models/model:predict HTTP/1.1\r\nHost: {host}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    message = head.encode() + body
    latencies, errors = [], 0
    end = time.perf_counter() + seconds

    async def client():
        nonlocal errors
        reader, writer = await asyncio.open_connection(host, int(port))
        while (begin := time.perf_counter()) < end:
            writer.write(message)
            status, _ = await answer(reader)
            if status == 200:
                latencies.append(time.perf_counter() - begin)
            else:
                errors += 1
        writer.close()

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    took = time.perf_counter() - begin  # until the last answer
    speed = len(latencies) / took
    return {"requests_per_second": speed, "latencies": np.array(latencies), "errors": errors}


async def answer(reader):
    """Reads one answer to its end; returns its status and its body."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
    body = await reader.readexactly(length)
    return int(head.split()[1]), body


if __name__ == "__main__":
    main()
