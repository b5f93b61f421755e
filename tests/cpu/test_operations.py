"""The operations of the package for Liger's users against float64, in PyTorch and through the interpreter."""

import pytest
import torch

from tests.op_cases import check_first_and_no_second_derivative
from tests.ops.calls import OPERATIONS, calls, run
from tests.ops.common import FLOATS, FP32
from tests.ops.suite import NAMES, module_of, suite


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_operation(suite_ops, name, dtype):
    failures = []
    for case, check in module_of(name).all_cases(suite_ops, "cpu", (dtype,)):
        try:
            check()
        except AssertionError as error:
            failures.append(f"{case}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", OPERATIONS)
def test_without_gradients_and_under_transforms(suite_ops, name):
    """The same bits without autograd, and the same numbers from the formula that torch.func differentiates."""
    call, leaves = calls(suite_ops, "cpu", FP32)[name]
    result, *gradients = run(call, leaves)
    with torch.no_grad():
        assert torch.equal(call(*leaves), result)
    found = torch.func.grad(lambda *tensors: call(*tensors).sum(), tuple(range(len(leaves))))(*[tensor.detach() for tensor in leaves])
    for a, b in zip(found, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_second_derivative_is_refused(suite_ops, name):
    """Also where the incoming gradient needs none, as in a gradient penalty."""
    call, leaves = calls(suite_ops, "cpu", FP32)[name]
    result = call(*leaves)
    for total in (result.sum(), result.square().sum()):
        wanted = torch.autograd.grad(total, leaves, retain_graph=True)
        check_first_and_no_second_derivative(name, torch.autograd.grad(total, leaves, create_graph=True), wanted)


@pytest.mark.parametrize("name", OPERATIONS)
def test_torch_compile(all_operations, name):
    """One graph, without a break, and the same numbers."""
    call, leaves = calls(suite(all_operations), "cpu", FP32)[name]
    wanted = run(call, leaves)
    torch._dynamo.reset()
    for a, b in zip(run(torch.compile(call, fullgraph=True, backend="aot_eager"), leaves), wanted, strict=True):
        torch.testing.assert_close(a, b)
