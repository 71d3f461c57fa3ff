"""Reading request bodies within bounds of size, time and memory."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request

from keras_vit.serve.errors import RequestError

RETRY = 1
"""Seconds after which a client may try again when too many bodies are in memory."""


class Bodies:
    """Reads bodies.

    Args:
        most: Most bytes of a body.
        total: Most bytes of all bodies that are in memory.
        timeout: Seconds in which a body must arrive.
    """

    def __init__(self, most: int, total: int, timeout: float):
        self.most, self.total, self.timeout = most, max(total, most), timeout
        self._held = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body; its bytes count as held inside the `async with`."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self.most:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        try:
            try:
                async with asyncio.timeout(self.timeout):
                    async for part in request.stream():
                        size += len(part)
                        self._held += len(part)
                        if size > self.most:
                            raise self._too_large()
                        if self._held > self.total:
                            raise RequestError(
                                "RESOURCE_EXHAUSTED",
                                "Too many requests are being read",
                                RETRY,
                                close=True,
                            )
                        parts.append(part)
            except TimeoutError:
                raise RequestError(
                    "REQUEST_TIMEOUT",
                    f"The body did not arrive within {self.timeout:g} s",
                    close=True,
                ) from None
            except ClientDisconnect:
                raise RequestError("CLIENT_CLOSED_REQUEST", "The client left") from None
            yield b"".join(parts)
        finally:
            self._held -= size

    def _too_large(self) -> RequestError:
        return RequestError(
            "PAYLOAD_TOO_LARGE", f"The body must have at most {self.most} bytes", close=True
        )
