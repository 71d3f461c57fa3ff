# %% [markdown]
# # What a ViT sees
#
# Where does a ViT look, and what supports its prediction? Each question is one function of
# `keras_vit.explain`. This notebook first trains a small ViT on drawn images, because there we know
# where the right place is, and can measure whether a map finds it.
#
# It needs `pip install "keras3-vit[tensorflow,explain]"`. How to read each figure, on larger models
# and photos: [docs/explain.md](../docs/explain.md).

# %%
import keras
import matplotlib.pyplot as plt
import numpy as np

import keras_vit
from keras_vit import explain, preprocessing

keras.utils.set_random_seed(0)
NAMES = ["checks", "dots", "plain", "stripes"]
rows, columns = np.mgrid[:32, :32]


def add_disc(image, name, x, y, radius, rng):
    """Draws a disc with a pattern of random colors into an image."""
    r, c = (rows + rng.integers(4)) // 2, (columns + rng.integers(4)) // 2
    pattern = {
        "checks": (r + c) % 2 == 0,
        "dots": (r % 2 == 0) & (c % 2 == 0),
        "plain": r >= 0,
        "stripes": (r if rng.random() < 0.5 else c) % 2 == 0,
    }[name]
    disc = (rows - y) ** 2 + (columns - x) ** 2 < radius**2
    image[disc] = rng.integers(50, 150, 3)
    image[disc & pattern] = rng.integers(150, 256, 3)


def background(rng):
    return np.full((32, 32, 3), rng.integers(0, 100, 3), "uint8")


def pictures(count, rng):
    """Images with one disc each, their classes, and where the discs are."""
    images, classes, places = [], rng.integers(0, 4, count), []
    for k in classes:
        radius = rng.integers(6, 12)
        x, y = rng.integers(radius, 32 - radius, 2)
        images.append(background(rng))
        add_disc(images[-1], NAMES[k], x, y, radius, rng)
        places.append((x, y, radius))
    return np.stack(images), classes, places


rng = np.random.default_rng(0)
x, y, _ = pictures(1000, rng)
x_test, y_test, places = pictures(200, rng)

figure, axes = plt.subplots(1, 8, figsize=(7, 1.2))
for axis, image, k in zip(axes, x, y, strict=False):
    axis.imshow(image)
    axis.set_title(NAMES[k], fontsize=8)
    axis.axis("off")

# %%
vit = keras_vit.vit_ti16(
    labels=NAMES,
    image_size=32,
    patch_size=4,
    width=64,
    depth=4,
    num_heads=4,
    mlp_dim=128,
    class_token=False,
    pooling="mean",
)
model = keras_vit.Classifier(vit)
schedule = keras.optimizers.schedules.CosineDecay(2e-3, 12 * 32)
model.compile(
    keras.optimizers.AdamW(schedule, weight_decay=0.05),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(x, y, batch_size=32, epochs=12, verbose=0)
print(f"test accuracy {model.evaluate(x_test, y_test, verbose=0)[1]:.1%}")

# %% [markdown]
# ## Where it looks
#
# Attention rollout follows what the head reads back through all blocks, to the patches.

# %%
explain.plot_attention_rollout(model, x_test[0])

# %% [markdown]
# The same, head by head: a row is a block, a column a head. Heads differ: some look at the disc,
# some at its edge, some at the background.

# %%
explain.plot_class_token_maps(model, x_test[0])

# %% [markdown]
# ## What supports a class
#
# Two functions show which patches raise the logit of a class, by default of the predicted one:
# Grad-CAM at one block, and attention times gradient through all blocks.

# %%
i = int(np.flatnonzero(y_test == NAMES.index("checks"))[0])
explain.plot_grad_cam(model, x_test[i])

# %%
explain.plot_attention_gradient(model, x_test[i])

# %% [markdown]
# ## Does the map find the disc?
#
# A map looks convincing easily, so measure it. Which share of a map lies on the disc, over 200 test
# images? A map that knows nothing would have the disc's share of the area.

# %%
pixels = preprocessing.preprocess(list(x_test), model.config)
centers = np.arange(2, 32, 4)  # of the patches


def on_disc(x, y, radius):
    return np.hypot(centers - x, centers[:, None] - y) <= radius + 2


discs = np.stack([on_disc(*place) for place in places])
maps = {
    "attention rollout": explain.rollout_map(model, pixels),
    "Grad-CAM": explain.grad_cam(model, pixels),
    "attention x gradient": explain.attention_gradient(model, pixels),
}
print(f"{'area of the disc':22} {discs.mean():.0%}")
for name, values in maps.items():
    share = (values.reshape(discs.shape) * discs).sum() / values.sum()
    print(f"{name:22} {share:.0%} on the disc")

# %% [markdown]
# ## And the disc of the class?
#
# Now two discs in an image, of two classes, which the model never saw in training. Is the evidence
# for a class on its own disc?

# %%
images, classes = [], []
for _ in range(100):
    first, second = rng.choice(4, 2, replace=False)
    images.append(background(rng))
    add_disc(images[-1], NAMES[first], 9, 9, 8, rng)
    add_disc(images[-1], NAMES[second], 23, 22, 8, rng)
    classes.append(first)
plt.figure(figsize=(1.5, 1.5))
plt.imshow(images[0])
plt.axis("off")
plt.show()

own, other = on_disc(9, 9, 8), on_disc(23, 22, 8)
pixels = preprocessing.preprocess(images, model.config)
for name, function in (
    ("Grad-CAM", explain.grad_cam),
    ("attention x gradient", explain.attention_gradient),
):
    values = function(model, pixels, np.array(classes))
    on_own, on_other = ((values * disc).sum() / values.sum() for disc in (own, other))
    print(f"{name:22} {on_own:.0%} on its own disc, {on_other:.0%} on the other")

# %% [markdown]
# If the two shares are close, the maps show where the model looks, and not why it chose a class:
# this model was trained on one disc an image, and never had to tell two apart. Measure before you
# believe a map. [docs/explain.md](../docs/explain.md) has larger models, and how to read each
# figure.

# %% [markdown]
# ## What it has learned
#
# The map at row r and column c shows how similar the position embedding of that patch is to all
# others. In a model that was trained for long, near positions are similar. Twelve epochs are only a
# beginning.

# %%
explain.plot_position_similarity(model)

# %% [markdown]
# ## One page with all of it
#
# `write_report` writes an interactive page that works offline. From a shell: `keras-vit explain
# discs.keras picture.jpg --out seen.html`.

# %%
explain.write_report(model, x_test[i], "seen.html", title="A disc")
model.save("discs.keras")
