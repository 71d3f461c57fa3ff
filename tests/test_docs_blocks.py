"""Every block of the guides says which test runs it, or why none does.

A comment in front of a block, or below the title for all blocks of the page:

    <!-- run: tests/test_docs_runs.py -->
    <!-- not run: needs Docker -->
    <!-- every block is run: tests/test_docs_vit.py -->

A block of shell commands may have both: what is not run is then named. The site shows it.
"""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.backend_free

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "docs" / "browser" / "README.md"]
BLOCK = re.compile(r"((?:^ *<!--[^\n]*-->\n)*)^ *```(?:python|pycon|sh|bash)$", re.MULTILINE)
RUN = re.compile(r"<!-- (?:every block is )?run: (\S+) -->")
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
EVERY = re.compile(r"\A# .+\n\n(<!-- every block is run: \S+ -->)\n\n")


def wrong_blocks(text, name):
    """Blocks without a mark, and marks that name no test of the page."""
    whole = EVERY.match(text)
    for found in BLOCK.finditer(text):
        marks = found[1] or (whole[1] if whole else "")
        tests = RUN.findall(marks)
        readers = [test for test in tests if (ROOT / test).is_file()]
        known = [t for t in readers if name in (ROOT / t).read_text(encoding="utf-8")]
        if len(known) != len(tests) or not (tests or NOT_RUN.search(marks)):
            yield text[: found.start()].count("\n") + 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_say_what_runs_them(page):
    text = page.read_text(encoding="utf-8")
    assert list(wrong_blocks(text, page.name)) == []
    reasons = re.findall(r"tests/[\w/.]+\.py", " ".join(NOT_RUN.findall(text)))
    assert [test for test in reasons if not (ROOT / test).is_file()] == []


def test_most_blocks_run():
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    marks = [found[1] for text in texts for found in BLOCK.finditer(text)]
    not_run = [mark for mark in marks if NOT_RUN.search(mark) and not RUN.search(mark)]
    assert len(marks) > 120 and len(not_run) < len(marks) / 4


def test_block_without_a_mark_is_found():
    block = "```python\nx\n```\n"
    good = "<!-- run: tests/test_docs_runs.py -->\n", "<!-- not run: needs a network -->\n"
    wrong = "", "<!-- run: tests/none.py -->\n", "<!-- run: tests/test_docs_vit.py -->\n"
    for mark in good:
        assert list(wrong_blocks(f"# A\n\n{mark}{block}", "training.md")) == []
    for mark in wrong:
        assert list(wrong_blocks(f"# A\n\n{mark}{block}", "training.md")) == [3]
    assert list(wrong_blocks(f"{good[0]}text\n\n{block}", "training.md")) == [4]
