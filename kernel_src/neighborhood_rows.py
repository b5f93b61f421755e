"""Functions for all kernels of neighborhood attention: which positions of a residue a block works on, the rows they are in, and which of
them see each other. The formulas are in kernel_src/neighborhood_attention.py. Rows outside the sequence are read as its first or last row,
and their products are masked."""

import cuda.tile as ct

Const = ct.Constant[int]


@ct.function
def tile_of(tokens, dilation, M):
    """(residue, first position, positions in its sequence) of this block."""
    residue = ct.bid(2) % dilation
    return residue, ct.bid(0) * M, ct.cdiv(tokens - residue, dilation)


@ct.function
def positions(first, COUNT: Const):
    return first + ct.arange(COUNT, dtype=ct.int32)


@ct.function
def read_rows(x, at, places, residue, dilation, count, D: Const):
    """[places, D] of one batch and head; positions outside the sequence give its first or last row, columns behind the last one 0."""
    rows = residue + ct.minimum(ct.maximum(places, 0), count - 1) * dilation
    cols = ct.arange(D, dtype=ct.int32)[None, :]
    return ct.gather(x, (*at, rows[:, None], cols), mask=cols < x.shape[3], check_bounds=False, padding_value=0)


@ct.function
def read_rows_of(x, at, places, wanted, residue, dilation, count, D: Const):
    """Reads what `read_rows` does, and gives 0 for the places that are not wanted."""
    rows = residue + ct.minimum(ct.maximum(places, 0), count - 1) * dilation
    cols = ct.arange(D, dtype=ct.int32)[None, :]
    return ct.gather(x, (*at, rows[:, None], cols), mask=wanted[:, None] & (cols < x.shape[3]), check_bounds=False, padding_value=0)


@ct.function
def write_rows(x, at, places, residue, dilation, count, tile, D: Const):
    write_rows_of(x, at, places, places < count, residue, dilation, tile, D)


@ct.function
def write_rows_of(x, at, places, mine, residue, dilation, tile, D: Const):
    """mine: which of the places are written."""
    rows, cols = residue + places * dilation, ct.arange(D, dtype=ct.int32)[None, :]
    inside = mine[:, None] & (cols < x.shape[3])
    ct.scatter(x, (*at, rows[:, None], cols), ct.astype(tile, x.dtype), mask=inside, check_bounds=False)


@ct.function
def read_statistics(x, line, places, residue, dilation, count):
    """A number a position, of [batch * heads, tokens]."""
    rows = residue + ct.minimum(ct.maximum(places, 0), count - 1) * dilation
    return ct.gather(x, (line, rows), check_bounds=False)


@ct.function
def write_statistics(x, line, places, residue, dilation, count, values):
    ct.scatter(x, (line, residue + places * dilation), values, mask=places < count, check_bounds=False)


@ct.function
def seen(queries, keys, count, left, right):
    """Whether each query sees each key; of which one is a column and the other a row."""
    inside = (queries >= 0) & (queries < count) & (keys >= 0) & (keys < count)
    return inside & (keys >= queries - left) & (keys <= queries + right)


@ct.function
def product(a, b, M: Const, N: Const):
    """a b^T, [M, N] in float32."""
    return ct.mma(a, ct.transpose(b), ct.zeros((M, N), dtype=ct.float32))


@ct.function
def batch_and_head(x, dilation):
    """((batch, head), batch * heads + head) of this block."""
    batch, head = ct.bid(2) // dilation, ct.bid(1)
    return (batch, head), batch * x.shape[1] + head
