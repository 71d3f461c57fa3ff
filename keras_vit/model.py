"""The Vision Transformer: Eq. 1 to 4, and a head."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_vit import attention_positions, layers
from keras_vit.config import ViTConfig
from keras_vit.config_merging import wanted_tokens
from keras_vit.deferred import deferred
from keras_vit.layers import composite
from keras_vit.layers.rms_norm import norm_class
from keras_vit.resample import resized_weight

LORA_TARGETS = ("query", "key", "value", "attention_output", "mlp")


@keras.saving.register_keras_serializable("keras_vit")
class ViT(keras.Model):
    """A Vision Transformer as in "An Image is Worth 16x16 Words", a functional Keras model.

    z_0 = [x_class; x_1 E; ...; x_N E] + E_pos    (1)
    z'_l = MSA(LN(z_{l-1})) + z_{l-1}             (2)    its scores may include relative positions
    z_l = MLP(LN(z'_l)) + z'_l                    (3)
    y = LN(z_L^0)                                 (4)

    The config varies what is in them. `block_norm="res_post"`: the LNs of Eq. 2 and 3 are those of
    MSA(z) and MLP(z). `attention_inner_norm`: the U_msa of Eq. 8 reads an LN. `mlp="swiglu"`:
    MLP(z) = (SiLU(z W_g) * z W_1) W_2. `mlp_inner_norm`: its W_2 reads an LN. `embedding_norm`:
    z_0 = LN([...] + E_pos). `norm="rms"`: every LN is an RMSNorm. Rotary positions need no E_pos:
    MSA rotates queries and keys by their patch's position. `patch_shift`: x_p of Eq. 1 is a patch
    of the image and of its shifted copies. `score_diagonal=False`: no token attends to itself.
    `token_merging`: between Eq. 2 and 3, z' has fewer tokens in each block.

    Shapes: B batch, H x W pixels, C channels, T tokens, D width, K classes.

    Args:
        config: A `ViTConfig`, or its fields as a dict.
        name: Name of the model.
        dtype: dtype policy of every layer; None means Keras' global one. Logits are in float32.
        trainable: Whether the weights are trainable.

    Call arguments:
        images: `(B, H, W, C)`, preprocessed by `keras_vit.preprocessing`.

    Returns:
        Logits `(B, K)`, or features `(B, D)` with `num_classes=0`, which are `(B, 2 D)` with
        `pooling="token_pair"` or `"token_mean"`. With `pooling=None`, one of these per token:
        `(B, T, ...)`.

    Reference:
        arXiv 2010.11929.

    Example:

    >>> config = ViTConfig(image_size=32, patch_size=4, width=192, depth=6, num_heads=3,
    ...                    mlp_dim=384, num_classes=10)
    >>> ViT(config).output_shape
    (None, 10)
    """

    config: ViTConfig

    def __init__(
        self,
        config: ViTConfig | Mapping[str, Any],
        *,
        name: str = "vit",
        dtype: Any = None,
        trainable: bool = True,
    ):
        if isinstance(config, Mapping):
            config = ViTConfig.from_dict(config)
        if not isinstance(config, ViTConfig):
            raise ValueError(
                f"config must be a ViTConfig or a dict of its fields. Received: config={config!r}"
            )
        policy = keras.dtype_policies.get(dtype or keras.config.dtype_policy())
        images = keras.Input(config.input_shape, name="images")
        z = _embed(images, config, policy)  # Eq. 1
        z, sizes = _encode(z, config, policy)  # Eq. 2 and 3
        y = _pool(z, sizes, config, policy)  # Eq. 4
        super().__init__(inputs=images, outputs=_head(y, config, policy), name=name)
        self.trainable = trainable  # Keras' constructor does not pass it on to the layers
        self.config = config
        self.dtype_policy = policy

    # -- parts

    @property
    def blocks(self) -> list[layers.EncoderBlock]:
        """The encoder blocks, first to last."""
        return [self.get_layer(f"encoder_block_{i}") for i in range(self.config.depth)]

    def features(
        self,
        output: str = "pre_logits",
        *,
        blocks: int | Sequence[int] | None = None,
        grid: bool = False,
    ) -> keras.Model:
        """A model without the head that shares these weights, to build other heads on.

        Args:
            output: "pre_logits", the input of the head, or "tokens", the last sequence.
            blocks: Index or indices of blocks whose outputs to return instead of `output`, before
                the last LayerNorm. Negative indices count from the end.
            grid: Whether to return the patch tokens as `(B, rows, columns, D)` instead of all
                tokens as `(B, T, D)`.

        Returns:
            A `keras.Model` with one output, or a list of outputs if `blocks` is a sequence.

        Example:

        >>> backbone = model.features()
        >>> logits = keras.layers.Dense(37)(backbone.output)
        >>> pets = keras.Model(backbone.input, logits)
        """
        if output not in ("pre_logits", "tokens"):
            raise ValueError(
                f"output must be 'pre_logits' or 'tokens'. Received: output={output!r}"
            )
        if grid and output == "pre_logits" and blocks is None:
            raise ValueError(
                "grid must be False for output='pre_logits', which has no grid; pass "
                f"output='tokens' or blocks. Received: grid={grid!r}"
            )
        depth = self.config.depth
        wanted = [blocks] if isinstance(blocks, int) else blocks
        for i in wanted or ():
            if not isinstance(i, int) or not -depth <= i < depth:
                raise ValueError(
                    f"blocks must be in [-{depth}, {depth - 1}]. Received: blocks={blocks!r}"
                )
        if wanted is not None:
            tensors = [self.blocks[i].output for i in wanted]
        elif output == "tokens":
            last = "encoder_norm" if self.config.final_norm == "before_pooling" else None
            tensors = [self.get_layer(last).output if last else self.blocks[-1].output]
        else:
            tensors = [self.get_layer("head").input if self.config.num_classes else self.output]
        if grid:
            to_grid = layers.PatchGrid(
                self.config.grid,
                self.config.num_prefix_tokens,
                dtype=self.dtype_policy,
                name="patch_grid",
            )
            tensors = [to_grid(x) for x in tensors]
        single = wanted is None or isinstance(blocks, int)
        outputs = tensors[0] if single else tensors
        return keras.Model(self.input, outputs, name=f"{self.name}_features")

    def resized(
        self,
        image_size: int | tuple[int, int],
        *,
        patch_size: int | tuple[int, int] | None = None,
        interpolation: str | None = None,
    ) -> "ViT":
        """A copy of the model for another resolution, with a resampled position table.

        The copy is not compiled.

        Args:
            image_size: An int or (height, width), multiples of the patch size.
            patch_size: An int or (height, width): the patch kernel is resampled too, as for
                FlexiViT (arXiv 2212.08013). None means the model's own.
            interpolation: A name in `keras_vit.resample.PRESETS`; None means the config's.

        Returns:
            A `ViT` with the same `trainable` flags.

        Example:

        >>> model = keras_vit.vit_b16(num_classes=10).resized(384)
        """
        old = self.config
        config = resized_config(self, image_size, patch_size, interpolation)
        with deferred() as weights:
            model = ViT(config, name=self.name, dtype=self.dtype_policy, trainable=self.trainable)
        composite.set_trainable_parts(model, composite.trainable_parts(self))
        for ours, theirs in zip(model.weights, self.weights, strict=True):
            value = keras.ops.convert_to_numpy(theirs.value)
            weights.fill(ours, resized_weight(ours.path, value, old, config))
        weights.initialize_rest()
        return model

    def enable_lora(self, rank: int, targets: Sequence[str] = ("query", "value")) -> None:
        """Adds LoRA (arXiv 2106.09685) to every block, and freezes the other layers.

        The adapters, the biases of their layers and the head remain trainable. Saving merges the
        adapters into the kernels, which stay frozen. Call this again on the loaded model to train
        new adapters, with a new optimizer.

        Args:
            rank: Rank of the update.
            targets: The projections: any of "query", "key", "value", "attention_output", "mlp".
        """
        unknown = [t for t in targets if t not in LORA_TARGETS]
        if unknown or not targets:
            raise ValueError(
                f"targets must be some of {', '.join(LORA_TARGETS)}. Received: targets={targets!r}"
            )
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"rank must be a positive int. Received: rank={rank!r}")
        chosen = []
        for block in self.blocks:
            parts = {
                "query": [block.attention.query_dense],
                "key": [block.attention.key_dense],
                "value": [block.attention.value_dense],
                "attention_output": [block.attention.output_dense],
                "mlp": [*_gate(block), block.mlp.dense_1, block.mlp.dense_2],
            }
            chosen += [layer for target in targets for layer in parts[target]]
        head = [self.get_layer("head")] if self.config.num_classes else []
        kept = {id(layer) for layer in chosen}
        kept |= {id(part) for layer in head for part in layer._flatten_layers()}
        for layer in self._flatten_layers(include_self=False, recursive=True):
            if id(layer) not in kept and not _sublayers(layer):
                layer.trainable = False
        if self.config.attention_pooling:  # its layers are frozen, the probe is its own
            self.get_layer("pooling").probe.trainable = False
        if self.config.score_scale == "learned":
            for block in self.blocks:
                block.attention.scale.trainable = False
        for layer in chosen:
            layer.enable_lora(rank)

    # -- saving

    def get_config(self) -> dict[str, Any]:
        policy = self.dtype_policy
        if not isinstance(policy, keras.dtype_policies.DTypePolicyMap):
            # A quantized layer has its own policy, which must be saved too.
            policies = keras.dtype_policies.DTypePolicyMap(default_policy=policy.name)
            for layer in self._flatten_layers():
                if getattr(layer, "quantization_mode", None) is not None:
                    policies[layer.path] = layer.dtype_policy
            policy = policies if len(policies) else policy
        config = {
            "config": self.config.to_dict(),
            "name": self.name,
            "dtype": keras.dtype_policies.serialize(policy),
            "trainable": self.trainable,
        }
        parts = composite.trainable_parts(self)
        return {**config, composite.KEY: parts} if parts else config

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "ViT":
        config = dict(config)
        if isinstance(config.get("dtype"), dict):
            config["dtype"] = keras.dtype_policies.deserialize(config["dtype"])
        parts = config.pop(composite.KEY, {})
        model = cls(**config)
        composite.set_trainable_parts(model, parts)
        return model


def resized_config(
    model: ViT,
    image_size: int | tuple[int, int],
    patch_size: int | tuple[int, int] | None = None,
    interpolation: str | None = None,
) -> ViTConfig:
    """The config of `model.resized`, or the error that says why the model cannot be resized."""
    old = model.config
    config = old.replace(
        image_size=image_size,
        patch_size=patch_size or old.patch_size,
        interpolation=interpolation or old.interpolation,
    )
    fixed = old.patch_norm or old.patch_shift or old.stem
    if fixed and config.patch_size != old.patch_size:
        raise ValueError(
            f"patch_size must be {old.patch_size} for a model with patch_norm, patch_shift or a "
            f"stem, whose patches cannot be resized. Received: patch_size={patch_size!r}"
        )
    for layer in model._flatten_layers():
        if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
            raise ValueError(
                "resized must be called on a model without LoRA and quantization: save it and "
                "load it again to merge LoRA, and quantize after resizing. "
                f"Received: layer {layer.path!r}"
            )
    return config


def head_logits(model: ViT, features: Any) -> Any:
    """Applies the head to what it reads, without the `classifier_activation`."""
    head, activation = model.get_layer("head"), model.config.classifier_activation
    if isinstance(head, layers.DistilledHead):
        return head.logits(features)
    if activation in (None, "linear"):
        return head(features)
    if head.quantization_mode is not None:
        raise ValueError(
            "classifier_activation must be None for the logits of a quantized model. "
            f"Received: classifier_activation={activation!r}"
        )
    kernel = keras.ops.convert_to_tensor(head.kernel)
    logits = keras.ops.matmul(keras.ops.cast(features, kernel.dtype), kernel)
    return logits if head.bias is None else logits + head.bias


def _embed(images, config: ViTConfig, policy):
    """Eq. 1: z_0 = [x_class; x_1 E; ...; x_N E] + E_pos, and register tokens."""
    if config.stem:  # "the input sequence can be formed from feature maps of a CNN"
        cls, more = layers.ConvStem, ()
        if config.stem == "resnet":
            cls, more = layers.ResNetStem, (config.stem_standardization,)
        sizes = (config.stem_stages, config.stem_width, config.stem_epsilon)
        images = cls(*sizes, *more, dtype=policy, name="stem")(images)  # (B, H / s, W / s, F)
    if config.patch_shift:
        images = layers.PatchShift(config.patch_size, dtype=policy, name="patch_shift")(
            images
        )  # (B, H, W, 5 C)
    z = layers.Patches(
        config.width,
        config.patch_kernel,
        use_bias=config.patch_bias,
        norm=config.patch_norm,
        norm_epsilon=config.norm_epsilon,
        ignore_remainder=config.ignore_remainder,
        norm_kind=config.norm,
        dtype=policy,
        name="patches",
    )(images)  # (B, N, D)
    front = [layers.ClassToken(dtype=policy, name="class_token")] if config.class_token else []
    if config.distillation_token:
        front += [
            layers.ClassToken(
                index=1,
                initializer=keras.initializers.TruncatedNormal(stddev=0.02),
                dtype=policy,
                name="distillation_token",
            )
        ]
    if config.class_row:
        z = functools.reduce(lambda z, token: token(z), front, z)  # (B, 1 + N, D)
    if config.position_table:
        z = layers.PositionEmbedding(
            config.grid,
            kind=config.position_table,
            class_row=config.num_prefix_rows,
            dtype=policy,
            name="position_embedding",
        )(z)
    if not config.class_row:
        z = functools.reduce(lambda z, token: token(z), front, z)  # (B, 1 + N, D)
    if config.num_registers:
        z = layers.ClassToken(
            num_tokens=config.num_registers,
            index=len(front),
            # Equal registers would stay equal in training.
            initializer=keras.initializers.RandomNormal(stddev=1e-6),
            dtype=policy,
            name="registers",
        )(z)  # (B, T, D)
    if config.patch_dropout:
        z = layers.PatchDropout(
            config.patch_dropout,
            num_prefix_tokens=config.num_prefix_tokens,
            dtype=policy,
            name="patch_dropout",
        )(z)
    if config.dropout:
        z = keras.layers.Dropout(config.dropout, dtype=policy, name="dropout")(z)
    if config.embedding_norm:
        z = norm_class(config.norm)(
            epsilon=config.norm_epsilon, dtype=policy, name="embedding_norm"
        )(z)
    return z


def _encode(z, config: ViTConfig, policy):
    """Eq. 2 and 3, once per block; the rate of stochastic depth rises linearly.

    Returns the tokens, and how many patches each stands for if blocks merge them, or None.
    """
    rates = np.linspace(0.0, config.drop_path, config.depth).tolist()
    rope = attention_positions.rotary(config)
    more: dict[str, Any] = {}
    if rope and config.rope_rescale:
        rescale = layers.RotaryRescale(config.rope_rescale, dtype=policy, name="rope_rescale")
        more["rope_scale"] = rescale(z)
    sizes, merged = None, [None] * config.depth
    if config.token_merging:
        merged = wanted_tokens(config)
    for i, (drop_path, count) in enumerate(zip(rates, merged, strict=True)):
        if sizes is not None:
            more["token_sizes"] = sizes
        z = layers.EncoderBlock(
            config.width,
            config.num_heads,
            config.mlp_dim,
            key_dim=config.key_dim,
            block_norm=config.block_norm,
            qkv_bias=config.qkv_bias,
            key_bias=config.key_bias,
            qk_norm=config.qk_norm,
            rope=rope,
            attention_inner_norm=config.attention_inner_norm,
            mlp=config.mlp,
            mlp_inner_norm=config.mlp_inner_norm,
            relative=attention_positions.relative(config),
            score_scale=config.score_scale,
            score_diagonal=config.score_diagonal,
            gelu=config.gelu,
            dense_bias=config.dense_bias,
            norm_kind=config.norm,
            norm_epsilon=config.norm_epsilon,
            layer_scale=config.layer_scale,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            drop_path=drop_path,
            token_merging=count,
            num_prefix_tokens=0 if count is None else config.num_prefix_tokens,
            dtype=policy,
            name=f"encoder_block_{i}",
        )(z, **more)  # (B, T, D)
        if count is not None:
            z, sizes = z  # (B, T - r, D)
    return z, sizes


def _pool(z, sizes, config: ViTConfig, policy):
    """Eq. 4: y = LN(z_L^0), or LN and another pooling, in either order."""
    cls = norm_class(config.norm)
    norm = cls(epsilon=config.norm_epsilon, dtype=policy, name="encoder_norm")
    y = norm(z) if config.final_norm == "before_pooling" else z  # (B, T, D)
    if config.attention_pooling:
        y = layers.AttentionPooling(
            config.width,
            config.pooling_heads or config.num_heads,
            config.pooling_mlp_dim or config.mlp_dim,
            num_ignored_tokens=config.num_prefix_tokens if config.pooling == "map" else 0,
            gelu=config.gelu,
            norm_epsilon=config.norm_epsilon,
            dtype=policy,
            name="pooling",
        )(y)  # (B, D)
    elif config.pooling is not None:
        y = layers.Pooling(
            config.pooling,
            num_prefix_tokens=config.num_prefix_tokens,
            dtype=policy,
            name="pooling",
        )(y, **({} if sizes is None else {"token_sizes": sizes}))  # (B, D)
    return norm(y) if config.final_norm == "after_pooling" else y


def _head(y, config: ViTConfig, policy):
    """Section 3.1: the optional representation layer, and the logits in at least float32."""
    if config.representation_size is not None:
        y = keras.layers.Dense(
            config.representation_size, activation="tanh", dtype=policy, name="pre_logits"
        )(y)  # (B, R)
    if not config.num_classes:
        return y
    if config.head_init == "zeros":
        kernel = keras.initializers.Zeros()
    else:
        kernel = keras.initializers.TruncatedNormal(stddev=0.02)
    is_map = isinstance(policy, keras.dtype_policies.DTypePolicyMap)
    quantized = is_map and any(path.split("/")[0] == "head" for path in policy)
    exact = keras.backend.result_type(policy.variable_dtype, "float32")
    dense = layers.DistilledHead if config.pooling == "token_pair" else keras.layers.Dense
    return dense(
        config.num_classes,
        activation=config.classifier_activation,
        kernel_initializer=kernel,
        use_bias=config.head_bias is not None,
        bias_initializer=keras.initializers.Constant(config.head_bias or 0.0),
        dtype=policy if quantized else exact,
        name="head",
    )(y)  # (B, K)


def _gate(block) -> list:
    return [block.mlp.gate] if block.mlp.kind == "swiglu" else []


def _sublayers(layer) -> bool:
    return bool(list(layer._flatten_layers(include_self=False, recursive=False)))
