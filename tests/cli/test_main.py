"""The `keras-vit` command: what it prints and writes, how it fails, and how fast it starts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_vit
from keras_vit import backend, cli, cli_info
from keras_vit.weights import known
from keras_vit.weights.formats import WRITTEN

ROOT = Path(__file__).parents[1]
TINY = {
    **{"image_size": (24, 16), "patch_size": 8, "width": 20, "num_heads": 5, "depth": 2},
    **{"mlp_dim": 28, "num_classes": 3},
}


@pytest.fixture(scope="module")
def model():
    model = keras_vit.ViT(keras_vit.ViTConfig(**TINY))
    rng = np.random.default_rng(3)
    for weight in model.weights:
        weight.assign(rng.normal(0, 0.5, weight.shape))
    return model


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return keras_vit.save_pretrained(model, tmp_path_factory.mktemp("cli") / "tiny", "timm")


@pytest.fixture
def run(monkeypatch, capsys):
    """Calls the command in this process: (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["keras-vit", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        captured = capsys.readouterr()
        return end.value.code or 0, captured.out, captured.err

    return call


def logits(model):
    images = np.random.default_rng(5).normal(size=(2, *model.config.input_shape))
    return keras.ops.convert_to_numpy(model(images.astype("float32")))


# -- models


def test_models_lists_rows_for_a_pipe(run):
    code, out, _ = run("models", "vit_b16", "DINO")
    assert code == 0
    fields = [line.split("\t") for line in out.splitlines()]
    assert [f[0] for f in fields] == [row.name for row in known.search("vit_b16 dino")]
    assert fields[0][1] == "hf://timm/vit_base_patch16_224.dino"


@pytest.mark.parametrize("columns", ["60", "80", "130"])
def test_models_never_cuts_a_name_on_a_terminal(monkeypatch, run, columns):
    monkeypatch.setattr(cli, "out", cli.Console(force_terminal=True, width=int(columns)))
    code, out, _ = run("models")
    assert code == 0
    assert all(name in out for name in known.KNOWN)
    assert ("license" in out) == (columns == "130")


def test_models_json_has_every_field(run):
    code, out, _ = run("models", "--json")
    assert code == 0
    assert [known.Known(**row) for row in json.loads(out)] == list(known.KNOWN.values())


def test_models_without_a_match_names_near_ones(run):
    code, out, err = run("models", "vit_b14.dinov3")
    assert (code, out) == (1, "")
    assert "vit_b14.dinov2_lvd142m_518" in err and "Received: text='vit_b14.dinov3'" in err


# -- info


def test_info_says_what_it_is(run, folder):
    code, out, _ = run("info", folder)
    assert code == 0
    said = {line[:12].strip(): line[12:].strip() for line in out.splitlines() if line[:1] != " "}
    assert said["format"] == "timm"
    assert said["read"] == "32 of 32 arrays"
    assert said["model"].startswith("24 x 16 x 3, patch 8, width 20")
    assert said["pixels"] == "bilinear to 24 x 16; (pixel / 255 - 0.5) / 0.5"


def test_info_json_has_the_config(run, model, folder):
    code, out, _ = run("info", folder, "--json")
    facts = json.loads(out)
    assert code == 0 and facts["loadable"] and facts["known"] is None
    assert facts["parameters"] == model.count_params()
    assert keras_vit.ViTConfig.from_dict(facts["config"]) == model.config.replace(
        interpolation="timm"
    )


def test_info_of_an_incomplete_file_lists_what_is_missing(run, folder, tmp_path):
    from safetensors.numpy import load_file, save_file

    arrays = load_file(folder / "model.safetensors")
    del arrays["norm.bias"]
    arrays["stray"] = np.ones(3, "float32")
    shutil.copy(folder / "config.json", tmp_path)
    save_file(arrays, tmp_path / "model.safetensors")
    code, out, _ = run("info", tmp_path, "--json")
    facts = json.loads(out)
    assert code == 0 and not facts["loadable"]
    assert facts["missing"] == ["norm.bias"] and facts["extra"] == ["stray"]


def test_info_of_a_keras_file(run, model, tmp_path):
    model.save(tmp_path / "a.keras")
    code, out, _ = run("info", tmp_path / "a.keras", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["format"] == "keras"
    assert keras_vit.ViTConfig.from_dict(facts["config"]) == model.config


def test_info_says_how_a_picture_is_cut():
    config = keras_vit.ViTConfig(image_size=224, crop_fraction=0.875, resize_method="bicubic")
    said = cli_info.pixels(config)
    assert said.startswith("bicubic to cover 256 x 256, the centre of 224 x 224; ")


# -- convert


@pytest.mark.parametrize("to", ["timm", "huggingface", "keras"])
def test_convert_there_and_back(run, model, folder, tmp_path, to):
    target = tmp_path / ("a.keras" if to == "keras" else "a")
    code, out, err = run("convert", folder, target, "--format", to)
    assert (code, err) == (0, "")
    code, back, _ = run("convert", out.strip(), tmp_path / "b.keras", "--format", "keras")
    assert code == 0
    loaded = keras.saving.load_model(back.strip())
    np.testing.assert_allclose(logits(loaded), logits(model), atol=1e-5)
    assert np.abs(logits(loaded) - logits(model)[::-1]).max() > 0.1


def test_convert_with_another_size_and_head(run, folder, tmp_path):
    arguments = ("--num-classes", 7, "--image-size", "32x24")
    code, out, err = run("convert", folder, tmp_path / "a", "--format", "timm", *arguments, "-v")
    assert code == 0
    assert "new" in err and "resampled" in err  # the log
    config = keras_vit.from_pretrained(out.strip()).config
    assert (config.num_classes, config.image_size) == (7, (32, 24))


def test_convert_does_not_overwrite(run, folder, tmp_path):
    for name, to in (("a", "timm"), ("b", "torchvision")):  # a folder, and b.safetensors
        arguments = ("convert", folder, tmp_path / name, "--format", to, "--image-size", 24)
        assert run(*arguments)[0] == 0
        code, _, err = run(*arguments)
        assert code == 1 and "target must not exist, or --overwrite" in err
        assert run(*arguments, "--overwrite")[0] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b.safetensors"]


def test_convert_writes_nothing_where_it_fails(run, folder, tmp_path):
    code, _, err = run("convert", folder, tmp_path / "a", "--format", "google")
    assert code == 1 and "gelu must be 'tanh'" in err
    assert run("convert", folder, tmp_path / "a.h5", "--format", "keras")[0] == 1
    assert run("convert", tmp_path / "none", tmp_path / "a", "--format", "timm")[0] == 1
    assert list(tmp_path.iterdir()) == []


def test_convert_knows_every_format():
    assert {t.value for t in cli.Target} == {*WRITTEN, "keras"}


# -- errors and the log


def test_error_is_one_line(run, tmp_path):
    code, out, err = run("info", tmp_path / "none.npz")
    assert (code, out) == (1, "")
    assert err.startswith("keras-vit: error: source must be a path") and err.count("\n") == 1


def test_error_with_debug_is_a_traceback(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["keras-vit", "info", str(tmp_path / "none.npz"), "--debug"])
    with pytest.raises(FileNotFoundError):
        cli.main()


def test_error_of_a_kind_that_is_not_expected_says_so(run, monkeypatch):
    monkeypatch.setattr(known, "search", lambda text: 1 / 0)
    code, _, err = run("models")
    assert code == 1 and "ZeroDivisionError: division by zero (see --debug)" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("info",),
        ("convert", "a", "b"),
        ("convert", "a", "b", "--format", "caffe"),
        ("convert", "a", "b", "--format", "timm", "--image-size", "big"),
    ],
)
def test_usage_error_is_exit_code_2(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and "Usage: keras-vit" in err


def test_version_is_the_package_s(run):
    code, out, _ = run("--version")
    assert (code, out) == (0, f"keras-vit {keras_vit.__version__}\n")


# -- starting


def start(*arguments, **environment):
    """The installed command in a process of its own; the last line is what it imported."""
    code = (
        "import sys, keras_vit_cli\n"
        f"sys.argv = ['keras-vit', *{arguments!r}]\n"
        "try:\n    keras_vit_cli.main()\n"
        "finally:\n    print([m for m in ('keras', 'huggingface_hub') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )


def test_start_without_keras(tmp_path):
    run = start("models", "vit_b16.dino")
    assert run.returncode == 0
    row, modules = run.stdout.splitlines()
    assert row.startswith("vit_b16.dino\thf://timm/") and modules == "[]"
    run = start("info", str(tmp_path / "none.npz"))
    assert (run.returncode, run.stdout) == (1, "[]\n")
    assert run.stderr.startswith("keras-vit: error: ") and run.stderr.count("\n") == 1


def test_start_with_keras(folder):
    """The bare package gives way to the whole one. JAX, because it is the quickest to import."""
    run = start("info", str(folder), KERAS_BACKEND="jax")
    assert run.returncode == 0, run.stderr
    assert "32 of 32 arrays" in run.stdout and "'keras'" in run.stdout.splitlines()[-1]


@pytest.mark.slow
def test_start_converts(folder, tmp_path):
    run = start("convert", str(folder), str(tmp_path / "a.keras"), "--format", "keras")
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0] == str(tmp_path / "a.keras")
    assert keras.saving.load_model(tmp_path / "a.keras").config.width == 20


@pytest.mark.parametrize(
    ("installed", "chosen", "settings", "expected"),
    [
        (("tensorflow", "jax"), None, None, None),  # Keras' own default
        (("jax", "torch"), None, None, "jax"),
        (("torch",), None, None, "torch"),
        (("torch",), "jax", None, "jax"),  # the user's word stands
        (("tensorflow", "jax"), None, "jax", None),
        (("tensorflow",), None, "jax", "tensorflow"),
    ],
)
def test_backend_chosen_is_installed(
    monkeypatch, tmp_path, caplog, installed, chosen, settings, expected
):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("KERAS_BACKEND", chosen or "")
    if settings:
        (tmp_path / "keras.json").write_text(json.dumps({"backend": settings}))
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: name in installed or None)
    backend.choose()
    assert (os.environ["KERAS_BACKEND"] or None) == expected
    assert bool(caplog.messages) == (expected is not None and not chosen)


def test_backend_missing_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("KERAS_BACKEND", "")
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'keras3-vit\[jax\]'"):
        backend.choose()
