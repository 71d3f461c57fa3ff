"""Run pytest once for each backend, and sum up.

`python tests/run.py` runs every backend, `python tests/run.py jax torch -- -k pool` these two. The
arguments after "--" are passed to pytest. The quickest of the backends is the first one. Tests
marked `backend_free` run on the first backend only; of a test marked `sampled`, later backends run
one case, and `-m slow` the others. The test files are distributed over as many processes as there
are cores, or over JOBS processes: most of a test is Python building a model, which keeps one core
busy.
"""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

# The quickest first: PyTorch builds and calls a tiny model in half of TensorFlow's time, and JAX
# compiles it before.
BACKENDS = ("torch", "tensorflow", "jax")
ROOT = Path(__file__).resolve().parent.parent
NO_TESTS = 5  # pytest's exit code
# Of each process where several share the cores: threads that wait for others spin.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}
ENOUGH = 2e9  # bytes free; the slow tests write models of several hundred megabytes
FULL = 50e6  # bytes free below which a failed write is blamed on the disk


@dataclass
class Outcome:
    """The result of one run of pytest."""

    backend: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    trouble: str = ""  # why pytest itself failed, if no test did
    failures: tuple[str, ...] = ()  # a line for each failed test: its name and the error

    def line(self) -> str:
        """One line: the backend, the verdict and the counts."""
        verdict = "FAILED" if self.failed else "passed"
        counts = [f"{self.passed} passed"]
        counts += [f"{self.failed} failed"] if self.failed else []
        counts += [f"{self.skipped} skipped"] if self.skipped else []
        text = ", ".join(filter(None, [self.trouble, *counts]))
        return f"{self.backend:<11} {verdict}   {text} in {self.seconds:.0f} s"


def run_backend(backend: str, jobs: int, pytest_args: list[str], ran: Sequence[str]) -> Outcome:
    """Run pytest on one backend. The tests leave out what those that ran before have covered."""
    start = time.monotonic()
    # conftest.py orders the files.
    shared_out = ["-n", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder"]
    shared_out = shared_out if jobs > 1 else []
    environment = {**(ONE_THREAD if jobs > 1 else {}), **os.environ, "KERAS_BACKEND": backend}
    environment["TESTED_BACKENDS"] = " ".join(ran)
    # Some machines forbid it; then each of a hundred processes compiles the package again.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        report = Path(folder, "report.xml")
        code = subprocess.run(
            [sys.executable, "-m", "pytest", f"--junitxml={report}", *shared_out, *pytest_args],
            cwd=ROOT,
            env=environment,
        ).returncode
        passed, failures, skipped = count_tests(report)
    failed = len(failures)
    trouble = "no tests" if code == NO_TESTS else ""
    if code not in (0, NO_TESTS) and not failed:  # it crashed, or was killed
        failed = 1
        trouble = f"pytest ended with exit code {code}"
    if failed and (full := short_of_space(FULL)):
        trouble = full
    seconds = time.monotonic() - start
    return Outcome(backend, passed, failed, skipped, seconds, trouble, failures)


def count_tests(report: Path) -> tuple[int, tuple[str, ...], int]:
    """Passed, failed and skipped tests in pytest's JUnit report, the failed with their errors.

    There are none if pytest wrote no report.
    """
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (FileNotFoundError, ElementTree.ParseError):  # pytest crashed, or the disk was full
        return 0, (), 0
    passed = skipped = 0
    failures = []
    for case in cases:
        errors = [*case.iter("failure"), *case.iter("error")]
        if errors:
            message = " ".join(errors[0].get("message", "").split())
            failures.append(f"{case.get('classname')}::{case.get('name')}: {message:.300}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return passed, tuple(failures), skipped


def short_of_space(wanted: float) -> str:
    """A message that names a disk with fewer bytes free than wanted, or an empty string."""
    for folder in (temporary_folder(), ROOT):
        free = shutil.disk_usage(folder).free
        if free < wanted:
            return f"only {free / 1e9:.1f} GB free on the disk of {folder}"
    return ""


def temporary_folder() -> Path:
    """The folder where the tests write; `tempfile` has none on a full disk."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path(os.environ.get("TMPDIR") or "/tmp")


def main(argv: list[str]) -> int:
    """Run the named backends, by default all; return 0 if everything passed."""
    try:
        return run_backends(argv)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        # On a full disk, `tempfile` raises FileNotFoundError: no folder is usable.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) and not short_of_space(FULL):
            raise
        print(f"ERROR: the disk is full: {short_of_space(ENOUGH) or error}", file=sys.stderr)
        return 1


def run_backends(argv: list[str]) -> int:
    """Run pytest on each backend, print a line for each and a total; return the exit code."""
    split = argv.index("--") if "--" in argv else len(argv)
    backends, pytest_args = argv[:split] or list(BACKENDS), argv[split + 1 :]
    if unknown := [name for name in backends if name not in BACKENDS]:
        print(f"backends must be among {BACKENDS}. Received: {unknown}", file=sys.stderr)
        return 2
    if short := short_of_space(ENOUGH):
        print(f"WARNING: {short}, the tests may need {ENOUGH / 1e9:.0f} GB", file=sys.stderr)
    jobs = int(os.environ.get("JOBS") or os.cpu_count() or 1)
    outcomes = []
    for backend in sorted(set(backends), key=BACKENDS.index):
        print(f"\n=== {backend} ===", flush=True)
        ran = [outcome.backend for outcome in outcomes]
        outcomes.append(run_backend(backend, jobs, pytest_args, ran))
    print()
    for outcome in outcomes:
        for failure in outcome.failures:
            print(f"{outcome.backend:<11} {failure}")
    for outcome in outcomes:
        print(outcome.line())
    passed, failed, skipped = (
        sum(getattr(outcome, name) for outcome in outcomes)
        for name in ("passed", "failed", "skipped")
    )
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 0 if passed + skipped and not failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
