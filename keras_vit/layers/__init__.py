"""The building blocks of a Vision Transformer, one per file."""

from keras_vit.layers.attention import MultiHeadAttention
from keras_vit.layers.attention_pooling import AttentionPooling
from keras_vit.layers.class_token import ClassToken
from keras_vit.layers.distilled_head import DistilledHead
from keras_vit.layers.encoder_block import EncoderBlock
from keras_vit.layers.layer_norm import LayerNormalization
from keras_vit.layers.layer_scale import LayerScale
from keras_vit.layers.mlp import MLP
from keras_vit.layers.patch_dropout import PatchDropout
from keras_vit.layers.patch_grid import PatchGrid
from keras_vit.layers.patches import Patches
from keras_vit.layers.pooling import Pooling
from keras_vit.layers.position_embedding import PositionEmbedding

__all__ = [
    "MLP",
    "AttentionPooling",
    "ClassToken",
    "DistilledHead",
    "EncoderBlock",
    "LayerNormalization",
    "LayerScale",
    "MultiHeadAttention",
    "PatchDropout",
    "PatchGrid",
    "Patches",
    "Pooling",
    "PositionEmbedding",
]
