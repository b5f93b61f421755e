"""Operations in plain PyTorch, as they run on a CPU, against float64: what test_properties.py does not draw."""

import importlib

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.ops import adamw, experts, linear_cross_entropy, loss_without_logits, rms_norm, rotary
from tests.ops.common import FLOATS

DEVICE = "cpu"
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
def test_rms_norm_with_an_fp32_weight(qwen3, dtype):
    rms_norm.check_rms_norm(qwen3, DEVICE, dtype, (3, 5, 128), weight_dtype=torch.float32)


@dtypes
@pytest.mark.parametrize("case", rotary.ROTARY_CASES, ids=str)
def test_rotary(qwen3, dtype, case):
    rotary.check_rotary(qwen3, DEVICE, dtype, **case)


@dtypes
@pytest.mark.parametrize("case", rotary.QK_NORM_ROTARY_CASES, ids=str)
def test_qk_norm_rotary(qwen3, dtype, case):
    rotary.check_qk_norm_rotary(qwen3, DEVICE, dtype, **case)


@pytest.mark.parametrize("dtype", (*FLOATS, torch.float64), ids=str)
@pytest.mark.parametrize("capturable", (False, True), ids=("counted on the host", "capturable"))
def test_adamw(qwen3, dtype, capturable):
    adamw.check_adamw(qwen3, DEVICE, dtype, capturable=capturable)


@dtypes
@pytest.mark.parametrize("case", linear_cross_entropy.LOSS_CASES, ids=str)
def test_linear_cross_entropy_options(qwen3, dtype, case):
    linear_cross_entropy.check_linear_cross_entropy(qwen3, DEVICE, dtype, 60, 32, 1001, **case)


@dtypes
@pytest.mark.parametrize("case", loss_without_logits.EVALUATION_CASES, ids=str)
def test_evaluation(qwen3, dtype, case):
    loss_without_logits.check_evaluation(qwen3, DEVICE, dtype, 60, 32, 1001, bound=dtype, **case)


@dtypes
@pytest.mark.parametrize("case", experts.EXPERTS_CASES, ids=str)
def test_experts(qwen3, dtype, case):
    experts.check_experts(qwen3, DEVICE, dtype, **case)


@pytest.mark.parametrize("frozen", experts.EXPERTS_FROZEN, ids="-".join)
def test_experts_with_frozen_parts(qwen3, frozen):
    experts.check_experts(qwen3, DEVICE, torch.float32, 19, 24, 64, 4, 2, frozen=frozen)


def test_experts_of_no_tokens(qwen3):
    experts.check_experts(qwen3, DEVICE, torch.float32, 0, 24, 64, 4, 2)


def test_no_expert_is_here(qwen3):
    """All ids belong to other processes: nothing is added, and everything has a gradient of zero."""
    experts.check_experts(qwen3, DEVICE, torch.float32, 7, 24, 64, 4, 2, absent=1.1)


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
