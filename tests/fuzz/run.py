"""Reads damaged files through every door, each in a process with limits, and reports what broke.

`make fuzz` runs every target for a minute; `make fuzz ARGS="pictures configs --seconds 600"` two of
them for ten. An input follows from its target and its number, so `--first 1234 --inputs 1` repeats
one; its files stay in the folder that is printed.

The property, beside that of `targets.py`: an input takes less than SECONDS of the processor and
less than MEMORY beyond its own size.
"""

import argparse
import json
import os
import resource
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SECONDS = 2.0
MEMORY = 500 << 20
HANG = 30.0
"""Seconds of the processor after which an input that has not ended is given up."""
ASLEEP = 900.0
"""Seconds of the clock after which it is. A busy machine is no fault of an input."""
SAFETY = 3 << 30
"""Bytes of data that a process may allocate, so that a fault does not take the whole machine."""
ROOT = Path(__file__).resolve().parents[2]
TARGETS = (
    *("weights", "configs", "keras", "runs", "tflite", "onnx", "savedmodel", "pictures"),
    *("presets", "requests"),
)
"""The names in `targets.py`, which takes seconds to import."""


def main(argv: list[str]) -> int:
    """Run the targets one after another; return 1 if one of them broke."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("targets", nargs="*", default=list(TARGETS), help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=60, help="of each target (60)")
    parser.add_argument("--inputs", type=int, default=None, help="of each target (unlimited)")
    parser.add_argument("--first", type=int, default=0, help="number of the first input (0)")
    parser.add_argument("--keep", default=None, help="folder for the inputs that broke")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if unknown := [name for name in options.targets if name not in TARGETS]:
        parser.error(f"targets must be among {', '.join(TARGETS)}. Received: {unknown}")
    if options.child:
        read_inputs(options.targets[0], options.first, options.inputs, Path(options.keep))
        return 0
    keep = Path(options.keep or tempfile.mkdtemp(prefix="fuzz-"))
    broken = 0
    for name in options.targets:
        count, found = fuzz(name, options.first, options.inputs, options.seconds, keep / name)
        broken += len(found)
        print(f"{name:<11} {count:>8,} inputs, {len(found)} broke", flush=True)
        for line in found:
            print(f"  {line}")
    print(f"The inputs that broke are in {keep}" if broken else "Nothing broke.")
    return 1 if broken else 0


def fuzz(
    name: str, first: int, inputs: int | None, seconds: float, keep: Path
) -> tuple[int, list[str]]:
    """How many inputs a target has read, and a line for each that broke."""
    keep.mkdir(parents=True, exist_ok=True)
    number, found, end = first, [], None
    while inputs is None or number < first + inputs:
        left = [] if inputs is None else ["--inputs", str(first + inputs - number)]
        command = [sys.executable, __file__, name, "--child", "--first", str(number), *left]
        child = subprocess.Popen(
            [*command, "--keep", str(keep)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        reached, lines, end = _watch(child, end, seconds)
        found += [line for line in lines if line]
        if type(reached) is not int:
            if end is None or time.monotonic() < end:  # or its time was over
                found.append(f"the seeds cannot be read: exit code {child.returncode}")
            break
        number = reached + 1
        if child.returncode == 0 or (end and time.monotonic() >= end):
            break
        found.append(f"{reached}: the process ended with exit code {child.returncode}")
    return number - first, found


def _watch(child: subprocess.Popen, end: float | None, seconds: float):
    """Reads a child's lines until it ends, hangs, or the time is over."""
    reached, lines, quiet, used = "start", [], time.monotonic(), 0.0
    selector = selectors.DefaultSelector()
    selector.register(child.stdout, selectors.EVENT_READ)
    buffer = b""
    while True:
        if selector.select(1.0):
            data = os.read(child.stdout.fileno(), 1 << 16)
            if not data:
                break
            quiet, used = time.monotonic(), _processor(child.pid)
            *whole, buffer = (buffer + data).split(b"\n")
            for line in map(json.loads, filter(lambda text: text.startswith(b'{"at"'), whole)):
                reached = line["at"]
                if end is None and type(reached) is int:
                    end = time.monotonic() + seconds
                lines.append(line.get("broke", ""))
        now = time.monotonic()
        hangs = type(reached) is int and _processor(child.pid) - used > HANG
        if hangs or now - quiet > ASLEEP:
            lines.append(f"{reached}: it does not end")
        if hangs or now - quiet > ASLEEP or (end and now > end):
            child.kill()
            break
    child.wait()
    child.stdout.close()
    return reached, lines, end


def _processor(pid: int) -> float:
    """Seconds of the processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- in the child


def read_inputs(name: str, first: int, inputs: int | None, keep: Path) -> None:
    """Reads inputs, and prints the number of each before it is read."""
    import itertools

    from targets import TARGETS, make_input, place

    target = TARGETS[name]
    say(at="seeds")
    made = target.seeds()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        for number, seed in enumerate(made):  # a seed is whole, and what it needs gets imported
            folder = Path(scratch, f"seed-{number}")
            place(seed, folder)
            for _ in range(2):
                try:
                    target.read(folder)
                except ValueError as error:
                    if name != "weights" or "pickle" not in str(error):
                        raise
        numbers = itertools.count(first) if inputs is None else range(first, first + inputs)
        for number in numbers:
            say(at=number)
            _, files = make_input(target, made, name, number)
            folder = Path(scratch, f"input-{number}")
            place(files, folder)
            wrong = _measured(target, folder, sum(map(len, files.values())))
            if wrong:
                place(files, keep / str(number))
                say(at=number, broke=f"{number}: {' '.join(wrong.split())[:300]}")
            _remove(folder)


def _measured(target, folder: Path, size: int) -> str:
    """What is wrong with an input: its error, its time or its memory."""
    from targets import READ, REFUSED, outcome

    limit = _status("VmData") + SAFETY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, start = _status("VmRSS"), time.process_time()
    found = outcome(target, folder)
    seconds, memory = time.process_time() - start, _status("VmHWM") - before - size
    wrong = "" if found in (READ, REFUSED) else found
    if seconds > SECONDS:
        wrong += f" it took {seconds:.1f} seconds"
    if memory > MEMORY:
        wrong += f" it took {memory >> 20} MB"
    return wrong


def _status(field: str) -> int:
    """Bytes of this process, as Linux counts them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise KeyError(field)


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)


def say(**line: object) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
