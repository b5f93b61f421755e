"""The operations of Qwen3's package."""

import pytest
import torch

from tests.numerics import cases
from tests.ops import adamw, linear_cross_entropy, loss_without_logits, low_rank, quantised, rms_norm, rotary, swiglu
from tests.ops.common import FLOATS

dtypes = cases("dtype", FLOATS)
halves = cases("dtype", FLOATS[:2])
odd = cases("odd", (False, True), ids=("", "with NaN and infinity"))
LARGE_HEADS = dict(batch=2, tokens=1025, heads=32, kv_heads=8, head_dim=128)
LARGE_LOW_RANK = (
    dict(tokens=1024, out=12288, rank=16, features=4096),
    dict(tokens=513, out=1024, rank=64, features=4096),
    dict(tokens=512, out=4096, rank=8, features=12288),
)
LARGE_TRANSPOSED = (8192, 1024), (4097, 12288)
WITH_KERNELS = [c for c in rotary.QK_NORM_ROTARY_CASES if c["heads"] % 4 == 0 and c["head_dim"] == 128 and not c.get("half")]
WITHOUT_KERNELS = [case for case in rotary.QK_NORM_ROTARY_CASES if case not in WITH_KERNELS]
NO_LOGITS = {"linear_cross_entropy_statistics", "linear_cross_entropy_combine"}
# Tokens, features and classes, few where the interpreter runs them.
LOSSES = {"interpreter": (3, 16, 4107), "pytorch": (60, 32, 1001), "gpu": (300, 64, 9001)}
needs_e4m3 = pytest.mark.usefixtures("e4m3")


@dtypes
@cases("shape", rms_norm.RMS_NORM_SHAPES, gpu=((8192, 4096), (2048, 32, 128), (4099, 5120)))
def test_rms_norm(ops, device, dtype, shape):
    rms_norm.check_rms_norm(ops, device, dtype, shape)


@halves
@cases("shape", ((3, 5, 128),), interpreter=((4, 1000),), gpu=((4, 1000), (4, 4096)))
def test_rms_norm_with_an_fp32_weight(ops, device, dtype, shape):
    rms_norm.check_rms_norm(ops, device, dtype, shape, weight_dtype=torch.float32)


@cases("dtype", FLOATS[:1], gpu=FLOATS[1:])
@cases(
    "view",
    (lambda x: x.transpose(0, 1), lambda x: x[:, ::2], lambda x: x[1:, 1:], lambda x: x[..., :-8], lambda x: x[..., 1:],
     lambda x: x[..., ::2]),
    ids=None,
)  # fmt: skip
def test_rms_norm_of_views(ops, device, dtype, view):
    rms_norm.check_rms_norm(ops, device, dtype, (6, 4, 1032), view=view)


@cases("dtype", FLOATS[:2], gpu=FLOATS[2:])
@cases("shape", rms_norm.ADD_RMS_NORM_SHAPES, gpu=((4099, 4096),))
def test_add_rms_norm(ops, device, dtype, shape):
    rms_norm.check_add_rms_norm(ops, device, dtype, shape)


@dtypes
@cases("case", rotary.ROTARY_CASES, gpu=(LARGE_HEADS,))
def test_rotary(ops, device, dtype, case):
    rotary.check_rotary(ops, device, dtype, **case)


@dtypes
@cases("case", WITH_KERNELS, pytorch=WITHOUT_KERNELS, gpu=(*WITHOUT_KERNELS, LARGE_HEADS))
def test_qk_norm_rotary(ops, device, dtype, case):
    rotary.check_qk_norm_rotary(ops, device, dtype, **case)


@dtypes
@cases("shape", swiglu.SWIGLU_SHAPES, gpu=((1025, 12288), (333, 9728)))
def test_swiglu(ops, device, dtype, shape):
    swiglu.check_swiglu(ops, device, dtype, shape)


@cases("dtype", FLOATS, pytorch=(torch.float64,))
@cases("offset", (0,), interpreter=(1, 8), gpu=(1, 8))
@cases("capturable", (False, True), ids=("counted on the host", "capturable"))
def test_adamw(ops, device, dtype, offset, capturable):
    large = ((1031, 4096),) if device == "cuda" else ()
    adamw.check_adamw(ops, device, dtype, (*adamw.ADAMW_SHAPES, *large), offset=offset, capturable=capturable)


@dtypes
@cases("capturable", (False, True), ids=("counted on the host", "capturable"))
def test_adamw_of_four(ops, device, dtype, capturable):
    adamw.check_adamw_of_four(ops, device, dtype, capturable)


@dtypes
def test_mlp(ops, device, dtype):
    swiglu.check_mlp(ops, device, dtype, *((65, 128, 384) if device == "cuda" else (33, 64, 160)))


@dtypes
@cases("case", linear_cross_entropy.LOSS_CASES)
def test_linear_cross_entropy_options(request, ops, device, dtype, case):
    upstream = {"upstream": 1.0} if request.module.PLACE == "interpreter" else {}
    linear_cross_entropy.check_linear_cross_entropy(ops, device, dtype, *LOSSES[request.module.PLACE], **upstream, **case)


@dtypes
@cases("shape", linear_cross_entropy.LOSS_SHAPES, gpu=((2500, 256, 32000), (64, 128, 151936)))
def test_linear_cross_entropy_sizes(ops, device, dtype, shape):
    # Without a loss scale the gradients of fp16 would be below its smallest normal number, as they are in every model.
    upstream = 1.0 if device == "cpu" else 1024.0 if dtype == torch.float16 else 0.5
    linear_cross_entropy.check_linear_cross_entropy(ops, device, dtype, *shape, upstream=upstream)


@halves
@cases("shape", loss_without_logits.EVALUATION_SHAPES,
       gpu=((1100, 64, 257), (1025, 4096, 151936), (2050, 1024, 32001), (11000, 64, 151936)))  # fmt: skip
def test_evaluation_stores_no_logits(ops, gpu, device, launched, dtype, shape):
    loss_without_logits.check_evaluation(ops, device, dtype, *shape)
    launched(NO_LOGITS)


@cases("dtype", FLOATS[:1], gpu=FLOATS[1:])
@cases("case", loss_without_logits.EVALUATION_CASES)
@cases("features", (64,), gpu=(72,))
def test_evaluation_options(ops, device, launched, dtype, features, case):
    exact = dtype != torch.float32 and features == 64  # by the kernel that rounds no logits
    tokens, classes = (300, 9001) if device == "cuda" else (7, 300)
    bound = torch.float32 if exact else dtype
    loss_without_logits.check_evaluation(ops, device, dtype, tokens, features, classes, bound=bound, **case)
    launched(NO_LOGITS)


@cases(("dtype", "result"), low_rank.DTYPES)
@cases("case", low_rank.CASES, gpu=LARGE_LOW_RANK)
def test_low_rank_gradients(ops, gpu, device, launched, dtype, result, case):
    low_rank.check_low_rank_gradients(ops, device, dtype, result, **case)
    launched({"low_rank_gradients"})


@halves
@cases("case", low_rank.CASES, gpu=LARGE_LOW_RANK)
def test_low_rank_add(ops, gpu, device, launched, dtype, case):
    low_rank.check_low_rank_add(ops, device, dtype, **case)
    launched({"low_rank_add"})


def test_low_rank_gradients_that_are_left_to_pytorch(ops, device):
    low_rank.check_what_is_left_to_pytorch(ops, device)


# ---------------------------------------------------------------- products in eight bits
@needs_e4m3
@odd
@cases("columns", quantised.COLUMNS, gpu=(9728, 24576))
def test_quantised_rows(ops, device, launched, columns, odd):
    quantised.check_rows(ops, device, torch.bfloat16, 33 if device == "cuda" else 9, columns, odd)
    exact = columns in (1024, 2048, 4096) or columns % 512 == 0
    assert [f"CHECK{int(not exact)}" in name.split("-") for name in launched({"quantise_rows"})] in ([], [True])


@needs_e4m3
@odd
@cases("shape", quantised.TRANSPOSED, gpu=LARGE_TRANSPOSED)
def test_quantised_transposed(ops, device, shape, odd):
    quantised.check_transposed(ops, device, torch.bfloat16, *shape, odd)


@needs_e4m3
@odd
@cases("shape", quantised.TRANSPOSED, gpu=LARGE_TRANSPOSED)
def test_recoded(ops, device, launched, shape, odd):
    quantised.check_recoded(ops, device, torch.bfloat16, *shape, odd)
    launched({"quantise_rows", "recode_transposed"})


@needs_e4m3
@cases("odd", (False,), ids=lambda odd: "with NaN and infinity" if odd else "", gpu=(True,))
@cases("joined", (False, True), ids=("", "joined"))
@cases("columns", (*quantised.SWIGLU, 1040))
def test_swiglu_in_codes(ops, device, launched, columns, joined, odd):
    quantised.check_swiglu(ops, device, torch.bfloat16, 33 if device == "cuda" else 5, columns, odd, joined)
    both = {"swiglu_quantised", "swiglu_backward_quantised"}
    launched(both if columns in quantised.SWIGLU else set(), among=both)


@needs_e4m3
def test_quantised_parts(ops, device):
    quantised.check_rows_into(ops, device, torch.bfloat16, 5, 512)
    quantised.check_transposed_into(ops, device, torch.bfloat16, 160, 144)
    quantised.check_transposed_into(ops, device, torch.bfloat16, 160, 144, odd=1)
