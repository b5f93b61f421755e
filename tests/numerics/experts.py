"""Experts, their routing and their grouped GEMMs."""

import torch

from tests.numerics import cases
from tests.ops import experts, grouped_gemm, routing
from tests.ops.common import FLOATS

ROUTES = {"expert_counts", "expert_sums", "expert_order"}
LARGE = (
    dict(tokens=515, hidden=2880, width=2880, experts=4, top_k=2, skew=1.0),
    dict(tokens=300, hidden=256, width=128, experts=128, top_k=4),
    dict(tokens=515, hidden=2048, width=768, experts=16, top_k=8, gpt_oss=False),
    dict(tokens=300, hidden=256, width=128, experts=32, top_k=4, skew=2.0, absent=0.4),
)
LARGE_GROUPED = (
    dict(counts=[700, 0, 1, 347], k=2880, n=5760, absent=200),
    dict(counts=[0, 1500, 0], k=2880, n=2880),
    dict(counts=[40, 200, 0, 128, 63, 65] * 4, k=2048, n=768),
    dict(counts=[90, 0, 260], k=1000, n=1536, absent=300),
    dict(counts=[700, 0, 1, 347], k=2880, n=16, absent=200),  # as adapters have them
    dict(counts=[40, 200, 0, 128, 63], k=8, n=5760),
)


@cases("dtype", FLOATS)
@cases("case", experts.EXPERTS_CASES, gpu=LARGE)
def test_experts(ops, device, dtype, case):
    experts.check_experts(ops, device, dtype, **case)


@cases("frozen", experts.EXPERTS_FROZEN, ids="-".join)
def test_experts_with_frozen_parts(request, ops, device, frozen):
    dtype = torch.float32 if request.module.PLACE == "pytorch" else torch.bfloat16
    tokens, hidden, width = (190, 64, 128) if device == "cuda" else (19, 24, 64)
    experts.check_experts(ops, device, dtype, tokens, hidden, width, 4, 2, frozen=frozen)


@cases("clamped", (True, False))
def test_experts_that_are_not_here(ops, device, clamped):
    """All ids belong to other processes: nothing is added, and everything has a gradient of zero."""
    dtype, *sizes = (torch.bfloat16, 70, 64, 128) if device == "cuda" else (torch.float32, 7, 24, 64)
    experts.check_experts(ops, device, dtype, *sizes, 4, 2, absent=1.1, gpt_oss=clamped)


@cases("clamped", (True, False))
def test_nan_reaches_the_result_of_the_experts(ops, device, clamped):
    """NaN passes as through torch.clamp, and only to its token's result. clamped: as GPT-OSS has it, the name of a fixture on a GPU."""
    experts.check_nan_in_experts(ops, device, clamped)


@cases("dtype", FLOATS[:2])
@cases("case", grouped_gemm.GROUPED_CASES, gpu=LARGE_GROUPED)
def test_grouped_gemms(own_gemms, gpu, device, launched, dtype, case):
    grouped_gemm.check_grouped_gemm(own_gemms, device, dtype, **case)
    launched({"grouped_mm", "grouped_outer", "expert_blocks"})


@cases("case", routing.CASES, gpu=(dict(tokens=8192, experts=128, top_k=8), dict(tokens=4096, experts=512, top_k=10)))
def test_routes(ops, gpu, device, launched, case):
    """There is no kernel with room for 600 experts."""
    routing.check_route(ops, device, **case)
    launched(ROUTES if case["experts"] <= 512 else set())


@cases("case", routing.BLOCKS, gpu=(dict(counts=[500 + i for i in range(128)], height=128),))
def test_blocks_of_rows(ops, gpu, device, launched, case):
    routing.check_row_blocks(ops, device, **case)
    launched({"expert_blocks"} if len(case["counts"]) <= 512 else set())
