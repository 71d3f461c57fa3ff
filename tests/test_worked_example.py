"""docs/worked-example.md: the page's code must print the page's numbers."""

import doctest
import math
import re
from pathlib import Path

import numpy as np
import pytest
from keras import ops

from keras_vit import ViT, ViTConfig

PAGE = Path(__file__).parent.parent / "docs" / "worked-example.md"
TEXT = PAGE.read_text(encoding="utf-8")

FIRST_PATCH = [0.2, -0.5, 0.8, 0.1, -0.3, 0.6, 0.9, -0.2]  # zeros times E, plus the bias
FIRST_POSITION = [0.1, 0.2, -0.1, 0.3, -0.2, 0.4, 0.1, -0.3]
FIRST_TOKEN = [0.3, -0.3, 0.7, 0.4, -0.5, 1.0, 1.0, -0.5]


def split_page(text):
    """The page's console blocks and its prose, each with empty lines in place of the other."""
    code, prose, inside = [], [], False
    for line in text.splitlines():
        fence = line.startswith("```")
        code.append(line if inside and not fence else "")
        prose.append("" if inside or fence else line)
        inside = inside != fence
    return "\n".join(code) + "\n", "\n".join(prose)


def run_page(text):
    """The names that the page's code defines, doctest's results, and its report."""
    names, report = {}, []
    code = split_page(text)[0]
    page = doctest.DocTestParser().get_doctest(code, names, PAGE.name, str(PAGE), 0)
    runner = doctest.DocTestRunner(verbose=False)
    with np.printoptions():  # the page changes them
        results = runner.run(page, out=report.append, clear_globs=False)
    return page.globs, results, "".join(report)


@pytest.fixture(scope="module")
def page():
    return run_page(TEXT)


@pytest.fixture
def array(page):
    """Returns the first image of one of the page's tensors, as NumPy."""
    return lambda name: ops.convert_to_numpy(page[0][name])[0]


def replaced(old, new):
    assert TEXT.count(old) == 1
    return TEXT.replace(old, new)


# --- the page prints its numbers ---


def test_page_prints_its_numbers(page):
    _, results, report = page
    assert not results.failed, report
    assert results.attempted == len(re.findall("^>>> ", TEXT, re.MULTILINE)) > 50


@pytest.mark.backend_free
def test_page_with_another_weight_prints_other_numbers():
    line = ">>> position.set_weights([table])"
    nudge = ">>> position.set_weights([table + 0.5 * np.eye(17, 8, -16)])"  # the last row's first
    _, results, _ = run_page(replaced(line, nudge))
    assert results.failed > 5


@pytest.mark.backend_free
def test_page_with_one_wrong_digit_fails_once():
    _, results, report = run_page(replaced("[0.0 0.5 0.5 0.5 0.0", "[0.0 0.5 0.5 0.6 0.0"))
    assert results.failed == 1
    assert "print(x_p[5])" in report


# --- numbers of the page ---


def test_page_shapes(page, array):
    names = page[0]
    assert names["x_p"].shape == (16, 16)
    assert array("tokens").shape == array("z_0").shape == (17, 8)
    assert names["A"].shape == (17, 17)
    assert array("features").shape == (8,)
    assert [layer.units for layer in (names["hidden"], names["head"])] == [4, 2]


def test_page_first_patch(page, array):
    names = page[0]
    assert not names["x_p"][0].any()
    np.testing.assert_allclose(names["projected"][0, 0], FIRST_PATCH, atol=1e-6)
    np.testing.assert_allclose(names["table"][1], FIRST_POSITION, atol=1e-6)
    np.testing.assert_allclose(array("z_0")[1], FIRST_TOKEN, atol=1e-6)
    assert np.abs(array("z_0")[2] - FIRST_TOKEN).max() > 0.1  # the patch beside it


@pytest.mark.backend_free
def test_page_prose_has_no_number_of_its_own():
    assert stray_numbers(TEXT) == []
    assert stray_numbers(replaced("+ 0.10 = 0.30", "+ 0.10 = 0.31")) == ["0.31"]


def stray_numbers(text):
    """Decimals in the prose that no console block shows."""
    code, prose = split_page(text)
    prose = re.sub(r"https?://\S+|Section \S+", "", prose)
    decimal = r"\d+\.\d+"
    return [
        number for number in re.findall(decimal, prose) if number not in re.findall(decimal, code)
    ]


@pytest.mark.backend_free
def test_page_table_of_sizes(page):
    rows = [line.split("|")[2:4] for line in TEXT.splitlines() if line.startswith("|")][2:]
    ours, base = ([[int(n) for n in re.findall(r"\d+", row[i])] for row in rows] for i in (0, 1))
    assert ours == sizes(page[0]["config"])
    assert base == sizes(ViTConfig())
    assert ours != base


def sizes(config):
    """The rows of the page's last table."""
    return [
        [*config.image_size],
        [*config.patch_size, math.prod(config.patch_size) * config.in_channels],
        [config.num_patches, config.num_tokens],
        [config.width],
        [config.depth],
        [config.num_heads, config.key_dim],
        [config.mlp_dim],
    ]


# --- the equations in NumPy ---


def weights_of(model):
    return {w.path: np.float64(ops.convert_to_numpy(w.value)) for w in model.weights}


def numpy_features(weights, image):
    """Eq. 1 to 8 for one block and one head, in float64."""

    def norm(x, name):
        centered = x - x.mean(-1, keepdims=True)
        scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
        return scaled * weights[f"{name}/gamma"] + weights[f"{name}/beta"]

    def dense(x, name):
        kernel, bias = weights[f"{name}/kernel"], weights[f"{name}/bias"]
        return x @ kernel.reshape(x.shape[-1], -1) + bias.reshape(-1)

    corners = [(row, column) for row in range(0, 16, 4) for column in range(0, 16, 4)]
    x_p = np.stack([image[r : r + 4, c : c + 4].ravel() for r, c in corners])  # (N, 16)
    tokens = dense(x_p, "patches/projection")  # (N, D)
    tokens = np.concatenate([weights["class_token/tokens"][0], tokens])  # (T, D)
    z = tokens + weights["position_embedding/table"]

    block = "encoder_block_0"
    y = norm(z, f"{block}/attention_norm")
    q, k, v = (dense(y, f"{block}/attention/{name}") for name in ("query", "key", "value"))
    scores = np.exp(q @ k.T / math.sqrt(8))  # (T, T)
    taken = scores / scores.sum(-1, keepdims=True) @ v  # (T, D)
    z = z + dense(taken, f"{block}/attention/attention_output")
    y = dense(norm(z, f"{block}/mlp_norm"), f"{block}/mlp/dense_1")  # (T, 32)
    y = y * (1 + np.vectorize(math.erf)(y / math.sqrt(2))) / 2
    z = z + dense(y, f"{block}/mlp/dense_2")  # (T, D)
    return norm(z, "encoder_norm")[0]  # (D,)


def test_features_agree_with_the_equations(page, array):
    names = page[0]
    expected = numpy_features(weights_of(names["model"]), names["image"])
    np.testing.assert_allclose(array("features"), expected, atol=1e-5)

    hidden, head = ([np.float64(x) for x in names[n].get_weights()] for n in ("hidden", "head"))
    logits = np.maximum(expected @ hidden[0] + hidden[1], 0) @ head[0] + head[1]
    probabilities = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(names["probabilities"], probabilities, atol=1e-5)


def test_features_depend_on_every_weight(page, array):
    rng = np.random.default_rng(0)
    weights, image = weights_of(page[0]["model"]), page[0]["image"]
    for path, value in weights.items():
        nudged = value + rng.uniform(0.01, 0.1, value.shape)
        features = numpy_features({**weights, path: nudged}, image)
        difference = np.abs(features - array("features")).max()
        if path == "encoder_block_0/attention/key/bias":  # adds a constant to each row
            assert difference < 1e-5
        else:
            assert difference > 1e-4, path


def test_features_agree_with_the_equations_for_random_norms(page):
    """The page leaves the LayerNorms at 1 and 0; here every weight is random."""
    rng = np.random.default_rng(0)
    model = ViT(page[0]["config"])
    for weight in model.weights:
        weight.assign(rng.normal(0.3, 0.4, weight.shape))
    image = rng.uniform(size=(16, 16)).astype("float32")
    features = ops.convert_to_numpy(model.features()(image[None, :, :, None]))[0]
    np.testing.assert_allclose(features, numpy_features(weights_of(model), image), atol=1e-5)
    turned = numpy_features(weights_of(model), image.T)
    assert np.abs(features - turned).max() > 1e-3
