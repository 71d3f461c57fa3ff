"""The arithmetic of the benchmark, and how failed and missing contenders are reported."""

import subprocess
import sys

import conformance
import keras
import numpy as np
import pytest
from rich.console import Console

from benchmarks import choosing, contenders, flops, serve, table, worker
from keras_vit import ViTConfig

TINY = ViTConfig(
    image_size=32, patch_size=16, width=20, depth=1, num_heads=5, mlp_dim=28, num_classes=3
)


def measure(mode="forward", names=contenders.KERAS, config=TINY):
    return worker.measure(
        config, dtype="float32", mode=mode, batch=2, rounds=3, budget=60, names=names
    )


def shown(group):
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table.table([group], "tiny"))
    return {line.split()[-5]: line for line in capture.get().splitlines() if len(line.split()) > 4}


def fake(monkeypatch, steps):
    """Replaces contenders by functions, under the names of packages."""
    monkeypatch.setattr(contenders, "step", lambda name, *_: (steps[name], 7))


def test_load_figures_are_those_of_all_rounds():
    rounds = [
        {"requests_per_second": 2.0, "latencies": np.array([0.1, 0.3]), "errors": 0},
        {"requests_per_second": 4.0, "latencies": np.array([0.2]), "errors": 1},
    ]
    found = serve.summary(rounds)
    assert (found["requests_per_second"], found["median"], found["errors"]) == (4.0, 3.0, 1)
    assert (found["requests"], round(found["p50_ms"])) == (3, 200)
    row = {"clients": 16, **found, "of_engine": 0.9}
    record = {"variant": "v", "kind": "k", "engine": {"images_per_second": 5.0}, "clients": [row]}
    console = Console(width=100)
    with console.capture() as capture:
        console.print(serve.table(record))
    assert capture.get().split()[-6:] == ["16", "4.00", "90%", "200", "298", "1"]


def test_flops_match_count_by_hand():
    patches = 2 * 4 * 768 * 20  # 4 patches of 16 * 16 * 3 numbers
    projections = 4 * 2 * 5 * 20 * 20  # 5 tokens; query, key, value, output
    attention = 5 * (2 * 5 * 4 * 5 + 2 * 5 * 5 * 4)  # 5 heads of size 4: q k^T, then A v
    mlp = 2 * 5 * 20 * 28 + 2 * 5 * 28 * 20
    head = 2 * 20 * 3
    block = projections + attention + mlp
    assert flops.per_image(TINY, "forward") == patches + block + head
    assert flops.per_image(TINY, "train") == 3 * (patches + block + head)
    assert flops.forward(TINY.replace(depth=2)) == patches + 2 * block + head
    assert flops.forward(TINY.replace(num_registers=1)) > patches + block + head


def test_flops_of_vit_b16_agree_with_published_numbers():
    assert round(flops.forward(worker.variant_config("vit_b16")) / 1e9, 1) == 35.1
    assert round(flops.forward(worker.variant_config("vit_b32")) / 1e9, 1) == 8.8


# timm's results/benchmark-infer-amp-nchw-pt291-cu128-4090.csv, infer_gmacs, at 224 px and 384 px.
SHIFTED = {"patch_shift": True, "patch_norm": "before"}
PUBLISHED = {
    ("vit_ti16", 224): 1.26,
    ("vit_s16", 224): 4.61,
    ("vit_b32", 224): 4.41,
    ("vit_b16", 224): 17.58,
    ("vit_b16", 384): 55.54,
    ("vit_l16", 224): 61.6,
    ("vit_h14", 224): 167.4,
}


@pytest.mark.backend_free
@pytest.mark.parametrize(("variant", "size"), PUBLISHED)
def test_multiply_adds_are_those_that_timm_publishes(variant, size):
    # timm counts norms too: up to half a percent.
    config, _ = flops.described(variant, image_size=size)
    published = PUBLISHED[variant, size]
    assert 0.994 < flops.multiply_adds(config) / 1e9 / published < 1.001


@pytest.mark.backend_free
@pytest.mark.parametrize(("fields", "published"), [({}, 189.8), (SHIFTED, 199.2)])
def test_multiply_adds_are_those_that_the_authors_of_shifted_patches_publish(fields, published):
    """Of their ViT for Tiny-ImageNet, in millions; they count norms too."""
    size = {"image_size": 64, "patch_size": 8, "width": 192, "depth": 9, "num_heads": 12}
    config = ViTConfig(**size, mlp_dim=384, num_classes=200, qkv_bias=False, **fields)
    assert 0.995 < flops.multiply_adds(config) / 1e6 / published < 1


@pytest.mark.only_on("torch")
@pytest.mark.parametrize("kind", conformance.KINDS)
def test_flops_are_those_that_torch_counts(kind):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    config = conformance.KINDS[kind]
    model = conformance.tiny_model(kind)
    # The counter does not know the fused attention of CPUs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(conformance.images(config, 1), training=False)
    assert flops.forward(config) == counter.get_total_flops()


def test_flops_prints_published_sizes(capsys, monkeypatch):
    command = ["flops", "vit_b16", "vit_so400m14", "--image-size", "224", "448"]
    monkeypatch.setattr("sys.argv", command)
    flops.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == ["vit_b16", "224", "197", "86.57", "17.56", "35.1"]
    assert [row[:3] for row in rows[2:]] == [
        ["vit_b16", "448", "785"],
        ["vit_so400m14", "224", "256"],
        ["vit_so400m14", "448", "1024"],
    ]
    monkeypatch.setattr("sys.argv", ["flops", "vit_b17"])
    with pytest.raises(SystemExit, match="variants must be published sizes"):
        flops.main()


def test_measure_times_contenders_in_turns(monkeypatch):
    calls = []
    fake(monkeypatch, {"keras": lambda: calls.append("a"), "numpy": lambda: calls.append("b")})
    group = measure(names=("keras", "numpy"))
    warm = 1 if keras.backend.backend() == "torch" else 2
    assert "".join(calls) == "a" * warm + "b" * warm + "ababab"
    row = group["contenders"]["numpy"]
    assert row["status"] == "measured"
    assert row["images_per_second"] == 2 / row["best_s"] >= row["images_per_second_median"]
    share = flops.forward(TINY) * row["images_per_second"] / group["peak_flops_per_second"]
    assert row["share_of_peak"] == pytest.approx(share)


def test_measure_reports_failed_and_missing_contenders(monkeypatch):
    tries = []

    def broken():
        raise RuntimeError("no such kernel")

    def breaks_later():
        tries.append(1)
        if len(tries) > 3:
            raise MemoryError("full")

    steps = {"keras": broken, "numpy": breaks_later, "rich": lambda: None}
    fake(monkeypatch, steps)
    group = measure(names=("keras", "numpy", "rich", "no_such_package"))
    rows = group["contenders"]
    assert rows["keras"] == {"status": "failed", "message": "RuntimeError: no such kernel"}
    assert rows["numpy"] == {"status": "failed", "message": "MemoryError: full"}
    assert rows["rich"]["status"] == "measured"
    assert rows["no_such_package"] == {"status": "not installed"}
    assert [line.split(": ", 1)[1] for line in table.failures([group])] == [
        "keras failed: RuntimeError: no such kernel",
        "numpy failed: MemoryError: full",
    ]


def test_measure_stops_at_budget_after_two_rounds(monkeypatch):
    fake(monkeypatch, {"keras": lambda: None})
    arguments = {"dtype": "float32", "mode": "forward", "batch": 1, "names": ("keras",)}
    assert worker.measure(TINY, rounds=9, budget=0, **arguments)["rounds"] == 2
    assert worker.measure(TINY, rounds=9, budget=60, **arguments)["rounds"] == 9


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["forward", "train"])
def test_measure_yields_table_with_both_contenders(mode):
    pytest.importorskip("keras_hub")
    group = measure(mode)
    ours, theirs = (group["contenders"][name] for name in contenders.KERAS)
    assert ours["parameters"] == theirs["parameters"] > 0
    lines = shown(group)
    assert lines["keras_vit"].split()[-2] == "1.00"
    ratio = theirs["images_per_second"] / ours["images_per_second"]
    assert lines["keras_hub"].split()[-2] == f"{ratio:.2f}"


@pytest.mark.slow
@pytest.mark.only_on("torch")
def test_contenders_are_one_model():
    counts = {}
    for name in contenders.KERAS + contenders.TORCH:
        pytest.importorskip(name)
        rows = measure("train", (name,))["contenders"]
        counts[name] = rows[name]["parameters"]
    patch = 16 * 16 * 3
    # vit-pytorch: no bias of query, key, value; a LayerNorm before and one after the patches.
    counts["vit_pytorch"] += 3 * 20 - 2 * patch - 2 * 20
    assert len(set(counts.values())) == 1
    deeper = measure("train", ("timm",), TINY.replace(depth=2))["contenders"]["timm"]
    assert deeper["parameters"] not in counts.values()


@pytest.mark.backend_free
def test_table_of_choosing_has_a_row_for_each_size():
    speeds = {
        "vit_ti16": dict(zip(choosing.FILES, (97.24, 131.9, 1893.2), strict=True)),
        "vit_s16": dict(zip(choosing.FILES, (40.0, 70.55, 107.2), strict=True)),
    }
    lines = choosing.table(speeds).splitlines()
    assert lines[0] == "|  | SavedModel, float32 | SavedModel, bfloat16 | TFLite, dynamic |"
    assert lines[2:] == ["| `vit_ti16` | 97.2 | 132 | 1890 |", "| `vit_s16` | 40 | 70.5 | 107 |"]


@pytest.mark.slow
@pytest.mark.only_on("tensorflow")
@pytest.mark.parametrize("file", choosing.FILES)
def test_choosing_measures_each_file(file, tmp_path):
    job = {"file": file, "batch": 2, "threads": 1, "rounds": 5, "budget": 0}
    measure = choosing.measure_tflite if file == choosing.TFLITE else choosing.measure_saved_model
    assert measure(TINY, tmp_path, job) > 0


def test_throughput_does_not_import_keras_itself():
    code = "import benchmarks.throughput, sys; assert 'keras' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
