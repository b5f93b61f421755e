"""Each operation with the real cubins against float64."""

import importlib

import pytest
import torch

from tests.ops import adamw, eight_bits, experts, linear_cross_entropy, loss_without_logits, low_rank, quantised, rms_norm, rotary, swiglu
from tests.ops.common import FLOATS

pytestmark = pytest.mark.usefixtures("poisoned")
DEVICE = "cuda"
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@dtypes
@pytest.mark.parametrize("shape", (*rms_norm.RMS_NORM_SHAPES, (8192, 4096), (2048, 32, 128), (4099, 5120)), ids=str)
def test_rms_norm(ops, dtype, shape):
    rms_norm.check_rms_norm(ops, DEVICE, dtype, shape)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("shape", ((3, 5, 128), (4, 1000), (4, 4096)), ids=str)
def test_rms_norm_with_an_fp32_weight(ops, dtype, shape):
    rms_norm.check_rms_norm(ops, DEVICE, dtype, shape, weight_dtype=torch.float32)


@dtypes
@pytest.mark.parametrize(
    "view",
    (lambda x: x.transpose(0, 1), lambda x: x[:, ::2], lambda x: x[1:, 1:], lambda x: x[..., :-8], lambda x: x[..., 1:],
     lambda x: x[..., ::2]),
)
def test_rms_norm_of_views(ops, dtype, view):
    rms_norm.check_rms_norm(ops, DEVICE, dtype, (6, 4, 1032), view=view)


@dtypes
@pytest.mark.parametrize("case", (*rotary.ROTARY_CASES, dict(batch=2, tokens=1025, heads=32, kv_heads=8, head_dim=128)), ids=str)
def test_rotary(ops, dtype, case):
    rotary.check_rotary(ops, DEVICE, dtype, **case)


@dtypes
@pytest.mark.parametrize("shape", (*rms_norm.ADD_RMS_NORM_SHAPES, (4099, 4096)), ids=str)
def test_add_rms_norm(ops, dtype, shape):
    rms_norm.check_add_rms_norm(ops, DEVICE, dtype, shape)


@dtypes
@pytest.mark.parametrize("case", (*rotary.QK_NORM_ROTARY_CASES, dict(batch=2, tokens=1025, heads=32, kv_heads=8, head_dim=128)), ids=str)
def test_qk_norm_rotary(ops, dtype, case):
    rotary.check_qk_norm_rotary(ops, DEVICE, dtype, **case)


@dtypes
@pytest.mark.parametrize("shape", (*swiglu.SWIGLU_SHAPES, (1025, 12288), (333, 9728)), ids=str)
def test_swiglu(ops, dtype, shape):
    swiglu.check_swiglu(ops, DEVICE, dtype, shape)


@dtypes
@pytest.mark.parametrize("offset", (0, 1, 8))
@pytest.mark.parametrize("capturable", (False, True), ids=("counted on the host", "capturable"))
def test_adamw(ops, dtype, offset, capturable):
    adamw.check_adamw(ops, DEVICE, dtype, (*adamw.ADAMW_SHAPES, (1031, 4096)), offset=offset, capturable=capturable)


@dtypes
@pytest.mark.parametrize("capturable", (False, True), ids=("counted on the host", "capturable"))
def test_adamw_of_four(ops, dtype, capturable):
    adamw.check_adamw_of_four(ops, DEVICE, dtype, capturable)


@dtypes
def test_mlp(ops, dtype):
    swiglu.check_mlp(ops, DEVICE, dtype, 65, 128, 384)


@dtypes
@pytest.mark.parametrize("case", [case for case in experts.EXPERTS_CASES if not case.get("gpt_oss", True)], ids=str)
def test_experts_of_qwen3_moe(ops, dtype, case):
    experts.check_experts(ops, DEVICE, dtype, **case)


@dtypes
def test_experts_of_another_package(ops, dtype):
    """GPT-OSS's gate, of which this package has no kernels."""
    experts.check_experts(ops, DEVICE, dtype, 37, 24, 64, 4, 2)


@dtypes
@pytest.mark.parametrize("case", linear_cross_entropy.LOSS_CASES, ids=str)
def test_linear_cross_entropy_options(ops, dtype, case):
    linear_cross_entropy.check_linear_cross_entropy(ops, DEVICE, dtype, 300, 64, 9001, **case)


@dtypes
@pytest.mark.parametrize("shape", (*linear_cross_entropy.LOSS_SHAPES, (2500, 256, 32000), (64, 128, 151936)), ids=str)
def test_linear_cross_entropy_sizes(ops, dtype, shape):
    # Without a loss scale the gradients of fp16 would be below its smallest normal number, as they are in every model.
    upstream = 1024.0 if dtype == torch.float16 else 0.5
    linear_cross_entropy.check_linear_cross_entropy(ops, DEVICE, dtype, *shape, upstream=upstream)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize(
    "shape", (*loss_without_logits.EVALUATION_SHAPES, (1100, 64, 257), (1025, 4096, 151936), (2050, 1024, 32001), (11000, 64, 151936)),
    ids=str
)
def test_evaluation_stores_no_logits(ops, dtype, shape):
    loss_without_logits.check_evaluation(ops, DEVICE, dtype, *shape)


@dtypes
@pytest.mark.parametrize("case", loss_without_logits.EVALUATION_CASES, ids=str)
@pytest.mark.parametrize("features", (64, 72), ids=str)
def test_evaluation_options(ops, dtype, features, case):
    exact = dtype != torch.float32 and features == 64  # by the kernel that rounds no logits
    loss_without_logits.check_evaluation(ops, DEVICE, dtype, 300, features, 9001, bound=torch.float32 if exact else dtype, **case)


LOW_RANK_LARGE = (
    dict(tokens=1024, out=12288, rank=16, features=4096),
    dict(tokens=513, out=1024, rank=64, features=4096),
    dict(tokens=512, out=4096, rank=8, features=12288),
)


@pytest.mark.parametrize(("dtype", "result"), low_rank.DTYPES, ids=str)
@pytest.mark.parametrize("case", (*low_rank.CASES, *LOW_RANK_LARGE), ids=str)
def test_low_rank_gradients(ops, dtype, result, case):
    low_rank.check_low_rank_gradients(ops, DEVICE, dtype, result, **case)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("case", (*low_rank.CASES, *LOW_RANK_LARGE), ids=str)
def test_low_rank_add(ops, dtype, case):
    low_rank.check_low_rank_add(ops, DEVICE, dtype, **case)


def test_low_rank_gradients_that_are_left_to_pytorch(ops):
    low_rank.check_what_is_left_to_pytorch(ops, DEVICE)


# ---------------------------------------------------------------- products in eight bits
needs_e4m3 = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="cuTile has no e4m3")


@needs_e4m3
@pytest.mark.parametrize("odd", (False, True), ids=("", "with NaN and infinity"))
@pytest.mark.parametrize("columns", (*quantised.COLUMNS, 9728, 24576))
def test_quantised_rows(ops, columns, odd):
    quantised.check_rows(ops, DEVICE, torch.bfloat16, 33, columns, odd)


@needs_e4m3
@pytest.mark.parametrize("odd", (False, True), ids=("", "with NaN and infinity"))
@pytest.mark.parametrize("shape", (*quantised.TRANSPOSED, (8192, 1024), (4097, 12288)), ids=str)
def test_quantised_transposed(ops, shape, odd):
    quantised.check_transposed(ops, DEVICE, torch.bfloat16, *shape, odd)


@needs_e4m3
@pytest.mark.parametrize("odd", (False, True), ids=("", "with NaN and infinity"))
@pytest.mark.parametrize("shape", (*quantised.TRANSPOSED, (8192, 1024), (4097, 12288)), ids=str)
def test_recoded(ops, shape, odd):
    quantised.check_recoded(ops, DEVICE, torch.bfloat16, *shape, odd)


@needs_e4m3
@pytest.mark.parametrize("odd", (False, True), ids=("", "with NaN and infinity"))
@pytest.mark.parametrize("joined", (False, True), ids=("", "joined"))
@pytest.mark.parametrize("columns", (*quantised.SWIGLU, 1040))
def test_swiglu_in_codes(ops, columns, joined, odd):
    quantised.check_swiglu(ops, DEVICE, torch.bfloat16, 33, columns, odd, joined)


@needs_e4m3
def test_quantised_parts(ops):
    quantised.check_rows_into(ops, DEVICE, torch.bfloat16, 5, 512)
    quantised.check_transposed_into(ops, DEVICE, torch.bfloat16, 160, 144)


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
