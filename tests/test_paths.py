"""Checks of paths: what a writer takes, and that no URL becomes a folder."""

import os
from pathlib import Path

import pytest
from conformance import tiny_model

import keras_vit
from keras_vit import bulk, explain, paths, runtime
from keras_vit.weights.fetch import fetch_weights

pytestmark = pytest.mark.backend_free
URLS = ("gs://bucket/x", Path("s3://bucket/x"), "file:///x", "C2+x://a", "gs:\\\\bucket")


@pytest.mark.parametrize("url", URLS)
def test_url_is_no_output(url):
    with pytest.raises(ValueError, match="out must be a path on this machine.*Received: out="):
        paths.as_output("out", url)


def test_path_is_an_output(tmp_path):
    for path in (tmp_path, "C:/x", "C:\\x", "a:b", "a/b://c", "./gs:/x", "1.5: a/b"):
        assert paths.as_output("out", path) == Path(path)
    with pytest.raises(ValueError, match="out must be a path: a str"):
        paths.as_output("out", 3)


def test_no_writer_takes_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny_model()
    for name, write in (
        ("path", lambda: keras_vit.export_saved_model(model, "gs://bucket/flowers")),
        ("path", lambda: keras_vit.export_onnx(model, "gs://bucket/x.onnx")),
        ("path", lambda: keras_vit.export_tflite(model, Path("gs://bucket/x.tflite"))),
        ("path", lambda: keras_vit.export_openvino(model, "gs://bucket/x.xml")),
        ("path", lambda: keras_vit.save_pretrained(model, "gs://bucket/x", format="timm")),
        ("path", lambda: explain.write_report(model, "cat.jpg", "gs://bucket/x.html")),
        ("out", lambda: bulk.embed(runtime.KerasRuntime(model), ["cat.jpg"], "gs://bucket/x.npy")),
        ("workdir", lambda: keras_vit.train.train("digits", "gs://bucket/run")),
        ("folder", lambda: keras_vit.train.Checkpoint("gs://bucket/run")),
        ("path", lambda: keras_vit.train.preview("digits", "gs://bucket/x.png")),
        ("cache_dir", lambda: fetch_weights("hf://a/b", cache_dir="gs://bucket/x")),
    ):
        with pytest.raises(ValueError, match=f"{name} must be a path on this machine"):
            write()
    assert os.listdir(tmp_path) == []
