"""Halves of a chunk, and quarters of a state, for kernels of the gated delta rule's backward pass whose registers do not hold whole ones;
kernel_src/gated_delta_backward.py has the formulas."""

import cuda.tile as ct

from kernel_src.gated_delta import CHUNK, F32, WIDTH, last_of, numbers_of, put_token_rows, rows_of, state_of, token_rows, tokens_of, zeros

Const = ct.Constant[int]
PART = 32  # rows of a chunk, or columns of its keys, that a kernel has sums of
HALVES, QUARTERS = CHUNK // PART, WIDTH // PART


@ct.function
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


@ct.function
def norm_backward(dy, y, rstd):
    return rstd[:, None] * (dy - y * ct.sum(dy * y, 1)[:, None])


@ct.function
def put_queries_of_half(queries, keys, gamma, states, news, dout, table, q_rstd, dq, dgamma, scale, chunk, key_head, half, K: Const,
                        V: Const, BV: Const, NORM: Const):
    """Writes half a chunk's rows of dq, and their part of dgamma."""
    place, rows, row = chunk * HALVES + half, half * PART + ct.arange(PART, dtype=ct.int32), ct.arange(64, dtype=ct.int32)
    tokens, group, of_queries = tokens_of_half(table, chunk, rows), dout.shape[1] // keys.shape[1], zeros(PART, K)
    for i in range(group):
        head = key_head * group + i
        inner, found = zeros(PART, 64), zeros(PART, K)
        for part in range(V // BV):
            grad = token_rows(dout, tokens, head, part * BV, BV)
            inner = ct.mma(grad, ct.transpose(rows_of(news, chunk, head, part, BV)), inner)
            found = ct.mma(grad, ct.transpose(state_of(states, chunk, head, part, K, BV)), found)
        g, own = numbers_of(gamma, head, chunk), numbers_of_half(gamma, head, place)
        decay = ct.exp(ct.where(rows[:, None] >= row[None, :], own[:, None] - g[None, :], -float("inf")))
        inner = ct.astype(scale * decay * inner, keys.dtype)
        found = ct.mma(inner, rows_of(keys, chunk, key_head, 0, K), (scale * ct.exp(own))[:, None] * found)
        q = ct.astype(rows_of_half(queries, place, key_head, 0, K), F32)
        put_numbers_of_half(dgamma, head, place, ct.sum(found * q, 1))
        of_queries = of_queries + found
    if NORM:
        q = ct.astype(rows_of_half(queries, place, key_head, 0, K), F32)
        of_queries = norm_backward(of_queries, q, numbers_of_half(q_rstd, key_head, place))
    put_token_rows(dq, tokens, key_head, 0, of_queries, K)


@ct.function
def put_keys_of_half(queries, keys, gamma, states, dstates, news, dout, table, dgamma, partial, scale, chunk, key_head, half, K: Const,
                     V: Const, BV: Const):
    """Writes half a chunk's rows of the part of dk that is known, their part of dgamma, and what the chunk carries of it. Recomputes
    G's columns as rows of its transpose, so that no block holds all of G."""
    place, rows, row = chunk * HALVES + half, half * PART + ct.arange(PART, dtype=ct.int32), ct.arange(64, dtype=ct.int32)
    tokens, group, of_keys = tokens_of(table, chunk), dout.shape[1] // keys.shape[1], zeros(PART, K)
    for i in range(group):
        head = key_head * group + i
        inner, found, carried = zeros(PART, 64), zeros(PART, K), ct.zeros((), dtype=F32)
        for part in range(V // BV):
            new, dstate = rows_of_half(news, place, head, part, BV), state_of(dstates, chunk, head, part, K, BV)
            inner = ct.mma(new, ct.transpose(token_rows(dout, tokens, head, part * BV, BV)), inner)
            found = ct.mma(new, ct.transpose(dstate), found)
            if half == 0:
                carried = carried + ct.sum(ct.astype(state_of(states, chunk, head, part, K, BV), F32) * ct.astype(dstate, F32))
        g, own, last = numbers_of(gamma, head, chunk), numbers_of_half(gamma, head, place), last_of(gamma, head, chunk)
        k = ct.astype(rows_of_half(keys, place, key_head, 0, K), F32)
        found = ct.exp(last - own)[:, None] * found
        carried = ct.exp(last) * carried + ct.sum(found * k)
        decay = ct.exp(ct.where(rows[:, None] <= row[None, :], g[None, :] - own[:, None], -float("inf")))
        found = ct.mma(ct.astype(scale * decay * inner, keys.dtype), rows_of(queries, chunk, key_head, 0, K), found)
        put_numbers_of_half(dgamma, dout.shape[1] + head, place, -ct.sum(found * k, 1))
        put_numbers_of_half(dgamma, 2 * dout.shape[1] + head, place, ct.where(ct.arange(PART, dtype=ct.int32) == 0, carried, 0.0))
        of_keys = of_keys + found
    ct.store(partial, index=(place, key_head, 0), tile=ct.reshape(of_keys, (PART, 1, K)))
