"""Versions of models: which are found, loaded, replaced and unloaded."""

import asyncio
import dataclasses
import os
import types

import numpy as np
import pytest

from keras_vit.serve import models as module
from keras_vit.serve.errors import RequestError
from keras_vit.serve.models import Models
from keras_vit.serve.version_folders import find_versions, number_of, stamp_of

pytestmark = pytest.mark.backend_free


@dataclasses.dataclass
class FakeEngine:
    """Stands for an opened file."""

    content: str
    runtime: object = dataclasses.field(default_factory=lambda: types.SimpleNamespace(where="here"))

    def run(self, images, wanted):
        return {"path": np.array([self.content] * len(images))}


@pytest.fixture(autouse=True)
def engines(monkeypatch):
    """Opens files that contain "good ..."."""

    def open_engine(path, engine, explain):
        content = path.read_text()
        if not content.startswith("good"):
            raise ValueError(f"{path} is\nbroken")
        return FakeEngine(content)

    monkeypatch.setattr(module, "open_engine", open_engine)


def write(folder, number, text="good"):
    place = folder / str(number)
    place.mkdir(parents=True, exist_ok=True)
    (place / "m.onnx").write_text(text)


def run(test, folder, **options):
    async def main():
        models = Models({"m": folder}, **options)
        await models.load()
        try:
            await test(models)
        finally:
            await models.close()

    asyncio.run(main())


async def look(models):
    for model in models:
        await models._refresh(model)


def loaded(models):
    (model,) = models
    return sorted(model.versions)


def test_folders_of_versions(tmp_path):
    assert find_versions(tmp_path) is None and find_versions(tmp_path / "none") is None
    write(tmp_path, 1)
    write(tmp_path, 12)
    (tmp_path / "3").mkdir()  # nothing in it yet
    (tmp_path / ".tmp-4").mkdir()
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "saved_model.pb").touch()
    assert find_versions(tmp_path) == {
        1: tmp_path / "1" / "m.onnx",
        12: tmp_path / "12" / "m.onnx",
        5: tmp_path / "5",
    }
    assert find_versions(tmp_path / "5") is None and number_of(tmp_path / "5") == 5
    assert number_of(tmp_path / "5" / "saved_model.pb") == 1
    for name in ("m.xml", "m.bin"):  # OpenVINO's two files
        (tmp_path / "3" / name).touch()
    assert find_versions(tmp_path)[3] == tmp_path / "3" / "m.xml"
    before = stamp_of(tmp_path / "3" / "m.xml")
    (tmp_path / "3" / "m.bin").write_bytes(b"weights")  # which may be copied last
    assert stamp_of(tmp_path / "3" / "m.xml") != before
    before = stamp_of(tmp_path / "1")
    os.utime(tmp_path / "1" / "m.onnx", (1, 1))
    assert stamp_of(tmp_path / "1") != before


def test_new_version_replaces_the_old_one_after_its_requests(tmp_path):
    write(tmp_path, 1)

    async def test(models):
        old = models.find("m")
        write(tmp_path, 2)
        await look(models)
        assert loaded(models) == [1]  # seen once: it may still be written
        with old.in_use():
            (model,) = models
            looking = asyncio.ensure_future(models._refresh(model))
            while 2 not in model.versions or 1 in model.versions:
                await asyncio.sleep(0)
            assert models.find("m").number == 2 and not looking.done()
            answer = await old.batcher.submit(np.zeros((1, 1)), "scores")  # still runs
            assert answer["path"].tolist() == ["good"]
        await looking
        with pytest.raises(RequestError, match="unloaded"):
            await old.batcher.submit(np.zeros((1, 1)), "scores")
        assert models.status("m") == [
            {
                "version": "2",
                "state": "AVAILABLE",
                "status": {"error_code": "OK", "error_message": ""},
            }
        ]

    run(test, tmp_path)


def test_version_that_is_not_whole_waits_until_it_is(tmp_path, caplog):
    write(tmp_path, 1)

    async def test(models):
        write(tmp_path, 2, "goo")
        for _ in range(3):
            await look(models)
        assert loaded(models) == [1] and models.find("m").number == 1
        newest, oldest = models.status("m")
        assert (newest["state"], oldest["state"]) == ("END", "AVAILABLE")
        assert newest["status"]["error_message"] == "m/2/m.onnx is broken"
        assert [record.message for record in caplog.records].count(
            "a version cannot be loaded"
        ) == 1
        write(tmp_path, 2, "good now")
        for _ in range(2):
            await look(models)
        assert loaded(models) == [2] and len(models.status("m")) == 1

    run(test, tmp_path)


def test_removing_a_version_rolls_back(tmp_path):
    for number in (1, 2, 3):
        write(tmp_path, number)

    async def test(models):
        assert loaded(models) == [2, 3] and models.find("m", 2).number == 2
        for place in ("3/m.onnx", "2/m.onnx"):
            (tmp_path / place).unlink()
        for _ in range(2):
            await look(models)
        assert loaded(models) == [1]
        (tmp_path / "1" / "m.onnx").unlink()
        await look(models)
        assert loaded(models) == [1]  # better than none

    run(test, tmp_path, keep=2)


def test_what_is_not_there_has_serving_s_words(tmp_path):
    write(tmp_path, 1)

    async def test(models):
        for call, message in (
            (lambda: models.find("t"), r"Servable not found for request: Latest\(t\)"),
            (lambda: models.find("m", 2), r"Servable not found for request: Specific\(m, 2\)"),
            (lambda: models.status("t"), "Could not find any versions of model t"),
            (lambda: models.status("m", 2), "Could not find version 2 of model m"),
        ):
            with pytest.raises(RequestError, match=message) as caught:
                call()
            assert caught.value.status == 404
        with pytest.raises(RequestError, match="Unrecognized servable version label: new"):
            models.find("m", label="new")

    run(test, tmp_path)


def test_server_without_a_model_does_not_start(tmp_path):
    write(tmp_path, 1, "bad")
    with pytest.raises(
        ValueError, match="must hold a version that can be loaded.*1: m/1/m.onnx is broken"
    ):
        run(None, tmp_path)
    (tmp_path / "x.onnx").write_text("bad")
    with pytest.raises(ValueError, match="x.onnx is"):
        run(None, tmp_path / "x.onnx")
    with pytest.raises(ValueError, match="NAME=PATH. Received: 'a/b'"):
        Models({"a/b": tmp_path})
    for sources, keep in (({}, 1), ({"m": tmp_path}, 0), ({"m": tmp_path}, 1.5)):
        with pytest.raises(ValueError, match="at least one model, and one version of each"):
            Models(sources, keep=keep)
