"""Runs the application on uvicorn, until a signal ends it."""

import asyncio
import contextlib
import dataclasses
import errno
import logging
import math
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping

from uvicorn import Config
from uvicorn import Server as Uvicorn

from keras_vit.serve.app import App
from keras_vit.serve.batching import Limits
from keras_vit.serve.bodies import Bodies
from keras_vit.serve.connections import bounded
from keras_vit.serve.models import Models

log = logging.getLogger("keras_vit.serve")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How models are served.

    Attributes:
        host: The address that is listened on.
        port: The port; 0 takes a free one.
        engine: "auto", "tensorflow", "onnx" or "keras", for models that Keras runs.
        limits: The bounds of each model's queue.
        max_body: Most bytes of a request.
        max_bodies: Most bytes of all requests that are being read and decoded.
        read_timeout: Seconds in which a request must arrive.
        max_connections: Most connections; further ones get 503.
        keep: Newest versions of a model that are served.
        poll: Seconds between two looks for new versions; 0 means never.
        playground: Whether `/` is a page to try the models on.
    """

    host: str = "127.0.0.1"
    port: int = 8501
    engine: str = "auto"
    limits: Limits = dataclasses.field(default_factory=Limits)
    max_body: int = 32 << 20
    max_bodies: int = 256 << 20
    read_timeout: float = 30.0
    max_connections: int = 512
    keep: int = 1
    poll: float = 2.0
    playground: bool = True

    def __post_init__(self) -> None:
        for name in ("max_body", "max_bodies", "max_connections"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive int. Received: {name}={value!r}")
        if not 0 < self.read_timeout < math.inf or not 0 <= self.poll < math.inf:
            raise ValueError(
                "read_timeout must be greater than 0 and poll at least 0. Received: "
                f"read_timeout={self.read_timeout}, poll={self.poll}"
            )


class Server:
    """A server of models.

    Args:
        models: Paths by the names under which they are served.
        settings: How.
        started: Called with the server once it listens.

    Example:

    >>> keras_vit.serve.Server({"flowers": "runs/flowers"}).run()
    """

    def __init__(
        self,
        models: Mapping[str, str | os.PathLike],
        settings: Settings | None = None,
        started: Callable[["Server"], None] = lambda server: None,
    ):
        self.settings = settings or Settings()
        self._sources, self._started = models, started
        self._uvicorn: _Uvicorn | None = None
        self._socket = _bound(self.settings.host, self.settings.port)
        self.models: Models | None = None
        host, self.port = self._socket.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    def run(self) -> None:
        """Serves until SIGTERM or SIGINT, and then finishes what was accepted."""
        with self._socket:
            asyncio.run(self._run())

    def stop(self) -> None:
        """What a signal does; may be called from any thread."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True

    async def _run(self) -> None:
        settings = self.settings
        models = self.models = Models(
            self._sources,
            engine=settings.engine,
            limits=settings.limits,
            keep=settings.keep,
            explain=settings.playground,
        )
        bodies = Bodies(settings.max_body, settings.max_bodies, settings.read_timeout)
        app = App(models, bodies, playground=settings.playground)
        config = Config(
            app,
            http=bounded(settings.max_connections, settings.read_timeout),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=math.ceil(
                settings.limits.timeout + settings.read_timeout + 1
            ),
        )
        self._uvicorn = _Uvicorn(config, self._listening, models.drain)
        watching = None
        try:
            with self._uvicorn.signals():
                await models.load()
                if self._uvicorn.should_exit:
                    return
                if settings.poll:
                    watching = asyncio.create_task(models.watch(settings.poll))
                await self._uvicorn.serve(sockets=[self._socket])
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            await models.close()
            app.close()
            log.info("stopped", extra={"fields": {"url": self.url}})

    def _listening(self) -> None:
        log.info("listening", extra={"fields": {"url": self.url}})
        self._started(self)


class _Uvicorn(Uvicorn):
    """uvicorn's server, which ends without raising the signal again: its exit code is 0."""

    def __init__(self, config: Config, listening: Callable[[], None], stopping: Callable[[], None]):
        super().__init__(config)
        self._listening, self._stopping = listening, stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # another program took the port while the models were loaded
            host, port = sockets[0].getsockname()[:2] if sockets else ("", 0)
            raise _not_free(host, port, error) from error
        self._listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # `signals` is around all of it, loading included

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Ends the server at SIGTERM and SIGINT, in the main thread."""
        try:
            handlers = {
                number: signal.signal(number, self.handle_exit)
                for number in (signal.SIGTERM, signal.SIGINT)
            }
        except ValueError:  # another thread
            yield
            return
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _bound(host: str, port: int) -> socket.socket:
    """A socket with the address, or an error that names it."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"host and port must be an address of this machine. Received: host={host!r}, "
            f"port={port}: {error}"
        ) from error
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # on Windows, two servers could then share the port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _not_free(host, port, error) from error
    return bound


def _not_free(host: str, port: int, error: OSError) -> OSError:
    reasons = {
        errno.EADDRINUSE: "another program listens on it; pass another --port, or 0 for any",
        errno.EACCES: "only the administrator may; pass a --port from 1024 on",
        errno.EADDRNOTAVAIL: "this machine does not have the address",
    }
    reason = reasons.get(error.errno or 0, error.strerror)
    return OSError(f"port must be free. Received: host={host!r}, port={port}: {reason}")
