"""Rotary position embedding of neighbouring pairs, queries and keys in one launch (Su et al. 2021, arXiv 2104.09864, in Llama 4's form).

A pair (x_2j, x_2j+1) of a head is a complex number, turned by f_j = cos + i sin of its token; backward by the conjugate:

    y = x * f                dx = dy * conj(f)

A pair is one word: 32 bits in half precision, 64 in float32 and in the table, so everything is read and written 16 bytes at a time
and taken apart in registers. Loads of every second element are what makes Liger's kernel run at a quarter of an H200's bandwidth.

The table has a row for each token of the batch, or for each position of one sequence when all sequences share them.
"""

import cuda.tile as ct

from kernel_src.clamped_gate import join, split
from kernel_src.prebuild import Array, PerArchitecture, Variant

Const = ct.Constant[int]
BF16, FP16, FP32 = 0, 1, 2  # FORMAT: what the words of q and k hold


@ct.function
def split_float32(word):
    """The two halves of 64-bit words, the one at the lower address first, as float32."""
    low = ct.bitcast(ct.astype(word & 0xFFFFFFFF, ct.uint32), ct.float32)
    high = ct.bitcast(ct.astype((word >> 32) & 0xFFFFFFFF, ct.uint32), ct.float32)
    return low, high


@ct.function
def join_float32(low, high):
    """The inverse of `split_float32`."""
    a = ct.astype(ct.bitcast(low, ct.uint32), ct.uint64)
    b = ct.astype(ct.bitcast(high, ct.uint32), ct.uint64)
    return ct.bitcast(a | (b << 32), ct.int64)


@ct.function
def unpack(word, FORMAT: Const):
    if FORMAT == BF16:
        real, imaginary = split(word, ct.bfloat16)
    elif FORMAT == FP16:
        real, imaginary = split(word, ct.float16)
    else:
        real, imaginary = split_float32(word)
    return real, imaginary


@ct.function
def pack(real, imaginary, FORMAT: Const):
    if FORMAT == BF16:
        word = join(real, imaginary, ct.bfloat16)
    elif FORMAT == FP16:
        word = join(real, imaginary, ct.float16)
    else:
        word = join_float32(real, imaginary)
    return word


@ct.function
def turn_heads(x, y, token, group, cos, sin, HEADS: Const, PAIRS: Const, FORMAT: Const, BACKWARD: Const):
    """A group of a token's heads; heads and pairs past the last one are left out."""
    word = ct.load(x, index=(token, group, 0), shape=(1, HEADS, PAIRS), allow_tma=False, check_bounds=True)
    a, b = unpack(word, FORMAT)
    if BACKWARD:
        word = pack(a * cos + b * sin, b * cos - a * sin, FORMAT)
    else:
        word = pack(a * cos - b * sin, b * cos + a * sin, FORMAT)
    ct.store(y, index=(token, group, 0), tile=word, allow_tma=False, check_bounds=True)


@ct.kernel
def llama4_rope(
    q, k, q_out, k_out, table, Q_HEADS: Const, K_HEADS: Const, PAIRS: Const, FORMAT: Const, BACKWARD: Const
):
    """q, k, q_out, k_out: [tokens, heads, pairs] words, pairs <= PAIRS; table: [rows, pairs] words of (cos, sin) in float32, or fewer:
    pairs behind its last one stay as they are.

    Block (token, g) turns group g of Q_HEADS of q's heads and, while there are any, group g of K_HEADS of k's.
    """
    ct.grid_dependency_control_wait()
    token, group = ct.bid(0), ct.bid(1)
    angle = ct.load(table, index=(token % table.shape[0], 0), shape=(1, PAIRS), allow_tma=False, check_bounds=True)
    cos, sin = split_float32(ct.reshape(angle, (1, 1, PAIRS)))
    turned = (ct.arange(PAIRS, dtype=ct.int32) < table.shape[1])[None, None, :]
    cos, sin = ct.where(turned, cos, 1.0), ct.where(turned, sin, 0.0)
    if group < ct.cdiv(q.shape[1], Q_HEADS):
        turn_heads(q, q_out, token, group, cos, sin, Q_HEADS, PAIRS, FORMAT, BACKWARD)
    if group < ct.cdiv(k.shape[1], K_HEADS):
        turn_heads(k, k_out, token, group, cos, sin, K_HEADS, PAIRS, FORMAT, BACKWARD)


# Heads of q and of k that one block turns.
GROUP = (8, 8)
WIDEST = 128  # pairs of the longest head


def variants():
    for backward in (0, 1):
        for format, word in ((BF16, "int32"), (FP16, "int32"), (FP32, "int64")):
            # Heads of 128, Llama 4's and ERNIE's, and GLM's, of which a part is turned; others: Llama 4's images have 44 pairs.
            for pairs in (64, WIDEST):
                exact = pairs == 64
                if exact and format == FP32:
                    continue
                x = Array(word, (None, None, pairs if exact else None), aligned=exact)
                table = Array("int64", (None, None), aligned=exact)
                constants = {"Q_HEADS": GROUP[0], "K_HEADS": GROUP[1], "PAIRS": pairs, "FORMAT": format, "BACKWARD": backward}
                hints = {"occupancy": PerArchitecture(8, "sm_90", 12)} if exact else {}
                yield Variant(llama4_rope, {**dict.fromkeys(("q", "k", "q_out", "k_out"), x), "table": table, **constants}, hints=hints)
