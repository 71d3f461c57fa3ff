"""`keras_vit.bulk`: rows in order, bounded memory, whole files, and kills that lose nothing."""

import json
import os
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
from conformance import run, tiny_model
from PIL import Image
from processes import TESTS

from keras_vit import bulk, preprocessing, runtime
from keras_vit.bulk import formats, parts
from keras_vit.bulk.stream import _in_order
from keras_vit.pillow_warnings import pillow_warnings

pytestmark = pytest.mark.backend_free

COUNT, BAD = 23, (4, 5, 17)
LABELS = ("cat", "dog", "élan")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images, of which some cannot be read."""
    folder = tmp_path_factory.mktemp("bulk")
    rng = np.random.default_rng(0)
    for i in range(COUNT):
        pixels = rng.integers(0, 256, (5, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((40, 30)).save(folder / f"{i:02}.png")
    for i in BAD:
        (folder / f"{i:02}.png").write_bytes(b"no image" if i % 2 else b"")
    return folder


@pytest.fixture(scope="module")
def model():
    return tiny_model(labels=LABELS)


@pytest.fixture(scope="module")
def opened(model):
    return runtime.KerasRuntime(model)


@pytest.fixture(scope="module")
def features(opened, model, folder):
    """The features that the model itself gives, by the image's number."""
    good = [i for i in range(COUNT) if i not in BAD]
    images = [Image.open(folder / f"{i:02}.png") for i in good]
    rows = run(model.features(), preprocessing.preprocess(images, model.config))
    return dict(zip(good, np.asarray(rows), strict=True))


def check_rows(rows, features):
    """Rows by their numbers: features, or None after an error."""
    assert len(rows) == COUNT
    for i, row in enumerate(rows):
        assert (row is None) == (i in BAD)
        if row is not None:
            np.testing.assert_allclose(row, features[i], atol=1e-5)
    assert np.abs(features[0] - features[1]).max() > 1e-3


class Killed(BaseException):
    """What ends a run like a kill would, but in this process."""


def kill_after(done):
    def progress(state):
        if state.done >= done:
            raise Killed

    return progress


# -- the stream


def test_stream_yields_rows_in_order_with_full_batches(opened, folder, features, monkeypatch):
    sizes = []
    compute = opened.features
    monkeypatch.setattr(opened, "features", lambda x: [sizes.append(len(x)), compute(x)][1])
    found = bulk.stream(opened, [folder], wanted="features", batch_size=4, workers=3)
    rows = [row for rows in found for row in rows]
    assert [row.image for row in rows] == [str(folder / f"{i:02}.png") for i in range(COUNT)]
    check_rows([row.values for row in rows], features)
    assert {row.error for row in rows if row.error} == {
        "the file is empty",
        "it is not an image that can be read (JPEG, PNG, WEBP, BMP, GIF, TIFF)",
    }
    assert sizes == [4] * 5  # a failed file takes no place in a batch


def test_stream_decodes_while_the_model_computes(opened, folder, monkeypatch):
    """The model waits until the next batch is decoded, which never comes if one waits for both."""
    decoded = threading.Semaphore(0)
    read = bulk.stream.__globals__["read_pixels"]

    def counted(*args):
        decoded.release()
        return read(*args)

    def features(images):
        assert all(decoded.acquire(timeout=60) for _ in range(len(images) + 1))
        return np.zeros((len(images), 2), "float32")

    monkeypatch.setitem(bulk.stream.__globals__, "read_pixels", counted)
    monkeypatch.setattr(opened, "features", features)
    files = [folder / f"{i:02}.png" for i in (0, 1, 2, 3, 6, 7, 8, 9)]
    found = bulk.stream(opened, files, wanted="features", batch_size=2, workers=1)
    assert [row.error for row in next(found)] == [None, None]
    found.close()


def test_in_order_holds_a_bounded_number_of_items():
    from concurrent.futures import ThreadPoolExecutor

    begun = []
    with ThreadPoolExecutor(2) as pool:
        results = _in_order(pool, lambda i: begun.append(i) or i, range(100), ahead=7)
        taken = [next(results) for _ in range(5)]
        assert taken == [0, 1, 2, 3, 4] and max(begun) < 5 + 7
        assert list(results) == list(range(5, 100))


def test_stream_raises_what_the_model_raises(opened, folder, monkeypatch):
    def broken(images):
        raise RuntimeError("no memory")

    monkeypatch.setattr(opened, "probabilities", broken)
    with pytest.raises(RuntimeError, match="no memory"):
        list(bulk.stream(opened, folder))


@pytest.mark.parametrize(
    ("changes", "wanted", "text"),
    [
        ({"num_classes": 0}, "probabilities", "must have a head"),
        ({"pooling": None}, "features", "must pool its tokens to return one row"),
        ({"in_channels": 4}, "features", "with in_channels=4"),
    ],
)
def test_stream_refuses_a_model_without_such_rows(folder, changes, wanted, text):
    with pytest.raises(ValueError, match=text):
        bulk.stream(tiny_model(**changes), folder, wanted=wanted)


def test_stream_refuses_an_export_without_features(opened, folder, monkeypatch):
    monkeypatch.setattr(opened, "outputs", ("logits",))
    with pytest.raises(ValueError, match="must return features: .* returns logits only"):
        bulk.stream(opened, folder, wanted="features")


def test_pillow_warnings_of_several_threads_restore_the_filters():
    before = list(warnings.filters)
    first, second = threading.Event(), threading.Event()

    def inside():
        with pillow_warnings:
            first.set()
            second.wait(60)

    thread = threading.Thread(target=inside)
    with pillow_warnings:
        thread.start()
        first.wait(60)
    assert warnings.filters != before  # the thread is still inside
    second.set()
    thread.join()
    assert warnings.filters == before


# -- the files


def test_predict_writes_json_lines_and_parquet(opened, folder, tmp_path, model):
    lines = bulk.predict(opened, folder, tmp_path / "a.jsonl", top_k=2, batch_size=5)
    table = bulk.predict(opened, folder, tmp_path / "a.parquet", top_k=2)
    assert (lines.images, lines.failed, lines.resumed) == (COUNT, len(BAD), 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "a.parquet"]
    parquet = formats.import_pyarrow().parquet.read_table(table.path).to_pylist()
    records = [json.loads(line) for line in lines.path.read_text().splitlines()]
    assert [r["image"] for r in parquet] == [r["image"] for r in records]
    for i, (record, row) in enumerate(zip(records, parquet, strict=True)):
        if i in BAD:
            assert record["error"] == row["error"] and row["classes"] is None
            continue
        classes = record["classes"]
        assert row["error"] is None and row["classes"] == [c["class"] for c in classes]
        assert row["labels"] == [c["label"] for c in classes] == [LABELS[k] for k in row["classes"]]
        np.testing.assert_allclose(row["scores"], [c["score"] for c in classes], rtol=1e-5)
        assert len(classes) == 2 and classes[0]["score"] > classes[1]["score"]


def test_embed_writes_features_as_npy_and_parquet(opened, folder, tmp_path, features):
    npy = bulk.embed(opened, folder, tmp_path / "a.npy")
    table = bulk.embed(opened, folder, tmp_path / "a.parquet")
    array = np.load(npy.path)
    assert array.shape == (COUNT, 20) and array.dtype == np.float32
    check_rows([None if np.isnan(row).all() else row for row in array], features)
    rows = formats.import_pyarrow().parquet.read_table(table.path).to_pylist()
    check_rows([row["features"] for row in rows], features)
    names = [json.loads(line) for line in (tmp_path / "a.npy.jsonl").read_text().splitlines()]
    assert [(n["image"], n.get("error")) for n in names] == [(r["image"], r["error"]) for r in rows]


def test_features_of_unreadable_images_alone_are_nan(opened, folder, tmp_path, monkeypatch):
    files = [folder / f"{i:02}.png" for i in (4, 5, 0)]
    monkeypatch.setattr(parts, "MOST_ROWS", 1)
    bulk.embed(opened, files, tmp_path / "a.npy", batch_size=1)
    assert np.isnan(np.load(tmp_path / "a.npy")).all(axis=1).tolist() == [True, True, False]
    bulk.embed(opened, files[:2], tmp_path / "b.npy")
    assert np.load(tmp_path / "b.npy").shape == (2, 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"out": "a.csv"}, "must end in .parquet or .npy"),
        ({"batch_size": 0}, "batch_size must be a positive int"),
        ({"images": []}, "must name at least one image"),
        ({"images": 3}, "images must be paths"),
        ({"model": 3}, "model must be a Runtime"),
        ({"ray": bulk.RayWorkers(2)}, "model must be a path for ray"),
    ],
)
def test_embed_refuses_wrong_arguments(opened, folder, tmp_path, monkeypatch, arguments, text):
    monkeypatch.chdir(tmp_path)
    known = {"model": opened, "images": folder, "out": "a.npy"}
    with pytest.raises(ValueError, match=text):
        bulk.embed(**{**known, **arguments})
    assert not list(tmp_path.iterdir())


# -- kills


@pytest.mark.parametrize("name", ["a.npy", "a.parquet"])
def test_killed_run_resumes_with_every_row_once(opened, folder, tmp_path, monkeypatch, name):
    monkeypatch.setattr(parts, "MOST_ROWS", 6)
    out, whole = tmp_path / name, tmp_path / f"whole-{name}"
    bulk.embed(opened, folder, whole, batch_size=2)
    resumed = []
    for done in (7, 14):
        with pytest.raises(Killed):
            bulk.embed(opened, folder, out, batch_size=2, progress=kill_after(done))
        assert not out.exists()
    summary = bulk.embed(
        opened, folder, out, batch_size=2, progress=lambda state: resumed.append(state.done)
    )
    assert summary.resumed == resumed[0] >= 14 and resumed == sorted(resumed)
    assert (summary.images, summary.failed) == (COUNT, len(BAD))
    if name == "a.npy":
        np.testing.assert_allclose(np.load(out), np.load(whole), atol=1e-5)
        lines = [(tmp_path / f"{p.name}.jsonl").read_text() for p in (out, whole)]
        assert lines[0] == lines[1]
    else:
        read = formats.import_pyarrow().parquet.read_table
        assert read(out)["image"] == read(whole)["image"] and read(out).num_rows == COUNT
    assert not out.with_name(f"{name}.parts").exists()


def test_damaged_part_is_computed_again(opened, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "MOST_ROWS", 4)
    with pytest.raises(Killed):
        bulk.predict(opened, folder, tmp_path / "a.jsonl", batch_size=2, progress=kill_after(14))
    found = sorted((tmp_path / "a.jsonl.parts").glob("0*"))
    found[1].write_text(found[1].read_text().splitlines()[0] + "\n")
    start = int(found[1].name[:10])
    assert 0 < start < 14
    summary = bulk.predict(opened, folder, tmp_path / "a.jsonl")
    assert summary.resumed == start
    lines = summary.path.read_text().splitlines()
    assert len({json.loads(line)["image"] for line in lines}) == len(lines) == COUNT


@pytest.mark.parametrize(
    ("name", "damaged", "content"),
    [
        ("a.jsonl", ".jsonl", b"1\n2\n3\n4\n"),
        ("a.npy", ".npy", b""),
        ("a.npy", ".npy.jsonl", b"[]\n[]\n[]\n[]\n"),
    ],
    ids=["numbers", "nothing", "lists"],
)
def test_part_of_other_contents_is_computed_again(
    opened, folder, tmp_path, monkeypatch, name, damaged, content
):
    monkeypatch.setattr(parts, "MOST_ROWS", 4)
    write = bulk.predict if name == "a.jsonl" else bulk.embed
    with pytest.raises(Killed):
        write(opened, folder, tmp_path / name, batch_size=2, progress=kill_after(14))
    first, second = sorted(
        path for path in (tmp_path / f"{name}.parts").glob("0*") if path.name[21:] == damaged
    )[:2]
    second.write_bytes(content)
    summary = write(opened, folder, tmp_path / name)
    assert (summary.resumed, summary.images) == (int(first.name[11:21]), COUNT)


def test_another_run_is_not_resumed(opened, folder, tmp_path):
    out = tmp_path / "a.jsonl"
    with pytest.raises(Killed):
        bulk.predict(opened, folder, out, batch_size=2, progress=kill_after(8))
    with pytest.raises(ValueError, match="with other top_k$"):
        bulk.predict(opened, folder, out, top_k=1)
    with pytest.raises(ValueError, match="with other images$"):
        bulk.predict(opened, [*sorted(folder.iterdir()), "more.png"], out)
    with pytest.raises(ValueError, match="with other model$"):
        bulk.predict(tiny_model(labels=("a", "b", "c")), folder, out)
    assert bulk.predict(opened, folder, out, top_k=1, overwrite=True).resumed == 0
    with pytest.raises(FileExistsError, match="out must not exist"):
        bulk.predict(opened, folder, out, top_k=1)


def test_run_killed_at_its_very_end_is_finished(opened, folder, tmp_path, monkeypatch):
    """Between the last rename and the removal of the parts."""
    out = tmp_path / "a.jsonl"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(parts.Parts, "_remove", lambda self: self._files and kill_after(0)(PROGRESS))
        bulk.predict(opened, folder, out)
    first = out.read_bytes()
    summary = bulk.predict(opened, folder, out)
    assert (summary.resumed, summary.images) == (COUNT, COUNT) and out.read_bytes() == first
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


PROGRESS = bulk.Progress(0, 0)
VICTIM = """
import os, signal, sys
from conformance import tiny_model
from keras_vit import bulk
from keras_vit.bulk import parts

parts.MOST_ROWS = 6
def progress(state):
    if state.done >= 12:
        os.kill(os.getpid(), signal.SIGKILL)
bulk.predict(tiny_model(), sys.argv[1], sys.argv[2], batch_size=3, progress=progress)
"""


@pytest.mark.slow
def test_process_killed_by_the_system_resumes(folder, tmp_path):
    out = tmp_path / "a.jsonl"
    path = f"{TESTS.parent}{os.pathsep}{TESTS}"
    done = subprocess.run(
        [sys.executable, "-c", VICTIM, folder, out], env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == -9 and not out.exists()
    summary = bulk.predict(tiny_model(), folder, out)
    assert 6 <= summary.resumed < COUNT
    images = [json.loads(line)["image"] for line in out.read_text().splitlines()]
    assert images == [str(folder / f"{i:02}.png") for i in range(COUNT)]
