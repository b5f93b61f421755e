"""Halves of a chunk, and quarters of a state, for kernels of the gated delta rule whose registers do not hold whole ones."""

import cuda.tile as ct

from kernel_src.gated_delta import CHUNK, WIDTH

Const = ct.Constant[int]
PART = 32  # rows of a chunk, or columns of its keys, that a kernel has sums of
HALVES, QUARTERS = CHUNK // PART, WIDTH // PART


def rows_of_half(array, half, head, part, WIDTH: Const):
    """[PART, WIDTH]: half of the rows of a chunk in an array [chunks * 64, heads, parts * WIDTH]."""
    return ct.reshape(ct.load(array, index=(half, head, part), shape=(PART, 1, WIDTH)), (PART, WIDTH))


@ct.function
def numbers_of_half(array, head, half):
    """[PART]: half of the numbers of a chunk in an array [heads, chunks * 64]."""
    return ct.reshape(ct.load(array, index=(head, half), shape=(1, PART)), (PART,))


@ct.function
def put_numbers_of_half(array, head, half, tile):
    ct.store(array, index=(head, half), tile=ct.reshape(tile, (1, PART)))


@ct.function
def columns_of_half(array, chunk, head, half):
    """[PART, 64]: half of the columns of a chunk's square in an array [chunks * 64, heads, 64], as rows."""
    return ct.transpose(ct.reshape(ct.load(array, index=(chunk, head, half), shape=(64, 1, PART)), (64, PART)))


@ct.function
def tokens_of_half(table, chunk, rows):
    """[PART]: as `tokens_of`, of some rows."""
    first, count = ct.gather(table, (0, chunk), check_bounds=False), ct.gather(table, (1, chunk), check_bounds=False)
    return ct.where(rows < count, first + rows, -1)


@ct.function
def rows_of_state(states, chunk, head, quarter, part, BV: Const):
    """[PART, BV]: of a state, the rows that some columns of the keys have."""
    return ct.reshape(ct.load(states, index=(chunk, head, quarter, part), shape=(1, 1, PART, BV)), (PART, BV))
