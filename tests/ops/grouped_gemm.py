"""The grouped GEMMs of experts."""

import importlib

import torch

from tests.ops.common import BF16, FP16, errors_in, on_cpu, randn
from tests.ops.generated import generated
from tests.tolerances import assert_close


def check_grouped_gemm(ops, device, dtype, counts, k, n, absent=0):
    """Both grouped GEMMs, with both orders of the weight in memory. counts: the rows of each expert; after them lie `absent` rows
    of none, all NaN."""
    module = importlib.import_module(f"{ops.__name__}.shared.ops.grouped_gemm")
    ends = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
    here = sum(counts)
    x, y = (randn(here + absent, columns, dtype=dtype, device=device, seed=i) for i, columns in enumerate((k, n)))
    x[here:], y[here:] = torch.nan, torch.nan
    parts = [slice(end - count, end) for count, end in zip(counts, ends.tolist(), strict=True)]
    groups = module.Groups(ends, x.shape[0])
    weight = randn(len(counts), k, n, dtype=dtype, device=device, seed=2, scale=k**-0.5)
    expected = torch.cat([x[part].double() @ weight[e].double() for e, part in enumerate(parts)])
    for stored in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
        assert_close(module.grouped_mm(x, stored, groups)[:here], expected, dtype, f"grouped_mm, strides {stored.stride()}")
    expected = torch.stack([x[part].double().t() @ y[part].double() for part in parts])
    found = module.grouped_outer(x, y, groups)
    assert_close(found, expected, dtype, "grouped_outer")
    assert not found[[e for e, count in enumerate(counts) if not count]].any(), "an expert without rows has a gradient"


# Counts on both sides of the rows that a block takes and of those that a step takes.
GROUPED_CASES = (
    dict(counts=[3, 0, 5, 1], k=24, n=40),
    dict(counts=[0, 0, 261, 0], k=72, n=136),
    dict(counts=[128, 64, 0, 1, 129], k=136, n=264, absent=7),
    dict(counts=[0, 33, 31, 0], k=64, n=128, absent=150),
    dict(counts=[0, 0], k=16, n=8, absent=9),
    dict(counts=[2] * 19, k=8, n=264),
    dict(counts=[17], k=200, n=8),
)


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "grouped": on_cpu(check_grouped_gemm, BF16, [70, 0, 129, 3], 136, 264, 9),
    "grouped_many": on_cpu(check_grouped_gemm, FP16, [1] * 10, 8, 264),
}
MUTANTS = [
    *generated("kernel_src/grouped_gemm.py", "grouped or grouped_many", "before grouped_mm grouped_outer tile_of"),
    *errors_in("kernel_src/grouped_gemm.py", "grouped", "read_weight",
         ("(expert, n, k)", "(0, n, k)"),
         ("(expert, k, n)", "(0, k, n)"),
         ("TILE_K), padding_mode=ZERO", "TILE_K)"),
         ("TILE_N), padding_mode=ZERO", "TILE_N)")),
    *errors_in("kernel_src/grouped_gemm.py", "grouped", "grouped_mm",
         ("if first < last:", "if True:"),
         ("padding_mode=ZERO, ", ""),
         ("traversal_steps=(1, TILE_K)", "traversal_steps=(TILE_M, TILE_K)"),
         ("ct.cdiv(x.shape[1], TILE_K)", "x.shape[1] // TILE_K")),
    *errors_in("kernel_src/grouped_gemm.py", "grouped", "grouped_outer",
         ("rest < last", "rest + 1 < last"),
         ("before(xs.load((rest, m)), rest, last, TILE_K)", "xs.load((rest, m))"),
         ("before(ys.load((rest, n)), rest, last, TILE_K)", "ys.load((rest, n))"),
         ("traversal_steps=(1, TILE_M)", "traversal_steps=(TILE_K, TILE_M)"),
         ("traversal_steps=(1, TILE_N)", "traversal_steps=(TILE_K, TILE_N)")),
    *errors_in("shared/ops/grouped_gemm.py", "grouped", "Groups.blocks", ("_mm_kernels[0].constant", "2 * _mm_kernels[0].constant")),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
GPU_TESTS = {"grouped_gemm": ("test_grouped_gemms", "test_experts_in_our_grouped_gemms")}
