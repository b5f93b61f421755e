"""Attention over packed documents (FlashAttention-2, Dao 2023, arXiv 2307.08691), with attention sinks.

    s = scale * q @ k.T where the query sees the key       p = exp(s - lse)       lse = log(sum(exp(s)) + exp(sink))
    out = p @ v                                            delta = rowsum(dout * out)
    ds = p * (dout @ v.T - delta)                          dq = scale * ds @ k       dk = scale * ds.T @ q       dv = p.T @ dout
    dsink = -sum(exp(sink - lse) * delta)

Each query head sees one key head: that of its group. All sums are float32, exponentials are to base 2, and nothing is atomic, so two runs
give the same bits. Three launches: `attention_forward`, which saves the log-sum-exp, `attention_backward_dq`, which makes delta too, and
`attention_backward_dkv`, which sums over the query heads of a group; a fourth where there are sinks.

With a cap c, s = c * tanh(scale / c * q @ k.T), and ds is multiplied by 1 - tanh^2: kernel_src/attention_capped.py.

Which tokens see which comes from the plan (kernel_src/attention_plan.py). A block has BLOCK rows and walks over STEP tokens at a time.
Tokens that it must not see are masked in the steps in which there are some; past the last token lie zeros, masked like the rest.

Measured on an H200 (8192 tokens, 32 and 8 heads of 128), what matters: two blocks of four warps on a multiprocessor without spills; masks
only where they are needed; lse and delta of a step by ct.load (TMA) and not by gathers, 14 % of dkv; in dkv the query block outside and the
head inside of one flat loop. Some shapes make the compiler wait after each wgmma, 1.7-2.3 times as slow: 64 x 64 with 8 warps, a
dkv of 128 x 64.
"""

import inspect

import cuda.tile as ct

from kernel_src.attention_plan import BLOCK, KEYS, QUERIES
from kernel_src.dyt import tanh
from kernel_src.prebuild import FLOAT, INT, Array, Variant

Const = ct.Constant[int]
LOG2E = 1.4426950408889634
LOWEST = -1e30  # where a row's maximum starts: finite, so that a row that sees nothing is no NaN
MASKED = -float("inf")
ZERO = ct.PaddingMode.ZERO


@ct.function
def rows_of(array, block, head, ROWS: Const, D: Const):
    """[ROWS, D]: the block's rows of one head of [tokens, heads, D]; zeros past the last token."""
    return ct.reshape(ct.load(array, index=(block, head, 0), shape=(ROWS, 1, D), padding_mode=ZERO), (ROWS, D))


@ct.function
def step_of(array, step, head, ROWS: Const, D: Const, LATENCY: Const):
    """Reads what `rows_of` does, in a loop, LATENCY steps ahead."""
    tile = ct.load(array, index=(step, head, 0), shape=(ROWS, 1, D), padding_mode=ZERO, latency=LATENCY)
    return ct.reshape(tile, (ROWS, D))


@ct.function
def write_rows(array, block, head, tile, ROWS: Const, D: Const):
    ct.store(array, index=(block, head, 0), tile=ct.reshape(ct.astype(tile, array.dtype), (ROWS, 1, D)))


@ct.function
def walk_of(walks, n, SIDE: Const, STEP: Const):
    """(block, first step, the first one without a mask, the one behind those, the end) of the n-th walk of the queries or of the keys."""
    row = SIDE * 5
    block, first = ct.gather(walks, (row, n), check_bounds=False), ct.gather(walks, (row + 1, n), check_bounds=False)
    full, full_end = ct.gather(walks, (row + 2, n), check_bounds=False), ct.gather(walks, (row + 3, n), check_bounds=False)
    start, end = first // STEP, ct.cdiv(ct.gather(walks, (row + 4, n), check_bounds=False), STEP)
    unmasked = ct.minimum(ct.cdiv(full, STEP), end)
    return block, start, unmasked, ct.maximum(full_end // STEP, unmasked), end


@ct.function
def interval_of(limits, block, SIDE: Const, BLOCK: Const):
    """(first, behind), [BLOCK, 1] each: what each of the block's rows sees, or who sees it."""
    rows = block * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
    first, behind = ct.gather(limits, (2 * SIDE, rows), check_bounds=False), ct.gather(limits, (2 * SIDE + 1, rows), check_bounds=False)
    return first[:, None], behind[:, None]


@ct.function
def within(first, behind, step, STEP: Const):
    """[BLOCK, STEP]: which tokens of the step lie in the row's interval."""
    tokens = (step * STEP + ct.arange(STEP, dtype=ct.int32))[None, :]
    return (tokens >= first) & (tokens < behind)


@ct.function
def products(a, b, M: Const, N: Const):
    """[M, N]: a @ b.T in float32."""
    return ct.mma(a, ct.transpose(b), ct.zeros((M, N), dtype=ct.float32))


@ct.function
def attend(
    q, k, v, limits, block, head, kv_head, start, unmasked, masked, end, scale, inner,
    BLOCK: Const, STEP: Const, D: Const, LATENCY: Const, MASK: Const, CAPPED: Const,
):  # fmt: skip
    """(sum of p @ v, the largest score, sum of p) of the block's queries: the online softmax, where the scores are scaled to base 2 and
    the sums are relative to the largest one."""
    first, behind = interval_of(limits, block, QUERIES, BLOCK)
    queries = rows_of(q, block, head, BLOCK, D)
    acc = ct.zeros((BLOCK, D), dtype=ct.float32)
    high = ct.full((BLOCK, 1), LOWEST, dtype=ct.float32)
    total = ct.zeros((BLOCK, 1), dtype=ct.float32)
    for step in range(start, end):
        s = products(queries, step_of(k, step, kv_head, STEP, D, LATENCY), BLOCK, STEP)
        if CAPPED:
            s, _ = tanh(s * inner, True)
        if MASK == EVERY_STEP:
            s = ct.where(within(first, behind, step, STEP), s, MASKED)
        else:
            if (step < unmasked) | (step >= masked):
                s = ct.where(within(first, behind, step, STEP), s, MASKED)
        higher = ct.maximum(high, ct.max(s, 1, keepdims=True) * scale)
        p = ct.exp2(s * scale - higher, flush_to_zero=True)
        shrink = ct.exp2(high - higher, flush_to_zero=True)
        total = total * shrink + ct.sum(p, 1, keepdims=True)
        values = step_of(v, step, kv_head, STEP, D, LATENCY)
        acc = ct.mma(ct.astype(p, values.dtype), values, acc * shrink)
        high = higher
    return acc, high, total


@ct.function
def write_attended(out, lse, block, head, acc, high, total, BLOCK: Const, D: Const):
    """A row that saw nothing has a sum of 0 and gives 0."""
    total = ct.maximum(total, 1e-30)
    acc = ct.truediv(acc, total, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX)
    write_rows(out, block, head, acc, BLOCK, D)
    rows = block * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
    ct.scatter(lse, (head, rows), ct.reshape(high + ct.log2(total), (BLOCK,)), check_bounds=False)


@ct.function
def forward(
    q, k, v, limits, walks, out, lse, scale, inner, BLOCK: Const, STEP: Const, D: Const, LATENCY: Const, MASK: Const, CAPPED: Const
):
    heads = q.shape[1]
    head = ct.bid(0) % heads
    block, start, unmasked, masked, end = walk_of(walks, ct.bid(0) // heads, QUERIES, STEP)
    kv_head = head // (heads // k.shape[1])
    acc, high, total = attend(
        q, k, v, limits, block, head, kv_head, start, unmasked, masked, end, scale, inner, BLOCK, STEP, D, LATENCY, MASK, CAPPED
    )
    write_attended(out, lse, block, head, acc, high, total, BLOCK, D)


@ct.kernel
def attention_forward(
    q, k, v, limits, walks, out, lse, scale: float, BLOCK: Const, STEP: Const, D: Const, LATENCY: Const, MASK: Const
):
    """q, out: [tokens, heads, D]; k, v: [tokens, heads / group, D]; limits, walks: the plan's; lse: [heads, blocks * BLOCK] fp32, to
    base 2; scale: the softmax's times log2(e), positive. Grid: blocks * heads."""
    forward(q, k, v, limits, walks, out, lse, scale, scale, BLOCK, STEP, D, LATENCY, MASK, False)


@ct.kernel
def attention_sink_forward(
    q, k, v, sinks, limits, walks, out, lse, scale: float, BLOCK: Const, STEP: Const, D: Const, LATENCY: Const, MASK: Const
):
    """Computes what `attention_forward` does with sinks: [heads] fp32, one more score of every query, that of a key whose value is zero."""
    heads = q.shape[1]
    head = ct.bid(0) % heads
    block, start, unmasked, masked, end = walk_of(walks, ct.bid(0) // heads, QUERIES, STEP)
    sink = ct.gather(sinks, head, check_bounds=False) * LOG2E
    kv_head = head // (heads // k.shape[1])
    acc, high, total = attend(
        q, k, v, limits, block, head, kv_head, start, unmasked, masked, end, scale, scale, BLOCK, STEP, D, LATENCY, MASK, False
    )
    higher = ct.maximum(high, sink)
    shrink = ct.exp2(high - higher, flush_to_zero=True)
    total = total * shrink + ct.exp2(sink - higher, flush_to_zero=True)
    write_attended(out, lse, block, head, acc * shrink, higher, total, BLOCK, D)


@ct.function
def backward_dq(
    q, k, v, out, dout, lse, limits, walks, delta, dq, scale, plain, inner,
    BLOCK: Const, STEP: Const, D: Const, LATENCY: Const, MASK: Const, CAPPED: Const,
):  # fmt: skip
    heads = q.shape[1]
    head = ct.bid(0) % heads
    block, start, unmasked, masked, end = walk_of(walks, ct.bid(0) // heads, QUERIES, STEP)
    kv_head = head // (heads // k.shape[1])
    rows = block * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
    first, behind = interval_of(limits, block, QUERIES, BLOCK)
    queries, dqueries = rows_of(q, block, head, BLOCK, D), rows_of(dout, block, head, BLOCK, D)
    attended = ct.astype(rows_of(out, block, head, BLOCK, D), ct.float32)
    row_delta = ct.sum(attended * ct.astype(dqueries, ct.float32), 1)
    ct.scatter(delta, (head, rows), row_delta, check_bounds=False)
    row_delta = row_delta[:, None]
    row_lse = ct.gather(lse, (head, rows), check_bounds=False)[:, None]
    acc = ct.zeros((BLOCK, D), dtype=ct.float32)
    for step in range(start, end):
        keys = step_of(k, step, kv_head, STEP, D, LATENCY)
        s = products(queries, keys, BLOCK, STEP)
        dp = products(dqueries, step_of(v, step, kv_head, STEP, D, LATENCY), BLOCK, STEP)
        if CAPPED:
            s, slope = tanh(s * inner, True)
        p = ct.exp2(s * scale - row_lse, flush_to_zero=True)
        if MASK == EVERY_STEP:
            p = ct.where(within(first, behind, step, STEP), p, 0.0)
        else:
            if (step < unmasked) | (step >= masked):
                p = ct.where(within(first, behind, step, STEP), p, 0.0)
        ds = p * (dp - row_delta)
        if CAPPED:
            ds = ds * slope
        acc = ct.mma(ct.astype(ds, keys.dtype), keys, acc)
    write_rows(dq, block, head, acc * plain, BLOCK, D)


@ct.kernel
def attention_backward_dq(
    q, k, v, out, dout, lse, limits, walks, delta, dq, scale: float, plain: float,
    BLOCK: Const, STEP: Const, D: Const, LATENCY: Const, MASK: Const,
):  # fmt: skip
    """dout, dq: [tokens, heads, D]; delta: [heads, blocks * BLOCK] fp32, made here for dkv; plain: the softmax's scale; the rest as in
    `attention_forward`."""
    backward_dq(
        q, k, v, out, dout, lse, limits, walks, delta, dq, scale, plain, plain, BLOCK, STEP, D, LATENCY, MASK, False
    )


@ct.function
def dkv_step(
    dk, dv, keys, values, q, dout, lse, delta, first, behind, head, step, scale, inner,
    MASKS: Const, BLOCK: Const, STEP: Const, D: Const, LATENCY: Const, CAPPED: Const,
):  # fmt: skip
    """(dk, dv) with what STEP queries of one head add to them. Keys stand in rows here, queries in columns."""
    queries = step_of(q, step, head, STEP, D, LATENCY)
    s = products(keys, queries, BLOCK, STEP)
    dqueries = step_of(dout, step, head, STEP, D, LATENCY)
    dp = products(values, dqueries, BLOCK, STEP)
    if CAPPED:
        s, slope = tanh(s * inner, True)
    p = ct.exp2(s * scale - ct.load(lse, index=(head, step), shape=(1, STEP), latency=LATENCY), flush_to_zero=True)
    if MASKS:
        p = ct.where(within(first, behind, step, STEP), p, 0.0)
    dv = ct.mma(ct.astype(p, dqueries.dtype), dqueries, dv)
    ds = p * (dp - ct.load(delta, index=(head, step), shape=(1, STEP), latency=LATENCY))
    if CAPPED:
        ds = ds * slope
    return ct.mma(ct.astype(ds, queries.dtype), queries, dk), dv


@ct.function
def backward_dkv(
    q, k, v, dout, lse, delta, limits, walks, dk, dv, scale, plain, inner,
    BLOCK: Const, STEP: Const, D: Const, LATENCY: Const, MASK: Const, CAPPED: Const,
):  # fmt: skip
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    kv_head = ct.bid(0) % kv_heads
    block, start, unmasked, masked, end = walk_of(walks, ct.bid(0) // kv_heads, KEYS, STEP)
    head = kv_head * group
    first, behind = interval_of(limits, block, KEYS, BLOCK)
    keys, values = rows_of(k, block, kv_head, BLOCK, D), rows_of(v, block, kv_head, BLOCK, D)
    dkeys = ct.zeros((BLOCK, D), dtype=ct.float32)
    dvalues = ct.zeros((BLOCK, D), dtype=ct.float32)
    if MASK == EVERY_STEP:
        for i in range((end - start) * group):
            dkeys, dvalues = dkv_step(
                dkeys, dvalues, keys, values, q, dout, lse, delta, first, behind, head + i % group, start + i // group, scale, inner,
                1, BLOCK, STEP, D, LATENCY, CAPPED,
            )  # fmt: skip
    else:
        for i in range((unmasked - start) * group):
            dkeys, dvalues = dkv_step(
                dkeys, dvalues, keys, values, q, dout, lse, delta, first, behind, head + i % group, start + i // group, scale, inner,
                1, BLOCK, STEP, D, LATENCY, CAPPED,
            )  # fmt: skip
        for i in range((masked - unmasked) * group):
            dkeys, dvalues = dkv_step(
                dkeys, dvalues, keys, values, q, dout, lse, delta, first, behind, head + i % group, unmasked + i // group, scale, inner,
                0, BLOCK, STEP, D, LATENCY, CAPPED,
            )  # fmt: skip
        for i in range((end - masked) * group):
            dkeys, dvalues = dkv_step(
                dkeys, dvalues, keys, values, q, dout, lse, delta, first, behind, head + i % group, masked + i // group, scale, inner,
                1, BLOCK, STEP, D, LATENCY, CAPPED,
            )  # fmt: skip
    write_rows(dk, block, kv_head, dkeys * plain, BLOCK, D)
    write_rows(dv, block, kv_head, dvalues, BLOCK, D)


@ct.kernel
def attention_backward_dkv(
    q, k, v, dout, lse, delta, limits, walks, dk, dv, scale: float, plain: float,
    BLOCK: Const, STEP: Const, D: Const, LATENCY: Const, MASK: Const,
):  # fmt: skip
    """dk, dv: [tokens, heads / group, D], sums over the query heads of a group; limits, walks: the plan's; the rest as in
    `attention_backward_dq`. Grid: blocks * key heads."""
    backward_dkv(q, k, v, dout, lse, delta, limits, walks, dk, dv, scale, plain, plain, BLOCK, STEP, D, LATENCY, MASK, False)


@ct.kernel
def attention_sink_gradient(sinks, lse, delta, dsinks, tokens, TILE: Const):
    """sinks, dsinks: [heads] fp32; lse, delta: [heads, blocks * BLOCK] fp32. Grid: heads."""
    head = ct.bid(0)
    sink = ct.gather(sinks, head, check_bounds=False) * LOG2E
    acc = ct.zeros((TILE,), dtype=ct.float32)
    for i in range(ct.cdiv(tokens, TILE)):
        t = i * TILE + ct.arange(TILE, dtype=ct.int32)
        row_lse, row_delta = ct.gather(lse, (head, t), padding_value=0), ct.gather(delta, (head, t), padding_value=0)
        acc = acc + ct.where(t < tokens, ct.exp2(sink - row_lse) * row_delta, 0.0)
    ct.scatter(dsinks, head, -ct.sum(acc, 0), check_bounds=False)


# ---------------------------------------------------------------- what is prebuilt
EVERY_STEP, SOME_STEPS = 0, 1  # MASK: in every step, or only in those that need one (dkv: in loops of their own)
SINK_TILE = 1024  # tokens of a step of the gradient of the sinks
HALVES = ("bfloat16", "float16")
AMPERE, HOPPER, RTX = ("sm_80", "sm_86", "sm_89"), ("sm_90", "sm_100", "sm_103", "sm_110"), ("sm_120", "sm_121")
H100, BLACKWELL = HOPPER[:1], HOPPER[1:]
NO_HINTS: dict[str, int] = {}
PAIR, THREE, FOUR, EIGHT = {"occupancy": 2}, {"occupancy": 3}, {"occupancy": 4}, {"num_worker_warps": 8}
# (head_dim, architectures, STEP, LATENCY, MASK, hints, why it may spill). Those of sm_90 are the fastest of 33 on an H200: of head_dim
# 128 over 1, 8, 32 and uneven documents, of head_dim 64 over windows of 128 tokens with sinks, all of a document, and 8 documents. The
# other entries are the largest steps that compile without spills, and nothing of them is measured.
FORWARD = (
    (128, AMPERE, 64, 3, SOME_STEPS, PAIR),
    (128, HOPPER, 128, 3, SOME_STEPS, PAIR),
    (128, RTX, 32, 2, SOME_STEPS, PAIR),
    (64, AMPERE, 32, 2, SOME_STEPS, PAIR),
    (64, H100, 64, 4, SOME_STEPS, FOUR),
    (64, BLACKWELL, 128, 3, SOME_STEPS, PAIR),
    (64, RTX, 64, 3, SOME_STEPS, PAIR),
)
DQ = (
    (128, AMPERE + RTX, 32, 2, EVERY_STEP, EIGHT),
    (128, HOPPER, 64, 3, SOME_STEPS, PAIR),
    (64, AMPERE + RTX, 64, 1, SOME_STEPS, EIGHT),
    (64, HOPPER, 64, 3, SOME_STEPS, THREE),
)
DKV = (
    (128, AMPERE + RTX, 32, 2, EVERY_STEP, EIGHT, "8 bytes on sm_8x; steps of 16 spill nothing, at half the work a step"),
    (128, H100, 64, 3, SOME_STEPS, PAIR),
    (128, BLACKWELL, 64, 3, SOME_STEPS, NO_HINTS),  # 255 registers: one block, whatever is asked for
    (64, AMPERE + RTX, 32, 2, EVERY_STEP, EIGHT),
    (64, HOPPER, 64, 4, SOME_STEPS, PAIR),
)


def arrays_of(dtype, head_dim):
    """Every array parameter by its name."""
    rows, table = Array(dtype, (None, None, head_dim)), Array("int32", (None, None), aligned=False)
    sums, sinks = Array("float32", (None, None), divisible=(1, BLOCK)), Array("float32", (None,), aligned=False)
    arrays = dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), rows)
    arrays |= dict.fromkeys(("limits", "walks"), table)
    return {**arrays, "lse": sums, "delta": sums, "sinks": sinks, "dsinks": sinks}


def variant_of(kernel, dtype, head_dim, architectures, step, latency, mask, hints, spills=""):
    parameters = {**arrays_of(dtype, head_dim), "scale": FLOAT, "plain": FLOAT}
    parameters |= {"BLOCK": BLOCK, "STEP": step, "D": head_dim, "LATENCY": latency, "MASK": mask}
    names = inspect.signature(kernel._pyfunc).parameters
    return Variant(kernel, {name: parameters[name] for name in names}, hints, architectures, spills)


def variants():
    kernels = ((attention_forward, FORWARD), (attention_sink_forward, FORWARD), (attention_backward_dq, DQ), (attention_backward_dkv, DKV))
    for kernel, choices in kernels:
        for dtype in HALVES:
            for choice in choices:
                yield variant_of(kernel, dtype, *choice)
    arrays = arrays_of("bfloat16", 64)
    yield Variant(
        attention_sink_gradient, {**{n: arrays[n] for n in ("sinks", "lse", "delta", "dsinks")}, "tokens": INT, "TILE": SINK_TILE}
    )
