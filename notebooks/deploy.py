# %% [markdown]
# # Deploy
#
# One trained model becomes a SavedModel, a TFLite file, an ONNX file, and a server. Every export is
# compared with the model before it gets its name.
#
# It needs `pip install "keras3-vit[tensorflow,train,export,onnx,serve]"`. Which file for which
# device: [docs/deploy.md](../docs/deploy.md).

# %%
import base64
import io
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import keras
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_vit

keras.utils.set_random_seed(0)

# %% [markdown]
# ## A model to deploy
#
# A small ViT that reads handwritten digits. Any model of keras_vit goes the same way.

# %%
digits = load_digits()
pixels = (digits.images[..., None] * 255 / 16).astype("uint8")
x, x_test, y, y_test = train_test_split(pixels, digits.target, test_size=0.2, random_state=0)
names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
vit = keras_vit.vit_ti16(
    labels=names,
    image_size=8,
    in_channels=1,
    patch_size=2,
    width=64,
    depth=4,
    num_heads=4,
    mlp_dim=128,
    position_embedding="sincos_2d",
    pooling="mean",
)
model = keras_vit.Classifier(vit)
schedule = keras.optimizers.schedules.CosineDecay(2e-3, 20 * 45)
model.compile(
    keras.optimizers.AdamW(schedule, weight_decay=0.05),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(x, y, batch_size=32, epochs=20, verbose=0)
model.save("digits.keras")
print(f"test accuracy {model.evaluate(x_test, y_test, verbose=0)[1]:.1%}")

# %% [markdown]
# ## Export
#
# The graph of an export is not the training graph: norms and scales are folded into the products.
# `accuracy_data` runs the file on labeled images, and refuses to write it if it loses more than
# `max_drop` percentage points.

# %%
images = keras_vit.preprocessing.preprocess(list(x_test), model.config)
exports = [
    keras_vit.export_saved_model(
        model, "savedmodels/digits"
    ),  # TF Serving: PNG or JPEG in, labels out
    keras_vit.export_tflite(
        model, "digits.tflite", quantize="dynamic", accuracy_data=(images, y_test), max_drop=1.0
    ),
    keras_vit.export_onnx(model, "digits.onnx"),
]
for export in exports:
    seen = export.verification
    error = seen.difference / seen.logits_range
    name = Path(export.path).as_posix()
    print(f"{name:20} {export.size / 1000:5.0f} kB, differs by {error:.0e} of the logits' range")

# %% [markdown]
# ## Run the files
#
# `keras_vit.runtime.open` runs each in its own runtime: TensorFlow, LiteRT, ONNX Runtime. Pixels in
# uint8 are normalized as the file says.

# %%
wanted = model.predict(x_test, verbose=0).argmax(-1)
for export in exports:
    opened = keras_vit.runtime.open(export.path)
    found = opened.probabilities(x_test).argmax(-1)
    right, same = np.mean(found == y_test), np.mean(found == wanted)
    print(f"{opened.kind:12} accuracy {right:.1%}, the same class as the model in {same:.1%}")

# %% [markdown]
# ## Serve
#
# In a shell: `keras-vit serve digits.keras`. It has TensorFlow Serving's REST API, and a page to
# drop pictures on at `/`. Here the notebook starts it on any free port and reads its address.
# `log.txt` has its log.

# %%
server = subprocess.Popen(
    [sys.executable, "-m", "keras_vit_cli", "serve", "digits.keras", "--port", "0"],
    stdout=subprocess.PIPE,
    stderr=open("log.txt", "w"),
    text=True,
)
address = server.stdout.readline().strip()
with urllib.request.urlopen(f"{address}v1/models/digits") as response:
    print(json.load(response)["model_version_status"][0]["state"])

# %% [markdown]
# A client sends files. With `curl` it is the same request:
#
#     base64 < digit.png | tr -d '\n' |
#       sed 's|.*|{"signature_name": "classify", "instances": [{"b64": "&"}]}|' |
#       curl -s -d @- http://127.0.0.1:8501/v1/models/digits:predict

# %%
files = []
for pixels in x_test[:6]:
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0]).save(file, "PNG")
    files.append(file.getvalue())
body = {
    "signature_name": "classify",
    "instances": [{"b64": base64.b64encode(file).decode()} for file in files],
}
url = f"{address}v1/models/digits:predict"
with urllib.request.urlopen(url, json.dumps(body).encode()) as response:
    answers = json.load(response)["predictions"]

figure, axes = plt.subplots(1, 6, figsize=(8, 1.7))
for axis, pixels, answer in zip(axes, x_test, answers, strict=False):
    axis.imshow(pixels[..., 0], cmap="gray")
    axis.set_title(f"{answer['labels'][0]} {answer['scores'][0]:.0%}", fontsize=9)
    axis.axis("off")

# %% [markdown]
# SIGTERM stops the server: what it has accepted is answered first.

# %%
server.terminate()
print("exit code", server.wait(timeout=30))
print(json.loads(Path("log.txt").read_text().splitlines()[-1])["event"])

# %% [markdown]
# Next: TensorFlow Serving in Docker ([docs/serving.md](../docs/serving.md)), a page in the browser
# ([docs/browser](../docs/browser/README.md)), int8 with calibration
# ([docs/deploy.md](../docs/deploy.md)).
