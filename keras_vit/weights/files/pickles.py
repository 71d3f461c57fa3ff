"""Refuses PyTorch pickles, and prints the command that converts them without running their code.

Unpickling runs arbitrary code, so this package reads no pickle, whatever its name. The command uses
`torch.load(..., weights_only=True)`, which allows a small safe subset, and needs PyTorch.
"""

import os
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from keras_vit.weights.files.rules import Refused, refusal

SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
"""Suffixes of pickled weights."""

# Training scripts save an argparse.Namespace with their weights. Cloning separates tensors that
# share memory, which safetensors refuses.
_PROGRAM = (
    "import sys,argparse,torch as t,safetensors.torch as s;"
    "t.serialization.add_safe_globals([argparse.Namespace]);"
    "d=t.load(sys.argv[1],map_location='cpu',weights_only=True);"
    "d=next((d[k] for k in ('state_dict','model','model_state_dict','teacher') if k in d),d);"
    "s.save_file({k:v.clone().contiguous() for k,v in d.items() if t.is_tensor(v)},"
    "sys.argv[2],{'format':'pt'})"
)
_SCRIPT_PROGRAM = (
    "import sys,torch as t,safetensors.torch as s;"
    "d=t.jit.load(sys.argv[1],map_location='cpu').state_dict();"
    "s.save_file({k:v.clone().contiguous() for k,v in d.items()},sys.argv[2],{'format':'pt'})"
)


def refuse_file(path: Path, start: bytes) -> None:
    """Raises if a file is a pickle by its first bytes or its name."""
    protocol = start[:1] == b"\x80" and start[1:2] in (b"\2", b"\3", b"\4", b"\5")
    if protocol or path.suffix.lower() in SUFFIXES:
        raise _pickle_refusal(path)


def refuse_archive(path: Path, names: Iterable[str]) -> None:
    """Raises if a zip archive with these members is a PyTorch or TorchScript file."""
    members = [PurePosixPath(name) for name in names]
    last = {member.name for member in members}
    if "constants.pkl" in last or any("code" in member.parts[:-1] for member in members):
        rule = "not be a TorchScript archive, which is a program"
        hint = "Ask its author for a state dict. If you trust the author, run it to get one"
        raise Refused(
            f"{refusal(path, rule)}\n{hint}:\n  {conversion_command(path, _SCRIPT_PROGRAM)}"
        )
    if any(name.endswith(".pkl") for name in last):
        raise _pickle_refusal(path)


def conversion_command(path: str | os.PathLike, program: str = _PROGRAM) -> str:
    """The shell command that converts `path` to a .safetensors file beside it."""
    files = [str(path), str(Path(path).with_suffix(".safetensors"))]
    quoted = subprocess.list2cmdline(files) if os.name == "nt" else shlex.join(files)
    return f'python -c "{program}" {quoted}'


def _pickle_refusal(path: Path) -> Refused:
    rule = "not be a pickle, which can run arbitrary code"
    return _with_command(path, rule, "Convert it safely, with torch and safetensors installed")


def _with_command(path: Path, rule: str, hint: str, program: str = _PROGRAM) -> Refused:
    return Refused(f"{refusal(path, rule)}\n{hint}:\n  {conversion_command(path, program)}")
