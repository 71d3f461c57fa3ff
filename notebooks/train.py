# %% [markdown]
# # Train on your images
#
# From a folder of images to a model that names what is in them. The folder has one sub-folder a
# class: `pictures/checks/1.jpg`, `pictures/dots/1.jpg`, ... To use your own, set `FOLDER` to its
# path and skip the cell that draws.
#
# It needs `pip install "keras3-vit[tensorflow,train]"`. This ViT starts from random weights,
# because the task is easy and nothing must be downloaded. On photos start from a pretrained one:
# [fine_tune.ipynb](fine_tune.ipynb).

# %%
from pathlib import Path

import keras
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

import keras_vit

FOLDER = Path("pictures")
keras.utils.set_random_seed(0)

# %% [markdown]
# ## The images
#
# Discs of any color, size and place with one of four patterns, as JPEG files of 64 x 64 pixels: 250
# a class.

# %%
NAMES = ["checks", "dots", "plain", "stripes"]


def picture(name, rng):
    rows, columns = np.mgrid[:64, :64]
    r, c = (rows + rng.integers(8)) // 4, (columns + rng.integers(8)) // 4
    pattern = {
        "checks": (r + c) % 2 == 0,
        "dots": (r % 2 == 0) & (c % 2 == 0),
        "plain": r >= 0,
        "stripes": (r if rng.random() < 0.5 else c) % 2 == 0,
    }[name]
    radius = rng.integers(12, 24)
    x, y = rng.integers(radius, 64 - radius, 2)
    disc = (rows - y) ** 2 + (columns - x) ** 2 < radius**2
    image = np.full((64, 64, 3), rng.integers(0, 100, 3), "uint8")
    image[disc] = rng.integers(50, 150, 3)
    image[disc & pattern] = rng.integers(150, 256, 3)
    return Image.fromarray(image)


rng = np.random.default_rng(0)
for name in NAMES:
    (FOLDER / name).mkdir(parents=True)
    for i in range(250):
        picture(name, rng).save(FOLDER / name / f"{i}.jpg", quality=90)

# %% [markdown]
# Keras reads the folder. 20 % of the images are for testing only.

# %%
train, test = keras.utils.image_dataset_from_directory(
    FOLDER,
    image_size=(32, 32),
    batch_size=32,
    validation_split=0.2,
    subset="both",
    seed=0,
    verbose=False,
)
names = train.class_names
images, labels = next(iter(train))
figure, axes = plt.subplots(2, 8, figsize=(7, 2.2))
for axis, image, label in zip(axes.flat, images, labels, strict=False):
    axis.imshow(image.numpy().astype("uint8"))
    axis.set_title(names[label], fontsize=8)
    axis.axis("off")

# %% [markdown]
# The pixels go from 0 to 255, and stay so. Each epoch sees the images flipped in another way. That
# is Keras' own layer.

# %%
flip = keras.layers.RandomFlip()
train = train.map(lambda x, y: (flip(x, training=True), y))

# %% [markdown]
# ## The model
#
# A small ViT: 64 patches of 4 x 4 pixels, four blocks. `Classifier` puts the preprocessing in front
# of it.

# %%
vit = keras_vit.vit_ti16(
    labels=names,
    image_size=32,
    patch_size=4,
    width=64,
    depth=4,
    num_heads=4,
    mlp_dim=128,
    position_embedding="sincos_2d",
    pooling="mean",
)
model = keras_vit.Classifier(vit)
epochs = 12
schedule = keras.optimizers.schedules.CosineDecay(2e-3, epochs * len(train))
model.compile(
    keras.optimizers.AdamW(schedule, weight_decay=0.05),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(train, validation_data=test, epochs=epochs, verbose=0).history
print(f"{vit.count_params():,} weights, test accuracy {history['val_accuracy'][-1]:.1%}")

# %%
plt.figure(figsize=(5, 2.5))
plt.plot(history["accuracy"], label="training")
plt.plot(history["val_accuracy"], label="test")
plt.xlabel("epoch")
plt.ylabel("accuracy")
plt.legend()
plt.show()

# %% [markdown]
# ## What it gets wrong
#
# Look at the mistakes before you change anything.

# %%
x = np.concatenate([images for images, _ in test])
y = np.concatenate([labels for _, labels in test])
found = model.predict(test, verbose=0).argmax(-1)
wrong = np.flatnonzero(found != y)
print(f"{len(wrong)} of {len(y)} test images are wrong")
figure, axes = plt.subplots(1, 8, figsize=(7, 1.3))
for axis in axes:
    axis.axis("off")
for axis, i in zip(axes, wrong, strict=False):
    axis.imshow(x[i].astype("uint8"))
    axis.set_title(f"{names[found[i]]}?\n{names[y[i]]}", fontsize=7)

# %% [markdown]
# ## Use it
#
# The file has the weights, the preprocessing and the names. `classify` takes files, PIL images and
# arrays of any size.

# %%
model.save("patterns.keras")
again = keras.saving.load_model("patterns.keras")  # after `import keras_vit`
again.classify([FOLDER / "dots" / "0.jpg", FOLDER / "stripes" / "0.jpg"], top_k=2)

# %% [markdown]
# The same without Python, with checkpoints, augmentation that suits the number of images, and a
# report:
#
#     keras-vit train --data pictures --workdir runs/pictures
#
# Next: [deploy](deploy.ipynb) it, or look at [what it sees](explain.ipynb). The guides:
# [docs/fine-tuning.md](../docs/fine-tuning.md), [docs/training.md](../docs/training.md).
