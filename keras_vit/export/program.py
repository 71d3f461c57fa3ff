"""What an exported model computes, described once for every target.

`Program` walks a folded model in the paper's order, Eq. 1 to 4, and is the only place that asks
what kind of ViT it is. Each step is one of the `Operators`, which every target implements:
TensorFlow, TFLite, ONNX, and NumPy, which is the plainest. What makes a target fast is inside its
operators: layouts, fusions, precisions, which products are joined.

Shapes: B batch, P x P pixels and C channels a patch, N patches, k tokens in front, T = k + N, D
width, h heads, d head size, M the MLP's width, R features, K classes. Tokens are rows, (B * T, D).
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from keras_vit.export.fold_stem import Convolution, GroupNorm, Stem, Step, Unit
from keras_vit.export.folded import AttentionPool, Block, Folded, Gain, Norm, Product, Rotation

MASKED = -1e30  # added to scores that do not count


class Operators(Protocol):
    """What a target implements. A tensor is whatever the target takes for one.

    Weights come with the path of the model's layer, which a target may use as a name.
    """

    def scope(self, name: str) -> Any:
        """A context that names what is computed in it, if no weight does."""

    def crop(self, images: Any, height: int, width: int) -> Any:
        """The top left part of images (B, H, W, C)."""

    def shift(self, images: Any, rows: int, columns: int) -> Any:
        """Images (B, H, W, C) and four shifted copies on the channels, (B, H, W, 5 C).

        The copies are moved by so many rows and columns: down and right, down and left, up and
        right, up and left. What comes in at an edge is 0.
        """

    def to_map(self, images: Any) -> Any:
        """Images (B, H, W, C) in float32 as a feature map, in the target's own layout."""

    def from_map(self, x: Any) -> Any:
        """A feature map as (B, rows, columns, C)."""

    def convolve(self, x: Any, c: Convolution) -> Any:
        """A convolution of a feature map, with TensorFlow's padding "SAME"."""

    def group_norm(self, x: Any, n: GroupNorm) -> Any:
        """The norm of a feature map, in float32 whatever `x` is in."""

    def relu(self, x: Any) -> Any:
        """`max(x, 0)`."""

    def max_pool(self, x: Any) -> Any:
        """The maximum of 3 x 3 cells of a feature map at each second one, with padding "SAME"."""

    def patches(self, images: Any, grid: tuple[int, int], patch: tuple[int, int]) -> Any:
        """Cuts images in float32, or what `from_map` gives, into patches.

        From (B, H, W, C) to (B * N, P * P * C).
        """

    def sequence(
        self, x: Any, prefix: np.ndarray, positions: np.ndarray | None, num_patches: int
    ) -> Any:
        """Adds `positions` (N, D) to each image's patch tokens and puts `prefix` (k, D) in front.

        From (B * N, D) to (B * T, D).
        """

    def product(self, x: Any, p: Product) -> Any:
        """`x kernel + bias`; a target may fuse it with the `gelu` or the `add` that follows."""

    def norm(self, x: Any, n: Norm) -> Any:
        """LayerNorm or RMSNorm over the last axis, in float32 whatever `x` is in."""

    def heads(self, x: Any, products: Sequence[Product], tokens: int, num_heads: int) -> Any:
        """Products of `x` (B * tokens, D), each as (B, h, tokens, d); a target may join them."""

    def rotate(self, x: Any, r: Rotation) -> Any:
        """Rotates queries or keys (B, h, T, d) by the positions of their tokens."""

    def offset_scores(self, q: Any, name: str, keys: np.ndarray) -> Any:
        """Row i of `q keys^T` from column T - 1 - i on, in float32: it is `skewed`.

        From `q` (B, h, T, d) and `keys` (h, 2 T, d) to (B, h, T, T). With one query, `keys` are its
        own (h, T, d).
        """

    def bias(self, name: str, array: np.ndarray) -> Any:
        """An array (h, n, T) in float32 to be added to scores."""

    def attend(self, q: Any, k: Any, v: Any, rows_of: Any, bias: Any) -> Any:
        """`softmax(q k^T + bias) v`, softmax in float32: from (B, h, T, d) to (B * T, h * d).

        `bias` is what `bias` or `offset_scores` returned, or None. `rows_of` is a tensor with as
        many rows as the result, for a target that needs to see them.
        """

    def merge(self, x: Any, k: Any, sizes: Any, start: int, count: int) -> tuple[Any, Any]:
        """Merges each image's `count` most similar pairs of tokens: `layers/token_merging.py`.

        Tokens from `start` on are matched in float32, by the mean over heads of their keys
        (B, h, T, d). `sizes` (B, T) in float32 says how many patches each stands for; None means
        one. From `x` (B * T, D) to (B * (T - count), D), and the sizes (B, T - count).
        """

    def size_bias(self, sizes: Any) -> Any:
        """The logarithm of sizes (B, T) as what is added to scores, (B, 1, 1, T)."""

    def mean_by_size(self, x: Any, sizes: Any, start: int, total: int) -> Any:
        """`mean`, weighted by `sizes` (B, T), whose sum from `start` on is `total`: (B, D)."""

    def weigh(self, scores: Any, values: Any, start: int, tokens: int) -> Any:
        """The mean of each image's tokens from `start` on, weighted by softmax over tokens.

        From scores (B * tokens, h) and values (B * tokens, h * d) to (B, h * d), each head with
        its own weights.
        """

    def add(self, x: Any, y: Any) -> Any:
        """`x + y`."""

    def multiply(self, x: Any, y: Any) -> Any:
        """`x * y`."""

    def gain(self, x: Any, g: Gain) -> Any:
        """`x * scale + offset`."""

    def gelu(self, x: Any, kind: str) -> Any:
        """GELU; `kind` is "exact" or "tanh"."""

    def activate(self, x: Any, name: str) -> Any:
        """A function by name: "tanh", "sigmoid", "silu", "softmax" or "log_softmax".

        "silu" is `x * sigmoid(x)`. The last two are over the last axis.
        """

    def token(self, x: Any, index: int, tokens: int) -> Any:
        """One token of each image: from (B * tokens, D) to (B, D)."""

    def mean(self, x: Any, start: int, tokens: int) -> Any:
        """The mean of each image's tokens from `start` on: from (B * tokens, D) to (B, D)."""

    def concat(self, xs: Sequence[Any]) -> Any:
        """Tensors (B, D) side by side, (B, n * D)."""

    def by_image(self, x: Any, tokens: int) -> Any:
        """From (B * tokens, K) to (B, tokens, K)."""

    def to_float32(self, x: Any) -> Any:
        """What follows is computed in float32, even if what came before was not."""


def skewed(scores: Any, reshape: Callable[[Any, list[int]], Any]) -> Any:
    """Row i of each matrix (T, 2 T) from column T - 1 - i on, from (B, h, T, 2 T) to (B, h, T, T).

    As in the layer: read as rows of one number less, each row starts one column later. A single
    row (B, h, 1, T) is there already.
    """
    _, heads, tokens, columns = scores.shape
    if tokens == 1:
        return scores
    line = reshape(scores, [-1, heads, tokens * columns])
    line = line[:, :, tokens - 1 : tokens - 1 + tokens * (columns - 1)]
    return reshape(line, [-1, heads, tokens, columns - 1])[:, :, :, :tokens]


class Program:
    """A folded model, as calls of a target's operators.

    Args:
        folded: What `fold` returns.
        ops: The target's operators.

    Example:

    >>> program = Program(fold(model), NumpyOperators())
    >>> logits = program.logits(program.head_input(images))
    """

    def __init__(self, folded: Folded, ops: Operators):
        self.folded = folded
        self.config = folded.config
        self.ops = ops

    def output(self, images: Any) -> Any:
        """What the model itself returns: logits with its activation, or without a head features."""
        x = self.head_input(images)
        if self.folded.head is None:
            return self.features(x)
        activation = self.config.classifier_activation
        x = self.logits(x)
        return x if activation in (None, "linear") else self.ops.activate(x, activation)

    def head_input(self, images: Any) -> Any:
        """Images (B, H, W, C) to what the folded head reads: (B, R), or (B * T, R) unpooled."""
        return self.pool(*self.encode(self.embed(images)))

    def logits(self, x: Any) -> Any:
        """Logits (B, K), or (B, T, K) where the model does not pool."""
        if self.folded.head is None:
            raise ValueError("logits need a model with a head. Received: num_classes=0")
        return self._by_image(self.ops.product(x, self.folded.head))

    def features(self, x: Any) -> Any:
        """What the model's own head reads: (B, R), or (B, T, R) where the model does not pool."""
        gain = self.folded.feature_gain
        return self._by_image(x if gain is None else self.ops.gain(x, gain))

    # -- the paper's equations

    def embed(self, images: Any) -> Any:
        """Eq. 1: images (B, H, W, C) to tokens (B * T, D)."""
        ops, folded, config = self.ops, self.folded, self.config
        if folded.stem:
            with ops.scope("stem"):
                images = self.feature_map(images, folded.stem)  # (B, H / s, W / s, F)
        with ops.scope("patches"):
            if config.patch_shift:
                images = ops.shift(images, *config.patch_shifts)  # (B, H, W, 5 C)
            whole = tuple(n * p for n, p in zip(config.grid, config.patch_kernel, strict=True))
            x = images if config.stem or whole == config.image_size else ops.crop(images, *whole)
            x = ops.patches(x, config.grid, config.patch_kernel)  # (B * N, P * P * C)
            if folded.patch_norm:
                x = ops.norm(x, folded.patch_norm)
            x = ops.product(x, folded.patches)  # (B * N, D)
            if folded.token_norm:
                x = ops.norm(x, folded.token_norm)
        prefix, positions = folded.prefix, folded.positions
        if len(prefix) or positions is not None:
            with ops.scope("tokens"):
                x = ops.sequence(x, prefix, positions, config.num_patches)  # (B * T, D)
        return ops.norm(x, folded.embedding_norm) if folded.embedding_norm else x

    def feature_map(self, images: Any, stem: Stem) -> Any:
        """Section 3.1, "Hybrid Architecture": images (B, H, W, C) to (B, H / s, W / s, F)."""
        ops = self.ops
        x = ops.to_map(images)
        for step in stem.steps:
            x = ops.relu(self._step(x, step))
        x = ops.max_pool(x) if stem.pooled else x
        for unit in stem.units:
            x = self._unit(x, unit)
        return ops.from_map(x)

    def encode(self, x: Any) -> tuple[Any, Any]:
        """Eq. 2 and 3, block by block: tokens (B * T, D) to (B * T', D), and their sizes.

        Where only the first token is read afterwards, the last block computes only that: (B, D).
        Sizes (B, T') are None where no block merges tokens, and T' is T.
        """
        config, tokens, sizes = self.config, self.config.num_tokens, None
        last = config.depth - 1
        for i, (block, count) in enumerate(
            zip(self.folded.blocks, config.merged_tokens, strict=True)
        ):
            if i == last and config.pooling == "token":
                x, _ = self.block(x, block, tokens, sizes, first_only=True)  # (B, D)
            else:
                x, sizes = self.block(x, block, tokens, sizes, count)  # (B * T, D)
            tokens -= count
        return self.ops.to_float32(x), sizes

    def block(
        self,
        x: Any,
        block: Block,
        tokens: int,
        sizes: Any = None,
        count: int = 0,
        *,
        first_only: bool = False,
    ) -> tuple[Any, Any]:
        """Eq. 2 and 3 of one block, with `count` tokens merged between them.

        From (B * T, D) to (B * (T - count), D), or with `first_only` to (B, D), and their sizes.
        """
        ops, place = self.ops, self.config.block_norm
        with ops.scope(block.name):
            z = ops.norm(x, block.attention_norm) if place == "pre" else x
            q, k, v = self._query_key_value(z, block, tokens, first_only)
            x = ops.token(x, 0, tokens) if first_only else x
            with ops.scope(f"{block.name}/attention"):
                bias = self._score_bias(q, block, first_only)
                bias = bias if sizes is None else ops.size_bias(sizes)
                z = ops.attend(q, k, v, rows_of=x, bias=bias)  # (B * T, h * d)
            z = ops.norm(z, block.attention_inner_norm) if block.attention_inner_norm else z
            z = ops.product(z, block.output)  # (B * T, D)
            z = ops.norm(z, block.attention_norm) if place == "res_post" else z
            x = ops.add(z, x)  # (B * T, D), Eq. 2
            x = ops.norm(x, block.attention_norm) if place == "post" else x
            if count:
                with ops.scope(f"{block.name}/token_merging"):
                    x, sizes = ops.merge(x, k, sizes, self.config.num_prefix_tokens, count)

            z = ops.norm(x, block.mlp_norm) if place == "pre" else x
            with ops.scope(f"{block.name}/mlp"):
                z = self._hidden(z, block)  # (B * T, M)
            z = ops.product(z, block.mlp_2)  # (B * T, D)
            z = ops.norm(z, block.mlp_norm) if place == "res_post" else z
            x = ops.add(z, x)  # (B * T, D), Eq. 3
            return ops.norm(x, block.mlp_norm) if place == "post" else x, sizes

    def pool(self, x: Any, sizes: Any = None) -> Any:
        """Eq. 4, and the Dense and tanh before the head: what `encode` returns to (B, R)."""
        ops, config, folded = self.ops, self.config, self.folded
        if folded.final_norm and config.final_norm == "before_pooling":
            x = ops.norm(x, folded.final_norm)
        if config.pooling in ("mean", "mean_all"):
            start = config.num_prefix_tokens if config.pooling == "mean" else 0
            with ops.scope("pooling"):
                x = self._mean(x, sizes, start)  # (B, D)
        if config.pooling in ("token_pair", "token_mean"):
            with ops.scope("pooling"):
                x = ops.concat([ops.token(x, 0, self._left), self._second(x, sizes)])  # (B, 2 * D)
        if folded.attention_pool:
            x = self._attention_pool(x, folded.attention_pool)  # (B, D)
        if folded.final_norm and config.final_norm == "after_pooling":
            x = ops.norm(x, folded.final_norm)
        if folded.pre_logits:
            with ops.scope("pre_logits"):
                x = ops.activate(ops.product(x, folded.pre_logits), "tanh")  # (B, R)
        return x

    # -- their parts

    def _unit(self, x: Any, unit: Unit) -> Any:
        """A bottleneck of the stem."""
        ops, (first, second, third) = self.ops, unit.steps
        with ops.scope(unit.name):
            shortcut = self._step(x, unit.shortcut) if unit.shortcut else x
            x = ops.relu(self._step(x, first))
            x = ops.relu(self._step(x, second))
            return ops.relu(ops.add(self._step(x, third), shortcut))

    def _step(self, x: Any, step: Step) -> Any:
        convolution, norm = step
        return self.ops.group_norm(self.ops.convolve(x, convolution), norm)

    def _query_key_value(
        self, z: Any, block: Block, tokens: int, first_only: bool
    ) -> tuple[Any, Any, Any]:
        """Each (B, h, T, d); with `first_only` the query is (B, h, 1, d)."""
        ops, heads = self.ops, self.config.num_heads
        with ops.scope(f"{block.name}/attention"):
            if first_only:
                (q,) = ops.heads(ops.token(z, 0, tokens), [block.query], 1, heads)
                k, v = ops.heads(z, [block.key, block.value], tokens, heads)
            else:
                q, k, v = ops.heads(z, [block.query, block.key, block.value], tokens, heads)
            if block.query_norm and block.key_norm:
                q, k = ops.norm(q, block.query_norm), ops.norm(k, block.key_norm)
                q = ops.gain(q, block.query_gain) if block.query_gain else q
            if block.rotation:
                # The first token is in front of the patches, where nothing is rotated.
                q = q if first_only else ops.rotate(q, block.rotation)
                k = ops.rotate(k, block.rotation)
        return q, k, v

    def _hidden(self, z: Any, block: Block) -> Any:
        """The hidden values of the MLP: (B * T, D) to (B * T, M)."""
        ops, hidden = self.ops, self.ops.product(z, block.mlp_1)
        if block.mlp_gate:
            hidden = ops.multiply(ops.activate(ops.product(z, block.mlp_gate), "silu"), hidden)
        else:
            hidden = self._gelu(hidden)
        return ops.norm(hidden, block.mlp_inner_norm) if block.mlp_inner_norm else hidden

    def _gelu(self, x: Any) -> Any:
        if self.config.gelu == "quick":  # a SiLU, by the products around it
            return self.ops.activate(x, "silu")
        return self.ops.gelu(x, self.config.gelu)

    def _attention_pool(self, x: Any, pool: AttentionPool) -> Any:
        ops, config = self.ops, self.config
        start = config.num_prefix_tokens if config.pooling == "map" else 0
        with ops.scope(f"{pool.name}/attention"):
            scores = ops.product(x, pool.scores)  # (B * T, h)
            z = ops.weigh(scores, ops.product(x, pool.value), start, config.num_tokens)
        x = ops.product(z, pool.output)  # (B, D)
        with ops.scope(pool.name):
            z = ops.norm(x, pool.norm)
            with ops.scope(f"{pool.name}/mlp"):
                z = self._gelu(ops.product(z, pool.mlp_1))  # (B, M)
            return ops.add(ops.product(z, pool.mlp_2), x)

    def _score_bias(self, q: Any, block: Block, first_only: bool) -> Any:
        """What is added to the scores, (h, T, T) or (B, h, T, T), or None."""
        name = f"{block.name}/attention/relative_positions"
        tokens, rows = self.config.num_tokens, 1 if first_only else None
        mask = None  # of the diagonal, the same in each block and head
        if not self.config.score_diagonal:
            mask = np.where(np.eye(tokens), MASKED, 0).astype("float32")[None, :rows]
        if block.score_bias is not None:
            bias = block.score_bias[:, :rows]
            return self.ops.bias(name, bias if mask is None else bias + mask)
        if mask is not None:
            mask = self.ops.bias("diagonal/first" if first_only else "diagonal", mask)
        if block.offset_keys is None:
            return mask
        keys = block.offset_keys
        if first_only or tokens == 1:
            keys = keys[:, tokens - 1 : 2 * tokens - 1]
        bias = self.ops.offset_scores(q, name, keys)
        return bias if mask is None else self.ops.add(bias, mask)

    @property
    def _left(self) -> int:
        """The number of tokens after the last block."""
        return self.config.num_tokens - sum(self.config.merged_tokens)

    def _second(self, x: Any, sizes: Any) -> Any:
        """What is read beside the class token."""
        if self.config.pooling == "token_pair":
            return self.ops.token(x, 1, self._left)
        return self._mean(x, sizes, self.config.num_prefix_tokens)

    def _mean(self, x: Any, sizes: Any, start: int) -> Any:
        """The mean over the patches, and from `start` on tokens before them."""
        if sizes is None:
            return self.ops.mean(x, start, self._left)
        return self.ops.mean_by_size(x, sizes, start, self.config.num_tokens - start)

    def _by_image(self, x: Any) -> Any:
        if self.config.pooling is not None:
            return x
        with self.ops.scope("tokens"):
            return self.ops.by_image(x, self.config.num_tokens)
