"""The files that are damaged: small valid ones of every kind, made as the tests make theirs.

A seed maps the names of files in a folder to their bytes.
"""

import io
import json
import tempfile
from pathlib import Path

import numpy as np
from conformance import KINDS, TINY, tiny_model
from PIL import Image

import keras_vit
from keras_vit import ViT

Seed = dict[str, bytes]
SQUARE = TINY.replace(image_size=16)


def folder_of(path: Path) -> Seed:
    """The files of a folder."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def made(write, *arguments) -> Seed:
    """The files that a function writes into a folder."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), *arguments)
        return folder_of(Path(folder))


def weights() -> list[Seed]:
    """A checkpoint of each kind of file."""
    timm, google = ViT(SQUARE.replace(interpolation="timm")), ViT(SQUARE.replace(gelu="tanh"))
    library = made(lambda f: keras_vit.save_pretrained(timm, f, format="timm"))
    return [
        library,
        made(lambda f: keras_vit.save_pretrained(ViT(SQUARE), f, format="huggingface")),
        made(lambda f: keras_vit.save_pretrained(google, f / "a.npz", format="google")),
        made(lambda f: keras_vit.save_pretrained(timm, f / "a.safetensors", format="timm")),
        made(_write_h5, google),
        {**_sharded(library["model.safetensors"]), "config.json": library["config.json"]},
        made(_write_pickle),
    ]


def _write_h5(folder: Path, model) -> None:
    model.save_weights(folder / "a.weights.h5")
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))


def _write_pickle(folder: Path) -> None:
    """A PyTorch checkpoint is refused, whatever is in it."""
    import pickle

    (folder / "a.bin").write_bytes(pickle.dumps({"cls_token": [1.0, 2.0]}))


def _sharded(content: bytes) -> Seed:
    from safetensors.numpy import load, save

    arrays = load(content)
    names = sorted(arrays)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    shards = {file: save({name: arrays[name] for name in part}) for file, part in parts.items()}
    return {"model.safetensors.index.json": json.dumps(index).encode(), **shards}


def configs() -> list[Seed]:
    """A folder of every library that states its model in JSON."""
    kinds = {
        "timm": TINY.replace(interpolation="timm", labels=("a", "b", "c")),
        "huggingface": TINY.replace(labels=("a", "b", "c"), crop_fraction=0.875),
        "huggingface_clip": SQUARE.replace(
            **{"class_token": False, "pooling": "mean", "gelu": "tanh"},
            interpolation="huggingface",
        ),
        "huggingface_dinov3": KINDS["rope"].replace(
            **{"num_classes": 0, "width": 24, "num_heads": 3, "head_dim": None, "key_bias": False},
            image_size=16,
        ),
    }
    found = []
    for format, config in kinds.items():
        try:
            found.append(
                made(lambda f, m, n: keras_vit.save_pretrained(m, f, format=n), ViT(config), format)
            )
        except ValueError as error:
            raise ValueError(f"the seed of {format} cannot be written: {error}") from error
    return found


def keras_files() -> list[Seed]:
    """A `.keras` file of a plain model, one with labels, and one that is quantized."""
    quantized = ViT(TINY)
    quantized.quantize("int8")
    models = [ViT(TINY), ViT(KINDS["rope"].replace(labels=("a", "b", "c"))), quantized]
    return [made(lambda f, m: m.save(f / "m.keras"), model) for model in models]


def runs() -> list[Seed]:
    """The folder of a run that was killed, with two checkpoints."""
    return [made(_write_run)]


def _write_run(folder: Path) -> None:
    from keras_vit.train import load_recipe
    from keras_vit.train.checkpoint import files

    recipe = load_recipe("digits").to_dict()
    (folder / "recipe.json").write_text(json.dumps(recipe))
    (folder / "results.json").write_text('{"top1": 0.75, "steps": 14}')
    (folder / "log.jsonl").write_text('{"epoch": 1, "loss": 2.5}\n{"epoch": 2, "loss": 1.25}\n')
    for step in (8, 11):
        position = {"epoch": 2, "step_in_epoch": step % 4, "step": step, "stopped": False}
        facts = {
            "time": 1e9 + step,
            "position": position,
            "best": {"name": "val_loss", "value": 0.5, "step": 8},
            "steps_per_epoch": 4,
            "inside_epoch": step % 4 > 0,
            "versions": {"backend": "jax"},
            "callbacks": [],
            "random": {},
            "extra": {"steps": 14, "steps_per_epoch": 4, "devices": "cpu", "recipe": recipe},
        }
        arrays = {"model/0:kernel": np.full(50, step, "float32")}
        files.write(folder / "checkpoints", step, arrays, facts)


def tflite() -> list[Seed]:
    """Exports with a fixed batch, with any batch, and for pixels."""
    from keras_vit.export.fold import fold
    from keras_vit.export.tflite.metadata import add_metadata
    from keras_vit.export.tflite.operators import to_float32_tflite

    found = []
    for kind, batch, output, images in (
        ("paper", 2, "logits", "float32"),
        ("rope", None, "probabilities", "uint8"),
        ("map", 1, "features", "float32"),
    ):
        model = tiny_model(kind)
        how = {"output": output, "images": images, "activation": "softmax"}
        content = to_float32_tflite(fold(model), batch_size=batch, **how)
        record = {"format": 1, "config": model.config.to_dict(), "labels": None, **how}
        found.append({"m.tflite": add_metadata(content, record, "m", "A seed.")})
    return found


def onnx() -> list[Seed]:
    """Exports for floats and for pixels."""

    def write(folder, kind, images):
        keras_vit.export_onnx(tiny_model(kind), folder / "m.onnx", images=images)

    return [made(write, "paper", "float32"), made(write, "rope", "uint8")]


def saved_models() -> list[Seed]:
    """An exported version."""

    def write(folder):
        keras_vit.export_saved_model(ViT(TINY), folder)

    return [{name.removeprefix("1/"): data for name, data in made(write).items()}]


def presets() -> list[Seed]:
    """Presets of KerasHub: of each family, and a classifier."""
    from keras_hub import models

    sizes = {"image_shape": (16, 16, 3), "patch_size": 8, "num_layers": 1, "num_heads": 2}
    vit = models.ViTBackbone(**sizes, hidden_dim=8, mlp_dim=12)
    tower = {**sizes, "hidden_dim": 8, "intermediate_dim": 12}
    clip = models.CLIPVisionEncoder(**tower)
    for variable in clip.weights:
        if "position_ids" in variable.path:  # zeros in a new model, these in published ones
            variable.assign(np.arange(variable.shape[1])[None])
    return [
        made(lambda folder, model=model: model.save_to_preset(str(folder)))
        for model in (
            vit,
            models.ViTImageClassifier(vit, 3),
            models.DINOV2Backbone(**tower, position_embedding_shape=(16, 16, 3)),
            models.DINOV3Backbone(**tower),
            clip,
            models.SigLIPVisionEncoder(**tower),
        )
    ]


def pictures() -> list[Seed]:
    """A small picture in every format, and in the variants that decoders treat differently."""
    x = np.random.default_rng(0).integers(0, 256, (23, 31, 3), dtype=np.uint8)
    x[5:15] = 200
    image = Image.fromarray(x)
    frames = {"save_all": True, "append_images": [image.rotate(90), image.rotate(180)]}
    exif = Image.Exif()
    exif[274] = 6
    variants = (
        ("a.jpg", image, {"exif": exif, "icc_profile": b"x" * 50}),
        ("b.jpg", image, {"progressive": True}),
        ("c.jpg", image.convert("CMYK"), {}),
        ("d.jpg", image.convert("L"), {"comment": b"a comment"}),
        ("a.png", image, {}),
        ("b.png", image.convert("RGBA"), {}),
        ("c.png", image.convert("P"), {"transparency": 3}),
        ("d.png", Image.fromarray(x[..., 0].astype("uint16") * 257), {}),
        ("a.webp", image, {"quality": 50}),
        ("b.webp", image, {"lossless": True}),
        ("c.webp", image.convert("RGBA"), {"exif": exif}),
        ("d.webp", image, {**frames, "lossless": True}),
        ("a.bmp", image, {}),
        ("b.bmp", image.convert("P"), {}),
        ("a.gif", image, {}),
        ("b.gif", image, frames),
        ("a.tif", image, {}),
        ("b.tif", image, {"compression": "tiff_lzw"}),
        ("c.tif", image, {"compression": "tiff_adobe_deflate", "tiffinfo": {278: 5}}),
        ("d.tif", image, {"compression": "jpeg"}),
        ("e.tif", image.convert("1"), {"compression": "group4"}),
        ("f.tif", image, {"compression": "packbits", **frames}),
    )
    found = []
    for name, picture, options in variants:
        kind = {"jpg": "JPEG", "tif": "TIFF"}.get(name[2:], name[2:].upper())
        picture.save(data := io.BytesIO(), kind, **options)
        found.append({name: data.getvalue()})
    return [*found, {"t.tif": tiled_tiff(x)}]


def tiled_tiff(x: np.ndarray) -> bytes:
    """A TIFF of deflated tiles, which Pillow reads and does not write."""
    import struct
    import zlib

    padded = np.zeros((32, 32, 3), np.uint8)
    padded[: x.shape[0], : x.shape[1]] = x
    tiles = [
        zlib.compress(padded[i : i + 16, j : j + 16].tobytes()) for i in (0, 16) for j in (0, 16)
    ]
    places = np.cumsum([8, *map(len, tiles)])
    data = b"".join(tiles)
    extra = 8 + len(data)
    bits = struct.pack("<3H", 8, 8, 8)
    offsets = struct.pack("<4I", *places[:4].tolist())
    counts = struct.pack("<4I", *map(len, tiles))
    tags = [
        (256, 3, 1, x.shape[1]), (257, 3, 1, x.shape[0]), (258, 3, 3, extra),
        (259, 3, 1, 8), (262, 3, 1, 2), (277, 3, 1, 3), (284, 3, 1, 1),
        (322, 3, 1, 16), (323, 3, 1, 16), (324, 4, 4, extra + 6), (325, 4, 4, extra + 22),
    ]  # fmt: skip
    directory = struct.pack("<H", len(tags))
    directory += b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    start = b"II*\0" + struct.pack("<I", extra + 38)
    return start + data + bits + offsets + counts + directory
