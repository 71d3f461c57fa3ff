"""The ConvNet that teaches `cifar10_distill`."""

import keras
import numpy as np
import pytest
from conformance import run, to_numpy

import keras_vit
from keras_vit.train import Distillation
from keras_vit.train.data.sources import Source
from keras_vit.train.data.splits import IndexedSplit
from training import convnet

pytestmark = pytest.mark.backend_free


def test_convnet_is_trained_and_teaches(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    split = IndexedSplit(images, rng.integers(0, 10, 12))
    source = Source("random", None, 10, (32, 32, 3), split, split)
    monkeypatch.setattr(keras_vit.train, "open_source", lambda data: source)
    assert convnet.main([str(tmp_path), "--epochs=1", "--batch-size=6"]) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path}/convnet.keras: 1,147,978 parameters, " in said and "% of the test" in said
    teacher = keras.saving.load_model(tmp_path / "convnet.keras")
    student = keras_vit.ViT(
        keras_vit.ViTConfig(
            image_size=32, patch_size=8, width=8, depth=1, num_heads=2, mlp_dim=8, num_classes=10
        )
    )
    batch = (images[:2] / 127.5 - 1).astype("float32")
    heard = Distillation(student, teacher)(batch)["teacher_logits"]
    np.testing.assert_allclose(to_numpy(heard), run(teacher, batch), rtol=1e-5, atol=1e-5)
    fresh = convnet.convnet(student.config, "mixed_bfloat16")
    assert not np.allclose(run(fresh, batch), to_numpy(heard), atol=1e-3)


def test_folded_convnet_is_the_one_that_was_trained():
    config = keras_vit.ViTConfig(image_size=32, num_classes=10)
    model = convnet.convnet(config, "float32")
    rng = np.random.default_rng(0)
    for variable in model.variables:  # moving averages too
        variable.assign(rng.uniform(0.5, 1.5, variable.shape))
    x = rng.uniform(-1, 1, (2, 32, 32, 3)).astype("float32")
    expected = run(model, x)
    folded = convnet.folded(model, config, "float32")
    assert len(folded.layers) < len(model.layers)
    np.testing.assert_allclose(run(folded, x), expected, rtol=1e-3)
    assert np.abs(run(convnet.convnet(config, "float32"), x) - expected).max() > 1
