"""Images as sequences of projected patches: x_p E of Eq. 1."""

import keras
from keras import ops

from keras_vit.layers.composite import Composite
from keras_vit.layers.rms_norm import norm_class


@keras.saving.register_keras_serializable("keras_vit")
class Patches(Composite):
    """Cuts images into patches and projects each patch to a token.

    Shapes: B batch, H x W pixels, C channels, P x P patch, N patches, D width.

    `x_p^i E + b`, which is a convolution whose stride equals its kernel size. With `norm`, a
    LayerNorm is applied to the P * P * C numbers of each patch, and another to its projection, as
    in vit-pytorch; with `norm="before"` or `norm="after"` only one of them.

    Args:
        width: D, the size of a token.
        patch_size: Height and width of a patch; one int means a square.
        use_bias: Whether the projection has a bias.
        norm: Whether to apply LayerNorms before and after the projection, or only one: "before" or
            "after" it.
        norm_epsilon: Epsilon of these norms.
        ignore_remainder: Whether pixels after the last whole patch of a row or column are ignored.
        norm_kind: "layer" (LayerNorm) or "rms" (RMSNorm).
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        images: `(B, H, W, C)`; H and W are multiples of the patch size, unless the remainder is
            ignored.

    Returns:
        Tokens `(B, N, D)`, row by row.

    Reference:
        arXiv 2010.11929, Section 3.1 and Eq. 1.

    Example:

    >>> Patches(width=8, patch_size=4)(keras.ops.ones((2, 16, 16, 1))).shape
    (2, 16, 8)
    """

    def __init__(
        self,
        width,
        patch_size,
        use_bias=True,
        norm: bool | str = False,
        norm_epsilon=1e-6,
        ignore_remainder=False,
        norm_kind="layer",
        **kwargs,
    ):
        super().__init__(**kwargs)
        pair = (patch_size, patch_size) if isinstance(patch_size, int) else tuple(patch_size)
        if len(pair) != 2 or not all(isinstance(p, int) and p > 0 for p in pair):
            raise ValueError(
                "patch_size must be a positive int or a pair of them. "
                f"Received: patch_size={patch_size!r}"
            )
        if not isinstance(width, int) or width < 1:
            raise ValueError(f"width must be a positive int. Received: width={width!r}")
        self.width = width
        self.patch_size = pair
        if norm not in (True, False, "before", "after"):
            raise ValueError(
                f"norm must be True, False, 'before' or 'after'. Received: norm={norm!r}"
            )
        self.use_bias = use_bias
        self.norm = norm
        self.norm_epsilon = norm_epsilon
        self.ignore_remainder = ignore_remainder
        self.norm_kind = norm_kind
        self.projection = keras.layers.Conv2D(
            width,
            pair,
            strides=pair,
            padding="valid",
            data_format="channels_last",
            use_bias=use_bias,
            kernel_initializer="lecun_normal",
            bias_initializer="zeros",
            dtype=self.dtype_policy,
            name="projection",
        )
        self.norm_before = self._norm("norm_before") if norm in (True, "before") else None
        self.norm_after = self._norm("norm_after") if norm in (True, "after") else None

    def _norm(self, name):
        cls = norm_class(self.norm_kind)
        return cls(epsilon=self.norm_epsilon, dtype=self.dtype_policy, name=name)

    def build(self, input_shape):
        if len(input_shape) != 4:
            raise ValueError(
                "images must be (batch, height, width, channels). "
                f"Received: images with shape {tuple(input_shape)}"
            )
        for size, patch in zip(input_shape[1:3], self.patch_size, strict=True):
            if size is not None and size % patch and not self.ignore_remainder:
                raise ValueError(
                    f"images must have a height and width that patch_size={self.patch_size} "
                    f"divides. Received: images with shape {tuple(input_shape)}"
                )
        self.projection.build(input_shape)
        if self.norm_before is not None:
            ph, pw = self.patch_size
            self.norm_before.build((None, None, ph * pw * input_shape[-1]))
        if self.norm_after is not None:
            self.norm_after.build((None, None, self.width))
        self.built = True
        self._restore_trainable()

    def call(self, images):
        if self.norm_before is not None:
            x = self._normalized(images, self.norm_before)
        else:
            x = self.projection(images)  # (B, H / P, W / P, D)
            _, gh, gw, width = ops.shape(x)
            x = ops.reshape(x, (-1, gh * gw, width))  # (B, N, D)
        return x if self.norm_after is None else self.norm_after(x)

    def _normalized(self, images, norm):
        """The projection of normalized patches, `(B, N, D)`."""
        _, height, width, channels = ops.shape(images)
        ph, pw = self.patch_size
        gh, gw = height // ph, width // pw
        x = images[:, : gh * ph, : gw * pw]
        x = ops.reshape(x, (-1, gh, ph, gw, pw, channels))
        x = ops.transpose(x, (0, 1, 3, 2, 4, 5))  # (B, gh, gw, P, P, C)
        x = norm(ops.reshape(x, (-1, gh * gw, ph * pw * channels)))  # (B, N, P * P * C)
        # A convolution of B * N images of one patch would be slower.
        kernel = ops.reshape(self.projection.kernel, (ph * pw * channels, self.width))
        x = ops.matmul(x, kernel)  # (B, N, D)
        return ops.add(x, self.projection.bias) if self.use_bias else x

    def compute_output_shape(self, input_shape):
        batch, height, width, _ = input_shape
        if height is None or width is None:
            return (batch, None, self.width)
        ph, pw = self.patch_size
        return (batch, (height // ph) * (width // pw), self.width)

    def get_config(self):
        return {
            **super().get_config(),
            "width": self.width,
            "patch_size": self.patch_size,
            "use_bias": self.use_bias,
            "norm": self.norm,
            "norm_epsilon": self.norm_epsilon,
            "ignore_remainder": self.ignore_remainder,
            "norm_kind": self.norm_kind,
        }
