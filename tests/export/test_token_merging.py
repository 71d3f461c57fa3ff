"""Exports that merge tokens: verified, held to the accuracy of the model, honest about ties."""

import dataclasses

import numpy as np
import pytest
from conformance import TINY, images, randomize, run

import keras_vit
from keras_vit import ViT, runtime
from keras_vit.export import verify
from keras_vit.export.fold import fold
from keras_vit.export.onnx.operators import to_onnx
from keras_vit.runtime.base import Runtime

CONFIG = TINY.replace(image_size=(40, 24), depth=3, pooling="mean")  # 15 patches


def model_of(**changes):
    return randomize(ViT(CONFIG.replace(**changes)))


def labels_of(model, x):
    return run(model, x).argmax(-1)


FREE, ON_TENSORFLOW = pytest.mark.backend_free, pytest.mark.only_on("tensorflow")
TARGETS = {"onnx": FREE, "openvino": FREE, "tflite": FREE, "saved_model": ON_TENSORFLOW}


@pytest.mark.parametrize(
    "target", [pytest.param(target, marks=mark) for target, mark in TARGETS.items()]
)
def test_an_export_merges_and_its_accuracy_is_compared_with_the_model(tmp_path, target):
    model, x = model_of(), images(CONFIG, 8)
    place = {"onnx": "a.onnx", "openvino": "a.xml", "tflite": "a.tflite", "saved_model": "a"}
    export = getattr(keras_vit, f"export_{target}")
    given = {"token_merging": 2, "accuracy_data": (x, labels_of(model, x))}
    given |= {"output": "logits"} if target == "tflite" else {}
    made = export(model, tmp_path / place[target], max_drop=100, **given)
    assert made.accuracy.reference.top_1 == 1 and made.accuracy.reference.images == 8
    opened = runtime.open(tmp_path / place[target])
    assert opened.config.token_merging == 2 and made.verification.near_ties == 0
    merging = keras_vit.with_token_merging(model, 2)
    difference = np.abs(opened.logits(x) - run(merging, x)).max()
    assert difference < 1e-5 * np.ptp(run(merging, x))
    assert np.abs(opened.logits(x) - run(model, x)).max() > 1e-3  # negative control
    # With labels that merging changes, the gate closes and nothing is left.
    changed = images(CONFIG, 256)
    wanted, found = run(model, changed).argmax(-1), run(merging, changed).argmax(-1)
    data = (changed[wanted != found], wanted[wanted != found])
    assert len(data[1])
    given["accuracy_data"] = data
    with pytest.raises(ValueError, match="must lose at most max_drop=1 points"):
        export(model, tmp_path / f"b_{place[target]}", **given)
    assert not [file for file in tmp_path.iterdir() if file.name.startswith("b_a.")]


@pytest.mark.backend_free
def test_without_an_option_the_graph_is_the_same():
    model = model_of()
    merging = keras_vit.with_token_merging(model, 2)
    graph = to_onnx(fold(model)).SerializeToString(deterministic=True)
    again = to_onnx(fold(keras_vit.with_token_merging(merging, 0)))
    assert again.SerializeToString(deterministic=True) == graph
    kinds = {node.op_type for node in to_onnx(fold(model)).graph.node}
    assert not kinds & {"TopK", "OneHot", "ArgMax", "Log"}
    assert {"TopK", "OneHot", "ArgMax"} <= {n.op_type for n in to_onnx(fold(merging)).graph.node}


@pytest.mark.only_on("tensorflow")
def test_fused_merges():
    model, x = model_of(), images(CONFIG)
    expected = run(keras_vit.with_token_merging(model, 2), x)
    found = keras_vit.fused(model, token_merging=2)(x)
    assert np.abs(found - expected).max() < 1e-5 * np.ptp(expected)
    np.testing.assert_array_equal(keras_vit.fused(model)(x), keras_vit.fused(model, "float32")(x))
    for dtype, bound in (("float32", 1e-5), ("bfloat16", 0.15)):
        same = keras_vit.fused(keras_vit.with_token_merging(model, 2), dtype)(x)
        assert np.abs(same - expected).max() < bound * np.ptp(expected)


class Shifted(Runtime):
    """The model's own logits, those of one image moved by a share of their range."""

    def __init__(self, model, image, share):
        super().__init__("", model.config)
        self.outputs = ("logits",)
        self._model, self._image, self._share = model, image, share
        self._seen = 0

    def _run(self, images, wanted="logits"):
        found = run(self._model, images).copy()
        place = self._image - self._seen
        if 0 <= place < len(found):
            found[place] += self._share * self._scale
        self._seen += len(found)
        return {"logits": found}

    def _engine(self):
        return "none"


def verified(monkeypatch, share, margins, bound=1e-5):
    model = model_of(token_merging=2)
    x = images(CONFIG, 6)
    reference = runtime.KerasRuntime(model)
    export = Shifted(model, 4, share)
    logits = run(model, x)
    export._scale = max(np.ptp(logits), np.abs(logits).max())
    monkeypatch.setattr(verify, "merging_margins", lambda model, images: np.array(margins))
    return verify.verify_export(reference, export, bound, x)


@pytest.mark.backend_free
def test_only_a_near_tie_excuses_a_difference(monkeypatch):
    assert verified(monkeypatch, 0.0, []).near_ties == 0
    seen = verified(monkeypatch, 0.05, [1e-6])
    assert seen.near_ties == 1 and seen.difference > 0.04 * seen.logits_range
    with pytest.raises(ValueError, match="at image 4"):  # it was clear what to merge
        verified(monkeypatch, 0.05, [1e-3])
    with pytest.raises(ValueError, match="at image 4"):  # too much for a tie
        verified(monkeypatch, 0.2, [1e-6])
    assert verified(monkeypatch, 0.12, [], bound=0.05).near_ties == 1  # rounding decides often
    with pytest.raises(ValueError, match="at image 4"):
        verified(monkeypatch, 0.16, [], bound=0.05)


@pytest.mark.backend_free
def test_a_broken_merge_is_noticed(tmp_path, monkeypatch):
    """Negative control: a graph that merges by other keys does not get its name."""
    from keras_vit.export.onnx import export as module

    def without_biases(model):
        folded = fold(model)
        blocks = [
            dataclasses.replace(b, key=dataclasses.replace(b.key, kernel=b.key.kernel[:, ::-1]))
            for b in folded.blocks
        ]
        return dataclasses.replace(folded, blocks=tuple(blocks))

    monkeypatch.setattr(module, "fold", without_biases)
    with pytest.raises(ValueError, match="must be the model's within"):
        keras_vit.export_onnx(model_of(), tmp_path / "a.onnx", token_merging=2)
    assert not list(tmp_path.iterdir())


def test_arguments_are_refused_by_the_rule_of_the_config(tmp_path):
    with pytest.raises(ValueError, match="token_merging must be an int >= 0"):
        keras_vit.export_onnx(model_of(), tmp_path / "a.onnx", token_merging=-1)
    with pytest.raises(ValueError, match="token_merging must be 0 with pooling='map'"):
        keras_vit.export_onnx(
            model_of(pooling="map", num_heads=4), tmp_path / "a.onnx", token_merging=1
        )
