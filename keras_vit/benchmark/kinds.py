"""The kinds of file that are compared: what writes each, and which packages it needs."""

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence

CALIBRATED = "int8"
KERAS = "keras"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A form of a model that can be run.

    Attributes:
        target: "keras" for the model itself, or what `keras-vit export --to` takes.
        variant: Its dtype or quantization, such as "bfloat16" or "dynamic".
        options: Arguments of the export function.
        file: The name of what is written.
        packages: What must be installed, by import name.
        extra: The extra of the package that installs it.
    """

    target: str
    variant: str
    options: Mapping[str, str]
    file: str
    packages: Sequence[str] = ()
    extra: str = ""

    @property
    def name(self) -> str:
        """As the option `--only` takes it, such as "onnx:dynamic"."""
        return f"{self.target}:{self.variant}" if self.variant else self.target

    @property
    def calibrated(self) -> bool:
        """Whether the export needs typical images."""
        return self.variant == CALIBRATED

    def left_out(self, calibration: bool) -> str | None:
        """Why it cannot be measured here, or None.

        Args:
            calibration: Whether there are typical images.
        """
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if missing:
            return f"needs {', '.join(missing)}: pip install 'keras3-vit[{self.extra}]'"
        if self.calibrated and not calibration:
            return "needs typical images to calibrate with"
        return None


def _kinds():
    yield Kind(KERAS, "", {}, "model.keras")
    needs = {"packages": ("tensorflow",), "extra": "export"}
    for dtype in ("float32", "bfloat16"):
        yield Kind("saved_model", dtype, {"dtype": dtype}, "saved_model", **needs)
    needs = {"packages": ("onnx", "onnxruntime"), "extra": "onnx"}
    yield Kind("onnx", "float32", {}, "model.onnx", **needs)
    for mode in ("dynamic", CALIBRATED):
        yield Kind("onnx", mode, {"quantize": mode}, "model.onnx", **needs)
    needs = {"packages": ("openvino",), "extra": "openvino"}
    for dtype in ("float32", "bfloat16"):
        yield Kind("openvino", dtype, {"dtype": dtype}, "model.xml", **needs)
    yield Kind("openvino", CALIBRATED, {"quantize": CALIBRATED}, "model.xml", **needs)
    needs = {"packages": ("tensorflow", "ai_edge_litert"), "extra": "export"}
    yield Kind("tflite", "float32", {}, "model.tflite", **needs)
    for mode in ("float16", "dynamic", CALIBRATED):
        yield Kind("tflite", mode, {"quantize": mode}, "model.tflite", **needs)


KINDS = tuple(_kinds())


def chosen(only: Sequence[str] | None) -> list[Kind]:
    """The kinds of these names, and always the model itself, which the others are compared with.

    Args:
        only: Targets ("onnx") and names of kinds ("onnx:dynamic"); None means all.
    """
    if only is None:
        return list(KINDS)
    known = {name for kind in KINDS for name in (kind.target, kind.name)}
    if unknown := [name for name in only if name not in known]:
        raise ValueError(
            f"only must hold names of {', '.join(kind.name for kind in KINDS)}, or what stands "
            f"before a colon. Received: {', '.join(map(repr, unknown))}"
        )
    return [kind for kind in KINDS if {kind.target, kind.name} & {*only, KERAS}]
