"""Parameters for AdamW, which the package computes in PyTorch and in its interpreted kernels."""

import pytest
import torch
from torch import nn

from tests.ops.adamw import small_parameters_too
from tests.ops.common import randn

FP32 = torch.float32


@pytest.fixture(params=("pytorch", "kernels"), name="package")
def in_both_ways(request, loaded):
    """In PyTorch, and in the interpreted kernels, which then take parameters of any size."""
    package = loaded if request.param == "pytorch" else request.getfixturevalue("interpreted")
    with small_parameters_too(package):
        yield package


def parameter(*shape, dtype=FP32, seed=0, grad=True):
    found = nn.Parameter(randn(*shape, dtype=dtype, device="cpu", seed=seed))
    if grad:
        found.grad = randn(*shape, dtype=dtype, device="cpu", seed=seed + 1)
    return found
