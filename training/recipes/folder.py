"""Your own images: a folder with one sub-folder a class.

    flowers/daisy/1.jpg  flowers/rose/1.jpg ...      a tenth of each class is for tests
    flowers/train/daisy/1.jpg  flowers/test/daisy/2.jpg ...

Command: `keras-vit train --data flowers --workdir runs/flowers`
    Model, epochs and augmentation follow from the number of images, and are printed. A model of
    ImageNet-21k is fetched once; `--set model.weights=FILE` starts from another.
Hardware: one GPU; on a CPU take `--set model.variant=vit_ti16` or
    `--set model.method=linear_probe`.
Reach: what the images allow.
Source: the fine-tuning settings of the ViT paper at 224 px, with AdamW, which asks for less tuning.
"""

from keras_vit.train.folder_recipe import Survey, recipe_for, survey
from keras_vit.train.recipe import Data, Recipe


def folder(data: str | None = None) -> Recipe:
    """A ViT of ImageNet-21k, fine-tuned; without a folder as for a thousand images."""
    return recipe_for(survey(data) if data else Survey(Data("folder"), images=1_000, classes=10))
