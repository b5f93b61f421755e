"""Cross entropy of a linear layer's output whose logits are never stored: forward only, for evaluation.

With h the hidden state of one token, W the weight, z = W h its logits and t its label:

    loss = lse - z[t],   lse = log(sum_j exp(z[j]))

A block multiplies TILE_M tokens by TILE_N classes and keeps the logits in registers; what it writes of them is, for each
token, their maximum, the sum of their exponentials, and the label's logit where the label is among them. One block a token
then joins the statistics of all tiles of the vocabulary. The logits are not rounded to the model's dtype on their way.

Blocks go down GROUP tiles of tokens before they come to the next tile of classes, so a tile of the weight is read from memory
once for GROUP tiles of tokens, and those tokens stay in the L2 cache.
"""

import cuda.tile as ct

from kernel_src.cross_entropy import LN2, LOG2E, MINUS_INFINITY, Const, join_partials
from kernel_src.prebuild import INT, Array, Variant


@ct.kernel
def linear_cross_entropy_statistics(
    hidden, weight, target, part_max, part_sum, label_logit, TILE_M: Const, TILE_N: Const, TILE_K: Const, GROUP: Const
):
    """hidden: [tokens, features]; weight: [classes, features]; target: [tokens] int64; part_max, part_sum: [tokens, tiles]
    fp32, tiles = ceil(classes / TILE_N), in base 2; label_logit: [tokens] fp32, in base e, not written for a label that is
    no class."""
    tiles_m, tiles_n = ct.cdiv(hidden.shape[0], TILE_M), ct.cdiv(weight.shape[0], TILE_N)
    first = ct.bid(0) // (GROUP * tiles_n) * GROUP
    height = ct.minimum(tiles_m - first, GROUP)
    within = ct.bid(0) % (GROUP * tiles_n)
    m, n = first + within % height, within // height
    z = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
    for k in range(hidden.shape[1] // TILE_K):
        h = ct.load(hidden, index=(m, k), shape=(TILE_M, TILE_K), padding_mode=ct.PaddingMode.ZERO)
        w = ct.load(weight, index=(n, k), shape=(TILE_N, TILE_K), padding_mode=ct.PaddingMode.ZERO)
        z = ct.mma(h, ct.transpose(w), z)
    rows = m * TILE_M + ct.arange(TILE_M, dtype=ct.int32)
    cols = n * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
    t = ct.gather(target, rows, check_bounds=True, padding_value=-1)
    here = (t >= n * TILE_N) & (t < ct.minimum((n + 1) * TILE_N, weight.shape[0]))
    label = ct.astype(ct.where(here, t, -1), ct.int32)
    ct.scatter(label_logit, rows, ct.sum(ct.where(cols[None, :] == label[:, None], z, 0.0), 1), mask=here, check_bounds=True)
    z = ct.where((cols < weight.shape[0])[None, :], z, MINUS_INFINITY)
    high = ct.max(z, 1) * LOG2E
    shift = ct.where(high == MINUS_INFINITY, 0.0, high)
    total = ct.sum(ct.exp2(z * LOG2E - shift[:, None], flush_to_zero=True), 1)
    ct.scatter(part_max, (rows, n), high, check_bounds=True)
    ct.scatter(part_sum, (rows, n), total, check_bounds=True)


@ct.kernel
def linear_cross_entropy_combine(target, part_max, part_sum, label_logit, lse, loss, ignore_index: int, classes: int, PARTS: Const):
    """lse, loss: [tokens] fp32, both in base e; loss is lse - label_logit, 0 for an ignored token. One token a block."""
    row = ct.bid(0)
    total = join_partials(part_max, part_sum, row, PARTS) * LN2
    t = ct.gather(target, row, check_bounds=False)
    counted = (t != ignore_index) & (t >= 0) & (t < classes)
    z = ct.gather(label_logit, row, check_bounds=False)
    ct.scatter(loss, row, ct.where(counted, total - z, 0.0), check_bounds=False)
    ct.scatter(lse, row, total, check_bounds=False)


# The arrays of a launch are made for 256 classes a tile, so architectures differ in the tokens of a tile. Eight warps, because four
# spill. A product with 128 x 256 x 64 tiles and this end took 7.34 ms on an H200 for [4096, 4096] x [151936, 4096] in bf16, 101 % of
# the speed of the bare cuBLAS product; 128 x 128 x 64 89 %, clusters of two blocks 86 %. The others have less shared memory, and
# nothing is measured on them.
TILES = (
    ({"TILE_M": 128, "TILE_N": 256, "TILE_K": 64, "GROUP": 8}, ("sm_90", "sm_100", "sm_103", "sm_110")),
    ({"TILE_M": 64, "TILE_N": 256, "TILE_K": 64, "GROUP": 16}, ("sm_80", "sm_86", "sm_89", "sm_120", "sm_121")),
)


def variants():
    target, vector = Array("int64", (None,), aligned=False), Array("float32", (None,), aligned=False)
    matrix = Array("float32", (None, None), aligned=False)
    arrays = {"target": target, "part_max": matrix, "part_sum": matrix, "label_logit": vector}
    for dtype in ("bfloat16", "float16"):
        operand = Array(dtype, (None, None), divisible=(1, 64))
        for tiles, targets in TILES:
            yield Variant(
                linear_cross_entropy_statistics,
                {"hidden": operand, "weight": operand, **arrays, **tiles},
                {"num_worker_warps": 8},
                targets,
            )
    yield Variant(
        linear_cross_entropy_combine,
        {**arrays, "lse": vector, "loss": vector, "ignore_index": INT, "classes": INT, "PARTS": 64},
    )
