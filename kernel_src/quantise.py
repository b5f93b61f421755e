"""Operands of products in eight bits: e4m3 codes of a matrix [rows, columns] in bf16, with scales that are powers of two.

    codes = e4m3(x / scale)          scale = the least power of two with max |x| <= 448 * scale, and 2^-126 at the least

The maximum is of a row, or for `quantise_transposed` the largest of all rows' scales is given. A power of two changes no bit of what e4m3
holds, so where a row's numbers lie within 2^14 of each other a scale is as good as a finer one. Scales are rounded up: nothing saturates.
The conversion itself is not clamped: ct.minimum and ct.maximum ignore NaN, and a NaN would become a number. A NaN stays one and does not
count for the scale. Infinity has no code: its row has the scale inf, and the codes NaN for it and 0 for the rest.

cuTile has e4m3 from sm_90 on.
"""

import cuda.tile as ct

from kernel_src.elements import read, read_padded
from kernel_src.prebuild import Array, Variant

Const = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO
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


@ct.kernel
def quantise_rows(x, codes, scales, TILE: Const, WHOLE: Const):
    """x, codes: [rows, columns], columns a multiple of TILE, or with WHOLE just TILE; scales: [rows] fp32. A row a block. A longer row is
    read twice, the second time from the caches."""
    row = ct.bid(0)
    columns = ct.arange(TILE, dtype=ct.int32)
    if WHOLE:
        values = read(x, (row, columns))
        scale = scale_of(ct.maximum(ct.max(size(values), axis=0, keepdims=False), 0.0))
        ct.scatter(codes, (row, columns), ct.astype(values * ct.truediv(1.0, scale), codes.dtype), check_bounds=False)
    else:
        pieces = x.shape[1] // TILE
        largest = ct.zeros((TILE,), dtype=ct.float32)
        for i in range(pieces):
            largest = ct.maximum(largest, size(read(x, (row, i * TILE + columns))))
        scale = scale_of(ct.max(largest, axis=0, keepdims=False))
        inverse = ct.truediv(1.0, scale)
        for i in range(pieces):
            place = (row, (pieces - 1 - i) * TILE + columns)  # what was read last lies nearest
            ct.scatter(codes, place, ct.astype(read(x, place) * inverse, codes.dtype), check_bounds=False)
    ct.scatter(scales, row, scale, check_bounds=False)


@ct.kernel
def quantise_any_rows(x, codes, scales, TILE: Const):
    """Computes what `quantise_rows` does, of rows of any length."""
    row = ct.bid(0)
    columns = ct.arange(TILE, dtype=ct.int32)
    pieces = ct.cdiv(x.shape[1], TILE)
    largest = ct.zeros((TILE,), dtype=ct.float32)
    for i in range(pieces):
        largest = ct.maximum(largest, size(read_padded(x, (row, i * TILE + columns))))
    scale = scale_of(ct.max(largest, axis=0, keepdims=False))
    inverse = ct.truediv(1.0, scale)
    for i in range(pieces):
        place = (row, i * TILE + columns)
        ct.scatter(codes, place, ct.astype(read_padded(x, place) * inverse, codes.dtype), check_bounds=True)
    ct.scatter(scales, row, scale, check_bounds=False)


@ct.kernel
def quantise_transposed(x, scale, codes, scales, ROWS: Const, TILE: Const):
    """x: [rows, columns]; scale: [1] fp32, copied to scales: [columns]; codes: [columns, rows or more], with zeros behind the rows. ROWS
    rows and TILE columns a block."""
    across = ct.cdiv(x.shape[1], TILE)
    i, j = ct.bid(0) // across, ct.bid(0) % across
    scale = ct.gather(scale, 0, check_bounds=False)
    values = ct.astype(ct.load(x, index=(i, j), shape=(ROWS, TILE), padding_mode=ZERO), ct.float32) * ct.truediv(1.0, scale)
    ct.store(codes, index=(j, i), tile=ct.transpose(ct.astype(values, codes.dtype)))
    if i == 0:
        columns = j * TILE + ct.arange(TILE, dtype=ct.int32)
        ct.scatter(scales, columns, ct.full((TILE,), scale, dtype=ct.float32), check_bounds=True)


# ---------------------------------------------------------------- what is prebuilt
TARGETS = ("sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
CODES = "float8_e4m3fn"
WHOLE = (4096, 2048, 1024)  # rows that are read once
PIECES = (4096, 2048, 1024, 512)  # of longer ones


def variants():
    scales = Array("float32", (None,), aligned=False)
    for whole, tiles in ((1, WHOLE), (0, PIECES)):
        for tile in tiles:
            shape = {"shape": (None, tile)} if whole else {"shape": (None, None), "divisible": (1, tile)}
            arrays = {"x": Array("bfloat16", **shape), "codes": Array(CODES, **shape), "scales": scales}
            yield Variant(quantise_rows, {**arrays, "TILE": tile, "WHOLE": whole}, targets=TARGETS)
    # Lengths of 16 elements, which the products ask for: a checked store is one of 16 bytes then, not of single elements.
    x, codes = (Array(dtype, (None, None), divisible=(1, 16)) for dtype in ("bfloat16", CODES))
    yield Variant(quantise_any_rows, {"x": x, "codes": codes, "scales": scales, "TILE": 1024}, targets=TARGETS)
    codes = Array(CODES, (None, None), divisible=(16, 16))
    arrays = {"x": x, "scale": scales, "codes": codes, "scales": scales}
    yield Variant(quantise_transposed, {**arrays, "ROWS": 128, "TILE": 128}, targets=TARGETS)
