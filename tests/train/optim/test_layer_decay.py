"""The factor of each weight. test_optimizer.py tests how optimizers use them."""

import keras
import pytest
from conformance import tiny_model

from keras_vit.train.objectives.distillation import Distillation
from keras_vit.train.optim.layer_decay import layer_factors, with_layer_factors


def test_layer_factors_agree_with_beit():
    model = tiny_model("registers", depth=3)
    factors = layer_factors(model, 0.5)
    wanted = {
        "patches/projection/kernel": 0.5**4,
        "class_token/tokens": 0.5**4,
        "registers/tokens": 0.5**4,
        "position_embedding/table": 0.5**4,
        "encoder_block_0/attention/query/kernel": 0.5**3,
        "encoder_block_1/mlp_norm/gamma": 0.5**2,
        "encoder_block_2/mlp/dense_1/bias": 0.5,
        "encoder_norm/gamma": 1.0,
        "head/kernel": 1.0,
    }
    assert {path: factors[path] for path in wanted} == wanted
    assert list(factors) == [v.path for v in model.weights]
    assert set(layer_factors(model, 1.0).values()) == {1.0}
    assert layer_factors(tiny_model("pre_logits"), 0.5)["pre_logits/kernel"] == 1.0
    hybrid = layer_factors(tiny_model("resnet_stem"), 0.5)
    assert {f for path, f in hybrid.items() if path.startswith("stem/")} == {0.5**3}
    distilled = layer_factors(tiny_model("distilled"), 0.5)
    assert distilled["distillation_token/tokens"] == 0.5**3
    assert distilled["head/class/kernel"] == distilled["head/distillation/kernel"] == 1.0


def test_layer_factors_are_those_of_the_trained_vit():
    student, teacher = tiny_model(depth=2), tiny_model(depth=5)
    alone = layer_factors(student, 0.5)
    factors = layer_factors(Distillation(student, teacher), 0.5)
    assert {path: factors[path] for path in alone} == alone
    assert factors["encoder_block_4/mlp/dense_1/kernel"] == 1.0  # the teacher's, not trained


def test_layer_factors_refuse_wrong_arguments():
    for decay in (0, 1.5):
        with pytest.raises(
            ValueError, match=rf"decay must be in \(0, 1\]. Received: decay={decay}"
        ):
            layer_factors(tiny_model(), decay)
    with pytest.raises(ValueError, match="model must have encoder blocks"):
        layer_factors(keras.Sequential(name="other"), 0.5)


def test_with_layer_factors_keeps_the_class_that_keras_would_make():
    cls = with_layer_factors(keras.optimizers.AdamW)
    assert issubclass(cls, type(keras.optimizers.AdamW()))
    assert cls is with_layer_factors(keras.optimizers.AdamW)
    factors = layer_factors(tiny_model(), 0.5)
    optimizer = cls(factors=factors, weight_decay=0.1)
    copy = cls.from_config(optimizer.get_config())
    assert copy.factors == factors and copy.weight_decay == 0.1
