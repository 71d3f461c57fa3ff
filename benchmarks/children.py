"""Benchmarks that measure in child processes: each backend, variant or file has one of its own."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import machine

LIMIT = 3600  # seconds until a child counts as hung


def ask(module: str, job: dict, backend: str, limit: float = LIMIT, **variables: str) -> Any:
    """The answer of `python -m benchmarks.MODULE --child JOB`, started on a backend."""
    child = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--child", json.dumps(job)],
        cwd=machine.ROOT,
        env={**machine.environment(backend), **variables},
        stdout=subprocess.PIPE,
        timeout=limit,
        check=True,
    )
    return json.loads(child.stdout)


@contextlib.contextmanager
def answering() -> Iterator[Callable[[Any], None]]:
    """Yields the function by which a child answers; whatever else is printed goes to stderr."""
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        yield lambda content: json.dump(content, answer)
