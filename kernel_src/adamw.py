"""A step of AdamW (arXiv 1711.05101), in place, in float32 inside:

    exp_avg = beta1 * exp_avg + rest1 * grad          exp_avg_sq = beta2 * exp_avg_sq + rest2 * grad^2
    param = keep * param - step_size * exp_avg / (sqrt(exp_avg_sq) * root + eps)

with rest = 1 - beta, keep = 1 - lr * weight_decay, step_size = lr / (1 - beta1^step) and root = 1 / sqrt(1 - beta2^step), which are
computed in double precision: by the host, or, for steps in a CUDA graph (`capturable`), which are counted on the device, by PyTorch there.

Four arrays are read and three written, with no reuse, so the simplest kernel is the fastest: an H200 moves the bytes of 2^28 bf16
elements at 97 % of copy's rate with pieces of 512 (1024: 96 %, 2048: 83 %, by tile loads instead of gathers: 94 %, as a loop of
persistent blocks: 90 %), those of 2^27 fp32 elements at 100 %. Between two launches it idles for some microseconds, so that a launch takes
four parameters where there are so many: the 310 of Qwen3-0.6B (bf16) are stepped in 2.19 ms instead of 2.71, at 89 % of copy's rate.
"""

import cuda.tile as ct

from kernel_src.elements import read, read_padded, write, write_within
from kernel_src.prebuild import FLOAT, FLOATS, Array, Variant

Const = ct.Constant[int]


@ct.function
def stepped(p, g, m, v, keep, beta1, rest1, beta2, rest2, step_size, root, eps):
    """(param, exp_avg, exp_avg_sq) after the step; all in float32."""
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    return keep * p - step_size * m / (ct.sqrt(v) * root + eps), m, v


@ct.function
def step_piece(piece, param, grad, exp_avg, exp_avg_sq, keep, beta1, rest1, beta2, rest2, step_size, root, eps, TILE: Const):
    """All [pieces, TILE], of which a block takes one."""
    at = piece, ct.arange(TILE, dtype=ct.int32)
    p, g, m, v = read(param, at), read(grad, at), read(exp_avg, at), read(exp_avg_sq, at)
    p, m, v = stepped(p, g, m, v, keep, beta1, rest1, beta2, rest2, step_size, root, eps)
    write(param, at, p)
    write(exp_avg, at, m)
    write(exp_avg_sq, at, v)


@ct.function
def step_any(param, grad, exp_avg, exp_avg_sq, keep, beta1, rest1, beta2, rest2, step_size, root, eps, TILE: Const):
    """Any number of elements at any address."""
    at = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    p, g, m, v = read_padded(param, at), read_padded(grad, at), read_padded(exp_avg, at), read_padded(exp_avg_sq, at)
    p, m, v = stepped(p, g, m, v, keep, beta1, rest1, beta2, rest2, step_size, root, eps)
    write_within(param, at, p)
    write_within(exp_avg, at, m)
    write_within(exp_avg_sq, at, v)


@ct.function
def of_this_step(numbers):
    """(keep, step_size, root) from an array of them."""
    return ct.gather(numbers, 0, check_bounds=False), ct.gather(numbers, 1, check_bounds=False), ct.gather(numbers, 2, check_bounds=False)


@ct.kernel
def adamw(param, grad, exp_avg, exp_avg_sq, keep, beta1, rest1, beta2, rest2, step_size, root, eps, TILE: Const):
    step_piece(ct.bid(0), param, grad, exp_avg, exp_avg_sq, keep, beta1, rest1, beta2, rest2, step_size, root, eps, TILE)


@ct.kernel
def adamw_any(param, grad, exp_avg, exp_avg_sq, keep, beta1, rest1, beta2, rest2, step_size, root, eps, TILE: Const):
    step_any(param, grad, exp_avg, exp_avg_sq, keep, beta1, rest1, beta2, rest2, step_size, root, eps, TILE)


@ct.kernel
def adamw_capturable(param, grad, exp_avg, exp_avg_sq, numbers, beta1, rest1, beta2, rest2, eps, TILE: Const):
    """numbers: keep, step_size and root of this step, fp32, and one that is not read."""
    keep, step_size, root = of_this_step(numbers)
    step_piece(ct.bid(0), param, grad, exp_avg, exp_avg_sq, keep, beta1, rest1, beta2, rest2, step_size, root, eps, TILE)


@ct.kernel
def adamw_capturable_any(param, grad, exp_avg, exp_avg_sq, numbers, beta1, rest1, beta2, rest2, eps, TILE: Const):
    keep, step_size, root = of_this_step(numbers)
    step_any(param, grad, exp_avg, exp_avg_sq, keep, beta1, rest1, beta2, rest2, step_size, root, eps, TILE)


@ct.kernel
def adamw_of_four(
    p0, g0, m0, v0, p1, g1, m1, v1, p2, g2, m2, v2, p3, g3, m3, v3,
    keep, beta1, rest1, beta2, rest2, step_size, root, eps, TILE: Const,
):  # fmt: skip
    """Steps four parameters with their gradients and averages, all [pieces, TILE]: the pieces of one after those of another."""
    end0 = p0.shape[0]
    end1 = end0 + p1.shape[0]
    end2 = end1 + p2.shape[0]
    piece = ct.bid(0)
    if piece < end0:
        step_piece(piece, p0, g0, m0, v0, keep, beta1, rest1, beta2, rest2, step_size, root, eps, TILE)
    elif piece < end1:
        step_piece(piece - end0, p1, g1, m1, v1, keep, beta1, rest1, beta2, rest2, step_size, root, eps, TILE)
    elif piece < end2:
        step_piece(piece - end1, p2, g2, m2, v2, keep, beta1, rest1, beta2, rest2, step_size, root, eps, TILE)
    else:
        step_piece(piece - end2, p3, g3, m3, v3, keep, beta1, rest1, beta2, rest2, step_size, root, eps, TILE)


@ct.kernel
def adamw_capturable_of_four(
    p0, g0, m0, v0, numbers0, p1, g1, m1, v1, numbers1, p2, g2, m2, v2, numbers2, p3, g3, m3, v3, numbers3,
    beta1, rest1, beta2, rest2, eps, TILE: Const,
):  # fmt: skip
    """Steps four parameters, all [pieces, TILE], each with numbers of its own."""
    end0 = p0.shape[0]
    end1 = end0 + p1.shape[0]
    end2 = end1 + p2.shape[0]
    piece = ct.bid(0)
    if piece < end0:
        keep, step_size, root = of_this_step(numbers0)
        step_piece(piece, p0, g0, m0, v0, keep, beta1, rest1, beta2, rest2, step_size, root, eps, TILE)
    elif piece < end1:
        keep, step_size, root = of_this_step(numbers1)
        step_piece(piece - end0, p1, g1, m1, v1, keep, beta1, rest1, beta2, rest2, step_size, root, eps, TILE)
    elif piece < end2:
        keep, step_size, root = of_this_step(numbers2)
        step_piece(piece - end1, p2, g2, m2, v2, keep, beta1, rest1, beta2, rest2, step_size, root, eps, TILE)
    else:
        keep, step_size, root = of_this_step(numbers3)
        step_piece(piece - end2, p3, g3, m3, v3, keep, beta1, rest1, beta2, rest2, step_size, root, eps, TILE)


ARRAYS = ("param", "grad", "exp_avg", "exp_avg_sq")
NUMBERS = ("keep", "beta1", "rest1", "beta2", "rest2", "step_size", "root", "eps")
FIXED = ("beta1", "rest1", "beta2", "rest2", "eps")  # what is the same at every step


def variants():
    by_host, on_device = dict.fromkeys(NUMBERS, FLOAT), dict.fromkeys(FIXED, FLOAT)
    step = {"numbers": Array("float32", (4,))}
    for dtype in FLOATS:
        pieces, flat = Array(dtype, (None, 512)), Array(dtype, (None,), aligned=False)
        for kernels, more, numbers in (
            ((adamw, adamw_of_four, adamw_any), {}, by_host),
            ((adamw_capturable, adamw_capturable_of_four, adamw_capturable_any), step, on_device),
        ):
            one, four, any_size = kernels
            yield Variant(one, {**dict.fromkeys(ARRAYS, pieces), **more, **numbers, "TILE": 512})
            each = {**dict.fromkeys("pgmv", pieces), **more}
            yield Variant(four, {**{f"{name}{i}": array for i in range(4) for name, array in each.items()}, **numbers, "TILE": 512})
            yield Variant(any_size, {**dict.fromkeys(ARRAYS, flat), **more, **numbers, "TILE": 1024})
