"""What `serve-config` writes: parsed as what it is, and savedmodels/ holds just that."""

import json
from pathlib import Path

import pytest
import yaml
from google.protobuf import text_format
from typer.testing import CliRunner

from keras_vit.export.serving import config as serving
from keras_vit_cli.main import app

pytestmark = pytest.mark.backend_free

ROOT = Path(__file__).parents[3]
FILES = ["models.config", "batching.config", "docker-compose.yml", "README.md"]
# Of tensorflow_model_server, as its main.cc declares them.
FLAGS = {
    "port",
    "rest_api_port",
    "rest_api_timeout_in_ms",
    "model_config_file",
    "model_config_file_poll_wait_seconds",
    "enable_batching",
    "batching_parameters_file",
    "tensorflow_intra_op_parallelism",
    "tensorflow_inter_op_parallelism",
}


def model(folder, *versions):
    """A folder that looks like an exported model."""
    for version in versions or ("1",):
        (folder / version).mkdir(parents=True)
        (folder / version / "saved_model.pb").touch()
    return folder


def test_files_are_written_beside_the_model(tmp_path):
    paths = serving.write_serving_config(model(tmp_path / "flowers", "1", "12"))
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == FILES
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*FILES, "flowers"])


def test_models_config_is_a_model_server_config(tmp_path):
    messages = pytest.importorskip("tensorflow_serving.config.model_server_config_pb2")
    folders = [model(tmp_path / "flowers"), model(tmp_path / "old" / "trees.v-2")]
    path = serving.write_serving_config(folders, tmp_path)[0]
    config = text_format.Parse(path.read_text(), messages.ModelServerConfig())
    found = {m.name: m for m in config.model_config_list.config}
    assert {name: m.base_path for name, m in found.items()} == {
        "flowers": "/models/flowers",
        "trees.v-2": "/models/old/trees.v-2",
    }
    for m in found.values():
        assert m.model_platform == "tensorflow"
        assert m.model_version_policy.latest.num_versions == 1
    with pytest.raises(text_format.ParseError):
        text = path.read_text().replace("base_path", "basepath")
        text_format.Parse(text, messages.ModelServerConfig())


def test_batching_config_is_batching_parameters(tmp_path):
    from batching_config import BatchingParameters

    folder = model(tmp_path / "flowers")
    path = serving.write_serving_config(folder, max_batch_size=24, max_enqueued_batches=7)[1]
    found = text_format.Parse(path.read_text(), BatchingParameters())
    assert found.max_batch_size.value == 24
    assert found.batch_timeout_micros.value == 2000
    assert found.num_batch_threads.value == 2
    assert found.max_enqueued_batches.value == 7
    assert not found.allowed_batch_sizes
    assert "Here up to 168 images wait." in path.read_text()
    # A reason stands above each number.
    lines = path.read_text().splitlines()
    numbers = [i for i, line in enumerate(lines) if line and not line.startswith("#")]
    assert len(numbers) == 4
    assert all(lines[i - 1].startswith("# ") for i in numbers)
    with pytest.raises(text_format.ParseError):
        text_format.Parse("max_batch { value: 1 }", BatchingParameters())


def test_compose_file_starts_the_server_with_the_files(tmp_path):
    folders = [model(tmp_path / "flowers"), model(tmp_path / "trees")]
    path = serving.write_serving_config(folders)[2]
    (service,) = yaml.safe_load(path.read_text())["services"].values()
    assert service["image"] == serving.IMAGE and ":latest" not in service["image"]
    assert service["entrypoint"] == ["tensorflow_model_server"]
    assert service["volumes"] == [".:/models:ro"]
    assert service["ports"] == ["127.0.0.1:8500:8500", "127.0.0.1:8501:8501"]
    flags = dict(flag.removeprefix("--").split("=") for flag in service["command"])
    assert set(flags) <= FLAGS
    assert flags["port"] == "8500" and flags["rest_api_port"] == "8501"
    for flag in ("model_config_file", "batching_parameters_file"):
        assert (tmp_path / Path(flags[flag]).relative_to("/models")).is_file()
    assert flags["enable_batching"] == "true"
    assert service["environment"] == {"TF_ENABLE_ONEDNN_OPTS": "1"}
    check = service["healthcheck"]["test"][-1]
    assert "/v1/models/%s" in check and " flowers " in check and " trees " in check
    compose = serving.compose_file(["m"], serving.IMAGE, "::1")
    assert "[::1]:8500:8500" in yaml.safe_load(compose)["services"]["serving"]["ports"]


def test_files_of_the_repository_are_those_it_writes(tmp_path):
    serving.write_serving_config(model(tmp_path / "digits"))
    for name in FILES:
        committed = (ROOT / "savedmodels" / name).read_text()
        assert committed == (tmp_path / name).read_text(), f"savedmodels/{name}: write it again"


def test_edited_files_are_kept_unless_told(tmp_path):
    folder = model(tmp_path / "flowers")
    config = serving.write_serving_config(folder)[1]
    before = config.stat().st_mtime_ns
    serving.write_serving_config(folder)
    assert config.stat().st_mtime_ns == before
    config.write_text("max_batch_size { value: 4 }\n")
    said = r"--overwrite \(.*--out \(.*Received: batching\.config$"
    with pytest.raises(FileExistsError, match=said):
        serving.write_serving_config(folder)
    assert config.read_text() == "max_batch_size { value: 4 }\n"
    serving.write_serving_config(folder, overwrite=True)
    assert "value: 32" in config.read_text()
    assert not [p for p in tmp_path.iterdir() if ".tmp" in p.name]


def test_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    folder = model(tmp_path / "flowers")

    def full(*args):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr("os.replace", full)
        serving.write_serving_config(folder)
    assert [p.name for p in tmp_path.iterdir()] == ["flowers"]
    serving.write_serving_config(folder)


def test_models_must_be_exports(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "half" / "1").mkdir(parents=True)
    for folder in ("empty", "half", "none"):
        with pytest.raises(ValueError, match="must be folders that hold version folders"):
            serving.write_serving_config(tmp_path / folder)
    folder = model(tmp_path / "flowers")
    with pytest.raises(ValueError, match="must be folders that hold version folders"):
        serving.write_serving_config(tmp_path)
    with pytest.raises(ValueError, match="must lie inside out"):
        serving.write_serving_config(folder, tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="must have different names"):
        serving.write_serving_config([folder, model(tmp_path / "old" / "flowers")], tmp_path)
    for name in ('a"b', "a b", "a:b", "-a", "é"):
        with pytest.raises(ValueError, match="must have names of letters"):
            serving.write_serving_config(model(tmp_path / name))
    with pytest.raises(ValueError, match="plain names on their way"):
        serving.write_serving_config(model(tmp_path / 'x"y' / "m"), tmp_path)
    with pytest.raises(ValueError, match="at least one folder"):
        serving.write_serving_config([])


def test_numbers_fit_the_exports(tmp_path):
    folder = model(tmp_path / "flowers", "1", "2")
    said = {"max_batch_size": 48, "versions": {"tensorflow": "2.21.0"}}
    (folder / "2" / "MANIFEST.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match="max_batch_size must be at most 48, .*flowers.2 "):
        serving.write_serving_config(folder, max_batch_size=49)
    old, new = "tensorflow/serving:2.20.0", "my.host:5000/serving:2.22.1-gpu"
    with pytest.raises(ValueError, match="image must not be older than TensorFlow 2.21.0"):
        serving.write_serving_config(folder, image=old)
    assert [p.name for p in tmp_path.iterdir()] == ["flowers"]
    paths = serving.write_serving_config(folder, image=new, max_batch_size=48)
    assert new in paths[2].read_text()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_batch_size", 0),
        ("batch_timeout_micros", -1),
        ("num_batch_threads", 1.5),
        ("max_enqueued_batches", True),
        ("image", "tensorflow/serving"),
        ("image", 'x:1"\n'),
        ("address", "everywhere"),
    ],
)
def test_arguments_that_do_not_fit(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"{name} must.*Received: {name}="):
        serving.write_serving_config(model(tmp_path / "flowers"), **{name: value})
    assert [p.name for p in tmp_path.iterdir()] == ["flowers"]


def test_requests_need_not_wait_for_others(tmp_path):
    folder = model(tmp_path / "flowers")
    path = serving.write_serving_config(folder, batch_timeout_micros=0)[1]
    assert "batch_timeout_micros { value: 0 }" in path.read_text()
    with pytest.raises(ValueError, match="batch_timeout_micros must be an int of at least 0"):
        serving.write_serving_config(folder, batch_timeout_micros=-1, overwrite=True)


def test_command(tmp_path):
    folder = model(tmp_path / "flowers")
    done = CliRunner().invoke(app, ["serve-config", str(folder), "--max-batch-size", "8"])
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == [str(tmp_path / name) for name in FILES]
    assert "max_batch_size { value: 8 }" in (tmp_path / "batching.config").read_text()


def test_readme_sends_what_the_page_says(tmp_path):
    text = serving.write_serving_config(model(tmp_path / "flowers"))[3].read_text()
    (line,) = [line for line in text.splitlines() if line.strip().startswith("sed ")]
    body = line.split("|")[2].replace("&", "eA==")
    assert json.loads(body) == {"signature_name": "classify", "instances": [{"b64": "eA=="}]}
    assert "{" + "name}" not in text and "{{" not in text
    assert "was not run" in text
