"""RMSNorm that multiplies in fp32 and rounds once (GPT-OSS)."""

import functools
import importlib
import types

import torch

from tests.ops.common import BF16, CPU, FP32, errors_in, exact, leaf, randn
from tests.ops.generated import generated
from tests.ops.rms_norm import check_add_rms_norm, check_rms_norm, norm, rms_norm_exact
from tests.ops.signature import Signature
from tests.tolerances import assert_close


def check_round_last_rms_norm_weight(ops, device, dtype, shape, eps=1e-5):
    """An fp32 weight, and a result of x's dtype."""
    x, weight = leaf(randn(*shape, dtype=dtype, device=device)), leaf(randn(shape[-1], dtype=torch.float32, device=device, seed=1) + 1)
    y, dy = ops.rms_norm(x, weight, eps), randn(*shape, dtype=dtype, device=device, seed=2)
    y.backward(dy)
    x64, weight64 = exact(x), exact(weight)
    y64 = rms_norm_exact(x64, weight64, eps)
    y64.backward(dy.double().cpu())
    assert y.dtype == x.grad.dtype == dtype and weight.grad.dtype == torch.float32
    for name, found, wanted in (("y", y, y64), ("dx", x.grad, x64.grad)):
        assert_close(found, wanted, dtype, f"RMSNorm with an fp32 weight, {name}")
    assert_close(weight.grad, weight64.grad, torch.float32, "RMSNorm with an fp32 weight, dweight")


def check_that_round_last_rms_norm_rounds_once(ops, device, dtype, shape, eps=1e-5):
    """In half precision, with a weight of it and one in fp32: y, and the gradient of x of the norm alone, are the exact ones rounded;
    with a residual those of the rounded sum. A result that is a little off in fp32 falls on the other side of a tie once in thousands,
    one that was made from something rounded every third or fourth time."""
    x, residual, dy = (randn(*shape, dtype=dtype, device=device, seed=i) for i in (0, 1, 3))
    for weight_dtype in (dtype, torch.float32):
        weight = randn(shape[-1], dtype=weight_dtype, device=device, seed=2) + 1
        y, total = ops.add_rms_norm(x, residual, weight, eps)
        assert torch.equal(total, x + residual), "total is not the rounded sum"
        _assert_rounded_once(y, rms_norm_exact(exact(total), exact(weight), eps), "y of the sum")
        normalised, normalised64 = leaf(x), exact(x)
        y, y64 = ops.rms_norm(normalised, weight, eps), rms_norm_exact(normalised64, exact(weight), eps)
        y.backward(dy)
        y64.backward(dy.double().cpu())
        _assert_rounded_once(y, y64, "y")
        _assert_rounded_once(normalised.grad, normalised64.grad, "dx")


def _assert_rounded_once(found, wanted, what):
    off = (found.detach().cpu() != wanted.detach().to(found.dtype)).double().mean().item()
    assert off < 0.01, f"{off:.1%} of {what} are not the exact result, rounded once"


# GPT-OSS's hidden size, rows that are anything, and one that is too long for the kernels.
ROUND_LAST_RMS_NORM_SHAPES = ((3, 2880), (2, 3, 77), (19, 64), (2, 4096), (1, 4097))


def check_by_qwen3s_names(ops, check, shape, dtype=FP32):
    """GPT-OSS's norms, by the names of Qwen3's."""
    norms = importlib.import_module(f"{ops.__name__}.shared.ops.rms_norm")
    names = types.SimpleNamespace(**{name: functools.partial(getattr(norms, name), rounds="last") for name in ("rms_norm", "add_rms_norm")})
    check(names, CPU, dtype, shape, eps=0.5)


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "round_last_rms_norm": functools.partial(check_by_qwen3s_names, check=check_rms_norm, shape=(3, 40)),
    "round_last_rms_norm_many_rows": functools.partial(check_by_qwen3s_names, check=check_rms_norm, shape=(19, 40)),
    "round_last_add_rms_norm": functools.partial(check_by_qwen3s_names, check=check_add_rms_norm, shape=(3, 40)),
    "round_last_add_rms_norm_many_rows": functools.partial(check_by_qwen3s_names, check=check_add_rms_norm, shape=(19, 40)),
    "rounded_once": functools.partial(check_by_qwen3s_names, check=check_that_round_last_rms_norm_rounds_once, shape=(19, 77), dtype=BF16),
}
MUTANTS = [
    *generated("kernel_src/round_last_rms_norm.py", "round_last_rms_norm or round_last_add_rms_norm", "backward_rows"),
    *generated("kernel_src/round_last_rms_norm.py", "round_last_rms_norm", "normalise"),
    *generated("kernel_src/round_last_rms_norm.py", "round_last_add_rms_norm", "round_last_add_rms_norm_forward"),
    *generated("shared/ops/rms_norm_kernels.py", "round_last_rms_norm_many_rows", "WholeRows.backward"),
    *errors_in("kernel_src/elements.py", "round_last_rms_norm", "read_padded", ("check_bounds=True", "check_bounds=False"),
               ("padding_value=0", "padding_value=1")),
    *errors_in("kernel_src/elements.py", "round_last_rms_norm", "read_padded_once", ("check_bounds=True", "check_bounds=False")),
    *errors_in("kernel_src/elements.py", "round_last_rms_norm", "write_within", ("check_bounds=True", "check_bounds=False")),
    *errors_in("kernel_src/round_last_rms_norm.py", "round_last_rms_norm", "normalise",
         ("rstd, row, r,", "rstd, row, r * r,"),
         ("rstd, row, r,", "rstd, 0, r,")),
    *errors_in("kernel_src/round_last_rms_norm.py", "round_last_rms_norm", "round_last_rms_norm_forward",
         ("ct.bid(0)", "0"),
         ("read_padded(x, (row, cols))", "read_padded(x, (0, cols))")),
    *errors_in("kernel_src/round_last_rms_norm.py", "round_last_add_rms_norm", "round_last_add_rms_norm_forward",
         ("(row, cols), s, check_bounds=True", "(row, cols), s * s, check_bounds=True"),
         ("(row, cols), s, check_bounds=True", "(row, cols), s, check_bounds=False"),
         ("normalise(ct.astype(s, ct.float32)", "normalise(read_padded(x, (row, cols))"),
         ("normalise(ct.astype(s, ct.float32)",
          "normalise(read_padded(x, (row, cols)) + read_padded(residual, (row, cols))", "rounded_once")),
    *errors_in("kernel_src/round_last_rms_norm.py", "round_last_rms_norm", "backward_rows",
         ("w = read_padded(weight, cols)", "w = ct.astype(ct.astype(read_padded(weight, cols), dx.dtype), ct.float32)", "rounded_once"),
         ("ct.gather(rstd, row", "ct.gather(rstd, block", "round_last_rms_norm_many_rows"),
         ("range(block, x.shape[0]", "range(0, x.shape[0]", "round_last_rms_norm_many_rows"),
         ("x.shape[0], ct.num_blocks(0)", "x.shape[0], ct.num_blocks(0) + 1", "round_last_rms_norm_many_rows"),
         ("write_within(dweight, (block, cols)", "write_within(dweight, (0, cols)", "round_last_rms_norm_many_rows")),
    *errors_in("kernel_src/round_last_rms_norm.py", "round_last_rms_norm", "round_last_rms_norm_backward",
         ("TILE, False)", "TILE, True)"),
         ("(dx, dy, dy, x,", "(dx, x, dy, x,")),
    *errors_in("kernel_src/round_last_rms_norm.py", "round_last_add_rms_norm", "round_last_add_rms_norm_backward",
         ("TILE, True)", "TILE, False)"),
         ("backward_rows(dx, dy, dtotal, x", "backward_rows(dx, dtotal, dy, x")),
    *errors_in("shared/ops/rms_norm.py", "round_last_add_rms_norm", "rms_norm_backward_reference",
               ("dx if dtotal is None else dx + dtotal", "dx"), kernels=False),
    *errors_in("shared/ops/rms_norm.py", "rounded_once", "_scaled",
         ('rounds == "first"', "True"),
         ("x.to(acc) * rstd", "x * rstd.to(x.dtype)"), kernels=False),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
SIGNATURES = {
    "round_last_rms_norm": Signature(
        lambda s: {"x": (*s.rows, s.length), "weight": (s.length,)},
        lambda x, weight: norm(x, weight, 1e-5, last=True),
        rows=1,
        like=("rms_norm", {"eps": 1e-5, "rounds": "last"}),
    ),
    "round_last_add_rms_norm": Signature(
        lambda s: {"x": (*s.rows, s.length), "residual": (*s.rows, s.length), "weight": (s.length,)},
        lambda x, residual, weight: (norm(x + residual, weight, 1e-5, last=True), x + residual),
        rows=2,
        like=("add_rms_norm", {"eps": 1e-5, "rounds": "last"}),
    ),
}
GPU_TESTS = {"round_last_rms_norm": ("test_gpt_oss.py::test_norms",)}
