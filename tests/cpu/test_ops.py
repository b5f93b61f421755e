"""Operations in plain PyTorch, as they run on a CPU, against float64: what test_properties.py does not draw."""

import importlib

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.numerics.experts import test_experts, test_experts_that_are_not_here, test_experts_with_frozen_parts  # noqa: F401
from tests.numerics.operations import (  # noqa: F401
    test_adamw,
    test_linear_cross_entropy_options,
    test_qk_norm_rotary,
    test_rms_norm_with_an_fp32_weight,
    test_rotary,
)
from tests.ops import experts, loss_without_logits
from tests.ops.common import FLOATS

PLACE = "pytorch"
DEVICE = "cpu"


@pytest.fixture
def ops(qwen3):
    return qwen3


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", loss_without_logits.EVALUATION_CASES, ids=str)
def test_evaluation(qwen3, dtype, case):
    loss_without_logits.check_evaluation(qwen3, DEVICE, dtype, 60, 32, 1001, bound=dtype, **case)


def test_experts_of_no_tokens(qwen3):
    experts.check_experts(qwen3, DEVICE, torch.float32, 0, 24, 64, 4, 2)


@pytest.mark.parametrize(
    ("capability", "version", "expected"),
    (
        ((8, 0), "2.13.0", False),
        ((9, 0), "2.8.0", True),
        ((9, 0), "2.13.0+cu130", True),
        ((10, 3), "2.8.0", False),
        ((10, 3), "2.13.0+cu130", True),
        ((11, 0), "2.13.0", False),
        ((12, 0), "2.13.0", False),
    ),
)
def test_where_pytorchs_grouped_gemm_is_a_kernel(qwen3, monkeypatch, capability, version, expected):
    has = importlib.import_module(f"{qwen3.__name__}.shared.ops.grouped_gemm")._has_grouped_mm
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    has.cache_clear()
    try:
        assert has(0) == expected
    finally:
        has.cache_clear()
