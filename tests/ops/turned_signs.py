"""Incoming gradients, and other tensors that a launch only reads, of which memory holds the numbers with the other sign: an address does
not tell. tests/cpu/test_alignment.py has every operation's arguments."""

import torch

from tests.ops.calls import calls
from tests.ops.common import CPU, FP32, randn
from tests.ops.suite import of_suite


def check_incoming_gradient(name):
    """Of an operation of the suite."""

    def check(ops):
        call, leaves = calls(ops, CPU, FP32)[name]
        result = call(*leaves)
        upstream = randn(*result.shape, dtype=FP32, device=CPU, seed=7)
        wanted = torch.autograd.grad(result, leaves, upstream, retain_graph=True)
        found = torch.autograd.grad(result, leaves, torch._neg_view(-upstream))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

    return check


def check_residual(ops):
    x, residual, weight = (randn(*shape, dtype=FP32, device=CPU, seed=i) for i, shape in enumerate(((3, 64), (3, 64), (64,))))
    wanted = ops.general_add_rms_norm(x, residual, weight)
    torch.testing.assert_close(ops.general_add_rms_norm(x, torch._neg_view(-residual), weight), wanted)


OPERATIONS = ("general_rms_norm", "layer_norm", "dyt", "poly_norm", "group_norm", "geglu", "neighborhood_attention")


def check_packed(ops):
    x = randn(3, 64, dtype=FP32, device=CPU).requires_grad_()
    upstream = randn(3, 32, dtype=FP32, device=CPU, seed=1)
    y = ops.swiglu_packed(x)
    (wanted,) = torch.autograd.grad(y, x, upstream, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(y, x, torch._neg_view(-upstream))[0], wanted)


def check_divergence(ops):
    """In fp16, whose gradient the backward pass computes."""
    x, y = (randn(3, 64, dtype=torch.float16, device=CPU, seed=i).log_softmax(-1) for i in range(2))
    loss = ops.jsd(x.requires_grad_(), y, reduction="sum")
    (wanted,) = torch.autograd.grad(loss, x, torch.tensor(2.0), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, x, torch._neg_view(torch.tensor(-2.0)))[0], wanted)


def check_divergence_of_a_transposed_student(ops):
    """PyTorch's operations give its gradient the student's strides, and the backward pass multiplies it."""
    x, y = (randn(64, 3, dtype=FP32, device=CPU, seed=i).log_softmax(0).t() for i in range(2))
    loss = ops.jsd(x.requires_grad_(), torch._neg_view(-y))
    try:
        (found,) = torch.autograd.grad(loss, x, torch.tensor(2.0))
    except RuntimeError as error:
        raise AssertionError(str(error)) from error
    torch.testing.assert_close(found, torch.autograd.grad(ops.jsd(x, y), x, torch.tensor(2.0))[0])


CHECKS = of_suite({
    **{name: check_incoming_gradient(name) for name in OPERATIONS},
    "swiglu_packed": check_packed,
    "residual": check_residual,
    "jsd": check_divergence,
    "jsd, transposed": check_divergence_of_a_transposed_student,
})
MUTANTS = (
    ("shared/ops/rms_norm.py", "_backward", "x, weight, dy, rstd)", "x, weight, rstd)", "general_rms_norm"),
    ("shared/ops/rms_norm.py", "_add_forward", 'forward", x, residual, weight)', 'forward", x, weight)', "residual"),
    ("shared/ops/layer_norm.py", "_backward", ", others=(dy,)", "", "layer_norm"),
    ("shared/ops/dyt.py", "_backward", ", others=(dy,)", "", "dyt"),
    ("shared/ops/poly_norm.py", "_backward", ", others=(dy,)", "", "poly_norm"),
    ("shared/ops/group_norm.py", "_backward", ", others=(dy,)", "", "group_norm"),
    ("shared/ops/gated_activation.py", "_backward", "_fits(gate, up, dout)", "_fits(gate, up)", "geglu"),
    ("shared/ops/gated_activation.py", "_packed_backward", "_fits(gate, up, dout)", "_fits(gate, up)", "swiglu_packed"),
    ("shared/ops/neighborhood_attention.py", "_backward", "_fits(q, k, v, dilation, dout)", "_fits(q, k, v, dilation)",
     "neighborhood_attention"),
    ("shared/ops/divergence.py", "_backward", "kernels_compute(x, y, labels, dloss)", "kernels_compute(x, y, labels)", "jsd"),
    ("shared/ops/linear_head.py", "multiply", "gradient.is_contiguous() and ", "", "jsd, transposed"),
)  # fmt: skip
