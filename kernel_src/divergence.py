"""Distances between two distributions over a vocabulary: Kullback-Leibler, Jensen-Shannon, total variation; and their gradients.

With X = log Q of the student and Y = log P of the teacher, both [rows, columns], summed over the columns of a row:

    KL(P || Q) = sum P * (Y - X)                                                    dX = -P
    JSD        = b * sum P * (Y - log M) + (1 - b) * sum Q * (X - log M)             dX = (1 - b) * Q * (X - log M)
                 with M = b * P + (1 - b) * Q
                 b = 0: KL(P || Q)      b = 1: KL(Q || P) = sum Q * (X - Y)          dX = Q * (X - Y + 1)
    TVD        = 1/2 * sum |P - Q|                                                  dQ = sign(Q - P) / 2

(Kullback and Leibler 1951; Lin 1991 for the skewed JSD; Agarwal et al. 2024, arXiv 2306.13649, for its limits.) Elements do not
depend on each other, so these kernels read each input once, at any length of a row. The gradient is written in the same pass.

Of logits z / temperature, Q = softmax, with g = dX, or Q * dQ for TVD, the gradient of z is (g - Q * sum(g)) / temperature: one pass
for the loss and sum(g), one for the gradient, after the statistics of kernel_src/softmax.py.

A probability of 0 contributes nothing, whatever its logarithm or the other distribution's. Instructions bound these kernels in half
precision, so log2 is a polynomial (15 instructions; cuTile's takes 26), and nothing is shifted by a maximum. Past a row's end the
inputs are such that every term is 0.
"""

import cuda.tile as ct

from kernel_src.cross_entropy import exponents, read_lse
from kernel_src.elements import block_from_last, write_within
from kernel_src.prebuild import FLOAT, FLOATS, INT, Array, Params, PerArchitecture, Variant
from kernel_src.row_tiles import HALF, MINUS_INFINITY, piece, read
from kernel_src.segments import two_sums

Const = ct.Constant[int]
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
SMALLEST = 2.0**-126  # the smallest normal number of fp32
FLOOR = -1000.0  # stands in for log2(0): finite, and 2^FLOOR is 0
KINDS = {"js": 0, "tv": 1}


@ct.function
def log2_parts(x):
    """(exponent, logarithm of the rest), whose sum is log2 of a normal, positive x to 3e-7 of its value; something finite of 0 and of
    subnormal numbers.

    x = 2^e * (1 + f) with f from -1/3 to 1/3, so that it stays exact around x = 1. log2(1 + f) / f is a polynomial of degree 7,
    fitted for the least relative error (1.7e-7).
    """
    bits = ct.bitcast(x, ct.int32)
    exponent = (bits - 0x3F2AAAAB) & -0x800000
    f = ct.bitcast(bits - exponent, ct.float32) - 1.0
    r = -0.2216772437095642 * f + 0.24686215817928314
    r = r * f - 0.23689232766628265
    r = r * f + 0.285582035779953
    r = r * f - 0.3607836961746216
    r = r * f + 0.4809654951095581
    r = r * f - 0.7213466167449951
    r = r * f + 1.4426947832107544
    return ct.astype(exponent, ct.float32) * (2.0**-23), f * r


@ct.function
def fast_log2(x):
    exponent, rest = log2_parts(x)
    return exponent + rest


@ct.function
def shifted_log2(x, shift):
    """log2(x) + shift, with no more instructions than log2(x): the exponent's product takes the shift in."""
    exponent, rest = log2_parts(x)
    return rest + (exponent + shift)


@ct.function
def finite(x):
    """A logarithm in base 2, of 0 too: what is multiplied by 2^x must not be infinite."""
    return ct.maximum(x, FLOOR)


@ct.function
def at_end(x, y, ENDS: Const):
    """(loss, dX, Q) as `js_terms`, for beta = 0 (ENDS -1) or 1 (ENDS 1)."""
    q, p = ct.exp2(x, flush_to_zero=True), ct.exp2(y, flush_to_zero=True)
    if ENDS == 1:
        loss = ct.where(q == 0.0, 0.0, q * (x - y))
        dx = loss
    else:
        loss, dx = ct.where(p == 0.0, 0.0, p * (y - x)), p * (-1.0 / LN2)
    return loss, dx, q


@ct.function
def between(x, y, beta):
    """(loss, dX, Q) as `js_terms`, for 0 < beta < 1."""
    q, p = ct.exp2(x, flush_to_zero=True), ct.exp2(y, flush_to_zero=True) * beta
    mine = q * (1.0 - beta)
    m = p + mine
    # Where m is 0, so are p and mine. m * 0: a NaN's bits may not be taken apart.
    log_m = shifted_log2(m, m * 0.0)
    dx = mine * (finite(x) - log_m)
    return dx + p * (finite(y) - log_m), dx, q


@ct.function
def js_terms(x, y, beta):
    """(loss, dX, Q) of log-probabilities x, y in base 2, elementwise; loss and dX in units of ln 2, and dX without the + Q of b = 1."""
    if beta == 0.0:
        loss, dx, q = at_end(x, y, -1)
    elif beta == 1.0:
        loss, dx, q = at_end(x, y, 1)
    else:
        loss, dx, q = between(x, y, beta)
    return loss, dx, q


@ct.function
def tv_terms(q, p):
    """(loss, dQ) of probabilities, elementwise."""
    d = q - p
    return ct.abs(d) * 0.5, ct.where(d > 0.0, 0.5, ct.where(d < 0.0, -0.5, d))


@ct.function
def counted(labels, row, ignore_index, masked):
    """Whether a row counts: all do, unless `masked`, where those whose label is ignore_index do not."""
    return (masked == 0) | (ct.gather(labels, row * masked, check_bounds=False) != ignore_index)


@ct.function
def row_scale(factor, scale, factored):
    """The factor of losses and gradients: `scale`, and with `factored` a number on the device too."""
    return scale * ct.where(factored == 0, 1.0, ct.gather(factor, 0, check_bounds=False))


@ct.function
def span(x, partial, TILE: Const, SPAN: Const):
    """(row, piece) of this block, the columns of its first tile, and how many tiles it has. A piece is SPAN columns, the last one of a row
    fewer. Blocks are counted in one dimension: the others end at 65535."""
    pieces = partial.shape[1]
    part = ct.bid(0) % pieces
    first = part * SPAN
    tiles = ct.minimum(SPAN // TILE, ct.cdiv(x.shape[1] - first, TILE))
    return ct.bid(0) // pieces, part, first + ct.arange(TILE, dtype=ct.int32), tiles


@ct.function
def skip(gradient, partial, row, part, first, tiles, writes, TILE: Const):
    """A piece of a row that does not count."""
    ct.scatter(partial, (row, part), 0.0, check_bounds=False)
    if writes > 0:
        for i in range(tiles):
            write_within(gradient, (row, first + i * TILE), ct.zeros((TILE,), dtype=ct.float32))


@ct.kernel
def kl_divergence(
    x, y, labels, factor, gradient, partial, scale: float, eps: float, ignore_index: int, masked: int, factored: int, writes: int,
    TILE: Const, SPAN: Const
):  # fmt: skip
    """x: log-probabilities, y: probabilities, gradient: all [rows, columns]; labels: [rows] int64; factor: [1] fp32; partial:
    [rows, pieces] fp32, a piece is SPAN columns, a multiple of TILE. log y is taken of max(y, eps). masked, factored, writes: 1 where
    labels and factor are read, and gradient is written; else 0."""
    row, part, first, tiles = span(x, partial, TILE, SPAN)
    if counted(labels, row, ignore_index, masked):
        k = row_scale(factor, scale, factored)
        least = ct.maximum(eps, SMALLEST)
        total = ct.zeros((TILE,), dtype=ct.float32)
        for i in range(tiles):
            cols = first + i * TILE
            a, p = read(x, (row, cols), 0), read(y, (row, cols), 0)
            loss = p * (fast_log2(ct.maximum(p, least)) * LN2 - a)
            # torch's: nothing at 0, no number below.
            total = total + ct.where(p == 0.0, 0.0, ct.where(p > 0.0, loss, float("nan")))
            if writes > 0:
                write_within(gradient, (row, cols), p * -k)
        ct.scatter(partial, (row, part), ct.sum(total, 0) * k, check_bounds=False)
    else:
        skip(gradient, partial, row, part, first, tiles, writes, TILE)


@ct.function
def even_terms(x, y):
    """(loss, dX) as `js_terms`, for beta = 1/2, with fewer instructions: the halves are one less in each exponent, and in log M."""
    a, b = x - 1.0, y - 1.0
    mine, p = ct.exp2(a, flush_to_zero=True), ct.exp2(b, flush_to_zero=True)
    m = p + mine
    # Where m is 0, so are p and mine. m * 0: a NaN's bits may not be taken apart.
    log_m = shifted_log2(m, m * 0.0 - 1.0)
    dx = mine * (finite(a) - log_m)
    return dx + p * (finite(b) - log_m), dx


@ct.function
def js_piece(x, y, gradient, partial, row, part, first, tiles, k, beta, writes, KIND: Const, TILE: Const):
    """A piece of a row. KIND: 2 for beta = 1/2, -1 for 0, 1 for 1, and 0 for the others. k: what losses and gradients are multiplied by."""
    total = ct.zeros((TILE,), dtype=ct.float32)
    for i in range(tiles):
        cols = first + i * TILE
        a, b = read(x, (row, cols), MINUS_INFINITY) * LOG2E, read(y, (row, cols), MINUS_INFINITY) * LOG2E
        if KIND == 2:
            loss, dx = even_terms(a, b)
        elif KIND == 0:
            loss, dx, _ = between(a, b, beta)
        else:
            loss, dx, q = at_end(a, b, KIND)
            if KIND == 1:
                dx = dx + q * (1.0 / LN2)
        total = total + loss
        if writes > 0:
            write_within(gradient, (row, cols), dx * (k * LN2))
    ct.scatter(partial, (row, part), ct.sum(total, 0) * (k * LN2), check_bounds=False)


@ct.kernel
def js_divergence(
    x, y, labels, factor, gradient, partial, scale: float, beta: float, ignore_index: int, masked: int, factored: int, writes: int,
    TILE: Const, SPAN: Const
):  # fmt: skip
    """x, y: log-probabilities; otherwise as `kl_divergence`."""
    row, part, first, tiles = span(x, partial, TILE, SPAN)
    if counted(labels, row, ignore_index, masked):
        k = row_scale(factor, scale, factored)
        if beta == 0.5:
            js_piece(x, y, gradient, partial, row, part, first, tiles, k, beta, writes, 2, TILE)
        elif beta == 0.0:
            js_piece(x, y, gradient, partial, row, part, first, tiles, k, beta, writes, -1, TILE)
        elif beta == 1.0:
            js_piece(x, y, gradient, partial, row, part, first, tiles, k, beta, writes, 1, TILE)
        else:
            js_piece(x, y, gradient, partial, row, part, first, tiles, k, beta, writes, 0, TILE)
    else:
        skip(gradient, partial, row, part, first, tiles, writes, TILE)


@ct.kernel
def tv_distance(
    x, y, labels, factor, gradient, partial, scale: float, ignore_index: int, masked: int, factored: int, writes: int, TILE: Const,
    SPAN: Const
):  # fmt: skip
    """x, y: probabilities; otherwise as `kl_divergence`."""
    row, part, first, tiles = span(x, partial, TILE, SPAN)
    if counted(labels, row, ignore_index, masked):
        k = row_scale(factor, scale, factored)
        total = ct.zeros((TILE,), dtype=ct.float32)
        for i in range(tiles):
            cols = first + i * TILE
            loss, slope = tv_terms(read(x, (row, cols), 0), read(y, (row, cols), 0))
            total = total + loss
            if writes > 0:
                write_within(gradient, (row, cols), slope * k)
        ct.scatter(partial, (row, part), ct.sum(total, 0) * k, check_bounds=False)
    else:
        skip(gradient, partial, row, part, first, tiles, writes, TILE)


# ---------------------------------------------------------------- of logits
@ct.function
def log2_softmax(z, lse, row, temperature):
    """The logarithm of Q in base 2."""
    top, log_sum = read_lse(lse, row)
    return exponents(z, top, log_sum, temperature)


@ct.function
def logit_terms(x, y, lse_x, lse_y, row, cols, beta, temperature, KIND: Const):
    """(loss, g, Q) of logits, elementwise in base e; g: the loss's derivative by log Q. temperature: its inverse."""
    a = log2_softmax(read(x, (row, cols), MINUS_INFINITY), lse_x, row, temperature)
    b = log2_softmax(read(y, (row, cols), MINUS_INFINITY), lse_y, row, temperature)
    if KIND == 0:
        loss, g, q = js_terms(a, b, beta)
        return loss * LN2, g * LN2, q
    q = ct.exp2(a, flush_to_zero=True)
    loss, dq = tv_terms(q, ct.exp2(b, flush_to_zero=True))
    return loss, q * dq, q


@ct.kernel
def divergence_of_logits(
    x, y, lse_x, lse_y, labels, part_loss, part_slope, beta: float, temperature: float, ignore_index: int, masked: int, KIND: Const,
    TILE: Const
):
    """x, y: logits [rows, columns]; lse_x, lse_y: [rows, 2] fp32, as `softmax_combine` writes them; part_loss, part_slope:
    [rows, pieces] fp32, sums of the losses and of g. temperature: its inverse; KIND: of `KINDS`."""
    ct.grid_dependency_control_wait()
    row, part, cols = piece(block_from_last(), x, TILE)
    if counted(labels, row, ignore_index, masked):
        loss, g, _ = logit_terms(x, y, lse_x, lse_y, row, cols, beta, temperature, KIND)
        # One reduction for both is 6 % of a JSD's pass, which instructions bound.
        loss, slope = two_sums(loss, g, TILE) if KIND == 0 else (ct.sum(loss, 0), ct.sum(g, 0))
        ct.scatter(part_loss, (row, part), loss, check_bounds=False)
        ct.scatter(part_slope, (row, part), slope, check_bounds=False)
    else:
        ct.scatter(part_loss, (row, part), 0.0, check_bounds=False)
        ct.scatter(part_slope, (row, part), 0.0, check_bounds=False)


@ct.function
def logit_gradient(x, y, lse_x, lse_y, labels, slope, scale, dx, beta, temperature, ignore_index, masked, KIND: Const, TILE: Const):
    row, _, cols = piece(ct.bid(0), x, TILE)
    if counted(labels, row, ignore_index, masked):
        _, g, q = logit_terms(x, y, lse_x, lse_y, row, cols, beta, temperature, KIND)
        factor = ct.gather(scale, ct.where(scale.shape[0] == 1, 0, row), check_bounds=False) * temperature
        write_within(dx, (row, cols), (g - q * ct.gather(slope, row, check_bounds=False)) * factor)
    else:
        write_within(dx, (row, cols), ct.zeros(cols.shape, dtype=ct.float32))


@ct.kernel
def divergence_of_logits_gradient(
    x, y, lse_x, lse_y, labels, slope, scale, dx, beta: float, temperature: float, ignore_index: int, masked: int, KIND: Const, TILE: Const
):
    """dx: [rows, columns], the gradient of x; slope: [rows] fp32, the sum of g over a row; scale: fp32, [1] or [rows], what the
    gradients of the rows' losses are multiplied by."""
    ct.grid_dependency_control_wait()
    logit_gradient(x, y, lse_x, lse_y, labels, slope, scale, dx, beta, temperature, ignore_index, masked, KIND, TILE)


@ct.kernel
def divergence_of_logits_in_place(
    x, y, lse_x, lse_y, labels, slope, scale, beta: float, temperature: float, ignore_index: int, masked: int, KIND: Const, TILE: Const
):
    """Writes what `divergence_of_logits_gradient` does over x."""
    ct.grid_dependency_control_wait()
    logit_gradient(x, y, lse_x, lse_y, labels, slope, scale, x, beta, temperature, ignore_index, masked, KIND, TILE)


# Elements that a block takes, so that what it does once, the sum and the indices, is little beside them; and how many at once.
# Instructions bound these kernels in half precision.
SPANS = {"kl": 16384, "js": 16384, "tv": 2048}
TILE = 2048
JS_TILE = 1024  # but in bf16 and fp16 whose rows are aligned: 2048 takes more registers than 8 blocks an SM have
# An SM, of rows that are aligned or not: 8 spill on sm_120, of rows that are not on sm_100 too.
LOGITS_BLOCKS = {True: PerArchitecture(7, "sm_90", 8), False: 6}


def variants():
    vector, matrix = Array("float32", (None,), aligned=False), Array("float32", (None, None), aligned=False)
    labels = Array("int64", (None,), aligned=False)
    masks = {"ignore_index": INT, "masked": INT}
    spans = {kind: {"TILE": TILE, "SPAN": elements} for kind, elements in SPANS.items()}
    for dtype in FLOATS:
        for x in (Array(dtype, (None, None), divisible=(1, 16)), Array(dtype, (None, None), aligned=False)):
            arrays: Params = {"x": x, "y": x, "labels": labels, "factor": vector, "gradient": x, "partial": matrix, "scale": FLOAT}
            flags: Params = {**masks, "factored": INT, "writes": INT}
            yield Variant(kl_divergence, {**arrays, "eps": FLOAT, **flags, **spans["kl"]}, hints={"occupancy": 6 if x.aligned else 4})
            js_tile, js_blocks = (TILE, PerArchitecture(6, "sm_90", 8)) if x.aligned and dtype in HALF else (JS_TILE, 8)
            constants = {**spans["js"], "TILE": js_tile}
            yield Variant(js_divergence, {**arrays, "beta": FLOAT, **flags, **constants}, hints={"occupancy": js_blocks})
            yield Variant(tv_distance, {**arrays, **flags, **spans["tv"]})
            logits: Params = {"x": x, "y": x, "lse_x": matrix, "lse_y": matrix, "labels": labels}
            for kind, number in KINDS.items():
                rest: Params = {"beta": FLOAT, "temperature": FLOAT, **masks, "KIND": number, "TILE": TILE}
                hints = {"occupancy": LOGITS_BLOCKS[x.aligned]}
                yield Variant(divergence_of_logits, {**logits, "part_loss": matrix, "part_slope": matrix, **rest}, hints=hints)
                yield Variant(divergence_of_logits_gradient, {**logits, "slope": vector, "scale": vector, "dx": x, **rest}, hints=hints)
                if kind == "js":
                    yield Variant(divergence_of_logits_in_place, {**logits, "slope": vector, "scale": vector, **rest}, hints=hints)
