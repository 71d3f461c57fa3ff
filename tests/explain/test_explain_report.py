"""The page: its numbers agree with the arrays, it omits what does not apply, and it is safe."""

import base64
import html
import json
import os
import re

import keras
import numpy as np
import pytest
from conformance import KINDS, run, tiny_model
from PIL import Image

from keras_vit import explain, preprocessing
from keras_vit.explain import report

pytestmark = pytest.mark.backend_free

ATTACK = "</script><img src=x onerror=alert(1)><!--"


def pixels(config, size=(40, 30), seed=0):
    shape = size if config.in_channels == 1 else (*size, config.in_channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def written(model, folder, image=None, **options):
    """The page as text, and its data."""
    image = pixels(model.config) if image is None else image
    path = explain.write_report(model, image, folder / "page.html", **options)
    text = path.read_text(encoding="utf-8")
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return text, json.loads(block)


def levels(text, *shape, dtype="uint8"):
    return np.frombuffer(base64.b64decode(text), dtype).reshape(shape)


APPLIES = ("map", "no_class_token", "all_tokens", "registers_only", "no_positions", "features")


@pytest.mark.parametrize("kind", APPLIES)
def test_report_has_the_parts_that_apply_to_the_model(tmp_path, kind):
    model = tiny_model(kind)
    config = model.config
    _, data = written(model, tmp_path)
    classified = kind not in ("features", "all_tokens")
    assert (data["prediction"] is not None) == classified
    assert (data["gradients"] is not None) == classified
    assert (data["positions"] is not None) == (kind != "no_positions")
    assert (data["poolingMap"] is not None) == (kind == "map")
    assert data["filters"] is not None and data["features"]["colors"] is not None
    assert data["grid"] == list(config.grid)
    assert data["attention"]["queries"] == config.num_tokens
    assert data["mostEntropy"] == pytest.approx(np.log(config.num_tokens))


def test_report_numbers_agree_with_the_arrays(tmp_path):
    model = tiny_model(labels=("cat", "dog", "emu"))
    config = model.config
    image = pixels(config)
    x = preprocessing.preprocess(image, config)
    _, data = written(model, tmp_path, image, top_k=2)
    scores = np.asarray(keras.ops.softmax(run(model, x)))[0]
    best = np.argsort(-scores)[:2].tolist()
    assert [c["class"] for c in data["prediction"]] == best
    assert [c["label"] for c in data["prediction"]] == [config.labels[i] for i in best]
    found = [c["score"] for c in data["prediction"]]
    np.testing.assert_allclose(found, scores[best], atol=1e-6)

    maps = explain.attention_maps(model, x)[:, 0]  # (L, h, T, T)
    shape = (2, 5, 7, 6)
    peaks = levels(data["attention"]["peaks"], *shape[:3], dtype="<f4")
    drawn = levels(data["attention"]["levels"], *shape) / 255 * peaks[..., None]
    np.testing.assert_allclose(drawn, maps[..., 1:], atol=0.5 / 255 * peaks.max() + 1e-6)
    assert np.abs(drawn - maps[::-1, ..., 1:]).max() > 0.05
    sums = levels(data["attention"]["sums"], *shape[:3], dtype="<f4")
    np.testing.assert_allclose(sums, 1 - maps[..., 0], atol=1e-5)

    for name, values in (
        ("rollout", explain.rollout_map(model, x)[0]),
        ("gradCam", explain.grad_cam(model, x, best[1])[0]),
        ("attentionGradient", explain.attention_gradient(model, x, best[1])[0]),
    ):
        kept = data["rollout"] if name == "rollout" else data["gradients"][name][1]
        assert kept["peak"] == pytest.approx(values.max(), rel=1e-4, abs=1e-7)
        wanted = values / (values.max() or 1)
        np.testing.assert_allclose(levels(kept["levels"], 3, 2) / 255, wanted, atol=3e-3)
    np.testing.assert_allclose(data["distance"], explain.attention_distance(model, x), atol=1e-4)
    np.testing.assert_allclose(data["entropy"], explain.attention_entropy(model, x), atol=1e-4)

    low = data["positions"]["low"]
    kept = levels(data["positions"]["levels"], 3, 2, 3, 2) / 255 * (1 - low) + low
    np.testing.assert_allclose(kept, explain.position_similarity(model), atol=5e-3)
    kept = levels(data["features"]["colors"], 3, 2, 3) / 255
    np.testing.assert_allclose(kept, explain.patch_pca(model, x)[0], atol=5e-3)
    kept = levels(data["features"]["similarity"], 3, 2, 3, 2) / 255
    cosines = explain.region_similarity(model, x)[0]
    np.testing.assert_allclose(kept, np.maximum(cosines, 0), atol=5e-3)


def test_report_of_a_large_model_keeps_the_class_token_s_attention(tmp_path, monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(report, "MOST_ATTENTION", 2 * 5 * 7 * 6 - 1)
    monkeypatch.setattr(report, "MOST_SIMILARITIES", 6 * 6 - 1)
    monkeypatch.setattr(report, "MOST_CELLS", 2)
    image = pixels(model.config)
    _, data = written(model, tmp_path, image)
    assert not data["attention"]["whole"] and data["features"]["similarity"] is None
    x = preprocessing.preprocess(image, model.config)
    maps = explain.class_token_maps(model, x)[:, 0].reshape(2, 5, 1, 6)
    peaks = levels(data["attention"]["peaks"], 2, 5, 1, dtype="<f4")
    np.testing.assert_allclose(peaks, maps.max(-1), atol=1e-6)
    kept = levels(data["attention"]["levels"], 2, 5, 1, 6) / 255 * peaks[..., None]
    np.testing.assert_allclose(kept, maps, atol=3e-3)
    assert (data["positions"]["rows"], data["positions"]["columns"]) == ([0, 2], [0, 1])
    assert len(levels(data["positions"]["levels"], -1)) == 2 * 2 * 6


def test_report_scores_are_the_models_own(tmp_path):
    model = tiny_model(classifier_activation="sigmoid")
    image = pixels(model.config)
    _, data = written(model, tmp_path, image)
    wanted = np.sort(run(model, preprocessing.preprocess(image, model.config))[0])[::-1]
    np.testing.assert_allclose([c["score"] for c in data["prediction"]], wanted, atol=1e-6)
    assert abs(wanted.sum() - 1) > 0.01


def test_report_escapes_labels_and_title(tmp_path):
    model = tiny_model(labels=(ATTACK, "a & b", "\u2028\ud800"))
    text, data = written(model, tmp_path, title=ATTACK)
    assert {c["label"] for c in data["prediction"]} == {ATTACK, "a & b", "\u2028\ud800"}
    assert data["title"] == ATTACK
    assert "<img" not in text and text.count("</script>") == 2
    assert text.count(html.escape(ATTACK)) == 2  # <title> and <h1>


def test_report_is_one_file_without_addresses(tmp_path):
    text, data = written(tiny_model(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    assert data["image"]["source"].startswith("data:image/png;base64,")
    assert not re.search(r"""(src|href)\s*=\s*["']|@import|url\(|fetch\(|XMLHttp""", text)
    addresses = set(re.findall(r"https?://[^\"'\s]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a namespace, not loaded
    assert "default-src 'none'" in text and "{{" not in text


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK", "1", "I;16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_report_shows_images_of_every_mode(mode, channels):
    config = KINDS["paper"].replace(in_channels=channels, crop_fraction=0.8)
    size = (300, 500) if mode == "L" else (60, 100)
    image = Image.fromarray(pixels(KINDS["paper"], size)).convert("L")
    image = image if mode in ("L", "I;16") else image.convert("RGB")
    image = image.convert(mode)
    shown = report.encoded_image(report.open_image(image, config))
    assert shown["size"] == list(image.size) and shown["small"] == (mode != "L")
    kind, content = shown["source"].removeprefix("data:image/").split(";base64,")
    assert kind == ("jpeg" if mode == "L" else "png") and len(base64.b64decode(content)) > 50
    # The crop of 24 x 16 is taken from the image at 30 x 50.
    np.testing.assert_allclose(shown["seen"], [17 / 50, 3 / 30, 16 / 50, 24 / 30])


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"model": "vit"}, "model must be a keras_vit.ViT"),
        ({"top_k": 0}, "top_k must be a positive int. Received: top_k=0"),
        ({"top_k": True}, "Received: top_k=True"),
        ({"path": "."}, "path must be a file"),
        ({"path": "cat.jpg"}, "name ends in .html or .htm. Received: path='cat.jpg'"),
        ({"path": "page"}, "Received: path='page'"),
        ({"image": np.zeros((4, 5, 2))}, "image must be"),
        ({"image": "nothing.png"}, "nothing.png: it cannot be read: No such file"),
    ],
)
def test_report_refuses_wrong_arguments(tmp_path, monkeypatch, changes, text):
    monkeypatch.chdir(tmp_path)
    arguments = {"model": tiny_model(), "image": pixels(KINDS["paper"]), "path": "page.html"}
    with pytest.raises(ValueError, match=re.escape(text)):
        explain.write_report(**{**arguments, **changes})
    assert os.listdir() == []


def test_report_that_fails_keeps_the_old_page(tmp_path, monkeypatch):
    model = tiny_model()
    model.blocks[1].attention.query_dense.kernel.assign(
        np.full(model.blocks[1].attention.query_dense.kernel.shape, np.nan)
    )
    (tmp_path / "page.html").write_text("old")
    with pytest.raises(ValueError, match="must give finite .* Received: NaN"):
        explain.write_report(model, pixels(model.config), tmp_path / "page.html")

    def fail(*_):
        raise OSError("no room")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no room"):
        explain.write_report(tiny_model(), pixels(model.config), tmp_path / "page.html")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("page.html", "old")]
