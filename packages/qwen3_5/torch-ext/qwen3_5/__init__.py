"""Qwen3.5 with cuTile kernels: a prebuilt, deterministic gated delta rule with a backward pass on every GPU."""

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
from .shared.ops.gated_delta_rule import gated_delta_rule
from .shared.ops.gated_delta_step import gated_delta_step
from .shared.ops.gated_rms_norm import gated_rms_norm
from .shared.ops.linear_cross_entropy import linear_cross_entropy
from .shared.ops.linear_log_probs import linear_log_probs
from .shared.ops.short_conv import short_conv

__all__ = [
    "AdamW",
    "AttentionPlan",
    "apply",
    "attention",
    "capture",
    "clear_autotune_cache",
    "eight_bits",
    "explain",
    "four_bits",
    "gated_delta_rule",
    "gated_delta_step",
    "gated_rms_norm",
    "get_patched_ops",
    "kernelize",
    "layers",
    "linear_cross_entropy",
    "linear_log_probs",
    "mapping",
    "pack",
    "report",
    "reset",
    "short_conv",
    "sixteen_bits",
    "warmup_all_kernels",
]
