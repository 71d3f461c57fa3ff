"""A Keras optimiser that does under tf.distribute what it does on one device.

Keras clips, and looks for overflows, before the gradients of the replicas are added up, and it
cannot accumulate there: `merge_call` must not be inside `tf.cond`. Here the replicas add up their
gradients first, after every batch. Then each device runs Keras' own code for one device on its copy
of the variables: all of them hold the same sum, and so do the same.
"""

import functools

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer


def for_strategy(
    optimizer: keras.optimizers.Optimizer, loss_scale: bool = False
) -> keras.optimizers.Optimizer:
    """The optimiser that `model.compile` gets in the scope of a strategy.

    Its variables, with their names and order, are those that it has on one device, and a saved
    model opens without this module. Where Keras' optimiser is right by itself (no accumulation,
    no clipping, no loss scale) nothing is changed.

    Args:
        optimizer: A Keras optimiser made in the scope of the strategy.
        loss_scale: Whether the loss is scaled, as under mixed_float16. `compile` sees that it is
            done.

    Returns:
        The same object; or, with `loss_scale`, a LossScaleOptimizer around it.
    """
    if optimizer._distribution_strategy is not tf.distribute.get_strategy():
        raise ValueError(
            "optimizer must be made in the scope of the strategy, where its variables are put on "
            f"every device. Received: optimizer={optimizer.name!r}"
        )
    if loss_scale and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        # Named as `compile` names it, for the name is in the paths of the variables.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        _change(optimizer.inner_optimizer)
        _change(optimizer)
    elif _differs(optimizer):
        _change(optimizer)
    return optimizer


def _differs(optimizer):
    """Whether Keras' code fails on several devices, or computes something else."""
    return (
        optimizer.gradient_accumulation_steps
        or any((optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm))
        or (optimizer.use_ema and optimizer.ema_overwrite_frequency)
    )


def _change(optimizer):
    if isinstance(optimizer, _Replicas):
        return
    # Of this object only the class: a new one, from the config, would not know what must not decay.
    optimizer.__class__ = _strategy_class(type(optimizer))


@functools.cache
def _strategy_class(optimizer):
    # Under the name of the class it stands for, which a saved model then names.
    public = getattr(keras.optimizers, optimizer.__name__, None) is optimizer
    module = "keras.optimizers" if public else optimizer.__module__
    bases = (_Replicas, optimizer, _OneDevice)
    return type(optimizer.__name__, bases, {"__module__": module})


class _Replicas:
    """Before the optimiser's class: what the replicas do together."""

    def apply(self, grads, trainable_variables=None):
        apply, context = super().apply, tf.distribute.get_replica_context()
        if context is None or not tf.distribute.has_strategy():
            # No replica: this is on a device already, called by the optimiser that scales the loss.
            apply(grads, trainable_variables)
            return
        if not self.built:
            raise ValueError(
                "optimizer must be built before its first step on several devices: "
                f"optimizer.build(model.trainable_variables). Received: optimizer={self.name!r}"
            )
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        grads, variables = self._filter_empty_gradients(grads, trainable_variables)
        # Keras divides the loss by the number of replicas, so that the sum is right.
        grads = context.all_reduce(tf.distribute.ReduceOp.SUM, grads)

        def on_device(_, grads):
            # Every variable read or assigned in here is this device's copy.
            apply(grads, variables)

        def on_devices(strategy, grads):
            # `update` goes through the devices of a variable: any will do, for all are everywhere.
            strategy.extended.update(self._iterations.value, on_device, args=(grads,), group=False)

        context.merge_call(on_devices, args=(grads,))

    def _tf_apply(self, grads, trainable_variables=None):
        """Of the optimiser that scales the loss: to it this is one device."""
        self._common_apply(grads, trainable_variables)


class _OneDevice(TFOptimizer):
    """After the optimiser's class, before Keras' for TensorFlow: what knows of no strategy."""

    _apply_weight_decay = BaseOptimizer._apply_weight_decay
    _backend_update_step = BaseOptimizer._backend_update_step
    _backend_increment_gradient_accumulators = (
        BaseOptimizer._backend_increment_gradient_accumulators
    )
    _overwrite_model_variables_with_average_value = (
        BaseOptimizer._overwrite_model_variables_with_average_value
    )
