"""HTTP connections within bounds: their number, and the time that the head of a request takes."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: 0\r\n\r\n"
)


def bounded(most: int, head_seconds: float) -> type[H11Protocol]:
    """The protocol of uvicorn's connections, within bounds.

    Args:
        most: Most connections. Further ones get 503 and are closed. (uvicorn's own limit would
            refuse the requests of clients that are connected already.)
        head_seconds: Seconds in which the head of a request must arrive. uvicorn bounds only the
            time between two requests, so a client that sends a head byte by byte, or nothing at
            all, would keep its place.
    """

    class Connection(H11Protocol):
        _head: asyncio.TimerHandle | None = None

        def connection_made(self, transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.write(FULL)
                transport.close()
            else:
                self._wait_for_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._stop_waiting()
            elif self._head is None:
                self._wait_for_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _wait_for_head(self) -> None:
            self._head = self.loop.call_later(head_seconds, self._close)

        def _stop_waiting(self) -> None:
            if self._head is not None:
                self._head.cancel()
                self._head = None

        def _close(self) -> None:
            self._head = None
            if not self.transport.is_closing():
                self.transport.close()

    return Connection
