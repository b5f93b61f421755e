"""Attention's kernels, run by the tile interpreter, against float64."""

import pytest

from tests.ops import attention_kernels as checks

cases = pytest.mark.parametrize("case", checks.CASES, ids=str)


@cases
def test_plan(case):
    checks.check_plan(case)


@pytest.mark.parametrize("case", checks.WIDE, ids=str)
def test_kernels_of_other_heads(case):
    checks.check_wide(case)


@pytest.mark.parametrize("case", checks.CAPPED, ids=str)
@pytest.mark.parametrize("tiles", checks.TILES, ids=("large", "small"))
def test_kernels_of_capped_scores(case, tiles):
    checks.check_capped(case, tiles)


@cases
@pytest.mark.parametrize("tiles", checks.TILES, ids=("large", "small"))
def test_kernels(case, tiles):
    checks.check_kernels(case, tiles)
