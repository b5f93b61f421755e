"""The functions that users call: apply the layers to Qwen3 and Qwen3-MoE, inspect them, and remove them."""

from . import layers
from .shared.hf.install.interface import Interface
from .shared.rows.qwen3 import SERVED

NAMED = {
    "SwiGLUMLP": layers.SwiGLUMLP,  # transformers', whose Qwen3 does not use it and the next one yet
    "ForCausalLMLoss": layers.ForCausalLMLoss,
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
