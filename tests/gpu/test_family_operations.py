"""The operations that families other than Qwen3 and GPT-OSS need, with the real cubins."""

import pytest

from tests.ops import residual_norm
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
