"""Bastile: models of transformers with cuTile kernels, faster training in less memory, the same results. `bastile.kernelize(model)` finds
the family by the model and the kernels where they are: in this package, or in the one of the Hub that has them."""

from .front import Front, OnHub
from .shared.hf.install.layers import any_norm_of
from .shared.hf.optimizer import AdamW
from .shared.hf.parts.packing import pack
from .shared.ops.attention import AttentionPlan, attention
from .shared.ops.experts import experts
from .shared.ops.gated_delta_rule import gated_delta_rule
from .shared.ops.gated_delta_step import gated_delta_step
from .shared.ops.gated_rms_norm import gated_rms_norm
from .shared.ops.linear_cross_entropy import linear_cross_entropy
from .shared.ops.linear_divergence import linear_divergence
from .shared.ops.linear_log_probs import linear_log_probs
from .shared.ops.rms_norm import add_rms_norm, rms_norm
from .shared.ops.rotary import qk_norm_rotary, rotary
from .shared.ops.short_conv import short_conv
from .shared.ops.swiglu import mlp, swiglu
from .shared.rows import dense, gpt_oss, moe, qwen3, qwen3_5

__all__ = [
    "AdamW", "AttentionPlan", "add_rms_norm", "apply", "attention", "capture", "clear_autotune_cache", "eight_bits", "experts", "explain",
    "four_bits", "gated_delta_rule", "gated_delta_step", "gated_rms_norm", "get_patched_ops", "host_embeddings", "kernelize",
    "linear_cross_entropy", "linear_divergence", "linear_log_probs", "mapping", "mlp", "pack", "qk_norm_rotary", "report", "reset",
    "rms_norm", "rotary", "short_conv", "sixteen_bits", "swiglu", "warmup_all_kernels",
]

PACKAGES = (
    OnHub("bastile/qwen3", qwen3.SERVED),
    OnHub("bastile/gpt-oss", gpt_oss.SERVED),
    OnHub("bastile/qwen3_5", qwen3_5.SERVED),
    OnHub("bastile/moe", moe.SERVED),
    OnHub("bastile/decoders", dense.SERVED),
)
_calls = Front(__package__, PACKAGES, named={"RMSNorm": any_norm_of(own for each in PACKAGES for own in each.served.rows)})
apply, kernelize, capture, reset = _calls.apply, _calls.kernelize, _calls.capture, _calls.reset
eight_bits, four_bits, sixteen_bits, host_embeddings = _calls.eight_bits, _calls.four_bits, _calls.sixteen_bits, _calls.host_embeddings
explain, report, mapping, get_patched_ops = _calls.explain, _calls.report, _calls.mapping, _calls.get_patched_ops
warmup_all_kernels, clear_autotune_cache = _calls.warmup_all_kernels, _calls.clear_autotune_cache
