"""The page at `/`: drop a picture, see its classes and what the model looked at.

The page is one document that loads nothing. Its explanations need a model that Keras has in memory:
an export has its logits alone.
"""

import asyncio
import base64
import hashlib
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from keras_vit.explain import attention, gradients, report
from keras_vit.explain.panels import SourceImage, open_image
from keras_vit.images import ImageFileError, read_image, read_pixels
from keras_vit.model import ViT
from keras_vit.serve import pictures, predictions, tensors
from keras_vit.serve.bodies import Bodies
from keras_vit.serve.errors import RequestError, invalid
from keras_vit.serve.models import Models, Version

PAGE = Path(__file__).parent / "page"
TOP_K = 5
"""Classes that are listed."""
EXPLAINED = 3
"""Classes that have a Grad-CAM map."""
AT_ONCE = 4
"""Most pictures that are looked at or wait for it."""
WHY_NOT = (
    "Attention and Grad-CAM need the layers of a Keras model. This is an export ({kind}), which "
    "computes classes alone. Serve the run folder or the .keras file it was made from."
)

WHY_REFUSED = "This model has classes here and no maps: {error}"


class Playground:
    """The handlers of the page.

    Args:
        models: The models.
        bodies: Reads what clients send.
        readers: The threads that decode.
    """

    def __init__(self, models: Models, bodies: Bodies, readers: Executor):
        self._models, self._bodies, self._readers = models, bodies, readers
        self._content, self._policy = _page()
        self._busy = 0

    async def page(self, request: Request) -> Response:
        """The page; nothing of the request is in it."""
        headers = {"content-security-policy": self._policy, "referrer-policy": "no-referrer"}
        return Response(self._content, headers=headers, media_type="text/html; charset=utf-8")

    async def models(self, request: Request) -> Response:
        """What there is to choose."""
        described = [
            _described(version)
            for model in self._models
            for _, version in sorted(model.versions.items(), reverse=True)
        ]
        return Response(tensors.dump({"models": described}), media_type="application/json")

    async def look(self, request: Request) -> Response:
        """Classes and maps of the picture that is the body, for `?model=` and `&version=`."""
        number = request.query_params.get("version", "")
        if number and not (number.isdecimal() and len(number) < 19):
            raise invalid("version must be a number")
        if self._busy >= AT_ONCE:
            raise RequestError("RESOURCE_EXHAUSTED", "Others are being explained", 2, close=True)
        self._busy += 1
        try:
            async with self._bodies.read(request) as body:
                name = request.query_params.get("model", "")
                version = self._models.find(name, int(number) if number else None)
                with version.in_use():
                    work = self._look(version, body)
                    found = await predictions.unless_disconnected(request, work)
        finally:
            self._busy -= 1
        request.state.fields = {"model": name, "version": version.number, "images": 1}
        return Response(tensors.dump(found), media_type="application/json")

    async def _look(self, version: Version, body: bytes) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        engine = version.engine
        source, images = await loop.run_in_executor(self._readers, _opened, version, body)
        found: dict[str, Any] = {
            "image": report.encoded_image(source),
            "grid": engine.runtime.config.grid,
            "classes": None,
            "maps": [],
            "why": None,
        }
        if "classify" in engine.signatures:
            default = engine.signatures["serving_default"]
            outputs = await predictions.compute(version, default, images)
            found["classes"] = _best(outputs["probabilities"][0], engine.labels)
        if engine.model is None:
            found["why"] = WHY_NOT.format(kind=engine.runtime.kind)
            return found
        try:
            found["maps"] = await version.batcher.call(
                _maps, engine.model, source.images, found["classes"]
            )
        except ValueError as error:  # a kind of model that explanations refuse
            found["why"] = WHY_REFUSED.format(error=error)
        return found


def _described(version: Version) -> dict[str, Any]:
    engine = version.engine
    config = engine.runtime.config
    height, width, channels = config.input_shape
    return {
        "name": version.model,
        "version": version.number,
        "engine": engine.runtime.where,
        "facts": (
            f"{height} × {width} × {channels} pixels, {config.num_classes} classes, width "
            f"{config.width}, {config.depth} layers of {config.num_heads} heads"
        ),
        "pictures": channels in (1, 3),
        "explains": engine.model is not None,
    }


def _opened(version: Version, body: bytes) -> tuple[SourceImage, np.ndarray]:
    """The picture for the page, and as the engine takes it."""
    runtime = version.engine.runtime
    config = runtime.config
    if config.in_channels not in (1, 3):
        raise invalid(
            f"A picture has 1 or 3 channels, and this model takes {config.in_channels}: send "
            "arrays to :predict"
        )
    try:
        pictures.check_size(body, config)
        source = open_image(read_image("", body), config)
        if runtime.images == "uint8":
            return source, read_pixels("", config, body)[None]
    except ImageFileError as error:
        raise invalid(f"The picture cannot be used: {error.reason}") from error
    except ValueError as error:
        raise invalid(str(error)) from error
    return source, source.images


def _best(scores: np.ndarray, labels: np.ndarray) -> list[dict[str, Any]]:
    best = np.argsort(-scores, kind="stable")[:TOP_K].tolist()
    return [{"class": i, "label": labels[i], "score": float(scores[i])} for i in best]


def _maps(
    model: ViT, images: np.ndarray, classes: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """The maps that the page can lay over the picture, each with a name and what it shows."""
    last = attention.class_token_maps(model, images)[-1, 0].mean(0)
    found = [
        (
            "Attention rollout",
            "Attention through all layers.",
            attention.rollout_map(model, images)[0],
        ),
        ("Attention, last layer", "The mean of the heads of the last layer.", last),
    ]
    if classes is not None:
        explained = classes[:EXPLAINED]
        numbers = [one["class"] for one in explained]
        cams = gradients.grad_cam(model, np.repeat(images, len(numbers), axis=0), numbers)
        for one, cam in zip(explained, cams, strict=True):
            found.append((f"Grad-CAM: {one['label']}", "What speaks for this class.", cam))
    return [
        {"name": name, "about": about, **report.encoded_map(name, values)}
        for name, about, values in found
    ]


def _page() -> tuple[bytes, str]:
    """The page with its style and script, and a policy that lets it run nothing else."""
    style = report.page_style(PAGE)
    script = (PAGE / "script.js").read_text(encoding="utf-8")
    template = (PAGE / "page.html").read_text(encoding="utf-8")
    content = template.replace("{{style}}", style).replace("{{script}}", script)
    policy = (
        "default-src 'none'; img-src data: blob:; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; "
        f"style-src {_hash(style)}; script-src {_hash(script)}"
    )
    return content.encode(), policy


def _hash(text: str) -> str:
    """What a policy names an inline element by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
