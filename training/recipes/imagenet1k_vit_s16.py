"""ImageNet-1k from scratch: "Better plain ViT baselines" (arXiv 2205.01580).

Command: `python -m training.train --recipe imagenet1k_vit_s16 --workdir runs/s16`
    `--set run.epochs=150` or `300` for the longer schedules.
Hardware: the source took 6 to 7 hours for 90 epochs on 8 TPU v3 cores.
Reach: 76.5 / 78.5 / 80.0 % after 90 / 150 / 300 epochs.
    Not run: a thousandth of it takes an hour on two CPU cores.
Source: big_vision, configs/vit_s16_i1k.py. Its decay of 1e-4 goes with the schedule alone; Keras
    multiplies by the learning rate, so it is 0.1 here.
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


def imagenet1k_vit_s16() -> Recipe:
    """ViT-S/16 with mean pooling, sin-cos positions and a tanh layer before the head."""
    return Recipe(
        name="imagenet1k_vit_s16",
        data=Data("tfds:imagenet2012", train="train[:99%]", test="validation"),
        model=Model(
            "vit_s16",
            config={
                "class_token": False,
                "pooling": "mean",
                "position_embedding": "sincos_2d",
                "representation_size": 384,
                "gelu": "tanh",
                "crop_fraction": 0.875,
            },
        ),
        run=Run(batch_size=1024, epochs=90, precision="mixed_bfloat16"),
        optimizer=Optimizer("adamw", learning_rate=1e-3, weight_decay=0.1, global_clipnorm=1.0),
        schedule=Schedule(warmup_steps=10_000),
        augment=Augment(
            crop="inception",
            crop_area=(0.05, 1.0),
            flip=True,
            rand_augment_layers=2,
            rand_augment_magnitude=10,
            mixup=0.2,
        ),
        evaluation=Evaluation(every=5, few_shot=(1, 5, 10, 25)),
    )
