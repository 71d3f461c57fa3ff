"""One request for predictions: from the bytes of its body to the bytes of the answer."""

import asyncio
import warnings
from collections.abc import Awaitable
from concurrent.futures import Executor
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request

from keras_vit.preprocessing import check_normalized
from keras_vit.serve import pictures, tensors
from keras_vit.serve.engines import Engine
from keras_vit.serve.errors import RequestError, invalid
from keras_vit.serve.models import Version
from keras_vit.serve.signatures import DEFAULT, Signature, outputs_of

Result = TypeVar("Result")
NOT_FINITE = "images must hold finite numbers. Received: NaN or infinite ones in image "
ADVICE = "Send image files instead, to serve_bytes or classify."


async def predict(version: Version, body: bytes, readers: Executor) -> tuple[bytes, int]:
    """Answers `:predict`.

    Args:
        version: The model.
        body: JSON in row or column form.
        readers: The threads that parse and decode.

    Returns:
        JSON in the form of the request, and the number of images.
    """
    loop = asyncio.get_running_loop()
    signature, images, rows = await loop.run_in_executor(readers, _read, version, body)
    outputs = await compute(version, signature, images)
    return tensors.to_json(outputs, rows), len(images)


async def classify(version: Version, body: bytes, readers: Executor) -> tuple[bytes, int]:
    """Answers `:classify`, whose examples are `{"bytes": {"b64": ...}}`."""
    loop = asyncio.get_running_loop()
    signature, images = await loop.run_in_executor(readers, _read_examples, version, body)
    outputs = await compute(version, signature, images)
    pairs = [
        [[label, score] for label, score in zip(*row, strict=True)]
        for row in zip(outputs["labels"], tensors.as_lists(outputs["scores"]), strict=True)
    ]
    return tensors.dump({"results": pairs}), len(images)


async def compute(
    version: Version, signature: Signature, images: np.ndarray
) -> dict[str, np.ndarray]:
    """The outputs of a signature for images that are checked."""
    if not len(images):
        kinds = {"string": object}
        return {
            name: np.zeros((0, *tensor.shape[1:]), kinds.get(tensor.dtype, tensor.dtype))
            for name, tensor in signature.outputs.items()
        }
    computed = await version.batcher.submit(images, signature.wanted)
    for array in computed.values():
        finite = np.isfinite(array).all(axis=tuple(range(1, array.ndim)))
        if not finite.all():
            raise invalid(NOT_FINITE + _some(np.flatnonzero(~finite)))
    return outputs_of(signature, computed, version.engine.labels)


async def unless_disconnected(request: Request, work: Awaitable[Result]) -> Result:
    """The result of the work, which is canceled if the client leaves.

    Args:
        request: A request whose body was read.
        work: A coroutine.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestError("CLIENT_CLOSED_REQUEST", "The client left")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# -- on the threads that read


def _read(version: Version, body: bytes) -> tuple[Signature, np.ndarray, bool]:
    request = tensors.parse(body)
    signature = _signature(version.engine, request)
    values, rows = tensors.to_tensor(request, signature.input_name, signature.input)
    return signature, _images(version, signature, values), rows


def _read_examples(version: Version, body: bytes) -> tuple[Signature, np.ndarray]:
    request: dict[str, Any] = tensors.parse(body)
    signature = _signature(version.engine, {"signature_name": "classify", **request})
    if signature.name != "classify":
        raise invalid(
            "Expected classification signature method_name to be tensorflow/serving/classify. "
            "Was: tensorflow/serving/predict"
        )
    values = tensors.from_examples(request, signature.input_name, signature.input)
    return signature, _images(version, signature, values)


def _signature(engine: Engine, request: dict[str, Any]) -> Signature:
    name = request.get("signature_name") or DEFAULT
    if name not in engine.signatures:
        raise invalid(f'Serving signature name: "{name}" not found in signature def')
    return engine.signatures[name]


def _images(version: Version, signature: Signature, values: np.ndarray) -> np.ndarray:
    """The images of a request, as the engine takes them."""
    if not values.ndim:
        raise invalid("Batching Run() input tensors must have at least one dimension")
    version.batcher.check_size(len(values))
    name, shape = signature.input_name, signature.input.shape[1:]
    if values.shape[1:] != shape:
        wanted = ", ".join(map(str, ("batch", *shape)))
        received = ", ".join(map(str, values.shape))
        raise invalid(f"{name} must have shape ({wanted}). Received: shape ({received})")
    config = version.engine.runtime.config
    if signature.input.dtype == "string":
        try:
            return version.engine.decode(values.tolist())
        except ValueError as error:
            raise invalid(str(error)) from None
    if signature.input.dtype == "float32":
        finite = np.isfinite(values).all(axis=(1, 2, 3))
        if not finite.all():
            raise invalid(NOT_FINITE + _some(np.flatnonzero(~finite)))
        try:
            check(values, config)
        except ValueError as error:
            raise invalid(str(error)) from None
    return values


def check(images: np.ndarray, config: Any) -> None:
    """Raises if images are not normalized; what only looks odd passes, as in a SavedModel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_normalized(images, config, advice=ADVICE)


def _some(numbers: np.ndarray) -> str:
    return ", ".join(map(str, numbers[: pictures.NAMED]))
