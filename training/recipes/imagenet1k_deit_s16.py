"""ImageNet-1k from scratch with strong augmentation: DeiT (arXiv 2012.12877, Table 9).

Command: `python -m training.train --recipe imagenet1k_deit_s16 --workdir runs/deit_s16`
Hardware: the source trained on 8 GPUs for 2 to 3 days.
Reach: 79.9 % (Ti 72.2 %, B 81.8 %: `--set model.variant=vit_b16`), without distillation.
    Not run: it needs GPUs and ImageNet.
Source: the paper. It uses timm's rand-m9-mstd0.5-inc1: magnitudes spread around 9, each operation
    with a chance of one half, and grow with it; here each is done, and at 9.
"""

from keras_vit.train.recipe import (
    Augment,
    Data,
    Evaluation,
    Loss,
    Model,
    Optimizer,
    Recipe,
    Run,
    Schedule,
)


def imagenet1k_deit_s16() -> Recipe:
    """DeiT-S: RandAugment, MixUp, CutMix, erasing, repeated augmentation, stochastic depth."""
    return Recipe(
        name="imagenet1k_deit_s16",
        data=Data("tfds:imagenet2012", test="validation"),
        model=Model(
            "vit_s16",
            config={
                "drop_path": 0.1,
                "head_init": "truncated_normal",
                "resize_method": "bicubic",
                "crop_fraction": 0.875,
                "pixel_mean": (0.485, 0.456, 0.406),
                "pixel_std": (0.229, 0.224, 0.225),
            },
        ),
        run=Run(batch_size=1024, epochs=300, precision="mixed_bfloat16"),
        optimizer=Optimizer("adamw", learning_rate=5e-4, base_batch=512, weight_decay=0.05),
        schedule=Schedule(warmup_steps=5 * 1251, final=0.01),
        augment=Augment(
            crop="inception",
            flip=True,
            rand_augment_layers=2,
            rand_augment_magnitude=9,
            erasing=0.25,
            mixup=0.8,
            cutmix=1.0,
            repeats=3,
        ),
        loss=Loss("softmax", label_smoothing=0.1),
        evaluation=Evaluation(every=5),
    )
