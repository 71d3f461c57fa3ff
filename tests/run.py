"""Run pytest once a backend, each time in a process of its own, and sum up.

`python tests/run.py` runs every backend, `python tests/run.py jax torch -- -k pool` these two;
pytest gets what follows the "--". There are as many processes at a time as cores, or JOBS: most of
a test is Python building a model, which keeps one core busy.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

BACKENDS = ("tensorflow", "jax", "torch")
ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Outcome:
    """What one run of pytest came to."""

    backend: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    trouble: str = ""  # why pytest itself failed, where no single test did

    def line(self) -> str:
        """One line to read: the backend, the verdict and the counts."""
        verdict = "FAILED" if self.failed else "passed"
        counts = [f"{self.passed} passed"]
        counts += [f"{self.failed} failed"] if self.failed else []
        counts += [f"{self.skipped} skipped"] if self.skipped else []
        text = self.trouble or ", ".join(counts)
        return f"{self.backend:<11} {verdict}   {text} in {self.seconds:.0f} s"


def run_backend(backend: str, pytest_args: list[str], output: Path) -> Outcome:
    """Run pytest on one backend; what it prints goes to a file."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, output.open("wb") as file:
        report = Path(folder, "report.xml")
        code = subprocess.run(
            [sys.executable, "-m", "pytest", f"--junitxml={report}", *pytest_args],
            cwd=ROOT,
            env={**os.environ, "KERAS_BACKEND": backend},
            stdout=file,
            stderr=subprocess.STDOUT,
        ).returncode
        passed, failed, skipped = count_tests(report)
    trouble = ""
    if code and not failed:  # it crashed, was killed, or found no test
        failed = 1
        trouble = "no tests found" if code == 5 else f"pytest ended with exit code {code}"
    return Outcome(backend, passed, failed, skipped, time.monotonic() - start, trouble)


def show(output: Path, running: Future) -> None:
    """Copy to the terminal what comes into a file, until its writer is done."""
    while not output.exists() and not running.done():
        time.sleep(0.1)
    with output.open("rb") as file:
        while True:
            done = running.done()  # asked first, so that nothing is missed
            shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.flush()
            if done:
                return
            time.sleep(0.2)


def count_tests(report: Path) -> tuple[int, int, int]:
    """Passed, failed and skipped tests in pytest's JUnit report; zeros where it wrote none."""
    if not report.exists():
        return 0, 0, 0
    passed = failed = skipped = 0
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def main(argv: list[str]) -> int:
    """Run the backends named, all of them by default; 0 if everything passed."""
    split = argv.index("--") if "--" in argv else len(argv)
    backends, pytest_args = argv[:split] or list(BACKENDS), argv[split + 1 :]
    if unknown := [name for name in backends if name not in BACKENDS]:
        print(f"backends must be among {BACKENDS}. Received: {unknown}", file=sys.stderr)
        return 2
    jobs = int(os.environ.get("JOBS") or os.cpu_count() or 1)
    outcomes = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        outputs = [Path(folder, backend) for backend in backends]
        runs = [
            pool.submit(run_backend, backend, pytest_args, output)
            for backend, output in zip(backends, outputs, strict=True)
        ]
        for backend, output, running in zip(backends, outputs, runs, strict=True):
            print(f"\n=== {backend} ===", flush=True)
            show(output, running)
            outcomes.append(running.result())
    print()
    for outcome in outcomes:
        print(outcome.line())
    passed, failed, skipped = (
        sum(getattr(outcome, name) for outcome in outcomes)
        for name in ("passed", "failed", "skipped")
    )
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
