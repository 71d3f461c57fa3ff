"""A release: the same bytes from the same commit, and metadata that an index takes."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.backend_free

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REPOSITORY = "https://example.org/me/keras_vit"
RELATIVE = re.compile(r"\]\((?!https?://|#)([^)]+)\)")


def run(*command, root=ROOT, **environment):
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=root,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"[-3000:]
    return done.stdout


def build(root, folder):
    """The wheel and the sdist of a checkout."""
    environment = {"SOURCE_DATE_EPOCH": "1700000000", "REPOSITORY_URL": REPOSITORY}
    run("hatchling", "build", "-d", str(folder), root=root, **environment)
    wheel, sdist = sorted(folder.iterdir(), key=lambda file: file.suffix, reverse=True)
    return wheel, sdist


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    for name in ("hatchling", "twine"):
        if importlib.util.find_spec(name) is None:
            pytest.skip("the dependency group release is not installed")
    return build(ROOT, tmp_path_factory.mktemp("built"))


@pytest.mark.slow
def test_archives_pass_the_checks_of_the_index(built):
    assert run("twine", "check", "--strict", *map(str, built)).count("PASSED") == 2


@pytest.mark.slow
def test_sdist_builds_the_same_again(built, tmp_path):
    """From its own sdist, elsewhere and at another time: the same bytes."""
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    assert not (root / "runs").exists() and not (root / ".venv").exists()
    for file in root.rglob("*.py"):
        os.utime(file)
    wheel, sdist = build(root, tmp_path / "again")
    assert wheel.read_bytes() == built[0].read_bytes()
    assert sdist.read_bytes() == built[1].read_bytes()
    (root / "keras_vit" / "paths.py").write_text("")
    shutil.rmtree(tmp_path / "again")
    wheel, _ = build(root, tmp_path / "again")
    assert wheel.read_bytes() != built[0].read_bytes()


@pytest.mark.slow
def test_page_of_the_index_has_absolute_links(built):
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith("METADATA"))
        metadata = wheel.read(name).decode()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    version = PROJECT["project"]["version"]
    links = RELATIVE.findall(readme)
    assert len(links) > 20 and RELATIVE.findall(metadata) == []
    assert f"]({REPOSITORY}/raw/v{version}/docs/images/readme.png)" in metadata
    assert f"]({REPOSITORY}/blob/v{version}/docs/vit.md)" in metadata
    assert f"Project-URL: Repository, {REPOSITORY}" in metadata


def test_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = PROJECT["project"]
    assert citation["cff-version"] == "1.2.0" and citation["message"]
    assert citation["version"] == project["version"] and citation["license"] == project["license"]
    assert [a["name"] for a in citation["authors"]] == [a["name"] for a in project["authors"]]
