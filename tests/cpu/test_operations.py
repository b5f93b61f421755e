"""The operations of the package for Liger's users against float64, in PyTorch and through the interpreter."""

import re
from pathlib import Path

import pytest
import torch

from tests.op_cases import check_first_and_no_second_derivative
from tests.ops import collected
from tests.ops.common import FLOATS, FP32
from tests.ops.suite import cases_with, check_all_cases, in_order, names, run, sample, suite
from tools.targets import operations

ROOT = Path(__file__).resolve().parents[2]
# What asks every operation the same, and finds what it must know of each in that one's own files.
OF_EVERY_OPERATION = ("tests/op_cases.py", "tests/properties.py", "tests/compile_checks.py", "tests/sanitizer.py", "tests/ops/signature.py",
                      "tests/ops/suite.py", "tests/cpu/test_alignment.py", "tests/cpu/test_one_dimension.py", "tests/cpu/test_slabs.py",
                      "tests/cpu/test_properties.py", "tests/gpu/test_properties.py", "tests/gpu/test_autograd.py",
                      "tests/gpu/test_compile.py", "torch-ext/shared/hf/say/self_check.py",
                      "torch-ext/shared/hf/say/doctor.py")  # fmt: skip
# A check of this one alone that stands there too: of the loss's options, of a layer in torch.export, of large groups, of many blocks.
OF_ONE = {("tests/compile_checks.py", name) for name in ("linear_cross_entropy", "norm_attention_inputs", "norm_mlp")}
OF_ONE |= {("tests/cpu/test_alignment.py", name) for name in ("linear_cross_entropy", "linear_jsd", "group_norm")}
OF_ONE |= {("tests/cpu/test_slabs.py", "neighborhood_attention")}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", names())
def test_operation(suite_ops, name, dtype):
    check_all_cases(suite_ops, name, "cpu", dtype)


@pytest.mark.parametrize("name", cases_with("sample"))
def test_without_gradients_and_under_transforms(suite_ops, name):
    """Gives the same bits without autograd, and the same numbers from the formula that torch.func differentiates."""
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


def test_a_gpu_runs_an_operation_in_the_package_that_ships_its_kernels():
    """Liger's has the Python of heads, whose kernels have no room in it: its own way of them is not what the test is of."""
    shipped = {folder.name: operations(folder) for folder in (ROOT / "packages/liger", ROOT)}
    for name in names():
        wanted = {kernel for kernel, tests in collected("GPU_TESTS").items() if f"test_operation[{name}" in tests}
        first, _ = in_order(name, list(shipped), lambda package, kernel: kernel in shipped[package])
        assert wanted <= set(shipped[first]), f"{name} is run in {first}, which does not ship {wanted - set(shipped[first])}"
        assert name.startswith("linear_") or first == "liger"


@pytest.mark.parametrize("function", ("rotary_complex", "partial_rotary", "geglu_packed", "tiled_geglu"))
def test_an_operation_is_tested_by_what_its_own_file_says(function):
    """No other file of the tests, the tools or the interpreter names it, but for a list of all that Liger has."""
    own = [path for path in (ROOT / "tests/ops").glob("*.py") if f'"{function}": ' in path.read_text(encoding="utf-8")]
    others = [path for folder in ("tests", "tools", "interpreter") for path in (ROOT / folder).rglob("*.py")]
    others = [path for path in others if path not in (*own, Path(__file__), ROOT / "tests/cpu/test_benchmark_limits.py")]
    assert len(own) == 1 and cases_with("aligned").keys() >= {function}
    assert [path.name for path in others if re.search(rf"\b{function}\b", path.read_text(encoding="utf-8"))] == []


def test_what_asks_every_operation_the_same_names_none():
    """No operation and no file of kernels, by a string or as an attribute; a word in a sentence is neither."""
    names = {name.partition(",")[0] for table in ("SIGNATURES", "OPERATIONS", "GPU_TESTS") for name in collected(table)}
    assert {"rms_norm", "swiglu", "qk_norm_rotary", "experts", "attention", "low_rank", "adamw", "norm_mlp", "dyt"} <= names
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in OF_EVERY_OPERATION}
    named = {name: re.compile(rf"[\"']{name}\b|\b(?:ops|qwen3)\.{name}\b") for name in names}
    assert {(file, name) for file, text in texts.items() for name in names if named[name].search(text)} == OF_ONE
