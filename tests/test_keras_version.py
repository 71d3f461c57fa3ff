"""The versions of Keras that are accepted, and the messages for other versions."""

import importlib
import tomllib
from pathlib import Path

import keras
import pytest

from keras_vit import keras_version

pytestmark = pytest.mark.backend_free

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


@pytest.mark.parametrize("version", ["2.15.0", "3.9.2", "3.15.0", "4.0.0"])
def test_keras_version_that_is_not_supported_is_an_error(version):
    message = rf"keras must be at least 3\.15\.1 and below 4\. .*keras {version}.*pip install"
    with pytest.raises(ImportError, match=message):
        keras_version.check_keras_version(version)


@pytest.mark.parametrize(("version", "warned"), [("3.15.1", 0), ("3.15.7", 0), ("3.16.0", 1)])
def test_keras_version_that_is_newer_is_a_warning(version, warned, caplog):
    keras_version.check_keras_version(version)
    assert len(caplog.messages) == warned
    assert all(f"keras {version} is newer than 3.15" in text for text in caplog.messages)


def test_keras_version_is_checked_at_import(monkeypatch):
    monkeypatch.setattr(keras, "__version__", "3.14.0")
    with pytest.raises(ImportError, match=r"Received: keras 3\.14\.0"):
        importlib.reload(keras_version)


def test_keras_version_agrees_with_pyproject():
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    (keras_,) = (line for line in project["dependencies"] if line.startswith("keras"))
    oldest = ".".join(map(str, keras_version.OLDEST))
    assert keras_ == f"keras>={oldest},<{keras_version.NEWEST[0] + 1}"
