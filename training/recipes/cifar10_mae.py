"""CIFAR-10 without labels: a masked autoencoder of all 50,000 pictures, for `cifar10_few_labels`.

Command: `python -m training.train --recipe cifar10_mae --workdir runs/cifar10_mae`
Hardware: one core of an AMD EPYC with AVX512-BF16: 44 minutes, with other work on the second one,
    and with KERAS_BACKEND=torch.
Reach: k-NN accuracy 52.2 % (one run, November 2026; with 15 epochs, in 21 minutes, 49.3 %). What
    counts is the accuracy of `cifar10_few_labels`.
Source: MAE (arXiv 2111.06377), with our own sizes for 32 px: a decoder of 2 blocks.
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


def cifar10_mae() -> Recipe:
    """The ViT of `cifar10_plain`, which sees 16 of 64 patches of each picture."""
    return Recipe(
        name="cifar10_mae",
        data=Data("tfds:cifar10"),
        model=Model(
            config={
                "patch_size": 4,
                "width": 192,
                "depth": 6,
                "num_heads": 3,
                "mlp_dim": 384,
                "class_token": False,
                "pooling": "mean",
                "position_embedding": "sincos_2d",
                "pixel_mean": (0.4914, 0.4822, 0.4465),
                "pixel_std": (0.2470, 0.2435, 0.2616),
            },
        ),
        run=Run(batch_size=128, epochs=30, precision="mixed_bfloat16"),
        optimizer=Optimizer("adamw", learning_rate=1e-3, beta_2=0.95, weight_decay=0.05),
        schedule=Schedule(warmup_steps=400),
        augment=Augment(crop="pad", flip=True),
        evaluation=Evaluation(batch_size=500, every=5),
        objective=Objective(
            "mae",
            {"mask_ratio": 0.75, "decoder_width": 96, "decoder_depth": 2, "decoder_heads": 3},
        ),
    )
