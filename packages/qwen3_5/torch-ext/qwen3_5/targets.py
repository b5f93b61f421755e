"""Which layer stands in for what of transformers' Qwen3.5."""

from . import layers
from .families import QWEN3_5
from .shared.hf.families import Layers, targets_of

_OF_ROW = targets_of(
    QWEN3_5,
    Layers(layers.RMSNormZeroCentered, layers.RotaryPosEmb, layers.DecoderLayer, layers.Model, layers.CausalLM, layers.MLP),
    {"RMSNormZeroCentered": layers.RMSNormZeroCentered, "RMSNormGated": layers.RMSNormGated},
)
_DELTA_NET = {
    "gated_rms_norm": ("Qwen3_5RMSNormGated", layers.RMSNormGated),
    "delta_net": ("Qwen3_5GatedDeltaNet", layers.Qwen3_5GatedDeltaNet),
}
# The functions that transformers opens in every gated delta net, also those of Qwen3-Next and OLMo-Hybrid.
_FUNCTIONS = {
    "chunk_gated_delta_rule": layers.ChunkGatedDeltaRule,
    "fused_recurrent_gated_delta_rule": layers.FusedRecurrentGatedDeltaRule,
    "causal_conv1d_fn": layers.CausalConv1dFn,
    "causal_conv1d_update": layers.CausalConv1dUpdate,
}
QWEN3_5_TARGETS = _OF_ROW._replace(
    classes={**_OF_ROW.classes, **_DELTA_NET},
    operations=(*_OF_ROW.operations, *_DELTA_NET),
    hub_names={**_OF_ROW.hub_names, "Qwen3_5GatedDeltaNet": layers.Qwen3_5GatedDeltaNet, **_FUNCTIONS},
    optional=("gated_rms_norm", "delta_net"),  # a model's configuration may ask for attention alone
)
FAMILIES = (QWEN3_5_TARGETS,)
