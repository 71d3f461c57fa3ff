"""A recipe's learning rate schedule: linear warm-up, then a cosine or a constant."""

import keras

from keras_vit.train.recipe import Schedule


def make_schedule(
    schedule: Schedule, learning_rate: float, steps: int
) -> keras.optimizers.schedules.LearningRateSchedule:
    """The learning rate of each update, counted from 0.

    It is 0 at step 0 and the peak at step `warmup_steps`, if there is a warm-up; the last step,
    `steps - 1`, has `final` times the peak.

    Args:
        schedule: Its shape.
        learning_rate: The peak.
        steps: Updates in the whole run.
    """
    warmup = schedule.warmup_steps
    if not 0 <= warmup < steps:
        raise ValueError(
            "warmup_steps must be in [0, updates of the run). "
            f"Received: warmup_steps={warmup!r}, with {steps} updates"
        )
    return keras.optimizers.schedules.CosineDecay(
        0.0 if warmup else learning_rate,
        decay_steps=max(1, steps - 1 - warmup),
        # A cosine from the peak to the peak is a constant.
        alpha=1.0 if schedule.name == "constant" else schedule.final,
        warmup_target=learning_rate if warmup else None,
        warmup_steps=warmup,
    )


class PerUpdate(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule over updates, for an optimizer that accumulates gradients.

    Keras calls a schedule with the number of batches, not of updates.

    Args:
        schedule: A schedule over updates.
        accumulate: Batches in an update.
    """

    def __init__(self, schedule, accumulate):
        self.schedule = schedule
        self.accumulate = accumulate

    def __call__(self, step):
        return self.schedule(step // self.accumulate)

    def get_config(self):
        schedule = keras.saving.serialize_keras_object(self.schedule)
        return {"schedule": schedule, "accumulate": self.accumulate}

    @classmethod
    def from_config(cls, config):
        schedule = keras.saving.deserialize_keras_object(config["schedule"])
        return cls(schedule, config["accumulate"])
