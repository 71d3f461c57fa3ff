"""The figures of a run's report: each is written, and shows the images of the run."""

import functools
import io
import re

import numpy as np
import pytest
from conformance import tiny_model
from matplotlib.figure import Figure
from PIL import Image

from keras_vit import explain
from keras_vit.train.run import report_figures

pytestmark = pytest.mark.backend_free


def examples(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield {"image": rng.integers(0, 256, (30, 20, 3), dtype=np.uint8), "label": 0}


def test_draw_writes_the_figures_that_its_lines_link(tmp_path):
    lines = report_figures.draw(tiny_model(), examples(2), tmp_path)
    shown = re.findall(r"^!\[.+\]\((\w+\.png)\)$", "\n".join(lines), re.M)
    assert sorted(shown) == sorted(path.name for path in tmp_path.iterdir())
    assert set(shown) == {f"{n}.png" for n in "rollout features distance filters positions".split()}
    for name in shown:
        with Image.open(tmp_path / name) as image:
            assert image.width > 200 and np.ptp(np.asarray(image.convert("L"))) > 100
    assert any("over 2 test images" in line for line in lines)


@pytest.mark.parametrize(
    "count, looked_at", [(1, 1), (report_figures.PICTURES + 3, report_figures.PICTURES)]
)
def test_draw_uses_the_first_images(tmp_path, monkeypatch, count, looked_at):
    taken, given = {}, list(examples(count))
    for name in explain.__all__:
        if name.startswith("plot_"):
            draw = functools.partial(lambda name, _, *p: taken.update({name: p}) or Figure(), name)
            monkeypatch.setattr(explain, name, draw)
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    lines = report_figures.draw(tiny_model("no_positions"), iter(given), tmp_path)
    assert "plot_position_similarity" not in taken and "plot_patch_filters" in taken
    assert not any("positions.png" in line or "1 test images" in line for line in lines)
    np.testing.assert_array_equal(taken["plot_attention_rollout"][0], given[0]["image"])
    for name in ("plot_patch_pca", "plot_attention_distance"):
        np.testing.assert_array_equal(
            taken[name][0], [example["image"] for example in given[:looked_at]]
        )


@pytest.mark.parametrize("channels", [1, 3])
def test_draw_decodes_files_and_converts_channels(tmp_path, monkeypatch, channels):
    pixels = next(examples(1))["image"]
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    taken = []
    monkeypatch.setattr(explain, "plot_patch_pca", lambda _, seen: taken.append(seen) or Figure())
    model = tiny_model(in_channels=channels)
    for image in (file.getvalue(), pixels):
        text = "\n".join(report_figures.draw(model, [{"image": image}] * 2, tmp_path))
        assert "cannot be drawn" not in text and "(rollout.png)" in text
    wanted = pixels if channels == 3 else pixels @ np.array([[0.299], [0.587], [0.114]])
    for many in taken:
        assert [one.shape for one in many] == [(30, 20, channels)] * 2
        np.testing.assert_allclose(many[1], wanted, atol=1)


def test_draw_reports_what_it_cannot_draw(tmp_path):
    model = tiny_model()
    model.get_layer("patches").projection.kernel.assign(np.full((8, 8, 3, 20), np.nan))
    text = "\n".join(report_figures.draw(model, examples(2), tmp_path))
    assert "of the patch projection: it cannot be drawn." in text and "(filters.png)" not in text
    assert "(positions.png)" in text and (tmp_path / "positions.png").exists()
