"""Many images into a file: `embed`, and `predict --out`."""

import json

import numpy as np
import pytest
from conformance import tiny_model
from PIL import Image

from keras_vit.bulk import RayWorkers, parts
from keras_vit_cli import image_files

pytestmark = pytest.mark.backend_free


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model, four images and one that cannot be read; the current folder."""
    tiny_model(labels=("cat", "dog", "élan")).save(tmp_path / "model.keras")
    (tmp_path / "photos").mkdir()
    rng = np.random.default_rng(0)
    for i in range(4):
        pixels = rng.integers(0, 256, (5, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((40, 30)).save(tmp_path / "photos" / f"{i}.png")
    (tmp_path / "photos" / "2.png").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_embed_writes_features_and_reports_errors(call, folder, terminal, monkeypatch):
    # As Windows writes it: a mark first, and \r\n.
    (folder / "list.txt").write_bytes("\ufeffphotos/3.png\r\n\r\nphotos/0.png".encode())
    code, out, err = call("embed", ".", "photos", "--files-from", "list.txt", "--out", "a.npy")
    assert (code, out) == (1, "a.npy\n")
    assert err.splitlines()[0] == "keras-vit: error: photos/2.png: the file is empty"
    assert err.splitlines()[1].startswith("6 images, 1 with an error; ")
    assert err.splitlines()[1].endswith(" images a second.")
    array = np.load("a.npy")
    lines = [json.loads(line) for line in open("a.npy.jsonl")]
    names = [f"photos/{i}.png" for i in (0, 1, 2, 3, 3, 0)]
    assert [line["image"] for line in lines] == names and "error" in lines[2]
    assert np.isnan(array[2]).all() and not np.isnan(np.delete(array, 2, axis=0)).any()
    np.testing.assert_allclose(array[[0, 3]], array[[5, 4]], atol=1e-5)
    assert np.abs(array[0] - array[3]).max() > 1e-3
    code, _, err = call("embed", ".", "photos", "--out", "a.npy")
    assert code == 1 and "--out must not exist, or --overwrite be given" in err


def test_names_of_a_list_end_at_line_feeds_alone(tmp_path):
    names = ["a\u2028b.png", "c\x0bd.png", " e.png "]
    (tmp_path / "list.txt").write_bytes("\n".join(names).encode())
    assert image_files.named(["first.png"], tmp_path / "list.txt") == ["first.png", *names]


def test_ray_options_describe_the_workers():
    assert image_files.ray_workers(None, None, None) is None
    assert image_files.ray_workers(2, None, None) == RayWorkers(2, num_cpus=1, num_gpus=0)
    assert image_files.ray_workers(2, 3, 0.5) == RayWorkers(2, num_cpus=3, num_gpus=0.5)


def test_predict_out_resumes_and_says_so(call, folder, monkeypatch):
    monkeypatch.setattr(parts, "MOST_ROWS", 2)
    command = ("predict", "model.keras", "photos", "--out", "a.jsonl", "--batch-size", "2")
    with monkeypatch.context() as patch:
        patch.setattr(parts.Parts, "finish", lambda self: 1 / 0)
        assert call(*command)[0] == 1 and not (folder / "a.jsonl").exists()
    for part in sorted((folder / "a.jsonl.parts").glob("0*"))[1:]:
        part.unlink()
    code, out, err = call(*command)
    assert (code, out) == (1, "a.jsonl\n") and "4 images, 1 with an error" in err
    assert "Resumes after " in err and " of 4 images." in err
    lines = [json.loads(line) for line in open("a.jsonl")]
    assert [line["image"] for line in lines] == [f"photos/{i}.png" for i in range(4)]
    printed = call("predict", ".", "photos", "--json")[1].splitlines()
    found = {json.loads(line)["image"]: line for line in printed}
    assert all(set(json.loads(found[line["image"]])) == set(line) for line in lines)


def test_speed_is_in_the_bar(call, folder, terminal):
    console = terminal("err", 100)
    with console.capture() as capture:
        call("embed", ".", "photos", "--out", "a.parquet", "--batch-size", "1")
    assert "Embedding" in capture.get() and "images/s" in capture.get()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["predict", ".", "photos", "--out", "a.npy"], 1, "--out must end in .jsonl or .parquet"),
        (["embed", ".", "photos", "--out", "a.jsonl"], 1, "--out must end in .parquet or .npy"),
        (["predict", ".", "photos", "--ray", "2"], 1, "--out must be given for --ray"),
        (["predict", ".", "photos", "--json", "--out", "a.jsonl"], 1, "be left out for --json"),
        (["predict", ".", "photos", "--ray-cpus", "2"], 1, "--ray-cpus must come with --ray"),
        (["embed", ".", "photos", "--out", "a.npy", "--ray-gpus", "0"], 1, "--ray-gpus must come"),
        (["predict", ".", "photos", "--out", "gs://a/b.jsonl"], 1, "--out must be a path on this"),
        (["embed", ".", "photos", "--out", "s3://a/b.npy"], 1, "--out must be a path on this"),
        (["predict", "."], 2, "images must be named, or --files-from be given"),
        (["embed", ".", "photos"], 2, "Missing option '--out'"),
    ],
)
def test_wrong_options_are_refused(call, folder, arguments, code, text):
    found, _, err = call(*arguments)
    assert found == code and text in " ".join(err.replace("│", " ").split())
