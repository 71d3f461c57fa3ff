"""A small client of TensorFlow Serving: images in, classes out, over REST or gRPC.

REST needs the standard library alone. gRPC takes the official stubs (`tensorflow-serving-api`),
which bring TensorFlow with them. Signatures, and what goes in and comes out, have the names that
`export_saved_model` gives them.
"""

import base64
import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
URL = re.compile(
    r"(?P<base>https?://[^/?#]+(?:/[^?#]*)?/v1/models/[^/:?#]+)(?P<which>/[^:?#]*)?|"
    r"(?P<scheme>grpcs?)://(?P<host>[^/?#]+)/(?P<name>[^/:?#]+)(?P<version>/[^:?#]*)?"
)
WHICH = re.compile(r"/(?:versions/(?P<number>\d+)|labels/(?P<label>[^/:]+))")
QUEUE = "batch scheduling queue"  # in what a server says that is there, but has too much to do
UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


def connect(url: str, *, timeout: float = 10.0) -> "RestClient | GrpcClient":
    """A client of one model on a server; nothing is sent yet.

    Args:
        url: http://HOST:8501/v1/models/NAME or grpc://HOST:8500/NAME (https, grpcs: over TLS), and
            where it is to be a certain version, /versions/NUMBER or /labels/LABEL behind it.
        timeout: Seconds to wait for an answer.

    Example:

    >>> client = connect("http://localhost:8501/v1/models/flowers")
    >>> client.predict(["rose.jpg"], signature="classify")["labels"]
    """
    found = URL.fullmatch(url.rstrip("/"))
    which = found and (found["which"] or found["version"])
    if not found or (which and not WHICH.fullmatch(which)):
        raise ValueError(
            "url must be http://HOST:8501/v1/models/NAME or grpc://HOST:8500/NAME, and may end in "
            f"/versions/NUMBER or /labels/LABEL. Received: url={url!r}"
        )
    if not timeout > 0:
        raise ValueError(f"timeout must be greater than 0. Received: timeout={timeout}")
    if found["base"]:
        return RestClient(found[0], timeout)
    return GrpcClient(found["scheme"] == "grpcs", found["host"], found["name"], which, timeout)


def top_classes(outputs: dict[str, np.ndarray], k: int) -> list[list[tuple[str, float]]] | None:
    """The best `k` classes and their scores of each image, or None where the outputs have none.

    They are taken from `labels` and `scores`, else from `probabilities`, by number; a model that
    does not pool has probabilities for each token, and no class of the image.
    """
    if {"labels", "scores"} <= set(outputs):
        return [
            [(str(label), float(score)) for label, score in zip(*row, strict=True)][:k]
            for row in zip(outputs["labels"], outputs["scores"], strict=True)
        ]
    if "probabilities" not in outputs or outputs["probabilities"].ndim != 2:
        return None
    return [
        [(str(i), float(row[i])) for i in np.argsort(-row, kind="stable")[:k]]
        for row in outputs["probabilities"]
    ]


class _Client:
    """What both protocols share: reading images, and one way of asking."""

    def predict(
        self, images: Sequence[Any] | np.ndarray, signature: str = "classify"
    ) -> dict[str, np.ndarray]:
        """Sends images through a signature and returns its outputs by name.

        Args:
            images: Paths of JPEG or PNG files or their bytes, for a signature that takes `bytes`;
                or an array `(B, height, width, channels)`, for one that takes `images`.
            signature: The signature's name.
        """
        if isinstance(images, np.ndarray):
            if images.dtype.kind == "f":  # gRPC takes no other than the signature's
                images = images.astype("float32")
            return self._ask(signature, images)
        if isinstance(images, str | os.PathLike | bytes) or not images:
            raise ValueError("images must be an array, or a list of at least one path or bytes")
        return self._ask(signature, [_encoded(image) for image in images])

    def close(self) -> None:
        """Ends the connection, where one is kept."""

    def _ask(self, signature: str, batch: list[bytes] | np.ndarray) -> dict[str, np.ndarray]:
        raise NotImplementedError


class RestClient(_Client):
    """Asks by HTTP and JSON."""

    def __init__(self, url: str, timeout: float):
        self.url = url
        self.timeout = timeout

    def signatures(self) -> list[str]:
        """The names of the model's signatures."""
        answer = self._send("/metadata")
        try:
            return _public(answer["metadata"]["signature_def"]["signature_def"])
        except (KeyError, TypeError):
            raise OSError(f"{self.url} did not answer with its signatures") from None

    def status(self) -> dict[int, str]:
        """The model's versions and their states, such as AVAILABLE."""
        answer = self._send("")
        try:
            versions = answer["model_version_status"]
            return {int(version["version"]): version["state"] for version in versions}
        except (KeyError, TypeError, ValueError):
            raise OSError(f"{self.url} did not answer with its versions") from None

    def _ask(self, signature: str, batch: list[bytes] | np.ndarray) -> dict[str, np.ndarray]:
        if isinstance(batch, np.ndarray):
            instances = batch.tolist()
        else:
            instances = [{"b64": base64.b64encode(image).decode()} for image in batch]
        body = {"signature_name": signature, "instances": instances}
        rows = self._send(":predict", json.dumps(body).encode()).get("predictions")
        if not isinstance(rows, list) or len(rows) != len(instances):
            raise OSError(f"{self.url} did not answer with one prediction an image")
        if not all(isinstance(row, dict) for row in rows):  # a single output has no name
            return {signature: np.asarray(rows)}
        return {name: np.asarray([row[name] for row in rows]) for name in rows[0]}

    def _send(self, path: str, body: bytes | None = None) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, body, {"Content-Type": "application/json"} if body else {}
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                answer = response.read()
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(self.url, f"HTTP {error.code}", _message(error)) from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise _late(self.url, self.timeout) from None
            raise _silent(self.url, str(error.reason)) from None
        except TimeoutError:
            raise _late(self.url, self.timeout) from None
        except (OSError, http.client.HTTPException) as error:  # it hung up
            raise _silent(self.url, str(error)) from None
        try:
            return dict(json.loads(answer))
        except (ValueError, TypeError):
            raise OSError(f"{self.url} did not answer with a JSON object") from None


class GrpcClient(_Client):
    """Asks by gRPC with TensorFlow Serving's own stubs."""

    def __init__(self, secure: bool, host: str, name: str, which: str | None, timeout: float):
        try:
            import grpc
            from tensorflow_serving import apis  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "grpc:// needs grpcio and tensorflow-serving-api: pip install "
                f"'keras3-vit[serving]'. http:// needs neither. ({error})"
            ) from error
        self.url = f"grpc{'s' * secure}://{host}/{name}{which or ''}"
        self.timeout = timeout
        found = WHICH.fullmatch(which or "")
        self._spec: dict[str, Any] = {"name": name}
        if found and found["number"]:
            self._spec["version"] = {"value": int(found["number"])}
        elif found:
            self._spec["version_label"] = found["label"]
        if secure:
            credentials = grpc.ssl_channel_credentials()
            self._channel = grpc.secure_channel(host, credentials, options=UNLIMITED)
        else:
            self._channel = grpc.insecure_channel(host, options=UNLIMITED)

    def close(self) -> None:
        self._channel.close()

    def signatures(self) -> list[str]:
        """The names of the model's signatures."""
        from tensorflow_serving.apis import get_model_metadata_pb2 as messages
        from tensorflow_serving.apis import prediction_service_pb2_grpc as service

        request = messages.GetModelMetadataRequest(
            model_spec=self._spec, metadata_field=["signature_def"]
        )
        answer = self._call(service.PredictionServiceStub, "GetModelMetadata", request)
        found = messages.SignatureDefMap()
        answer.metadata["signature_def"].Unpack(found)
        return _public(found.signature_def)

    def status(self) -> dict[int, str]:
        """The model's versions and their states, such as AVAILABLE."""
        from tensorflow_serving.apis import get_model_status_pb2 as messages
        from tensorflow_serving.apis import model_service_pb2_grpc as service

        request = messages.GetModelStatusRequest(model_spec=self._spec)
        answer = self._call(service.ModelServiceStub, "GetModelStatus", request)
        state = messages.ModelVersionStatus.State
        return {v.version: state.Name(v.state) for v in answer.model_version_status}

    def _ask(self, signature: str, batch: list[bytes] | np.ndarray) -> dict[str, np.ndarray]:
        import tensorflow as tf
        from tensorflow_serving.apis import predict_pb2
        from tensorflow_serving.apis import prediction_service_pb2_grpc as service

        request = predict_pb2.PredictRequest(model_spec={**self._spec, "signature_name": signature})
        name = "images" if isinstance(batch, np.ndarray) else "bytes"
        request.inputs[name].CopyFrom(tf.make_tensor_proto(batch))
        answer = self._call(service.PredictionServiceStub, "Predict", request)
        outputs = {key: tf.make_ndarray(value) for key, value in answer.outputs.items()}
        return {
            key: np.char.decode(value.astype("S")) if value.dtype == object else value
            for key, value in outputs.items()
        }

    def _call(self, stub: Any, method: str, request: Any) -> Any:
        import grpc

        try:
            return getattr(stub(self._channel), method)(request, timeout=self.timeout)
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise _late(self.url, self.timeout) from None
            if code is grpc.StatusCode.UNAVAILABLE and QUEUE not in details:
                raise _silent(self.url, details) from None
            raise _refusal(self.url, code.name, details) from None


# -- the images, and what went wrong


def _encoded(image: Any) -> bytes:
    """A file's bytes, looked at before they are sent."""
    data = image if isinstance(image, bytes) else Path(image).read_bytes()
    if not data.startswith((JPEG, PNG)):
        shown = f"{len(data)} bytes" if isinstance(image, bytes) else repr(str(image))
        what = "an empty file" if not data else f"a file that begins with {data[:8]!r}"
        raise ValueError(f"images must be JPEG or PNG files. Received: {shown}, {what}")
    return data


def _public(signatures: Any) -> list[str]:
    return sorted(name for name in signatures if not name.startswith("__"))


def _message(error: urllib.error.HTTPError) -> str:
    """What the server says, or the beginning of what another program says in its place."""
    text = error.read(65_536).decode(errors="replace")
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text[:200]


def _late(url: str, timeout: float) -> TimeoutError:
    return TimeoutError(
        f"timeout must be long enough. Received: {timeout:g} s without answer: {url}"
    )


def _silent(url: str, reason: str) -> ConnectionError:
    return ConnectionError(f"url must be of a server that answers. Received: {url}: {reason[:500]}")


def _refusal(url: str, code: str, message: str) -> Exception:
    """4xx and their like are the caller's to mend, the rest are the server's."""
    message = message.partition("\n")[0][:1000]
    if code in ("HTTP 404", "NOT_FOUND"):
        return ValueError(f"url must name a model that is served. Received: {url}: {message}")
    if code in ("HTTP 400", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE"):
        return ValueError(f"The server refused the request: {message} ({code}, {url})")
    if code in ("HTTP 429", "HTTP 503", "UNAVAILABLE", "RESOURCE_EXHAUSTED"):
        return ConnectionError(f"The server is busy: {message} ({code}, {url})")
    return OSError(f"The server failed: {message} ({code}, {url})")
