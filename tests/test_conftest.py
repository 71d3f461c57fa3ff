"""Which tests run on which backend, and in which order."""

from types import SimpleNamespace

import conftest
import keras
import pytest

pytestmark = pytest.mark.backend_free
mark = pytest.mark


class Item:
    """A test with its markers."""

    def __init__(self, nodeid, *marks):
        self.nodeid, self.marks = nodeid, [one.mark for one in marks]
        self.path = nodeid.partition("::")[0]

    def get_closest_marker(self, name):
        return next((one for one in self.marks if one.name == name), None)

    def add_marker(self, one):
        self.marks.append(one.mark)


@pytest.mark.parametrize("again", [False, True])
def test_tests_are_selected_by_their_markers(again, monkeypatch):
    here = keras.backend.backend()
    monkeypatch.setenv("TESTED_BACKENDS", "another" * again)
    items = [
        Item("test_a.py::test_one[slow]", mark.sampled, mark.slow),
        *(Item(f"test_a.py::test_one[{case}]", mark.sampled) for case in "abc"),
        *(Item(f"test_a.py::test_two[{case}]", mark.sampled(cases=2)) for case in "abc"),
        Item("test_a.py::test_three", mark.sampled(cases=0)),
        Item("test_b.py::test_one[a]", mark.sampled),
        Item("test_b.py::test_plain[a]"),
        Item("test_b.py::test_plain[b]"),
        Item("test_b.py::test_free", mark.backend_free),
        Item("test_b.py::test_some", mark.only_on(here)),
        Item("test_b.py::test_free_here", mark.only_on(here), mark.backend_free),
        Item("test_b.py::test_free_there", mark.only_on(here, "another"), mark.backend_free),
        *(Item(f"test_b.py::test_here[{c}]", mark.only_on(here), mark.sampled) for c in "ab"),
        Item("test_b.py::test_none", mark.only_on("another")),
    ]
    left_out = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    conftest.select(SimpleNamespace(hook=hook), items)
    slow = [item.nodeid.partition("::")[2] for item in items if item.get_closest_marker("slow")]
    later = ["test_one[b]", "test_one[c]", "test_two[c]", "test_three"]
    assert slow == ["test_one[slow]", *(later if again else [])]
    gone = [item.nodeid for item in left_out]
    ran = ["test_b.py::test_free", "test_b.py::test_free_there"]
    assert gone == ran * again + ["test_b.py::test_none"]
    assert len(items) == 17 - 2 * again and not set(gone) & {item.nodeid for item in items}


@pytest.mark.parametrize(
    ("text", "ran"),
    [
        ("pytestmark = pytest.mark.backend_free", True),
        (
            "import x\n\npytestmark = [\n    pytest.mark.slow,\n    pytest.mark.backend_free,\n]",
            True,
        ),
        ("pytestmark = pytest.mark.slow\n\n\n@pytest.mark.backend_free", False),
        ("pytestmark = [pytest.mark.slow]\nx = [pytest.mark.backend_free]", False),
        ('pytestmark = [pytest.mark.backend_free, pytest.mark.only_on("jax")]', False),
        ('pytestmark = pytest.mark.backend_free\n@pytest.mark.only_on("jax")', False),
        ("def test_plain(): pass", False),
    ],
)
def test_files_that_ran_whole_are_not_imported_again(text, ran, tmp_path, monkeypatch):
    file = tmp_path / "test_x.py"
    file.write_text(text + "\n")
    monkeypatch.setenv("TESTED_BACKENDS", "another")
    assert conftest.pytest_ignore_collect(file) is (True if ran else None)
    helper = tmp_path / "helper.py"
    helper.write_text(text)
    assert conftest.pytest_ignore_collect(helper) is None
    monkeypatch.setenv("TESTED_BACKENDS", "")
    assert conftest.pytest_ignore_collect(file) is None


def test_long_files_come_first_and_stay_whole():
    names = ["a::1", "b::1", "b::2", "c::1", "d::1", "d::2", "e::1", "e::2", "e::3"]
    items = [Item(name, *([mark.timeout(9)] if name == "c::1" else [])) for name in names]
    conftest.longest_first(items)
    order = ["c::1", "e::1", "e::2", "e::3", "b::1", "b::2", "d::1", "d::2", "a::1"]
    assert [item.nodeid for item in items] == order
