"""Operations on rows take a single one, without a dimension of rows: the same numbers as of a matrix of that row, both passes."""

import functools

import pytest
import torch

from tests.op_cases import SIGNATURES, total
from tests.ops.common import BF16, FP32, leaf, randn
from tests.ops.suite import cases_with

N = 64
OF_SUITE = cases_with("rows")
OF_NAME = {name: signature for name, signature in SIGNATURES.items() if signature.rows}


def results(call, ops, rows, parameters):
    leaves = [leaf(t) for t in (*rows, *parameters)]
    y = call(ops, *leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, randn(y.numel(), dtype=y.dtype, device="cpu", seed=9).view(y.shape))]


def check(ops, call, count, shapes, dtype):
    """count: how many of the tensors, the first ones, are rows; shapes: of the tensors, with several rows."""
    rows = [randn(shape[-1], dtype=dtype, device="cpu", seed=3 + i) for i, shape in enumerate(shapes[:count])]
    parameters = [(randn(*shape, dtype=FP32, device="cpu", seed=1 + i) + 1).to(dtype) for i, shape in enumerate(shapes[count:])]
    of_matrices = results(call, ops, [row[None] for row in rows], parameters)
    found = results(call, ops, rows, parameters)
    for one, many in zip(found, of_matrices, strict=True):
        assert torch.equal(one, many.view(one.shape))
    assert all(one.shape == row.shape for one, row in zip(found[1:], rows))


@pytest.mark.parametrize("dtype", (BF16, FP32), ids=str)
@pytest.mark.parametrize("name", OF_NAME)
def test_one_row_without_a_dimension_of_rows(ops, name, dtype):
    check(ops, functools.partial(total, name), OF_NAME[name].rows, OF_NAME[name].of_length(2, N), dtype)


@pytest.mark.parametrize("dtype", (BF16, FP32), ids=str)
@pytest.mark.parametrize("name", OF_SUITE)
def test_one_row_without_a_dimension_of_rows_in_the_suite(suite_ops, name, dtype):
    case = OF_SUITE[name]
    check(suite_ops, case.call, case.rows, case.aligned(N), dtype)
