"""An opened ONNX file: it agrees with the model; other files are refused."""

import json
import sys
import warnings

import numpy as np
import pytest
from conformance import images, run, tiny_model

from keras_vit import preprocessing, runtime
from keras_vit.export.onnx.export import export_onnx
from keras_vit.runtime.onnx import OnnxRuntime
from keras_vit.serve.engines import open_engine

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.backend_free


@pytest.fixture(scope="module")
def model():
    return tiny_model(labels=("cat", "dog", "élan vital"))


@pytest.fixture(scope="module")
def path(model, tmp_path_factory):
    return export_onnx(model, tmp_path_factory.mktemp("onnx") / "tiny.onnx").path


def test_onnx_runtime_agrees_with_the_model(model, path):
    opened = runtime.open(path)
    assert isinstance(opened, OnnxRuntime) and opened.kind == "onnx"
    assert opened.config == model.config and opened.labels == model.config.labels
    x = images(model.config, 35)  # more than it runs at once
    logits = opened.logits(x)
    np.testing.assert_allclose(logits, run(model, x), atol=2e-5)
    assert np.abs(logits - run(model, x[::-1])).max() > 1e-2
    np.testing.assert_allclose(
        opened.probabilities(x), runtime.KerasRuntime(model).probabilities(x), atol=1e-5
    )
    np.testing.assert_allclose(opened.features(x), run(model.features(), x), atol=2e-5)
    one = OnnxRuntime(path, num_threads=1)
    np.testing.assert_allclose(one.logits(x[:2]), logits[:2], atol=1e-5)


def test_onnx_runtime_accepts_pixels_and_empty_batches(model, path):
    opened = OnnxRuntime(path)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 24, 16, 3), dtype=np.uint8)
    floats = preprocessing.preprocess(pixels, model.config)
    np.testing.assert_array_equal(opened.logits(pixels), opened.logits(floats))
    assert opened.logits(pixels[:0]).shape == (0, 3)
    assert opened.features(pixels[:0]).shape == (0, 20)
    for wrong in (pixels[:, :-1], pixels[0], pixels.astype("int32")):
        with pytest.raises(ValueError, match="images must be floats.*Received"):
            opened.logits(wrong)


def test_onnx_runtime_refuses_other_files(path, tmp_path):
    file = tmp_path / "other.onnx"
    with pytest.raises(FileNotFoundError, match="path must be a file"):
        OnnxRuntime(file)
    file.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="path must be an ONNX file that ONNX Runtime"):
        OnnxRuntime(file)
    content = onnx.load(path)
    (record,) = (item for item in content.metadata_props if item.key == "keras_vit")
    record.value = record.value.replace('"format": 1', '"format": 2')
    onnx.save(content, file)
    with pytest.raises(ValueError, match="file of format 1.*Received: format 2"):
        OnnxRuntime(file)
    del content.metadata_props[:]
    onnx.save(content, file)
    with pytest.raises(ValueError, match="with metadata.*Received"):
        OnnxRuntime(file)
    for wrong in (0, True, 1.5):
        with pytest.raises(ValueError, match="num_threads must be"):
            OnnxRuntime(path, num_threads=wrong)
    content = onnx.load(path)
    (features,) = (output for output in content.graph.output if output.name == "features")
    content.graph.output.remove(features)
    onnx.save(content, file)
    with pytest.raises(ValueError, match="return features, logits, probabilities.*Received"):
        OnnxRuntime(file)
    content = onnx.load(path)
    (record,) = (item for item in content.metadata_props if item.key == "keras_vit")
    record.value = record.value.replace('"images": "float32"', '"images": "uint8"')
    onnx.save(content, file)
    with pytest.raises(ValueError, match=r"take images as one tensor\(uint8\).*Received.*float"):
        OnnxRuntime(file)


def test_onnx_runtime_that_is_not_installed_is_named(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"onnxruntime must be installed.*keras3-vit\[onnx\]"):
        OnnxRuntime(path)


def test_onnx_file_with_absurd_numbers_is_refused(model, path, tmp_path):
    changed = tmp_path / "x.onnx"
    fields = model.config.to_dict()
    for config, message in (
        ({**fields, "width": 2**31}, "width must be at most .* as '.*x.onnx' states"),
        ({**fields, "image_size": [4096, 4096]}, r"images of the size in its config, \(4096"),
        ([], "state config as an object"),
    ):
        file = onnx.load(path)
        (entry,) = (p for p in file.metadata_props if p.key == "keras_vit")
        entry.value = json.dumps({**json.loads(entry.value), "config": config})
        onnx.save(file, changed)
        with pytest.raises(ValueError, match=message):
            runtime.open(changed)


def test_rows_of_a_quantized_file_do_not_depend_on_the_batch(model, tmp_path):
    x = images(model.config, 4)
    odd = x[:1].copy()
    odd[0, 0, 0, 0] = -1e4  # it widens the scale of what the first product reads
    joined = np.concatenate([x, odd])
    for mode, options in (("dynamic", {}), ("int8", {"calibration": images(model.config, 20)})):
        path = export_onnx(model, tmp_path / f"{mode}.onnx", quantize=mode, bound=5, **options).path
        opened = OnnxRuntime(path)
        engine = open_engine(path)  # of a server, which joins requests
        for run_images in (opened.logits, lambda x, e=engine: e.run(x, "scores")["logits"]):
            alone = np.concatenate([run_images(x[i : i + 1]) for i in range(4)])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the odd image is no photograph
                np.testing.assert_array_equal(run_images(joined)[:4], alone)
        # Negative control: in one call of the engine, the odd image changes the others.
        opened.at_once = 5
        assert np.abs(opened._run(joined)["logits"][:4] - alone).max() > 0.05
