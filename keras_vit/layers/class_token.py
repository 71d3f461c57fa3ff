"""Learned tokens: the class token of Eq. 1, and registers."""

import keras
from keras import ops


@keras.saving.register_keras_serializable("keras_vit")
class ClassToken(keras.layers.Layer):
    """Inserts learned tokens into a sequence: by default, one class token at the start.

    Shapes: B batch, T tokens, n learned tokens, D width.

    `z = [x_class; x_1; ...; x_T]`. The state of the class token after the last block represents the
    image. Registers (arXiv 2309.16588) are further learned tokens after it, which the head ignores.

    Args:
        num_tokens: Number of tokens.
        index: Index of the first one: 0 for the class token, 1 for registers after it.
        initializer: Initializer of the tokens.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: Tokens, `(B, T, D)`.

    Returns:
        `(B, T + n, D)`.

    Reference:
        arXiv 2010.11929, Eq. 1.

    Example:

    >>> ClassToken()(keras.ops.ones((2, 4, 8))).shape
    (2, 5, 8)
    """

    def __init__(self, num_tokens=1, index=0, initializer="zeros", **kwargs):
        super().__init__(**kwargs)
        if not isinstance(num_tokens, int) or num_tokens < 1:
            raise ValueError(
                f"num_tokens must be a positive int. Received: num_tokens={num_tokens!r}"
            )
        if not isinstance(index, int) or index < 0:
            raise ValueError(f"index must be an int >= 0. Received: index={index!r}")
        self.num_tokens = num_tokens
        self.index = index
        self.initializer = keras.initializers.get(initializer)

    def build(self, input_shape):
        self.tokens = self.add_weight(
            name="tokens",
            shape=(1, self.num_tokens, input_shape[-1]),
            initializer=self.initializer,
        )
        self.built = True

    def call(self, x):
        tokens = ops.broadcast_to(
            self.tokens, (ops.shape(x)[0], self.num_tokens, x.shape[-1])
        )  # (B, n, D)
        x = ops.cast(x, self.compute_dtype)
        tokens = ops.cast(tokens, self.compute_dtype)
        parts = [x[:, : self.index], tokens, x[:, self.index :]] if self.index else [tokens, x]
        return ops.concatenate(parts, axis=1)  # (B, T + n, D)

    def compute_output_shape(self, input_shape):
        batch, length, width = input_shape
        return (batch, None if length is None else length + self.num_tokens, width)

    def get_config(self):
        return {
            **super().get_config(),
            "num_tokens": self.num_tokens,
            "index": self.index,
            "initializer": keras.initializers.serialize(self.initializer),
        }
