"""`make test`: a run for each backend, the summary, and a full disk."""

import errno
import os
import subprocess
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest
import run

pytestmark = pytest.mark.backend_free
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def suite(monkeypatch, tmp_path):
    """A folder that replaces the project; `suite(text)` writes its test file."""
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setenv("JOBS", "1")
    monkeypatch.delenv("TESTED_BACKENDS", raising=False)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-q")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return (tmp_path / "test_it.py").write_text


@pytest.fixture
def disk(monkeypatch):
    """`disk(free)` sets how many bytes are free."""

    def set_free(free):
        monkeypatch.setattr(run.shutil, "disk_usage", lambda folder: Usage(2**40, 0, int(free)))

    set_free(1e12)
    return set_free


def test_run_sums_up_and_names_the_backends_that_ran(suite, disk, capfd):
    suite(
        "import os, pytest\n"
        "ran = {'torch': '', 'jax': 'torch'}[os.environ['KERAS_BACKEND']]\n"
        "def test_a(): assert os.environ['TESTED_BACKENDS'] == ran\n"
        "def test_b(): pytest.skip('c')\n"
    )
    assert run.main(["jax", "torch", "jax"]) == 0  # the quickest first, and each once
    said = capfd.readouterr()
    assert "WARNING" not in said.err
    *_, torch, jax, total = said.out.splitlines()
    assert torch.startswith("torch       passed   1 passed, 1 skipped in ")
    assert jax.startswith("jax         passed   1 passed, 1 skipped in ")
    assert total == "2 passed, 0 failed, 2 skipped"
    suite("def test_a(): assert False, 'a reason'")
    assert run.main(["jax"]) == 1
    *_, failure, jax, _ = capfd.readouterr().out.splitlines()
    assert failure.startswith("jax         test_it::test_a: AssertionError: a reason")
    assert jax.startswith("jax         FAILED   0 passed, 1 failed in ")


def test_run_without_tests_fails_only_if_no_backend_has_any(suite, disk, capfd):
    suite("import os\nif os.environ['KERAS_BACKEND'] == 'jax':\n    def test_a(): pass\n")
    assert run.main(["torch", "jax"]) == 0
    assert "torch       passed   no tests, 0 passed in " in capfd.readouterr().out
    assert run.main(["torch"]) == 1


def test_run_that_crashes_fails(suite, disk, capfd):
    suite("import os\ndef test_a(): os._exit(9)")
    assert run.main(["torch"]) == 1
    assert "FAILED   pytest ended with exit code 9, 0 passed, 1 failed" in capfd.readouterr().out


def test_run_warns_of_little_free_space(suite, disk, capfd):
    disk(1.23e9)
    suite("def test_a(): pass")
    assert run.main(["torch"]) == 0
    warning = f"WARNING: only 1.2 GB free on the disk of {tempfile.gettempdir()}, the tests may"
    assert capfd.readouterr().err.startswith(warning)


def test_run_reports_a_full_disk_with_the_failures(suite, disk, monkeypatch, capfd):
    """The error ends pytest, which leaves a truncated report."""

    def pytest_run(command, **options):
        (report,) = (part for part in command if part.startswith("--junitxml="))
        Path(report.partition("=")[2]).write_text("<testsuites><test")
        disk(0)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(run.subprocess, "run", pytest_run)
    assert run.main(["torch"]) == 1
    said = capfd.readouterr().out
    assert f"torch       FAILED   only 0.0 GB free on the disk of {tempfile.gettempdir()}" in said


@pytest.mark.parametrize(
    ("code", "free"), [(errno.ENOSPC, 1e12), (errno.EDQUOT, 1e12), (errno.ENOENT, 0)]
)
def test_run_that_cannot_write_ends_in_one_line(disk, monkeypatch, capfd, code, free):
    def full(**options):
        disk(free)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(run.tempfile, "TemporaryDirectory", full)
    assert run.main(["torch"]) == 1
    assert "\nERROR: the disk is full: " in "\n" + capfd.readouterr().err


def test_run_raises_other_errors(disk, monkeypatch):
    def denied(**options):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(run.tempfile, "TemporaryDirectory", denied)
    with pytest.raises(PermissionError):
        run.main(["torch"])


def test_run_refuses_an_unknown_backend(capfd):
    assert run.main(["numpy"]) == 2
    assert "Received: ['numpy']" in capfd.readouterr().err
