"""docs/choosing.md: names that exist, and figures that the code computes."""

import re
from pathlib import Path

import pytest

import keras_vit
from benchmarks import choosing, flops
from keras_vit.weights.fetch import known

pytestmark = pytest.mark.backend_free

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")


def rows():
    """The cells of every row of every table, with the heading above the table."""
    heading = None
    for line in PAGE.splitlines():
        if line.startswith("#"):
            heading = line.strip("# ")
        elif line.startswith("| "):
            yield heading, [cell.strip() for cell in line.strip("|").split("|")]


def number(cell):
    return float(cell.replace(",", ""))


def weights():
    """The known name in each row of the tables of models, with the heading and the cells."""
    for heading, cells in rows():
        if heading in ("Classifiers", "Features without labels", "Image-text features"):
            name = re.match(r"`(\w+\.\w+)`", cells[1])
            if name:
                yield heading, name[1], cells


def described():
    """Rows of published sizes: the fields of the variant, and its cost as stated."""
    for heading, name, cells in weights():
        row = known.find(name)
        if row.variant not in keras_vit.list_variants() or heading == "Image-text features":
            continue
        if heading == "Classifiers":
            fields = {"num_classes": 1000, "image_size": int(cells[2])}
            millions, giga = number(cells[3]), number(cells[4])
        else:
            fields = {"num_classes": 0, "num_registers": 4 if "reg4" in row.name else 0}
            millions, giga = number(cells[2]), number(cells[3])
        if "distilled" in row.name:
            fields |= {"distillation_token": True, "pooling": "token_pair"}
        if "siglip" in row.name:
            fields |= {"class_token": False, "pooling": "map"}
        yield row.name, row.variant, fields, millions, giga


def test_page_names_known_checkpoints():
    names = {name for _, name, _ in weights()}
    names |= set(re.findall(r'from_pretrained\("([^"/]+)"', PAGE))
    names |= set(re.findall(r"\b(?:vit_[a-z]+\d+)\.\w+", PAGE))
    assert len(names) > 40
    assert [name for name in names if not known.find(name)] == []
    assert f"lists all {len(known.KNOWN)} with" in PAGE


def test_page_states_pixels_of_known_checkpoints():
    sizes = [
        (int(cells[2]), known.find(name).image_size)
        for heading, name, cells in weights()
        if heading != "Features without labels"
    ]
    assert len(sizes) > 30
    assert [pair for pair in sizes if pair[0] != pair[1]] == []


def test_page_states_computed_costs():
    found = list(described())
    assert len(found) > 20
    for name, variant, fields, millions, giga in found:
        config, parameters = flops.described(variant, **fields)
        # At another number of positions, and without LayerScale: hundreds of thousands.
        assert abs(parameters / 1e6 - millions) < max(0.06, 0.005 * millions), name
        assert round(flops.multiply_adds(config) / 1e9, 1) == giga, name


@pytest.mark.parametrize(("name", "variant"), [("S/16", "vit_s16"), ("B/16", "vit_b16")])
def test_page_states_costs_of_resolutions(name, variant):
    table = [cells for heading, cells in rows() if heading == "Resolution and cost"]
    header = next(cells for cells in table if cells[0] == "G multiply-adds")
    cells = next(cells for cells in table if cells[0] == name)
    for size, cell in zip(header[1:], cells[1:], strict=True):
        config, _ = flops.described(variant, image_size=int(size.split()[0]))
        assert round(flops.multiply_adds(config) / 1e9, 1) == float(cell)


def test_page_has_the_table_that_choosing_prints():
    speeds = {variant: dict.fromkeys(choosing.FILES, 1.0) for variant in choosing.VARIANTS}
    printed = [line.split("|")[1:-1] for line in choosing.table(speeds).splitlines()]
    table = [cells for heading, cells in rows() if heading == "Speed of our exports"]
    wanted = [row for row in printed if not row[0].startswith("-")]
    assert [row[0].strip() for row in wanted] == [cells[0] for cells in table]
    assert [cell.strip() for cell in wanted[0]] == table[0]
