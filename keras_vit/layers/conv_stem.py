"""A convolutional stem: tokens are cells of the feature map of a few 3x3 convolutions."""

import keras
from keras import ops

from keras_vit.layers.composite import Composite
from keras_vit.layers.group_norm import GroupNormalization
from keras_vit.layers.resnet_stem import StdConv2D

GROUP = 16
"""Channels of a group of every group norm."""


@keras.saving.register_keras_serializable("keras_vit")
class ConvStem(Composite):
    """A stack of 3x3 convolutions, each with a norm and a ReLU, which gives a feature map.

    Shapes: B batch, H x W pixels, C channels, w width, n stages.

    Each stage halves the map in its first convolution and, from the second stage on, doubles the
    channels. One convolution a stage is the rule; ViT_C-18GF has `depths=(1, 2, 2, 1)`. A 1x1
    convolution to the width of the tokens follows, which is `Patches` with patches of one cell.

    # Deviation: group norms of 16 channels instead of batch norms. A batch norm differs between
    # training and inference, depends on the other images, and would have to be averaged over
    # devices and over the weights of a teacher; a group norm is the same everywhere.

    Args:
        depths: Convolutions of each stage.
        width: w, channels of the first stage, a multiple of 16.
        epsilon: Epsilon of the group norms.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        images: `(B, H, W, C)`.

    Returns:
        `(B, H / 2^n, W / 2^n, 2^(n - 1) w)`, sides rounded up.

    Reference:
        arXiv 2106.14881, Section 4 and Appendix A.

    Example:

    >>> ConvStem(depths=(1, 1), width=48)(keras.ops.ones((2, 32, 32, 3))).shape
    (2, 8, 8, 96)
    """

    def __init__(self, depths=(1, 1, 1, 1), width=64, epsilon=1e-6, **kwargs):
        super().__init__(**kwargs)
        if not isinstance(width, int) or width < 1 or width % GROUP:
            raise ValueError(f"width must be a multiple of {GROUP}. Received: width={width!r}")
        if not depths or not all(isinstance(depth, int) and depth > 0 for depth in depths):
            raise ValueError(f"depths must be positive ints. Received: depths={depths!r}")
        self.depths = list(depths)
        self.width = width
        self.epsilon = epsilon
        policy = self.dtype_policy
        shapes = [
            (width * 2**stage, 1 if i else 2)
            for stage, depth in enumerate(depths)
            for i in range(depth)
        ]
        self.convs = [
            StdConv2D(
                filters, 3, strides, "none", dtype=policy, name=f"conv_{i}" if i else "root_conv"
            )
            for i, (filters, strides) in enumerate(shapes)
        ]
        self.norms = [
            GroupNormalization(
                filters // GROUP,
                epsilon=epsilon,
                dtype=policy,
                name=f"norm_{i}" if i else "root_norm",
            )
            for i, (filters, _) in enumerate(shapes)
        ]

    @property
    def root_conv(self):
        """The convolution that reads the pixels."""
        return self.convs[0]

    def build(self, input_shape):
        if len(input_shape) != 4:
            raise ValueError(
                "images must be (batch, height, width, channels). "
                f"Received: images with shape {tuple(input_shape)}"
            )
        shape = input_shape
        for conv, norm in zip(self.convs, self.norms, strict=True):
            conv.build(shape)
            shape = conv.compute_output_shape(shape)
            norm.build(shape)
        self.built = True
        self._restore_trainable()

    def call(self, images):
        x = images
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = ops.relu(norm(conv(x)))
        return x  # (B, H / 2^n, W / 2^n, 2^(n - 1) w)

    def compute_output_shape(self, input_shape):
        for conv in self.convs:
            input_shape = conv.compute_output_shape(input_shape)
        return input_shape

    def get_config(self):
        return {
            **super().get_config(),
            "depths": self.depths,
            "width": self.width,
            "epsilon": self.epsilon,
        }
