"""Attention's kernels (kernel_src/attention.py) for heads of 96 and 256: Phi-3-mini's, and those of Gemma and Qwen3.5.

Heads of 96 are tiles of 128: loads give zeros past the row, which add nothing to any product, and stores leave them out.

Heads of 256: sums of 64 keys' dk and dv, 128 KiB in float32, are more than the registers of a multiprocessor hold beside what they are
made of, except on the H200's. So there is a kernel whose blocks have PART columns of dk and dv each. Every one of them makes the scores
again, so that the gradient is six products a step instead of four.
"""

import inspect

import cuda.tile as ct

from kernel_src.attention import (
    AMPERE,
    EIGHT,
    EVERY_STEP,
    H100,
    HALVES,
    HOPPER,
    KEYS,
    NO_HINTS,
    PAIR,
    RTX,
    SOME_STEPS,
    arrays_of,
    attention_backward_dkv,
    attention_backward_dq,
    attention_forward,
    interval_of,
    products,
    rows_of,
    step_of,
    walk_of,
    within,
)
from kernel_src.attention_plan import BLOCK
from kernel_src.dyt import tanh
from kernel_src.prebuild import FLOAT, Variant

Const = ct.Constant[int]
BLACKWELL = HOPPER[1:]


@ct.function
def part_of(array, step, head, part, STEP: Const, PART: Const, LATENCY: Const):
    """[STEP, PART]: some columns of a step's rows."""
    tile = ct.load(array, index=(step, head, part), shape=(STEP, 1, PART), padding_mode=ct.PaddingMode.ZERO, latency=LATENCY)
    return ct.reshape(tile, (STEP, PART))


@ct.function
def write_part(array, block, head, part, tile, PART: Const):
    ct.store(array, index=(block, head, part), tile=ct.reshape(ct.astype(tile, array.dtype), (BLOCK, 1, PART)))


@ct.function
def backward_dkv_part(
    q, k, v, dout, lse, delta, limits, walks, dk, dv, scale, plain, inner,
    BLOCK: Const, STEP: Const, D: Const, PART: Const, LATENCY: Const, CAPPED: Const,
):  # fmt: skip
    kv_heads, parts = k.shape[1], D // PART
    group = q.shape[1] // kv_heads
    part, rest = ct.bid(0) % parts, ct.bid(0) // parts
    kv_head = rest % kv_heads
    block, start, _, _, end = walk_of(walks, rest // kv_heads, KEYS, STEP)
    first, behind = interval_of(limits, block, KEYS, BLOCK)
    keys, values = rows_of(k, block, kv_head, BLOCK, D), rows_of(v, block, kv_head, BLOCK, D)
    dkeys = ct.zeros((BLOCK, PART), dtype=ct.float32)
    dvalues = ct.zeros((BLOCK, PART), dtype=ct.float32)
    for i in range((end - start) * group):
        head, step = kv_head * group + i % group, start + i // group
        s = products(keys, step_of(q, step, head, STEP, D, LATENCY), BLOCK, STEP)
        if CAPPED:
            s, slope = tanh(s * inner, True)
        p = ct.exp2(s * scale - ct.load(lse, index=(head, step), shape=(1, STEP), latency=LATENCY), flush_to_zero=True)
        p = ct.where(within(first, behind, step, STEP), p, 0.0)
        dp = products(values, step_of(dout, step, head, STEP, D, LATENCY), BLOCK, STEP)
        dqueries = part_of(dout, step, head, part, STEP, PART, LATENCY)
        dvalues = ct.mma(ct.astype(p, dqueries.dtype), dqueries, dvalues)
        ds = p * (dp - ct.load(delta, index=(head, step), shape=(1, STEP), latency=LATENCY))
        if CAPPED:
            ds = ds * slope
        queries = part_of(q, step, head, part, STEP, PART, LATENCY)
        dkeys = ct.mma(ct.astype(ds, queries.dtype), queries, dkeys)
    write_part(dk, block, kv_head, part, dkeys * plain, PART)
    write_part(dv, block, kv_head, part, dvalues, PART)


@ct.kernel
def attention_backward_dkv_part(
    q, k, v, dout, lse, delta, limits, walks, dk, dv, scale: float, plain: float,
    BLOCK: Const, STEP: Const, D: Const, PART: Const, LATENCY: Const,
):  # fmt: skip
    """Computes what `attention_backward_dkv` does, PART columns of dk and dv a block. Grid: blocks * key heads * (D / PART)."""
    backward_dkv_part(
        q, k, v, dout, lse, delta, limits, walks, dk, dv, scale, plain, plain, BLOCK, STEP, D, PART, LATENCY, False
    )


# (head_dim, D, architectures, STEP, LATENCY, MASK, hints, why it may spill), as in kernel_src/attention.py: those of 96 are its entries of
# 128; those of 256 the largest steps that compile without spills. Nothing of them is measured.
FORWARD = (
    (96, 128, AMPERE, 64, 3, SOME_STEPS, PAIR),
    (96, 128, HOPPER, 128, 3, SOME_STEPS, PAIR),
    (96, 128, RTX, 32, 2, SOME_STEPS, PAIR),
    (256, 256, AMPERE, 16, 2, EVERY_STEP, EIGHT),
    (256, 256, HOPPER, 64, 2, SOME_STEPS, NO_HINTS),
    (256, 256, RTX, 32, 2, SOME_STEPS, EIGHT),
)
DQ = (
    (96, 128, AMPERE + RTX, 32, 2, EVERY_STEP, EIGHT),
    (96, 128, HOPPER, 64, 3, SOME_STEPS, PAIR),
    (256, 256, AMPERE, 16, 2, EVERY_STEP, EIGHT, "16 to 24 bytes on sm_8x, the smallest step"),
    (256, 256, HOPPER, 32, 2, SOME_STEPS, NO_HINTS),
    (256, 256, RTX, 32, 2, EVERY_STEP, EIGHT),
)
DKV = (
    (96, 128, AMPERE + RTX, 32, 2, EVERY_STEP, EIGHT, "8 bytes on sm_8x; steps of 16 spill nothing, at half the work a step"),
    (96, 128, H100, 64, 3, SOME_STEPS, PAIR),
    (96, 128, BLACKWELL, 64, 3, SOME_STEPS, NO_HINTS),
    (256, 256, H100, 32, 2, EVERY_STEP, EIGHT),
)
DKV_PART = (
    (256, 256, AMPERE + RTX, 16, 2, EIGHT, "104 bytes on sm_12x; with quarters of the columns none, at ten products a step"),
    (256, 256, BLACKWELL, 32, 2, NO_HINTS),
)


def variant_of(kernel, dtype, head_dim, constants, architectures, hints, spills=""):
    parameters = {**arrays_of(dtype, head_dim), "scale": FLOAT, "plain": FLOAT, "BLOCK": BLOCK, **constants}
    names = inspect.signature(kernel._pyfunc).parameters
    return Variant(kernel, {name: parameters[name] for name in names}, hints, architectures, spills)


def variants():
    for dtype in HALVES:
        for kernel, choices in ((attention_forward, FORWARD), (attention_backward_dq, DQ), (attention_backward_dkv, DKV)):
            for head_dim, tile, architectures, step, latency, mask, hints, *spills in choices:
                constants = {"STEP": step, "D": tile, "LATENCY": latency, "MASK": mask}
                yield variant_of(kernel, dtype, head_dim, constants, architectures, hints, *spills)
        for head_dim, tile, architectures, step, latency, hints, *spills in DKV_PART:
            constants = {"STEP": step, "D": tile, "PART": tile // 2, "LATENCY": latency}
            yield variant_of(attention_backward_dkv_part, dtype, head_dim, constants, architectures, hints, *spills)
