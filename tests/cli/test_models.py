"""`keras-vit models`: the rows, in a pipe, on a terminal and as JSON."""

import json

import pytest

from keras_vit.weights.fetch import known

pytestmark = pytest.mark.backend_free


def test_models_lists_rows_for_a_pipe(call):
    code, out, _ = call("models", "vit_b16", "DINO")
    assert code == 0
    fields = [line.split("\t") for line in out.splitlines()]
    assert [f[0] for f in fields] == [row.name for row in known.search("vit_b16 dino")]
    assert fields[0][1] == "hf://timm/vit_base_patch16_224.dino"


@pytest.mark.parametrize("columns", [60, 80, 130])
def test_models_never_cuts_a_name_on_a_terminal(terminal, call, columns):
    terminal("out", columns)
    code, out, _ = call("models")
    assert code == 0
    assert all(name in out for name in known.KNOWN)
    assert ("license" in out) == (columns == 130)


def test_models_json_has_every_field(call):
    code, out, _ = call("models", "--json")
    assert code == 0
    assert [known.Known(**row) for row in json.loads(out)] == list(known.KNOWN.values())


def test_models_without_a_match_lists_close_names(call):
    code, out, err = call("models", "vit_b14.dinov3")
    assert (code, out) == (1, "")
    assert "vit_b14.dinov2_lvd142m_518" in err and "Received: text='vit_b14.dinov3'" in err
