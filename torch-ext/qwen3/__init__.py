"""Qwen3 with cuTile kernels: faster training in less memory, the same results."""

from . import layers
from .ops.experts import experts
from .ops.linear_cross_entropy import linear_cross_entropy
from .ops.rms_norm import add_rms_norm, rms_norm
from .ops.rotary import qk_norm_rotary, rotary
from .ops.swiglu import mlp, swiglu
from .optimizer import AdamW
from .packing import pack
from .patching import get_patched_ops, kernelize, mapping, reset
from .places import apply
from .warmup import clear_autotune_cache, warmup_all_kernels

__all__ = [
    "AdamW",
    "add_rms_norm",
    "apply",
    "clear_autotune_cache",
    "experts",
    "get_patched_ops",
    "kernelize",
    "layers",
    "linear_cross_entropy",
    "mapping",
    "mlp",
    "pack",
    "qk_norm_rotary",
    "reset",
    "rms_norm",
    "rotary",
    "swiglu",
    "warmup_all_kernels",
]
