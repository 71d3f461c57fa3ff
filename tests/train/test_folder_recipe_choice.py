"""What the recipe "folder" chooses by the number of images, and where it finds tests."""

import pytest

from keras_vit.train import load_recipe
from keras_vit.train.folder_recipe import Survey, choices, recipe_for, survey
from keras_vit.train.recipe import Data
from keras_vit.train.recipe_files import resolve_recipe

pytestmark = pytest.mark.backend_free


def write(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def chosen(images):
    return recipe_for(Survey(Data("folder"), images, 3))


def test_few_images_get_more_epochs_and_more_augmentation():
    few, many, most = chosen(300), chosen(5_000), chosen(50_000)
    assert [r.run.epochs for r in (few, many, most)] == [40, 10, 5]
    assert [r.model.variant for r in (few, many, most)] == ["vit_s16", "vit_s16", "vit_b16"]
    assert [r.augment.rand_augment_layers for r in (few, many, most)] == [2, 0, 0]
    assert chosen(7).run.batch_size == 7 and chosen(0).run.batch_size == 1
    assert many.schedule.warmup_steps == 5_000 // 32 // 2


def test_folder_without_tests_is_split(tmp_path):
    write(tmp_path, *(f"{label}/{i}.jpg" for label in ("a", "b") for i in range(10)), "a/x.txt")
    found = survey(tmp_path)
    assert (found.data.train, found.data.test) == (".[:90%]", ".[90%:]")
    assert (found.images, found.classes) == (18, 2)
    write(tmp_path, "train/a/1.png", "train/b/deep/2.PNG", "train/b/.hidden.png")
    found = survey(tmp_path)
    assert (found.data.train, found.data.test) == ("train[:90%]", "train[90%:]")
    write(tmp_path, "val/a/3.png")
    found = survey(tmp_path)
    assert (found.data.train, found.data.test) == ("train", "val")
    assert (found.images, found.classes) == (2, 2)


def test_images_without_labels_are_counted(tmp_path):
    write(tmp_path, *(f"{i}.jpg" for i in range(20)))
    assert survey(tmp_path).images == 18


def test_missing_folder_names_the_near_ones(tmp_path):
    (tmp_path / "flowers").mkdir()
    with pytest.raises(ValueError, match="data.path must be a folder; near: flowers. Received"):
        survey(tmp_path / "flower")


def test_recipe_of_a_folder_takes_overrides(tmp_path):
    write(tmp_path, *(f"a/{i}.jpg" for i in range(800)))
    plain = resolve_recipe("folder", (), tmp_path)
    assert plain.run.epochs == 20 and plain.data.path == str(tmp_path)
    assert plain == resolve_recipe("folder", [f"data.path={tmp_path}"])
    other = resolve_recipe("folder", ["run.epochs=3", "data.test=.[:10%]"], tmp_path)
    assert other.run.epochs == 3 and other.data.test == ".[:10%]"
    assert load_recipe("folder").run.epochs == 20
    text = choices(plain)
    assert "vit_s16 from augreg_in21k" in text and "20 epochs in batches of 32" in text
    assert "RandAugment(2, 9)" in text and ".[90%:] of the folder" in text
