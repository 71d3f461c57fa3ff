"""The ResNet in front of a hybrid ViT: tokens are patches of its feature map."""

import keras
from keras import ops

from keras_vit.layers.composite import Composite
from keras_vit.layers.group_norm import GroupNormalization

GROUPS = 32
"""Groups of channels of every group norm."""
EXPANSION = 4
"""A bottleneck gives so many times the channels that it works with."""
STANDARDIZATIONS = ("deviation", "variance", "none")


@keras.saving.register_keras_serializable("keras_vit")
class StdConv2D(keras.layers.Layer):
    """A convolution without bias, whose kernel is standardized in every call.

    Shapes: B batch, H x W pixels, C channels, F filters, k x k kernel, s stride.

    Each filter has mean 0 and deviation 1 over its k * k * C numbers: w' = (w - mean) / std, where
    a small number keeps the divisor from 0. It is added to the deviation, std(w) + 1e-5, or to the
    variance, sqrt(var(w) + 1e-8). With "none" the kernel stays as it is. Edges are padded with
    zeros as TensorFlow's "SAME" does: with a stride of 2, one more below and on the right than
    above and on the left.

    Args:
        filters: F.
        kernel_size: k.
        strides: s.
        standardization: "deviation" (vision_transformer), "variance" (timm) or "none".
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: `(B, H, W, C)`.

    Returns:
        `(B, H / s, W / s, F)`, rounded up.

    Reference:
        arXiv 1903.10520, Eq. 5.

    Example:

    >>> StdConv2D(filters=8, kernel_size=3, strides=2)(keras.ops.ones((2, 6, 4, 3))).shape
    (2, 3, 2, 8)
    """

    def __init__(self, filters, kernel_size, strides=1, standardization="deviation", **kwargs):
        super().__init__(**kwargs)
        sizes = {"filters": filters, "kernel_size": kernel_size, "strides": strides}
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive int. Received: {name}={value!r}")
        if standardization not in STANDARDIZATIONS:
            raise ValueError(
                f"standardization must be one of {', '.join(map(repr, STANDARDIZATIONS))}. "
                f"Received: standardization={standardization!r}"
            )
        self.filters = filters
        self.kernel_size = kernel_size
        self.strides = strides
        self.standardization = standardization

    def build(self, input_shape):
        self.kernel = self.add_weight(
            name="kernel",
            shape=(self.kernel_size, self.kernel_size, input_shape[-1], self.filters),
            initializer="lecun_normal",
            autocast=False,  # the statistics of a kernel are not for half precision
        )
        self.built = True

    def standardized_kernel(self):
        """w', `(k, k, C, F)` in at least float32."""
        w = ops.convert_to_tensor(self.kernel)
        w = ops.cast(w, keras.backend.result_type(w.dtype, "float32"))
        if self.standardization == "none":
            return w
        w = ops.subtract(w, ops.mean(w, axis=(0, 1, 2), keepdims=True))
        variance = ops.mean(ops.square(w), axis=(0, 1, 2), keepdims=True)  # (1, 1, 1, F)
        if self.standardization == "variance":
            return ops.multiply(w, ops.rsqrt(ops.add(variance, 1e-8)))
        return ops.divide(w, ops.add(ops.sqrt(variance), 1e-5))

    def call(self, x):
        kernel = ops.cast(self.standardized_kernel(), x.dtype)
        if keras.backend.backend() == "torch" and self.compute_dtype == "float32":
            return self._channels_first(x, kernel)
        return ops.conv(
            x, kernel, strides=self.strides, padding="same", data_format="channels_last"
        )  # (B, H / s, W / s, F)

    def _channels_first(self, x, kernel):
        """On a CPU, torch's sums over channels that are last are up to nine times less exact."""
        _, rows, columns, channels = ops.shape(x)
        x = ops.transpose(x, (0, 3, 1, 2))  # (B, C, H, W)
        # The detour over one axis moves the numbers, too, by which torch chooses its code.
        x = ops.reshape(ops.reshape(x, (-1,)), (-1, channels, rows, columns))
        x = ops.conv(x, kernel, strides=self.strides, padding="same", data_format="channels_first")
        return ops.transpose(x, (0, 2, 3, 1))  # (B, H / s, W / s, F)

    def compute_output_shape(self, input_shape):
        batch, *sides, _ = input_shape
        return (batch, *(_strided(side, self.strides) for side in sides), self.filters)

    def get_config(self):
        return {
            **super().get_config(),
            "filters": self.filters,
            "kernel_size": self.kernel_size,
            "strides": self.strides,
            "standardization": self.standardization,
        }


@keras.saving.register_keras_serializable("keras_vit")
class Bottleneck(Composite):
    """A residual unit of a ResNet: 1x1, 3x3 and 1x1 convolutions, each with a group norm.

    Shapes: B batch, H x W cells, C channels, F filters, s stride.

    `relu(shortcut(x) + GN(conv_3(relu(GN(conv_2(relu(GN(conv_1(x)))))))))`, where `conv_2` has the
    stride. The shortcut is `x`, or where the shape changes a strided 1x1 convolution and a norm.

    Args:
        filters: F, channels of `conv_1` and `conv_2`; `conv_3` has four times as many.
        strides: s.
        epsilon: Epsilon of the group norms.
        standardization: As in `StdConv2D`.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: `(B, H, W, C)`.

    Returns:
        `(B, H / s, W / s, 4 F)`, rounded up.

    Reference:
        arXiv 1512.03385, Fig. 5 (right); the norms are those of arXiv 1912.11370, Section 3.1.

    Example:

    >>> Bottleneck(filters=32, strides=2)(keras.ops.ones((2, 6, 4, 64))).shape
    (2, 3, 2, 128)
    """

    def __init__(self, filters, strides=1, epsilon=1e-6, standardization="deviation", **kwargs):
        super().__init__(**kwargs)
        self.filters = filters
        self.strides = strides
        self.epsilon = epsilon
        self.standardization = standardization
        self.conv_1 = self._conv(filters, 1, 1, "conv_1")
        self.norm_1 = _group_norm(epsilon, self.dtype_policy, "norm_1")
        self.conv_2 = self._conv(filters, 3, strides, "conv_2")
        self.norm_2 = _group_norm(epsilon, self.dtype_policy, "norm_2")
        self.conv_3 = self._conv(EXPANSION * filters, 1, 1, "conv_3")
        # A new unit starts as its shortcut.
        self.norm_3 = _group_norm(epsilon, self.dtype_policy, "norm_3", gamma="zeros")
        self.shortcut_conv = None
        self.shortcut_norm = None

    def _conv(self, filters, kernel_size, strides, name):
        return StdConv2D(
            filters,
            kernel_size,
            strides,
            self.standardization,
            dtype=self.dtype_policy,
            name=name,
        )

    def build(self, input_shape):
        shape = self.compute_output_shape(input_shape)
        inner = (*input_shape[:-1], self.filters)
        if self.strides > 1 or input_shape[-1] != shape[-1]:
            self.shortcut_conv = self._conv(shape[-1], 1, self.strides, "shortcut_conv")
            self.shortcut_norm = _group_norm(self.epsilon, self.dtype_policy, "shortcut_norm")
            self.shortcut_conv.build(input_shape)
            self.shortcut_norm.build(shape)
        self.conv_1.build(input_shape)
        self.norm_1.build(inner)
        self.conv_2.build(inner)
        self.norm_2.build((*shape[:-1], self.filters))
        self.conv_3.build((*shape[:-1], self.filters))
        self.norm_3.build(shape)
        self.built = True
        self._restore_trainable()

    def call(self, x):
        shortcut = x
        if self.shortcut_conv is not None and self.shortcut_norm is not None:
            shortcut = self.shortcut_norm(self.shortcut_conv(x))  # (B, H / s, W / s, 4 F)
        x = ops.relu(self.norm_1(self.conv_1(x)))  # (B, H, W, F)
        x = ops.relu(self.norm_2(self.conv_2(x)))  # (B, H / s, W / s, F)
        x = self.norm_3(self.conv_3(x))  # (B, H / s, W / s, 4 F)
        return ops.relu(ops.add(x, shortcut))

    def compute_output_shape(self, input_shape):
        batch, *sides, _ = input_shape
        return (batch, *(_strided(side, self.strides) for side in sides), EXPANSION * self.filters)

    def get_config(self):
        return {
            **super().get_config(),
            "filters": self.filters,
            "strides": self.strides,
            "epsilon": self.epsilon,
            "standardization": self.standardization,
        }


@keras.saving.register_keras_serializable("keras_vit")
class ResNetStem(Composite):
    """A ResNet without its pooling and its head, which gives a feature map.

    Shapes: B batch, H x W pixels, C channels, w width, n stages.

    "As an alternative to raw image patches, the input sequence can be formed from feature maps of a
    CNN." The root, a 7x7 convolution, group norm, ReLU and 3x3 max-pooling, each convolution and
    pooling with stride 2, is followed by stages of bottlenecks; all stages but the first halve the
    map and double the channels.

    Args:
        depths: Bottlenecks of each stage, such as (3, 4, 9); () means the root alone.
        width: w, channels of the root, a multiple of 32.
        epsilon: Epsilon of the group norms.
        standardization: As in `StdConv2D`.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        images: `(B, H, W, C)`.

    Returns:
        `(B, H / s, W / s, F)` with s = 2^(n + 1) and F = 2^(n + 1) w; with the root alone s = 4 and
        F = w.

    Reference:
        arXiv 2010.11929, Section 3.1, "Hybrid Architecture".

    Example:

    >>> ResNetStem(depths=(1, 2), width=32)(keras.ops.ones((2, 32, 16, 3))).shape
    (2, 4, 2, 256)
    """

    def __init__(self, depths=(), width=64, epsilon=1e-6, standardization="deviation", **kwargs):
        super().__init__(**kwargs)
        if not isinstance(width, int) or width < 1 or width % GROUPS:
            raise ValueError(f"width must be a multiple of {GROUPS}. Received: width={width!r}")
        if not all(isinstance(depth, int) and depth > 0 for depth in depths):
            raise ValueError(f"depths must be positive ints. Received: depths={depths!r}")
        self.depths = list(depths)
        self.width = width
        self.epsilon = epsilon
        self.standardization = standardization
        self.root_conv = StdConv2D(
            width, 7, 2, standardization, dtype=self.dtype_policy, name="root_conv"
        )
        self.root_norm = _group_norm(epsilon, self.dtype_policy, "root_norm")
        self.units = [
            Bottleneck(
                width * 2**stage,
                2 if stage and not unit else 1,
                epsilon,
                standardization,
                dtype=self.dtype_policy,
                name=f"stage_{stage}_unit_{unit}",
            )
            for stage, depth in enumerate(depths)
            for unit in range(depth)
        ]

    def build(self, input_shape):
        if len(input_shape) != 4:
            raise ValueError(
                "images must be (batch, height, width, channels). "
                f"Received: images with shape {tuple(input_shape)}"
            )
        self.root_conv.build(input_shape)
        shape = self.root_conv.compute_output_shape(input_shape)
        self.root_norm.build(shape)
        shape = _pooled(shape)
        for unit in self.units:
            unit.build(shape)
            shape = unit.compute_output_shape(shape)
        self.built = True
        self._restore_trainable()

    def call(self, images):
        x = ops.relu(self.root_norm(self.root_conv(images)))  # (B, H / 2, W / 2, w)
        x = ops.max_pool(
            x, 3, strides=2, padding="same", data_format="channels_last"
        )  # (B, H / 4, W / 4, w)
        for unit in self.units:
            x = unit(x)
        return x  # (B, H / s, W / s, F)

    def compute_output_shape(self, input_shape):
        shape = _pooled(self.root_conv.compute_output_shape(input_shape))
        for unit in self.units:
            shape = unit.compute_output_shape(shape)
        return shape

    def get_config(self):
        return {
            **super().get_config(),
            "depths": self.depths,
            "width": self.width,
            "epsilon": self.epsilon,
            "standardization": self.standardization,
        }


def _group_norm(epsilon, policy, name, gamma="ones"):
    return GroupNormalization(
        GROUPS, epsilon=epsilon, gamma_initializer=gamma, dtype=policy, name=name
    )


def _pooled(shape):
    batch, *sides, channels = shape
    return (batch, *(_strided(side, 2) for side in sides), channels)


def _strided(side, strides):
    return None if side is None else -(-side // strides)
