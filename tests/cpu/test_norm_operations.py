"""The norms of the suite, their kernels through the interpreter and in PyTorch, against float64."""

import importlib
import types

import pytest
import torch

from tests.cpu.conftest import assemble_cpu, load
from tests.interpreter.backend import InterpreterBackend, runtime_of
from tests.ops import dyt, general_rms_norm, group_norm, poly_norm
from tests.ops import layer_norm as layer
from tests.ops.common import FLOATS, FP32

OPERATIONS = {
    "layer_norm": ("layer_norm",),
    "group_norm": ("group_norm",),
    "poly_norm": ("poly_norm",),
    "dyt": ("dyt",),
    "general_rms_norm": ("general_rms_norm", "general_add_rms_norm"),
}
MODULES = (*OPERATIONS, "column_sum")


def norms_package(tmp_path_factory, comment):
    """A build of its own that has the norms: it is assembled of the modules that a package imports."""
    extra = f"\n# {comment}\nfrom .shared.ops import {', '.join(OPERATIONS)}\n"
    return load(assemble_cpu(tmp_path_factory.mktemp("norms"), extra))


def functions(package):
    modules = {name: importlib.import_module(f"{package.__name__}.shared.ops.{name}") for name in OPERATIONS}
    return types.SimpleNamespace(**{f: getattr(modules[name], f) for name, found in OPERATIONS.items() for f in found})


@pytest.fixture(scope="session")
def norm_backend(tmp_path_factory):
    package = norms_package(tmp_path_factory, "run by the interpreter")
    runtime = runtime_of(package)
    runtime.launch.backend = InterpreterBackend(runtime, MODULES)
    return functions(package), runtime.launch.backend


@pytest.fixture(scope="session")
def norm_formulas(tmp_path_factory):
    return functions(norms_package(tmp_path_factory, "run by PyTorch"))


@pytest.fixture(params=("kernels", "pytorch"))
def norms(request):
    return request.getfixturevalue("norm_backend")[0] if request.param == "kernels" else request.getfixturevalue("norm_formulas")


dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@dtypes
@pytest.mark.parametrize("shape", layer.SHAPES, ids=str)
def test_layer_norm(norms, dtype, shape):
    layer.check_layer_norm(norms, "cpu", dtype, shape)


@dtypes
def test_layer_norm_options(norms, dtype):
    layer.check_options(norms, "cpu", dtype)
    layer.check_layouts(norms, "cpu", dtype)


def test_layer_norm_edges(norms):
    layer.check_large_mean(norms, "cpu")
    layer.check_empty(norms, "cpu")
    layer.check_layer_norm(norms, "cpu", FP32, (13, 65))


@dtypes
@pytest.mark.parametrize("shape", dyt.SHAPES, ids=str)
def test_dyt(norms, dtype, shape):
    dyt.check_dyt(norms, "cpu", dtype, shape)


@dtypes
def test_dyt_options(norms, dtype):
    dyt.check_options(norms, "cpu", dtype)
    dyt.check_empty(norms, "cpu")


@dtypes
@pytest.mark.parametrize("shape", poly_norm.SHAPES, ids=str)
def test_poly_norm(norms, dtype, shape):
    poly_norm.check_poly_norm(norms, "cpu", dtype, shape)


@dtypes
def test_poly_norm_options(norms, dtype):
    poly_norm.check_options(norms, "cpu", dtype)


def test_poly_norm_edges(norms):
    poly_norm.check_largest_fp16(norms, "cpu")
    poly_norm.check_empty(norms, "cpu")


@dtypes
@pytest.mark.parametrize("shape, groups", group_norm.CASES, ids=str)
def test_group_norm(norms, dtype, shape, groups):
    group_norm.check_group_norm(norms, "cpu", dtype, shape, groups)


@dtypes
def test_group_norm_options(norms, dtype):
    group_norm.check_options(norms, "cpu", dtype)


def test_group_norm_edges(norms):
    group_norm.check_large_mean(norms, "cpu")
    group_norm.check_empty(norms, "cpu")


@dtypes
@pytest.mark.parametrize("shape", general_rms_norm.SHAPES, ids=str)
def test_general_rms_norm(norms, dtype, shape):
    general_rms_norm.check_rms_norm(norms, "cpu", dtype, shape)


@dtypes
def test_general_rms_norm_options(norms, dtype):
    general_rms_norm.check_options(norms, "cpu", dtype)
    general_rms_norm.check_residual(norms, "cpu", dtype)
    if dtype != FP32:
        general_rms_norm.check_rounding(norms, "cpu", dtype)
    general_rms_norm.check_empty(norms, "cpu")


def calls(norms):
    """Each operation at a size that its kernels take, as a function of x."""
    weight, bias, one = torch.full((64,), 1.5), torch.full((64,), 0.25), torch.full((1,), 0.5)
    return {
        "layer_norm": lambda x: norms.layer_norm(x, weight, bias),
        "group_norm": lambda x: norms.group_norm(x, 8, weight, bias),
        "poly_norm": lambda x: norms.poly_norm(x, torch.tensor([0.5, -0.5, 1.0]), one),
        "dyt": lambda x: norms.dyt(x, one, weight, bias),
        "general_rms_norm": lambda x: norms.general_rms_norm(x, weight),
        "general_add_rms_norm": lambda x: norms.general_add_rms_norm(x, x * 0.5, weight)[0],
    }


@pytest.mark.parametrize("name", [f for found in OPERATIONS.values() for f in found])
def test_without_gradients_and_under_transforms(norms, name):
    """The same numbers without autograd, and from the formula that functorch differentiates."""
    operation = calls(norms)[name]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = operation(x)
    with torch.no_grad():
        assert torch.equal(operation(x), y)
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    transformed = torch.func.grad(lambda x: operation(x).square().sum())(x.detach())
    torch.testing.assert_close(transformed, dx, rtol=1e-4, atol=1e-5)
