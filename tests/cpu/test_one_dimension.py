"""Operations on rows take a single one, without a dimension of rows: the same numbers as of a matrix of that row, both passes."""

import pytest
import torch

from tests.ops.common import BF16, FP32, leaf, randn
from tests.ops.suite import cases_with

N = 64
WEIGHT, BIAS = randn(N, dtype=FP32, device="cpu", seed=1) + 1, randn(N, dtype=FP32, device="cpu", seed=2)
# The operation of rows, how many of them, and of parameters.
CASES = {
    "rms_norm": (lambda ops, x, w: ops.rms_norm(x, w), 1, (WEIGHT,)),
    "add_rms_norm": (lambda ops, x, r, w: sum(ops.add_rms_norm(x, r, w)), 2, (WEIGHT,)),
    "round_last_rms_norm": (lambda ops, x, w: ops.round_last_rms_norm(x, w), 1, (WEIGHT,)),
    "round_last_add_rms_norm": (lambda ops, x, r, w: sum(ops.round_last_add_rms_norm(x, r, w)), 2, (WEIGHT,)),
    "swiglu": (lambda ops, a, b: ops.swiglu(a, b), 2, ()),
}
OF_SUITE = cases_with("rows")


def results(call, ops, rows, parameters):
    leaves = [leaf(t) for t in (*rows, *parameters)]
    y = call(ops, *leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, randn(y.numel(), dtype=y.dtype, device="cpu", seed=9).view(y.shape))]


def check(ops, case, dtype, length=N):
    call, count, parameters = case
    rows = [randn(length, dtype=dtype, device="cpu", seed=3 + i) for i in range(count)]
    parameters = [p.to(dtype) for p in parameters]
    of_matrices = results(call, ops, [row[None] for row in rows], parameters)
    found = results(call, ops, rows, parameters)
    for one, many in zip(found, of_matrices, strict=True):
        assert torch.equal(one, many.view(one.shape))
    assert all(one.shape == row.shape for one, row in zip(found[1:], rows))


@pytest.mark.parametrize("dtype", (BF16, FP32), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_one_row_without_a_dimension_of_rows(ops, name, dtype):
    check(ops, CASES[name], dtype)


@pytest.mark.parametrize("dtype", (BF16, FP32), ids=str)
@pytest.mark.parametrize("name", OF_SUITE)
def test_one_row_without_a_dimension_of_rows_in_the_suite(suite_ops, name, dtype):
    case = OF_SUITE[name]
    first, *shapes = case.aligned(N)
    parameters = [randn(*shape, dtype=FP32, device="cpu", seed=i) + 1 for i, shape in enumerate(shapes[case.rows - 1 :])]
    check(suite_ops, (case.call, case.rows, parameters), dtype, first[-1])
