"""Qwen3.5 with cuTile kernels: a prebuilt, deterministic gated delta rule with a backward pass on every GPU."""

from . import layers
from .shared.hf.install.interface import Interface
from .shared.hf.optimizer import AdamW
from .shared.hf.parts.packing import pack
from .shared.ops.attention import AttentionPlan, attention
from .shared.ops.gated_delta_rule import gated_delta_rule
from .shared.ops.gated_delta_step import gated_delta_step
from .shared.ops.gated_rms_norm import gated_rms_norm
from .shared.ops.linear_cross_entropy import linear_cross_entropy
from .shared.ops.linear_log_probs import linear_log_probs
from .shared.ops.short_conv import short_conv
from .shared.rows.qwen3_5 import SERVED

__all__ = [
    "AdamW", "AttentionPlan", "apply", "attention", "capture", "clear_autotune_cache", "eight_bits", "explain", "four_bits",
    "gated_delta_rule", "gated_delta_step", "gated_rms_norm", "get_patched_ops", "host_embeddings", "kernelize", "layers",
    "linear_cross_entropy", "linear_log_probs", "mapping", "pack", "report", "reset", "short_conv", "sixteen_bits", "warmup_all_kernels",
]

NAMED = {
    "RMSNormZeroCentered": layers.RMSNormZeroCentered,
    # The functions that transformers opens in every gated delta net, also in those of OLMo-Hybrid.
    "chunk_gated_delta_rule": layers.ChunkGatedDeltaRule,
    "fused_recurrent_gated_delta_rule": layers.FusedRecurrentGatedDeltaRule,
    "causal_conv1d_fn": layers.CausalConv1dFn,
    "causal_conv1d_update": layers.CausalConv1dUpdate,
}
_calls = Interface(__package__, [SERVED], layers, NAMED)
apply, kernelize, capture, reset = _calls.apply, _calls.kernelize, _calls.capture, _calls.reset
eight_bits, four_bits, sixteen_bits, host_embeddings = _calls.eight_bits, _calls.four_bits, _calls.sixteen_bits, _calls.host_embeddings
explain, report, mapping, get_patched_ops = _calls.explain, _calls.report, _calls.mapping, _calls.get_patched_ops
warmup_all_kernels, clear_autotune_cache = _calls.warmup_all_kernels, _calls.clear_autotune_cache
