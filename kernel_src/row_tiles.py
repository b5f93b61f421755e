"""Rows of a matrix in tiles: a piece of a row, several short rows, or a whole row that is held as it lies in memory."""

import cuda.tile as ct

Const = ct.Constant[int]
MINUS_INFINITY = -float("inf")
HALF = ("bfloat16", "float16")


@ct.function
def piece(block, array, TILE: Const):
    """(row, piece) of a block, and the piece's columns. Blocks are counted in one dimension: the others end at 65535."""
    pieces = ct.cdiv(array.shape[1], TILE)
    part = block % pieces
    return block // pieces, part, part * TILE + ct.arange(TILE, dtype=ct.int32)


@ct.function
def read(array, index, padding):
    return ct.astype(ct.gather(array, index, check_bounds=True, padding_value=padding), ct.float32)


@ct.function
def rows_of_block(block, ROWS: Const, TILE: Const):
    """Indices [ROWS, TILE] of the rows and columns of a block."""
    rows = block * ROWS + ct.arange(ROWS, dtype=ct.int32)
    return rows[:, None], ct.arange(TILE, dtype=ct.int32)[None, :]


# ---------------------------------------------------------------- whole rows as they lie in memory
@ct.function
def tile_columns(i, TILE: Const):
    return i * TILE + ct.arange(TILE, dtype=ct.int32)


@ct.function
def held_tiles(array, row, TILE: Const, TILES: Const, padding):
    """A row of at most TILE * TILES elements in its own dtype, in tiles. All loads are under way together."""
    found = ()
    for i in ct.static_iter(range(TILES)):
        tile = ct.gather(array, (row, tile_columns(i, TILE)), check_bounds=True, padding_value=padding)
        found = (*found, tile)  # type: ignore[assignment]
    return found


@ct.function
def converted_again(tile, count):
    """A tile in float32. count: at least 1, of which the compiler cannot know that. Else it would keep what it has converted once, in twice
    the registers: the product by 1 costs one instruction for two elements, and lets two blocks with a row each share an SM."""
    return ct.astype(tile * ct.astype(ct.minimum(count, 1.0), tile.dtype), ct.float32)


@ct.function
def held_maxima(tiles, TILES: Const):
    """The largest of the elements that lie at one place of their tiles."""
    highest = tiles[0]
    for i in ct.static_iter(range(1, TILES)):
        highest = ct.maximum(highest, tiles[i])
    return highest
