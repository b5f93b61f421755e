"""Which tokens see which, made once a batch for every layer's attention (kernel_src/attention.py).

The documents of a batch lie behind each other in one row of tokens. A query at t sees the keys of its own document from t - left to
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
TILE = 128  # tokens, or attention blocks, of a block of this kernel
TOKENS, QUERIES, KEYS = 0, 1, 2  # ct.bid(1): what a block makes


@ct.function
def document_of(t, starts, halvings):
    """The last document that starts at or before each token t; -1 before the first one."""
    low = t * 0 - 1
    high = low + (starts.shape[0] + 1)
    for _ in range(halvings):
        middle = (low + high) // 2
        ahead = ct.gather(starts, middle, check_bounds=True, padding_value=0) <= t
        open_ = high - low > 1
        low = ct.where(open_ & ahead, middle, low)
        high = ct.where(open_ & ~ahead, middle, high)
    return low


@ct.function
def interval(t, starts, ends, left, right, halvings, tokens):
    """(whether t lies in a document, the first token of what it sees, the one behind its end, where its document ends, where the next
    one starts)."""
    document = document_of(t, starts, halvings)
    start = ct.gather(starts, document, check_bounds=True, padding_value=0)
    end = ct.gather(ends, document, check_bounds=True, padding_value=0)
    following = ct.gather(starts, document + 1, check_bounds=True, padding_value=2147483647)
    inside = (t < end) & (document >= 0)
    return inside, ct.maximum(start, t - left), ct.minimum(end, t + right + 1), end, ct.minimum(following, tokens)


@ct.function
def write_intervals(t, starts, ends, out, left, right, halvings, tokens):
    inside, first, behind, _end, _following = interval(t, starts, ends, left, right, halvings, tokens)
    inside = inside & (t < tokens)
    ct.scatter(out, (0, t), ct.where(inside, first, 0))
    ct.scatter(out, (1, t), ct.where(inside, behind, 0))


@ct.function
def walk(block, starts, ends, left, right, halvings, tokens, BLOCK: Const):
    """(start, start of the part without a mask, its end, end) of the walk of each attention block, in tokens."""
    top = ct.minimum(block * BLOCK, tokens - 1)
    bottom = ct.minimum(block * BLOCK + BLOCK, tokens) - 1
    top_inside, first, full_end, _end, following = interval(top, starts, ends, left, right, halvings, tokens)
    bottom_inside, full, behind, end, _following = interval(bottom, starts, ends, left, right, halvings, tokens)
    first = ct.where(top_inside, first, following)
    behind = ct.where(bottom_inside, behind, end)
    some = (first < behind) & (block * BLOCK < tokens)
    whole = some & top_inside & bottom_inside & (full < full_end)
    first, behind = ct.where(some, first, 0), ct.where(some, behind, 0)
    return first, ct.where(whole, full, behind), ct.where(whole, full_end, behind), behind


@ct.function
def write_walks(starts, ends, out, left, right, halvings, tokens, TILE: Const, BLOCK: Const):
    block = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    first, full, full_end, behind = walk(block, starts, ends, left, right, halvings, tokens, BLOCK)
    length = (behind - first)[:, None]
    rank = ct.zeros((TILE,), dtype=ct.int32)
    for i in range(ct.cdiv(out.shape[1], TILE)):
        other = i * TILE + ct.arange(TILE, dtype=ct.int32)
        other_first, _full, _full_end, other_behind = walk(other, starts, ends, left, right, halvings, tokens, BLOCK)
        other_length = (other_behind - other_first)[None, :]
        earlier = (other_length > length) | ((other_length == length) & (other[None, :] < block[:, None]))
        earlier = earlier & (other[None, :] < out.shape[1])
        rank = rank + ct.sum(ct.astype(earlier, ct.int32), 1)
    mine = block < out.shape[1]
    ct.scatter(out, (0, rank), block, mask=mine)
    ct.scatter(out, (1, rank), first, mask=mine)
    ct.scatter(out, (2, rank), full, mask=mine)
    ct.scatter(out, (3, rank), full_end, mask=mine)
    ct.scatter(out, (4, rank), behind, mask=mine)


@ct.kernel
def attention_plan(starts, ends, sees, seen, query_walks, key_walks, left, right, halvings, tokens, TILE: Const, BLOCK: Const):
    """starts, ends: [documents] int32, ascending and apart from each other; a document may be empty; sees, seen: [2, blocks * BLOCK]
    int32, the first key that each query sees and the one behind its last, and the same of the queries that see each key;
    query_walks, key_walks: [5, blocks] int32, see above; halvings: enough to search all documents; tokens: how many there are.
    Grid (TILEs of tokens, 3)."""
    if ct.bid(1) == TOKENS:
        t = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
        write_intervals(t, starts, ends, sees, left, right, halvings, tokens)
        write_intervals(t, starts, ends, seen, right, left, halvings, tokens)
    else:
        if ct.bid(0) * TILE < query_walks.shape[1]:
            if ct.bid(1) == QUERIES:
                write_walks(starts, ends, query_walks, left, right, halvings, tokens, TILE, BLOCK)
            else:
                write_walks(starts, ends, key_walks, right, left, halvings, tokens, TILE, BLOCK)


def variants():
    documents, table = Array("int32", (None,), aligned=False), Array("int32", (None, None), aligned=False)
    arrays = {"starts": documents, "ends": documents, "sees": table, "seen": table, "query_walks": table, "key_walks": table}
    yield Variant(attention_plan, {**arrays, "left": INT, "right": INT, "halvings": INT, "tokens": INT, "TILE": TILE, "BLOCK": BLOCK})
