"""Attention's kernels (kernel_src/attention.py) where the scores are capped, as Gemma 2 does it: heads of 128 and 256.

    s = cap * tanh(scale / cap * q @ k.T) where the query sees the key         ds = (1 - tanh^2) * p * (dout @ v.T - delta)

The cap is part of the first factor that a score meets, `inner`, and of what the exponential takes, `scale`: the rest of the walk is the
same. tanh is the hardware's, with a relative error of 5e-4: less than what rounding a score to bf16 adds, as eager attention does. For bf16
alone: the activations of Gemma 2 are larger than fp16 goes.
"""

import inspect

import cuda.tile as ct

from kernel_src.attention import (
    AMPERE,
    EIGHT,
    EVERY_STEP,
    H100,
    HOPPER,
    NO_HINTS,
    PAIR,
    RTX,
    SOME_STEPS,
    arrays_of,
    backward_dkv,
    backward_dq,
    forward,
)
from kernel_src.attention_plan import BLOCK
from kernel_src.attention_wide import backward_dkv_part
from kernel_src.prebuild import FLOAT, Variant

Const = ct.Constant[int]
BLACKWELL = HOPPER[1:]


@ct.kernel
def attention_capped_forward(
    q, k, v, limits, walks, out, lse, scale: float, inner: float,
    BLOCK: Const, STEP: Const, D: Const, LATENCY: Const, MASK: Const,
):  # fmt: skip
    """scale: the cap times log2(e), positive; inner: the softmax's scale over the cap; the rest as in `attention_forward`."""
    forward(q, k, v, limits, walks, out, lse, scale, inner, BLOCK, STEP, D, LATENCY, MASK, True)


@ct.kernel
def attention_capped_backward_dq(
    q, k, v, out, dout, lse, limits, walks, delta, dq, scale: float, plain: float, inner: float,
    BLOCK: Const, STEP: Const, D: Const, LATENCY: Const, MASK: Const,
):  # fmt: skip
    """plain: the softmax's scale; the rest as in `attention_capped_forward` and `attention_backward_dq`."""
    backward_dq(q, k, v, out, dout, lse, limits, walks, delta, dq, scale, plain, inner, BLOCK, STEP, D, LATENCY, MASK, True)


@ct.kernel
def attention_capped_backward_dkv(
    q, k, v, dout, lse, delta, limits, walks, dk, dv, scale: float, plain: float, inner: float,
    BLOCK: Const, STEP: Const, D: Const, LATENCY: Const, MASK: Const,
):  # fmt: skip
    """Computes dk and dv as `attention_backward_dkv` does, of scores with a cap."""
    backward_dkv(q, k, v, dout, lse, delta, limits, walks, dk, dv, scale, plain, inner, BLOCK, STEP, D, LATENCY, MASK, True)


@ct.kernel
def attention_capped_backward_dkv_part(
    q, k, v, dout, lse, delta, limits, walks, dk, dv, scale: float, plain: float, inner: float,
    BLOCK: Const, STEP: Const, D: Const, PART: Const, LATENCY: Const,
):  # fmt: skip
    """Computes dk and dv as `attention_backward_dkv_part` does, of scores with a cap."""
    backward_dkv_part(q, k, v, dout, lse, delta, limits, walks, dk, dv, scale, plain, inner, BLOCK, STEP, D, PART, LATENCY, True)


# As in kernel_src/attention.py and attention_wide.py, with smaller steps where theirs leave no registers for the tanh. Nothing of them is
# measured.
FORWARD = (
    (128, AMPERE, 64, 3, SOME_STEPS, PAIR),
    (128, HOPPER, 128, 3, SOME_STEPS, PAIR),
    (128, RTX, 32, 2, SOME_STEPS, PAIR),
    (256, AMPERE, 16, 2, EVERY_STEP, EIGHT),
    (256, HOPPER, 64, 2, SOME_STEPS, NO_HINTS),
    (256, RTX, 32, 2, SOME_STEPS, EIGHT),
)
DQ = (
    (128, AMPERE + RTX, 32, 2, EVERY_STEP, EIGHT),
    (128, HOPPER, 64, 3, SOME_STEPS, PAIR),
    (256, AMPERE + RTX, 16, 2, EVERY_STEP, EIGHT, "16 to 24 bytes on sm_8x, the smallest step"),
    (256, HOPPER, 32, 2, SOME_STEPS, NO_HINTS),
)
DKV = (
    (128, AMPERE + RTX, 32, 2, EVERY_STEP, EIGHT, "24 bytes on sm_8x; steps of 16 spill nothing, at half the work a step"),
    (128, H100, 32, 3, SOME_STEPS, PAIR),
    (128, BLACKWELL, 32, 3, SOME_STEPS, NO_HINTS),
    (256, H100, 32, 2, EVERY_STEP, EIGHT),
)
DKV_PART = (
    (256, AMPERE + RTX, 16, 2, EIGHT, "200 bytes on sm_12x; with quarters of the columns none, at ten products a step"),
    (256, BLACKWELL, 32, 2, NO_HINTS),
)


def variant_of(kernel, head_dim, architectures, constants, hints, spills=""):
    numbers = dict.fromkeys(("scale", "plain", "inner"), FLOAT)
    parameters = {**arrays_of("bfloat16", head_dim), **numbers, "BLOCK": BLOCK, "D": head_dim, **constants}
    names = inspect.signature(kernel._pyfunc).parameters
    return Variant(kernel, {name: parameters[name] for name in names}, hints, architectures, spills)


def variants():
    kernels = ((attention_capped_forward, FORWARD), (attention_capped_backward_dq, DQ), (attention_capped_backward_dkv, DKV))
    for kernel, choices in kernels:
        for head_dim, architectures, step, latency, mask, hints, *spills in choices:
            yield variant_of(kernel, head_dim, architectures, {"STEP": step, "LATENCY": latency, "MASK": mask}, hints, *spills)
    for head_dim, architectures, step, latency, hints, *spills in DKV_PART:
        constants = {"STEP": step, "PART": head_dim // 2, "LATENCY": latency}
        yield variant_of(attention_capped_backward_dkv_part, head_dim, architectures, constants, hints, *spills)
