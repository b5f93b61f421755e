"""Dynamic tanh against float64."""

from functools import partial

import torch

from tests.ops.common import BF16, FLOATS, FP16, FP32, assert_rows_close, backward_twice, exact, leaf, randn, unchanged
from tests.ops.generated import generated
from tests.ops.suite import Case, of_suite


def dyt_exact(x, alpha, gamma, beta):
    y = torch.tanh(alpha * x) * gamma
    return y if beta is None else y + beta


def check_dyt(ops, device, dtype, shape, *, beta=True, parameter_dtype=None, scale=1.0, alpha=0.5, view=lambda x: x):
    """scale: of x: small values have a tanh that a difference of two numbers near 1 cannot hold."""
    parameter_dtype = parameter_dtype or dtype
    base = leaf(randn(*shape, dtype=FP32, device=device, scale=scale).to(dtype))
    x = view(base)
    a = leaf(torch.tensor([alpha], dtype=parameter_dtype, device=device))
    gamma = leaf(randn(x.shape[-1], dtype=parameter_dtype, device=device, seed=1) + 1)
    shift = leaf(randn(x.shape[-1], dtype=parameter_dtype, device=device, seed=2) * scale) if beta else None
    dy = randn(*x.shape, dtype=dtype, device=device, seed=3)
    leaves = [t for t in (base, a, gamma, shift) if t is not None]
    leaves64 = [exact(t) for t in leaves]
    untouched = unchanged(*leaves, dy)
    y = ops.dyt(x, a, gamma, shift)
    y64 = dyt_exact(view(leaves64[0]), *leaves64[1:3], leaves64[3] if beta else None)
    what = f"DyT {tuple(shape)}"
    assert_rows_close(y, y64, dtype, f"{what} y")
    y64.backward(dy.double().cpu())
    found = backward_twice(y, dy, leaves)
    assert_rows_close(found[0], leaves64[0].grad, dtype, f"{what} dx")
    # dalpha is one number, whose terms cancel: it is judged by the size of what is added up.
    terms = (leaves64[0].grad * leaves64[0].detach() / alpha).norm()
    error = (found[1].double().cpu() - leaves64[1].grad).abs().item()
    bound = {BF16: 4e-3, FP16: 6e-4, FP32: 1e-5}[parameter_dtype] * max(terms.item(), leaves64[1].grad.abs().item())
    assert error <= bound, f"{what} dalpha: {found[1].item()}, expected {leaves64[1].grad.item()} within {bound}"
    for name, tensor, wanted, gradient in zip(("dgamma", "dbeta"), leaves[2:], leaves64[2:], found[2:]):
        assert_rows_close(gradient, wanted.grad, tensor.dtype, f"{what} {name}")
    untouched()


SHAPES = ((3, 1024), (2, 3, 768), (5, 2112), (9, 64), (3, 77), (7, 1), (2, 1537), (13, 130), (0, 64))


def check_options(ops, device, dtype):
    check_dyt(ops, device, dtype, (3, 192), beta=False)
    for scale in (1e-3, 0.1, 30.0):
        check_dyt(ops, device, dtype, (3, 256), scale=scale)
    check_dyt(ops, device, dtype, (3, 256), alpha=-1.25)
    if dtype != FP32:
        check_dyt(ops, device, dtype, (3, 320), parameter_dtype=FP32)
        check_dyt(ops, device, dtype, (3, 33), parameter_dtype=FP32)
    check_dyt(ops, device, dtype, (128, 4), view=lambda x: x.t())
    check_dyt(ops, device, dtype, (4, 256), view=lambda x: x[:, :128].contiguous()[:, 1:])


def check_parameter_sums(ops, device):
    """More partial sums of dalpha than a block adds up at once, as long rows have."""
    partial, partial_alpha = (randn(*shape, dtype=FP32, device=device, seed=i) for i, shape in enumerate(((3, 128), (3000,))))
    parameters, dalpha = partial.new_empty(128), partial.new_empty(1)
    if ops.dyt_module.kernels_take(partial, partial_alpha):
        ops.dyt_module._sums_kernel(partial, partial_alpha, parameters, dalpha)
        assert_rows_close(parameters, exact(partial).sum(0), FP32, "the sums of columns")
        assert_rows_close(dalpha, exact(partial_alpha).sum(0, keepdim=True), FP32, "the sum of dalpha")


MUTANTS = (
    *generated("kernel_src/dyt.py", "whole", "dyt_backward dyt_forward gradients"),
    *generated("kernel_src/dyt.py", "many", "dyt_parameter_sums"),
    *generated("kernel_src/dyt.py", "small or long", "tanh"),
    *generated("shared/ops/dyt.py", "whole", "DyTFunction.backward DyTFunction.forward"),
    ("kernel_src/dyt.py", "dyt_backward", "whole * ROWS + group", "group", "whole"),
)
CHECKS = of_suite({
    "whole": lambda ops: check_dyt(ops, "cpu", BF16, (5, 768)),
    "steps": lambda ops: check_dyt(ops, "cpu", BF16, (9, 128)),
    "long": lambda ops: check_dyt(ops, "cpu", FP32, (3, 64)),
    "small": lambda ops: check_dyt(ops, "cpu", FP32, (3, 64), scale=1e-3),
    "many": lambda ops: check_parameter_sums(ops, "cpu"),
})


def all_cases(ops, device, dtypes=FLOATS):
    """(name, function) of every check in some dtypes."""
    for dtype in dtypes:
        for shape in SHAPES:
            yield f"{shape} {dtype}", partial(check_dyt, ops, device, dtype, shape)
        yield f"options {dtype}", partial(check_options, ops, device, dtype)
    yield "parameter sums", partial(check_parameter_sums, ops, device)


# ---------------------------------------------------------------- in the tests of every operation
OPERATIONS = {
    "dyt": Case(
        lambda ops, x, a, w, b: ops.dyt(x, a, w, b),
        aligned=lambda n: ((2, n), (1,), (n,), (n,)),
        slabs=((9, 40), (1,), (40,), (40,)),
        rows=1,
        sample=lambda ops, new: (ops.dyt, (new.normal(48, 1024), new.ones(1), new.normal(1024, seed=2), new.normal(1024, seed=3))),
    ),
}


def check_large(ops, device):
    check_dyt(ops, device, BF16, (2049, 4096))


OPERATORS = {
    "dyt_forward": lambda new: [(new(3, 1024), new(1), new(1024), new(1024, seed=1))],
    "dyt_backward": lambda new: [(new(3, 1024, seed=2), new(3, 1024), new(1), new(1024), need) for need in (True, False)],
}
