"""The operations of the package for Liger's users against float64, in PyTorch and through the interpreter."""

import pytest
import torch

from tests.ops import NAMES, module_of
from tests.ops.common import FLOATS


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_operation(suite_ops, name, dtype):
    failures = []
    for case, check in module_of(name).all_cases(suite_ops, "cpu", (dtype,)):
        try:
            check()
        except (AssertionError, torch.OutOfMemoryError) as error:
            failures.append(f"{case}: {error}")
    assert not failures, "\n".join(failures)
