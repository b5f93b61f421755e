"""Which tokens see which, made once a batch for every layer's attention (kernel_src/attention.py).

The documents of a batch are packed into one row of tokens. A query at t sees the keys of its own document from t - left to
t + right: causal attention has right = 0, a sliding window of w tokens left = w - 1. Turned round, a key at t is seen by the queries
from t - right to t + left. Both are intervals whose ends never go back from one token to the next, so a block of tokens is known from its
first and last one. A token of no document (padding) sees nothing and is seen by nothing.

An attention block handles BLOCK rows and walks over what they see, which five numbers describe: which block it is, where the walk
starts, the part in which every row sees everything (no mask is needed there), where it ends. They stand in one column of a table that a
block reads at once (three dependent reads in its place made the forward pass of 8 documents 15 % slower on an H200), and the longest walks
come first, so that no long one is left for the end.
"""

import cuda.tile as ct

from kernel_src.prebuild import INT, Array, Variant

Const = ct.Constant[int]
BLOCK = 64  # rows of an attention block, in the forward and in both backward kernels, on every architecture
TILE = 32  # tokens, or attention blocks, of a block of this kernel
# Rows of `limits`: the first key that each query sees, the one behind its last, the same of the queries that see each key.
# Rows of `walks`: those of the queries' blocks, then those of the keys' blocks.
LIMITS, WALKS = 4, 10
QUERIES, KEYS = 0, 1


@ct.function
def document_of(t, documents, halvings):
    """The last document that starts at or before each token t; -1 before the first one."""
    low = t * 0 - 1
    high = low + (documents.shape[1] + 1)
    for _ in range(halvings):
        middle = (low + high) // 2
        ahead = ct.gather(documents, (0, middle), padding_value=0) <= t
        undecided = high - low > 1
        low = ct.where(undecided & ahead, middle, low)
        high = ct.where(undecided & ~ahead, middle, high)
    return low


@ct.function
def bounds_of(t, documents, halvings, tokens):
    """(whether t lies in a document, that document's start and end, the start of the next one)."""
    document = document_of(t, documents, halvings)
    start, end = ct.gather(documents, (0, document), padding_value=0), ct.gather(documents, (1, document), padding_value=0)
    end = ct.minimum(end, tokens)
    following = ct.gather(documents, (0, document + 1), padding_value=2147483647)
    return (document >= 0) & (t < end), start, end, following


@ct.function
def write_limits(limits, row, t, inside, start, end, left, right):
    ct.scatter(limits, (row, t), ct.where(inside, ct.maximum(start, t - left), 0))
    ct.scatter(limits, (row + 1, t), ct.where(inside, ct.minimum(end, t + right + 1), 0))


@ct.function
def walk(block, documents, left, right, halvings, tokens, BLOCK: Const):
    """(start, start of the part without a mask, its end, end) of the walk of each attention block, in tokens."""
    top, bottom = ct.minimum(block * BLOCK, tokens - 1), ct.minimum(block * BLOCK + BLOCK, tokens) - 1
    top_inside, top_start, top_end, following = bounds_of(top, documents, halvings, tokens)
    bottom_inside, bottom_start, bottom_end, _following = bounds_of(bottom, documents, halvings, tokens)
    first = ct.where(top_inside, ct.maximum(top_start, top - left), following)
    behind = ct.where(bottom_inside, ct.minimum(bottom_end, bottom + right + 1), bottom_end)
    some = (first < behind) & (block * BLOCK < tokens)
    first, behind = ct.where(some, first, 0), ct.where(some, behind, 0)
    full, full_end = ct.maximum(bottom_start, bottom - left), ct.minimum(top_end, top + right + 1)
    whole = some & bottom_inside & (full < full_end)  # of a top that lies in no document, full_end lies before
    return first, ct.where(whole, full, behind), ct.where(whole, full_end, behind), behind


@ct.function
def rank_of(block, length, documents, left, right, halvings, tokens, blocks, TILE: Const, BLOCK: Const):
    """How many attention blocks have a longer walk than each of these, or as long a one and a lower number."""
    rank = ct.zeros((TILE,), dtype=ct.int32)
    for i in range(ct.cdiv(blocks, TILE)):
        other = i * TILE + ct.arange(TILE, dtype=ct.int32)
        first, _full, _full_end, behind = walk(other, documents, left, right, halvings, tokens, BLOCK)
        longer = (behind - first)[None, :] > length[:, None]
        before = ((behind - first)[None, :] == length[:, None]) & (other[None, :] < block[:, None])
        rank = rank + ct.sum(ct.astype(longer | before, ct.int32), 1)
    return rank


@ct.kernel
def attention_plan(documents, limits, walks, left, right, halvings, tokens, TILE: Const, BLOCK: Const):
    """documents: [2, documents] int32, where each starts and ends, ascending and apart from each other; one may be empty; limits:
    [4, blocks * BLOCK] and walks: [10, blocks] int32, see above; halvings: enough to search all documents; tokens: one or more.
    Grid (TILEs of tokens, 3)."""
    blocks = walks.shape[1]
    if ct.bid(1) == 2:
        t = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
        inside, start, end, _following = bounds_of(t, documents, halvings, tokens)
        write_limits(limits, 0, t, inside, start, end, left, right)
        write_limits(limits, 2, t, inside, start, end, right, left)
    else:
        if ct.bid(0) * TILE < blocks:
            block = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
            keys = ct.bid(1) == KEYS
            left, right = ct.where(keys, right, left), ct.where(keys, left, right)
            first, full, full_end, behind = walk(block, documents, left, right, halvings, tokens, BLOCK)
            rank = rank_of(block, behind - first, documents, left, right, halvings, tokens, blocks, TILE, BLOCK)
            row, mine = ct.bid(1) * 5, block < blocks
            ct.scatter(walks, (row, rank), block, mask=mine)
            ct.scatter(walks, (row + 1, rank), first, mask=mine)
            ct.scatter(walks, (row + 2, rank), full, mask=mine)
            ct.scatter(walks, (row + 3, rank), full_end, mask=mine)
            ct.scatter(walks, (row + 4, rank), behind, mask=mine)


def variants():
    table = Array("int32", (None, None), aligned=False)
    arrays = {"documents": table, "limits": table, "walks": table}
    yield Variant(attention_plan, {**arrays, "left": INT, "right": INT, "halvings": INT, "tokens": INT, "TILE": TILE, "BLOCK": BLOCK})
