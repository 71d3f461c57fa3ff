"""README.zh-CN.md says what README.md says: headings, code, links, names and figures."""

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

# A fenced block, a row or a heading, or a paragraph: however its lines are broken.
UNIT = re.compile(r"^```[\s\S]*?^```$|^[|#].*$|(?:^(?!```|[|#]).+\n?)+", re.MULTILINE)
MONTHS = "January February March April May June July August September October November December"
# "One" and 一 are left out: they are articles as often as numbers. A quarter is 四分之一.
ENGLISH_NUMBERS = {
    **dict(two=2, three=3, four=4, quarter=4, five=5, six=6, seven=7, eight=8, nine=9, ten=10),
    **dict(eleven=11, twelve=12, thirteen=13, fourteen=14, fifteen=15, sixteen=16, twenty=20),
}
CHINESE_NUMBERS = {
    **dict(十一=11, 十二=12, 十三=13, 十四=14, 十五=15, 十六=16, 二十=20, 十=10),
    **dict(两=2, 二=2, 三=3, 四=4, 五=5, 六=6, 七=7, 八=8, 九=9),
}


def units(text):
    """The page's pieces in order, without the line that leads to the other language."""
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
    """What stands between single backticks."""
    return Counter(re.findall(r"`([^`\n]+)`", unit)) if unit[:3] != "```" else None


def figures(unit):
    """Every number, in digits or spelled, of a row, a paragraph or a block with its comments."""
    # 18 November 2026 is 2026 年 11 月 18 日.
    dates = rf"(?<=\d )({MONTHS.replace(' ', '|')})(?= \d{{4}})"
    unit = re.sub(dates, lambda month: str(MONTHS.split().index(month[0]) + 1), unit)
    found = Counter(re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?", unit))
    english = re.findall(rf"\b(?:{'|'.join(ENGLISH_NUMBERS)})\b", unit.lower())
    found.update(str(ENGLISH_NUMBERS[word]) for word in english)
    chinese = re.findall("|".join(CHINESE_NUMBERS), unit)
    found.update(str(CHINESE_NUMBERS[word]) for word in chinese)
    return found


ASPECTS = [heading, code, cells, links, names, figures]


def difference(aspect, english=ENGLISH, chinese=CHINESE):
    """The first two pieces, side by side, that do not agree in one aspect."""
    for pair in zip_longest(units(english), units(chinese), fillvalue=""):
        if aspect(pair[0]) != aspect(pair[1]):
            return pair
    return None


@pytest.mark.parametrize("aspect", ASPECTS)
def test_readme_zh_agrees(aspect):
    assert sum(bool(aspect(unit)) for unit in units(ENGLISH)) > 8
    assert difference(aspect) is None


@pytest.mark.parametrize("start", range(10))
def test_readme_zh_with_a_changed_digit_is_found(start):
    digits = list(re.finditer("[0-9]", CHINESE))[start::10]
    assert len(digits) > 10
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
        (figures, "on 18 November 2026", "于 2026 年 12 月 18 日"),
        (figures, "Fifteen sizes", "五种规格"),
        (figures, "a quarter of two", "二分之一"),
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


def test_readme_links_lead_somewhere():
    found = set().union(*(links(unit) or () for unit in units(CHINESE)))
    assert len(found) > 20
    assert [link for link in found if not (ROOT / link).exists()] == []
