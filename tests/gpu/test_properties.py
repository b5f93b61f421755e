"""Calls that hypothesis draws, with the real cubins: see tests/properties.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import op_cases as cases
from tests import properties


@pytest.mark.parametrize("operation", cases.OF_QWEN3_AND_GPT_OSS)
def test_any_call_is_right_and_touches_nothing_else(ops, qwen3_5, gpt_oss, operation):
    loaded = cases.operations(ops, qwen3_5, gpt_oss)

    @properties.budget(300)
    @given(st.data())
    def each(data):
        call = data.draw(properties.calls(operation))
        properties.check_call(loaded, call, "cuda")

    each()
