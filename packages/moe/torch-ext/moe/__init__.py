"""Mixtral, OLMoE, Qwen2-MoE, Granite-MoE and their kin with cuTile kernels: faster training in less memory, the same results."""

from . import layers
from .api import (
    apply,
    capture,
    clear_autotune_cache,
    eight_bits,
    explain,
    four_bits,
    get_patched_ops,
    kernelize,
    mapping,
    report,
    reset,
    sixteen_bits,
    warmup_all_kernels,
)
from .shared.hf.optimizer import AdamW
from .shared.hf.parts.packing import pack
from .shared.ops.attention import AttentionPlan, attention
from .shared.ops.experts import experts
from .shared.ops.linear_cross_entropy import linear_cross_entropy
from .shared.ops.linear_log_probs import linear_log_probs
from .shared.ops.rms_norm import add_rms_norm, rms_norm
from .shared.ops.rotary import rotary
from .shared.ops.swiglu import mlp, swiglu

__all__ = [
    "AdamW",
    "AttentionPlan",
    "add_rms_norm",
    "apply",
    "attention",
    "capture",
    "clear_autotune_cache",
    "eight_bits",
    "experts",
    "explain",
    "four_bits",
    "get_patched_ops",
    "kernelize",
    "layers",
    "linear_cross_entropy",
    "linear_log_probs",
    "mapping",
    "mlp",
    "pack",
    "report",
    "reset",
    "rms_norm",
    "rotary",
    "sixteen_bits",
    "swiglu",
    "warmup_all_kernels",
]
