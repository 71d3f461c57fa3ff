"""Recipes by name and by path, in a checkout and in the wheel."""

import shutil
from pathlib import Path

import pytest

from keras_vit.train import list_recipes, load_recipe, recipe_files

pytestmark = pytest.mark.backend_free

DIGITS = Path(__file__).parents[2] / "training" / "recipes" / "digits.py"


def test_recipes_are_listed_with_their_descriptions():
    found = list_recipes()
    assert list(found) == sorted(path.stem for path in DIGITS.parent.glob("*.py"))
    assert found["digits"].startswith("Handwritten digits")
    assert all(found.values())


def test_recipes_beside_the_module_come_first(tmp_path, monkeypatch):
    shutil.copy(DIGITS, tmp_path / "mine.py")
    monkeypatch.setattr(recipe_files, "FOLDERS", (tmp_path, DIGITS.parent))
    assert list(list_recipes()) == ["mine"]
    monkeypatch.setattr(recipe_files, "FOLDERS", (tmp_path / "none", DIGITS.parent))
    assert len(list_recipes()) > 10


def test_your_own_recipe_is_loaded_by_its_path(tmp_path):
    mine = tmp_path / "my-digits.py"
    text = DIGITS.read_text(encoding="utf-8").replace("def digits(", "def my_digits(")
    mine.write_text(text.replace("epochs=40", "epochs=3"), encoding="utf-8")
    for path in (mine, str(mine)):
        assert load_recipe(path).run.epochs == 3
    assert load_recipe("digits").run.epochs == 40


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("def other(): pass", r"defines mine\(\), which returns a Recipe"),
        ("def mine(): return 3", r"defines mine\(\), which returns a Recipe"),
        (None, "must be a file that exists"),
    ],
)
def test_file_without_a_recipe_is_refused(tmp_path, text, match):
    if text is not None:
        (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        load_recipe(tmp_path / "mine.py")


def test_unknown_recipe_lists_the_closest_names_or_all():
    with pytest.raises(ValueError, match="near: cifar10_scratch.*Received: 'cifar10_scrtch'"):
        load_recipe("cifar10_scrtch")
    with pytest.raises(ValueError, match="there are: augreg_vit_b16, .*, imagenet1k_vit_s16"):
        load_recipe("zzz")
