"""timm's distilled DeiT, which has two heads, against timm's own code."""

import keras
import numpy as np
import pytest
import weights_sources as sources
from weights_sources import assert_same_logits, bare, images, logits, torch_logits, torch_output

import keras_vit
from keras_vit.weights.load import inspect


def distilled_vit():
    from timm.models.deit import VisionTransformerDistilled

    fields = {"img_size": 24, "patch_size": 8, "embed_dim": 20, "depth": 2, "num_heads": 5}
    return sources.randomize(VisionTransformerDistilled(**fields, mlp_ratio=1.4, num_classes=3))


def test_timm_distilled_logits_equal_source(tmp_path):
    source = distilled_vit()
    path = bare(tmp_path, sources.state(source))
    model = assert_same_logits(path, source, num_heads=5, wrong={"norm_epsilon": 0.1})
    assert model.config.pooling == "token_pair" and model.config.num_prefix_rows == 2

    # Both heads, as they are trained with a teacher; each is another function.
    features = model.features()
    both = keras.Model(features.input, model.get_layer("head")(features.output, separate=True))
    source.set_distilled_training()
    expected = torch_output(source.train(), images())  # without dropout
    np.testing.assert_allclose(logits(both, images()), np.stack(expected, axis=1), atol=1e-5)
    assert np.abs(expected[0] - expected[1]).max() > 1e-2

    tokens = torch_output(source.forward_features, images()).numpy()
    trunk = keras_vit.from_pretrained(path, num_heads=5, num_classes=0)
    pair = np.concatenate([tokens[:, 0], tokens[:, 1]], axis=1)
    np.testing.assert_allclose(logits(trunk, images()), pair, atol=1e-5)
    token = keras_vit.from_pretrained(path, num_heads=5, num_classes=0, pooling="token")
    np.testing.assert_allclose(logits(token, images()), tokens[:, 0], atol=1e-5)


def test_timm_distilled_at_another_resolution_equals_source(tmp_path):
    source = distilled_vit()
    path = bare(tmp_path, sources.state(source))
    model = keras_vit.from_pretrained(path, num_heads=5, image_size=(40, 32))
    source.set_input_size((40, 32))
    expected = torch_logits(source, images(40, 32))
    np.testing.assert_allclose(logits(model, images(40, 32)), expected, atol=1e-5)
    again = keras_vit.from_pretrained(path, num_heads=5).resized((40, 32))
    np.testing.assert_allclose(logits(again, images(40, 32)), expected, atol=1e-5)


@pytest.mark.backend_free
def test_timm_distilled_new_heads(tmp_path):
    path = bare(tmp_path, sources.state(distilled_vit()))
    new = inspect(path, num_heads=5, num_classes=7)
    assert set(new.dropped) == {
        f"{n}.{k}" for n in ("head", "head_dist") for k in ("weight", "bias")
    }
    assert set(new.dropped.values()) == {"replaced by a new head of 7 classes"}
    model = keras_vit.from_pretrained(path, num_heads=5, num_classes=7)
    assert [w.shape for w in model.get_layer("head").weights] == [(20, 7), (7,)] * 2
    with pytest.raises(ValueError, match=r"missing: '\(for head/kernel\)'.*"):
        keras_vit.from_pretrained(path, num_heads=5, pooling="token")


@pytest.mark.backend_free
def test_timm_distilled_round_trip_is_bitwise_and_timm_loads_it(tmp_path):
    import timm

    source = distilled_vit()
    arrays = sources.state(source)
    model = keras_vit.from_pretrained(bare(tmp_path, arrays), num_heads=5)
    folder = keras_vit.save_pretrained(model, tmp_path / "back", format="timm")
    sources.assert_same_file(folder / "model.safetensors", arrays)
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    np.testing.assert_allclose(
        torch_logits(again, images()), torch_logits(source, images()), atol=1e-6
    )
    assert keras_vit.from_pretrained(folder).config == model.config
    changed = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=5)
    assert changed.head_dist.weight.shape == (5, 20)
