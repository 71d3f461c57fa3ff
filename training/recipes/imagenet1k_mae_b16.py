"""ImageNet-1k without labels: MAE (arXiv 2111.06377, Table 8).

Command: `python -m training.train --recipe imagenet1k_mae_b16 --workdir runs/mae_b16`
Hardware: the source trained on 64 V100 GPUs for about a day.
Reach: 83.66 % (L 85.95 %, H 86.93 %) after fine-tuning for 100 epochs with layer-wise decay .65.
    Not run here beyond three steps on random pixels: it needs GPUs and ImageNet.
Source: the paper, and facebookresearch/mae (PRETRAIN.md). Sines and cosines are those of
    big_vision, from which MAE's differ in their frequencies.
"""

from keras_vit.train.recipe import (
    Augment,
    Data,
    Evaluation,
    Model,
    Objective,
    Optimizer,
    Recipe,
    Run,
    Schedule,
)


def imagenet1k_mae_b16() -> Recipe:
    """ViT-B/16 sees a quarter of the patches; a decoder of 8 blocks draws the others."""
    return Recipe(
        name="imagenet1k_mae_b16",
        data=Data("tfds:imagenet2012", test="validation"),
        model=Model(
            "vit_b16",
            config={
                "position_embedding": "sincos_2d",
                "pooling": "mean",
                "resize_method": "bicubic",
                "crop_fraction": 0.875,
                "pixel_mean": (0.485, 0.456, 0.406),
                "pixel_std": (0.229, 0.224, 0.225),
            },
        ),
        run=Run(batch_size=4096, epochs=800, precision="mixed_bfloat16"),
        optimizer=Optimizer(
            "adamw", learning_rate=1.5e-4, base_batch=256, beta_2=0.95, weight_decay=0.05
        ),
        schedule=Schedule(warmup_steps=40 * 313),
        augment=Augment(crop="inception", crop_area=(0.2, 1.0), flip=True),
        evaluation=Evaluation(batch_size=1024, every=20),
        objective=Objective(
            "mae",
            {"mask_ratio": 0.75, "decoder_width": 512, "decoder_depth": 8, "decoder_heads": 16},
        ),
    )
