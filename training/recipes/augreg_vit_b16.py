"""ImageNet-1k from scratch with the AugReg paper's settings (arXiv 2106.10270, Section 3).

Command: `python -m training.train --recipe augreg_vit_b16 --workdir runs/augreg_b16`
Hardware: the source trained on TPU v3, 300 epochs.
Reach: no number: the paper's 85.49 % is B/16 pre-trained on ImageNet-21k and fine-tuned at 384 px.
    Not run: it needs GPUs and ImageNet.
Source: the paper, and the name of its best B/16 without ImageNet-21k:
    B_16-i1k-300ep-lr_0.001-aug_strong2-wd_0.1-do_0.1-sd_0.1.
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


def augreg_vit_b16() -> Recipe:
    """Adam, sigmoid loss, "strong2" augmentation, dropout and stochastic depth of 0.1."""
    return Recipe(
        name="augreg_vit_b16",
        data=Data("tfds:imagenet2012", train="train[:99%]", test="validation"),
        model=Model(
            "vit_b16",
            config={
                "gelu": "tanh",
                "dropout": 0.1,
                "drop_path": 0.1,
                "head_bias": -6.9,
                "crop_fraction": 0.875,
            },
        ),
        run=Run(batch_size=4096, epochs=300, precision="mixed_bfloat16"),
        optimizer=Optimizer("adamw", learning_rate=1e-3, weight_decay=0.1, global_clipnorm=1.0),
        schedule=Schedule(warmup_steps=10_000),
        augment=Augment(
            crop="inception",
            crop_area=(0.05, 1.0),
            flip=True,
            rand_augment_layers=2,
            rand_augment_magnitude=20,
            mixup=0.8,
        ),
        loss=Loss("sigmoid"),
        evaluation=Evaluation(every=5, few_shot=(1, 5, 10, 25)),
    )
