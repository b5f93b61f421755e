"""Attention of each token to its neighbours in one dimension (Hassani et al. 2022, arXiv 2204.07143; windows are cut off at the borders).

Token i sees the tokens i + m * dilation for -left <= m <= right. With s = scale * q k^T over those and z its log-sum-exp:

    p = exp(s - z)      out = p v
    dv = p^T dout       ds = p (dout v^T - delta),  delta = sum(dout * out)       dq = scale * ds k       dk = scale * ds^T q

Tokens of one residue modulo the dilation see only each other, so they are a sequence of their own whose band is dense: position n of
residue r is token r + n * dilation. A block takes M positions of one residue, batch and head. Nothing of size tokens x tokens exists.

Three families. `neighborhood_*`: the M positions with all that they see fit a tile of N rows (M + left + right <= N), so there is no
loop. Where those with all that they see and all that sees them do (M + 2 max(left, right) <= N), one kernel writes all three gradients:
of 32 heads of 4096 tokens and a window of 7 one that read all of out took 97 us on an H200, one for dq and one for dk and dv 148.
`wide_neighborhood_*` walk over the band as flash attention does (Dao 2023, arXiv 2307.08691). `rowwise_neighborhood_*` take one
neighbour of every row a step, without MMA: float32, which MMA would either round to TF32 or spill, and rows at any address. Sums
have one order: two runs give the same bits.
"""

import cuda.tile as ct

from kernel_src.neighborhood_rows import (
    batch_and_head,
    positions,
    product,
    read_rows,
    read_rows_of,
    read_statistics,
    seen,
    tile_of,
    write_rows,
    write_rows_of,
    write_statistics,
)
from kernel_src.prebuild import FLOAT, FLOATS, INT, Array, Variant

Const = ct.Constant[int]
LOW = -1e30  # a score that nothing sees, finite so that the difference of two is 0 and not NaN


@ct.kernel
def neighborhood_forward(
    q, k, v, out, lse, left: int, right: int, dilation: int, scale: float, N: Const, D: Const
):
    """q, k, v, out: [batch, heads, tokens, at most D]; lse: [batch * heads, tokens] float32, base 2; scale: of the scores.
    Grid (tiles of N less left and right positions of a residue, heads, batch * residues)."""
    M = N - left - right
    at, line = batch_and_head(q, dilation)
    residue, first, count = tile_of(q.shape[2], dilation, M)
    queries, keys = positions(first, N), positions(first - left, N)
    qt = read_rows(q, at, queries, residue, dilation, count, D)
    kt = read_rows(k, at, keys, residue, dilation, count, D)
    vt = read_rows(v, at, keys, residue, dilation, count, D)
    s = product(qt, kt, N, N) * (scale * LOG2E)
    s = ct.where(seen(queries[:, None], keys[None, :], count, left, right), s, LOW)
    high = ct.max(s, axis=1, keepdims=True)
    p = ct.exp2(s - high, flush_to_zero=True)
    total = ct.sum(p, axis=1, keepdims=True)
    acc = ct.mma(ct.astype(p, vt.dtype), vt, ct.zeros((N, D), dtype=ct.float32))
    acc = ct.truediv(acc, total, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX)
    end = ct.minimum(first + M, count)  # the tile's last rows are the next block's
    write_rows(out, at, queries, residue, dilation, end, acc, D)
    write_statistics(lse, line, queries, residue, dilation, end, ct.reshape(high + ct.log2(total), (N,)))


@ct.function
def probabilities(s, z, mask, scale):
    return ct.where(mask, ct.exp2(s * (scale * LOG2E) - z, flush_to_zero=True), 0.0)


@ct.kernel
def neighborhood_backward(
    q, k, v, out, dout, lse, dq, dk, dv, left: int, right: int, dilation: int, scale: float, N: Const, D: Const
):
    """All gradients of M = N - 2 max(left, right) positions, whose tile has all that they see and all that sees them."""
    ct.grid_dependency_control_wait()
    halo = ct.maximum(left, right)
    M = N - 2 * halo
    at, line = batch_and_head(q, dilation)
    residue, first, count = tile_of(q.shape[2], dilation, M)
    places = positions(first - halo, N)
    # Rows at the tile's ends see keys that it does not have: their delta comes from their out, which has been rounded.
    ot = read_rows_of(out, at, places, (places < first) | (places >= first + M), residue, dilation, count, D)
    dt = read_rows(dout, at, places, residue, dilation, count, D)
    theirs = ct.sum(ct.astype(ot, ct.float32) * ct.astype(dt, ct.float32), axis=1, keepdims=True)
    qt = read_rows(q, at, places, residue, dilation, count, D)
    kt = read_rows(k, at, places, residue, dilation, count, D)
    vt = read_rows(v, at, places, residue, dilation, count, D)
    z = read_statistics(lse, line, places, residue, dilation, count)[:, None]
    mine = (places >= first) & (places < ct.minimum(first + M, count))
    zero = ct.zeros((N, D), dtype=ct.float32)
    p = probabilities(product(qt, kt, N, N), z, seen(places[:, None], places[None, :], count, left, right), scale)
    dp = product(dt, vt, N, N)
    delta = ct.where(mine[:, None], ct.sum(p * dp, axis=1, keepdims=True), theirs)
    ds = ct.astype(p * (dp - delta) * scale, kt.dtype)
    write_rows_of(dq, at, places, mine, residue, dilation, ct.mma(ds, kt, zero), D)
    write_rows_of(dv, at, places, mine, residue, dilation, ct.mma(ct.transpose(ct.astype(p, dt.dtype)), dt, zero), D)
    write_rows_of(dk, at, places, mine, residue, dilation, ct.mma(ct.transpose(ds), qt, zero), D)


@ct.kernel
def neighborhood_backward_queries(
    q, k, v, dout, lse, delta, dq, left: int, right: int, dilation: int, scale: float, M: Const, N: Const, D: Const
):
    """dq, and delta: [batch * heads, tokens] float32 for the other kernel: a row of p and of dout v^T is whole here, and its product's
    sum."""
    at, line = batch_and_head(q, dilation)
    residue, first, count = tile_of(q.shape[2], dilation, M)
    queries, keys = positions(first, M), positions(first - left, N)
    qt = read_rows(q, at, queries, residue, dilation, count, D)
    dt = read_rows(dout, at, queries, residue, dilation, count, D)
    kt = read_rows(k, at, keys, residue, dilation, count, D)
    vt = read_rows(v, at, keys, residue, dilation, count, D)
    z = read_statistics(lse, line, queries, residue, dilation, count)[:, None]
    p = probabilities(product(qt, kt, M, N), z, seen(queries[:, None], keys[None, :], count, left, right), scale)
    dp = product(dt, vt, M, N)
    sums = ct.sum(p * dp, axis=1, keepdims=True)
    write_statistics(delta, line, queries, residue, dilation, count, ct.reshape(sums, (M,)))
    acc = ct.mma(ct.astype(p * (dp - sums), kt.dtype), kt, ct.zeros((M, D), dtype=ct.float32))
    write_rows(dq, at, queries, residue, dilation, count, acc * scale, D)


@ct.kernel
def neighborhood_backward_keys(
    q, k, v, dout, lse, delta, dk, dv, left: int, right: int, dilation: int, scale: float, M: Const, N: Const, D: Const
):
    """dk and dv of M keys from the N queries around them."""
    at, line = batch_and_head(q, dilation)
    residue, first, count = tile_of(q.shape[2], dilation, M)
    keys, queries = positions(first, M), positions(first - right, N)
    kt = read_rows(k, at, keys, residue, dilation, count, D)
    vt = read_rows(v, at, keys, residue, dilation, count, D)
    qt = read_rows(q, at, queries, residue, dilation, count, D)
    dt = read_rows(dout, at, queries, residue, dilation, count, D)
    z = read_statistics(lse, line, queries, residue, dilation, count)[None, :]
    p = probabilities(product(kt, qt, M, N), z, seen(queries[None, :], keys[:, None], count, left, right), scale)
    acc = ct.mma(ct.astype(p, dt.dtype), dt, ct.zeros((M, D), dtype=ct.float32))
    write_rows(dv, at, keys, residue, dilation, count, acc, D)
    ds = p * (product(vt, dt, M, N) - read_statistics(delta, line, queries, residue, dilation, count)[None, :])
    acc = ct.mma(ct.astype(ds, qt.dtype), qt, ct.zeros((M, D), dtype=ct.float32))
    write_rows(dk, at, keys, residue, dilation, count, acc * scale, D)


# ---------------------------------------------------------------- windows that no tile holds
@ct.kernel
def wide_neighborhood_forward(
    q, k, v, out, lse, left: int, right: int, dilation: int, scale: float, M: Const, N: Const, D: Const
):
    """Computes what `neighborhood_forward` does for a band of any width."""
    at, line = batch_and_head(q, dilation)
    residue, first, count = tile_of(q.shape[2], dilation, M)
    queries = positions(first, M)
    qt = read_rows(q, at, queries, residue, dilation, count, D)
    acc = ct.zeros((M, D), dtype=ct.float32)
    high = ct.full((M, 1), LOW, dtype=ct.float32)
    total = ct.zeros((M, 1), dtype=ct.float32)
    start = ct.maximum(first - left, 0)
    for j in range(ct.cdiv(ct.minimum(first + M + right, count) - start, N)):
        keys = positions(start + j * N, N)
        kt = read_rows(k, at, keys, residue, dilation, count, D)
        s = product(qt, kt, M, N) * (scale * LOG2E)
        s = ct.where(seen(queries[:, None], keys[None, :], count, left, right), s, LOW)
        new = ct.maximum(high, ct.max(s, axis=1, keepdims=True))
        # A row that has seen nothing yet has `new` at LOW, and its sums of 1 vanish by `keep` once it sees a key.
        p = ct.exp2(s - new, flush_to_zero=True)
        keep = ct.exp2(high - new, flush_to_zero=True)
        total = total * keep + ct.sum(p, axis=1, keepdims=True)
        vt = read_rows(v, at, keys, residue, dilation, count, D)
        acc = ct.mma(ct.astype(p, vt.dtype), vt, acc * keep)
        high = new
    acc = ct.truediv(acc, total, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX)
    write_rows(out, at, queries, residue, dilation, count, acc, D)
    write_statistics(lse, line, queries, residue, dilation, count, ct.reshape(high + ct.log2(total), (M,)))


@ct.kernel
def wide_neighborhood_backward_queries(
    q, k, v, out, dout, lse, delta, dq, left: int, right: int, dilation: int, scale: float, M: Const, N: Const, D: Const
):
    """dq, and delta: [batch * heads, tokens] float32 for the other kernel."""
    at, line = batch_and_head(q, dilation)
    residue, first, count = tile_of(q.shape[2], dilation, M)
    queries = positions(first, M)
    qt = read_rows(q, at, queries, residue, dilation, count, D)
    dt = read_rows(dout, at, queries, residue, dilation, count, D)
    ot = read_rows(out, at, queries, residue, dilation, count, D)
    sums = ct.sum(ct.astype(ot, ct.float32) * ct.astype(dt, ct.float32), axis=1)
    write_statistics(delta, line, queries, residue, dilation, count, sums)
    z = read_statistics(lse, line, queries, residue, dilation, count)[:, None]
    acc = ct.zeros((M, D), dtype=ct.float32)
    start = ct.maximum(first - left, 0)
    for j in range(ct.cdiv(ct.minimum(first + M + right, count) - start, N)):
        keys = positions(start + j * N, N)
        kt = read_rows(k, at, keys, residue, dilation, count, D)
        p = probabilities(product(qt, kt, M, N), z, seen(queries[:, None], keys[None, :], count, left, right), scale)
        dp = product(dt, read_rows(v, at, keys, residue, dilation, count, D), M, N)
        acc = ct.mma(ct.astype(p * (dp - sums[:, None]), kt.dtype), kt, acc)
    write_rows(dq, at, queries, residue, dilation, count, acc * scale, D)


@ct.kernel
def wide_neighborhood_backward_keys(
    q, k, v, dout, lse, delta, dk, dv, left: int, right: int, dilation: int, scale: float, M: Const, N: Const, D: Const
):
    """dk and dv: M keys a block, N queries a step."""
    at, line = batch_and_head(q, dilation)
    residue, first, count = tile_of(q.shape[2], dilation, M)
    keys = positions(first, M)
    kt = read_rows(k, at, keys, residue, dilation, count, D)
    vt = read_rows(v, at, keys, residue, dilation, count, D)
    ak, av = ct.zeros((M, D), dtype=ct.float32), ct.zeros((M, D), dtype=ct.float32)
    start = ct.maximum(first - right, 0)
    for j in range(ct.cdiv(ct.minimum(first + M + left, count) - start, N)):
        queries = positions(start + j * N, N)
        qt = read_rows(q, at, queries, residue, dilation, count, D)
        dt = read_rows(dout, at, queries, residue, dilation, count, D)
        z = read_statistics(lse, line, queries, residue, dilation, count)[None, :]
        p = probabilities(product(kt, qt, M, N), z, seen(queries[None, :], keys[:, None], count, left, right), scale)
        av = ct.mma(ct.astype(p, dt.dtype), dt, av)
        ds = p * (product(vt, dt, M, N) - read_statistics(delta, line, queries, residue, dilation, count)[None, :])
        ak = ct.mma(ct.astype(ds, qt.dtype), qt, ak)
    write_rows(dk, at, keys, residue, dilation, count, ak * scale, D)
    write_rows(dv, at, keys, residue, dilation, count, av, D)


# ---------------------------------------------------------------- float32, and rows that no vector load fits
@ct.function
def read_float32(x, at, places, residue, dilation, count, D: Const):
    return ct.astype(read_rows(x, at, places, residue, dilation, count, D), ct.float32)


@ct.function
def dot(a, b):
    return ct.sum(a * b, axis=1, keepdims=True)


@ct.kernel
def rowwise_neighborhood_forward(q, k, v, out, lse, left: int, right: int, dilation: int, scale: float, M: Const, D: Const):
    """Computes what `neighborhood_forward` does, one neighbour of all rows a step, all in float32."""
    at, line = batch_and_head(q, dilation)
    residue, first, count = tile_of(q.shape[2], dilation, M)
    queries = positions(first, M)
    qt = read_float32(q, at, queries, residue, dilation, count, D)
    acc = ct.zeros((M, D), dtype=ct.float32)
    high = ct.full((M, 1), LOW, dtype=ct.float32)
    total = ct.zeros((M, 1), dtype=ct.float32)
    for m in range(left + right + 1):
        keys = queries + (m - left)
        s = dot(qt, read_float32(k, at, keys, residue, dilation, count, D)) * (scale * LOG2E)
        s = ct.where(((keys >= 0) & (keys < count))[:, None], s, LOW)
        new = ct.maximum(high, s)
        p, keep = ct.exp2(s - new), ct.exp2(high - new)
        total = total * keep + p
        acc = acc * keep + p * read_float32(v, at, keys, residue, dilation, count, D)
        high = new
    write_rows(out, at, queries, residue, dilation, count, acc / total, D)
    write_statistics(lse, line, queries, residue, dilation, count, ct.reshape(high + ct.log2(total), (M,)))


@ct.kernel
def rowwise_neighborhood_backward_queries(
    q, k, v, out, dout, lse, delta, dq, left: int, right: int, dilation: int, scale: float, M: Const, D: Const
):
    at, line = batch_and_head(q, dilation)
    residue, first, count = tile_of(q.shape[2], dilation, M)
    queries = positions(first, M)
    qt = read_float32(q, at, queries, residue, dilation, count, D)
    dt = read_float32(dout, at, queries, residue, dilation, count, D)
    sums = dot(read_float32(out, at, queries, residue, dilation, count, D), dt)
    write_statistics(delta, line, queries, residue, dilation, count, ct.reshape(sums, (M,)))
    z = read_statistics(lse, line, queries, residue, dilation, count)[:, None]
    acc = ct.zeros((M, D), dtype=ct.float32)
    for m in range(left + right + 1):
        keys = queries + (m - left)
        kt = read_float32(k, at, keys, residue, dilation, count, D)
        p = ct.where(((keys >= 0) & (keys < count))[:, None], ct.exp2(dot(qt, kt) * (scale * LOG2E) - z), 0.0)
        acc = acc + p * (dot(dt, read_float32(v, at, keys, residue, dilation, count, D)) - sums) * kt
    write_rows(dq, at, queries, residue, dilation, count, acc * scale, D)


@ct.kernel
def rowwise_neighborhood_backward_keys(
    q, k, v, dout, lse, delta, dk, dv, left: int, right: int, dilation: int, scale: float, M: Const, D: Const
):
    at, line = batch_and_head(q, dilation)
    residue, first, count = tile_of(q.shape[2], dilation, M)
    keys = positions(first, M)
    kt = read_float32(k, at, keys, residue, dilation, count, D)
    vt = read_float32(v, at, keys, residue, dilation, count, D)
    ak, av = ct.zeros((M, D), dtype=ct.float32), ct.zeros((M, D), dtype=ct.float32)
    for m in range(left + right + 1):
        queries = keys + (m - right)
        qt = read_float32(q, at, queries, residue, dilation, count, D)
        dt = read_float32(dout, at, queries, residue, dilation, count, D)
        z = read_statistics(lse, line, queries, residue, dilation, count)[:, None]
        p = ct.where(((queries >= 0) & (queries < count))[:, None], ct.exp2(dot(qt, kt) * (scale * LOG2E) - z), 0.0)
        av = av + p * dt
        ak = ak + p * (dot(dt, vt) - read_statistics(delta, line, queries, residue, dilation, count)[:, None]) * qt
    write_rows(dk, at, keys, residue, dilation, count, ak * scale, D)
    write_rows(dv, at, keys, residue, dilation, count, av, D)


LOG2E = 1.4426950408889634
SCALARS = {"left": INT, "right": INT, "dilation": INT, "scale": FLOAT}
STATISTICS = Array("float32", (None, None), aligned=False)
FORWARD = ("q", "k", "v", "out", "lse")
WHOLE_BACKWARD_QUERIES = ("q", "k", "v", "dout", "lse", "delta", "dq")
BACKWARD_QUERIES = ("q", "k", "v", "out", "dout", "lse", "delta", "dq")
BACKWARD = ("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv")
BACKWARD_KEYS = ("q", "k", "v", "dout", "lse", "delta", "dk", "dv")

# The tile of the kernels without a loop, and the widths of its rows.
ONCE = {"M": 16, "N": 32}
ONCE_WIDTHS = (64, 128)
ONCE_FORWARD_HINTS = {64: {}, 128: {"occupancy": 5}}  # by width
ONCE_BACKWARD_HINTS = {"occupancy": 3}
EXACT = 128  # a width whose rows have no masks
# sm_80, sm_110 and sm_120 spill with the tiles of wgmma and tcgen05.
LARGE = ("sm_90", "sm_100", "sm_103")
SMALL = ("sm_80", "sm_86", "sm_89", "sm_110", "sm_120", "sm_121")
ROWWISE = {"M": 8, "D": 256}


def variant(kernel, names, x, constants, **options):
    arrays = {name: STATISTICS if name in ("lse", "delta") else x for name in names}
    return Variant(kernel, {**arrays, **SCALARS, **constants}, **options)


def once(x, width):
    tile = {"N": ONCE["N"], "D": width}
    yield variant(neighborhood_forward, FORWARD, x, tile, hints=ONCE_FORWARD_HINTS[width])
    yield variant(neighborhood_backward, BACKWARD, x, tile, hints=ONCE_BACKWARD_HINTS)


def variants():
    for dtype in FLOATS[:2]:
        for width in ONCE_WIDTHS:
            x, tile = Array(dtype, (None,) * 4, divisible=(1, 1, 1, 8)), {**ONCE, "D": width}
            if width == EXACT:
                yield from once(Array(dtype, (None, None, None, EXACT)), width)
            yield from once(x, width)
            yield variant(neighborhood_backward_queries, WHOLE_BACKWARD_QUERIES, x, tile)
            yield variant(neighborhood_backward_keys, BACKWARD_KEYS, x, tile)
        x, tile = Array(dtype, (None,) * 4, divisible=(1, 1, 1, 8)), {"M": 64, "N": 64, "D": 128}
        yield variant(wide_neighborhood_forward, FORWARD, x, tile, targets=LARGE)
        yield variant(wide_neighborhood_backward_queries, BACKWARD_QUERIES, x, tile, targets=LARGE)
        yield variant(wide_neighborhood_backward_keys, BACKWARD_KEYS, x, tile, targets=LARGE)
        tile = {"M": 32, "N": 32, "D": 128}
        yield variant(wide_neighborhood_forward, FORWARD, x, tile, targets=SMALL)
        yield variant(wide_neighborhood_backward_queries, BACKWARD_QUERIES, x, tile, targets=SMALL)
        yield variant(wide_neighborhood_backward_keys, BACKWARD_KEYS, x, tile, targets=SMALL, hints={"num_worker_warps": 8})
    for dtype in FLOATS:
        x = Array(dtype, (None,) * 4, aligned=False)
        yield variant(rowwise_neighborhood_forward, FORWARD, x, ROWWISE)
        yield variant(rowwise_neighborhood_backward_queries, BACKWARD_QUERIES, x, ROWWISE)
        yield variant(rowwise_neighborhood_backward_keys, BACKWARD_KEYS, x, ROWWISE)
