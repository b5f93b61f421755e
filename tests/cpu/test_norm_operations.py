"""The norms of the suite, their kernels through the interpreter and in PyTorch, against float64."""

import importlib
import types

import pytest

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


def functions(package):
    modules = {name: importlib.import_module(f"{package.__name__}.ops.{name}") for name in OPERATIONS}
    return types.SimpleNamespace(**{f: getattr(modules[name], f) for name, found in OPERATIONS.items() for f in found})


@pytest.fixture(scope="session")
def norm_backend(tmp_path_factory):
    package = load(assemble_cpu(tmp_path_factory.mktemp("norms"), "\n# the norms, run by the interpreter\n"))
    runtime = runtime_of(package)
    runtime.launch.backend = InterpreterBackend(runtime, MODULES)
    return functions(package), runtime.launch.backend


@pytest.fixture(params=("kernels", "pytorch"))
def norms(request):
    if request.param == "kernels":
        return request.getfixturevalue("norm_backend")[0]
    return functions(request.getfixturevalue("loaded"))


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
