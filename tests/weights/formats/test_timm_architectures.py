"""Every architecture of timm's ViT files: loaded exactly, or refused."""

import collections
import functools
import gc

import derive_architectures
import keras
import numpy as np
import pytest
import weights_sources as sources
from derive_architectures import architectures
from weights_sources import outcome, torch_logits

from keras_vit.weights.formats import recognize, timm_config
from keras_vit.weights.plan import make_plan

pytestmark = [
    pytest.mark.slow,
    pytest.mark.backend_free,
    pytest.mark.filterwarnings("ignore:Mapping deprec"),
]

NARROW = {"depth": 2, "embed_dim": 64, "num_heads": 4}
SMALL = (NARROW, NARROW | {"num_kv_heads": 4}, {"depth": 2})
"""How an architecture is made small, in order of preference."""


def published():
    """How many configs with published weights each architecture has; 0 for the others.

    Beside the configs with a tag, timm lists an architecture once more without one.
    """
    from timm.models._registry import _model_pretrained_cfgs

    tagged = {name.split(".")[0] for name in _model_pretrained_cfgs if "." in name}
    return collections.Counter(
        name.split(".")[0]
        for name, config in _model_pretrained_cfgs.items()
        if (config.hf_hub_id or config.url or config.file) and ("." in name or name not in tagged)
    )


def report(form, names):
    """Prints and returns how many configs with published weights `names` have, of how many."""
    known, count = timm_config.architectures(), published()
    read, every = (sum(count[name] for name in part) for part in (names, known))
    configs = f"{read} of timm's {every} ViT configs with published weights"
    print(f"{form}: {len(names)} of {len(known)} architectures, {configs}, rest refused")
    return read, every


def test_table_is_what_timm_says():
    """If timm has changed, regenerate the table: see derive_architectures.py."""
    derived = {name: derive_architectures.derive(name, f) for name, f in architectures().items()}
    assert timm_config.architectures() == derived


def test_table_refuses_few_published_configs(record_property):
    """By the table alone. That the rest loads exactly is what the last test of this file shows."""
    known = timm_config.architectures()
    read, every = report("table", [name for name, row in known.items() if "unlike" not in row])
    record_property("configs", read)
    assert 0.95 * every < read < every


def test_full_size_architectures_are_read_rightly():
    """Heads, GELU, epsilon and pooling at the sizes that timm publishes, by shapes alone."""
    import timm
    import torch

    wrong, read = [], 0
    for name, row in timm_config.architectures().items():
        if "unlike" in row:
            continue
        with torch.device("meta"):
            module = timm.create_model(name)
        shapes = {key: tuple(value.shape) for key, value in module.state_dict().items()}
        size = {"input_size": list(module.default_cfg["input_size"])}
        stated = {"architecture": name, "pretrained_cfg": size | {"mean": [0.5], "std": [0.5]}}
        format = recognize(shapes, stated)
        plan = make_plan(*format, shapes, {}, config=stated, pixels={}, stated={})
        block, config = module.blocks[0], plan.target
        embeds = getattr(module, "embeds", module)  # NaFlexVit's
        registers = getattr(embeds, "reg_token", None)
        sides = module.default_cfg["input_size"][1:]
        naflex = tuple(side // 16 for side in sides)  # at the size that its file states
        grid = naflex if embeds is not module else tuple(module.patch_embed.grid_size)
        expected = {
            "num_heads": block.attn.num_heads,
            "key_dim": block.attn.proj.in_features // block.attn.num_heads,
            "norm_epsilon": block.norm1.eps,
            "block_norm": derive_architectures.BLOCKS[type(block).__name__],
            "gelu": derive_architectures.GELUS.get(type(block.mlp.act).__name__, "exact"),
            "depth": len(module.blocks),
            "grid": grid,
            "num_registers": 0 if registers is None else registers.shape[1],
            "class_token": embeds.cls_token is not None,
            "num_classes": module.num_classes,
            "pooling": row["pooling"],
            "distillation_token": hasattr(module, "dist_token"),
        }
        got = {field: getattr(config, field) for field in expected}
        different = {k: (got[k], expected[k]) for k in got if got[k] != expected[k]}
        if different or plan.differences() or plan.assumed:
            wrong.append(f"{name}: {different} {plan.differences()[:3]} {plan.assumed}")
        read += 1
    assert not wrong, "\n".join(wrong)
    assert read > 100


def small(name):
    """A random model of the architecture, at two blocks where it can be, and its arguments."""
    import timm

    for arguments in SMALL:
        try:
            module = timm.create_model(name, **arguments)
        except (TypeError, ValueError, AssertionError, RuntimeError):
            continue
        return sources.randomize(module, scale=0.2 if "embed_dim" in arguments else 0.05), arguments
    raise AssertionError(f"timm cannot build {name}")


def padded_logits(module, batch):
    """timm takes 384 pixels in patches of 14 and ignores the rest."""
    if not hasattr(module, "patch_embed"):  # NaFlexVit, which takes any size
        return torch_logits(module, batch)
    height, width = module.patch_embed.img_size
    padded = np.zeros((len(batch), height, width, 3), "float32")
    padded[:, : batch.shape[1], : batch.shape[2]] = batch
    return torch_logits(module, padded)


@pytest.mark.timeout(3600)
def test_architectures_load_exactly_or_are_refused(tmp_path, record_property):
    """With config.json, and as a file alone whose caller passes what arrays do not show."""
    from timm.models._hub import save_for_hf

    found = {}
    for number, (name, row) in enumerate(timm_config.architectures().items()):
        module, arguments = small(name)
        folder = tmp_path / str(number)
        save_for_hf(module, folder, safe_serialization=True, model_args=arguments or None)
        bare = folder / "bare.safetensors"
        source = functools.partial(padded_logits, module)
        found[name, "folder"] = outcome(folder, source)
        (folder / "model.safetensors").rename(bare)
        fields = {"num_heads": arguments.get("num_heads")}
        fields |= {k: v for k, v in row.items() if k not in ("unlike", "num_heads")}
        if row.get("position_embedding") == "rope":  # without a table, no array shows the size
            fields["image_size"] = module.patch_embed.img_size
        found[name, "bare"] = outcome(bare, source, **{k: v for k, v in fields.items() if v})
        bare.unlink()
        del module, source
        keras.backend.clear_session()
        gc.collect()
    wrong = {key: said for key, said in found.items() if said not in ("exact", "refused")}
    # A bare file of these has the arrays of a plain ViT, and nothing that tells them apart; the log
    # says that no rotary positions are assumed.
    for name in [name for name, form in wrong if form == "bare" and "_rope_ape_" in name]:
        del wrong[name, "bare"]
    assert not wrong, wrong
    exact = {
        form: [name for (name, f), said in found.items() if (f, said) == (form, "exact")]
        for form in ("folder", "bare")
    }
    for form, names in exact.items():
        record_property(form, len(names))
        report(f"exact, {form}", names)
    assert len(exact["folder"]) > 100 and len(exact["bare"]) > 100
