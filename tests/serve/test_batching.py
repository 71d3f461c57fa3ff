"""The queue: batches, results that go back to their request, bounds, and the end."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from keras_vit.serve import batching
from keras_vit.serve.batching import Batcher, Limits
from keras_vit.serve.errors import RequestError

pytestmark = pytest.mark.backend_free


class Engine:
    """Doubles its images; waits while it is held, and records the sizes of its batches."""

    def __init__(self):
        self.free = threading.Event()
        self.free.set()
        self.entered = threading.Event()
        self.sizes = []

    def __call__(self, images, wanted):
        self.entered.set()
        assert self.free.wait(60)
        self.sizes.append(len(images))
        if (images < 0).any():
            raise ValueError("negative")
        return {wanted: images * 2}


def images(*values):
    return np.float32(values)[:, None]


def run(test, **limits):
    async def main():
        engine = Engine()
        batcher = Batcher(engine, Limits(**{"max_wait": 0, **limits}))
        try:
            return await test(engine, batcher)
        finally:
            engine.free.set()
            await batcher.close()

    return asyncio.run(main())


async def held(engine, batcher):
    """The engine computes one request until it is let go; what follows waits."""
    engine.free.clear()
    first = asyncio.ensure_future(batcher.submit(images(0), "scores"))
    while not engine.entered.is_set():
        await asyncio.sleep(0)
    return first


def test_requests_share_batches_and_get_their_own_rows():
    async def test(engine, batcher):
        first = await held(engine, batcher)
        sizes = [1, 3, 2, 4, 1, 5]
        starts = np.cumsum([1, *sizes])
        asked = [
            asyncio.ensure_future(batcher.submit(images(*range(start, start + size)), "scores"))
            for start, size in zip(starts, sizes, strict=False)
        ]
        other = asyncio.ensure_future(batcher.submit(images(7), "features"))
        await asyncio.sleep(0)
        assert batcher.waiting == sum(sizes) + 1
        engine.free.set()
        found = await asyncio.gather(first, *asked)
        for start, size, outputs in zip(starts, sizes, found[1:], strict=False):
            assert outputs["scores"].ravel().tolist() == [2 * n for n in range(start, start + size)]
        assert (await other)["features"].tolist() == [[14]]
        assert engine.sizes == [1, 6, 5, 5, 1]  # 1 + 3 + 2, 4 + 1, 5, and what wants something else
        assert batcher.waiting == 0

    run(test, max_batch=6)


def test_bad_request_fails_alone():
    async def test(engine, batcher):
        first = await held(engine, batcher)
        work = [batcher.submit(images(n), "scores") for n in (1, -1, 2)]
        asked = [asyncio.ensure_future(one) for one in work]
        await asyncio.sleep(0)
        engine.free.set()
        good, bad, last = await asyncio.gather(*asked, return_exceptions=True)
        assert (good["scores"].item(), last["scores"].item()) == (2, 4)
        assert isinstance(bad, ValueError)
        await first
        assert engine.sizes == [1, 3, 1, 1, 1]

    run(test)


def test_full_queue_refuses_and_says_when_to_come_back():
    async def test(engine, batcher):
        first = await held(engine, batcher)
        asked = [asyncio.ensure_future(batcher.submit(images(1, 2), "s")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="queue .* is full") as caught:
            await batcher.submit(images(1), "s")
        assert (caught.value.status, caught.value.retry_after) == (429, 1)
        asked[0].cancel()  # its client left: there is room again
        await asyncio.gather(asked[0], return_exceptions=True)
        assert batcher.waiting == 2
        third = asyncio.ensure_future(batcher.submit(images(5), "s"))
        engine.free.set()
        assert (await third)["s"].item() == 10
        await asyncio.gather(first, asked[1])
        with pytest.raises(RequestError, match="Task size 5 is larger than maximum input batch"):
            await batcher.submit(images(*range(5)), "s")

    run(test, max_batch=4, max_queue=4)


def test_time_to_come_back_follows_the_engine(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(batching, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def slow(seconds):
        def compute(images, wanted):
            clock[0] += seconds * len(images)
            return {wanted: images}

        return compute

    async def main():
        batcher = Batcher(slow(3.0), Limits(max_wait=0))
        assert batcher.retry_after() == 1  # nothing is known
        await batcher.submit(images(1, 2), "scores")
        batcher.waiting = 5
        assert batcher.retry_after() == 15  # as long as the first batch took an image
        batcher.waiting, batcher._run = 0, slow(8.0)
        await batcher.submit(images(1), "scores")
        batcher.waiting = 5
        assert batcher.retry_after() == 20  # a fifth of the way from 3 to 8 seconds
        batcher.waiting = 0
        await batcher.close()

    asyncio.run(main())


def test_request_that_waits_too_long_gets_504():
    async def test(engine, batcher):
        engine.free.clear()
        with pytest.raises(RequestError, match="No result within 0.02 s") as caught:
            await batcher.submit(images(1), "s")
        assert caught.value.status == 504 and batcher.waiting == 0

    run(test, timeout=0.02)


def test_close_finishes_what_waits():
    async def test(engine, batcher):
        first = await held(engine, batcher)
        asked = [asyncio.ensure_future(batcher.submit(images(n), "s")) for n in range(3)]
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(batcher.close())
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="unloaded"):
            await batcher.submit(images(9), "s")
        engine.free.set()
        await closing
        assert [(await one)["s"].item() for one in asked] == [0, 2, 4]
        await first

    run(test)


def test_idle_engine_waits_for_others():
    """With a long `max_wait`, a full batch ends the wait, and a lone request waits for it."""

    async def test(engine, batcher):
        asked = [asyncio.ensure_future(batcher.submit(images(n), "s")) for n in range(4)]
        await asyncio.gather(*asked)
        assert engine.sizes == [4]

    run(test, max_batch=4, max_wait=3600)


@pytest.mark.parametrize(
    "limits",
    [{"max_batch": 0}, {"max_queue": 3, "max_batch": 4}, {"max_wait": -1}, {"timeout": 0}],
)
def test_limits_are_checked(limits):
    with pytest.raises(ValueError, match=f"{next(iter(limits))} must be"):
        Limits(**limits)
