"""Cross entropy of a linear layer's output whose logits are never stored: forward only, for evaluation.

With h the hidden state of one token, W the weight, z = W h its logits and t its label:

    loss = lse - z[t],   lse = log(sum_j exp(z[j]))

A block multiplies TILE_M tokens by TILE_N classes and keeps the logits in registers; what it writes of them is, for each
token, their maximum and the sum of their exponentials. One block a token then joins these for the whole vocabulary, and makes
the label's logit anew: to look for it in every tile takes 3 % of the time. Logits are not rounded to the model's dtype.

Blocks go down GROUP tiles of tokens before they come to the next tile of classes, so a tile of the weight is read from memory
once for GROUP tiles of tokens, and those tokens stay in the L2 cache.
"""

import cuda.tile as ct

from kernel_src.cross_entropy import LOG2E, MINUS_INFINITY, Const, join_partials, write_lse
from kernel_src.elements import read_padded
from kernel_src.prebuild import INT, Array, Variant


@ct.kernel
def linear_cross_entropy_statistics(
    hidden, weight, part_max, part_sum, TILE_M: Const, TILE_N: Const, TILE_K: Const, GROUP: Const, LATENCY: Const
):
    """hidden: [tokens, features]; weight: [classes, features]; part_max, part_sum: [tokens, tiles] fp32,
    tiles = ceil(classes / TILE_N)."""
    tiles_m, tiles_n = ct.cdiv(hidden.shape[0], TILE_M), ct.cdiv(weight.shape[0], TILE_N)
    first = ct.bid(0) // (GROUP * tiles_n) * GROUP
    height = ct.minimum(tiles_m - first, GROUP)
    within = ct.bid(0) % (GROUP * tiles_n)
    m, n = first + within % height, within // height
    z = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
    for k in range(hidden.shape[1] // TILE_K):
        h = ct.load(hidden, index=(m, k), shape=(TILE_M, TILE_K), padding_mode=ct.PaddingMode.ZERO, latency=LATENCY)
        w = ct.load(weight, index=(n, k), shape=(TILE_N, TILE_K), padding_mode=ct.PaddingMode.ZERO, latency=LATENCY)
        z = ct.mma(h, ct.transpose(w), z)
    rows = m * TILE_M + ct.arange(TILE_M, dtype=ct.int32)
    if n == tiles_n - 1:  # the others are full
        cols = n * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
        z = ct.where((cols < weight.shape[0])[None, :], z, MINUS_INFINITY)
    high = ct.max(z, 1)
    # Logits that are all -inf have the sum 0, not the NaN of -inf - -inf.
    shift = ct.where(high == MINUS_INFINITY, 0.0, high)
    total = ct.sum(ct.exp2((z - shift[:, None]) * LOG2E, flush_to_zero=True), 1)
    ct.scatter(part_max, (rows, n), high, check_bounds=True)
    ct.scatter(part_sum, (rows, n), total, check_bounds=True)


@ct.kernel
def linear_cross_entropy_combine(hidden, weight, target, part_max, part_sum, lse, loss, ignore_index: int, PARTS: Const, TILE: Const):
    """lse: [tokens, 2] fp32, in two parts; loss: [tokens] fp32, lse - hidden @ weight[target], 0 for an ignored token. One token a
    block."""
    row = ct.bid(0)
    high, log_sum = join_partials(part_max, part_sum, row, PARTS)
    t = ct.gather(target, row, check_bounds=False)
    counted = (t != ignore_index) & (t >= 0) & (t < weight.shape[0])
    label = ct.astype(ct.where(counted, t, 0), ct.int32)
    products = ct.zeros((TILE,), dtype=ct.float32)
    for i in range(ct.cdiv(hidden.shape[1], TILE)):
        cols = i * TILE + ct.arange(TILE, dtype=ct.int32)
        products = products + read_padded(hidden, (row, cols)) * read_padded(weight, (label, cols))
    distance = (high - ct.sum(products, 0)) + log_sum
    # The label's logit is summed in another order here than in lse; a loss is not negative all the same.
    distance = ct.where(distance < 0.0, 0.0, distance)
    ct.scatter(loss, row, ct.where(counted, distance, 0.0), check_bounds=False)
    write_lse(lse, row, high, log_sum)


# The arrays of a launch are made for 256 classes a tile, so architectures differ in the tokens of a tile. Eight warps, because four
# spill. Measured on an H200 for 1024 tokens, 4096 features and 151936 classes in bf16, as multiples of the time of the bare cuBLAS
# product: 1.01 without the label's logits; LATENCY 4, one tile less on its way, 1.06; the label looked for and the classes masked in
# every tile 1.09; TILE_K 128 1.36; 64 x 256 1.30; 256 x 128 and 128 x 128 as 128 x 256; GROUP 4 to 64 alike. The second shape is for
# GPUs with less shared memory, and nothing is measured on them.
TILES = (
    ({"TILE_M": 128, "TILE_N": 256, "TILE_K": 64, "GROUP": 8, "LATENCY": 6}, ("sm_90", "sm_100", "sm_103", "sm_110")),
    ({"TILE_M": 64, "TILE_N": 256, "TILE_K": 64, "GROUP": 16, "LATENCY": 6}, ("sm_80", "sm_86", "sm_89", "sm_120", "sm_121")),
)


def variants():
    target, vector = Array("int64", (None,), aligned=False), Array("float32", (None,), aligned=False)
    matrix = Array("float32", (None, None), aligned=False)
    for dtype in ("bfloat16", "float16"):
        operand = Array(dtype, (None, None), divisible=(1, 64))
        operands, partials = {"hidden": operand, "weight": operand}, {"part_max": matrix, "part_sum": matrix}
        for tiles, targets in TILES:
            yield Variant(linear_cross_entropy_statistics, {**operands, **partials, **tiles}, {"num_worker_warps": 8}, targets)
        yield Variant(
            linear_cross_entropy_combine,
            {**operands, "target": target, **partials, "lse": matrix, "loss": vector, "ignore_index": INT, "PARTS": 64, "TILE": 1024},
        )
