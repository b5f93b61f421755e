"""Attention's kernels, run by the tile interpreter, against float64."""

import pytest

from tests.mutants import Mutant, kernel_module
from tests.ops import attention as checks

cases = pytest.mark.parametrize("case", checks.CASES, ids=str)


@cases
def test_plan(case):
    checks.check_plan(case)


@cases
@pytest.mark.parametrize("tiles", checks.TILES, ids=("large", "small"))
def test_kernels(case, tiles):
    checks.check_kernels(case, tiles)


@pytest.mark.parametrize("mutant", checks.MUTANTS, ids=lambda m: f"{m[1]}: {m[2]} -> {m[3]}")
def test_a_planted_error_is_caught(mutant):
    name, *change = mutant
    assert checks.first_noticed(mutant, kernel_module(Mutant(f"kernel_src/{name}.py", *change, check="")))
