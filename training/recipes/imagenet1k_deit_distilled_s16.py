"""ImageNet-1k with a teacher: DeiT's hard distillation (arXiv 2012.12877, Section 4).

Command: `python -m training.train --recipe imagenet1k_deit_distilled_s16 --workdir runs/deit
    --set objective.teacher=teacher.keras`
    The teacher is any Keras model of the 1,000 classes that takes 224 px normalized by the mean and
    deviation below, such as a model of keras.applications behind a layer that converts them.
Hardware: the source trained on 8 GPUs for about 3 days.
Reach: 81.2 % (Ti 74.5 %, B 83.4 %) with RegNetY-16GF, of 82.9 %, as teacher; 79.9 % without one.
    Not run here beyond three steps on random pixels: it needs GPUs and ImageNet.
Source: the paper. All that is not below is as in `imagenet1k_deit_s16`.
"""

from dataclasses import replace

from keras_vit.train.recipe import Objective, Recipe
from keras_vit.train.recipe_files import load_recipe


def imagenet1k_deit_distilled_s16() -> Recipe:
    """DeiT-S with a distillation token, which learns the class that the teacher names."""
    deit = load_recipe("imagenet1k_deit_s16")
    two_heads = {"distillation_token": True, "pooling": "token_pair"}
    return replace(
        deit,
        name="imagenet1k_deit_distilled_s16",
        model=replace(deit.model, config=two_heads | deit.model.config),
        objective=Objective(
            "distillation", {"kind": "hard", "alpha": 0.5}, teacher="teacher.keras"
        ),
    )
