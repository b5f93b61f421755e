"""The operations that families other than Qwen3 and GPT-OSS need, with the real cubins."""

import pytest

from tests.ops import gated_delta_rule, gated_rms_norm, residual_norm, short_conv
from tests.ops.common import BF16, FLOATS

DEVICE = "cuda"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_residual_norm(decoders, poisoned, dtype):
    for _, check in residual_norm.all_cases(decoders, DEVICE, (dtype,)):
        check()


@pytest.mark.parametrize("shape", ((4099, 4096), (65537, 1024), (8191, 5376)), ids=str)
def test_residual_norm_of_many_rows(decoders, poisoned, shape):
    residual_norm.check_norm_add(decoders, DEVICE, BF16, shape, offset=1.0)
    residual_norm.check_multiplied_branch(decoders, DEVICE, BF16, shape)


@pytest.mark.parametrize("operation", (gated_delta_rule, short_conv, gated_rms_norm), ids=lambda module: module.__name__.split(".")[-1])
def test_operations_of_gated_delta_nets(qwen3_5, poisoned, operation):
    for _, check in operation.all_cases(qwen3_5, DEVICE):
        check()


def test_the_delta_rule_of_many_tokens(qwen3_5, poisoned):
    gated_delta_rule.check_rule(qwen3_5, DEVICE, BF16, (700, 1, 333, 64, 1024), key_heads=2, heads=6)
