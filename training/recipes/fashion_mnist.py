"""Fashion-MNIST: 60,000 + 10,000 gray images of 28x28 pixels.

Command: `python -m training.train --recipe fashion_mnist --workdir runs/fashion`
Hardware: two CPU cores: 13 minutes, with as much other work beside it.
Reach: 91 % (91.61 % in the one run there was, TensorFlow, November 2026).
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


def fashion_mnist() -> Recipe:
    """ViT of 0.5 M parameters on 4x4 pixels, trained with Muon."""
    return Recipe(
        name="fashion_mnist",
        data=Data("tfds:fashion_mnist"),
        model=Model(
            config={
                "patch_size": 4,
                "width": 128,
                "depth": 4,
                "num_heads": 2,
                "mlp_dim": 256,
                "class_token": False,
                "pooling": "mean",
                "position_embedding": "sincos_2d",
                "patch_dropout": 0.25,
                "pixel_mean": (0.286,),
                "pixel_std": (0.353,),
            },
        ),
        run=Run(batch_size=128, epochs=12, precision="mixed_bfloat16"),
        optimizer=Optimizer("muon", learning_rate=0.005, momentum=0.95, weight_decay=0.1),
        schedule=Schedule(warmup_steps=300),
        augment=Augment(crop="pad", crop_padding=2, flip=True),
        loss=Loss("softmax", label_smoothing=0.1),
        evaluation=Evaluation(batch_size=500),
    )
