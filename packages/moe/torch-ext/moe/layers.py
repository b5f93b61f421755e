"""The layers that stand in for more than one family's; those of one family are made from its row. They have no state: `self` is the module
whose forward they become."""

from .shared.hf.install import layers
from .shared.rows.moe import MIXTRAL, QWEN2_MOE, ROWS

RMSNorm = layers.any_norm_of(ROWS)  # FlexOlmo's, too, which multiplies by the weight before it rounds
RotaryPosEmb = layers.rotary_layer_of(MIXTRAL.family)
SwiGLUMLP = layers.mlp_of(QWEN2_MOE.family)  # the name that transformers reserves for MLPs such as Qwen2-MoE's
