"""Gradients of the loss, multiplied in place by what reaches the loss."""

import torch

from tests.ops.common import CPU, FP32, errors_in, leaf, never_refused, on_cpu, randn
from tests.ops.generated import generated
from tests.ops.linear_cross_entropy import check_linear_cross_entropy


def check_factor_at_an_odd_address(ops):
    """The incoming gradient of the second of two stacked losses lies after that of the first."""
    hidden, weight, target = leaf(randn(3, 16, dtype=FP32, device=CPU)), randn(32, 16, dtype=FP32, device=CPU, seed=1), torch.arange(3)
    stacked = torch.stack([ops.linear_cross_entropy(hidden, weight, target, ignore_index=ignored) for ignored in (0, 1)])
    factors = torch.tensor([0.5, -2.0])
    (found,) = torch.autograd.grad(stacked, hidden, factors)
    losses = [torch.nn.functional.cross_entropy(hidden @ weight.t(), target, ignore_index=ignored) for ignored in (0, 1)]
    torch.testing.assert_close(found, torch.autograd.grad(torch.stack(losses), hidden, factors)[0])


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "scale": on_cpu(check_linear_cross_entropy, FP32, 5, 32, 1100, upstream=0.25),
    "scale_at_an_odd_address": never_refused(check_factor_at_an_odd_address),
    "scale_odd": on_cpu(check_linear_cross_entropy, FP32, 5, 31, 1101, upstream=0.25),
}
MUTANTS = [
    *generated("kernel_src/scale.py", "scale", "scale_in_place"),
    *generated("shared/ops/linear_head.py", "scale_at_an_odd_address", "multiply"),
    *errors_in("kernel_src/scale.py", "scale", "scale_in_place", ("f != 1.0", "f == 1.0"), ("ct.num_blocks(0)", "2 * ct.num_blocks(0)")),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
GPU_TESTS = {"scale": ("test_linear_cross_entropy",)}
