"""A Keras optimizer that computes the same under tf.distribute as on one device.

Keras clips gradients, and checks for overflows, before it sums the gradients of the replicas. It
cannot accumulate there, because `merge_call` must not be inside `tf.cond`. Here the replicas sum
their gradients first, after every batch. Then each device runs Keras' code for one device on its
copy of the variables: all of them have the same sum, so all of them do the same.
"""

import functools

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer


def for_strategy(
    optimizer: keras.optimizers.Optimizer, loss_scale: bool = False
) -> keras.optimizers.Optimizer:
    """The optimizer that `model.compile` gets in the scope of a strategy.

    Its variables, their names and their order are those on one device, and a saved model opens
    without this module. Where Keras' optimizer is right by itself (no accumulation,
    no clipping, no loss scale) nothing is changed.

    Args:
        optimizer: A Keras optimizer made in the scope of the strategy.
        loss_scale: Whether the loss is scaled, as under mixed_float16. `compile` does not
            scale it again.

    Returns:
        The same object; or, with `loss_scale`, a LossScaleOptimizer around it.
    """
    if optimizer._distribution_strategy is not tf.distribute.get_strategy():
        raise ValueError(
            "optimizer must be created in the scope of the strategy, which puts its variables on "
            f"every device. Received: optimizer={optimizer.name!r}"
        )
    if loss_scale and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        # The name that `compile` gives it, which is in the paths of the variables.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        _change(optimizer.inner_optimizer)
        _change(optimizer)
    elif _differs(optimizer):
        _change(optimizer)
    return optimizer


def _differs(optimizer):
    """Whether Keras' code fails on several devices, or computes something different."""
    return (
        optimizer.gradient_accumulation_steps
        or any((optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm))
        or (optimizer.use_ema and optimizer.ema_overwrite_frequency)
    )


def _change(optimizer):
    if isinstance(optimizer, _Replicas):
        return
    # Only the class is changed: a new object from the config would lose what must not decay.
    optimizer.__class__ = _strategy_class(type(optimizer))


@functools.cache
def _strategy_class(optimizer):
    # A saved model names the original class.
    public = getattr(keras.optimizers, optimizer.__name__, None) is optimizer
    module = "keras.optimizers" if public else optimizer.__module__
    bases = (_Replicas, optimizer, _OneDevice)
    return type(optimizer.__name__, bases, {"__module__": module})


class _Replicas:
    """Precedes the optimizer's class: what the replicas do together."""

    def apply(self, grads, trainable_variables=None):
        apply, context = super().apply, tf.distribute.get_replica_context()
        if context is None or not tf.distribute.has_strategy():
            # Already on a device, called by the optimizer that scales the loss.
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
        # The sum is right, because Keras divides the loss by the number of replicas.
        grads = context.all_reduce(tf.distribute.ReduceOp.SUM, grads)

        def on_device(_, grads):
            # Variables that are read or assigned here are this device's copies.
            apply(grads, variables)

        def on_devices(strategy, grads):
            # `update` visits the devices of a variable; every variable is on all of them.
            strategy.extended.update(self._iterations.value, on_device, args=(grads,), group=False)

        context.merge_call(on_devices, args=(grads,))

    def _tf_apply(self, grads, trainable_variables=None):
        """For the optimizer that scales the loss, this is one device."""
        self._common_apply(grads, trainable_variables)


class _OneDevice(TFOptimizer):
    """Follows the optimizer's class, precedes Keras' TensorFlow class: code without a strategy."""

    _apply_weight_decay = BaseOptimizer._apply_weight_decay
    _backend_update_step = BaseOptimizer._backend_update_step
    _backend_increment_gradient_accumulators = (
        BaseOptimizer._backend_increment_gradient_accumulators
    )
    _overwrite_model_variables_with_average_value = (
        BaseOptimizer._overwrite_model_variables_with_average_value
    )
