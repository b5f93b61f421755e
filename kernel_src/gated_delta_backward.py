"""The gated delta rule's backward pass (kernel_src/gated_delta.py has the forward pass and its letters). Chunks go from last to first,
and dS enters each from the one after it:

    dN = P^T dO + r o (K dS)                    dS <- e_C dS + scale (e o Q)^T dO - W^T dN        (`delta_reverse`, in sequence)
    G = scale D o (dO N^T)                      dQ = scale e o (dO S^T) + G K                     (`delta_scores`)
    dK_1 = r o (N dS^T)                         dK = dK_1 + G^T Q                                 (`delta_scores`)
    dW = -dN S^T                                dU = dN                                           (`delta_inverse`, from here on)
    dkb = A^T dW, dvb = A^T dU                  dV = beta o dvb
    dA = dW (beta e o K)^T + dU (beta o V)^T    dM = -L' o (A^T dA A^T),  H = dM o D,  X = dM o M
    dK += beta e o dkb + beta o (H K) + H^T (beta o K)
    dbeta = rows of dvb o V + e o rows of dkb o K + rows of (H K) o K
    dgamma = rows of dQ o Q - rows of (dK_1 + G^T Q) o K + rows of dkb o (beta e o K) + rows of X - columns of X,
             and in the last row e_C <S, dS> + <dK_1, K>
    dg: the reverse cumulative sum of dgamma in the chunk

`delta_states` makes S and N again. The gradients of q and k are summed over the value heads of a key head in the block that makes them, and
take the L2 norm's backward there, dx = rstd (dy - y <dy, y>).

Where products take their operands from registers (mma.sync), whole sums of [64, 128] beside the operands spill. There `delta_scores` is
SPLIT, makes dq, and then dk, of half a chunk's rows at a time, and `delta_inverse` is two kernels: `delta_gates` has what needs whole
squares, `delta_keys` sums dk. No block reads what it wrote: on an H200 what a block had stored, gathered and added to was not the sum.
"""

import itertools

import cuda.tile as ct

from kernel_src.gated_delta import (
    CHUNK,
    DTYPES,
    F32,
    GATES,
    NUMBERS,
    STATE,
    TABLE,
    WALKS,
    WIDE,
    WIDTH,
    chunk_rows,
    decay_of,
    holds_tokens,
    last_of,
    numbers_of,
    put_numbers,
    put_rows,
    put_state,
    put_token_rows,
    rows_of,
    state_of,
    strictly_lower,
    token_arrays,
    token_rows,
    tokens_of,
    zeros,
)
from kernel_src.gated_delta_halves import (
    HALVES,
    PART,
    QUARTERS,
    columns_of_half,
    norm_backward,
    numbers_of_half,
    put_keys_of_half,
    put_queries_of_half,
    rows_of_half,
    rows_of_state,
    tokens_of_half,
)
from kernel_src.prebuild import FLOAT, UNMEASURED, Array, Params, Variant

Const = ct.Constant[int]


@ct.kernel
def delta_states(keys, w, u, gamma, bounds, initial, states, news, K: Const, BV: Const, CARRY: Const):
    """states: [chunks, heads, K, V], S at each chunk's start; news: [chunks * 64, heads, V], N. The rest and the grid: as `delta_walk`."""
    heads = u.shape[1]
    head, document, part = ct.bid(0) % heads, ct.bid(0) // heads, ct.bid(1)
    key_head = head // (heads // keys.shape[1])
    first, end = ct.gather(bounds, (0, document), check_bounds=False), ct.gather(bounds, (1, document), check_bounds=False)
    state = zeros(K, BV)
    if CARRY:
        state = state_of(initial, document, head, part, K, BV)
    for chunk in range(first, end):
        g, last = numbers_of(gamma, head, chunk), last_of(gamma, head, chunk)
        rounded = ct.astype(state, keys.dtype)
        put_state(states, chunk, head, part, rounded, K, BV)
        new = ct.astype(rows_of(u, chunk, head, part, BV), F32) - ct.mma(rows_of(w, chunk, head, 0, K), rounded, zeros(64, BV))
        put_rows(news, chunk, head, part, new, BV)
        kept = ct.astype(ct.exp(last - g)[:, None] * new, keys.dtype)
        state = ct.mma(ct.transpose(rows_of(keys, chunk, key_head, 0, K)), kept, state * ct.exp(last))


@ct.kernel
def delta_reverse(queries, keys, w, p, dout, gamma, bounds, table, dfinal, dstates, dnews, dinitial, scale: float, K: Const, BV: Const,
                  CARRY: Const):
    """dout: [tokens, heads, V]; dfinal, dinitial: [documents, heads, K, V] fp32, read and written with CARRY; dstates: [chunks, heads, K,
    V], the gradient of the state after each chunk; dnews: [chunks * 64, heads, V]. The rest and the grid: as `delta_walk`."""
    heads = dout.shape[1]
    head, document, part = ct.bid(0) % heads, ct.bid(0) // heads, ct.bid(1)
    key_head = head // (heads // keys.shape[1])
    first, end = ct.gather(bounds, (0, document), check_bounds=False), ct.gather(bounds, (1, document), check_bounds=False)
    dstate = zeros(K, BV)
    if CARRY:
        dstate = state_of(dfinal, document, head, part, K, BV)
    for i in range(end - first):
        chunk = end - 1 - i
        g, last = numbers_of(gamma, head, chunk), last_of(gamma, head, chunk)
        rounded = ct.astype(dstate, keys.dtype)
        put_state(dstates, chunk, head, part, rounded, K, BV)
        grad = token_rows(dout, tokens_of(table, chunk), head, part * BV, BV)
        dnew = ct.exp(last - g)[:, None] * ct.mma(rows_of(keys, chunk, key_head, 0, K), rounded, zeros(64, BV))
        dnew = ct.mma(ct.transpose(rows_of(p, chunk, head, 0, 64)), grad, dnew)
        put_rows(dnews, chunk, head, part, dnew, BV)
        weighted = ct.astype((scale * ct.exp(g))[:, None] * ct.astype(grad, F32), keys.dtype)
        dstate = ct.mma(ct.transpose(rows_of(queries, chunk, key_head, 0, K)), weighted, dstate * ct.exp(last))
        dstate = ct.mma(ct.transpose(-rows_of(w, chunk, head, 0, K)), ct.astype(dnew, keys.dtype), dstate)
    if CARRY:
        put_state(dinitial, document, head, part, dstate, K, BV)


# ---------------------------------------------------------------- queries and keys
@ct.kernel
def delta_scores(queries, keys, gamma, states, dstates, news, dout, table, q_rstd, dq, dgamma, partial, scale: float, K: Const, V: Const,
                 BV: Const, NORM: Const, SPLIT: Const):
    """Computes the gradients that flow to queries and keys through the scores and the states, BV columns of the values at a time.

    dq: [tokens, key heads, K]; dgamma: [heads, chunks * 64] fp32, the part of it that is known here, or with SPLIT three times the heads,
    its summands: of queries, of keys, and numbers whose sum is the last row's; partial: [chunks * 64, key heads, K] fp32, of dK.
    Grid: chunks * key heads.
    """
    key_heads = keys.shape[1]
    key_head, chunk, group = ct.bid(0) % key_heads, ct.bid(0) // key_heads, dout.shape[1] // key_heads
    if holds_tokens(table, chunk):
        if SPLIT:
            for half in range(HALVES):
                put_queries_of_half(queries, keys, gamma, states, news, dout, table, q_rstd, dq, dgamma, scale, chunk, key_head, half, K, V,
                                    BV, NORM)
            for half in range(HALVES):
                put_keys_of_half(queries, keys, gamma, states, dstates, news, dout, table, dgamma, partial, scale, chunk, key_head, half, K,
                                 V, BV)
        else:
            k, q = rows_of(keys, chunk, key_head, 0, K), rows_of(queries, chunk, key_head, 0, K)
            tokens, row = tokens_of(table, chunk), ct.arange(64, dtype=ct.int32)
            of_queries, of_keys = zeros(64, K), zeros(64, K)
            for i in range(group):
                head = key_head * group + i
                g, last = numbers_of(gamma, head, chunk), last_of(gamma, head, chunk)
                inner, found = zeros(64, 64), zeros(64, K)
                for part in range(V // BV):
                    grad = token_rows(dout, tokens, head, part * BV, BV)
                    inner = ct.mma(grad, ct.transpose(rows_of(news, chunk, head, part, BV)), inner)
                    found = ct.mma(grad, ct.transpose(state_of(states, chunk, head, part, K, BV)), found)
                inner = ct.astype(scale * decay_of(g) * inner, k.dtype)
                found = ct.mma(inner, k, (scale * ct.exp(g))[:, None] * found)
                dgam = ct.sum(found * ct.astype(q, F32), 1)
                of_queries = of_queries + found
                found, carried = zeros(64, K), ct.zeros((), dtype=F32)
                for part in range(V // BV):
                    dstate = state_of(dstates, chunk, head, part, K, BV)
                    found = ct.mma(rows_of(news, chunk, head, part, BV), ct.transpose(dstate), found)
                    carried = carried + ct.sum(ct.astype(state_of(states, chunk, head, part, K, BV), F32) * ct.astype(dstate, F32))
                found = ct.exp(last - g)[:, None] * found
                carried = ct.exp(last) * carried + ct.sum(found * ct.astype(k, F32))
                found = ct.mma(ct.transpose(inner), q, found)
                dgam = dgam - ct.sum(found * ct.astype(k, F32), 1) + ct.where(row == 63, carried, 0.0)
                put_numbers(dgamma, head, chunk, dgam)
                of_keys = of_keys + found
            put_rows(partial, chunk, key_head, 0, of_keys, K)
            if NORM:
                of_queries = norm_backward(of_queries, ct.astype(q, F32), numbers_of(q_rstd, key_head, chunk))
            put_token_rows(dq, tokens, key_head, 0, of_queries, K)


# ---------------------------------------------------------------- the inverse
@ct.function
def put_values(keys, values, inverse, dnew, dv, tokens, b, chunk, head, part, da, db, BV: Const):
    """Writes BV columns of dv, and returns the sums dA and dbeta with what these columns add to them."""
    v = ct.astype(rows_of(values, chunk, head, part, BV), F32)
    found = ct.mma(inverse, dnew, zeros(64, BV))
    put_token_rows(dv, tokens, head, part * BV, b[:, None] * found, BV)
    db = db + ct.sum(found * v, 1)
    return ct.mma(dnew, ct.transpose(ct.astype(b[:, None] * v, keys.dtype)), da), db


@ct.function
def of_inverse(da, inverse, g, dtype: Const):
    """dM o D. inverse: A^T."""
    da = ct.mma(inverse, ct.astype(da, dtype), zeros(64, 64))
    return -strictly_lower(ct.mma(ct.astype(da, dtype), inverse, zeros(64, 64))) * decay_of(g)


@ct.kernel
def delta_inverse(keys, values, gamma, betas, inverses, states, dnews, table, k_rstd, dgamma, partial, dk, dv, dbeta, dg, K: Const,
                  V: Const, BV: Const, NORM: Const):
    """Computes the gradients that flow to keys, values and gates through the inverse.

    dgamma, partial: the output of `delta_scores`; dk: [tokens, key heads, K]; dv: [tokens, heads, V]; dbeta, dg: [tokens, heads] fp32.
    Grid: chunks * key heads.
    """
    key_heads = keys.shape[1]
    key_head, chunk, group = ct.bid(0) % key_heads, ct.bid(0) // key_heads, values.shape[1] // key_heads
    if holds_tokens(table, chunk):
        k, tokens = rows_of(keys, chunk, key_head, 0, K), tokens_of(table, chunk)
        total = rows_of(partial, chunk, key_head, 0, K)
        for i in range(group):
            head = key_head * group + i
            g, b = numbers_of(gamma, head, chunk), numbers_of(betas, head, chunk)
            be = b * ct.exp(g)
            inverse = ct.transpose(rows_of(inverses, chunk, head, 0, 64))
            da, dweights, db = zeros(64, 64), zeros(64, K), ct.zeros((64,), dtype=F32)
            for part in range(V // BV):
                dnew = rows_of(dnews, chunk, head, part, BV)
                da, db = put_values(keys, values, inverse, dnew, dv, tokens, b, chunk, head, part, da, db, BV)
                dweights = ct.mma(dnew, ct.transpose(state_of(states, chunk, head, part, K, BV)), dweights)
            dweights = ct.astype(-dweights, k.dtype)
            da = ct.mma(dweights, ct.transpose(ct.astype(be[:, None] * ct.astype(k, F32), k.dtype)), da)
            found = ct.mma(inverse, dweights, zeros(64, K))
            along = ct.sum(found * ct.astype(k, F32), 1)
            db, dgam = db + ct.exp(g) * along, numbers_of(dgamma, head, chunk) + be * along
            total = total + be[:, None] * found
            dm = of_inverse(da, inverse, g, k.dtype)
            x = dm * b[:, None] * ct.mma(k, ct.transpose(k), zeros(64, 64))
            dgam = dgam + ct.sum(x, 1) - ct.sum(x, 0)
            h = ct.astype(dm, k.dtype)
            found = ct.mma(h, k, zeros(64, K))
            db = db + ct.sum(found * ct.astype(k, F32), 1)
            total = total + b[:, None] * found
            total = ct.mma(ct.transpose(h), ct.astype(b[:, None] * ct.astype(k, F32), k.dtype), total)
            ct.scatter(dbeta, (tokens, head), ct.astype(db, dbeta.dtype))
            ct.scatter(dg, (tokens, head), ct.astype(ct.cumsum(dgam, 0, reverse=True), dg.dtype))
        if NORM:
            total = norm_backward(total, ct.astype(k, F32), numbers_of(k_rstd, key_head, chunk))
        put_token_rows(dk, tokens, key_head, 0, total, K)


@ct.kernel
def delta_gates(keys, values, gamma, betas, inverses, states, dnews, table, dgamma, squares, dv, dbeta, dg, K: Const, V: Const, BV: Const):
    """Computes what `delta_inverse` does, but dk; dW a quarter of its columns at a time.

    dgamma: the output of `delta_scores` with SPLIT; squares: [chunks * 64, heads, 64], H, for `delta_keys`. Grid: chunks * heads.
    """
    heads = values.shape[1]
    head, chunk = ct.bid(0) % heads, ct.bid(0) // heads
    key_head = head // (heads // keys.shape[1])
    if holds_tokens(table, chunk):
        tokens, row = tokens_of(table, chunk), ct.arange(64, dtype=ct.int32)
        g, b = numbers_of(gamma, head, chunk), numbers_of(betas, head, chunk)
        be = b * ct.exp(g)
        inverse = ct.transpose(rows_of(inverses, chunk, head, 0, 64))
        da, db, along = zeros(64, 64), ct.zeros((64,), dtype=F32), ct.zeros((64,), dtype=F32)
        for part in range(V // BV):
            dnew = rows_of(dnews, chunk, head, part, BV)
            da, db = put_values(keys, values, inverse, dnew, dv, tokens, b, chunk, head, part, da, db, BV)
        for quarter in range(QUARTERS):
            dweights = zeros(64, PART)
            for part in range(V // BV):
                state = rows_of_state(states, chunk, head, quarter, part, BV)
                dweights = ct.mma(rows_of(dnews, chunk, head, part, BV), ct.transpose(state), dweights)
            k, dweights = ct.astype(rows_of(keys, chunk, key_head, quarter, PART), F32), ct.astype(-dweights, keys.dtype)
            da = ct.mma(dweights, ct.transpose(ct.astype(be[:, None] * k, keys.dtype)), da)
            along = along + ct.sum(ct.mma(inverse, dweights, zeros(64, PART)) * k, 1)
        carried = ct.sum(numbers_of(dgamma, 2 * heads + head, chunk))
        dgam = numbers_of(dgamma, head, chunk) + numbers_of(dgamma, heads + head, chunk) + ct.where(row == 63, carried, 0.0)
        db, dgam = db + ct.exp(g) * along, dgam + be * along
        dm = of_inverse(da, inverse, g, keys.dtype)
        h = ct.astype(dm, keys.dtype)
        put_rows(squares, chunk, head, 0, h, 64)
        for quarter in range(QUARTERS):
            k = rows_of(keys, chunk, key_head, quarter, PART)
            x = dm * b[:, None] * ct.mma(k, ct.transpose(k), zeros(64, 64))
            dgam = dgam + ct.sum(x, 1) - ct.sum(x, 0)
            db = db + ct.sum(ct.mma(h, k, zeros(64, PART)) * ct.astype(k, F32), 1)
        ct.scatter(dbeta, (tokens, head), ct.astype(db, dbeta.dtype))
        ct.scatter(dg, (tokens, head), ct.astype(ct.cumsum(dgam, 0, reverse=True), dg.dtype))


@ct.kernel
def delta_keys(keys, gamma, betas, inverses, states, dnews, squares, table, k_rstd, partial, dk, K: Const, V: Const, BV: Const,
               NORM: Const):
    """Computes the dk of `delta_inverse`, half a chunk's rows in each block; A^T dW as -(A^T dN) S^T, so that no block holds dW.

    squares: the output of `delta_gates`. Grid: chunks * 2 * key heads.
    """
    key_heads, group = keys.shape[1], dnews.shape[1] // keys.shape[1]
    key_head, place = ct.bid(0) % key_heads, ct.bid(0) // key_heads
    chunk, half = place // HALVES, place % HALVES
    if holds_tokens(table, chunk):
        total = rows_of_half(partial, place, key_head, 0, K)
        for i in range(group):
            head = key_head * group + i
            b, found = numbers_of_half(betas, head, place), zeros(PART, K)
            for part in range(V // BV):
                of_values = ct.mma(columns_of_half(inverses, chunk, head, half), rows_of(dnews, chunk, head, part, BV), zeros(PART, BV))
                state = state_of(states, chunk, head, part, K, BV)
                found = ct.mma(ct.astype(-of_values, keys.dtype), ct.transpose(state), found)
            total = total + (b * ct.exp(numbers_of_half(gamma, head, place)))[:, None] * found
            k = rows_of(keys, chunk, key_head, 0, K)
            total = ct.mma(ct.astype(b[:, None] * ct.astype(rows_of_half(squares, place, head, 0, 64), F32), keys.dtype), k, total)
            weighted = ct.astype(numbers_of(betas, head, chunk)[:, None] * ct.astype(k, F32), keys.dtype)
            total = ct.mma(columns_of_half(squares, chunk, head, half), weighted, total)
        if NORM:
            own = ct.astype(rows_of_half(keys, place, key_head, 0, K), F32)
            total = norm_backward(total, own, numbers_of_half(k_rstd, key_head, place))
        tokens = tokens_of_half(table, chunk, half * PART + ct.arange(PART, dtype=ct.int32))
        put_token_rows(dk, tokens, key_head, 0, total, K)


# ---------------------------------------------------------------- what is prebuilt
WALK_SPILLS = "24 bytes on sm_90, where four documents of 2048 tokens take 128 us with 128 columns, and 160 us without spills with 64"
WIDE_SPILLS = "112 bytes on sm_90, where 8192 tokens take 302 us with 128 columns a step, and 372 us without spills with 64"
# Columns of the values that a step of `delta_scores` and `delta_inverse` has: 8192 tokens took an H200 302 and 234 us with 128 of them, 372
# and 264 with 64. mma.sync takes its operands from registers: whole sums beside them spilled 430 to 1208 bytes a thread there.
TENSOR_MEMORY = ("sm_100", "sm_103", "sm_110")
MMA_SYNC = tuple(target for target in UNMEASURED if target not in TENSOR_MEMORY)
COLUMNS = ((WIDTH, 0, WIDE), (64, 0, TENSOR_MEMORY), (64, 1, MMA_SYNC))


def variants():
    for dtype in DTYPES:
        wide, narrow, given = chunk_rows(dtype, WIDTH), chunk_rows(dtype, CHUNK), token_arrays(dtype)
        rounded = Array(dtype, (None, None, WIDTH, WIDTH))
        for carry in (0, 1):
            for columns, targets in WALKS:
                ends: Params = {"K": WIDTH, "BV": columns, "CARRY": carry}
                parts: Params = {"keys": wide, "w": wide, "u": wide, "gamma": NUMBERS, "bounds": TABLE, "initial": STATE}
                found: Params = {"states": rounded, "news": wide}
                yield Variant(delta_states, {**parts, **found, **ends}, hints={"num_worker_warps": 8}, targets=targets)
                parts = {"queries": wide, "keys": wide, "w": wide, "p": narrow, "dout": given, "gamma": NUMBERS, "bounds": TABLE}
                found = {"table": TABLE, "dfinal": STATE, "dstates": rounded, "dnews": wide, "dinitial": STATE, "scale": FLOAT}
                spills = WALK_SPILLS if targets == WIDE and not carry else ""
                yield Variant(delta_reverse, {**parts, **found, **ends}, hints={"num_worker_warps": 8}, targets=targets, spills=spills)
        partial = chunk_rows("float32", WIDTH)
        chunked: Params = {"keys": wide, "values": wide, "gamma": NUMBERS, "betas": NUMBERS, "inverses": narrow, "states": rounded}
        for norm, (columns, split, targets) in itertools.product((1, 0), COLUMNS):
            sizes: Params = {"K": WIDTH, "V": WIDTH, "BV": columns, "NORM": norm}
            parts = {"queries": wide, "keys": wide, "gamma": NUMBERS, "states": rounded, "dstates": rounded, "news": wide, "dout": given}
            results: Params = {"table": TABLE, "q_rstd": NUMBERS, "dq": given, "dgamma": NUMBERS, "partial": partial, "scale": FLOAT}
            spills = WIDE_SPILLS if targets == WIDE else ""
            arguments = {**parts, **results, **sizes, "SPLIT": split}
            yield Variant(delta_scores, arguments, hints={"num_worker_warps": 8}, targets=targets, spills=spills)
            if split:
                parts = {name: array for name, array in chunked.items() if name != "values"} | {"dnews": wide, "squares": narrow}
                arguments = {**parts, "table": TABLE, "k_rstd": NUMBERS, "partial": partial, "dk": given, **sizes}
                yield Variant(delta_keys, arguments, hints={"num_worker_warps": 8}, targets=targets)
            else:
                made: Params = {"dnews": wide, "table": TABLE, "k_rstd": NUMBERS, "dgamma": NUMBERS, "partial": partial}
                arguments = {**chunked, **made, "dk": given, "dv": given, "dbeta": GATES, "dg": GATES, **sizes}
                yield Variant(delta_inverse, arguments, hints={"num_worker_warps": 8}, targets=targets)
        made = {"dnews": wide, "table": TABLE, "dgamma": NUMBERS, "squares": narrow, "dv": given, "dbeta": GATES, "dg": GATES}
        arguments = {**chunked, **made, "K": WIDTH, "V": WIDTH, "BV": 64}
        yield Variant(delta_gates, arguments, hints={"num_worker_warps": 8}, targets=MMA_SYNC)
