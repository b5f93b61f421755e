"""The short convolution in the interpreted kernels and in PyTorch."""

import pytest
import torch

from tests.ops import short_conv as conv
from tests.ops.common import FP32, launched, randn


@pytest.mark.parametrize("name", [name for name, _ in conv.all_cases(None, "cpu")])
@pytest.mark.parametrize("kernels", (True, False), ids=("kernels", "pytorch"))
def test_every_case(request, name, kernels):
    package = request.getfixturevalue("interpreted" if kernels else "all_operations")
    before = len(launched(package)) if kernels else 0
    dict(conv.all_cases(package, "cpu"))[name]()
    assert not kernels or name == "odd" or len(launched(package)) > before, "the operation ran in PyTorch, not in kernels"


@pytest.mark.parametrize("name, change", (("x", (3, 4)), ("weight", (5, 4)), ("bias", (3,))))
def test_wrong_arguments_are_named(all_operations, name, change):
    given = {"x": randn(1, 3, 4, dtype=FP32, device="cpu"), "weight": torch.ones(4, 4), "bias": torch.ones(4)}
    given[name] = torch.ones(change)
    with pytest.raises(ValueError, match=f"^{name} is "):
        conv.module_of(all_operations).short_conv(**given)
