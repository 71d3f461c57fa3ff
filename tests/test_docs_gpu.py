"""docs/gpu.md: the table is what the command computes, and the count is that of a step."""

from pathlib import Path

import pytest

from benchmarks import memory_estimate as estimate
from keras_vit import ViTConfig

pytestmark = pytest.mark.backend_free

PAGE = (Path(__file__).parent.parent / "docs" / "gpu.md").read_text(encoding="utf-8")


def test_page_has_the_table_that_the_command_prints():
    assert f"\n\n{estimate.table(estimate.VARIANTS)}\n\n" in PAGE


def test_block_keeps_what_was_counted_by_hand():
    """T=17, D=20, two heads of 3, M=12: 17 * (80 + 24 + 24) values, and 2 * 289 shares."""
    config = ViTConfig(
        image_size=32, patch_size=8, width=20, depth=2, num_heads=2, head_dim=3, mlp_dim=12
    )
    assert estimate.block(config, "float32") == 17 * 128 * 4 + 578 * 4
    assert estimate.block(config, "mixed_bfloat16") == 17 * 128 * 2 + 578 * 6
    whole = estimate.activations(config, "float32", 3)
    assert whole == 3 * 2 * estimate.block(config, "float32")
    again = estimate.activations(config, "float32", 3, remat=True)
    assert again == 3 * (2 * 17 * 20 * 4 + estimate.block(config, "float32"))


def test_page_states_the_count_beside_the_measured_steps():
    """The job of `benchmarks.memory`, whose weights are there before the step."""
    config = ViTConfig(
        image_size=384, patch_size=16, width=384, depth=12, num_heads=6, mlp_dim=1536
    )
    counts = [
        (estimate.activations(config, "float32", 4, remat) + 22e6 * 12) / 1e9
        for remat in (False, True)
    ]
    assert f"{counts[0]:.2f} GB, and {counts[1]:.2f} GB" in PAGE.replace("\n", " ")
