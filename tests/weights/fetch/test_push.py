"""Pushing with the real Hub client to a local Hub, and reading the same model back."""

import base64
import json

import numpy as np
import pytest
from conformance import images, tiny_model
from loopback import File

import keras_vit

pytestmark = [pytest.mark.backend_free, pytest.mark.usefixtures("quick_downloads")]


class Writable:
    """Adds the routes that create a repository and commit files to the local Hub."""

    def __init__(self, hub):
        self.hub, self.created, self.commits = hub, [], []
        hub.http.RequestHandlerClass.do_POST = lambda handler: self.post(handler)

    def post(self, handler):
        path = handler.path.partition("?")[0]
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        handler.send_response(200)
        answer = json.dumps(self.answer(path, body)).encode()
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(answer)))
        handler.end_headers()
        handler.wfile.write(answer)

    def answer(self, path, body):
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return {"url": f"{self.hub.url}/me/pets", "name": "me/pets", "id": "1"}
        if "/preupload/" in path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            return {"files": files}
        if "/commit/" in path:
            lines = [json.loads(line) for line in body.splitlines()]
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            self.commits.append((lines[0]["value"]["summary"], files))
            url = f"{self.hub.url}/me/pets/commit/1"
            return {"success": True, "commitOid": "1", "commitUrl": url}
        return {"errors": [], "warnings": []}


@pytest.fixture
def writable(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    return Writable(hub)


def test_pushed_model_is_read_back(hub, writable, tmp_path):
    model = tiny_model(labels=["cat", "dog", "emu"], num_classes=3)
    url = keras_vit.push_to_hub(keras_vit.Classifier(model), "me/pets", results={"accuracy": 0.5})
    assert url == f"{hub.url}/me/pets/commit/1" and writable.created[0]["name"] == "pets"
    (message, files), *more = writable.commits
    assert not more and message == "Upload by keras_vit"
    assert set(files) == {"README.md", "config.json", "model.safetensors"}
    card = files["README.md"].decode()
    assert 'from_pretrained("hf://me/pets")' in card and "| accuracy | 50.00% |" in card
    hub.put("me/pets", files)
    again = keras_vit.from_pretrained("hf://me/pets")
    assert again.config.labels == model.config.labels
    samples = images(model.config)
    found, wanted = (m.predict(samples, verbose=0) for m in (again, model))
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    hub.files["/me/pets/resolve/main/README.md"] = File(
        b"mine", headers={"X-Repo-Commit": "c0ffee" + "0" * 34}
    )
    keras_vit.push_to_hub(model, "me/pets", commit_message="again")
    message, files = writable.commits[1]
    assert message == "again" and set(files) == {"config.json", "model.safetensors"}


def test_run_folder_is_pushed_with_its_results(writable, tmp_path):
    tiny_model().save(tmp_path / "model.keras")
    (tmp_path / "results.json").write_text('{"top1": 0.875, "top5": null, "steps": 3}')
    keras_vit.push_to_hub(tmp_path, "me/pets")
    card = writable.commits[0][1]["README.md"].decode()
    assert "| top-1 on the test images | 87.50% |" in card and "top-5" not in card


def test_push_refuses_before_it_connects(tmp_path, monkeypatch):
    model = tiny_model()
    with pytest.raises(ValueError, match="repo must be 'organization/name'"):
        keras_vit.push_to_hub(model, "me/pets@v2")
    with pytest.raises(ValueError, match="format must be one that is a folder, such as"):
        keras_vit.push_to_hub(model, "me/pets", format="google")
    with pytest.raises(FileNotFoundError, match="model must be a model, a run folder"):
        keras_vit.push_to_hub(tmp_path / "none", "me/pets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConnectionError, match="HF_HUB_OFFLINE must be unset"):
        keras_vit.push_to_hub(model, "me/pets")


def test_denied_push_says_how_to_log_in(hub, writable):
    def denied(handler):
        handler.send_response(401)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    hub.http.RequestHandlerClass.do_POST = denied
    with pytest.raises(PermissionError, match="HF_TOKEN"):
        keras_vit.push_to_hub(tiny_model(), "me/pets")
