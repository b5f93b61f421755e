"""The gated delta rule of Qwen3.5 and its kin (arXiv 2412.06464), forward, in chunks of 64 tokens. For one value head, with a state
S [K, V]:

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) k_t^T S_{t-1}))^T          o_t = scale q_t^T S_t

In a chunk, with gamma the inclusive cumulative sum of g, D_ij = exp(gamma_i - gamma_j) for i >= j (else 0), e = exp(gamma) and
r = exp(gamma_C - gamma):

    A = (I + L' o D o (beta K K^T))^-1      W = A (beta e o K)      U = A (beta o V)      P = scale D o (Q K^T)
    N = U - W S          O = scale (e o Q) S + P N          S <- e_C S + (r o K)^T N

where L' is the strictly lower triangle. A, W, U and P need no state, so all chunks make them at once (`delta_invert`, `delta_prepare`);
only N and S are in sequence (`delta_walk`), and columns of V do not depend on each other.

Chunks start with their documents. `delta_place_keys` and `delta_place_values` copy q, k and v to where they lie then, q and k with an L2
norm, so all the other loads are whole aligned tiles. Rows past a document's end are zeros with beta 0 and g 0, which change no state.

Of keys with an L2 norm of 1 and beta up to 2, no number of (I + M)^-1 is above 2. It is made of diagonal blocks of 2 then, which are merged
to 4, 8, 16, 32 and 64 by products of fp16. Of other keys it is made of 16 x 16 blocks in fp32 (M^16 = 0: three squarings), merged to 32 and
64 in TF32. Powers of M grow: where the cosines of keys are 0.8, squaring the whole chunk has a relative error of 84 in fp32.
"""

import cuda.tile as ct

from kernel_src.prebuild import FLOAT, INT, Array, Params, PerArchitecture, Variant

Const = ct.Constant[int]
F32 = ct.float32
CHUNK = 64


# ---------------------------------------------------------------- tiles of a chunk
@ct.function
def zeros(M: Const, N: Const):
    return ct.zeros((M, N), dtype=F32)


@ct.function
def rows_of(array, chunk, head, part, WIDTH: Const):
    """[64, WIDTH]: the rows of a chunk in an array [chunks * 64, heads, parts * WIDTH]."""
    return ct.reshape(ct.load(array, index=(chunk, head, part), shape=(64, 1, WIDTH)), (64, WIDTH))


@ct.function
def put_rows(array, chunk, head, part, tile, WIDTH: Const):
    ct.store(array, index=(chunk, head, part), tile=ct.reshape(ct.astype(tile, array.dtype), (64, 1, WIDTH)))


@ct.function
def numbers_of(array, head, chunk):
    """[64]: the numbers of a chunk in an array [heads, chunks * 64]."""
    return ct.reshape(ct.load(array, index=(head, chunk), shape=(1, 64)), (64,))


@ct.function
def put_numbers(array, head, chunk, tile):
    ct.store(array, index=(head, chunk), tile=ct.reshape(ct.astype(tile, array.dtype), (1, 64)))


@ct.function
def last_of(gamma, head, chunk):
    """The logarithm of a chunk's whole decay."""
    return ct.gather(gamma, (head, chunk * 64 + 63), check_bounds=False)


@ct.function
def state_of(states, i, head, part, K: Const, BV: Const):
    return ct.reshape(ct.load(states, index=(i, head, 0, part), shape=(1, 1, K, BV)), (K, BV))


@ct.function
def put_state(states, i, head, part, tile, K: Const, BV: Const):
    ct.store(states, index=(i, head, 0, part), tile=ct.reshape(ct.astype(tile, states.dtype), (1, 1, K, BV)))


@ct.function
def tokens_of(table, chunk):
    """[64]: the token of each row of a chunk, -1 past its document's end. table: [2, chunks], first token and number of tokens."""
    row = ct.arange(64, dtype=ct.int32)
    first, count = ct.gather(table, (0, chunk), check_bounds=False), ct.gather(table, (1, chunk), check_bounds=False)
    return ct.where(row < count, first + row, -1)


@ct.function
def holds_tokens(table, chunk):
    """Whether a chunk holds any token: how many chunks the documents need is known to the device alone, and the last ones may be empty."""
    return ct.gather(table, (1, chunk), check_bounds=False) > 0


@ct.function
def token_rows(array, tokens, head, start, WIDTH: Const):
    """[64, WIDTH]: rows of an array [tokens, heads, columns] from column `start` on; zeros for a token of -1."""
    column = start + ct.arange(WIDTH, dtype=ct.int32)[None, :]
    found = ct.gather(array, (ct.maximum(tokens, 0)[:, None], head, column), check_bounds=False)
    return ct.where(tokens[:, None] >= 0, found, 0)


@ct.function
def put_token_rows(array, tokens, head, start, tile, WIDTH: Const):
    """Writes rows of tokens; a token of -1 is skipped."""
    column = start + ct.arange(WIDTH, dtype=ct.int32)[None, :]
    ct.scatter(array, (tokens[:, None], head, column), ct.astype(tile, array.dtype), mask=tokens[:, None] >= 0, check_bounds=False)


@ct.function
def decay_of(g):
    """[64, 64]: D. The exponents are masked before exp: above the diagonal they overflow."""
    rows, columns = ct.arange(64, dtype=ct.int32)[:, None], ct.arange(64, dtype=ct.int32)[None, :]
    return ct.exp(ct.where(rows >= columns, g[:, None] - g[None, :], -float("inf")))


@ct.function
def strictly_lower(m):
    rows, columns = ct.arange(64, dtype=ct.int32)[:, None], ct.arange(64, dtype=ct.int32)[None, :]
    return ct.where(rows > columns, m, 0.0)


# ---------------------------------------------------------------- the inverse of a triangle
@ct.function
def square_of(m, i: Const, j: Const, SIZE: Const):
    return ct.extract(m, index=(i, j), shape=(SIZE, SIZE))


@ct.function
def one_of(stack, i: Const):
    return ct.reshape(ct.extract(stack, index=(i, 0, 0), shape=(1, 16, 16)), (16, 16))


@ct.function
def stacked(a, b):
    return ct.cat((a, b), 0)


@ct.function
def merged(a, m, b, SIZE: Const):
    """[[a, 0], [-b m a, b]]: the inverse of two triangles, inverted, with m below the diagonal."""
    zero = zeros(SIZE, SIZE)
    low = ct.mma(ct.astype(b, ct.tfloat32), ct.astype(m, ct.tfloat32), zero)
    low = ct.mma(ct.astype(low, ct.tfloat32), ct.astype(a, ct.tfloat32), zero)
    return ct.cat((ct.cat((a, zero), 1), ct.cat((-low, b), 1)), 0)


@ct.function
def inverse_of(m):
    """(I + m)^-1 of a strictly lower triangle [64, 64]."""
    shape = (1, 16, 16)
    first = stacked(ct.reshape(square_of(m, 0, 0, 16), shape), ct.reshape(square_of(m, 1, 1, 16), shape))
    second = stacked(ct.reshape(square_of(m, 2, 2, 16), shape), ct.reshape(square_of(m, 3, 3, 16), shape))
    n = -stacked(first, second)
    zero = ct.zeros((4, 16, 16), dtype=F32)
    rows, columns = ct.arange(16, dtype=ct.int32)[None, :, None], ct.arange(16, dtype=ct.int32)[None, None, :]
    x = ct.where(rows == columns, 1.0, zero) + n  # (I + n) (I + n^2) (I + n^4) (I + n^8)
    n = ct.mma(n, n, zero)
    x = ct.mma(n, x, x)
    n = ct.mma(n, n, zero)
    x = ct.mma(n, x, x)
    n = ct.mma(n, n, zero)
    x = ct.mma(n, x, x)
    top = merged(one_of(x, 0), square_of(m, 1, 0, 16), one_of(x, 1), 16)
    bottom = merged(one_of(x, 2), square_of(m, 3, 2, 16), one_of(x, 3), 16)
    return merged(top, square_of(m, 1, 0, 32), bottom, 32)


@ct.function
def bounded_inverse_of(m):
    """(I + m)^-1 of a strictly lower triangle [64, 64] whose inverse has no number above 65504, by products of fp16.

    Of two diagonal blocks a and b that are inverted, with m below a, [[a, 0], [-b m a, b]] is the inverse of both. The diagonal is left to
    the end, so that what is added to a product is not rounded.
    """
    rows, columns = ct.arange(64, dtype=ct.int32)[:, None], ct.arange(64, dtype=ct.int32)[None, :]
    x = ct.where(rows // 2 == columns // 2, -m, 0.0)
    for level in range(1, 6):  # blocks of 2, 4, 8, 16 and 32
        i, j = rows >> level, columns >> level
        below = ct.where((i == j + 1) & (i % 2 == 1), -m, 0.0)
        half = ct.astype(x, ct.float16)
        low = ct.mma(ct.astype(below, ct.float16), half, below)
        x = ct.mma(half, ct.astype(low, ct.float16), x + low)
    return ct.where(rows == columns, 1.0, x)


# ---------------------------------------------------------------- where tokens lie
@ct.kernel
def delta_place_keys(q, k, table, queries, keys, q_rstd, k_rstd, eps: float, K: Const, NORM: Const):
    """q, k: [tokens, key heads, K]; table: [2, chunks] int32; queries, keys: [chunks * 64, key heads, K]; q_rstd, k_rstd: [key heads,
    chunks * 64] fp32, 1 without NORM. Grid: chunks * key heads."""
    heads = q.shape[1]
    head, chunk = ct.bid(0) % heads, ct.bid(0) // heads
    if holds_tokens(table, chunk):
        tokens = tokens_of(table, chunk)
        x, y = ct.astype(token_rows(q, tokens, head, 0, K), F32), ct.astype(token_rows(k, tokens, head, 0, K), F32)
        if NORM:
            x_rstd, y_rstd = ct.rsqrt(ct.sum(x * x, 1) + eps), ct.rsqrt(ct.sum(y * y, 1) + eps)
            put_numbers(q_rstd, head, chunk, x_rstd)
            put_numbers(k_rstd, head, chunk, y_rstd)
            x, y = x * x_rstd[:, None], y * y_rstd[:, None]
        put_rows(queries, chunk, head, 0, x, K)
        put_rows(keys, chunk, head, 0, y, K)


@ct.kernel
def delta_place_values(v, g, beta, table, values, gamma, betas, V: Const):
    """v: [tokens, heads, V]; g, beta: [tokens, heads] fp32; values: [chunks * 64, heads, V]; gamma, betas: [heads, chunks * 64] fp32.
    Grid: chunks * heads."""
    heads = v.shape[1]
    head, chunk = ct.bid(0) % heads, ct.bid(0) // heads
    if holds_tokens(table, chunk):
        tokens = tokens_of(table, chunk)
        put_rows(values, chunk, head, 0, token_rows(v, tokens, head, 0, V), V)
        put_numbers(gamma, head, chunk, ct.cumsum(ct.astype(ct.gather(g, (tokens, head), padding_value=0), F32), 0))
        put_numbers(betas, head, chunk, ct.gather(beta, (tokens, head), padding_value=0))


# ---------------------------------------------------------------- the rule
@ct.kernel
def delta_invert(keys, gamma, betas, table, inverses, K: Const):
    """keys: [chunks * 64, key heads, K]; gamma, betas: [heads, chunks * 64] fp32; table: [2, chunks]; inverses, the A of each chunk:
    [chunks * 64, heads, 64]. Grid: chunks * heads."""
    heads = inverses.shape[1]
    head, chunk = ct.bid(0) % heads, ct.bid(0) // heads
    if holds_tokens(table, chunk):
        k = rows_of(keys, chunk, head // (heads // keys.shape[1]), 0, K)
        m = decay_of(numbers_of(gamma, head, chunk)) * numbers_of(betas, head, chunk)[:, None] * ct.mma(k, ct.transpose(k), zeros(64, 64))
        put_rows(inverses, chunk, head, 0, inverse_of(strictly_lower(m)), 64)


@ct.kernel
def delta_invert_bounded(keys, gamma, betas, table, inverses, K: Const):
    """Computes what `delta_invert` does, of keys with an L2 norm of 1: 78 us of an H200 instead of 153 for 8192 tokens of 32 heads."""
    heads = inverses.shape[1]
    head, chunk = ct.bid(0) % heads, ct.bid(0) // heads
    if holds_tokens(table, chunk):
        tile = ct.load(keys, index=(chunk, head // (heads // keys.shape[1]), 0), shape=(64, 1, K), allow_tma=False, check_bounds=False)
        k, row = ct.reshape(tile, (64, K)), chunk * 64 + ct.arange(64, dtype=ct.int32)
        decay, b = decay_of(ct.gather(gamma, (head, row), check_bounds=False)), ct.gather(betas, (head, row), check_bounds=False)
        m = strictly_lower(decay * b[:, None] * ct.mma(k, ct.transpose(k), zeros(64, 64)))
        tile = ct.reshape(ct.astype(bounded_inverse_of(m), inverses.dtype), (64, 1, 64))
        ct.store(inverses, index=(chunk, head, 0), tile=tile, allow_tma=False, check_bounds=False)


@ct.kernel
def delta_prepare(queries, keys, values, gamma, betas, table, inverses, w, u, p, scale: float, K: Const, V: Const):
    """queries: [chunks * 64, key heads, K]; values, u: [chunks * 64, heads, V]; w: [chunks * 64, heads, K]; p: [chunks * 64, heads, 64];
    the rest and the grid: as `delta_invert`. W's gates scale A, so that its product takes keys as they are.
    Scaling A for U too saves an H200 22 us of 120, but the errors grow where keys are alike."""
    heads = values.shape[1]
    head, chunk = ct.bid(0) % heads, ct.bid(0) // heads
    if holds_tokens(table, chunk):
        key_head = head // (heads // keys.shape[1])
        k, q = rows_of(keys, chunk, key_head, 0, K), rows_of(queries, chunk, key_head, 0, K)
        g, b = numbers_of(gamma, head, chunk), numbers_of(betas, head, chunk)
        put_rows(p, chunk, head, 0, scale * decay_of(g) * ct.mma(q, ct.transpose(k), zeros(64, 64)), 64)
        a = rows_of(inverses, chunk, head, 0, 64)
        scaled = ct.astype((b * ct.exp(g))[None, :] * ct.astype(a, F32), k.dtype)
        put_rows(w, chunk, head, 0, ct.mma(scaled, k, zeros(64, K)), K)
        weighted = ct.astype(b[:, None] * ct.astype(rows_of(values, chunk, head, 0, V), F32), k.dtype)
        put_rows(u, chunk, head, 0, ct.mma(a, weighted, zeros(64, V)), V)


@ct.kernel
def delta_walk(queries, keys, w, u, p, gamma, bounds, table, initial, out, final, scale: float, K: Const, BV: Const, CARRY: Const):
    """bounds: [2, documents] int32, the first chunk of each and the end of its chunks; table: [2, chunks]; initial, final: [documents,
    heads, K, V] fp32, read and written with CARRY; out: [tokens, heads, V]. Grid: documents * heads, columns of V / BV."""
    heads = out.shape[1]
    head, document, part = ct.bid(0) % heads, ct.bid(0) // heads, ct.bid(1)
    key_head = head // (heads // keys.shape[1])
    first, end = ct.gather(bounds, (0, document), check_bounds=False), ct.gather(bounds, (1, document), check_bounds=False)
    state = zeros(K, BV)
    if CARRY:
        state = state_of(initial, document, head, part, K, BV)
    for chunk in range(first, end):
        g, last = numbers_of(gamma, head, chunk), last_of(gamma, head, chunk)
        rounded = ct.astype(state, keys.dtype)
        new = ct.astype(rows_of(u, chunk, head, part, BV), F32) - ct.mma(rows_of(w, chunk, head, 0, K), rounded, zeros(64, BV))
        seen = (scale * ct.exp(g))[:, None] * ct.mma(rows_of(queries, chunk, key_head, 0, K), rounded, zeros(64, BV))
        seen = ct.mma(rows_of(p, chunk, head, 0, 64), ct.astype(new, keys.dtype), seen)
        put_token_rows(out, tokens_of(table, chunk), head, part * BV, seen, BV)
        kept = ct.astype(ct.exp(last - g)[:, None] * new, keys.dtype)
        state = ct.mma(ct.transpose(rows_of(keys, chunk, key_head, 0, K)), kept, state * ct.exp(last))
    if CARRY:
        put_state(final, document, head, part, state, K, BV)


@ct.kernel
def delta_step(q, k, v, g, beta, initial, out, final, tokens: int, scale: float, eps: float, K: Const, BV: Const, NORM: Const):
    """Token by token, for generating text. q, k: [batch * tokens, key heads, K]; v, out: [batch * tokens, heads, V]; g, beta: [batch *
    tokens, heads] fp32; initial, final: [batch, heads, K, V] fp32. Grid: batch * heads, columns of V / BV."""
    heads = v.shape[1]
    head, row, part = ct.bid(0) % heads, ct.bid(0) // heads, ct.bid(1)
    key_head = head // (heads // k.shape[1])
    of_keys, of_values = ct.arange(K, dtype=ct.int32), part * BV + ct.arange(BV, dtype=ct.int32)
    state = state_of(initial, row, head, part, K, BV)
    for i in range(tokens):
        t = row * tokens + i
        x = ct.astype(ct.gather(q, (t, key_head, of_keys), check_bounds=False), F32)
        y = ct.astype(ct.gather(k, (t, key_head, of_keys), check_bounds=False), F32)
        if NORM:
            x, y = x * ct.rsqrt(ct.sum(x * x) + eps), y * ct.rsqrt(ct.sum(y * y) + eps)
        state = state * ct.exp(ct.astype(ct.gather(g, (t, head), check_bounds=False), F32))
        found = ct.sum(y[:, None] * state, 0)
        value = ct.astype(ct.gather(v, (t, head, of_values), check_bounds=False), F32)
        delta = ct.astype(ct.gather(beta, (t, head), check_bounds=False), F32) * (value - found)
        state = state + y[:, None] * delta[None, :]
        ct.scatter(out, (t, head, of_values), ct.astype(scale * ct.sum(x[:, None] * state, 0), out.dtype), check_bounds=False)
    put_state(final, row, head, part, state, K, BV)


# ---------------------------------------------------------------- what is prebuilt
WIDTH = 128  # of keys and values, in every model of the kind
DTYPES = ("bfloat16",)  # fp16 and fp32 run in PyTorch
# Columns of V that a block of a walk holds, and where: the registers of Ampere and Ada hold 32. Elsewhere 32 are for few documents, 64 for
# more, and 128, which read keys, queries and w once, where 64 would be more blocks than multiprocessors. 8192 tokens with 32 heads took
# an H200 with 32, 64 and 128 columns in `delta_walk` + `delta_states` + `delta_reverse` 195 + 136 + 235, 206 + 198 + 267, 300 + 274 + 473
# us in one document, and 239 + 237 + 290, 122 + 136 + 160, 82 + 100 + 128 in four.
ALL: tuple[str, ...] = ()
WIDE = ("sm_90",)  # where 128 columns were measured
WALKS = ((32, ALL), (64, ("sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")), (WIDTH, WIDE))
NUMBERS = Array("float32", (None, None), divisible=(1, CHUNK))
# Two blocks an SM hide each other's loads.
TWO_BLOCKS = {"occupancy": PerArchitecture(1, "sm_90", 2), "num_worker_warps": 8}
THREE_BLOCKS = {"occupancy": PerArchitecture(1, "sm_90", 3), "num_worker_warps": 4}
FOUR_BLOCKS = {"occupancy": PerArchitecture(1, "sm_90", 4)}
GATES = Array("float32", (None, None), aligned=False)
TABLE = Array("int32", (2, None), aligned=False)
STATE = Array("float32", (None, None, WIDTH, WIDTH))


def chunk_rows(dtype: str, width: int) -> Array:
    """Rows in whole chunks."""
    return Array(dtype, (None, None, width), divisible=(CHUNK, 1, 1))


def token_arrays(dtype: str) -> Array:
    """Rows of tokens, as the caller has them."""
    return Array(dtype, (None, None, WIDTH))


def variants():
    for dtype in DTYPES:
        wide, narrow, given = chunk_rows(dtype, WIDTH), chunk_rows(dtype, CHUNK), token_arrays(dtype)
        for norm in (1, 0):
            placed: Params = {"q": given, "k": given, "table": TABLE, "queries": wide, "keys": wide, "q_rstd": NUMBERS, "k_rstd": NUMBERS}
            yield Variant(delta_place_keys, {**placed, "eps": FLOAT, "K": WIDTH, "NORM": norm}, hints=FOUR_BLOCKS)
            arrays: Params = {"q": given, "k": given, "v": given, "g": GATES, "beta": GATES}
            states: Params = {"initial": STATE, "out": given, "final": STATE, "tokens": INT, "scale": FLOAT, "eps": FLOAT}
            yield Variant(delta_step, {**arrays, **states, "K": WIDTH, "BV": 32, "NORM": norm})
        results: Params = {"table": TABLE, "values": wide, "gamma": NUMBERS, "betas": NUMBERS, "V": WIDTH}
        yield Variant(delta_place_values, {"v": given, "g": GATES, "beta": GATES, **results})
        gated: Params = {"gamma": NUMBERS, "betas": NUMBERS, "table": TABLE, "inverses": narrow}
        yield Variant(delta_invert, {"keys": wide, **gated, "K": WIDTH}, hints=TWO_BLOCKS)
        yield Variant(delta_invert_bounded, {"keys": wide, **gated, "K": WIDTH}, hints=THREE_BLOCKS)
        made: Params = {"w": wide, "u": wide, "p": narrow, "scale": FLOAT, "K": WIDTH, "V": WIDTH}
        yield Variant(delta_prepare, {"queries": wide, "keys": wide, "values": wide, **gated, **made}, hints=TWO_BLOCKS)
        for carry in (0, 1):
            parts: Params = {"queries": wide, "keys": wide, "w": wide, "u": wide, "p": narrow, "gamma": NUMBERS, "bounds": TABLE}
            parts |= {"table": TABLE}
            ends: Params = {"initial": STATE, "out": given, "final": STATE, "scale": FLOAT, "K": WIDTH}
            for columns, targets in WALKS:
                sizes: Params = {"BV": columns, "CARRY": carry}
                yield Variant(delta_walk, {**parts, **ends, **sizes}, hints={"num_worker_warps": 8}, targets=targets)
