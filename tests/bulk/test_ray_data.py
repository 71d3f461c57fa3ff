"""Ray workers: the same rows as in one process, also if a worker is killed."""

import json
import os
import signal

import numpy as np
import pytest
from conformance import tiny_model
from PIL import Image

from keras_vit import bulk
from keras_vit.bulk import ray_data
from keras_vit.bulk.ray_data import _packed, _rows
from keras_vit.images import FoundImage

pytestmark = pytest.mark.backend_free


def test_rows_of_a_block_must_follow_the_last_ones():
    found = [FoundImage(f"{i}.png") for i in range(4)]
    values = np.array([_packed(np.arange(3, dtype="float32"), 3), _packed(None, 3)], object)
    block = {"number": np.array([2, 3]), "values": values, "error": np.array(["", "no"], object)}
    good, bad = _rows(block, found, 2)
    assert good.image == "2.png" and good.error is None and good.values.tolist() == [0, 1, 2]
    assert bad == ("3.png", None, "no")
    with pytest.raises(RuntimeError, match="rows from 1 on"):
        _rows(block, found, 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"count": 0}, "count must"), ({"count": 1, "num_gpus": -1}, "num_gpus")],
)
def test_workers_are_checked(arguments, text):
    with pytest.raises(ValueError, match=text):
        bulk.RayWorkers(**arguments)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_worker_loses_nothing(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    rng = np.random.default_rng(0)
    for i in range(40):
        pixels = rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i:02}.png")
    (tmp_path / "11.png").write_bytes(b"")
    tiny_model().save(tmp_path / "model.keras")
    model, killed = str(tmp_path / "model.keras"), tmp_path / "killed"

    class Dying(ray_data.Worker):  # in the function, so that Ray sends it by value
        def __call__(self, block):
            if 21 in block["number"] and not os.path.exists(killed):
                with open(killed, "w") as file:
                    file.write(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(block)

    monkeypatch.setattr(ray_data, "Worker", Dying)
    monkeypatch.setattr(ray_data, "BLOCK", 8)
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        done = bulk.embed(model, tmp_path, tmp_path / "ray.npy", ray=bulk.RayWorkers(2))
    finally:
        ray.shutdown()
    assert int(killed.read_text()) != os.getpid()  # one was killed
    alone = bulk.embed(model, tmp_path, tmp_path / "alone.npy")
    assert (done.images, done.failed) == (alone.images, alone.failed) == (40, 1)
    found, wanted = (np.load(summary.path) for summary in (done, alone))
    np.testing.assert_allclose(found, wanted, atol=1e-5)  # NaN in the same place
    assert np.nanmax(np.abs(wanted - wanted[::-1])) > 1e-3
    lines = [(tmp_path / f"{name}.npy.jsonl").read_text() for name in ("ray", "alone")]
    assert (
        lines[0] == lines[1] and len({json.loads(x)["image"] for x in lines[0].splitlines()}) == 40
    )
