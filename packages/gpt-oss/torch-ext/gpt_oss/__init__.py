"""GPT-OSS with cuTile kernels: faster training in less memory, the same results."""

from . import layers
from .norms import add_rms_norm, rms_norm
from .shared.hf.install.interface import Interface
from .shared.hf.optimizer import AdamW
from .shared.ops.attention import AttentionPlan, attention
from .shared.ops.experts import experts
from .shared.ops.linear_cross_entropy import linear_cross_entropy
from .shared.ops.rotary import rotary
from .shared.rows.gpt_oss import SERVED

__all__ = [
    "AdamW", "AttentionPlan", "add_rms_norm", "apply", "attention", "capture", "clear_autotune_cache", "eight_bits", "experts", "explain",
    "four_bits", "get_patched_ops", "host_embeddings", "kernelize", "layers", "linear_cross_entropy", "mapping", "report", "reset",
    "rms_norm", "rotary", "sixteen_bits", "warmup_all_kernels",
]

_calls = Interface(__package__, [SERVED], layers)
apply, kernelize, capture, reset = _calls.apply, _calls.kernelize, _calls.capture, _calls.reset
eight_bits, four_bits, sixteen_bits, host_embeddings = _calls.eight_bits, _calls.four_bits, _calls.sixteen_bits, _calls.host_embeddings
explain, report, mapping, get_patched_ops = _calls.explain, _calls.report, _calls.mapping, _calls.get_patched_ops
warmup_all_kernels, clear_autotune_cache = _calls.warmup_all_kernels, _calls.clear_autotune_cache
