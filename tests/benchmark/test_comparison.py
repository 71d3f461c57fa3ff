"""A comparison of exports: what is written, timed, left out and found the fastest."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conformance import tiny_model

from keras_vit import benchmark
from keras_vit.benchmark import kinds, timing
from keras_vit.export.onnx import export as onnx_export

pytestmark = pytest.mark.backend_free


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def in_process(monkeypatch):
    """Times files in this process, which is quicker than starting others."""

    def run(command, **options):
        timing.main(Path(command[-1]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(timing.subprocess, "run", run)


def rows(**speeds):
    """Rows of a comparison, by the seconds that one image takes."""
    known = {kind.name.replace(":", "_"): kind for kind in benchmark.KINDS}
    return [
        benchmark.Measured(kind=known[name], times={1: [seconds] * 3}, size=1, memory=1)
        for name, seconds in speeds.items()
    ]


def test_compare_writes_times_and_judges(model, in_process, monkeypatch):
    pytest.importorskip("onnxruntime")
    seen = []

    def worse(given, path, **options):  # loses accuracy that its own verification lets pass
        other = tiny_model(seed=1) if options.get("quantize") else given
        return onnx_export_(other, path, bound=1e3)

    onnx_export_ = onnx_export.export_onnx
    monkeypatch.setattr(onnx_export, "export_onnx", worse)
    found = benchmark.compare(
        model,
        only=["onnx"],
        batch_sizes=(2,),
        seconds=0.02,
        progress=lambda *step: seen.append(step),
    )
    names = ["keras", "onnx:float32", "onnx:dynamic", "onnx:int8"]
    assert [row.kind.name for row in found.rows] == names
    itself, float32, dynamic, int8 = found.rows
    assert "calibrate" in int8.problem and not int8.times
    assert itself.difference is None and 0 < float32.difference < 1e-5
    assert dynamic.difference > 0.01
    assert all(len(row.times[2]) >= 2 * timing.LEAST for row in (itself, float32, dynamic))
    assert itself.size > 1000 and float32.size > 1000
    assert [done for done, _, _ in seen] == list(range(10)) and seen[0][1] == 9
    assert seen[1][2] == "Writing onnx:float32" and seen[3][2] == "Timing keras"
    assert json.loads(json.dumps(found.as_json()))["rows"][1]["kind"] == "onnx:float32"


def test_accuracy_on_labels(model, in_process):
    pytest.importorskip("onnxruntime")
    shape = (8, *model.config.input_shape)
    pixels = np.random.default_rng(0).integers(0, 256, shape, "uint8")
    labels = np.arange(8) % model.config.num_classes
    found = benchmark.compare(
        model, only=["onnx:float32"], batch_sizes=[1], seconds=0.02, accuracy_data=(pixels, labels)
    )
    assert found.images == 8 and [row.points for row in found.rows] == [0, 0]


def test_a_file_that_cannot_be_written_or_run_is_a_row_with_a_problem(
    model, in_process, monkeypatch
):
    pytest.importorskip("onnxruntime")

    def refuses(*args, **options):
        raise ValueError("model must be another. Received: this")

    monkeypatch.setattr(onnx_export, "export_onnx", refuses)
    found = benchmark.compare(model, only=["onnx:float32"], batch_sizes=[1], seconds=0.02)
    assert found.rows[1].problem == "model must be another. Received: this"
    assert found.winner(1).kind.name == "keras"


def test_what_is_not_installed_is_left_out(monkeypatch):
    (kind,) = (kind for kind in benchmark.KINDS if kind.name == "openvino:int8")
    monkeypatch.setattr(kinds.importlib.util, "find_spec", lambda name: name)
    assert kind.left_out(calibration=True) is None
    assert kind.left_out(calibration=False) == "needs typical images to calibrate with"
    monkeypatch.setattr(kinds.importlib.util, "find_spec", lambda name: None)
    assert kind.left_out(True) == "needs openvino: pip install 'keras3-vit[openvino]'"


def test_the_winner_is_the_fastest_that_keeps_its_accuracy():
    found = rows(keras=3.0, onnx_float32=2.0, onnx_int8=1.0)
    for row, points in zip(found, (0.0, 0.0, 1.5), strict=True):
        row.points = points
    names = [
        benchmark.Comparison(found, (1,), "", 200, most).winner(1).kind.name for most in (1.0, 2.0)
    ]
    assert names == ["onnx:float32", "onnx:int8"]
    assert found[2].command() == "--to onnx --quantize int8 --calibration FOLDER"


def test_speed_and_latency():
    row = rows(keras=0.5)[0]
    row.times = {4: [0.5, 0.1, 0.2, 0.2, 0.2]}
    assert row.speed(4) == pytest.approx(20)
    assert row.latency(4, 50) == pytest.approx(200)
    assert row.latency(4, 100) == pytest.approx(500)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"only": ["onxx"]}, "only must hold names of keras, saved_model:float32, .*'onxx'"),
        ({"batch_sizes": []}, "batch_sizes must be positive ints"),
        ({"batch_sizes": [0]}, "batch_sizes must be positive ints"),
        ({"seconds": 0}, "seconds must be a positive number"),
        ({"max_drop": -1}, "max_drop must be a number of at least 0"),
    ],
)
def test_bad_arguments(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        benchmark.compare(model, **arguments)


def test_the_model_must_be_a_vit():
    with pytest.raises(ValueError, match="model must be a ViT. Received: str"):
        benchmark.compare("vit.keras")
