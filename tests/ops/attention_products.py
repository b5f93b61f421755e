"""Attention by matrix products: what `attention` computes in float64, for heads of any size, and errors that must be noticed."""

import importlib
from typing import NamedTuple

import torch

from tests.ops.attention import Case, Inputs, exact_attention, inputs_of, packed, visible
from tests.ops.common import errors_in
from tests.ops.generated import generated
from tests.tolerances import assert_close


class Rows(NamedTuple):
    """case: of all rows; rows: of the batch; plain: as of `Reach`."""

    case: Case
    rows: int = 1
    plain: bool = False

    def __str__(self):
        return f"{self.case}-{self.rows}-{'plain' * self.plain}"


F32 = torch.float32
CASES = (
    Rows(Case(26, packed(13, 13), heads=6, kv_heads=2, head_dim=8, dtype=F32), 2, True),
    Rows(Case(26, packed(13, 13), heads=6, kv_heads=3, head_dim=8, dtype=F32, window=4, scale=1.0), 2),
    Rows(Case(26, ((4, 13), (13, 22)), heads=4, kv_heads=1, head_dim=8, dtype=F32, scale=0.7), 2),
    Rows(Case(26, packed(5, 8, 1, 12), heads=2, kv_heads=2, head_dim=8, packed=True, window=3), 2),
    Rows(Case(30, packed(30), heads=8, kv_heads=1, head_dim=16), 1, True),
)


def check_products(package, given: Rows, queries: int = 5, device="cpu") -> None:
    """queries: at a time, fewer than in a row."""
    module, plans = (importlib.import_module(f"{package.__name__}.shared.ops.{name}") for name in ("attention_products", "attention"))
    case, x = given.case, inputs_of(given.case, device)
    documents = torch.tensor(case.documents, dtype=torch.int32, device=device).t().contiguous()
    plan = plans.AttentionPlan(documents, case.tokens, window=case.window)
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    exact = [t.detach().double().cpu().requires_grad_() for t in leaves]
    most, module.ROWS = module.ROWS, (2, queries)
    try:
        out = module.attention_by_products(*leaves, plan, module.Reach(given.rows, given.plain), case.scale)
        found = (out, *torch.autograd.grad(out, leaves, x.dout))
    finally:
        module.ROWS = most
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    wanted, _ = exact_attention(*exact, visible(case), scale)
    for name, mine, other in zip(Inputs._fields, found, (wanted, *torch.autograd.grad(wanted, exact, x.dout.double().cpu())), strict=False):
        assert_close(mine, other.detach(), case.dtype, f"{name} of {given}")
    assert found[0].is_contiguous()


def check_some(package) -> None:
    for given in CASES[:4]:
        check_products(package, given)


CHECKS = {"attention by products": check_some}
FILE, CHECK = "shared/ops/attention_products.py", "attention by products"
MUTANTS = [
    *generated(FILE, "attention by products", "_Products.backward _Products.forward", kernels=False),
    *errors_in(FILE, CHECK, "_Products.forward", ("= reach, scale", "= reach, 1.1 * scale"), kernels=False),
    *errors_in(FILE, CHECK, "_Products.backward",
         ("dk[:, at] += _product(ds.mT, queries)", "dk[:, at] = _product(ds.mT, queries)"), kernels=False),
    *errors_in(FILE, CHECK, "_pieces",
         ("start - reach.window + 1", "start - reach.window + 2"),
         ("reach.plain and reach.window is None", "reach.window is None"),
         ("(t < first) | (t >= behind)", "t >= behind"), kernels=False),
    *errors_in(FILE, CHECK, "_probabilities", ("scores *= scale", "pass"), kernels=False),
    *errors_in(FILE, CHECK, "_apart", (".permute(2, 0, 1, 3)", ".permute(2, 1, 0, 3)"), kernels=False),
]  # fmt: skip
