"""The GitHub workflows, which no test can run: their YAML, and that what they name exists."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.backend_free

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WORKFLOWS = {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in FILES}


def steps(workflow):
    for job in workflow["jobs"].values():
        yield from job["steps"]


def wrong_commands(workflow):
    """Commands of a workflow that name a target, file or program that does not exist."""
    for step in steps(workflow):
        words = shlex.split(step.get("run", ""), comments=True)
        words = [w for w in words if not re.match(r"\w+=", w)]  # variables before a command
        if not words:
            continue
        programs = {"make", "pip", "grep", "python", *PROJECT["scripts"]}
        named = [w for w in words if re.match(r"(tests|training|benchmarks|docs)/", w)]
        if (
            words[0] not in programs
            or (words[0] == "make" and words[1] not in TARGETS)
            or any(not (ROOT / name).exists() for name in named)
        ):
            yield step["run"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow_names_what_exists(name):
    workflow = WORKFLOWS[name]
    assert list(wrong_commands(workflow)) == []
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow[True]  # YAML reads "on" as a boolean
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 60
        assert set(job.get("needs", "").split()) < workflow["jobs"].keys()
    for step in steps(workflow):
        assert ("run" in step) != ("uses" in step)
        assert "uses" not in step or re.fullmatch(r"[\w/-]+@(release/)?v\d+", step["uses"])


def test_workflow_with_a_mistake_is_found():
    commands = ["make nothing", "nothing x", "python -m pytest tests/nothing.py", "A=1 make docs"]
    workflow = {"jobs": {"build": {"steps": [{"run": command} for command in commands]}}}
    assert list(wrong_commands(workflow)) == commands[:3]


@pytest.mark.parametrize("name", ["tests", "release"])
def test_workflow_runs_every_python_and_backend(name):
    matrix = WORKFLOWS[name]["jobs"]["test"]["strategy"]["matrix"]
    stated = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d", c)]
    assert matrix == {"backend": ["tensorflow", "jax", "torch"], "python": stated}


def test_only_publishing_jobs_get_more_rights():
    rights = {
        (name, job): value["permissions"]
        for name, workflow in WORKFLOWS.items()
        for job, value in workflow["jobs"].items()
        if "permissions" in value
    }
    assert rights == {
        ("docs", "publish"): {"pages": "write", "id-token": "write"},
        ("release", "publish"): {"id-token": "write"},
    }
    assert WORKFLOWS["release"]["jobs"]["publish"]["needs"] == "test"
    assert WORKFLOWS["release"][True] == {"push": {"tags": ["v*"]}}
