"""The few-shot evaluation, compared with scikit-learn."""

import numpy as np
import pytest
from conformance import tiny_model, to_numpy
from feature_cases import CLASSES, WIDTH, batches, clusters
from sklearn.linear_model import Ridge

from keras_vit.train import few_shot

L2 = 7.0


@pytest.mark.backend_free
@pytest.mark.parametrize("count", [4, 11])  # fewer examples than features, and more
def test_solve_agrees_with_scikit_learns_ridge(count):
    rng = np.random.default_rng(count)
    x, y = rng.normal(size=(count, WIDTH)), rng.normal(size=(count, CLASSES))
    ridge = Ridge(alpha=L2, fit_intercept=False).fit(x, y)
    np.testing.assert_allclose(few_shot.solve(x, y, L2), ridge.coef_.T, atol=1e-10)
    # The negative control.
    assert np.abs(few_shot.solve(x, y, 1.1 * L2) - ridge.coef_.T).max() > 1e-4


@pytest.mark.backend_free
@pytest.mark.parametrize("shots", [1, 5])
def test_accuracy_is_that_of_ridge_on_the_drawn_examples(shots):
    (x, y), (test_x, test_y) = clusters(60, seed=0), clusters(300, seed=1)
    rng = np.random.default_rng(2)
    few = np.concatenate([rng.permutation(np.flatnonzero(y == c))[:shots] for c in range(CLASSES)])
    mean, std = x[few].mean(0), x[few].std(0) + 1e-5

    def features(values):
        return np.column_stack([(values - mean) / std, np.full(len(values), 100.0)])

    ridge = Ridge(alpha=L2, fit_intercept=False).fit(
        features(x[few]), 2 * np.eye(CLASSES)[y[few]] - 1
    )
    wanted = np.mean(ridge.predict(features(test_x)).argmax(-1) == test_y)
    accuracy = few_shot.few_shot_accuracy(x, y, test_x, test_y, shots, seed=2, l2=L2)
    assert accuracy == pytest.approx(wanted)
    assert accuracy > 1 / CLASSES + 0.05
    # The negative control: shuffled labels.
    shuffled = np.random.default_rng(3).permutation(y)
    chance = few_shot.few_shot_accuracy(x, shuffled, test_x, test_y, shots, seed=2, l2=L2)
    assert chance < accuracy


@pytest.mark.backend_free
def test_accuracy_grows_with_shots_and_depends_on_the_draw():
    data = (*clusters(300, seed=0), *clusters(600, seed=1))
    accuracies = [
        np.mean([few_shot.few_shot_accuracy(*data, shots, seed) for seed in range(3)])
        for shots in (1, 5, 25)
    ]
    assert accuracies == sorted(accuracies) and accuracies[0] < accuracies[-1]
    draws = {few_shot.few_shot_accuracy(*data, 1, seed) for seed in range(3)}
    assert len(draws) > 1
    assert few_shot.few_shot_accuracy(*data, 1, 2) in draws  # the same seed draws the same examples


@pytest.mark.backend_free
def test_whitening_makes_the_scale_of_a_feature_irrelevant():
    (x, y), (test_x, test_y) = clusters(60, seed=0), clusters(300, seed=1)
    scale = np.logspace(-1, 3, WIDTH)
    a = few_shot.few_shot_accuracy(x, y, test_x, test_y, 5)
    b = few_shot.few_shot_accuracy(scale * x + 7, y, scale * test_x + 7, test_y, 5)
    assert a == pytest.approx(b, abs=0.02)
    # The negative control: only the test set is scaled.
    assert few_shot.few_shot_accuracy(x, y, scale * test_x + 7, test_y, 5) < a - 0.1


@pytest.mark.backend_free
def test_accuracy_with_labels_that_have_gaps_and_classes_that_have_few():
    x, y = clusters(60, seed=0, noise=0.2)
    keep = np.concatenate([np.flatnonzero(y == 0)[:2], np.flatnonzero(y != 0)])
    accuracy = few_shot.few_shot_accuracy(x[keep], 3 * y[keep], x, 3 * y, 5, l2=L2)
    assert accuracy > 0.9
    with pytest.raises(ValueError, match="shots must be a positive int. Received: shots=0"):
        few_shot.few_shot_accuracy(x, y, x, y, 0)


def test_evaluate_reads_the_features_before_the_head():
    model = tiny_model(depth=1, pooling="mean", final_norm="after_pooling")
    train, test = batches(model.config, 24, seed=0), batches(model.config, 14, seed=1)
    results = few_shot.evaluate_few_shot(model, train, test, shots=(1, 4), seeds=2, l2=L2)
    assert list(results) == ["few_shot_1", "few_shot_4"]

    def arrays(data):
        x, y = (np.concatenate(part) for part in zip(*data.as_numpy_iterator(), strict=True))
        return to_numpy(model.features()(x)), y.argmax(-1)

    data = (*arrays(train), *arrays(test))
    wanted = [few_shot.few_shot_accuracy(*data, 4, seed, L2) for seed in range(2)]
    assert results["few_shot_4"] == pytest.approx(np.mean(wanted))
    assert results["few_shot_4"] > 0.8
    # The negative control: features that are all equal.
    model.get_layer("encoder_norm").gamma.assign(0 * model.get_layer("encoder_norm").gamma)
    assert few_shot.evaluate_few_shot(model, train, test, (4,), 1, L2)["few_shot_4"] < 0.5


@pytest.mark.backend_free
def test_evaluate_needs_one_vector_an_image():
    model = tiny_model("all_tokens")
    with pytest.raises(ValueError, match="one feature vector an image"):
        few_shot.evaluate_few_shot(model, [], [])


def test_pixels_that_were_not_normalized_are_refused():
    model = tiny_model(depth=1)
    raw = [(np.linspace(0, 255, 2 * 24 * 16 * 3).reshape(2, 24, 16, 3), np.eye(3)[:2])]
    with pytest.raises(ValueError, match=r"images must hold pixels normalized.*in \[0, 255\]"):
        few_shot.evaluate_few_shot(model, raw, raw)
