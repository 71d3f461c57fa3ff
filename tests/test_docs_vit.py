"""docs/vit.md: its examples run, its quotations are exact, its commands and links work."""

import doctest
import re
import shlex
import textwrap
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_vit
from benchmarks import tokens
from keras_vit.train import load_recipe, recipe

pytestmark = pytest.mark.only_on("tensorflow")

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "vit.md"
TEXT = PAGE.read_text(encoding="utf-8")
SOURCE = re.compile(r"^# (keras_vit/\S+\.py)\b.*$", re.MULTILINE)


def blocks(language, text=TEXT):
    """The page's fenced blocks of one language, without the indentation of a list."""
    fenced = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(code) for _, code in fenced]


def quotations(text=TEXT):
    """Every quotation, with the file that the page names as its source."""
    for block in blocks("python", text):
        parts = SOURCE.split(block)
        for path, quoted in zip(parts[1::2], parts[2::2], strict=True):
            for piece in re.split(r"^ *\.\.\.$", quoted, flags=re.MULTILINE):
                yield path, piece.strip("\n")


def is_in(path, piece):
    """Whether a file has exactly these consecutive lines, at any indentation."""
    wanted = textwrap.dedent(piece).splitlines()
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    windows = (lines[i : i + len(wanted)] for i in range(len(lines) - len(wanted) + 1))
    return any(textwrap.dedent("\n".join(window)).splitlines() == wanted for window in windows)


def run_examples(text=TEXT):
    """The results of doctest on the page's console blocks, and its report."""
    report = []
    code = "\n".join(blocks("pycon", text))
    page = doctest.DocTestParser().get_doctest(code, {}, PAGE.name, str(PAGE), 0)
    results = doctest.DocTestRunner(verbose=False).run(page, out=report.append)
    return results, "".join(report)


def replaced(old, new):
    assert TEXT.count(old) == 1
    return TEXT.replace(old, new)


def test_vit_page_quotes_the_source_exactly():
    found = list(quotations())
    assert len(found) > 10
    assert [(path, piece) for path, piece in found if not piece or not is_in(path, piece)] == []


def test_vit_page_with_a_wrong_quotation_is_found():
    wrong = replaced(
        "# (B, T, D)\noutputs = self.attention(\n    z,\n    z,",
        "# (B, T, D)\noutputs = self.attention(\n    z,\n    x,",
    )
    assert sum(not is_in(path, piece) for path, piece in quotations(wrong)) == 1


def test_vit_page_has_no_unchecked_block():
    fences = re.findall(r"^ *```(\w+)$", TEXT, re.MULTILINE)
    assert set(fences) == {"python", "pycon", "sh", "text"}
    assert [fences.count(kind) for kind in ("python", "pycon", "sh")] == [
        len(blocks(kind)) for kind in ("python", "pycon", "sh")
    ]


def test_vit_page_examples_print_what_the_page_shows():
    results, report = run_examples()
    assert not results.failed, report
    assert results.attempted > 15


def test_vit_page_with_a_wrong_answer_fails_once():
    # Without ViT-B/16, which takes a second to build.
    short = replaced("learned   another", "learned   the same").replace(
        "keras_vit.vit_b16(", "print("
    )
    results, report = run_examples(short)
    assert "learned   another" in report
    assert results.failed > 0


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """A folder with the model that the page's scripts start from, tiny and with random weights."""
    config = keras_vit.ViTConfig(
        image_size=8, patch_size=2, in_channels=1, width=20, depth=2, num_heads=5, mlp_dim=28,
        num_classes=3,
    )  # fmt: skip
    model = keras_vit.ViT(config)
    rng = np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(rng.normal(0, 0.5, weight.shape))
    monkeypatch.chdir(tmp_path)
    Path("runs/digits").mkdir(parents=True)
    model.save("runs/digits/model.keras")
    return model


def run_scripts(count):
    """Runs the page's first scripts and returns their names."""
    scripts = [code for code in blocks("python") if not SOURCE.match(code)]
    assert len(scripts) == 2
    names = {}
    for code in scripts[:count]:
        exec(compile(code, str(PAGE), "exec"), names)
    return names


@pytest.fixture
def images():
    return np.random.default_rng(1).normal(size=(3, 8, 8, 1)).astype("float32")


def test_vit_page_resizing_script_runs(digits, images):
    run_scripts(1)
    assert keras.saving.load_model("digits_16.keras").config.grid == (8, 8)
    again = keras_vit.from_pretrained("digits.safetensors")
    logits = keras.ops.convert_to_numpy(digits(images))
    np.testing.assert_allclose(keras.ops.convert_to_numpy(again(images)), logits, atol=1e-4)
    assert np.abs(logits - logits[::-1]).max() > 1e-2


@pytest.mark.slow
def test_vit_page_export_script_runs(digits, images):
    predict = run_scripts(2)["predict"]
    logits = keras.ops.convert_to_numpy(digits(images))
    spread = logits.max() - logits.min()
    assert np.abs(predict(images) - logits).max() < 0.05 * spread
    assert np.abs(predict(images[::-1]) - logits).max() > 0.05 * spread
    assert Path("savedmodels/digits/1/saved_model.pb").is_file()


def test_vit_page_commands_have_recipes_with_these_fields():
    commands = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    trained = [shlex.split(command) for command in commands if " train " in command]
    assert len(trained) == 2
    for words in trained:
        chosen = load_recipe(words[words.index("--recipe") + 1])
        settings = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        recipe.override(chosen, settings)  # an unknown field is an error
    named = re.findall(r"--set ([\w.]+=[\w.]+)`", TEXT)
    assert len(named) == 3
    recipe.override(load_recipe("digits"), named)
    with pytest.raises(ValueError, match="patch_sise"):
        recipe.override(load_recipe("digits"), ["model.config.patch_sise=4"])


def test_vit_page_links_lead_somewhere():
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    headings = re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    local = [link for link in links if not link.startswith("https://")]
    assert len(local) > 8
    for link in local:
        path, _, anchor = link.partition("#")
        assert (PAGE.parent / path).exists(), link
        assert path or anchor in anchors, link


def test_vit_page_costs_are_measured_by_tokens():
    config = keras_vit.ViTConfig(
        image_size=(24, 16), patch_size=8, width=20, depth=1, num_heads=5, mlp_dim=28, num_classes=3
    )
    cases = {("few", 24): config, ("many", 96): config.replace(image_size=(96, 96))}
    measured = tokens.measure(cases, "float32", batch=2, rounds=4, budget=60)
    assert all(seconds > 0 for pair in measured.values() for seconds in pair)
    rows = list(tokens.table(cases, measured, "tiny").columns[2].cells)
    assert rows == ["7", "145"]
