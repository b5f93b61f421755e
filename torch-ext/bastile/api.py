"""The functions that users call, for every family."""

from .front import Front, OnHub
from .shared.hf.install.layers import any_norm_of
from .shared.rows import dense, gpt_oss, moe, qwen3, qwen3_5

PACKAGES = (
    OnHub("bastile/qwen3", qwen3.SERVED),
    OnHub("bastile/gpt-oss", gpt_oss.SERVED),
    OnHub("bastile/qwen3_5", qwen3_5.SERVED),
    OnHub("bastile/moe", moe.SERVED),
    OnHub("bastile/decoders", dense.SERVED),
)
_calls = Front(__package__, PACKAGES, named={"RMSNorm": any_norm_of(own for each in PACKAGES for own in each.served.rows)})
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
