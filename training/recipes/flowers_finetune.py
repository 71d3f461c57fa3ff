"""Oxford Flowers-102 from ImageNet-21k, as in the ViT paper (arXiv 2010.11929, Table 5, B.1.1).

Command: `python -m training.train --recipe flowers_finetune --workdir runs/flowers`
Hardware: as `cifar10_finetune`, but 500 steps only: an hour on one GPU.
Reach: 99.38 % (paper, B/16 from ImageNet-21k).
    Not run: neither the weights nor the images were at hand.
Source: the paper; image handling of vision_transformer, vit_jax/input_pipeline.py.
"""

from keras_vit.train.recipe import (
    Augment,
    Data,
    Evaluation,
    Model,
    Optimizer,
    Recipe,
    Run,
    Schedule,
)


def flowers_finetune() -> Recipe:
    """ViT-B/16 of ImageNet-21k at 384 px on 1,020 images, 500 steps."""
    return Recipe(
        name="flowers_finetune",
        data=Data("tfds:oxford_flowers102"),
        model=Model("vit_b16", weights="augreg_in21k", config={"image_size": 384}),
        run=Run(batch_size=512, steps=500, precision="mixed_bfloat16"),
        # The best of 0.001, 0.003, 0.01 and 0.03 on the validation split.
        optimizer=Optimizer("sgd", learning_rate=0.03, momentum=0.9, global_clipnorm=1.0),
        schedule=Schedule(warmup_steps=100),
        augment=Augment(crop="inception", crop_area=(0.05, 1.0), flip=True),
        evaluation=Evaluation(every=50),
    )
