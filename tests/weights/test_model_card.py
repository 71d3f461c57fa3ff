"""Model cards: what they state, and that labels cannot change their Markdown."""

import pytest
from conformance import tiny_model

import keras_vit
from keras_vit.weights.model_card import model_card

pytestmark = pytest.mark.backend_free


def test_card_states_loading_pixels_results_and_classes():
    model = tiny_model(labels=["cat", "dog", "<b>|*emu*\n# x"], num_classes=3, pixel_mean=0.25)
    text = model_card(
        model, "timm", repo="me/pets", results={"test accuracy": 0.9712}, license="mit"
    )
    head, _, body = text.partition("\n---\n")
    assert "library_name: timm" in head and "license: mit" in head
    assert "pipeline_tag: image-classification" in head
    assert 'from_pretrained("hf://me/pets")' in body and '"hf-hub:me/pets"' in body
    assert "24 x 16, RGB" in body and "mean 0.25" in body
    assert "| test accuracy | 97.12% |" in body and "1. dog" in body
    assert "2. \\<b\\>\\|\\*emu\\* \\# x" in body and "\n# x" not in body


def test_card_of_features_has_no_classes():
    text = model_card(tiny_model(num_classes=0), "huggingface")
    assert "image-feature-extraction" in text and "AutoModel.from_pretrained" in text
    assert "## Classes" not in text and "## Results" not in text and "license" not in text


def test_save_pretrained_writes_a_card_and_keeps_an_edited_one(tmp_path):
    model = tiny_model()
    folder = keras_vit.save_pretrained(model, tmp_path / "out")
    card = folder / "README.md"
    assert "keras_vit.from_pretrained" in card.read_text()
    card.write_text("mine")
    keras_vit.save_pretrained(model, folder, results={"accuracy": 0.5})
    assert card.read_text() == "mine"
    assert keras_vit.from_pretrained(folder).config.num_classes == model.config.num_classes
    with pytest.raises(ValueError, match="license must be an identifier"):
        keras_vit.save_pretrained(model, tmp_path / "other", license="a: b")
    assert not (tmp_path / "other").exists()
