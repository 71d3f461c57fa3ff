"""`keras-vit explain`: the page it writes, and what it refuses."""

import os

import numpy as np
import pytest
from conformance import KINDS, tiny_model
from PIL import Image
from typer.testing import CliRunner

from keras_vit import runtime
from keras_vit_cli import main

pytestmark = pytest.mark.backend_free


def image():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8))


def call(*arguments):
    return CliRunner().invoke(main.app, ["explain", *map(str, arguments)])


def test_explain_writes_a_page(tmp_path, monkeypatch):
    model = tiny_model(labels=("cat", "dog", "emu"))
    monkeypatch.setattr(runtime, "open", lambda path: runtime.KerasRuntime(model, path))
    image().save(tmp_path / "a<b>.png")
    page = tmp_path / "new" / "page.html"
    done = call("tiny", tmp_path / "a<b>.png", "--out", page, "--top-k", 1)
    assert done.exit_code == 0, done.exception
    assert done.stdout.replace("\n", "") == str(page)
    text = page.read_text(encoding="utf-8")
    assert "<title>a&lt;b&gt;.png</title>" in text and text.count('"score"') == 1


def test_explain_refuses_exports_and_files_that_are_not_images(tmp_path, monkeypatch):
    config = KINDS["paper"]
    monkeypatch.setattr(runtime, "open", lambda path: runtime.Runtime(path, config))
    image().save(tmp_path / "a.png")
    done = call("flowers", tmp_path / "a.png", "--out", tmp_path / "page.html")
    assert done.exit_code == 1 and "Received: flowers, an export" in str(done.exception)
    (tmp_path / "b.png").write_text("not an image")
    done = call("no/model", tmp_path / "b.png")
    assert done.exit_code == 1 and "b.png: it is not an image" in str(done.exception)
    assert call("model").exit_code == 2
    assert sorted(os.listdir(tmp_path)) == ["a.png", "b.png"]
