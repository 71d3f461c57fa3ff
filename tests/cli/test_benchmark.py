"""`keras-vit benchmark`: its table, its rows in a pipe, its verdict."""

import json

import pytest
from conformance import tiny_model

from keras_vit import benchmark

pytestmark = pytest.mark.backend_free


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A model in the current folder; what `compare` would find of it."""
    by_name = {kind.name: kind for kind in benchmark.KINDS}
    rows = [
        benchmark.Measured(
            kind=by_name[name], times={1: [ms / 1000] * 9}, size=2_000_000, memory=30_000_000
        )
        for name, ms in (("keras", 30), ("openvino:bfloat16", 4))
    ]
    rows[1].difference = 0.0041
    rows.append(benchmark.Measured(kind=by_name["onnx:int8"], problem="needs typical\nimages"))
    given = {}

    def compare(model, progress, **arguments):
        given.update(arguments)
        progress(0, 1, "Writing keras")
        return benchmark.Comparison(rows, (1,), "a processor", 0, 1.0)

    monkeypatch.setattr(benchmark, "compare", compare)
    tiny_model().save(tmp_path / "model.keras")
    monkeypatch.chdir(tmp_path)
    return given


def test_benchmark_in_a_pipe(call, measured):
    code, out, err = call("benchmark", "model.keras", "--only", "onnx", "openvino:bfloat16")
    titles, *rows = (line.split("\t") for line in out.splitlines())
    assert code == 0 and titles[1] == "images/s, 1 at once" and titles[-1] == "difference"
    assert rows[0] == ["keras", "33.33", "30", "30", "2.0", "30", ""]
    assert rows[1] == ["openvino:bfloat16", "250", "4", "4", "2.0", "30", "0.004"]
    assert rows[2] == ["onnx:int8", *[""] * 6]
    assert "onnx:int8: needs typical; images" in err and "a processor" in err
    assert (
        "Fastest for one image: openvino:bfloat16, 7.5 times as fast as the model itself "
        "(accuracy not measured: give --accuracy-data): "
        "keras-vit export model.keras --to openvino --dtype bfloat16"
    ) in err
    assert measured["only"] == ["onnx", "openvino:bfloat16"]
    assert measured["batch_sizes"] == (1, 8, 32)


def test_benchmark_on_a_terminal_and_as_json(call, measured, terminal):
    code, out, _ = call("benchmark", "model.keras", "--json")
    found = json.loads(out)
    assert found["fastest"] == {"1": "openvino:bfloat16"}
    assert found["rows"][1]["p50_ms"] == {"1": pytest.approx(4)}
    assert found["rows"][2] == {"kind": "onnx:int8", "problem": "needs typical\nimages"}
    terminal("out", width=120)
    code, out, _ = call("benchmark", "model.keras", "--batch-size", "1")
    assert code == 0 and "openvino:bfloat16" in out and "onnx:int8" not in out and "\t" not in out


def test_benchmark_refuses(call, measured):
    code, _, err = call("benchmark", "model.keras", "--only", "onxx")
    assert code == 1 and "--only must hold names of keras, " in err and "'onxx'" in err
    code, _, err = call("benchmark", "model.keras", "--max-drop", "2")
    assert code == 1 and "--max-drop must come with --accuracy-data" in err
    code, _, err = call("benchmark", "nothing.keras")
    assert code == 1 and "must be a path that exists" in err
