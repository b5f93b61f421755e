"""Each operation in plain PyTorch, as it runs on a CPU, against float64."""

import pytest
import torch

from tests import op_checks as checks

DEVICE = "cpu"
dtypes = pytest.mark.parametrize("dtype", checks.FLOATS, ids=str)


@dtypes
@pytest.mark.parametrize("shape", checks.RMS_NORM_SHAPES, ids=str)
def test_rms_norm(qwen3, dtype, shape):
    checks.check_rms_norm(qwen3, DEVICE, dtype, shape)


@pytest.mark.parametrize("dtype", checks.FLOATS[:2], ids=str)
def test_rms_norm_with_an_fp32_weight(qwen3, dtype):
    checks.check_rms_norm(qwen3, DEVICE, dtype, (3, 5, 128), weight_dtype=torch.float32)


@dtypes
@pytest.mark.parametrize("case", checks.ROTARY_CASES, ids=str)
def test_rotary(qwen3, dtype, case):
    checks.check_rotary(qwen3, DEVICE, dtype, **case)


@dtypes
@pytest.mark.parametrize("shape", checks.ADD_RMS_NORM_SHAPES, ids=str)
def test_add_rms_norm(qwen3, dtype, shape):
    checks.check_add_rms_norm(qwen3, DEVICE, dtype, shape)


@dtypes
@pytest.mark.parametrize("case", checks.QK_NORM_ROTARY_CASES, ids=str)
def test_qk_norm_rotary(qwen3, dtype, case):
    checks.check_qk_norm_rotary(qwen3, DEVICE, dtype, **case)


@dtypes
@pytest.mark.parametrize("shape", checks.SWIGLU_SHAPES, ids=str)
def test_swiglu(qwen3, dtype, shape):
    checks.check_swiglu(qwen3, DEVICE, dtype, shape)


@dtypes
def test_mlp(qwen3, dtype):
    checks.check_mlp(qwen3, DEVICE, dtype, 33, 64, 160)


@dtypes
@pytest.mark.parametrize("case", checks.LOSS_CASES, ids=str)
def test_linear_cross_entropy_options(qwen3, dtype, case):
    checks.check_linear_cross_entropy(qwen3, DEVICE, dtype, 60, 32, 1001, **case)
