"""Reading request bodies within bounds of size, time and memory."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request

from keras_vit.serve.errors import RequestError

LINGER = 1.0
"""Seconds for which the rest of a refused body is read. A connection that is closed while the
client still sends may lose the answer."""
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
            await self._discard(request.stream())
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        try:
            try:
                stream = request.stream()
                async with asyncio.timeout(self.timeout):
                    async for part in stream:
                        size += len(part)
                        self._held += len(part)
                        if size > self.most:
                            break
                        if self._held > self.total:
                            raise RequestError(
                                "RESOURCE_EXHAUSTED",
                                "Too many requests are being read",
                                RETRY,
                                close=True,
                            )
                        parts.append(part)
                if size > self.most:
                    await self._discard(stream)
                    raise self._too_large()
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

    async def _discard(self, stream: AsyncIterator[bytes]) -> None:
        """Reads on and keeps nothing, within bounds."""
        seen = 0
        with contextlib.suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(min(LINGER, self.timeout)):
                async for part in stream:
                    seen += len(part)
                    if seen > self.most:
                        return

    def _too_large(self) -> RequestError:
        return RequestError(
            "PAYLOAD_TOO_LARGE", f"The body must have at most {self.most} bytes", close=True
        )
