# %% [markdown]
# # Train without labels
#
# Images are easy to get, labels are not. A masked autoencoder (MAE, [arXiv
# 2111.06377](https://arxiv.org/abs/2111.06377)) learns from images alone: the ViT sees some of the
# patches, and a small decoder draws the hidden ones. Then a few labels suffice.
#
# This notebook uses the 1,797 handwritten digits of scikit-learn, of which only 100 get a label. It
# needs `pip install "keras3-vit[tensorflow,train]"`. The guide is
# [docs/self-supervision.md](../docs/self-supervision.md).

# %%
import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import keras_vit
from keras_vit import train

keras.utils.set_random_seed(0)
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.images))
images = (digits.images[order][..., None] / 8 - 1).astype(
    "float32"
)  # from -1 to 1, as a ViT expects
labels = digits.target[order]
unlabeled, test, test_labels = images[:1400], images[1400:], labels[1400:]
few, few_labels = images[:100], labels[:100]

# %% [markdown]
# ## Without labels
#
# The ViT is small, because the images are: 16 patches of 2 x 2 pixels. Half of the patches are
# hidden.

# %%
config = keras_vit.ViTConfig(
    image_size=8,
    patch_size=2,
    in_channels=1,
    width=64,
    depth=4,
    num_heads=4,
    mlp_dim=128,
    pooling="mean",
    num_classes=10,
)
vit = keras_vit.ViT(config)
untrained = vit.get_weights()

mae = train.MAE(vit, mask_ratio=0.5, decoder_width=32, decoder_depth=1, decoder_heads=4, seed=0)
mae.compile(keras.optimizers.AdamW(1e-3, weight_decay=0.05))
history = mae.fit(unlabeled, batch_size=100, epochs=60, verbose=0).history
plt.figure(figsize=(5, 2.5))
plt.plot(history["loss"])
plt.xlabel("epoch")
plt.ylabel("error of the hidden patches")
plt.show()

# %% [markdown]
# Images that were not used for training: the original, what the ViT saw of it, and what the decoder
# drew.

# %%
rows = {"original": 0, "seen": 1, "drawn": 2}
drawn = mae.reconstruct(test[:8])  # three arrays of pixels from 0 to 1
figure, axes = plt.subplots(3, 8, figsize=(8, 3.2))
for (name, row), panels in zip(rows.items(), axes, strict=True):
    panels[0].set_ylabel(name)
    for axis, pixels in zip(panels, drawn[row], strict=True):
        axis.imshow(pixels[..., 0], cmap="gray", vmin=0, vmax=1)
        axis.set(xticks=[], yticks=[])

# %% [markdown]
# ## With 100 labels
#
# `vit` is the model that was trained, in place. Fine-tuning it needs a few seconds. For comparison,
# the same ViT learns from the same 100 labels without the first step.


# %%
def fine_tuned(model):
    model.compile(
        keras.optimizers.AdamW(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(few, few_labels, batch_size=50, epochs=60, verbose=0)
    return model.evaluate(test, test_labels, verbose=0)[1]


scratch = keras_vit.ViT(config)
scratch.set_weights(untrained)
print(f"from scratch: accuracy {fine_tuned(scratch):.1%}")
print(f"after MAE:    accuracy {fine_tuned(vit):.1%}")

# %% [markdown]
# The gap depends on the seed: [docs/self-supervision.md](../docs/self-supervision.md) has three
# seeds. For images of your own:
#
# - `keras-vit train --recipe cifar10_mae --data FOLDER` runs the same on a folder, with checkpoints
#   and a report.
# - `train.DINO` learns features that need no fine-tuning at all, and needs more images and time.
# - Before you train from nothing, try a published model that was trained without labels on many
#   more images: `keras_vit.from_pretrained("hf://facebook/dinov2-small", num_classes=10)`.
