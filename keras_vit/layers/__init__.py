"""The building blocks of a Vision Transformer, one per file."""

from keras_vit.layers.attention import MultiHeadAttention
from keras_vit.layers.attention_pooling import AttentionPooling
from keras_vit.layers.class_token import ClassToken
from keras_vit.layers.conv_stem import ConvStem
from keras_vit.layers.distilled_head import DistilledHead
from keras_vit.layers.encoder_block import EncoderBlock
from keras_vit.layers.group_norm import GroupNormalization
from keras_vit.layers.layer_norm import LayerNormalization
from keras_vit.layers.layer_scale import LayerScale
from keras_vit.layers.mlp import MLP
from keras_vit.layers.patch_dropout import PatchDropout
from keras_vit.layers.patch_grid import PatchGrid
from keras_vit.layers.patch_shift import PatchShift
from keras_vit.layers.patches import Patches
from keras_vit.layers.pooling import Pooling
from keras_vit.layers.position_embedding import PositionEmbedding
from keras_vit.layers.relative_positions import RelativePositions
from keras_vit.layers.resnet_stem import Bottleneck, ResNetStem, StdConv2D
from keras_vit.layers.rms_norm import RMSNormalization
from keras_vit.layers.rotary import RotaryEmbedding
from keras_vit.layers.rotary_rescale import RotaryRescale
from keras_vit.layers.token_merging import TokenMerging

__all__ = [
    "MLP",
    "AttentionPooling",
    "Bottleneck",
    "ClassToken",
    "ConvStem",
    "DistilledHead",
    "EncoderBlock",
    "GroupNormalization",
    "LayerNormalization",
    "LayerScale",
    "MultiHeadAttention",
    "PatchDropout",
    "PatchGrid",
    "PatchShift",
    "Patches",
    "Pooling",
    "PositionEmbedding",
    "RMSNormalization",
    "RelativePositions",
    "ResNetStem",
    "RotaryEmbedding",
    "RotaryRescale",
    "StdConv2D",
    "TokenMerging",
]
