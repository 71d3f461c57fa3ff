"""CIFAR-10 from labels and from a small ConvNet: a DeiT learns its classes with a second token.

Command: `python -m training.convnet runs/convnet`, then
    `python -m training.train --recipe cifar10_distill --workdir runs/cifar10_distill`
    The same student from labels alone, to compare with: add `--set objective.name=labels
    --set objective.teacher=null --set objective.options={} --set run.epochs=12`.
Hardware: one core of an AMD EPYC with AVX512-BF16, with other work on the second one: 16 minutes
    for the ConvNet (TensorFlow), 29.2 for the student (KERAS_BACKEND=torch).
Reach: 81.6 % (81.62 % in the one run there was, November 2026), from a ConvNet of 88.6 %. From
    labels alone, in 29.1 minutes, 81.0 % (80.96 %, one run). Ten epochs, 27.6 minutes, gave 81.0 %.
    DeiT's hard labels of a ConvNet that ran three times as long gave 78.4 % in eight epochs.
Source: DeiT (arXiv 2012.12877) with soft targets, on the ViT of `cifar10_plain`.
"""

from dataclasses import replace

from keras_vit.train.recipe import Objective, Recipe
from keras_vit.train.recipe_files import load_recipe

# The divergence is summed over the classes, as Hinton et al. do. Its mean would be a tenth of that.
SOFT = {"kind": "soft", "alpha": 0.7, "temperature": 2.0, "mean_over_classes": False}


def cifar10_distill() -> Recipe:
    """The ViT of `cifar10_plain` with a class token, which learns the labels, and a second one."""
    plain = load_recipe("cifar10_plain")
    two_heads = {"class_token": True, "distillation_token": True, "pooling": "token_pair"}
    return replace(
        plain,
        name="cifar10_distill",
        model=replace(plain.model, config=plain.model.config | two_heads),
        run=replace(plain.run, epochs=11),
        objective=Objective("distillation", SOFT, teacher="runs/convnet/convnet.keras"),
    )
