"""Each operation with the real cubins against float64."""

import importlib

import pytest
import torch

from tests.numerics.operations import *  # noqa: F403
from tests.ops import eight_bits, experts
from tests.ops.common import FLOATS

PLACE = "gpu"
pytestmark = pytest.mark.usefixtures("poisoned")
DEVICE = "cuda"
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@dtypes
@pytest.mark.parametrize("case", [case for case in experts.EXPERTS_CASES if not case.get("gpt_oss", True)], ids=str)
def test_experts_of_qwen3_moe(ops, dtype, case):
    experts.check_experts(ops, DEVICE, dtype, **case)


@dtypes
def test_experts_of_another_package(ops, dtype):
    """GPT-OSS's gate, of which this package has no kernels."""
    experts.check_experts(ops, DEVICE, dtype, 37, 24, 64, 4, 2)


@pytest.fixture
def e4m3():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuTile has no e4m3")


@pytest.fixture
def in_eight_bits(ops):
    module = importlib.import_module(f"{ops.__name__}.shared.decoder.eight_bits")
    if reason := module.why_not_on("cuda", torch.cuda.current_device()):
        pytest.skip(reason)
    return ops


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("tokens", (512, 500))
@pytest.mark.parametrize("which", range(3))
def test_products_in_eight_bits(in_eight_bits, which, tokens, bias):
    eight_bits.check_products(in_eight_bits, DEVICE, tokens, which, bias)


@pytest.mark.parametrize("check", (eight_bits.check_parts, eight_bits.check_odd_inputs, eight_bits.check_odd_gradients,
                                   eight_bits.check_zero_rows, eight_bits.check_codes))  # fmt: skip
def test_what_is_odd_in_eight_bits(in_eight_bits, check):
    check(in_eight_bits, DEVICE)
