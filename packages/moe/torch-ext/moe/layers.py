"""The layers that stand in for more than one family's; those of one family are made from its row. They have no state: `self` is the module
whose forward they become."""

from .shared.hf.install import layers
from .shared.hf.parts.modules import Layer
from .shared.rows.moe import MIXTRAL, QWEN2_MOE, ROWS


class RMSNorm(Layer):
    """For the RMSNorm of these families, FlexOlmo's too, which multiplies by the weight before it rounds: [..., n] -> [..., n]."""

    forward = layers.any_norm_of(ROWS).forward


class RotaryPosEmb(Layer):
    """For `apply_rotary_pos_emb`: q, k [batch, heads, tokens, head_dim] and cos, sin [batch, tokens, head_dim] -> q, k."""

    forward = layers.rotary_layer_of(MIXTRAL.family).forward


class SwiGLUMLP(Layer):
    """For the layer name that transformers reserves for MLPs such as Qwen2-MoE's: x [..., hidden] -> [..., hidden]."""

    forward = layers.mlp_of(QWEN2_MOE.family).forward
