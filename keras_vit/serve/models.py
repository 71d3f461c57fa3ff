"""The models of a server, and their versions: loading, finding, replacing and unloading them."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_vit.serve.batching import Batcher, Limits
from keras_vit.serve.engines import Engine, open_engine
from keras_vit.serve.errors import RequestError, invalid
from keras_vit.serve.metrics import Metrics
from keras_vit.serve.version_folders import Stamp, find_versions, number_of, stamp_of

NAME = re.compile(r"[\w.-]+")

log = logging.getLogger("keras_vit.serve")


class Version:
    """One loaded version of a model."""

    def __init__(self, model: str, number: int, engine: Engine, batcher: Batcher):
        self.model, self.number = model, number
        self.engine, self.batcher = engine, batcher
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @contextlib.contextmanager
    def in_use(self):
        """Keeps the version loaded meanwhile."""
        self._users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def close(self) -> None:
        """Waits for the requests that use it, and ends its thread."""
        await self._unused.wait()
        await self.batcher.close()


@dataclasses.dataclass
class Model:
    """A served model: where its versions come from, and those that are loaded."""

    name: str
    path: str | os.PathLike
    versions: dict[int, Version] = dataclasses.field(default_factory=dict)
    failed: dict[int, tuple[Stamp, str]] = dataclasses.field(default_factory=dict)
    """Versions that could not be loaded: their files' stamp, and why."""
    seen: dict[int, Stamp] = dataclasses.field(default_factory=dict)
    """New versions, as they were at the last look."""


class Models:
    """All models of a server.

    Args:
        sources: Paths by name: anything that `keras_vit.runtime.open` opens, or a folder of
            numbered versions.
        engine: The engine, as `open_engine` takes it.
        limits: The bounds of each model's queue.
        keep: Newest versions of each model that are served.
        explain: Whether models are kept in memory for explanations.
        metrics: Where batches are counted.
    """

    def __init__(
        self,
        sources: Mapping[str, str | os.PathLike],
        *,
        engine: str = "auto",
        limits: Limits | None = None,
        keep: int = 1,
        explain: bool = True,
        metrics: Metrics | None = None,
    ):
        for name in sources:
            if not NAME.fullmatch(name):
                raise ValueError(
                    "A model's name must be letters, digits, dots, dashes and underscores: pass "
                    f"NAME=PATH. Received: {name!r}"
                )
        if not sources or not isinstance(keep, int) or keep < 1:
            raise ValueError(
                "There must be at least one model, and one version of each. "
                f"Received: {len(sources)} models, keep={keep!r}"
            )
        self.limits = limits or Limits()
        self.metrics = metrics or Metrics()
        self.ready = False
        self._engine, self._keep, self._explain = engine, keep, explain
        self._models = {name: Model(name, path) for name, path in sources.items()}

    def __iter__(self):
        return iter(self._models.values())

    async def load(self) -> None:
        """Loads every model; raises if one cannot be loaded."""
        for model in self._models.values():
            await self._refresh(model, first=True)
            if not model.versions:
                reasons = [f"version {n}: {why}" for n, (_, why) in sorted(model.failed.items())]
                raise ValueError(
                    f"{model.path} must hold a version that can be loaded. Received: "
                    f"{'; '.join(reasons) or 'only folders without a model'}"
                )
        self.ready = True

    async def watch(self, seconds: float) -> None:
        """Looks for new and removed versions, again and again."""
        while True:
            await asyncio.sleep(seconds)
            for model in self._models.values():
                try:
                    await self._refresh(model)
                except Exception as error:  # the folder cannot be read now; the next look may
                    extra = _of(model, error=_line(error))
                    log.warning("looking for versions failed", extra=extra)

    def drain(self) -> None:
        """Is no longer ready, and computes what waits without waiting for more."""
        self.ready = False
        for model in self._models.values():
            for version in model.versions.values():
                version.batcher.hurry()

    async def close(self) -> None:
        """Finishes what waits, and unloads everything."""
        self.drain()
        for model in self._models.values():
            for version in list(model.versions.values()):
                await version.close()
            model.versions.clear()

    def find(self, name: str, number: int | None = None, label: str | None = None) -> Version:
        """The version that a request names, or the newest."""
        model = self._models.get(name)
        versions = model.versions if model else {}
        if label is not None:
            raise invalid(f"Unrecognized servable version label: {label}")
        if number is None and not versions:
            raise RequestError("NOT_FOUND", f"Servable not found for request: Latest({name})")
        number = max(versions) if number is None else number
        if number not in versions:
            raise RequestError(
                "NOT_FOUND", f"Servable not found for request: Specific({name}, {number})"
            )
        return versions[number]

    def status(self, name: str, number: int | None = None) -> list[dict[str, Any]]:
        """The states of a model's versions, as TensorFlow Serving words them."""
        model = self._models.get(name)
        states: dict[int, dict[str, Any]] = {}
        if model:
            for failed, (_, why) in model.failed.items():
                states[failed] = _state(failed, "END", "UNKNOWN", why)
            for loaded in model.versions:
                states[loaded] = _state(loaded, "AVAILABLE", "OK", "")
        if number is not None:
            if number not in states:
                raise RequestError("NOT_FOUND", f"Could not find version {number} of model {name}")
            return [states[number]]
        if not states:
            raise RequestError("NOT_FOUND", f"Could not find any versions of model {name}")
        return [states[n] for n in sorted(states, reverse=True)]

    # -- versions come and go

    async def _refresh(self, model: Model, first: bool = False) -> None:
        """Loads the newest versions that are complete, then unloads the others."""
        found = await asyncio.to_thread(find_versions, Path(model.path))
        if found is None and not first:  # a model itself, or no version is there any more
            return
        alone = found is None
        found = found or ({number_of(Path(model.path)): model.path} if alone else {})
        for known in (model.failed, model.seen):
            for number in set(known) - set(found):
                del known[number]
        wanted: list[int] = []
        for number in sorted(found, reverse=True):
            if len(wanted) == self._keep:
                break
            if alone:
                await self._open(model, number, found[number])
            elif number not in model.versions:
                await self._load(model, number, Path(found[number]), first)
            if number in model.versions:
                wanted.append(number)
        for number in [n for n in model.versions if wanted and n not in wanted]:
            version = model.versions.pop(number)
            self.metrics.version.labels(model.name, number).set(0)
            await version.close()
            log.info("unloaded", extra=_of(model, version=number))

    async def _load(self, model: Model, number: int, path: Path, first: bool) -> None:
        """Loads a version whose files no longer change, unless these files failed before."""
        stamp = await asyncio.to_thread(stamp_of, path)
        if number in model.failed and model.failed[number][0] == stamp:
            return
        if not first and model.seen.get(number) != stamp:
            model.seen[number] = stamp  # and once more at the next look
            return
        try:
            await self._open(model, number, path)
        except Exception as error:  # whatever a reader raises on a file that is not whole
            # Clients read it in the status; where the model is on the disk is not their business.
            reason = _line(error).replace(os.fspath(model.path), model.name)
            model.failed[number] = stamp, reason
            extra = _of(model, version=number, error=_line(error))
            log.warning("a version cannot be loaded", extra=extra)
        else:
            model.failed.pop(number, None)

    async def _open(self, model: Model, number: int, path: str | os.PathLike) -> None:
        begin = time.monotonic()
        engine = await asyncio.to_thread(open_engine, path, self._engine, explain=self._explain)
        batcher = Batcher(engine.run, self.limits, _observer(self.metrics, model.name))
        model.versions[number] = Version(model.name, number, engine, batcher)
        self.metrics.version.labels(model.name, number).set(1)
        seconds = round(time.monotonic() - begin, 3)
        where = engine.runtime.where
        log.info("loaded", extra=_of(model, version=number, engine=where, seconds=seconds))


def _observer(metrics: Metrics, name: str):
    images, seconds = metrics.batch_images.labels(name), metrics.batch_seconds.labels(name)

    def observe(size: int, took: float) -> None:
        images.observe(size)
        seconds.observe(took)

    return observe


def _state(number: int, state: str, code: str, message: str) -> dict[str, Any]:
    return {
        "version": str(number),
        "state": state,
        "status": {"error_code": code, "error_message": message},
    }


def _of(model: Model, **fields: Any) -> dict[str, Any]:
    return {"fields": {"model": model.name, **fields}}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:1000] or type(error).__name__
