"""CIFAR-100 from ImageNet-21k, as in the ViT paper (arXiv 2010.11929, Table 5 and Appendix B.1.1).

Command: `python -m training.train --recipe cifar100_finetune --workdir runs/cifar100`
Hardware: as `cifar10_finetune_b16`.
Reach: 91.67 % (paper), 92.06 % (google-research/vision_transformer, B/16 from ImageNet-21k).
    Not run: neither the weights nor such hardware were at hand.
Source: vision_transformer, vit_jax/configs/common.py and vit_jax/input_pipeline.py.
"""

import dataclasses

from keras_vit.train.recipe import Data, Recipe
from keras_vit.train.recipe_files import load_recipe


def cifar100_finetune() -> Recipe:
    """As CIFAR-10, with a hundred classes."""
    data = Data("tfds:cifar100", train="train[:98%]")
    return dataclasses.replace(
        load_recipe("cifar10_finetune_b16"), name="cifar100_finetune", data=data
    )
