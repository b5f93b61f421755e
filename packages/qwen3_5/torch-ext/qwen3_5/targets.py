"""Which layer stands in for what of transformers' Qwen3.5, Qwen3.5-MoE and Qwen3-Next."""

from . import layers
from .families import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from .shared.hf.families import Layers, Targets, targets_of

# The functions that transformers opens in every gated delta net, also in those of OLMo-Hybrid.
_FUNCTIONS = {
    "chunk_gated_delta_rule": layers.ChunkGatedDeltaRule,
    "fused_recurrent_gated_delta_rule": layers.FusedRecurrentGatedDeltaRule,
    "causal_conv1d_fn": layers.CausalConv1dFn,
    "causal_conv1d_update": layers.CausalConv1dUpdate,
}
_NORMS = {"RMSNormZeroCentered": layers.RMSNormZeroCentered, "RMSNormGated": layers.RMSNormGated}


def _targets(own, decoder_layer, causal_lm, experts=None, towers=()) -> Targets:
    """The row's targets, and its delta net with the norm that follows it."""
    norm, prefix = layers.RMSNormZeroCentered, own.family.prefix
    found = targets_of(own, Layers(norm, layers.RotaryPosEmb, decoder_layer, layers.Model, causal_lm, layers.MLP, experts, towers), _NORMS)
    net = {
        "gated_rms_norm": (f"{prefix}RMSNormGated", layers.RMSNormGated),
        "delta_net": (f"{prefix}GatedDeltaNet", layers.Qwen3_5GatedDeltaNet),
    }
    names = {"Qwen3_5GatedDeltaNet": layers.Qwen3_5GatedDeltaNet, net["delta_net"][0]: layers.Qwen3_5GatedDeltaNet}
    return found._replace(
        classes={**found.classes, **net},
        operations=(*found.operations, *net),
        hub_names={**found.hub_names, **names, **_FUNCTIONS},
        optional=(*found.optional, *net),  # a model's configuration may ask for attention alone
    )


FAMILIES = (
    _targets(QWEN3_5, layers.DecoderLayer, layers.CausalLM, towers=(layers.WithVision,)),
    _targets(QWEN3_5_MOE, layers.MoeDecoderLayer, layers.MoeCausalLM, layers.Experts, towers=(layers.MoeWithVision,)),
    _targets(QWEN3_NEXT, layers.NextDecoderLayer, layers.NextCausalLM, layers.Experts),
)
