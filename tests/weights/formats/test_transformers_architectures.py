"""Every image model of transformers with patches: loaded exactly, or refused."""

import functools
import importlib
import inspect
import pkgutil

import numpy as np
import pytest
import weights_sources as sources
from weights_sources import outcome

pytestmark = [pytest.mark.slow, pytest.mark.backend_free, pytest.mark.filterwarnings("ignore")]

TINY = {
    "image_size": 24,
    "patch_size": 8,
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 28,
    "num_labels": 3,
    "mlp_ratio": 2,
    "num_channels": 3,
    "projection_dim": 16,
    "decoder_hidden_size": 16,
    "decoder_num_attention_heads": 4,
    "decoder_num_hidden_layers": 1,
    "decoder_intermediate_size": 24,
    "mask_ratio": 0.0,
    "attn_implementation": "eager",
}
ALWAYS = ("num_labels", "attn_implementation")


def classes():
    """Every model class of transformers whose module mentions patches."""
    import transformers.models
    from transformers import PreTrainedModel

    for package in pkgutil.iter_modules(transformers.models.__path__, "transformers.models."):
        for module in pkgutil.iter_modules(importlib.import_module(package.name).__path__):
            if not module.name.startswith("modeling_"):
                continue
            try:
                loaded = importlib.import_module(f"{package.name}.{module.name}")
            except ImportError:  # models of sound need torchaudio
                continue
            if "patch_size" not in inspect.getsource(loaded):
                continue
            for name, kind in sorted(vars(loaded).items()):
                ours = inspect.isclass(kind) and kind.__module__ == loaded.__name__
                if ours and issubclass(kind, PreTrainedModel) and kind.config_class is not None:
                    yield name, kind


def tiny(kind):
    """A random model of the class in the size of `TINY`, or None if it cannot have that size."""
    try:
        default = kind.config_class()
        fields = {k: v for k, v in TINY.items() if k in ALWAYS or k in default.to_dict()}
        if not {"patch_size", "hidden_size"} <= fields.keys():
            return None
        module = kind(kind.config_class(**fields))
    except Exception:  # transformers raises many errors for an unsupported size
        return None
    if not 0 < sum(parameter.numel() for parameter in module.parameters()) < 2e7:
        return None
    return sources.randomize(module, scale=0.4)


def answer(module, batch):
    """The model's output: logits, projected or pooled features, the class token or the mean."""
    import torch

    if type(module).__name__.startswith("Siglip2"):
        return sources.flat_output(module)(batch)
    if type(module).__name__ == "Cosmos3EdgeVisionModel":  # SigLIP 2's, in blocks of 2 x 2 patches
        (flat,), side = sources.flat_patches(batch, 8), batch.shape[1] // 8
        order = np.arange(side**2).reshape(side // 2, 2, side // 2, 2).swapaxes(1, 2).ravel()
        tokens = module(flat[order], grid_thw=torch.tensor([[1, side, side]])).last_hidden_state
        return tokens.mean(0, keepdim=True).detach().numpy()
    pixels = torch.from_numpy(np.ascontiguousarray(batch.transpose(0, 3, 1, 2)))
    trunks = ("vit", "deit", "beit")
    trunk = next((getattr(module, n) for n in trunks if hasattr(module, n)), module)
    masked = "MaskedImageModeling" in type(module).__name__ or "MAE" in type(module).__name__
    given = {}
    if "MAE" in type(module).__name__:  # its own order of patches, none of them masked
        given["noise"] = torch.arange(9.0).repeat(len(batch), 1)
    if type(module).__name__ == "BeitBackbone":
        return trunk(pixels).last_hidden_state[:, 0].detach().numpy()
    if type(module).__name__ == "DINOv3ViTBackbone":
        module.config.return_class_token = True
        return module(pixels).cls_tokens[-1].detach().numpy()
    if "Backbone" in type(module).__name__:
        out = module.embeddings(pixels)
        out = module.encoder(out).last_hidden_state
        return module.layernorm(out)[:, 0].detach().numpy()
    with torch.no_grad():
        out = (trunk if masked else module)(pixels, **given)
    if "logits" in out:
        return out["logits"].numpy()
    if type(module).__name__ == "BeitForMaskedImageModeling":
        return module.layernorm(out["last_hidden_state"])[:, 0].detach().numpy()
    pooled = out.get("image_embeds", out.get("pooler_output"))
    if pooled is not None:
        return pooled.numpy()
    tokens = out["last_hidden_state"].numpy()
    patches = batch.shape[1] // 8 * (batch.shape[2] // 8)
    return tokens.mean(1) if tokens.shape[1] == patches else tokens[:, 0]  # the class token


@pytest.mark.timeout(3600)
def test_transformers_models_load_exactly_or_are_refused(tmp_path):
    found, kinds = {}, set()
    for number, (name, kind) in enumerate(classes()):
        module = tiny(kind)
        if module is None:
            continue
        folder = tmp_path / str(number)
        try:
            module.save_pretrained(folder)
        except (NotImplementedError, RuntimeError):  # an abstract class; arrays that share memory
            continue
        kinds.add(kind.config_class.model_type)
        source = functools.partial(answer, module)
        found[name, "folder"] = outcome(folder, source)
        if (folder / "model.safetensors").is_file():
            (folder / "model.safetensors").rename(folder / "bare.safetensors")
            fields = {"num_heads": 5, "norm_epsilon": module.config.to_dict().get("layer_norm_eps")}
            fields = {field: value for field, value in fields.items() if value}
            found[name, "bare"] = outcome(folder / "bare.safetensors", source, **fields)
    wrong = {key: said for key, said in found.items() if said not in ("exact", "refused")}
    # Nothing but its config tells the windows of RF-DETR from DINOv2, and the rotary positions of
    # PaddleOCR from SigLIP, where the log says that learned ones are assumed.
    like_others = ("RfDetrDinov2Backbone", "PaddleOCRVisionModel", "PaddleOCRVisionTransformer")
    assert wrong.keys() <= {(name, "bare") for name in like_others}, wrong
    exact = sorted(
        name for (name, form), said in found.items() if (form, said) == ("folder", "exact")
    )
    print(f"{len(kinds)} kinds, {len(found)} files; exact: {', '.join(exact)}; the rest refused")
    assert len(exact) >= 12 and len(kinds) >= 50
