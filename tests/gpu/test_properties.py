"""Calls that hypothesis draws, with the real cubins: see tests/properties.py."""

import pytest

from tests import op_cases as cases
from tests.properties import check_any_call


@pytest.mark.parametrize("operation", cases.OF_QWEN3_AND_GPT_OSS)
def test_any_call_is_right_and_touches_nothing_else(ops, qwen3_5, gpt_oss, operation):
    check_any_call(cases.operations(ops, qwen3_5, gpt_oss), operation, 300, "cuda")
