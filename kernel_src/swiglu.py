"""SwiGLU: out = silu(gate) * up, with silu(a) = a * sigmoid(a) (Shazeer 2020, arXiv 2002.05202).

    dgate = dout * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate)))          dup = dout * silu(gate)

The exact kernels take rows of any stride, in pieces of TILE: one of several projections that lie side by side has such rows. Whatever
is contiguous is viewed as rows of one piece. A checked load costs 18 % here (H200), so no piece reaches past a row's end;
the `any` kernels, with checks, take the rest.
"""

import cuda.tile as ct

from kernel_src.elements import block_from_last, read, read_padded
from kernel_src.prebuild import FLOATS, Array, Variant

Const = ct.Constant[int]
LOG2E = 1.4426950408889634


@ct.function
def sigmoid(a):
    """One EX2 and one reciprocal; exact sigmoid costs three times the instructions for a difference below fp32 rounding of the inputs."""
    return ct.truediv(
        1.0, 1.0 + ct.exp2(a * (-LOG2E), flush_to_zero=True), flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX
    )


@ct.function
def piece(block, columns, TILE: Const):
    """(row, columns) of a block's piece in rows of `columns` elements."""
    pieces = columns // TILE
    return block // pieces, block % pieces * TILE + ct.arange(TILE, dtype=ct.int32)


@ct.function
def forward(gate, up, dtype):
    """silu is rounded to the model's dtype before the product, as the model itself does it."""
    return ct.astype(ct.astype(ct.astype(gate * sigmoid(gate), dtype), ct.float32) * up, dtype)


@ct.function
def backward(dout, gate, up):
    """(dgate, dup, silu(gate) * up) in float32."""
    s = sigmoid(gate)
    silu = gate * s
    return dout * up * (s + silu * (1.0 - s)), dout * silu, silu * up


@ct.kernel
def swiglu_forward(gate, up, out, TILE: Const):
    """gate, up, out: [rows, columns], columns a multiple of TILE."""
    at = piece(ct.bid(0), gate.shape[1], TILE)
    ct.scatter(out, at, forward(read(gate, at), read(up, at), out.dtype), check_bounds=False)


@ct.kernel
def swiglu_backward(dout, gate, up, dgate, dup, TILE: Const):
    """All [rows, columns], columns a multiple of TILE."""
    at = piece(block_from_last(), gate.shape[1], TILE)
    dg, du, _ = backward(read(dout, at), read(gate, at), read(up, at))
    ct.scatter(dgate, at, ct.astype(dg, dgate.dtype), check_bounds=False)
    ct.scatter(dup, at, ct.astype(du, dup.dtype), check_bounds=False)


@ct.kernel
def swiglu_backward_recompute(dout, gate, up, dgate, dup, TILE: Const):
    """Computes what `swiglu_backward` does, and writes the forward's `out` over dout, for the weight gradient of the projection that
    consumed it."""
    at = piece(block_from_last(), gate.shape[1], TILE)
    d, g, u = read(dout, at), read(gate, at), read(up, at)
    dg, du, _ = backward(d, g, u)
    ct.scatter(dgate, at, ct.astype(dg, dgate.dtype), check_bounds=False)
    ct.scatter(dup, at, ct.astype(du, dup.dtype), check_bounds=False)
    ct.scatter(dout, at, forward(g, u, dout.dtype), check_bounds=False)


@ct.kernel
def swiglu_any_forward(gate, up, out, TILE: Const):
    """Any number of elements at any address."""
    o = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    ct.scatter(out, o, forward(read_padded(gate, o), read_padded(up, o), out.dtype), check_bounds=True)


@ct.kernel
def swiglu_any_backward(dout, gate, up, dgate, dup, TILE: Const):
    """Any number of elements at any address."""
    o = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    dg, du, _ = backward(read_padded(dout, o), read_padded(gate, o), read_padded(up, o))
    ct.scatter(dgate, o, ct.astype(dg, dgate.dtype), check_bounds=True)
    ct.scatter(dup, o, ct.astype(du, dup.dtype), check_bounds=True)


@ct.kernel
def swiglu_any_backward_recompute(dout, gate, up, dgate, dup, TILE: Const):
    """Any number of elements at any address."""
    o = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    d, g, u = read_padded(dout, o), read_padded(gate, o), read_padded(up, o)
    dg, du, _ = backward(d, g, u)
    ct.scatter(dgate, o, ct.astype(dg, dgate.dtype), check_bounds=True)
    ct.scatter(dup, o, ct.astype(du, dup.dtype), check_bounds=True)
    ct.scatter(dout, o, forward(g, u, dout.dtype), check_bounds=True)


FORWARD = ("gate", "up", "out")
BACKWARD = ("dout", "gate", "up", "dgate", "dup")


# An H200 at 8192 tokens of 12288, rows side by side or apart: forward 104 % of a copy of the same bytes, with the recomputation 99 %.
# 512 for rows of an odd number of them (Qwen3-4B: 9728): 98 % and 99 %.
TILES = (1024, 512)


def variants():
    for dtype in FLOATS:
        for tile in TILES:
            rows = Array(dtype, (None, None), divisible=(1, tile))
            yield Variant(swiglu_forward, {**dict.fromkeys(FORWARD, rows), "TILE": tile})
            yield Variant(swiglu_backward, {**dict.fromkeys(BACKWARD, rows), "TILE": tile})
            yield Variant(swiglu_backward_recompute, {**dict.fromkeys(BACKWARD, rows), "TILE": tile})
        flat = Array(dtype, (None,), aligned=False)
        yield Variant(swiglu_any_forward, {**dict.fromkeys(FORWARD, flat), "TILE": 1024})
        yield Variant(swiglu_any_backward, {**dict.fromkeys(BACKWARD, flat), "TILE": 1024})
        yield Variant(swiglu_any_backward_recompute, {**dict.fromkeys(BACKWARD, flat), "TILE": 1024})
