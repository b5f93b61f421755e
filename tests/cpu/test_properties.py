"""Calls that hypothesis draws, through the interpreted kernels: see tests/properties.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import op_cases as cases
from tests import properties


@pytest.mark.parametrize("operation", cases.CASES)
def test_any_call_is_right_and_touches_nothing_else(interpreted, operation):
    ops = cases.operations(interpreted)

    @properties.budget(16)
    @given(st.data())
    def each(data):
        call = data.draw(properties.calls(operation))
        properties.check_call(ops, call, "cpu")

    each()
