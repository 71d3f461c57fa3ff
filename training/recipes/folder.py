"""Your own images: a folder with one sub-folder a class.

    flowers/train/daisy/1.jpg  flowers/train/rose/1.jpg  flowers/test/daisy/2.jpg ...

Command: `python -m training.train --recipe folder --data flowers --workdir runs/flowers`
    A model of ImageNet-21k is fetched once; `--set model.weights=FILE` starts from another.
Hardware: one GPU; on a CPU take `--set model.variant=vit_ti16` or
    `--set model.method=linear_probe`.
Reach: what the images allow.
Source: the fine-tuning settings of the ViT paper at 224 px, with AdamW, which asks for less tuning.
"""

from keras_vit.train.recipe import Augment, Data, Model, Optimizer, Recipe, Run, Schedule


def folder() -> Recipe:
    """ViT-B/16 of ImageNet-21k, fine-tuned for 20 epochs."""
    return Recipe(
        name="folder",
        data=Data("folder"),
        model=Model("vit_b16", weights="augreg_in21k", config={"drop_path": 0.1}),
        run=Run(batch_size=32, epochs=20),
        optimizer=Optimizer(
            "adamw", learning_rate=1e-4, weight_decay=0.05, global_clipnorm=1.0, layer_decay=0.75
        ),
        schedule=Schedule(warmup_steps=15),
        augment=Augment(crop="inception", crop_area=(0.3, 1.0), flip=True),
    )
