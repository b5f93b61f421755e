"""Mixtral, OLMoE, Qwen2-MoE, Granite-MoE and their kin with cuTile kernels: faster training in less memory, the same results."""

from . import layers
from .shared.hf.install.interface import Interface
from .shared.hf.optimizer import AdamW
from .shared.hf.parts.packing import pack
from .shared.ops.attention import AttentionPlan, attention
from .shared.ops.experts import experts
from .shared.ops.linear_cross_entropy import linear_cross_entropy
from .shared.ops.linear_log_probs import linear_log_probs
from .shared.ops.rms_norm import add_rms_norm, rms_norm
from .shared.ops.rotary import rotary
from .shared.ops.swiglu import mlp, swiglu
from .shared.rows.moe import SERVED

__all__ = [
    "AdamW", "AttentionPlan", "add_rms_norm", "apply", "attention", "capture", "clear_autotune_cache", "eight_bits", "experts", "explain",
    "four_bits", "get_patched_ops", "host_embeddings", "kernelize", "layers", "linear_cross_entropy", "linear_log_probs", "mapping", "mlp",
    "pack", "report", "reset", "rms_norm", "rotary", "sixteen_bits", "swiglu", "warmup_all_kernels",
]

_calls = Interface(__package__, [SERVED], layers, {"RMSNorm": layers.RMSNorm})
apply, kernelize, capture, reset = _calls.apply, _calls.kernelize, _calls.capture, _calls.reset
eight_bits, four_bits, sixteen_bits, host_embeddings = _calls.eight_bits, _calls.four_bits, _calls.sixteen_bits, _calls.host_embeddings
explain, report, mapping, get_patched_ops = _calls.explain, _calls.report, _calls.mapping, _calls.get_patched_ops
warmup_all_kernels, clear_autotune_cache = _calls.warmup_all_kernels, _calls.clear_autotune_cache
