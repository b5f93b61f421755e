"""SwiGLU: out = silu(gate) * up, with silu(a) = a * sigmoid(a) (Shazeer 2020, arXiv 2002.05202).

    dgate = dout * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate)))          dup = dout * silu(gate)

All arrays are flat. A block takes TILE elements; the last block moves back so that it ends with the array and computes some
elements a second time (to the same values) instead of checking bounds: a checked load costs 18 % here (H200).
"""

import cuda.tile as ct

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
def offsets(length, VECTOR: Const, TILE: Const):
    """Where this block works in an array of `length` elements; the multiplication by VECTOR shows the compiler the alignment."""
    start = min(ct.bid(0) * (TILE // VECTOR), length // VECTOR - TILE // VECTOR) * VECTOR
    return start + ct.arange(TILE, dtype=ct.int32)


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


@ct.function
def read(array, index):
    return ct.astype(ct.gather(array, index, check_bounds=False), ct.float32)


@ct.function
def read_padded(array, index):
    return ct.astype(ct.gather(array, index, check_bounds=True, padding_value=0), ct.float32)


@ct.kernel
def swiglu_forward(gate, up, out, VECTOR: Const, TILE: Const):
    """gate, up, out: flat, a multiple of VECTOR and at least TILE elements."""
    o = offsets(gate.shape[0], VECTOR, TILE)
    ct.scatter(out, o, forward(read(gate, o), read(up, o), out.dtype), check_bounds=False)


@ct.kernel
def swiglu_backward(dout, gate, up, dgate, dup, VECTOR: Const, TILE: Const):
    """All flat, a multiple of VECTOR and at least TILE elements."""
    o = offsets(gate.shape[0], VECTOR, TILE)
    dg, du, _ = backward(read(dout, o), read(gate, o), read(up, o))
    ct.scatter(dgate, o, ct.astype(dg, dgate.dtype), check_bounds=False)
    ct.scatter(dup, o, ct.astype(du, dup.dtype), check_bounds=False)


@ct.kernel
def swiglu_backward_recompute(dout, gate, up, dgate, dup, out, VECTOR: Const, TILE: Const):
    """As `swiglu_backward`, and the forward's `out` again, for the weight gradient of the projection that consumed it."""
    o = offsets(gate.shape[0], VECTOR, TILE)
    g, u = read(gate, o), read(up, o)
    dg, du, _ = backward(read(dout, o), g, u)
    ct.scatter(dgate, o, ct.astype(dg, dgate.dtype), check_bounds=False)
    ct.scatter(dup, o, ct.astype(du, dup.dtype), check_bounds=False)
    ct.scatter(out, o, forward(g, u, out.dtype), check_bounds=False)


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
def swiglu_any_backward_recompute(dout, gate, up, dgate, dup, out, TILE: Const):
    """Any number of elements at any address."""
    o = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    g, u = read_padded(gate, o), read_padded(up, o)
    dg, du, _ = backward(read_padded(dout, o), g, u)
    ct.scatter(dgate, o, ct.astype(dg, dgate.dtype), check_bounds=True)
    ct.scatter(dup, o, ct.astype(du, dup.dtype), check_bounds=True)
    ct.scatter(out, o, forward(g, u, out.dtype), check_bounds=True)


FORWARD = ("gate", "up", "out")
BACKWARD = ("dout", "gate", "up", "dgate", "dup")


def flat(dtype, tile):
    """The arrays of the exact kernels and their constants."""
    vector = Array(dtype, (None,)).vector
    return Array(dtype, (None,), divisible=(vector,), at_least=(tile,)), {"VECTOR": vector, "TILE": tile}


def variants():
    for dtype in FLOATS:
        array, constants = flat(dtype, 2048)
        yield Variant(swiglu_forward, {**dict.fromkeys(FORWARD, array), **constants})
        array, constants = flat(dtype, 1024)
        yield Variant(swiglu_backward, {**dict.fromkeys(BACKWARD, array), **constants})
        yield Variant(swiglu_backward_recompute, {**dict.fromkeys((*BACKWARD, "out"), array), **constants})
        array = Array(dtype, (None,), aligned=False)
        yield Variant(swiglu_any_forward, {**dict.fromkeys(FORWARD, array), "TILE": 1024})
        yield Variant(swiglu_any_backward, {**dict.fromkeys(BACKWARD, array), "TILE": 1024})
        yield Variant(swiglu_any_backward_recompute, {**dict.fromkeys((*BACKWARD, "out"), array), "TILE": 1024})
