"""The functions that users call: apply the layers to Qwen3.5, Qwen3.5-MoE and Qwen3-Next, inspect them, and remove them."""

from . import layers
from .shared.hf.install.interface import Interface
from .shared.rows.qwen3_5 import SERVED

NAMED = {
    "RMSNormZeroCentered": layers.RMSNormZeroCentered,
    # The functions that transformers opens in every gated delta net, also in those of OLMo-Hybrid.
    "chunk_gated_delta_rule": layers.ChunkGatedDeltaRule,
    "fused_recurrent_gated_delta_rule": layers.FusedRecurrentGatedDeltaRule,
    "causal_conv1d_fn": layers.CausalConv1dFn,
    "causal_conv1d_update": layers.CausalConv1dUpdate,
}
_calls = Interface(__package__, [SERVED], layers, NAMED)
apply = _calls.apply
kernelize = _calls.kernelize
eight_bits = _calls.eight_bits
four_bits = _calls.four_bits
sixteen_bits = _calls.sixteen_bits
explain = _calls.explain
report = _calls.report
capture = _calls.capture
mapping = _calls.mapping
get_patched_ops = _calls.get_patched_ops
reset = _calls.reset
warmup_all_kernels = _calls.warmup_all_kernels
clear_autotune_cache = _calls.clear_autotune_cache
