"""The operations that families other than Qwen3 and GPT-OSS need, with the real cubins."""

import importlib

import pytest

from tests.ops import attention, gated_delta_rule, gated_output, gated_rms_norm, head_norm_rotary, residual_norm, short_conv
from tests.ops.attention import CAPPED, WIDE, Case, packed
from tests.ops.common import BF16, FLOATS, FP16

DEVICE = "cuda"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_residual_norm(decoders, poisoned, dtype):
    for _, check in residual_norm.all_cases(decoders, DEVICE, (dtype,)):
        check()


@pytest.mark.parametrize("shape", ((4099, 4096), (65537, 1024), (8191, 5376)), ids=str)
def test_residual_norm_of_many_rows(decoders, poisoned, shape):
    residual_norm.check_norm_add(decoders, DEVICE, BF16, shape, offset=1.0)
    residual_norm.check_multiplied_branch(decoders, DEVICE, BF16, shape)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_heads(decoders, poisoned, dtype):
    for _, check in head_norm_rotary.all_cases(decoders, DEVICE, (dtype,)):
        check()


LARGE = (
    Case(1500, packed(700, 1, 300, 499), heads=8, kv_heads=2, head_dim=256, window=100, packed=True),
    Case(1333, ((3, 800), (900, 1333)), heads=4, kv_heads=4, head_dim=96, dtype=FP16, causal=False),
    Case(2049, packed(2049), heads=4, kv_heads=1, head_dim=256),
)


@pytest.mark.parametrize("case", (*WIDE, *LARGE), ids=str)
def test_attention_with_heads_of_96_and_256(decoders, poisoned, case):
    operation = importlib.import_module(f"{decoders.__name__}.shared.ops.attention")
    assert operation.takes_heads(case.head_dim)
    attention.check_operation(operation, case, DEVICE)


LARGE_CAPPED = (
    Case(1500, packed(700, 1, 300, 499), heads=8, kv_heads=2, head_dim=256, window=100, packed=True, softcap=5.0),
    Case(2049, packed(2049), heads=4, kv_heads=1, head_dim=256, softcap=50.0),
    Case(1333, ((3, 800), (900, 1333)), heads=4, kv_heads=4, head_dim=128, scale=0.3, softcap=2.0),
)


@pytest.mark.parametrize("case", (*CAPPED, *LARGE_CAPPED), ids=str)
def test_attention_of_capped_scores(decoders, poisoned, case):
    operation = importlib.import_module(f"{decoders.__name__}.shared.ops.attention")
    assert operation.takes_heads(case.head_dim, capped=True)
    attention.check_operation(operation, case, DEVICE)


OF_DELTA_NETS = (gated_delta_rule, short_conv, gated_rms_norm, gated_output)


@pytest.mark.parametrize("operation", OF_DELTA_NETS, ids=lambda module: module.__name__.split(".")[-1])
def test_operations_of_gated_delta_nets(qwen3_5, poisoned, operation):
    for _, check in operation.all_cases(qwen3_5, DEVICE):
        check()


def test_the_delta_rule_of_many_tokens(qwen3_5, poisoned):
    gated_delta_rule.check_rule(qwen3_5, DEVICE, BF16, (700, 1, 333, 64, 1024), key_heads=2, heads=6)


def test_documents_alone_and_packed_in_blocks_of_other_widths(qwen3_5, poisoned):
    """One document of 32 heads is walked in blocks of 32 columns, three of them in blocks of 64: the same bits."""
    gated_delta_rule.check_packed_is_separate(qwen3_5, DEVICE, BF16, key_heads=16, heads=32)
