"""PyTorch's pickles are refused, and converted by the command that the error prints."""

import pickle
import re
import shlex
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hostile import Canary, archive, refuse

from keras_vit.weights.files import arrays
from keras_vit.weights.files.rules import Refused

pytestmark = pytest.mark.backend_free


def test_pickles_are_refused_by_content_and_by_name(tmp_path):
    canary = tmp_path / "canary"
    payload = pickle.dumps(Canary(canary), 2)
    for name in ("x.pth", "x.npz", "x.safetensors", "x"):
        (tmp_path / name).write_bytes(payload)
        refuse(tmp_path / name, "not be a pickle", "weights_only=True")
        archive(tmp_path / name, ("archive/data.pkl", payload), ("archive/data/0", b""))
        refuse(tmp_path / name, "not be a pickle", "weights_only=True")
        archive(tmp_path / name, ("x/data.pkl", payload), ("x/code/a.py", b""))
        refuse(tmp_path / name, "not be a TorchScript archive")
    for name in ("x.bin", "x.pt", "x.PTH", "x.pkl", "x.ckpt"):
        (tmp_path / name).write_bytes(pickle.dumps([1], 0))
        refuse(tmp_path / name, "not be a pickle", re.escape(shlex.quote(str(tmp_path / name))))
    assert not canary.exists()


MAKE_CHECKPOINTS = """
    import argparse, sys, torch
    torch.manual_seed(0)
    base = torch.randn(6, 4)
    state = {
        "base": base, "part": base[:, :2], "transposed": base.t(), "same": base,
        "expanded": torch.randn(1, 3).expand(5, 3), "half": torch.randn(3).bfloat16(),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3), "head.weight": torch.nn.Parameter(torch.randn(2, 2)),
    }
    args = argparse.Namespace(lr=0.1)
    torch.save(state, "plain.pth")
    torch.save(state, "legacy.pth", _use_new_zipfile_serialization=False)
    torch.save({"epoch": 3, "optimizer": {"state": {}}, "model": state, "args": args}, "model.bin")
    torch.save({"state_dict": state}, "with space.pt")
    module = torch.nn.Linear(2, 3)
    torch.jit.save(torch.jit.script(module), "script.pt")
    state |= {"weight": module.weight, "bias": module.bias}
    import numpy as np
    np.savez("expected.npz", **{k: v.detach().float().numpy() for k, v in state.items()})
"""


def test_commands_convert_pickles(tmp_path):
    """Runs the command that each refusal prints, with PyTorch."""
    make = [sys.executable, "-c", textwrap.dedent(MAKE_CHECKPOINTS)]
    subprocess.run(make, cwd=tmp_path, check=True)
    expected = dict(np.load(tmp_path / "expected.npz"))
    running = {}
    for name in ("plain.pth", "legacy.pth", "model.bin", "with space.pt", "script.pt"):
        with pytest.raises(Refused) as error:
            arrays.open_arrays(tmp_path / name)
        assert ("TorchScript" in str(error.value)) == (name == "script.pt")
        command = shlex.split(str(error.value).splitlines()[-1])
        assert command[0] == "python" and command[-2] == str(tmp_path / name)
        running[command[-1]] = subprocess.Popen([sys.executable, *command[1:]])
    for target, process in running.items():
        assert process.wait(120) == 0
        names = {"weight", "bias"} if "script" in target else expected.keys() - {"weight", "bias"}
        with arrays.open_arrays(target) as file:
            assert set(file) == names
            for name in file:
                np.testing.assert_array_equal(file[name], expected[name])
