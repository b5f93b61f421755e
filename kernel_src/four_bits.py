"""The numbers of a weight that is kept in MXFP4: blocks of 32 codes of e2m1 times a power of two each, in bf16 and exact.

A code has a sign, two bits of exponent and one of mantissa. Where float32 has the last three of them, they are the code's size times
2^-126, those of the sizes 0 and 0.5 too, which are subnormal there. Two products by powers of two make the number of it, each of them
exact: no table is read. bf16 is the upper half of float32, so the two numbers of a byte are joined to one word, and what is written is a
word for each byte that is read: memory is what bounds it, 2.53 bytes a number.

A thread reads a block and its scale; the words go through shared memory, so that threads side by side write side by side. Bytes are read
as words, whose bytes lie in the same registers.
"""

import cuda.tile as ct

from kernel_src.prebuild import INT, Array, Params, Variant

Const = ct.Constant[int]
WORDS, PAIRS = 4, 16  # of a block: words and bytes of codes. The first number of two is in the lower four bits
TO_SIZE = 2.0**126
UPPER = 0xFFFF0000
LEAST = 0x00400000  # 2^-127 in float32, which is subnormal
NAN = 0x7FC00000


@ct.function
def power_of(scale):
    """2^(scale - 127), and NaN of 255."""
    return ct.bitcast(ct.where(scale == 255, NAN, ct.maximum(scale << 23, LEAST)), ct.float32)


@ct.function
def number(code, power):
    """The bits in float32 of a code's number, whose sign is at bit 31 and whose other bits are at 22 to 24."""
    return ct.bitcast(ct.bitcast(code, ct.float32) * TO_SIZE * power, ct.uint32)


@ct.kernel
def decode_mxfp4(codes, scales, out, first, width, step, TILE: Const):
    """codes: [blocks, 4] int32, 16 bytes each; scales: [blocks / 4] int32, four bytes each; out: [chosen, 16] int32, two numbers in bf16
    each, the first in the lower half. From the block `first` on, `width` blocks are chosen of every `step`. TILE blocks a block of
    threads."""
    chosen = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    block = first + chosen // width * step + chosen % width
    words = ct.gather(codes, (block[:, None], ct.arange(WORDS, dtype=ct.int32)[None, :]), check_bounds=True, padding_value=0)
    byte = ct.astype(ct.reshape(ct.pack_to_bytes(words), (TILE, PAIRS)), ct.uint32)
    four = ct.bitcast(ct.gather(scales, block // 4, check_bounds=True, padding_value=0), ct.uint32)
    power = power_of((four >> ct.astype(block % 4 * 8, ct.uint32)) & 255)[:, None]
    lower = number(((byte & 8) << 28) | ((byte & 7) << 22), power)
    upper = number(((byte & 128) << 24) | ((byte & 112) << 18), power)
    place = (chosen[:, None], ct.arange(PAIRS, dtype=ct.int32)[None, :])
    ct.scatter(out, place, ct.bitcast((lower >> 16) | (upper & UPPER), ct.int32), check_bounds=True)


# ---------------------------------------------------------------- what is prebuilt
TILES = ((128, 4), (256, 8))  # (blocks, warps) of a block of threads: each thread has one block of codes under way


def variants():
    codes, scales, out = Array("int32", (None, WORDS)), Array("int32", (None,), aligned=False), Array("int32", (None, PAIRS))
    for tile, warps in TILES:
        params: Params = {"codes": codes, "scales": scales, "out": out, "first": INT, "width": INT, "step": INT, "TILE": tile}
        yield Variant(decode_mxfp4, params, hints={"num_worker_warps": warps})
