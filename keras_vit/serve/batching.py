"""The queue of one model: requests wait, are joined into batches, and get their part back.

All of it runs on the event loop but the engine, which runs on one thread of its own. While a batch
is computed, the next requests gather; so batches grow with the load, and a request that finds the
engine idle waits at most `max_wait` for others.
"""

import asyncio
import collections
import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from keras_vit.serve.errors import RequestError, invalid

Outputs = Mapping[str, np.ndarray]
SMOOTHING = 0.2
"""Weight of the last batch in the mean time of an image."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The bounds of a queue.

    Attributes:
        max_batch: Most images in a batch, and in a request.
        max_wait: Seconds that a request waits for others while the engine is idle.
        max_queue: Most images that wait; further requests are refused.
        timeout: Seconds after which a request that still waits is refused.
    """

    max_batch: int = 32
    max_wait: float = 0.002
    max_queue: int = 512
    timeout: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive int. Received: {name}={value!r}")
        if self.max_queue < self.max_batch:
            raise ValueError(
                "max_queue must be at least max_batch, or a request of that size could never "
                f"wait. Received: max_queue={self.max_queue}, max_batch={self.max_batch}"
            )
        for name, least in (("max_wait", 0), ("timeout", 1e-3)):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise ValueError(f"{name} must be at least {least}. Received: {name}={value!r}")


@dataclasses.dataclass(eq=False)
class _Waiting:
    """A request in the queue."""

    images: np.ndarray
    wanted: str
    future: asyncio.Future
    arrived: float

    @property
    def kind(self) -> tuple[str, np.dtype]:
        """What requests of one batch have in common."""
        return self.wanted, self.images.dtype


class Batcher:
    """The queue of one model, and the thread that runs its engine.

    Args:
        run: The engine: from images `(B, H, W, C)` and what is wanted to arrays of B rows.
        limits: The bounds.
        observe: Called with the size and the seconds of each batch.
    """

    def __init__(
        self,
        run: Callable[[np.ndarray, str], Outputs],
        limits: Limits,
        observe: Callable[[int, float], None] = lambda size, seconds: None,
    ):
        self.limits = limits
        self.waiting = 0
        """Images that wait."""
        self._run, self._observe = run, observe
        self._queue: collections.deque[_Waiting] = collections.deque()
        self._changed = asyncio.Event()
        self._seconds_an_image = 0.0
        self._closing = self._hurrying = False
        self._engine = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._worker = asyncio.create_task(self._work())

    async def submit(self, images: np.ndarray, wanted: str) -> Outputs:
        """Computes the images of one request.

        Args:
            images: `(B, H, W, C)`, checked, as the engine takes them.
            wanted: What the engine shall compute.

        Returns:
            The request's own rows of each array.
        """
        count = len(images)
        self.check_size(count)
        if self._closing:
            raise RequestError("UNAVAILABLE", "The model is being unloaded", 1)
        self.check_room(count)
        item = _Waiting(
            images, wanted, asyncio.get_running_loop().create_future(), time.monotonic()
        )
        self._queue.append(item)
        self.waiting += count
        self._changed.set()
        try:
            return await asyncio.wait_for(item.future, self.limits.timeout)
        except TimeoutError:
            raise RequestError(
                "DEADLINE_EXCEEDED", f"No result within {self.limits.timeout:g} s"
            ) from None
        finally:  # a client that left does not keep its place
            self._discard(item)

    def check_size(self, count: int) -> None:
        """Refuses a request that no batch can hold."""
        if count > self.limits.max_batch:
            raise invalid(
                f"Task size {count} is larger than maximum input batch size {self.limits.max_batch}"
            )

    def check_room(self, count: int = 1) -> None:
        """Refuses a request for which the queue has no room."""
        if self.waiting + count > self.limits.max_queue:
            raise RequestError(
                "RESOURCE_EXHAUSTED",
                "The batch scheduling queue to which this task was submitted is full",
                self.retry_after(),
            )

    def retry_after(self) -> int:
        """Seconds after which the queue of now should be done."""
        return max(1, math.ceil(self.waiting * self._seconds_an_image))

    async def call(self, function: Callable, *arguments):
        """Calls a function on the engine's thread, between two batches."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._engine, function, *arguments)

    def hurry(self) -> None:
        """From now on, no request waits for others."""
        self._hurrying = True
        self._changed.set()

    async def close(self) -> None:
        """Finishes what waits, then ends the thread."""
        self._closing = True
        self.hurry()
        await self._worker
        self._engine.shutdown(wait=False)

    # -- the worker

    async def _work(self) -> None:
        while True:
            while not self._queue:
                if self._closing:
                    return
                self._changed.clear()
                await self._changed.wait()
            await self._gather()
            if batch := self._take():
                await self._compute(batch)

    async def _gather(self) -> None:
        """Waits for more requests, until the oldest has waited long enough."""
        while self._queue and self.waiting < self.limits.max_batch and not self._hurrying:
            rest = self._queue[0].arrived + self.limits.max_wait - time.monotonic()
            if rest <= 0:
                return
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), rest)
            except TimeoutError:
                return

    def _take(self) -> list[_Waiting]:
        """The oldest requests of one kind that fit into a batch, in their order."""
        batch: list[_Waiting] = []
        size = 0
        while self._queue:
            item = self._queue[0]
            full = size + len(item.images) > self.limits.max_batch
            if batch and (full or item.kind != batch[0].kind):
                break
            batch.append(self._queue.popleft())
            self.waiting -= len(item.images)
            size += len(item.images)
        return batch

    async def _compute(self, batch: list[_Waiting]) -> None:
        images = [item.images for item in batch]
        joined = images[0] if len(batch) == 1 else np.concatenate(images)
        begin = time.monotonic()
        try:
            outputs = await self.call(self._run, joined, batch[0].wanted)
            self._check_rows(outputs, len(joined))
        except Exception as error:
            if len(batch) > 1:  # one request must not fail the others
                for item in batch:
                    await self._compute([item])
            elif not batch[0].future.done():
                batch[0].future.set_exception(error)
            return
        seconds = time.monotonic() - begin
        self._observe(len(joined), seconds)
        each = seconds / max(len(joined), 1)
        self._seconds_an_image += (each - self._seconds_an_image) * (
            SMOOTHING if self._seconds_an_image else 1.0
        )
        start = 0
        for item in batch:
            end = start + len(item.images)
            if not item.future.done():  # its client may have left
                item.future.set_result({name: v[start:end] for name, v in outputs.items()})
            start = end

    @staticmethod
    def _check_rows(outputs: Outputs, count: int) -> None:
        for name, array in outputs.items():
            if len(array) != count:
                raise RuntimeError(f"{name} must have a row an image. Received: {len(array)} rows")

    def _discard(self, item: _Waiting) -> None:
        if item in self._queue:
            self._queue.remove(item)
            self.waiting -= len(item.images)
