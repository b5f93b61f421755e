"""Gated linear units whose activation is a times a sigmoid, out = d * act(m * gate) * up (Shazeer 2020, arXiv 2002.05202):

    act(a) = a * sigmoid(u(a)),     act'(a) = s + a * s * (1 - s) * u'(a),     s = sigmoid(u(a))

    SiLU            u = a
    GELU, tanh      u = 2 c (a + 0.044715 a^3), c = sqrt(2 / pi), since (1 + tanh z) / 2 = sigmoid(2 z)
    GELU, erf       u = logit of the normal distribution function, which is odd: a polynomial (ERF)

So one kernel serves all three: the first two by the scalars `linear` and `cubic`, u = a (linear + cubic a^2). An exact tanh costs 15
instructions an element and makes such a kernel half as fast (Liger's geglu on an H200: 275 us where a copy takes 169).

The multipliers of gate and output are those of Falcon-H1. Layout and tiles: as in swiglu.py.
"""

import cuda.tile as ct

from kernel_src.elements import block_from_last, read, read_padded, write, write_within
from kernel_src.prebuild import FLOAT, FLOATS, Array, Variant
from kernel_src.swiglu import piece, sigmoid

Const = ct.Constant[int]

# logit(Phi(a)) / a as a polynomial of a^2 up to CLAMP, a least-squares fit: gelu is off by at most 1.2e-7 and its derivative by 4.4e-7.
# Beyond it, and wherever a^2 has no use, the sigmoid is 0 or 1 in float32.
C0, C1, C2, C3, C4, C5, C6 = 1.595769883, 7.266616836e-2, -6.518895056e-5, -1.106128629e-4, 7.929585993e-6, -2.645351889e-7, 3.512599232e-9
ERF_CLAMP, CLAMP = 30.25, 4096.0


@ct.function
def act(a, linear, cubic, ERF: Const):
    """(act(a), act'(a))"""
    if ERF:
        x = ct.minimum(a * a, ERF_CLAMP)
        u = a * (C0 + x * (C1 + x * (C2 + x * (C3 + x * (C4 + x * (C5 + x * C6))))))
        slope = C0 + x * (3.0 * C1 + x * (5.0 * C2 + x * (7.0 * C3 + x * (9.0 * C4 + x * (11.0 * C5 + x * (13.0 * C6))))))
    else:
        x = ct.minimum(a * a, CLAMP)  # an infinite square times a `cubic` of 0 would be NaN
        u = a * (linear + cubic * x)
        slope = linear + (3.0 * cubic) * x
    s = sigmoid(u)
    value = a * s
    return value, s + value * (1.0 - s) * slope


@ct.function
def forward(gate, up, linear, cubic, gate_multiplier, down_multiplier, dtype, ERF: Const):
    """The activation is rounded to the model's dtype before the product, as the models themselves do it."""
    value, _ = act(gate * gate_multiplier, linear, cubic, ERF)
    return ct.astype(ct.astype(ct.astype(value, dtype), ct.float32) * up * down_multiplier, dtype)


@ct.function
def backward(dout, gate, up, linear, cubic, gate_multiplier, down_multiplier, ERF: Const):
    """(dgate, dup) in float32."""
    value, slope = act(gate * gate_multiplier, linear, cubic, ERF)
    d = dout * down_multiplier
    return d * up * slope * gate_multiplier, d * value


@ct.function
def read_rows(array, at, EXACT: Const):
    if EXACT:
        tile = read(array, at)
    else:
        tile = read_padded(array, at)
    return tile


@ct.function
def write_rows(array, at, tile, EXACT: Const):
    if EXACT:
        write(array, at, tile)
    else:
        write_within(array, at, tile)


@ct.function
def place(block, columns, TILE: Const, EXACT: Const):
    """(row, columns) of a block's piece; without EXACT the last piece of a row reaches past its end."""
    if EXACT:
        row, cols = piece(block, columns, TILE)
    else:
        pieces = ct.cdiv(columns, TILE)
        row, cols = block // pieces, block % pieces * TILE + ct.arange(TILE, dtype=ct.int32)
    return row, cols


@ct.kernel
def gated_activation_forward(
    gate, up, out, linear: float, cubic: float, gate_multiplier: float, down_multiplier: float, TILE: Const, EXACT: Const, ERF: Const
):
    """gate, up, out: [rows, columns], any row strides; columns a multiple of TILE where EXACT."""
    at = place(ct.bid(0), gate.shape[1], TILE, EXACT)
    tile = forward(
        read_rows(gate, at, EXACT), read_rows(up, at, EXACT), linear, cubic, gate_multiplier, down_multiplier, out.dtype, ERF
    )  # fmt: skip
    write_rows(out, at, tile, EXACT)


@ct.kernel
def gated_activation_backward(
    dout, gate, up, dgate, dup, linear: float, cubic: float, gate_multiplier: float, down_multiplier: float,
    TILE: Const, EXACT: Const, ERF: Const
):  # fmt: skip
    """All [rows, columns], as in the forward."""
    at = place(block_from_last(), gate.shape[1], TILE, EXACT)
    d, g, u = read_rows(dout, at, EXACT), read_rows(gate, at, EXACT), read_rows(up, at, EXACT)
    dg, du = backward(d, g, u, linear, cubic, gate_multiplier, down_multiplier, ERF)
    write_rows(dgate, at, dg, EXACT)
    write_rows(dup, at, du, EXACT)


@ct.kernel
def gated_activation_backward_in_place(
    dout, gate, up, linear: float, cubic: float, gate_multiplier: float, down_multiplier: float, TILE: Const, EXACT: Const, ERF: Const
):
    """Writes what `gated_activation_backward` does, dgate over gate and dup over up, and the forward's `out` over dout, for the weight
    gradient of the next projection: an MLP that computes gate and up again has no other use for them."""
    at = place(block_from_last(), gate.shape[1], TILE, EXACT)
    d, g, u = read_rows(dout, at, EXACT), read_rows(gate, at, EXACT), read_rows(up, at, EXACT)
    dg, du = backward(d, g, u, linear, cubic, gate_multiplier, down_multiplier, ERF)
    write_rows(gate, at, dg, EXACT)
    write_rows(up, at, du, EXACT)
    write_rows(dout, at, forward(g, u, linear, cubic, gate_multiplier, down_multiplier, dout.dtype, ERF), EXACT)


FORWARD = ("gate", "up", "out")
BACKWARD = ("dout", "gate", "up", "dgate", "dup")
TILE = 1024


def variants():
    scalars = dict.fromkeys(("linear", "cubic", "gate_multiplier", "down_multiplier"), FLOAT)
    for erf in (0, 1):
        for dtype in FLOATS:
            for exact in (1, 0):
                if exact and (dtype == "float32" or erf and dtype == "float16"):
                    continue  # nobody trains with them: the checked kernels do
                rows = Array(dtype, (None, None), divisible=(1, TILE)) if exact else Array(dtype, (None, None), aligned=False)
                constants = {**scalars, "TILE": TILE, "EXACT": exact, "ERF": erf}
                yield Variant(gated_activation_forward, {**dict.fromkeys(FORWARD, rows), **constants})
                yield Variant(gated_activation_backward, {**dict.fromkeys(BACKWARD, rows), **constants})
                yield Variant(gated_activation_backward_in_place, {**dict.fromkeys(BACKWARD[:3], rows), **constants})
