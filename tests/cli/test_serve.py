"""`keras-vit serve` as a process, and the names of its models."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from keras_vit.serve import engines
from keras_vit_cli import serve

pytestmark = pytest.mark.backend_free


def test_names_of_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/digits", "savedmodels/flowers/12", "3"):
        Path(folder).mkdir(parents=True)
    for file in ("a b.tflite", "runs/digits/model.keras"):
        Path(file).touch()
    given = ["runs/digits", "savedmodels/flowers/12", "a b.tflite", "x.1=runs/digits/model.keras"]
    assert serve._sources(given) == {
        "digits": "runs/digits",
        "flowers": "savedmodels/flowers/12",
        "a_b": "a b.tflite",
        "x.1": "runs/digits/model.keras",
    }
    assert list(serve._sources(["runs/digits/model.keras"])) == ["digits"]
    assert list(serve._sources(["hf://google/vit-base-patch16-224@main"])) == [
        "vit-base-patch16-224"
    ]
    with pytest.raises(ValueError, match="pass NAME=MODEL. Received: 'digits' twice"):
        serve._sources(["runs/digits", "runs/digits/model.keras"])
    with pytest.raises(FileNotFoundError, match="MODEL must be a path that exists"):
        serve._sources(["none.keras"])


def test_serve_says_what_is_wrong(call, tmp_path, monkeypatch):
    code, out, err = call("serve", tmp_path / "none.onnx")
    assert (code, out) == (1, "") and "MODEL must be a path that exists" in err
    code, out, err = call("serve", tmp_path, "--log-level", "loud")
    assert (code, out) == (1, "") and "log-level must be debug" in err
    code, out, err = call("serve", tmp_path, "--engine", "openvino")
    assert (
        (code, out) == (1, "") and "--engine must be one of auto" in err and "keras_vit" not in err
    )
    assert serve.ENGINES == engines.ENGINES
    monkeypatch.setattr(serve, "PACKAGES", ("uvicorn", "no_such_package"))
    code, out, err = call("serve", tmp_path)
    assert code == 1 and "no_such_package must be installed" in err and "[serve]" in err


def test_serve_answers_until_it_is_told_to_stop(model, tmp_path):
    model.save(tmp_path / "tiny.keras")
    command = [sys.executable, "-m", "keras_vit_cli", "serve", str(tmp_path / "tiny.keras")]
    options = ["--port", "0", "--engine", "keras", "--poll", "0"]
    with subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "log").open("w"),
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    ) as process:
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), (tmp_path / "log").read_text()[-2000:]
            with urllib.request.urlopen(f"{url}v1/models/tiny", timeout=60) as response:
                assert json.load(response)["model_version_status"][0]["state"] == "AVAILABLE"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if line[:1] == "{"]
    events = [json.loads(line)["event"] for line in lines]
    assert events == ["loaded", "listening", "request", "stopped"]
