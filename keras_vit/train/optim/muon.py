"""Muon for the kernels of encoder blocks and of the stem."""

import math
import re

import keras
from keras import ops

from keras_vit.train.distribution.devices import in_replica
from keras_vit.train.optim.layer_decay import BLOCK, LayerFactors

STEM = re.compile(r"(^|/)stem/(?!root_)")
"""Paths of the stem's weights, but for the layers that read the pixels."""


class Muon(keras.optimizers.Muon):
    """Keras' Muon for the kernels of the encoder blocks and the stem, and its Adam for all else.

    Deviation: Keras' Muon leaves the kernels of attention to Adam, because they are (D, h, d) and
    (h, d, D), and takes the head. Here they are orthogonalized as the matrices of the
    paper, (D, h * d) and (h * d, D), and the convolutions of a stem as (k * k * C, F), but for the
    first one, which reads the pixels. Patches, positions, tokens, norms, biases, LoRA, pre-logits
    and head are left to Adam.

    Args:
        iteration_dtype: In what the Newton-Schulz iteration computes, such as "bfloat16", as its
            author does; None is the dtype of the kernels.
        **kwargs: Arguments of `keras.optimizers.Muon`.
    """

    def __init__(self, iteration_dtype=None, **kwargs):
        super().__init__(**kwargs)
        self.iteration_dtype = iteration_dtype

    def get_config(self):
        return {**super().get_config(), "iteration_dtype": self.iteration_dtype}

    def _should_use_adamw(self, variable):
        ours = BLOCK.search(variable.path) or STEM.search(variable.path)
        return not (ours and variable.name == "kernel")

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        """Orthogonalizes matrices of one shape together: a few large products, not many."""
        if isinstance(self, LayerFactors) or in_replica():
            return super()._backend_update_step(grads, trainable_variables, learning_rate)
        adams, groups = [], {}
        for pair in zip(grads, trainable_variables, strict=True):
            if self.adam_velocities[self._get_variable_index(pair[1])] is not None:
                adams.append(pair)
            else:
                groups.setdefault(self._matrix_shape(pair[1]), []).append(pair)
        if adams:
            super()._backend_update_step(*zip(*adams, strict=True), learning_rate)
        for pairs in groups.values():
            self._update_together(pairs, learning_rate)
        return None

    def _muon_update_step(self, gradient, variable, lr, m):
        self._update_together([(gradient, variable)], lr)

    def _update_together(self, pairs, learning_rate):
        """One update of kernels that are matrices of one shape."""
        shape = self._matrix_shape(pairs[0][1])
        matrices = ops.stack([ops.reshape(self._momentum(g, v), shape) for g, v in pairs])
        updates = self.zeropower_via_newtonschulz5(
            ops.cast(matrices, self.iteration_dtype or matrices.dtype), self.ns_steps
        )
        # Scaled to the size of Adam's updates (arXiv 2502.16982).
        updates = (
            ops.cast(updates, matrices.dtype)
            * (math.sqrt(max(shape)) * self.rms_rate)
            * learning_rate
        )
        for (_, variable), update in zip(pairs, ops.unstack(updates, len(pairs)), strict=True):
            self.assign_sub(variable, ops.reshape(update, variable.shape))

    def zeropower_via_newtonschulz5(self, x, steps):
        """Keras' iteration; on torch with products that add in the same pass, on float32 sums."""
        if keras.backend.backend() != "torch":
            return super().zeropower_via_newtonschulz5(x, steps)
        import torch

        tall = x.shape[-2] > x.shape[-1]
        x = x.mT if tall else x
        x = x / (ops.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)
        for _ in range(steps):
            a = x @ x.mT
            b = torch.baddbmm(a, a, a, beta=self.muon_b, alpha=self.muon_c)
            x = torch.baddbmm(x, b, x, beta=self.muon_a)
        return x.mT if tall else x

    def _momentum(self, gradient, variable):
        m = self.momentums[self._get_variable_index(variable)]
        momentum = gradient + self.momentum * m
        self.assign(m, momentum)
        return gradient + self.momentum * momentum if self.nesterov else momentum

    def _matrix_shape(self, variable):
        """Rows and columns of the matrix that a kernel is in the paper."""
        # TensorFlow passes its own variable, which has no path.
        ours = self._trainable_variables[self._get_variable_index(variable)]
        if len(ours.shape) == 4:  # a convolution's (k, k, C, F)
            inputs = 3
        else:
            inputs = 2 if "/attention_output/" in ours.path and len(ours.shape) == 3 else 1
        return math.prod(ours.shape[:inputs]), math.prod(ours.shape[inputs:])
