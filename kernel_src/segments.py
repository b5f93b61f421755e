"""Rows as segments: what the kernels that take rows of any length share.

A row of n elements is passed as [segments, SEGMENT], and a block works on PIECE segments at a time. In the last piece of a row, the
segments behind its end are its last segment again: that is read once more from the cache and written once more with the same values, so
no load and no store is checked (a check costs 18 to 45 % on an H200), and only what is summed is masked. SEGMENT is 64, or 1 for
lengths, addresses and strides that nothing is promised about.
"""

import cuda.tile as ct

from kernel_src.prebuild import Array

Const = ct.Constant[int]
SEGMENT = 64
# x and parameters of one dtype, and x in half precision with parameters in fp32.
SAME = (("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32"))
MIXED = (("bfloat16", "float32"), ("float16", "float32"))
PER_ROW = Array("float32", (None,))


@ct.function
def place(i, count, PIECE: Const):
    """(segments of piece i of a row of `count` segments, which of them the row has): [PIECE] each."""
    wanted = i * PIECE + ct.arange(PIECE, dtype=ct.int32)
    return ct.minimum(wanted, count - 1), wanted < count


@ct.function
def sum_of(tile, PIECE: Const, SEGMENT: Const):
    """The sum of a [PIECE, SEGMENT] tile, a scalar. As one axis: two axes are added up one after the other, through shared memory."""
    return ct.sum(ct.reshape(tile, (PIECE * SEGMENT,)), axis=0, keepdims=False)


def add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@ct.function
def two_sums(a, b, COUNT: Const):
    """The sums of two tiles of COUNT elements, scalars, in one reduction: its waiting for other warps is paid once."""
    return ct.reduce((ct.reshape(a, (COUNT,)), ct.reshape(b, (COUNT,))), 0, add_pairs, (0.0, 0.0))


def rows(dtype, segment, at_most=None):
    """[rows, segments, segment]. at_most: segments."""
    return Array(dtype, (None, None, segment), aligned=segment > 1, at_most=(None, at_most, None) if at_most else ())


def columns(dtype, segment):
    """[segments, segment], what all rows share."""
    return Array(dtype, (None, segment), aligned=segment > 1)
