"""README.zh-CN.md agrees with README.md: headings, code, links, names and figures."""

import re
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import pytest

pytestmark = pytest.mark.backend_free

ROOT = Path(__file__).parent.parent
ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
SWITCHES = ("English | [简体中文](README.zh-CN.md)", "[English](README.md) | 简体中文")

# A fenced block, a row, a heading, or a paragraph with any line breaks.
UNIT = re.compile(r"^```[\s\S]*?^```$|^[|#].*$|(?:^(?!```|[|#]).+\n?)+", re.MULTILINE)


def units(text):
    """The page's pieces in order, without the line that links to the other language."""
    return [unit for unit in UNIT.findall(text) if unit.strip() not in SWITCHES]


def heading(unit):
    level = re.match(r"#+(?= )", unit)
    return level and level[0]


def code(unit):
    """A fenced block without its comments."""
    return re.sub(r"(^|\s+)# .*$", "", unit, flags=re.MULTILINE) if unit[:3] == "```" else None


def cells(unit):
    return unit.count("|") if unit[:1] == "|" else None


def links(unit):
    return Counter(re.findall(r"\]\((.*?)\)", unit)) if unit[:3] != "```" else None


def names(unit):
    """The text between single backticks."""
    return Counter(re.findall(r"`([^`\n]+)`", unit)) if unit[:3] != "```" else None


def figures(unit):
    """Every number in digits, of a row, a paragraph or a block with its comments."""
    return Counter(re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?", unit))


ASPECTS = [heading, code, cells, links, names, figures]


def difference(aspect, english=ENGLISH, chinese=CHINESE):
    """The first pair of pieces that differ in one aspect."""
    for pair in zip_longest(units(english), units(chinese), fillvalue=""):
        if aspect(pair[0]) != aspect(pair[1]):
            return pair
    return None


@pytest.mark.parametrize("aspect", ASPECTS)
def test_readme_zh_agrees(aspect):
    assert sum(bool(aspect(unit)) for unit in units(ENGLISH)) > 8
    assert difference(aspect) is None


def test_readme_zh_with_a_changed_digit_is_found():
    digits = list(re.finditer("[0-9]", CHINESE))[::10]
    assert len(digits) > 20
    for digit in digits:
        other = str((int(digit[0]) + 1) % 10)
        wrong = CHINESE[: digit.start()] + other + CHINESE[digit.end() :]
        assert difference(figures, CHINESE, wrong), CHINESE[digit.start() - 20 : digit.end()]


@pytest.mark.parametrize(
    ("aspect", "right", "wrong"),
    [
        (heading, "### Weights", "## 权重"),
        (heading, "### Weights", "权重"),
        (code, "```sh\nmake demo  # all\n```", "```sh\nmake test  # 全部\n```"),
        (cells, "| yes | no |", "| 是，否 |"),
        (links, "[a](docs/vit.md)", "[甲](docs/explain.md)"),
        (names, "by `fit` and `save`", "用 `fit`"),
        (figures, "13 minutes at 91.6 %", "13 分钟，91.8%"),
        (figures, "1,371 of 6e-7", "1,371 个，7e-7"),
    ],
)
def test_readme_zh_with_a_mistake_is_found(aspect, right, wrong):
    assert difference(aspect, f"{CHINESE}\n{right}\n", f"{CHINESE}\n{wrong}\n")


@pytest.mark.parametrize("aspect", [heading, code, cells, names, figures])
def test_readme_zh_without_a_piece_is_found(aspect):
    piece = next(unit for unit in units(CHINESE) if aspect(unit))
    assert difference(aspect, CHINESE, CHINESE.replace(piece, "", 1))


def test_readme_zh_comments_may_differ():
    block = "\n```sh\nmake demo  # {}\n# {}\n```\n"
    left, right = block.format("all", "then"), block.format("全部", "然后")
    assert not difference(code, CHINESE + left, CHINESE + right)


@pytest.mark.parametrize(("page", "switch"), [(ENGLISH, SWITCHES[0]), (CHINESE, SWITCHES[1])])
def test_readme_pages_lead_to_each_other(page, switch):
    assert page.split("\n")[2] == switch


def test_readme_zh_links_lead_somewhere():
    found = set().union(*(links(unit) or () for unit in units(CHINESE)))
    assert len(found) > 20
    assert [link for link in found if not (ROOT / link).exists()] == []
