"""The gradients of b [out, rank] and a [rank, in] of a low-rank adapter beside a weight (LoRA, arXiv 2106.09685), both in one launch:

    db[o, r] = sum over the tokens t of dy[t, o] * low[t, r]            low = scaling * x @ a.T
    da[r, i] = sum over the tokens t of dlow[t, r] * x[t, i]            dlow = scaling * dy @ b

Both are the product of a wide matrix, transposed, and one as narrow as the rank, so a block makes TILE columns of dy or x into as many rows
of a result. Sums are fp32 in one order: two runs give the same bits.
"""

import cuda.tile as ct

from kernel_src.prebuild import Array, Variant

Const = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO


@ct.function
def transposed_product(wide, narrow, column, TILE: Const, RANK: Const, TOKENS: Const):
    """[TILE, RANK]: the product of some columns of `wide` [tokens, any], transposed, and `narrow` [tokens, rank], in fp32."""
    total = ct.zeros((TILE, RANK), dtype=ct.float32)
    for t in range(ct.cdiv(wide.shape[0], TOKENS)):
        left = ct.load(wide, index=(t, column), shape=(TOKENS, TILE), padding_mode=ZERO, latency=2)
        right = ct.load(narrow, index=(t, 0), shape=(TOKENS, RANK), padding_mode=ZERO, latency=2)
        total = ct.mma(ct.transpose(left), right, total)
    return total


@ct.kernel
def low_rank_gradients(dy, low, x, dlow, db, da, TILE: Const, RANK: Const, TOKENS: Const):
    """dy: [tokens, out]; low, dlow: [tokens, rank]; x: [tokens, in]; db: [out, rank]; da: [rank, in]; rank: at most RANK. A block for every
    TILE columns of dy, and behind these for every TILE of x."""
    block, of_b = ct.bid(0), ct.cdiv(dy.shape[1], TILE)
    if block < of_b:
        found = transposed_product(dy, low, block, TILE, RANK, TOKENS)
        ct.store(db, index=(block, 0), tile=ct.astype(found, db.dtype))
    else:
        found = transposed_product(x, dlow, block - of_b, TILE, RANK, TOKENS)
        ct.store(da, index=(0, block - of_b), tile=ct.transpose(ct.astype(found, da.dtype)))


# ---------------------------------------------------------------- what is prebuilt
RANKS = (16, 64)
# The fastest for wide layers on an H200, of 23: 7.2 us for 512 tokens, 12288 and 4096 columns and rank 16, where two products of cuBLAS
# take 10.6. With 64 columns a block a layer of 1024 takes 3.6 us, one of 12288 more.
TILES = {"TILE": 128, "TOKENS": 64}
HALVES = ("bfloat16", "float16")


def variants():
    for dtype in HALVES:
        for result in (dtype, "float32"):  # PEFT keeps adapters in fp32
            for rank in RANKS:
                # Lengths of whole 16 bytes: a load that may end inside of them is one of single elements where there is no TMA.
                wide = Array(dtype, (None, None), divisible=(1, 8))
                narrow = Array(dtype, (None, None), divisible=(1, 8), at_most=(None, rank))
                db = Array(result, (None, None), divisible=(8, 8), at_most=(None, rank))
                da = Array(result, (None, None), divisible=(8, 8), at_most=(rank, None))
                arrays = {"dy": wide, "low": narrow, "x": wide, "dlow": narrow, "db": db, "da": da}
                yield Variant(low_rank_gradients, {**arrays, **TILES, "RANK": rank}, {"num_worker_warps": 4})
