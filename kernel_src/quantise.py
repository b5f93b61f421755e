"""Operands of products in eight bits: e4m3 codes of a matrix [rows, columns] in bf16, with scales that are powers of two.

    codes = e4m3(x / scale)          scale = the least power of two with max |x| <= 448 * scale, and 2^-126 at the least

The maximum is of a row, or for `quantise_transposed` the largest of all rows' scales is given. A power of two changes no bit of what e4m3
holds, so where a row's numbers lie within 2^14 of each other a scale is as good as a finer one. Scales are rounded up: nothing saturates.
The conversion itself is not clamped: ct.minimum and ct.maximum ignore NaN, and a NaN would become a number. A NaN stays one and does not
count for the scale. Infinity has no code: its row has the scale inf, and the codes NaN for it and 0 for the rest.

What is transposed goes through shared memory, and single bytes are what a thread writes there slowest. So four rows are rounded and packed
into one word before they are transposed: on an H200 that takes 105 % of the time of a copy of as many bytes, and transposing codes took
250 % (8.4 us and 22.4 for 2048 x 4096, a copy 8.0).

SwiGLU and its gradients are written in codes at once, and also in bf16 (`_kept`) where adapters read them. They are rounded to bf16 first,
so they have the bits of what is quantised afterwards, and stay in registers until their row's maximum is known: of a number of the forward
pass 5 bytes move instead of 9, of one of the backward pass 10 instead of 18. What follows the rounding is computed in bf16, where an
instruction takes two numbers: largest and least instead of sizes, and products with a power of two, which are exact. So the backward pass
needs 80 registers instead of 128, and three blocks run on a multiprocessor instead of two. The loads go first, since none overtakes a store
to an array that it may read. Both together: 0.24 ms instead of 0.35 for 8192 rows of 12288 (H200), a copy of as many bytes 0.24. The
gradients of SwiGLU are transposed from their codes.

cuTile has e4m3 from sm_90 on.
"""

import cuda.tile as ct

from kernel_src.elements import block_from_last, read
from kernel_src.prebuild import Array, Params, Variant
from kernel_src.swiglu import backward, forward, sigmoid

Const = ct.Constant[int]
INFINITY = 0x7F800000  # of float32, as bits: all of the exponent
LEAST = 0x00800000  # 2^-126
TO_NEXT = 0x1FFFFF  # added to bits, it carries into the exponent what is more than 1.75 * 2^k. 448 is 1.75 * 2^8
EIGHT = 8 << 23  # in the exponent


@ct.function
def size(x):
    return ct.maximum(x, -x)


@ct.function
def scale_of(largest):
    """The scale of numbers whose largest size is this, in float32, not NaN."""
    up = (ct.bitcast(largest, ct.int32) + TO_NEXT) & INFINITY
    return ct.bitcast(ct.where(up == INFINITY, INFINITY, ct.maximum(up - EIGHT, LEAST)), ct.float32)


@ct.function
def read_row(x, place, CHECK: Const):
    return ct.astype(ct.gather(x, place, check_bounds=CHECK == 1, padding_value=0), ct.float32)


@ct.kernel
def quantise_rows(x, codes, scales, TILE: Const, WHOLE: Const, CHECK: Const):
    """x, codes: [rows, columns], columns a multiple of TILE, with WHOLE just TILE, with CHECK any; scales: [rows] fp32. A row a block. A
    longer row is read twice, the second time from the caches."""
    row = ct.bid(0)
    columns = ct.arange(TILE, dtype=ct.int32)
    if WHOLE:
        values = read_row(x, (row, columns), CHECK)
        scale = scale_of(ct.maximum(ct.max(size(values), axis=0, keepdims=False), 0.0))
        ct.scatter(codes, (row, columns), ct.astype(values * ct.truediv(1.0, scale), codes.dtype), check_bounds=CHECK == 1)
    else:
        pieces = ct.cdiv(x.shape[1], TILE)
        largest = ct.zeros((TILE,), dtype=ct.float32)
        for i in range(pieces):
            largest = ct.maximum(largest, size(read_row(x, (row, i * TILE + columns), CHECK)))
        scale = scale_of(ct.max(largest, axis=0, keepdims=False))
        inverse = ct.truediv(1.0, scale)
        for i in range(pieces):
            place = (row, (pieces - 1 - i) * TILE + columns)  # what was read last lies nearest
            ct.scatter(codes, place, ct.astype(read_row(x, place, CHECK) * inverse, codes.dtype), check_bounds=CHECK == 1)
    ct.scatter(scales, row, scale, check_bounds=False)


@ct.function
def byte(code, at: Const):
    """A code in one of the four bytes of a word, the first of them the lowest."""
    return ct.astype(ct.bitcast(code, ct.uint8), ct.uint32) << (8 * at)


@ct.function
def write_words(words, i, j, word, ROWS: Const, TILE: Const, VECTOR: Const):
    """Writes word [ROWS / 4, TILE], four rows of a column each, transposed as tile (j, i) of words: [columns, rows / 4]. A thread has read
    VECTOR columns of a row, so the first columns of all threads go first, then their second ones: threads side by side then write side by
    side in shared memory."""
    word = ct.reshape(ct.permute(ct.reshape(word, (ROWS // 4, TILE // VECTOR, VECTOR)), (2, 1, 0)), (TILE, ROWS // 4))
    order = ct.arange(TILE, dtype=ct.int32)
    columns = j * TILE + order % (TILE // VECTOR) * VECTOR + order // (TILE // VECTOR)
    rows = i * (ROWS // 4) + ct.arange(ROWS // 4, dtype=ct.int32)
    ct.scatter(words, (columns[:, None], rows[None, :]), ct.bitcast(word, ct.int32), check_bounds=True)


@ct.kernel
def quantise_transposed(x, scale, words, scales, ROWS: Const, TILE: Const):
    """x: [rows, columns]; scale: [1] fp32, copied to scales: [columns]; words: [columns, rows / 4 or more] int32, the codes of four rows
    each, with zeros behind the rows. ROWS rows and TILE columns a block."""
    across = ct.cdiv(x.shape[1], TILE)
    i, j = ct.bid(0) // across, ct.bid(0) % across
    scale = ct.gather(scale, 0, check_bounds=False)
    inverse = ct.astype(ct.truediv(1.0, scale), x.dtype)  # exact, and the products are where e4m3 has codes: a power of two
    rows = i * ROWS + 4 * ct.arange(ROWS // 4, dtype=ct.int32)
    columns = j * TILE + ct.arange(TILE, dtype=ct.int32)
    word = ct.zeros((ROWS // 4, TILE), dtype=ct.uint32)
    for k in ct.static_iter(range(4)):
        values = ct.gather(x, (rows[:, None] + k, columns[None, :]), check_bounds=True, padding_value=0) * inverse
        word = word | byte(ct.astype(ct.astype(values, ct.float32), ct.float8_e4m3fn), k)
    write_words(words, i, j, word, ROWS, TILE, 8)
    if i == 0:
        ct.scatter(scales, columns, ct.full((TILE,), scale, dtype=ct.float32), check_bounds=True)


@ct.kernel
def recode_transposed(x, factors, scale, words, scales, ROWS: Const, TILE: Const):
    """Computes what `quantise_transposed` does of codes x: [rows, columns] times factors: [rows] fp32, none of them above scale. What is
    2^6 times below scale is rounded once more; nothing else is."""
    across = ct.cdiv(x.shape[1], TILE)
    i, j = ct.bid(0) // across, ct.bid(0) % across
    scale = ct.gather(scale, 0, check_bounds=False)
    inverse = ct.truediv(1.0, scale)
    rows = i * ROWS + 4 * ct.arange(ROWS // 4, dtype=ct.int32)
    columns = j * TILE + ct.arange(TILE, dtype=ct.int32)
    word = ct.zeros((ROWS // 4, TILE), dtype=ct.uint32)
    for k in ct.static_iter(range(4)):
        factor = ct.gather(factors, rows + k, check_bounds=True, padding_value=0) * inverse
        values = read_row(x, (rows[:, None] + k, columns[None, :]), 1) * factor[:, None]
        word = word | byte(ct.astype(values, ct.float8_e4m3fn), k)
    write_words(words, i, j, word, ROWS, TILE, 16)
    if i == 0:
        ct.scatter(scales, columns, ct.full((TILE,), scale, dtype=ct.float32), check_bounds=True)


@ct.kernel
def swiglu_quantised(gate, up, codes, scales, TILE: Const, PIECES: Const):
    """codes, scales: of silu(gate) * up, as `swiglu_forward` rounds it. gate, up, codes: [rows, PIECES * TILE]. A row a block."""
    forward_row(gate, up, codes, codes, scales, TILE, PIECES, 0)


@ct.kernel
def swiglu_quantised_kept(gate, up, hidden, codes, scales, TILE: Const, PIECES: Const):
    """Computes what `swiglu_quantised` does, and in hidden, like gate, what is in codes."""
    forward_row(gate, up, hidden, codes, scales, TILE, PIECES, 1)


@ct.function
def forward_row(gate, up, hidden, codes, scales, TILE: Const, PIECES: Const, KEEP: Const):
    """A row of `swiglu_quantised`, and with KEEP of hidden."""
    row = ct.bid(0)
    columns = ct.arange(TILE, dtype=ct.int32)
    largest = ct.zeros((TILE,), dtype=ct.float32)
    held: tuple = ()
    for i in ct.static_iter(range(PIECES)):
        place = (row, i * TILE + columns)
        out = forward(read(gate, place), read(up, place), gate.dtype)
        largest = ct.maximum(largest, size(ct.astype(out, ct.float32)))
        held += (out,)
    scale = scale_of(ct.max(largest, axis=0, keepdims=False))
    inverse = ct.truediv(1.0, scale)
    for i in ct.static_iter(range(PIECES)):
        values = ct.astype(held[i], ct.float32) * inverse
        ct.scatter(codes, (row, i * TILE + columns), ct.astype(values, codes.dtype), check_bounds=False)
        if KEEP:
            ct.scatter(hidden, (row, i * TILE + columns), held[i], check_bounds=False)
    ct.scatter(scales, row, scale, check_bounds=False)


@ct.function
def gradients(dout, gate, up):
    """(dgate, dup, silu(gate) * up) as `swiglu_backward_recompute` rounds them. All in bf16, in which a product of two numbers is rounded
    once: what `forward` of swiglu.py does in float32."""
    d, g, u = ct.astype(dout, ct.float32), ct.astype(gate, ct.float32), ct.astype(up, ct.float32)
    dg, du, _ = backward(d, g, u)
    return ct.astype(dg, gate.dtype), ct.astype(du, gate.dtype), ct.astype(g * sigmoid(g), up.dtype) * up


@ct.function
def codes_in(x, inverse, dtype):
    """Codes of numbers of bf16 times 1 / scale, a power of two in bf16: exact where e4m3 has codes."""
    return ct.astype(ct.astype(x * inverse, ct.float32), dtype)


@ct.function
def inputs_of(dout, gate, up, place):
    """The three at `place`, in a tuple."""
    return (
        ct.gather(dout, place, check_bounds=False), ct.gather(gate, place, check_bounds=False), ct.gather(up, place, check_bounds=False),
    )  # fmt: skip


@ct.kernel
def swiglu_backward_quantised(dout, gate, up, codes, scales, TILE: Const, PIECES: Const, AHEAD: Const):
    """codes [rows, 2 * columns], scales: of [dgate | dup], as `swiglu_backward_recompute` rounds them, and silu(gate) * up over dout. dout,
    gate, up: [rows, columns], PIECES * TILE of them, each piece read AHEAD pieces before its gradients are computed. A row a block."""
    backward_row(dout, gate, up, codes, codes, scales, TILE, PIECES, AHEAD, 0)


@ct.kernel
def swiglu_backward_quantised_kept(dout, gate, up, both, codes, scales, TILE: Const, PIECES: Const, AHEAD: Const):
    """Computes what `swiglu_backward_quantised` does, and in both, in bf16, what is in codes."""
    backward_row(dout, gate, up, both, codes, scales, TILE, PIECES, AHEAD, 1)


@ct.function
def backward_row(dout, gate, up, both, codes, scales, TILE: Const, PIECES: Const, AHEAD: Const, KEEP: Const):
    """A row of `swiglu_backward_quantised`, and with KEEP of both."""
    row = block_from_last()
    columns = ct.arange(TILE, dtype=ct.int32)
    largest, least = ct.zeros((TILE,), dtype=gate.dtype), ct.zeros((TILE,), dtype=gate.dtype)
    inputs: tuple = ()
    dgates: tuple = ()
    dups: tuple = ()
    for i in ct.static_iter(range(AHEAD)):
        inputs += inputs_of(dout, gate, up, (row, i * TILE + columns))
    for i in ct.static_iter(range(PIECES)):
        if i + AHEAD < PIECES:
            inputs += inputs_of(dout, gate, up, (row, (i + AHEAD) * TILE + columns))
        dg, du, out = gradients(inputs[3 * i], inputs[3 * i + 1], inputs[3 * i + 2])
        ct.scatter(dout, (row, i * TILE + columns), out, check_bounds=False)
        if KEEP:
            ct.scatter(both, (row, i * TILE + columns), dg, check_bounds=False)
            ct.scatter(both, (row, (PIECES + i) * TILE + columns), du, check_bounds=False)
        largest, least = ct.maximum(largest, ct.maximum(dg, du)), ct.minimum(least, ct.minimum(dg, du))
        dgates += (dg,)
        dups += (du,)
    scale = scale_of(ct.max(ct.astype(ct.maximum(largest, -least), ct.float32), axis=0, keepdims=False))
    inverse = ct.astype(ct.truediv(1.0, scale), gate.dtype)
    for i in ct.static_iter(range(PIECES)):
        ct.scatter(codes, (row, i * TILE + columns), codes_in(dgates[i], inverse, codes.dtype), check_bounds=False)
        ct.scatter(codes, (row, (PIECES + i) * TILE + columns), codes_in(dups[i], inverse, codes.dtype), check_bounds=False)
    ct.scatter(scales, row, scale, check_bounds=False)


# ---------------------------------------------------------------- what is prebuilt
TARGETS = ("sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
CODES = "float8_e4m3fn"
WHOLE = (4096, 2048, 1024)  # rows that are read once
PIECES = (4096, 2048, 1024, 512)  # of longer ones
# (tile, pieces) of rows of SwiGLU that stay in registers between their maximum and their codes, with (ahead, blocks) of the backward pass,
# and of the one that keeps the gradients too: the pieces that are read first and the blocks of eight warps that a multiprocessor has at
# once, the most without a spill. Three of the forward pass reach the speed of a copy. Longer rows spill.
SWIGLU = {
    (2048, 7): ((2, 2), (1, 2)), (2048, 6): ((6, 3), (3, 2)), (2048, 4): ((4, 4), (3, 3)), (2048, 3): ((3, 4), (3, 4)),
    (1024, 3): ((3, 3), (3, 3)),
}  # fmt: skip


def variants():
    scales = Array("float32", (None,), aligned=False)
    for whole, tiles in ((1, WHOLE), (0, PIECES)):
        for tile in tiles:
            shape = {"shape": (None, tile)} if whole else {"shape": (None, None), "divisible": (1, tile)}
            arrays = {"x": Array("bfloat16", **shape), "codes": Array(CODES, **shape), "scales": scales}
            yield Variant(quantise_rows, {**arrays, "TILE": tile, "WHOLE": whole, "CHECK": 0}, targets=TARGETS)
    # Lengths of 16 elements, which the products ask for: a checked store is one of 16 bytes then, not of single elements.
    x, codes = (Array(dtype, (None, None), divisible=(1, 16)) for dtype in ("bfloat16", CODES))
    yield Variant(quantise_rows, {"x": x, "codes": codes, "scales": scales, "TILE": 1024, "WHOLE": 0, "CHECK": 1}, targets=TARGETS)
    words = Array("int32", (None, None), divisible=(16, 4))
    arrays = {"x": x, "scale": scales, "words": words, "scales": scales}
    yield Variant(quantise_transposed, {**arrays, "ROWS": 128, "TILE": 64}, targets=TARGETS)
    x = Array(CODES, (None, None), divisible=(1, 16))
    arrays = {"x": x, "factors": scales, "scale": scales, "words": words, "scales": scales}
    yield Variant(recode_transposed, {**arrays, "ROWS": 128, "TILE": 128}, targets=TARGETS, hints={"num_worker_warps": 8})
    for (tile, pieces), ((ahead, blocks), (kept_ahead, kept_blocks)) in SWIGLU.items():
        (x, codes), (both, codes_of_both) = (
            [Array(dtype, (None, n * tile * pieces)) for dtype in ("bfloat16", CODES)] for n in (1, 2)
        )
        inputs = {"gate": x, "up": x}
        of_forward: Params = {"codes": codes, "scales": scales, "TILE": tile, "PIECES": pieces}
        of_backward: Params = {"codes": codes_of_both, "scales": scales, "TILE": tile, "PIECES": pieces}
        for kernel, params, occupancy in (
            (swiglu_quantised, {**inputs, **of_forward}, 3),
            (swiglu_quantised_kept, {**inputs, "hidden": x, **of_forward}, 3),
            (swiglu_backward_quantised, {"dout": x, **inputs, **of_backward, "AHEAD": ahead}, blocks),
            (swiglu_backward_quantised_kept, {"dout": x, **inputs, "both": both, **of_backward, "AHEAD": kept_ahead}, kept_blocks),
        ):
            hints = {"num_worker_warps": 8, "occupancy": occupancy}
            yield Variant(kernel, params, targets=("sm_90",), hints=hints)  # where products in eight bits are made
