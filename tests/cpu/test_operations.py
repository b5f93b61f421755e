"""The operations of the package for Liger's users against float64, in PyTorch and through the interpreter."""

import re
from pathlib import Path

import pytest
import torch

from tests.op_cases import check_first_and_no_second_derivative
from tests.ops.common import FLOATS, FP32
from tests.ops.suite import cases_with, module_of, names, run, sample, suite

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", names())
def test_operation(suite_ops, name, dtype):
    failures = []
    for case, check in module_of(name).all_cases(suite_ops, "cpu", (dtype,)):
        try:
            check()
        except AssertionError as error:
            failures.append(f"{case}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", cases_with("sample"))
def test_without_gradients_and_under_transforms(suite_ops, name):
    """The same bits without autograd, and the same numbers from the formula that torch.func differentiates."""
    call, leaves = sample(suite_ops, name, "cpu", FP32)
    result, *gradients = run(call, leaves)
    with torch.no_grad():
        assert torch.equal(call(*leaves), result)
    found = torch.func.grad(lambda *tensors: call(*tensors).sum(), tuple(range(len(leaves))))(*[tensor.detach() for tensor in leaves])
    for a, b in zip(found, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", cases_with("sample"))
def test_a_second_derivative_is_refused(suite_ops, name):
    """Also where the incoming gradient needs none, as in a gradient penalty."""
    call, leaves = sample(suite_ops, name, "cpu", FP32)
    result = call(*leaves)
    for total in (result.sum(), result.square().sum()):
        wanted = torch.autograd.grad(total, leaves, retain_graph=True)
        check_first_and_no_second_derivative(name, torch.autograd.grad(total, leaves, create_graph=True), wanted)


@pytest.mark.parametrize("name", cases_with("sample"))
def test_torch_compile(all_operations, name):
    """One graph, without a break, and the same numbers."""
    call, leaves = sample(suite(all_operations), name, "cpu", FP32)
    wanted = run(call, leaves)
    torch._dynamo.reset()
    for a, b in zip(run(torch.compile(call, fullgraph=True, backend="aot_eager"), leaves), wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("function", ("rotary_complex", "partial_rotary", "geglu_packed", "tiled_geglu"))
def test_an_operation_is_tested_by_what_its_own_file_says(function):
    """No other file of the tests, the tools or the interpreter names it, but for a list of all that Liger has."""
    own = [path for path in (ROOT / "tests/ops").glob("*.py") if f'"{function}": ' in path.read_text(encoding="utf-8")]
    others = [path for folder in ("tests", "tools", "interpreter") for path in (ROOT / folder).rglob("*.py")]
    others = [path for path in others if path not in (*own, Path(__file__), ROOT / "tests/cpu/test_benchmark_limits.py")]
    assert len(own) == 1 and cases_with("aligned").keys() >= {function}
    assert [path.name for path in others if re.search(rf"\b{function}\b", path.read_text(encoding="utf-8"))] == []
