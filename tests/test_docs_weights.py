"""docs/weights.md: known checkpoints of its families, its formats, and what it says is refused."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

import keras_vit
from keras_vit.weights.fetch import known
from keras_vit.weights.formats import (
    FORMATS,
    WRITABLE,
    huggingface_clip,
    huggingface_dinov3,
    timm_config,
)
from keras_vit.weights.formats.huggingface_config import MODEL_TYPES

pytestmark = pytest.mark.backend_free

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "weights.md").read_text(encoding="utf-8")


def section(heading):
    """The part of the page below a heading."""
    return re.split(r"^## ", PAGE.split(f"\n## {heading}\n")[1], maxsplit=1, flags=re.M)[0]


def rows(heading):
    """The cells of the first table below a heading, without its header."""
    table = [line for line in section(heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def names(cell):
    return re.findall(r"`([^`]+)`", cell)


def test_families_have_known_examples():
    examples = [name for row in rows("Families") for name in names(row[2])]
    assert len(examples) > 15
    assert [name for name in examples if not known.find(name)] == []


def test_families_state_how_many_checkpoints_are_known():
    stated = {names(row[4])[0]: int(row[4].split(":")[1]) for row in rows("Families")}
    assert len(stated) > 15
    assert {words: len(known.search(words)) for words in stated} == stated


def test_families_examples_are_found_by_their_words():
    for row in rows("Families"):
        found = {known.find(name).name for name in names(row[2])}
        assert found & {r.name for r in known.search(names(row[4])[0])}, row


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md", "docs/fetching.md"])
def test_pages_state_how_many_checkpoints_are_known(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.search(rf"\b{len(known.KNOWN)} (known |published |checkpoints|个已发布)", text)


def test_pages_state_how_many_sizes_are_published():
    count = len(keras_vit.list_variants())
    for page, words in (("README.md", "published sizes"), ("CHANGELOG.md", "factories for the")):
        assert f" {count} {words}" in (ROOT / page).read_text(encoding="utf-8"), page


def test_fetching_states_how_many_are_of_each_source():
    text = (ROOT / "docs" / "fetching.md").read_text(encoding="utf-8")
    found = re.search(
        r"(\d+) that timm .*?(\d+) \.npz .*?(\d+) models .*?(\d+) of torch", text, re.S
    )
    formats = [row.format for row in known.KNOWN.values()]
    sources = ("timm", "google", "huggingface", "torchvision")
    assert found and [int(n) for n in found.groups()] == [formats.count(s) for s in sources]


def test_formats_are_all_there():
    listed = {name: row[3] for row in rows("Formats") for name in names(row[0])}
    assert listed.keys() == FORMATS.keys() | {"keras"}
    read_only = {name for name, written in listed.items() if written == "no"}
    assert not read_only & set(WRITABLE)
    own = {name for name, written in listed.items() if written != "no" and "as `" not in written}
    assert own == {*WRITABLE, "keras"}


def test_refused_architectures_are_those_that_timm_has():
    """Each pattern of the page refuses, and each refused architecture of timm has one."""
    patterns = {name for row in rows("What is refused") for name in names(row[1])}
    architectures = timm_config.architectures()
    refused = [name for name, row in architectures.items() if "unlike" in row]
    of_timm = {p for p in patterns if any(fnmatch(name, p) for name in architectures)}
    assert len(of_timm) > 8
    # Sapiens2 "and larger", and hybrids of other ResNets, stand for several.
    others = {"vit_*_sapiens2", "vit_*_resnet*"}
    assert [n for n in refused if not any(fnmatch(n, p) for p in of_timm | others)] == []
    for pattern in of_timm:
        found = [name for name in architectures if fnmatch(name, pattern)]
        assert found and set(found) <= set(refused), pattern


def test_refused_model_types_are_not_read():
    row = next(row for row in rows("What is refused") if row[0].startswith("model types"))
    assert len(names(row[1])) > 2
    assert not set(names(row[1])) & {
        *MODEL_TYPES,
        *huggingface_clip.WHOLE,
        *huggingface_dinov3.MODEL_TYPES,
    }
