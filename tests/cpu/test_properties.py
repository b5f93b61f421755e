"""Calls that hypothesis draws, in PyTorch and in the interpreted kernels: see tests/properties.py."""

import pytest

from tests import op_cases as cases
from tests.properties import check_any_call


@pytest.mark.parametrize("operation", cases.CASES)
def test_any_call_is_right_and_touches_nothing_else(ops, operation):
    check_any_call(ops, operation, 16, "cpu")
