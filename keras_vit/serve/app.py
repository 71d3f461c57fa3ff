"""The HTTP application: TensorFlow Serving's REST API, health, metrics and the playground."""

import json
import logging
import re
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from keras_vit.serve import metrics, predictions
from keras_vit.serve.bodies import Bodies
from keras_vit.serve.errors import RequestError, invalid
from keras_vit.serve.models import Models
from keras_vit.serve.playground import Playground

MODEL = r"(?i)/v1/models/([^/:]+)(?:/versions/(\d{1,18})|/labels/([^/:]+))?"
CALL = re.compile(MODEL + r":(classify|regress|predict)")
STATUS = re.compile(MODEL + r"(/metadata)?")
SHOWN = 200
"""Most characters of a path in an error or in the log."""
HEADERS = {"x-content-type-options": "nosniff", "cache-control": "no-store"}

log = logging.getLogger("keras_vit.serve")


class App:
    """The application, to be run by an ASGI server.

    Args:
        models: The models, loaded by the caller.
        bodies: Reads what clients send.
        playground: Whether `/` is a page to try the models on.
    """

    def __init__(self, models: Models, bodies: Bodies, *, playground: bool = True):
        self._models, self._bodies = models, bodies
        # One thread: opening an image changes Python's warning filters, which all threads share.
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="reader")
        routes = [
            ("/v1/{rest:path}", ["GET", "POST"], self._rest),
            ("/healthz", ["GET"], self._healthz),
            ("/readyz", ["GET"], self._readyz),
            ("/metrics", ["GET"], self._metrics),
            ("/monitoring/prometheus/metrics", ["GET"], self._metrics),  # as TensorFlow Serving
        ]
        if playground:
            page = Playground(models, bodies, self._readers)
            routes += [
                ("/", ["GET"], page.page),
                ("/playground/models", ["GET"], page.models),
                ("/playground/look", ["POST"], page.look),
            ]
        self._app = Starlette(
            routes=[
                Route(path, self._answering(path, handler), methods=methods)
                for path, methods, handler in routes
            ],
            exception_handlers={404: self._no_such_page, 405: self._no_such_page},
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)

    def close(self) -> None:
        """Ends the threads."""
        self._readers.shutdown(wait=False)

    # -- every request

    def _answering(
        self, route: str, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A handler whose errors are JSON, and which is counted and logged."""
        route = route.partition("{")[0]

        async def answer(request: Request) -> Response:
            begin = time.monotonic()
            fields: dict[str, Any] = {}
            try:
                response = await handler(request)
            except RequestError as error:
                response = _refused(error)
                fields["error"] = _short(str(error))
            except Exception as error:
                log.exception("a request failed")
                response = _refused(RequestError("INTERNAL", type(error).__name__))
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
            seconds = time.monotonic() - begin
            status = str(response.status_code)
            self._models.metrics.requests.labels(route, status).inc()
            self._models.metrics.request_seconds.labels(route).observe(seconds)
            fields |= getattr(request.state, "fields", {})
            log.info(
                "request",
                extra={
                    "fields": {
                        "method": request.method,
                        "path": _short(request.url.path),
                        "status": response.status_code,
                        "seconds": round(seconds, 4),
                        "client": request.client.host if request.client else None,
                        **fields,
                    }
                },
            )
            return response

        return answer

    async def _no_such_page(self, request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        self._models.metrics.requests.labels("other", str(status)).inc()
        text = {404: "Not found", 405: "Method not allowed"}[status]
        return Response(text, status, headers=HEADERS, media_type="text/plain")

    # -- TensorFlow Serving's REST API

    async def _rest(self, request: Request) -> Response:
        path = request.scope["path"]
        if request.method == "POST" and (found := CALL.fullmatch(path)):
            return await self._call(request, *found.groups())
        if request.method in ("GET", "HEAD") and (found := STATUS.fullmatch(path)):
            name, number, label, metadata = found.groups()
            return _json(
                self._metadata(name, _int(number), label)
                if metadata
                else self._status(name, _int(number), label)
            )
        raise invalid(f"Malformed request: {request.method} {_short(path)}")

    async def _call(
        self, request: Request, name: str, number: str | None, label: str | None, method: str
    ) -> Response:
        async with self._bodies.read(request) as body:
            version = self._models.find(name, _int(number), label)
            method = method.lower()
            if method == "regress":
                raise invalid(
                    "Expected regression signature method_name to be tensorflow/serving/regress. "
                    "Was: tensorflow/serving/predict"
                )
            version.batcher.check_room()
            work = predictions.classify if method == "classify" else predictions.predict
            with version.in_use():
                content, images = await predictions.unless_disconnected(
                    request, work(version, body, self._readers)
                )
        request.state.fields = {"model": name, "version": version.number, "images": images}
        return Response(content, media_type="application/json")

    def _status(self, name: str, number: int | None, label: str | None) -> dict[str, Any]:
        if label is not None:
            raise invalid(f"Unrecognized servable version label: {label}")
        return {"model_version_status": self._models.status(name, number)}

    def _metadata(self, name: str, number: int | None, label: str | None) -> dict[str, Any]:
        version = self._models.find(name, number, label)
        signatures = {n: s.describe() for n, s in version.engine.signatures.items()}
        return {
            "model_spec": {"name": name, "signature_name": "", "version": str(version.number)},
            "metadata": {"signature_def": {"signature_def": signatures}},
        }

    # -- for operators

    async def _healthz(self, request: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def _readyz(self, request: Request) -> Response:
        if not self._models.ready:
            raise RequestError("UNAVAILABLE", "The server is starting or stopping", 1)
        return Response("ready\n", media_type="text/plain")

    async def _metrics(self, request: Request) -> Response:
        found = self._models.metrics
        for model in self._models:
            waiting = sum(version.batcher.waiting for version in model.versions.values())
            found.queue_images.labels(model.name).set(waiting)
        return Response(found.text(), headers={"content-type": metrics.CONTENT_TYPE})


def _json(value: Any) -> Response:
    return Response(json.dumps(value, indent=1) + "\n", media_type="application/json")


def _refused(error: RequestError) -> Response:
    response = Response(
        json.dumps({"error": str(error)}), error.status, media_type="application/json"
    )
    if error.retry_after is not None:
        response.headers["retry-after"] = str(error.retry_after)
    if error.close:
        response.headers["connection"] = "close"
    return response


def _int(number: str | None) -> int | None:
    return None if number is None else int(number)


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
