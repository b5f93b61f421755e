"""Where the rows of a mixture of experts are: a stable counting sort of (token, expert) pairs by expert, and blocks of an expert's rows.

A chunk is PAIRS pairs that lie side by side. The row of a pair is where the rows of its expert start, and behind them those of the chunks
before, and behind them those before it in its chunk:

    row = start[expert] + before[chunk, expert] + number of earlier pairs of the chunk with this expert

The last term, for all pairs of a chunk, is a strictly lower triangular matrix of ones times the matrix that says which pair goes where.
Pairs of no expert have the last rows, in their order. PyTorch's operations for the same are 30 launches with a radix sort among them.
"""

import cuda.tile as ct

from kernel_src.prebuild import INT, Array, Variant

Const = ct.Constant[int]


@ct.function
def goes_to(expert, chunk, experts, PAIRS: Const, EXPERTS: Const):
    """[PAIRS, EXPERTS]: whether each pair of a chunk goes to each expert. An id outside [0, experts) is none, and so is no pair."""
    ids = ct.gather(expert, chunk * PAIRS + ct.arange(PAIRS, dtype=ct.int32), check_bounds=True, padding_value=-1)
    numbers = ct.arange(EXPERTS, dtype=ct.int64)[None, :]
    return (ids[:, None] == numbers) & (numbers < experts)


@ct.kernel
def expert_counts(expert, counts, PAIRS: Const, EXPERTS: Const):
    """expert: [pairs] int64; counts: [chunks, experts], the pairs of each chunk that go to each. Grid (chunks,)."""
    chunk = ct.bid(0)
    here = ct.sum(ct.astype(goes_to(expert, chunk, counts.shape[1], PAIRS, EXPERTS), ct.int32), axis=0)
    ct.scatter(counts, (chunk, ct.arange(EXPERTS, dtype=ct.int32)), here, check_bounds=True)


@ct.kernel
def expert_sums(counts, totals, CHUNKS: Const, COLS: Const):
    """Writes over counts[c, e] the pairs of e in the chunks before c; totals: [experts], those of all. Grid (pieces of COLS experts,)."""
    cols = ct.bid(0) * COLS + ct.arange(COLS, dtype=ct.int32)
    total = ct.zeros((COLS,), dtype=ct.int32)
    for i in range(ct.cdiv(counts.shape[0], CHUNKS)):
        places = (i * CHUNKS + ct.arange(CHUNKS, dtype=ct.int32))[:, None], cols[None, :]
        here = ct.gather(counts, places, check_bounds=True, padding_value=0)
        ct.scatter(counts, places, total[None, :] + ct.cumsum(here, axis=0) - here, check_bounds=True)
        total = total + ct.sum(here, axis=0)
    ct.scatter(totals, cols, total, check_bounds=True)


@ct.kernel
def expert_order(expert, before, totals, order, position, ends, PAIRS: Const, EXPERTS: Const):
    """expert: [pairs] int64; before: [chunks, experts] and totals: [experts] as `expert_sums` leaves them; order: [pairs] int64, the pair
    of each row; position: [pairs], the row of each pair, the number of pairs where it goes to no expert; ends: [experts], the row after
    each expert's last one. Grid (chunks,)."""
    chunk, pairs, experts = ct.bid(0), expert.shape[0], totals.shape[0]
    numbers = ct.arange(EXPERTS, dtype=ct.int32)
    total = ct.gather(totals, numbers, check_bounds=True, padding_value=0)
    end = ct.cumsum(total)
    earlier = ct.gather(before, (chunk, numbers), check_bounds=True, padding_value=0)
    goes = goes_to(expert, chunk, experts, PAIRS, EXPERTS)
    places = ct.arange(PAIRS, dtype=ct.int32)
    lower = ct.astype(places[:, None] > places[None, :], ct.float16)
    rank = ct.mma(lower, ct.astype(goes, ct.float16), ct.zeros((PAIRS, EXPERTS), dtype=ct.float32))
    row = ct.sum(ct.where(goes, ct.astype(rank, ct.int32) + (end - total + earlier)[None, :], 0), axis=1)
    absent = 1 - ct.sum(ct.astype(goes, ct.int32), axis=1)
    behind = ct.sum(total) + chunk * PAIRS - ct.sum(earlier)
    row = ct.where(absent == 0, row, behind + ct.cumsum(absent) - absent)
    pair = chunk * PAIRS + places
    ct.scatter(order, row, ct.astype(pair, ct.int64), check_bounds=True)
    ct.scatter(position, pair, ct.where(absent == 0, row, pairs), check_bounds=True)
    if chunk == 0:
        ct.scatter(ends, numbers, end, check_bounds=True)


@ct.kernel
def expert_blocks(ends, blocks, stops, height, NUMBERS: Const, EXPERTS: Const):
    """ends: [experts]; blocks: [3, blocks], the expert, the first row and the end of each block of up to `height` rows; stops: [experts],
    the block after each expert's last one. The surplus blocks begin after the last expert's end. Grid (pieces of NUMBERS blocks,)."""
    experts = ends.shape[0]
    numbers = ct.arange(EXPERTS, dtype=ct.int32)
    start = ct.gather(ends, numbers - 1, check_bounds=True, padding_value=0)
    end = ct.gather(ends, numbers, check_bounds=True, padding_value=0)
    count = ct.where(numbers < experts, (end - start + (height - 1)) // height, 0)
    stop = ct.cumsum(count)
    number = ct.bid(0) * NUMBERS + ct.arange(NUMBERS, dtype=ct.int32)
    chosen = ct.minimum(ct.sum(ct.astype(stop[None, :] <= number[:, None], ct.int32), axis=1), experts - 1)
    mine = chosen[:, None] == numbers[None, :]
    first = number * height + ct.sum(ct.where(mine, (start - (stop - count) * height)[None, :], 0), axis=1)
    last = ct.sum(ct.where(mine, end[None, :], 0), axis=1)
    ct.scatter(blocks, (0, number), chosen, check_bounds=True)
    ct.scatter(blocks, (1, number), first, check_bounds=True)
    ct.scatter(blocks, (2, number), last, check_bounds=True)
    if ct.bid(0) == 0:
        ct.scatter(stops, numbers, stop, check_bounds=True)


# ---------------------------------------------------------------- what is prebuilt
SIZES = {128: 128, 256: 64, 512: 32}  # the most experts, and the pairs of a chunk: 64 elements a thread
HINTS = {"num_worker_warps": 8}
CHUNKS, COLS, NUMBERS = 128, 32, 64
SPILLS = "64 bytes on sm_80, 86 and 89, 8 on sm_120 and 121; half a chunk would double the sums over chunks"


def variants():
    pairs, list64 = Array("int32", (None,), aligned=False), Array("int64", (None,), aligned=False)
    matrix = Array("int32", (None, None), aligned=False)
    yield Variant(expert_sums, {"counts": matrix, "totals": pairs, "CHUNKS": CHUNKS, "COLS": COLS}, HINTS)
    for experts, length in SIZES.items():
        few = Array("int32", (None,), aligned=False, at_most=(experts,))
        table = Array("int32", (None, None), aligned=False, at_most=(None, experts))
        tile = {"PAIRS": length, "EXPERTS": experts}
        yield Variant(expert_counts, {"expert": list64, "counts": table, **tile}, HINTS)
        rest = {"before": table, "totals": few, "order": list64, "position": pairs, "ends": few}
        spills = SPILLS if experts == 128 else ""
        yield Variant(expert_order, {"expert": list64, **rest, **tile}, HINTS, spills=spills)
        blocks = {"ends": few, "blocks": matrix, "stops": few, "height": INT, "NUMBERS": NUMBERS, "EXPERTS": experts}
        yield Variant(expert_blocks, blocks, HINTS)  # type: ignore[arg-type]
