"""The comparison that all tests of numbers use: what it lets pass, and what it does not."""

import pytest
import torch

from tests.tolerances import RELATIVE_ERROR, assert_close


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1,), (7,), (4096, 3), (1024, 1024), (3, 5, 64)], ids=str)
def test_rounding_passes(dtype, shape):
    torch.manual_seed(0)
    exact = torch.randn(shape, dtype=torch.float64)
    exact.view(-1, shape[-1])[::3] *= 1e-4  # rows of different sizes
    assert_close(exact.to(dtype), exact, dtype)
    assert_close(exact + torch.randn(shape, dtype=torch.float64) * RELATIVE_ERROR[dtype] / 2 * exact.abs(), exact, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("wrong", [1, 3])
def test_a_few_wrong_numbers_in_a_large_tensor(dtype, wrong):
    """One norm over the whole does not see them."""
    torch.manual_seed(0)
    exact = torch.randn(4096, 1024, dtype=torch.float64)
    found = exact.clone()
    places = torch.randperm(exact.numel())[:wrong]
    found.view(-1)[places] *= -1
    found.view(-1)[places[0]] = -exact.view(-1)[places[0]].sign()
    if dtype is torch.bfloat16:
        assert (found - exact).norm() / exact.norm() <= RELATIVE_ERROR[dtype]
    with pytest.raises(AssertionError, match=rf"row .* of y in {dtype}|y in {dtype}"):
        assert_close(found, exact, dtype, "y")


def test_what_is_not_finite():
    exact = torch.ones(4, 4, dtype=torch.float64)
    for value in (float("nan"), float("inf")):
        found = exact.clone()
        found[2, 3] = value
        with pytest.raises(AssertionError, match="worst at flat index 11"):
            assert_close(found, exact, torch.bfloat16)
    assert_close(torch.zeros(3, 0), torch.zeros(3, 0), torch.float32)
    assert_close(torch.zeros(3, 2), torch.zeros(3, 2), torch.float32)
    with pytest.raises(AssertionError):
        assert_close(torch.full((3, 2), 1e-3), torch.zeros(3, 2), torch.float32)
