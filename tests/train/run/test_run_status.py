"""`keras-vit info` of a run folder: its progress, and every damaged file."""

import json
import os
import re
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
from conformance import tiny_model
from rich.console import Console

from keras_vit.lock import Lock
from keras_vit.train import fit
from keras_vit.train.checkpoint import files, manifest
from keras_vit.train.checkpoint.checkpoint import Checkpoint
from keras_vit.train.run import run_status
from keras_vit_cli import main, output
from keras_vit_cli.info import run_facts

pytestmark = pytest.mark.backend_free
ROOT = Path(__file__).parents[3]
RECIPE = {
    "name": "tiny",
    "data": {"source": "folder", "path": "pictures"},
    "model": {"variant": None, "weights": "a.npz", "method": "lora", "config": {"width": 20}},
    "run": {"steps": None},
}
LINES = [{"epoch": 1, "loss": 2.5}, {"epoch": 2, "loss": 1.25}]


@pytest.fixture
def folder(tmp_path):
    """A run that was killed in its third epoch, after a save at step 11; step 8 was the best."""
    (tmp_path / run_status.RECIPE).write_text(json.dumps(RECIPE))
    log = "".join(json.dumps(line) + "\n" for line in LINES)
    (tmp_path / run_status.LOG).write_text(log + '{"epoch": 3, "lo')
    save(tmp_path, 8, epoch=2)
    save(tmp_path, 11, epoch=2, step_in_epoch=3)
    (tmp_path / run_status.CHECKPOINTS / "ckpt-000012.tmp-4711").mkdir()
    return tmp_path


def save(folder, step, epoch, step_in_epoch=0, stopped=False):
    position = {"epoch": epoch, "step_in_epoch": step_in_epoch, "step": step, "stopped": stopped}
    facts = {"time": 1e9 + step, "position": position, "best": {"step": 8}}
    facts |= {"steps_per_epoch": 4, "extra": {"steps": 14}}
    arrays = {"model/0:kernel": np.full(50, step, "float32")}
    return files.write(folder / run_status.CHECKPOINTS, step, arrays, facts)


def said(folder):
    """What `info` prints, by the title of the line; the last line of each title."""
    return dict(run_facts(run_status.read_run(folder)))


def finished(folder):
    (folder / run_status.RESULTS).write_text('{"top1": 0.75}')
    (folder / run_status.MODEL).write_bytes(b"")


@pytest.fixture
def info(monkeypatch, capsys):
    """Calls the command in this process: (exit code, stdout)."""

    def call(*arguments):
        monkeypatch.setattr(output, "out", Console(width=200))
        with pytest.raises(SystemExit) as end:
            main.main(["info", *map(str, arguments)])
        return end.value.code or 0, capsys.readouterr().out

    return call


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_run_status_of_a_killed_run_shows_where_it_resumes(folder):
    run = run_status.read_run(folder)
    assert run["state"] == "cut off" and run["process"] is None and run["results"] is None
    assert [(e["step"], e["whole"], e["best"]) for e in run["checkpoints"]] == [
        (8, True, True),
        (11, True, False),
    ]
    assert run["position"] == {
        **{"epoch": 2, "step_in_epoch": 3, "step": 11, "stopped": False},
        "steps_per_epoch": 4,
    }
    assert (run["steps"], run["saved"]) == (14, 1e9 + 11)
    assert run["log"] == {"epochs": 2, "last": LINES[1]}  # the third line is incomplete
    assert run["left_over"] == ["ckpt-000012.tmp-4711"] and not run["set_aside"]
    assert run["problems"] == []
    lines = said(folder)
    assert "cut off; last saved at step 11 of 14, epoch 3 (step 3 of 4), 2001-" in lines["state"]
    assert lines["trains"] == "width 20, starting from a.npz, lora"
    assert lines["data"] == "folder, pictures"
    assert lines["checkpoint"].startswith("step 11, epoch 3, 0.0 MB, ")


def test_run_status_follows_the_folder(folder):
    save(folder, 14, epoch=4, stopped=True)
    assert "training ended at step 14 of 14" in said(folder)["state"]
    lock = Lock(folder)
    lock.acquire()
    try:
        run = run_status.read_run(folder)
        assert run["state"] == "running" and f"process {os.getpid()} on" in run["process"]
        assert "being written" in said(folder)["unfinished"]
        with pytest.raises(BlockingIOError):  # its owner still holds it
            in_child(lambda: (Lock._held.clear(), Lock(folder).acquire()))
    finally:
        lock.release()
    assert run_status.read_run(folder)["state"] == "cut off"  # although the lock file exists
    in_child(lambda: Lock(folder).acquire())
    finished(folder)
    run = run_status.read_run(folder)
    assert run["state"] == "finished" and run["results"] == {"top1": 0.75}
    assert run["problems"] == []
    (folder / run_status.MODEL).unlink()
    assert "model.keras is missing" in run_status.read_run(folder)["problems"][0]


def in_child(function):
    """Runs a function in a forked process; raises BlockingIOError here if it does there."""
    child = os.fork()
    if not child:
        try:
            function()
        except BlockingIOError:
            os._exit(3)
        except BaseException:
            os._exit(4)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 3:
        raise BlockingIOError
    assert code == 0


@pytest.mark.parametrize("name", [manifest.ARRAYS, manifest.FACTS, manifest.MANIFEST])
def test_run_status_names_a_damaged_file_of_a_checkpoint(folder, info, name):
    assert info(folder)[0] == 0
    path = folder / run_status.CHECKPOINTS / "ckpt-000011" / name
    flip(path)
    code, out = info(folder, "--json")
    run = json.loads(out)
    assert code == 1 and [e["whole"] for e in run["checkpoints"]] == [True, False]
    assert str(path) in run["problems"][0] and len(run["problems"]) == 1
    assert run["position"]["step"] == 8  # where the run would resume
    files.mark_broken(path.parent)
    code, out = info(folder, "--json")
    assert code == 0 and json.loads(out)["set_aside"] == ["ckpt-000011.broken"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (run_status.RECIPE, '{"name": ', "recipe.json cannot be read"),
        (run_status.RESULTS, "[]", "results.json', error='a list'"),
        (run_status.LOG, '{"epoch": 1}\nspoiled\n', "log.jsonl cannot be read in line 2"),
        (
            run_status.LOG,
            '{"epoch": 1}\n[[1, 2]]\n',
            "must hold an object in line 2. Received: [[1, 2]]",
        ),
        (run_status.RECIPE, '{"run": null}', "recipe.json', run=None"),
        (
            run_status.RECIPE,
            '{"model": {"config": 5}}',
            "must state model.config as an object. Received: ",
        ),
        (run_status.RECIPE, '{"run": {"steps": "x"}}', "recipe.json', run.steps='x'"),
        (
            run_status.RECIPE,
            '{"run": {"steps": 1e999}}',
            "recipe.json', run.steps=inf",
        ),
        (run_status.RECIPE, "[" * 10**5, "recipe.json cannot be read"),
    ],
)
def test_run_status_names_other_damaged_files(folder, info, name, text, message):
    (folder / name).write_text(text)
    code, out = info(folder, "--json")
    assert code == 1 and [message in problem for problem in json.loads(out)["problems"]] == [True]
    code, out = info(folder)
    assert code == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time": 1e300}, "time=1e+300"),
        ({"time": "now"}, "time='now'"),
        ({"steps_per_epoch": "4"}, "steps_per_epoch='4'"),
        ({"position": {"step": 11, "epoch": 10**30, "step_in_epoch": 0}}, "position.epoch=1000"),
        ({"position": {"step": 11, "epoch": 2, "step_in_epoch": None}}, "step_in_epoch as an int"),
    ],
)
def test_run_status_names_absurd_numbers_in_a_checkpoint(folder, info, changes, message):
    """The hashes are right: the manifest was written to match."""
    path = folder / run_status.CHECKPOINTS / "ckpt-000011"
    facts = json.loads((path / manifest.FACTS).read_text())
    (path / manifest.FACTS).write_text(json.dumps({**facts, **changes}))
    files = {name: manifest.file_record(path / name) for name in (manifest.ARRAYS, manifest.FACTS)}
    (path / manifest.MANIFEST).write_text(manifest.manifest_text(files))
    code, out = info(folder, "--json")
    found = json.loads(out)
    assert code == 1 and [message in problem for problem in found["problems"]] == [True]
    assert found["position"]["step"] == 8
    assert info(folder)[0] == 1


def test_run_status_names_a_file_in_place_of_a_folder_and_vice_versa(folder, info):
    (folder / run_status.CHECKPOINTS / "ckpt-000099").write_text("")
    (folder / run_status.LOG).unlink()
    (folder / run_status.LOG).mkdir()
    code, out = info(folder, "--json")
    problems = json.loads(out)["problems"]
    assert code == 1 and len(problems) == 2
    assert "log.jsonl must be a file" in problems[1] and "ckpt-000099" in problems[0]
    shutil.rmtree(folder / run_status.CHECKPOINTS)
    (folder / run_status.CHECKPOINTS).write_text("")
    code, out = info(folder, "--json")
    assert code == 1 and "must be a folder" in json.loads(out)["problems"][0]


def test_run_status_names_a_checkpoint_of_another_step(folder, info):
    path = folder / run_status.CHECKPOINTS / "ckpt-000011"
    path.rename(path.with_name("ckpt-000012"))
    code, out = info(folder, "--json")
    run = json.loads(out)
    assert code == 1 and run["position"]["step"] == 8
    assert "must be a checkpoint of that step. Received: of 11" in run["problems"][0]


def test_run_status_without_a_checkpoint(tmp_path, info):
    (tmp_path / run_status.RECIPE).write_text("{}")
    code, out = info(tmp_path)
    assert code == 0 and "there is no checkpoint to resume from" in out


def test_info_opens_the_model_of_a_run(folder, info):
    finished(folder)
    model = tiny_model()
    model.save(folder / run_status.MODEL)
    code, out = info(folder)
    assert code == 0 and "24 x 16 x 3, patch 8, width 20" in out and "top1 0.75" in out
    code, out = info(folder, "--json")
    run = json.loads(out)
    assert code == 0 and run["model"]["parameters"] == model.count_params()
    flip(folder / run_status.MODEL)
    code, out = info(folder, "--json")
    run = json.loads(out)
    assert (
        code == 1 and run["model"] is None and "model.keras cannot be opened" in run["problems"][0]
    )


def test_run_status_reads_the_files_of_a_real_run(tmp_path):
    """File names and facts are those of the training library, also with your own `fit`."""
    for name in ("RECIPE", "LOG", "RESULTS", "CHECKPOINTS"):
        assert getattr(run_status, name) == getattr(fit, name)
    model = keras.Sequential([keras.Input((7,)), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    x = np.ones((6, 7), "float32")
    checkpoint = Checkpoint(
        tmp_path / run_status.CHECKPOINTS, save_freq=3, monitor="loss", extra=["x"]
    )
    around = checkpoint.around()
    model.fit(x, x[:, :3], batch_size=2, epochs=2, callbacks=around, verbose=0, shuffle=False)
    (tmp_path / run_status.RECIPE).write_text(json.dumps({**RECIPE, "run": {"steps": 6}}))
    run = run_status.read_run(tmp_path)
    assert [e["step"] for e in run["checkpoints"]] == [3, 6] and run["problems"] == []
    assert run["steps"] == 6 and run["position"]["step"] == 6
    assert "step 6 of 6" in said(tmp_path)["state"]
    assert run["saved"] > 1.7e9


def test_reliability_page_names_existing_tests():
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    path, names = None, re.findall(r"`(tests/[\w/]+\.py)?::(test_\w+)`", text)
    assert len(names) > 15
    for file, name in names:
        path = file or path  # a bare name is in the file of the name before it
        assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"
