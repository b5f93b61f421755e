"""What a low-rank adapter a [rank, in], b [out, rank] beside a weight (LoRA, arXiv 2106.09685) adds to the weight's products, and its own
gradients, both in one launch:

    y += low @ b.T        low  = scaling * x @ a.T        db = dy.T @ low
    dx += dlow @ a        dlow = scaling * dy @ b         da = dlow.T @ x

The gradients are the product of a wide matrix, transposed, and one as narrow as the rank, so a block makes TILE columns of dy or x into as
many rows of a result. Sums are fp32 in one order: two runs give the same bits.
"""

import cuda.tile as ct

from kernel_src.prebuild import Array, Variant

Const = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO


@ct.function
def transposed_product(wide, narrow, column, RANK: Const, TILE: Const, TOKENS: Const):
    """[TILE, RANK]: the product of some columns of `wide` [tokens, any], transposed, and `narrow` [tokens, rank], in fp32."""
    total = ct.zeros((TILE, RANK), dtype=ct.float32)
    for t in range(ct.cdiv(wide.shape[0], TOKENS)):
        left = ct.load(wide, index=(t, column), shape=(TOKENS, TILE), padding_mode=ZERO, latency=2)
        right = ct.load(narrow, index=(t, 0), shape=(TOKENS, RANK), padding_mode=ZERO, latency=2)
        total = ct.mma(ct.transpose(left), right, total)
    return total


@ct.kernel
def low_rank_gradients(dy, low, x, dlow, db, da, RANK: Const, TILE: Const, TOKENS: Const):
    """dy: [tokens, out]; low, dlow: [tokens, rank]; x: [tokens, in]; db: [out, rank]; da: [rank, in]; rank: at most RANK. A block for every
    TILE columns of dy, and behind these for every TILE of x."""
    block, of_b = ct.bid(0), ct.cdiv(dy.shape[1], TILE)
    if block < of_b:
        found = transposed_product(dy, low, block, RANK, TILE, TOKENS)
        ct.store(db, index=(block, 0), tile=ct.astype(found, db.dtype))
    else:
        found = transposed_product(x, dlow, block - of_b, RANK, TILE, TOKENS)
        ct.store(da, index=(0, block - of_b), tile=ct.transpose(ct.astype(found, da.dtype)))


@ct.kernel
def low_rank_add(y, low, b, RANK: Const, TILE: Const, TOKENS: Const, TRANSPOSED: Const):
    """y [tokens, out] += low [tokens, rank] @ b, in place; b: [rank, out], or TRANSPOSED [out, rank]; rank: at most RANK."""
    columns = ct.cdiv(y.shape[1], TILE)
    t, column = ct.bid(0) // columns, ct.bid(0) % columns
    left = ct.load(low, index=(t, 0), shape=(TOKENS, RANK), padding_mode=ZERO)
    if TRANSPOSED:
        right = ct.transpose(ct.load(b, index=(column, 0), shape=(TILE, RANK), padding_mode=ZERO))
    else:
        right = ct.load(b, index=(0, column), shape=(RANK, TILE), padding_mode=ZERO)
    total = ct.astype(ct.load(y, index=(t, column), shape=(TOKENS, TILE), padding_mode=ZERO), ct.float32)
    ct.store(y, index=(t, column), tile=ct.astype(ct.mma(left, right, total), y.dtype))


# ---------------------------------------------------------------- what is prebuilt
RANKS = (16, 64)
# The fastest for wide layers on an H200, of 23: 7.2 us for 512 tokens, 12288 and 4096 columns and rank 16, where two products of cuBLAS
# take 10.6. With 64 columns a block a layer of 1024 takes 3.6 us, one of 12288 more.
TILES = {"TILE": 128, "TOKENS": 64}
ADD = {"TILE": 128, "TOKENS": 128}  # as fast as cuBLAS on an H200, for 512 and 1024 tokens
HALVES = ("bfloat16", "float16")


def variants():
    for dtype in HALVES:
        for rank in RANKS:
            for transposed in (0, 1):
                # Lengths of whole 16 bytes: a load that may end inside of them is one of single elements where there is no TMA.
                wide = Array(dtype, (None, None), divisible=(1, 8))
                low = Array(dtype, (None, None), divisible=(1, 8), at_most=(None, rank))
                b = Array(dtype, (None, None), divisible=(8, 8), at_most=(None, rank) if transposed else (rank, None))
                arrays = {"y": wide, "low": low, "b": b}
                yield Variant(low_rank_add, {**arrays, "RANK": rank, **ADD, "TRANSPOSED": transposed}, {"num_worker_warps": 8})
        for result in (dtype, "float32"):  # PEFT keeps adapters in fp32
            for rank in RANKS:
                wide = Array(dtype, (None, None), divisible=(1, 8))
                narrow = Array(dtype, (None, None), divisible=(1, 8), at_most=(None, rank))
                db = Array(result, (None, None), divisible=(8, 8), at_most=(None, rank))
                da = Array(result, (None, None), divisible=(8, 8), at_most=(rank, None))
                arrays = {"dy": wide, "low": narrow, "x": wide, "dlow": narrow, "db": db, "da": da}
                yield Variant(low_rank_gradients, {**arrays, "RANK": rank, **TILES}, {"num_worker_warps": 4})
