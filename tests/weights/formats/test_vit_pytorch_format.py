"""vit-pytorch's state dicts, of both generations, against vit-pytorch and its older code."""

import numpy as np
import pytest
import weights_sources as sources
from weights_sources import assert_same_logits, bare, images, torch_logits

import keras_vit
from keras_vit.weights.load import inspect

KINDS = {
    "cls": {},
    "mean": {"pool": "mean"},
    "narrow heads": {"dim_head": 3},
    "one head": {"heads": 1, "dim_head": 20},
    "not square": {"image_size": (24, 16), "patch_size": (8, 4)},
    "one channel": {"channels": 1},
}
UNSTATED = {
    "not square": {"image_size": (24, 16), "patch_size": (8, 4)},
    "one channel": {"patch_size": 8},
}


def fields(kind):
    heads = {} if kind == "one head" else {"num_heads": 5}
    return heads | UNSTATED.get(kind, {})


@pytest.mark.parametrize("kind", KINDS)
def test_vit_pytorch_logits_equal_source(tmp_path, kind):
    source = sources.vit_pytorch_vit(**KINDS[kind])
    path = bare(tmp_path, sources.state(source))
    assert_same_logits(path, source, wrong={"norm_epsilon": 0.1}, **fields(kind))


@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("patch_norm", [True, False])
def test_vit_pytorch_old_generation_equals_its_code(tmp_path, pool, patch_norm):
    source = old_vit(pool, patch_norm)
    path = bare(tmp_path, sources.state(source))
    pooling = {"mean": {"pooling": "mean_all"}}.get(pool, {})
    assert_same_logits(path, source, num_heads=5, **pooling)


@pytest.mark.backend_free
def test_vit_pytorch_pixels_are_an_assumption(tmp_path):
    """Everyone who trains with it has pixels of his own."""
    path = bare(tmp_path, sources.state(sources.vit_pytorch_vit()))
    pixels = {"pixel_mean": 0.5, "pixel_std": 0.5}
    assert inspect(path, num_heads=5).assumed == {"pooling": "token", **pixels}
    stated = {"pixel_mean": 0.1, "pixel_std": (0.1, 0.2, 0.3)}
    assert inspect(path, num_heads=5, **stated).assumed == {"pooling": "token"}
    own = keras_vit.save_pretrained(
        keras_vit.from_pretrained(path, num_heads=5), tmp_path / "own", format="vit_pytorch"
    )
    assert inspect(own).assumed == {}


@pytest.mark.backend_free
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "one head"])
def test_vit_pytorch_round_trip_is_bitwise_and_loads_strictly(tmp_path, kind):
    from safetensors.torch import load_file

    source = sources.vit_pytorch_vit(**KINDS[kind])
    model = keras_vit.from_pretrained(bare(tmp_path, sources.state(source)), **fields(kind))
    back = keras_vit.save_pretrained(model, tmp_path / "back", format="vit_pytorch")
    sources.assert_same_file(back, sources.state(source))
    again = sources.vit_pytorch_vit(seed=3, **KINDS[kind])
    again.load_state_dict(load_file(back), strict=True)
    batch = images(*model.config.input_shape)
    np.testing.assert_array_equal(torch_logits(again, batch), torch_logits(source, batch))
    assert keras_vit.from_pretrained(back).config == model.config


def old_vit(pool, patch_norm):
    """The model before its names changed: PreNorm wrappers, and a norm in its head only."""
    import torch
    from torch import nn

    class PreNorm(nn.Module):
        def __init__(self, fn):
            super().__init__()
            self.norm, self.fn = nn.LayerNorm(20), fn

        def forward(self, x):
            return self.fn(self.norm(x))

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.to_qkv = nn.Linear(20, 60, bias=False)
            self.to_out = nn.Sequential(nn.Linear(20, 20), nn.Identity())

        def forward(self, x):
            heads = (
                t.reshape(*t.shape[:2], 5, 4).transpose(1, 2) for t in self.to_qkv(x).chunk(3, -1)
            )
            q, k, v = heads
            weights = (q @ k.transpose(-1, -2) * 4**-0.5).softmax(-1)
            return self.to_out((weights @ v).transpose(1, 2).flatten(2))

    class FeedForward(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(20, 28), nn.GELU(), nn.Identity(), nn.Linear(28, 20), nn.Identity()
            )

        def forward(self, x):
            return self.net(x)

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.ModuleList([PreNorm(Attention()), PreNorm(FeedForward())]) for _ in range(2)
            )

        def forward(self, x):
            for attention, mlp in self.layers:
                x = attention(x) + x
                x = mlp(x) + x
            return x

    class Flatten(nn.Module):
        def forward(self, x):
            x = x.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 4, 5, 1)
            return x.flatten(3).flatten(1, 2)

    class OldViT(nn.Module):
        def __init__(self):
            super().__init__()
            norms = [nn.LayerNorm(192)], [nn.LayerNorm(20)]
            before, after = norms if patch_norm else ([], [])
            self.to_patch_embedding = nn.Sequential(Flatten(), *before, nn.Linear(192, 20), *after)
            self.pos_embedding = nn.Parameter(torch.zeros(1, 10, 20))
            self.cls_token = nn.Parameter(torch.zeros(1, 1, 20))
            self.transformer = Blocks()
            self.mlp_head = nn.Sequential(nn.LayerNorm(20), nn.Linear(20, 3))

        def forward(self, x):
            x = self.to_patch_embedding(x)
            x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1) + self.pos_embedding
            x = self.transformer(x)
            return self.mlp_head(x.mean(1) if pool == "mean" else x[:, 0])

    return sources.randomize(OldViT())
