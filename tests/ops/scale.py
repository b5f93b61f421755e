"""Gradients of the loss, multiplied in place by what reaches the loss."""

from tests.ops.common import FP32, errors_in, on_cpu
from tests.ops.linear_cross_entropy import check_linear_cross_entropy

# ---------------------------------------------------------------- planted errors
CHECKS = {
    "scale": on_cpu(check_linear_cross_entropy, FP32, 5, 32, 1100, upstream=0.25),
    "scale_odd": on_cpu(check_linear_cross_entropy, FP32, 5, 31, 1101, upstream=0.25),
}
MUTANTS = [
    *errors_in("kernel_src/scale.py", "scale", "scale_in_place",
         ("v * f", "v"),
         ("f != 1.0", "f == 1.0"),
         ("ct.num_blocks(0)", "2 * ct.num_blocks(0)"),
         ("i * TILE + ct", "ct"),
         ("x.dtype), check_bounds=True", "x.dtype), check_bounds=False", "scale_odd")),
]  # fmt: skip
