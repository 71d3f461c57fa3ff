# %% [markdown]
# # Fine-tune a pretrained ViT
#
# A pretrained ViT learns a new task from few images. There are three ways:
#
# | | what is trained | when |
# |---|---|---|
# | linear probe | the head | very few images; fast, because the ViT is frozen |
# | LoRA | small adapters in every block, and the head | many tasks that share one ViT |
# | full | everything | the default |
#
# This notebook compares them with training from scratch. So that it needs no download, it makes the
# pretrained model itself: a small ViT that knows five patterns. The new task is four other
# patterns, with ten images of each. It needs `pip install "keras3-vit[tensorflow,train]"`. The
# guide, with settings for larger models and data, is
# [docs/fine-tuning.md](../docs/fine-tuning.md).

# %%
import time

import keras
import matplotlib.pyplot as plt
import numpy as np

import keras_vit

keras.utils.set_random_seed(0)
KNOWN = ["plain", "checks", "dots", "rows", "columns"]
NEW = ["bars", "diagonal", "grid", "steps"]


def picture(name, rng):
    """A disc of any color, size and place with a pattern, (32, 32, 3)."""
    rows, columns = np.mgrid[:32, :32]
    r, c = rows + rng.integers(4), columns + rng.integers(4)
    pattern = {
        "plain": r >= 0,
        "checks": (r // 2 + c // 2) % 2 == 0,
        "dots": (r // 2 % 2 == 0) & (c // 2 % 2 == 0),
        "rows": r // 2 % 2 == 0,
        "columns": c // 2 % 2 == 0,
        "bars": c // 4 % 2 == 0,
        "diagonal": (r + c) // 2 % 2 == 0,
        "grid": (r // 2 % 2 == 0) | (c // 2 % 2 == 0),
        "steps": (r // 4 + c // 2) % 2 == 0,
    }[name]
    radius = rng.integers(6, 12)
    x, y = rng.integers(radius, 32 - radius, 2)
    disc = (rows - y) ** 2 + (columns - x) ** 2 < radius**2
    image = np.full((32, 32, 3), rng.integers(0, 100, 3), "uint8")
    image[disc] = rng.integers(50, 150, 3)
    image[disc & pattern] = rng.integers(150, 256, 3)
    return image


def pictures(names, each, rng):
    classes = np.repeat(np.arange(len(names)), each)
    return np.stack([picture(names[k], rng) for k in classes]), classes


def compiled(vit, learning_rate):
    model = keras_vit.Classifier(vit)  # pixels from 0 to 255 in, logits out
    model.compile(
        keras.optimizers.AdamW(learning_rate, weight_decay=0.05),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


# %% [markdown]
# ## The pretrained model
#
# With your own data, this is one line instead:
# `keras_vit.vit_s16(labels=names, weights="augreg_in21k")`, or
# `keras_vit.from_pretrained("hf://facebook/dinov2-small", labels=names)`.

# %%
config = keras_vit.ViTConfig(
    image_size=32,
    patch_size=4,
    width=64,
    depth=4,
    num_heads=4,
    mlp_dim=128,
    position_embedding="sincos_2d",
    class_token=False,
    pooling="mean",
    num_classes=5,
    labels=tuple(KNOWN),
)
rng = np.random.default_rng(0)
x, y = pictures(KNOWN, 250, rng)
schedule = keras.optimizers.schedules.CosineDecay(2e-3, 12 * 40)
pretrained = compiled(keras_vit.ViT(config), schedule)
pretrained.fit(x, y, batch_size=32, epochs=12, verbose=0)
pretrained.save("pretrained.keras")

# %% [markdown]
# ## The new task
#
# 40 images to learn from, 300 to test.

# %%
x_few, y_few = pictures(NEW, 10, rng)
x_test, y_test = pictures(NEW, 75, rng)

figure, axes = plt.subplots(4, 10, figsize=(6, 2.6))
for axis, image in zip(axes.flat, x_few, strict=True):
    axis.imshow(image)
    axis.set(xticks=[], yticks=[])
for axis, name in zip(axes[:, 0], NEW, strict=True):
    axis.set_ylabel(name, rotation=0, ha="right", va="center")


# %%
def from_scratch():
    return compiled(keras_vit.ViT(config.replace(labels=tuple(NEW), num_classes=4)), 1e-3)


def linear_probe():
    vit = keras_vit.from_pretrained("pretrained.keras", labels=NEW)  # with a new head
    for layer in vit.layers:
        layer.trainable = layer.name == "head"
    return compiled(vit, 1e-2)


def lora():
    vit = keras_vit.from_pretrained("pretrained.keras", labels=NEW)
    vit.enable_lora(rank=4)
    return compiled(vit, 3e-3)


def full():
    return compiled(keras_vit.from_pretrained("pretrained.keras", labels=NEW), 1e-3)


for way in (from_scratch, linear_probe, lora, full):
    keras.utils.set_random_seed(0)
    model = way()
    start = time.perf_counter()
    model.fit(x_few, y_few, batch_size=20, epochs=40, verbose=0)
    seconds = time.perf_counter() - start
    trained = sum(int(np.prod(w.shape)) for w in model.trainable_weights)
    accuracy = model.evaluate(x_test, y_test, verbose=0)[1]
    print(f"{way.__name__:12}  accuracy {accuracy:.1%}  {trained:7,} weights  {seconds:.0f} s")

# %% [markdown]
# All three ways use what the ViT has learned from other patterns. Which one is best depends on the
# data and on the rates, so try them on yours. From scratch, 40 images do not suffice.
#
# ## Use it
#
# A `.keras` file has the preprocessing and the names of the classes, and LoRA's adapters are added
# to the weights.

# %%
model.save("patterns.keras")
again = keras.saving.load_model("patterns.keras")
for i in (0, 100, 200):
    (label, share), (other, rest) = again.classify(x_test[i], top_k=2)[0]
    print(f"{label} {share:.0%}, then {other} {rest:.0%}; it is {NEW[y_test[i]]}")

# %% [markdown]
# Next: [deploy](deploy.ipynb) it, or look at [what it sees](explain.ipynb).
