"""The products of low-rank adapters."""

import importlib

import torch

from tests.ops.common import BF16, FP16, FP32, errors_in, on_cpu, randn
from tests.ops.generated import generated
from tests.tolerances import assert_close


def check_low_rank_gradients(ops, device, dtype, result, tokens, out, rank, features):
    """Both gradients, of a slice of what several adapters have side by side, between numbers that are none."""
    module = importlib.import_module(f"{ops.__name__}.shared.ops.low_rank")
    dy, x = (randn(tokens, columns, dtype=dtype, device=device, seed=i) for i, columns in enumerate((out, features)))
    low, dlow = (torch.full((tokens, 3 * rank), torch.nan, dtype=dtype, device=device)[:, rank : 2 * rank] for _ in range(2))
    for seed, part in enumerate((low, dlow)):
        part.copy_(randn(tokens, rank, dtype=dtype, device=device, seed=2 + seed, scale=tokens**-0.5))
    found = module.low_rank_gradients(dy, low, x, dlow, result)
    assert found is not None, "no kernel took them"
    expected = dlow.double().t() @ x.double(), dy.double().t() @ low.double()
    for name, tensor, exact in zip(("da", "db"), found, expected, strict=True):
        assert tensor.dtype == result and tensor.is_contiguous()
        # Rounded once, to the result's dtype; the products of half precision numbers are exact in fp32.
        assert_close(tensor, exact, result, name)


def check_low_rank_add(ops, device, dtype, tokens, out, rank, features):
    """Onto a slice of columns, as b and as a are stored. features: columns beside the slice."""
    module = importlib.import_module(f"{ops.__name__}.shared.ops.low_rank")
    low, b = (randn(*shape, dtype=dtype, device=device, seed=i, scale=rank**-0.25) for i, shape in enumerate(((tokens, rank), (rank, out))))
    whole = randn(tokens, 2 * features + out, dtype=dtype, device=device, seed=2)
    for transposed in (False, True):
        found = whole.clone()
        module.low_rank_add(found[:, features : features + out], low, b.t().contiguous() if transposed else b, transposed)
        expected = whole.double()
        expected[:, features : features + out] += low.double() @ b.double()
        assert_close(found, expected, dtype, f"y + low @ b, transposed {transposed}")
        beside = [slice(0, features), slice(features + out, None)]
        assert all(torch.equal(found[:, part], whole[:, part]) for part in beside), "columns beside the slice have changed"


# Tokens on both sides of a step, columns on both sides of a tile, and ranks that are those of a variant and those that are not.
CASES = (
    dict(tokens=1, out=8, rank=8, features=8),
    dict(tokens=64, out=64, rank=16, features=128),
    dict(tokens=65, out=136, rank=24, features=264),
    dict(tokens=200, out=264, rank=64, features=120),
)
MANY, ODD = dict(tokens=1030, out=8, rank=8, features=8), dict(tokens=3, out=12, rank=5, features=7)
DTYPES = ((BF16, FP32), (BF16, BF16), (FP16, FP32), (FP16, FP16))


def check_what_is_left_to_pytorch(ops, device):
    """None where a product of cuBLAS is faster, or no kernel takes the tensors."""
    module = importlib.import_module(f"{ops.__name__}.shared.ops.low_rank")

    def found(tokens=4, out=16, rank=8, features=16, dtype=BF16, result=FP32):
        shapes = (tokens, out), (tokens, rank), (tokens, features), (tokens, rank)
        return module.low_rank_gradients(*(torch.ones(shape, dtype=dtype, device=device) for shape in shapes), result)

    assert found() is not None and found(tokens=module.FEW) is not None
    for different in (dict(tokens=module.FEW + 1), dict(rank=72), dict(rank=4), dict(out=12), dict(features=20), dict(dtype=FP32)):
        assert found(**different) is None, different
    assert found(tokens=0) is None and found(result=FP16) is None


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "low_rank": on_cpu(check_low_rank_gradients, BF16, FP32, 65, 136, 24, 264),
    "low_rank_add": on_cpu(check_low_rank_add, BF16, 130, 136, 24, 64),
    "low_rank_add_square": on_cpu(check_low_rank_add, BF16, 3, 8, 8, 8),
    "low_rank_add_many": on_cpu(check_low_rank_add, FP16, *MANY.values()),
    "low_rank_left": on_cpu(check_what_is_left_to_pytorch),
}
MUTANTS = [
    *generated("kernel_src/low_rank.py", "low_rank", "low_rank_gradients"),
    *generated("shared/ops/low_rank.py", "low_rank_add or low_rank_add_many or low_rank", "_add_grid _grid low_rank_add"),
    *errors_in("kernel_src/low_rank.py", "low_rank", "transposed_product",
         ("ct.cdiv(wide.shape[0], TOKENS)", "wide.shape[0] // TOKENS"),
         ("(t, column)", "(0, column)"),
         ("(t, column)", "(t, 0)"),
         ("(t, 0)", "(0, 0)"),
         ("TILE), padding_mode=ZERO", "TILE)"),
         ("RANK), padding_mode=ZERO", "RANK)"),
         ("right, total)", "right, ct.zeros((TILE, RANK), dtype=ct.float32))")),
    *errors_in("kernel_src/low_rank.py", "low_rank", "low_rank_gradients",
         ("ct.cdiv(dy.shape[1], TILE)", "dy.shape[1] // TILE"),
         ("index=(block, 0)", "index=(0, 0)"),
         ("(dy, low, block,", "(dy, dlow, block,")),
    *errors_in("kernel_src/low_rank.py", "low_rank_add", "low_rank_add",
         ("ct.cdiv(y.shape[1], TILE)", "y.shape[1] // TILE"),
         ("low, index=(t, 0)", "low, index=(0, 0)"),
         ("b, index=(column, 0)", "b, index=(0, 0)"),
         ("b, index=(0, column)", "b, index=(0, 0)"),
         ("y, index=(t, column), shape", "y, index=(t, 0), shape"),
         ("(TOKENS, RANK), padding_mode=ZERO", "(TOKENS, RANK)"),
         ("(TILE, RANK), padding_mode=ZERO", "(TILE, RANK)"),
         ("(RANK, TILE), padding_mode=ZERO", "(RANK, TILE)"),
         ("ct.mma(left, right, total)", "ct.mma(left, right, ct.zeros((TOKENS, TILE), dtype=ct.float32))")),
    *errors_in("shared/ops/low_rank.py", "low_rank_add_square", "low_rank_add",
         ("_add_kernels[transposed]", "_add_kernels[0]")),
    *errors_in("shared/ops/low_rank.py", "low_rank_left", "low_rank_gradients",
         ("> FEW", ">= FEW"),
         ("> FEW", "> 2 * FEW"),
         ("if not _kernel", "if _kernel"),
         ("return da, db", "return db, da", "low_rank")),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
GPU_TESTS = {"low_rank": ("test_low_rank",)}
