"""Each preset against the code it is named after, and what every preset has in common."""

import itertools
import math

import numpy as np
import pytest

from keras_vit.resample import (
    PRESETS,
    Interpolation,
    matrix,
    resample_grid,
    resample_offsets,
)

pytestmark = [pytest.mark.backend_free, pytest.mark.usefixtures("torchvision")]

WIDTH = 20
PATCH = 8
TOLERANCE = 1e-5  # absolute, on N(0, 1) tables: the sources compute in float32

# From square grids, as most sources guess the old grid from the row count. The last keeps one side.
GRIDS = [
    ((7, 7), (14, 14)),
    ((14, 14), (24, 24)),
    ((14, 14), (12, 20)),
    ((16, 16), (9, 9)),
    ((14, 14), (14, 20)),
]
NON_SQUARE_GRIDS = [*GRIDS, ((12, 20), (14, 14)), ((5, 3), (3, 7)), ((4, 6), (1, 1))]
SQUARE_GRIDS = [grids for grids in GRIDS if grids[1][0] == grids[1][1]]


def random_table(grid, prefix=0, lead=(1,), dtype="float32", seed=0):
    rows = prefix + grid[0] * grid[1]
    table = np.random.default_rng(seed).standard_normal((*lead, rows, WIDTH))
    return table.astype(dtype)


def largest_difference(a, b):
    assert a.shape == b.shape
    return np.abs(np.float64(a) - np.float64(b)).max()


def import_timm():
    pytest.importorskip("torchvision")
    return pytest.importorskip("timm")


# --- the sources: (table, old_grid, new_grid, prefix) -> table, each by its own code ---


def scipy_zoom(table, old_grid, new_grid, prefix, mode="constant"):
    ndimage = pytest.importorskip("scipy.ndimage")
    grid = table[0, prefix:].reshape(*old_grid, WIDTH)
    zoom = (new_grid[0] / old_grid[0], new_grid[1] / old_grid[1], 1)
    grid = ndimage.zoom(grid, zoom, order=1, mode=mode)
    return np.concatenate([table[:, :prefix], grid.reshape(1, -1, WIDTH)], axis=1)


def jax_resize(table, old_grid, new_grid, prefix, **kwargs):
    jax = pytest.importorskip("jax")
    grid = table[:, prefix:].reshape(1, *old_grid, WIDTH)
    grid = jax.image.resize(grid, (1, *new_grid, WIDTH), **{"method": "linear", **kwargs})
    return np.concatenate([table[:, :prefix], np.asarray(grid).reshape(1, -1, WIDTH)], axis=1)


def torch_interpolate(table, old_grid, new_grid, prefix, offset=None, **kwargs):
    """F.interpolate as DeiT and MAE call it, or with a scale factor as DINOv2 does."""
    torch = pytest.importorskip("torch")
    if offset is None:
        kwargs["size"] = new_grid
    else:
        kwargs["scale_factor"] = tuple(
            float(new + offset) / old for new, old in zip(new_grid, old_grid, strict=True)
        )
    grid = torch.from_numpy(table[:, prefix:]).reshape(1, *old_grid, WIDTH).permute(0, 3, 1, 2)
    grid = torch.nn.functional.interpolate(grid, mode="bicubic", **kwargs)
    assert tuple(grid.shape[-2:]) == new_grid
    grid = grid.permute(0, 2, 3, 1).flatten(1, 2).numpy()
    return np.concatenate([table[:, :prefix], grid], axis=1)


def dinov2_official(*args):
    return torch_interpolate(*args, offset=0.1, antialias=False)


def timm_resample(table, old_grid, new_grid, prefix, **kwargs):
    import_timm()
    import torch
    from timm.layers import resample_abs_pos_embed

    return resample_abs_pos_embed(
        torch.from_numpy(table), list(new_grid), list(old_grid), prefix, **kwargs
    ).numpy()


def timm_resample_as_npz(*args):
    return timm_resample(*args, interpolation="bilinear", antialias=False)


def torchvision_interpolate(table, old_grid, new_grid, prefix):
    pytest.importorskip("torchvision")
    import torch
    from torchvision.models.vision_transformer import interpolate_embeddings

    assert prefix == 1
    state = {"encoder.pos_embedding": torch.from_numpy(table)}
    state = interpolate_embeddings(new_grid[0] * PATCH, PATCH, state)
    return state["encoder.pos_embedding"].numpy()


def huggingface(name):
    def interpolate(table, old_grid, new_grid, prefix):
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{name}Config")(
            hidden_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=5,
            intermediate_size=28,
            image_size=old_grid[0] * PATCH,
            patch_size=PATCH,
        )
        embeddings = getattr(transformers, f"{name}Model")(config).eval().embeddings
        with torch.no_grad():
            embeddings.position_embeddings.copy_(torch.from_numpy(table))
            tokens = torch.zeros(1, prefix + math.prod(new_grid), WIDTH)
            sides = (side * PATCH for side in new_grid)
            return embeddings.interpolate_pos_encoding(tokens, *sides).numpy()

    interpolate.__name__ = name
    return interpolate


SOURCES = [
    ("google", scipy_zoom, 1, NON_SQUARE_GRIDS),
    ("big_vision", scipy_zoom, 0, NON_SQUARE_GRIDS),
    ("flexivit", jax_resize, 0, NON_SQUARE_GRIDS),
    ("timm", timm_resample, 1, NON_SQUARE_GRIDS),
    ("timm_npz", timm_resample_as_npz, 1, NON_SQUARE_GRIDS),
    ("huggingface", huggingface("ViT"), 1, GRIDS),
    ("huggingface", huggingface("DeiT"), 2, GRIDS),
    ("huggingface", huggingface("Dinov2"), 1, GRIDS),
    ("huggingface_dinov2_registers", huggingface("Dinov2WithRegisters"), 1, GRIDS),
    ("dinov2", dinov2_official, 1, NON_SQUARE_GRIDS),
    ("deit", torch_interpolate, 2, NON_SQUARE_GRIDS),
    ("torchvision", torchvision_interpolate, 1, SQUARE_GRIDS),
]


@pytest.mark.parametrize(
    ("preset", "source", "prefix", "old_grid", "new_grid"),
    [
        pytest.param(preset, source, prefix, *grids, id=f"{preset}-{source.__name__}-{grids}")
        for preset, source, prefix, all_grids in SOURCES
        for grids in all_grids
    ],
)
def test_preset_matches_its_source(preset, source, prefix, old_grid, new_grid):
    table = random_table(old_grid, prefix)
    expected = source(table, old_grid, new_grid, prefix)
    ours = resample_grid(table, old_grid, new_grid, preset, prefix)
    assert largest_difference(ours, expected) < TOLERANCE


def test_preset_every_one_has_a_source():
    assert {preset for preset, *_ in SOURCES} == set(PRESETS)


@pytest.mark.parametrize(
    ("one", "other"),
    [pair for pair in itertools.combinations(PRESETS, 2) if PRESETS[pair[0]] != PRESETS[pair[1]]],
)
def test_preset_differs_from_other_conventions(one, other):
    # Smaller, because on a larger grid antialias changes nothing.
    table = random_table((16, 16))
    a, b = (resample_grid(table, (16, 16), (9, 9), preset) for preset in (one, other))
    assert largest_difference(a, b) > 1e-3


def test_preset_same_convention_has_same_rule():
    assert PRESETS["big_vision"] == PRESETS["google"]
    assert PRESETS["deit"] == PRESETS["huggingface"]
    assert PRESETS["huggingface_dinov2_registers"] == PRESETS["timm"]
    assert len(set(PRESETS.values())) == len(PRESETS) - 3


def timm_offsets(table, old_grid, new_grid):
    torch = pytest.importorskip("torch")
    import_timm()
    from timm.layers.pos_embed_rel import _USE_SCIPY, resize_rel_pos_bias_table

    assert not _USE_SCIPY  # unless asked for in the environment
    rows = (2 * new_grid[0] - 1) * (2 * new_grid[1] - 1) + 3
    shape = (rows, table.shape[1])
    return resize_rel_pos_bias_table(torch.from_numpy(table), new_grid, shape, old_grid).numpy()


def huggingface_offsets(table, old_grid, new_grid):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.beit.modeling_beit import BeitRelativePositionBias

    sizes = {"image_size": old_grid[0] * PATCH, "patch_size": PATCH}
    heads = table.shape[1]
    config = transformers.BeitConfig(hidden_size=heads, num_attention_heads=heads, **sizes)
    layer = BeitRelativePositionBias(config)
    with torch.no_grad():
        layer.relative_position_bias_table.copy_(torch.from_numpy(table))
        found = layer(new_grid)[0].numpy()  # (h, T, T)
    index = layer.generate_relative_position_index(new_grid).numpy()
    rows = np.empty(((2 * new_grid[0] - 1) * (2 * new_grid[1] - 1) + 3, heads), "float32")
    rows[index] = found.transpose(1, 2, 0)  # back from pairs of tokens to offsets
    return rows


OFFSET_GRIDS = [grids for grids in NON_SQUARE_GRIDS if grids[0] != (16, 16)]


@pytest.mark.parametrize(
    ("preset", "source", "grids"),
    [
        *(("timm", timm_offsets, grids) for grids in OFFSET_GRIDS),
        *(("huggingface", huggingface_offsets, g) for g in OFFSET_GRIDS if g[0][0] == g[0][1]),
    ],
)
def test_offsets_are_resampled_as_in_their_source(preset, source, grids):
    (height, width), _ = grids
    rows = (2 * height - 1) * (2 * width - 1) + 3
    table = np.random.default_rng(0).standard_normal((rows, 4)).astype("float32")
    expected = source(table, *grids)
    ours = resample_offsets(table, *grids, preset)
    assert ours.dtype == table.dtype
    assert largest_difference(ours, expected) < TOLERANCE
    np.testing.assert_array_equal(ours[-3:], table[-3:])
    other = "huggingface" if preset == "timm" else "timm"
    different = largest_difference(resample_offsets(table, *grids, other), expected) > 1e-2
    assert different or grids[1] == (1, 1)  # which has the offset 0 alone


def test_offsets_of_the_same_grid_are_a_copy():
    table = np.random.default_rng(0).standard_normal((5 * 3 + 3, 4))
    for preset in PRESETS:
        ours = resample_offsets(table, (3, 2), (3, 2), preset)
        np.testing.assert_array_equal(ours, table)
        assert not np.shares_memory(ours, table)


def test_offsets_of_other_presets_are_resampled_as_their_tables_are():
    table = np.random.default_rng(0).standard_normal((5 * 3, 4))
    expected = resample_grid(table, (5, 3), (9, 7), "torchvision")
    np.testing.assert_array_equal(resample_offsets(table, (3, 2), (5, 4), "torchvision"), expected)


def test_timm_npz_preset_matches_npz_loader(tmp_path):
    import_timm()
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(
        img_size=(5 * PATCH, 7 * PATCH), patch_size=PATCH, embed_dim=WIDTH, depth=0, num_classes=0
    )
    table = random_table((9, 9), prefix=1)
    np.savez(
        tmp_path / "weights.npz",
        **{
            "cls": np.zeros((1, 1, WIDTH), "float32"),
            "embedding/kernel": np.zeros((PATCH, PATCH, 3, WIDTH), "float32"),
            "embedding/bias": np.zeros(WIDTH, "float32"),
            "Transformer/posembed_input/pos_embedding": table,
            "Transformer/encoder_norm/scale": np.ones(WIDTH, "float32"),
            "Transformer/encoder_norm/bias": np.zeros(WIDTH, "float32"),
        },
    )
    model.load_pretrained(str(tmp_path / "weights.npz"))
    expected = model.pos_embed.detach().numpy()
    ours = resample_grid(table, (9, 9), (5, 7), "timm_npz", prefix=1)
    assert largest_difference(ours, expected) < TOLERANCE
    antialiased = resample_grid(table, (9, 9), (5, 7), "flexivit", prefix=1)
    assert largest_difference(antialiased, expected) > 1e-3


def test_google_preset_keeps_last_row_where_scipy_drops_it():
    # scipy rounds past the last row here and fills with zeros; `nearest` is the same zoom without.
    table = random_table((16, 16))
    expected = scipy_zoom(table, (16, 16), (30, 30), 0, mode="nearest")
    ours = resample_grid(table, (16, 16), (30, 30), "google")
    assert largest_difference(ours, expected) < TOLERANCE
    assert np.abs(ours.reshape(30, 30, WIDTH)[-1]).max() > 1


@pytest.mark.parametrize("grids", [((7, 7), (12, 10)), ((16, 16), (9, 9))])
def test_border_renormalize_matches_jax_cubic(grids):
    table = random_table(grids[0])
    expected = jax_resize(table, *grids, 0, method="cubic", antialias=False)
    fields = {"kernel": "bicubic", "cubic_a": -0.5}
    ours = resample_grid(table, *grids, Interpolation(**fields, border="renormalize"))
    assert largest_difference(ours, expected) < TOLERANCE
    clamped = resample_grid(table, *grids, Interpolation(**fields, border="clamp"))
    assert largest_difference(clamped, expected) > 1e-3


@pytest.mark.parametrize("grids", [((14, 14), (12, 20)), ((16, 16), (9, 9))])
def test_size_offset_with_antialias_matches_torch(grids):
    table = random_table(grids[0])
    expected = torch_interpolate(table, *grids, 0, offset=0.1, antialias=True)
    fields = {"kernel": "bicubic", "antialias": True, "cubic_a": -0.5, "border": "renormalize"}
    ours = resample_grid(table, *grids, Interpolation(**fields, size_offset=0.1))
    assert largest_difference(ours, expected) < TOLERANCE
    without = resample_grid(table, *grids, Interpolation(**fields))
    assert largest_difference(without, expected) > 1e-3


# --- what every preset has in common ---

every_preset = pytest.mark.parametrize("preset", PRESETS)


@every_preset
@pytest.mark.parametrize(("old", "new"), [(7, 14), (14, 12), (16, 9), (5, 1), (1, 5), (24, 3)])
def test_matrix_rows_sum_to_one(preset, old, new):
    weights = matrix(old, new, preset)
    assert weights.shape == (new, old)
    assert weights.dtype == np.float64
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-12)


@every_preset
def test_matrix_is_symmetric_without_offset(preset):
    weights = matrix(16, 9, preset)
    mirrored = np.allclose(weights, weights[::-1, ::-1], atol=1e-12)
    assert mirrored == (PRESETS[preset].size_offset == 0)


@every_preset
@pytest.mark.parametrize("new_grid", [(14, 24), (5, 4)])
def test_resample_grid_keeps_constant_field(preset, new_grid):
    table = np.full((1, 7 * 9, WIDTH), 1.25, "float32")
    ours = resample_grid(table, (7, 9), new_grid, preset)
    assert largest_difference(ours, np.full((1, math.prod(new_grid), WIDTH), 1.25)) < 1e-6


@every_preset
def test_resample_grid_same_grid_is_bitwise_copy(preset):
    table = random_table((7, 9), prefix=2)
    table[0, 5, 3] = np.nan
    ours = resample_grid(table, (7, 9), (7, 9), preset, prefix=2)
    assert ours.tobytes() == table.tobytes()
    assert not np.shares_memory(ours, table)


@every_preset
def test_resample_grid_keeps_prefix_rows(preset):
    table = random_table((7, 9), prefix=5)
    ours = resample_grid(table, (7, 9), (4, 12), preset, prefix=5)
    assert ours.shape == (1, 5 + 4 * 12, WIDTH)
    assert ours[:, :5].tobytes() == table[:, :5].tobytes()
    without = resample_grid(table[:, 5:], (7, 9), (4, 12), preset)
    np.testing.assert_array_equal(ours[:, 5:], without)


@every_preset
def test_resample_grid_is_linear(preset):
    a, b = (random_table((7, 9), dtype="float64", seed=seed) for seed in (1, 2))
    together, first, second = (
        resample_grid(table, (7, 9), (12, 5), preset) for table in (2 * a - 3 * b, a, b)
    )
    assert largest_difference(together, 2 * first - 3 * second) < 1e-12


@every_preset
def test_resample_grid_transposes_with_its_grid(preset):
    table = random_table((7, 9), dtype="float64")
    turned = table.reshape(1, 7, 9, WIDTH).swapaxes(1, 2).reshape(1, -1, WIDTH)
    ours = resample_grid(table, (7, 9), (12, 5), preset).reshape(1, 12, 5, WIDTH)
    ours_turned = resample_grid(turned, (9, 7), (5, 12), preset).reshape(1, 5, 12, WIDTH)
    assert largest_difference(ours, ours_turned.swapaxes(1, 2)) < 1e-12


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("new_grid", [(7, 9), (12, 5)])
def test_resample_grid_keeps_dtype(dtype, new_grid):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    table = random_table((7, 9), prefix=1, dtype=dtype)
    ours = resample_grid(table, (7, 9), new_grid, "timm", prefix=1)
    assert ours.dtype == table.dtype
    exact = resample_grid(np.float64(table), (7, 9), new_grid, "timm", prefix=1)
    np.testing.assert_array_equal(ours, exact.astype(dtype))


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_resample_grid_takes_any_leading_axes(lead):
    table = random_table((7, 9), prefix=1, lead=lead)
    ours = resample_grid(table, (7, 9), (12, 5), "timm", prefix=1)
    assert ours.shape == (*lead, 1 + 12 * 5, WIDTH)
    for index in np.ndindex(*lead):
        alone = resample_grid(table[index], (7, 9), (12, 5), "timm", prefix=1)
        np.testing.assert_allclose(ours[index], alone, rtol=0, atol=1e-6)


def test_resample_grid_takes_interpolation_or_name():
    table = random_table((7, 7))
    by_name = resample_grid(table, (7, 7), (9, 5), "torchvision")
    by_rule = resample_grid(table, (7, 7), (9, 5), Interpolation("bicubic", "align_corners"))
    np.testing.assert_array_equal(by_name, by_rule)
    default = resample_grid(table, (7, 7), (9, 5))
    np.testing.assert_array_equal(default, resample_grid(table, (7, 7), (9, 5), "google"))
    assert largest_difference(default, by_name) > 1e-3


@every_preset
def test_matrix_same_size_is_identity_without_offset(preset):
    same = np.array_equal(matrix(14, 14, preset), np.eye(14))
    assert same == (PRESETS[preset].size_offset == 0)


# --- errors ---


def test_resample_grid_rejects_unknown_preset_for_same_grid():
    with pytest.raises(ValueError, match="interpolation must be"):
        resample_grid(np.ones((1, 49, 20), "float32"), (7, 7), (7, 7), "unknown")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kernel": "area"}, r"kernel must be one of .*bicubic.* Received: kernel='area'"),
        ({"coordinates": "corners"}, r"coordinates must be one of .* Received: coordinates='cor"),
        ({"border": "zero"}, r"border must be one of .* Received: border='zero'"),
        ({"antialias": 1}, r"antialias must be a bool. Received: antialias=1"),
        ({"cubic_a": 0.5}, r"cubic_a must be between -1 and 0. Received: cubic_a=0.5"),
        ({"cubic_a": math.nan}, r"cubic_a must be between -1 and 0. Received: cubic_a=nan"),
        ({"size_offset": 1.0}, r"size_offset must be .* less than 1. Received: size_offset=1.0"),
        ({"size_offset": -0.1}, r"size_offset must be at least 0 .* Received: size_offset=-0.1"),
        (
            {"coordinates": "align_corners", "antialias": True},
            r"antialias must be False when coordinates='align_corners'. Received: antialias=True",
        ),
        (
            {"coordinates": "align_corners", "size_offset": 0.1},
            r"size_offset must be 0 when coordinates='align_corners'. Received: size_offset=0.1",
        ),
        (
            {"coordinates": "geometric"},
            r"kernel must be 'bilinear' when coordinates='geometric'. Received: kernel='bicubic'",
        ),
    ],
)
def test_interpolation_rejects_bad_field(fields, message):
    with pytest.raises(ValueError, match=message):
        Interpolation(**{"kernel": "bicubic", **fields})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"interpolation": "tim"},
            r"interpolation must be .*'google'.*'timm'.* Received: interpolation='tim'",
        ),
        ({"interpolation": None}, r"interpolation must be .* Received: interpolation=None"),
        ({"old_grid": (0, 7)}, r"old_grid must be two positive integers .*: old_grid=\(0, 7\)"),
        ({"new_grid": (9, -1)}, r"new_grid must be two positive .* Received: new_grid=\(9, -1\)"),
        ({"new_grid": (9.0, 5)}, r"new_grid must be two positive .* Received: new_grid=\(9.0, 5\)"),
        ({"new_grid": 9}, r"new_grid must be two positive integers .* Received: new_grid=9"),
        ({"new_grid": (9,)}, r"new_grid must be two positive integers .* Received: new_grid=\(9,"),
        ({"prefix": -1}, r"prefix must be an integer of at least 0. Received: prefix=-1"),
        ({"prefix": 0}, r"table must have .* 0 \+ 7 \* 7 = 49 rows. .*table.shape=\(1, 50, 20\)"),
        ({"old_grid": (7, 8)}, r"table must have .* 57 rows. Received: table.shape=\(1, 50, 20\)"),
        ({"table": np.zeros(50)}, r"table must have .* 50 rows. Received: table.shape=\(50,\)"),
        ({"table": np.zeros((50, 3), int)}, r"table must hold real floats. Received: table.dtype"),
    ],
)
def test_resample_grid_rejects_bad_argument(change, message):
    arguments = {"table": random_table((7, 7), 1), "old_grid": (7, 7), "new_grid": (9, 5)}
    arguments |= {"interpolation": "timm", "prefix": 1}
    resample_grid(**arguments)  # every argument is good before the change
    with pytest.raises(ValueError, match=message):
        resample_grid(**(arguments | change))


@pytest.mark.parametrize(("old", "new", "name"), [(0, 5, "old"), (5, 0, "new"), (5, 2.5, "new")])
def test_matrix_rejects_bad_size(old, new, name):
    with pytest.raises(ValueError, match=rf"{name} must be a positive integer. Received: {name}="):
        matrix(old, new, "timm")
