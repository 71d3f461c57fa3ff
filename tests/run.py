"""Run pytest once a backend, and sum up.

`python tests/run.py` runs every backend, `python tests/run.py jax torch -- -k pool` these two;
pytest gets what follows the "--". The files of a backend are shared out among as many processes as
there are cores, or JOBS: most of a test is Python building a model, which keeps one core busy.
"""

import os
import subprocess
import sys
import tempfile
import time
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


def run_backend(backend: str, jobs: int, pytest_args: list[str]) -> Outcome:
    """Run pytest on one backend."""
    start = time.monotonic()
    shared_out = ["-n", str(jobs), "--dist", "loadfile"] if jobs > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        code = subprocess.run(
            [sys.executable, "-m", "pytest", f"--junitxml={report}", *shared_out, *pytest_args],
            cwd=ROOT,
            env={**os.environ, "KERAS_BACKEND": backend},
        ).returncode
        passed, failed, skipped = count_tests(report)
    trouble = ""
    if code and not failed:  # it crashed, was killed, or found no test
        failed = 1
        trouble = "no tests found" if code == 5 else f"pytest ended with exit code {code}"
    return Outcome(backend, passed, failed, skipped, time.monotonic() - start, trouble)


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
    for backend in backends:
        print(f"\n=== {backend} ===", flush=True)
        outcomes.append(run_backend(backend, jobs, pytest_args))
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
