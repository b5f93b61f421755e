"""Which layer stands in for what of transformers' Qwen3 and Qwen3-MoE."""

from . import layers
from .families import QWEN3, QWEN3_MOE
from .shared.hf.families import Layers, targets_of

DENSE = targets_of(
    QWEN3,
    Layers(layers.RMSNorm, layers.RotaryPosEmb, layers.DecoderLayer, layers.Model, layers.CausalLM, layers.MLP),
    {"SwiGLUMLP": layers.SwiGLUMLP, "ForCausalLMLoss": layers.ForCausalLMLoss},  # transformers', whose Qwen3 does not use them yet
)
MOE = targets_of(
    QWEN3_MOE,
    Layers(layers.RMSNorm, layers.RotaryPosEmb, layers.MoeDecoderLayer, layers.MoeModel, layers.MoeCausalLM, layers.MLP, layers.Experts),
)
FAMILIES = (DENSE, MOE)
