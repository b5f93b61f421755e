"""x *= factor in place, free of charge where factor is 1.

A loss computes its gradients in the forward pass and learns what they are multiplied by (1, or one over the accumulation
steps, or the loss scale) only in the backward pass, as a number on the device. Reading it on the host would wait for the GPU.
"""

import cuda.tile as ct

from kernel_src.prebuild import FLOATS, Array, Variant

Const = ct.Constant[int]


@ct.kernel
def scale_in_place(x, factor, TILE: Const):
    """x: flat; factor: [1] fp32. Each block walks over every grid-th tile."""
    f = ct.gather(factor, 0, check_bounds=False)
    if f != 1.0:
        for i in range(ct.bid(0), ct.cdiv(x.shape[0], TILE), ct.num_blocks(0)):
            o = i * TILE + ct.arange(TILE, dtype=ct.int32)
            v = ct.astype(ct.gather(x, o, check_bounds=True, padding_value=0), ct.float32)
            ct.scatter(x, o, ct.astype(v * f, x.dtype), check_bounds=True)


def variants():
    factor = Array("float32", (None,))
    for dtype in FLOATS:
        yield Variant(scale_in_place, {"x": Array(dtype, (None,), divisible=(16,)), "factor": factor, "TILE": 2048})
        yield Variant(scale_in_place, {"x": Array(dtype, (None,), aligned=False), "factor": factor, "TILE": 2048})
