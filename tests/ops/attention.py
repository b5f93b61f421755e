"""Attention over documents: what it is in float64, cases of documents, and its checks. Those of single kernels: attention_kernels.py."""

import importlib
import math
from typing import NamedTuple

import torch

from tests.ops.common import errors_in
from tests.ops.generated import generated
from tests.tolerances import RELATIVE_ERROR, assert_close, relative_error

BF16, FP16 = torch.bfloat16, torch.float16


class Case(NamedTuple):
    """documents: (start, end) of each, in tokens; what no document holds is padding. window: keys that a query sees, its own among
    them. split: whether q, k and v are parts of one projection's rows."""

    tokens: int
    documents: tuple
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    dtype: torch.dtype = BF16
    causal: bool = True
    window: "int | None" = None
    sinks: bool = False
    scale: "float | None" = None
    packed: bool = False
    softcap: "float | None" = None

    def __str__(self):
        return "-".join(str(x).replace("torch.", "") for x in self if x is not None).replace(" ", "")


def packed(*lengths):
    """Documents of these lengths, one after the other."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


CASES = (
    Case(160, ((0, 90), (95, 159)), heads=4, kv_heads=2, sinks=True),
    Case(160, packed(90, 69), heads=4, kv_heads=2, dtype=FP16, packed=True),
    Case(90, ((0, 9), (70, 120)), heads=1, window=33, causal=False),  # a document that reaches past the last token
    Case(64, packed(64)),
    Case(1, packed(1), dtype=FP16),
    Case(200, packed(200), heads=1, head_dim=128),
    Case(200, packed(200), dtype=FP16, causal=False, scale=0.3),
    Case(151, packed(37, 1, 64, 2, 47), heads=4, head_dim=128, packed=True),
    Case(193, packed(65, 127, 1), dtype=FP16, causal=False, packed=True),
    Case(150, ((0, 70), (90, 150)), sinks=True, heads=8),  # right padding, then left
    Case(140, ((70, 140),), heads=1, dtype=FP16),  # a block of padding alone, then one that begins with it
    Case(330, ((0, 9), (200, 330)), heads=1, sinks=True, window=33),
    Case(210, packed(130, 80), window=17, sinks=True, dtype=FP16),
    Case(260, packed(260), heads=1, window=64),
    Case(150, packed(100, 50), heads=1, window=20, causal=False),
    Case(129, packed(129), heads=4, kv_heads=4, sinks=True, head_dim=128, dtype=FP16),
    Case(64, ((3, 3), (5, 60), (60, 60))),  # documents without tokens
)
# Of heads that have kernels of their own, where a package ships them.
WIDE = (
    Case(150, packed(37, 1, 65, 47), heads=4, kv_heads=2, head_dim=96, packed=True),
    Case(140, ((0, 70), (90, 140)), heads=2, head_dim=256, dtype=FP16, window=33),
    Case(140, packed(100, 40), heads=4, kv_heads=2, head_dim=256, causal=False),
)


# Whose scores are capped, as Gemma 2's: low caps, so that most scores are near them.
CAPPED = (
    Case(150, packed(37, 1, 65, 47), heads=4, kv_heads=2, head_dim=128, packed=True, softcap=0.8),
    Case(140, ((0, 70), (90, 140)), heads=2, head_dim=256, window=33, softcap=0.7),
    Case(140, packed(100, 40), heads=4, kv_heads=2, head_dim=256, causal=False, softcap=50.0),
    Case(64, packed(64), heads=1, head_dim=128, scale=0.5, softcap=2.0),
)


# ---------------------------------------------------------------- exact
def reach(case: Case) -> "tuple[int, int]":
    """How many keys before and after itself a query sees at most, in its document."""
    left = case.tokens if case.window is None else case.window - 1
    return left, 0 if case.causal else left


def visible(case: Case) -> torch.Tensor:
    """[queries, keys]: which sees which, from the definition."""
    t = torch.arange(case.tokens)
    document = torch.full((case.tokens,), -1)
    for number, (start, end) in enumerate(case.documents):
        document[start:end] = number
    distance = t[:, None] - t[None, :]
    left, right = reach(case)
    return (document[:, None] == document[None, :]) & (document[:, None] >= 0) & (distance <= left) & (-distance <= right)


def exact_attention(q, k, v, mask, scale, sinks=None, softcap=None):
    """(out [tokens, heads, head_dim], lse [heads, tokens]) in float64, differentiable; rows that see nothing are zero."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q, k) * scale
    s = (s if softcap is None else softcap * torch.tanh(s / softcap)).masked_fill(~mask, -math.inf)
    column = s.new_full((s.shape[0], s.shape[1], 1), -1e4 if sinks is None else 0.0)
    column = column if sinks is None else column + sinks[:, None, None]
    s = torch.cat([s, column], 2)
    p = s.softmax(2)[:, :, :-1] * mask.any(1)[:, None]
    return torch.einsum("hqk,khd->qhd", p, v), s.logsumexp(2)


class Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: "torch.Tensor | None"
    dout: torch.Tensor


def inputs_of(case: Case, device="cpu", seed=0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape, dtype=case.dtype):
        return torch.randn(shape, generator=generator).to(device, dtype)

    heads = case.heads, case.kv_heads, case.kv_heads
    if case.packed:
        q, k, v = randn(case.tokens, sum(heads), case.head_dim).split(heads, 1)
    else:
        q, k, v = (randn(case.tokens, n, case.head_dim) for n in heads)
    sinks = randn(case.heads, dtype=torch.promote_types(case.dtype, torch.float32)) if case.sinks else None
    return Inputs(q, k, v, sinks, randn(case.tokens, case.heads, case.head_dim))


def scale_of(case: Case) -> float:
    return case.head_dim**-0.5 if case.scale is None else case.scale


def exact_results(case: Case, x: Inputs, returned: "torch.Tensor | None" = None) -> dict:
    """returned: an output that is not exact, of which the gradients take delta, rowsum(dout * out), as every flash attention does. What
    that output's rounding does to delta is small beside the terms of a row of ds, and not beside their difference: a query that sees few
    keys may have a short gradient, of which PyTorch's own flash attention in bf16 loses as much."""
    given = {name: t for name, t in zip(("q", "k", "v", "sinks"), x[:4], strict=True) if t is not None}
    leaves = {name: t.to("cpu", torch.float64, copy=True).requires_grad_() for name, t in given.items()}
    out, lse = exact_attention(leaves["q"], leaves["k"], leaves["v"], visible(case), scale_of(case), leaves.get("sinks"), case.softcap)
    dout = x.dout.double().cpu()
    loss = (out * dout).sum()
    if returned is not None:  # ds = p * (dp - delta), and p is the gradient of lse
        loss = loss - (((returned.double().cpu() - out.detach()) * dout).sum(2).T * lse).sum()
    loss.backward()
    return {"out": out.detach(), **{"d" + name: leaf.grad for name, leaf in leaves.items()}}


# ---------------------------------------------------------------- checks
def assert_results_close(found: dict, case: Case, x: Inputs) -> None:
    """Every result as a whole against the exact one, and row by row against that of the output that was returned."""
    exact, of_returned = exact_results(case, x), exact_results(case, x, found["out"])
    assert found.keys() >= exact.keys(), f"results {sorted(found)}, expected {sorted(exact)}"
    for name, wanted in exact.items():
        error, what = relative_error(found[name], wanted), f"{name} of {case}"
        bound = RELATIVE_ERROR[case.dtype]
        assert error <= bound, f"{what}: relative error {error:.2e}, expected at most {bound:.1e}"
        assert_close(found[name], of_returned[name], case.dtype, what)
    nothing = ~visible(case).any(1)
    assert not found["out"][nothing].any(), f"rows of {case} that see nothing are not zero"


# ---------------------------------------------------------------- the operation
def results_of(attention, x: Inputs, **options) -> dict:
    """What `attention`, the public function, gives and what its backward pass does."""
    leaves = {n: t.detach().requires_grad_() for n, t in zip(("q", "k", "v", "sinks"), x[:4], strict=True) if t is not None}
    out = attention(leaves["q"], leaves["k"], leaves["v"], sinks=leaves.get("sinks"), **options)
    out.backward(x.dout)
    return {"out": out.detach(), **{"d" + name: leaf.grad for name, leaf in leaves.items()}}


def plan_of(ops, case: Case, device):
    documents = torch.tensor(case.documents, dtype=torch.int32, device=device).T.contiguous()
    return ops.AttentionPlan(documents, case.tokens, case.causal, case.window)


def check_operation(ops, case: Case, device="cpu") -> None:
    x = inputs_of(case, device)
    found = results_of(ops.attention, x, plan=plan_of(ops, case, device), scale=case.scale, softcap=case.softcap)
    assert_results_close(found, case, x)


def check_plan_reference(ops, case: Case, device="cpu") -> None:
    """The plan of the PyTorch path beside that of the kernel: the same tokens see each other, and kernels walk by either."""
    x, plan = inputs_of(case, device), plan_of(ops, case, device)
    found = results_of(ops.attention, x, plan=plan, scale=case.scale)
    left, right = reach(case)
    documents = torch.tensor(case.documents, dtype=torch.int32, device=device).T.contiguous()
    plan_reference = importlib.import_module(f"{ops.__name__}_plan").plan_reference
    limits, walks = plan_reference(documents, case.tokens, min(left, case.tokens), min(right, case.tokens))
    seen = plan.limits[1::2] > plan.limits[::2]
    assert torch.equal(limits[1::2] > limits[::2], seen) and torch.equal(limits[:, seen.any(0)], plan.limits[:, seen.any(0)])
    plan.limits, plan.walks = limits, walks
    again = results_of(ops.attention, x, plan=plan, scale=case.scale)
    assert all(torch.equal(found[name], again[name]) for name in found)


def check_plans(ops, device="cpu") -> None:
    """Every form in which a batch names its documents gives the same plan."""
    rows = [[(0, 5), (5, 40)], [(3, 37)], [(0, 1), (1, 30)]]
    length, documents = 40, []
    mask, positions = torch.zeros(3, length, dtype=torch.long), torch.zeros(3, length, dtype=torch.long)
    for i, row in enumerate(rows):
        for start, end in row:
            mask[i, start:end], positions[i, start:end] = 1, torch.arange(end - start)
            documents.append((i * length + start, i * length + end))
    wanted = visible(Case(3 * length, tuple(documents)))

    def seen(plan):
        t = torch.arange(plan.tokens, device=device)
        first, behind = plan.limits[:2, : plan.tokens]
        return ((t >= first[:, None]) & (t < behind[:, None])).cpu()

    plan = ops.AttentionPlan.from_position_ids(positions.to(device), mask.to(device))
    assert (seen(plan) == wanted).all(), "position_ids with padding"
    only = ops.AttentionPlan.from_padding_mask(mask.to(device)[1:])
    wanted = visible(Case(2 * length, ((3, 37), (length, length + 30))))
    assert (seen(only) == wanted).all(), "padding alone"
    cu = torch.tensor([0, 5, 40], device=device)
    wanted = visible(Case(45, packed(5, 35)))
    assert (seen(ops.AttentionPlan.from_cu_seqlens(cu, 45)) == wanted).all(), "cu_seqlens"
    assert (seen(ops.AttentionPlan.from_position_ids(positions.to(device)[:1])) == wanted[:40, :40]).all(), "position_ids"


def check_packed_equals_apart(ops, device="cpu") -> None:
    """Every document of a packed batch as if it were alone, and rows of a batch as if they were packed."""
    case = Case(120, packed(50, 1, 69), heads=4, kv_heads=2)
    x = inputs_of(case, device)
    found = results_of(ops.attention, x, cu_seqlens=torch.tensor([0, 50, 51, 120], device=device))
    for start, end in case.documents:
        part = Inputs(*(t if t is None else t[start:end] for t in x))
        alone = results_of(ops.attention, part)
        for name, wanted in alone.items():
            assert_close(found[name][start:end], wanted.double(), case.dtype, f"{name} of one document")
    batch = Inputs(*(t if t is None else t.unflatten(0, (2, 60)) for t in x))
    rows = results_of(ops.attention, batch, padding_mask=torch.ones(2, 60, device=device))
    flat = results_of(ops.attention, x, cu_seqlens=torch.tensor([0, 60, 120], device=device))
    for name, wanted in flat.items():
        assert torch.equal(rows[name].flatten(0, 1), wanted), f"{name} of rows and of documents differ"


# ---------------------------------------------------------------- planted errors
def check_attention(package):
    """With sinks, groups and padding, then as parts of one projection."""
    module = importlib.import_module(f"{package.__name__}.shared.ops.attention")
    for case in CASES[:2]:
        check_operation(module, case)


def check_capped(package):
    module = importlib.import_module(f"{package.__name__}.shared.ops.attention")
    check_operation(module, CAPPED[0])


def check_some_heads_at_once(package):
    """As if 32 bits counted no further than two heads of k with their queries, of three."""
    names = "attention", "attention_heads", "arrays"
    module, heads, arrays = (importlib.import_module(f"{package.__name__}.shared.ops.{name}") for name in names)
    most = heads.REACH
    for case in (Case(120, packed(50, 1, 69), heads=6, kv_heads=3, sinks=True), Case(120, packed(50, 70), 6, 3, packed=True)):
        try:
            heads.REACH = arrays.REACH = 2 * case.tokens * 2 * case.head_dim
            check_operation(module, case)
        finally:
            heads.REACH = arrays.REACH = most


CHECKS = {"attention": check_attention, "capped": check_capped, "heads": check_some_heads_at_once}
MUTANTS = [
    *generated("shared/ops/attention.py", "heads or attention or capped", "_Attention.backward _Attention.forward _forward"),
    *generated("shared/ops/attention.py", "capped", "_scores", kernels=False),
    *generated("shared/ops/attention_heads.py", "heads", "parts_of_heads"),
    *errors_in("shared/ops/attention.py", "attention", "_Attention.forward",
         ("ctx.scale, ctx.softcap = scale,", "ctx.scale, ctx.softcap = 1.1 * scale,")),
    *errors_in("shared/ops/attention.py", "attention", "_backward",
         ("_dkv_kernel_of(k, capped)(q, k, v, dout, lse, delta,", "_dkv_kernel_of(k, capped)(q, k, v, dout, delta, lse,")),
    *errors_in("shared/ops/attention.py", "attention", "attention_backward_reference",
         (".sum(1).transpose(0, 1)\n        dv", "[:, 0].transpose(0, 1)\n        dv"),
         ("dsinks -=", "dsinks +="), kernels=False),
    *errors_in("shared/ops/attention.py", "attention", "attention_reference",
         ("torch.logaddexp(total,", "torch.maximum(total,"), kernels=False),
    *errors_in("shared/ops/attention.py", "capped", "_backward", ("softcap * LOG2E, scale,", "softcap * LOG2E, 1.1 * scale,")),
    *errors_in("shared/ops/attention.py", "capped", "_Attention.forward", ("= scale, softcap", "= scale, 2 * softcap")),
    *errors_in("shared/ops/attention.py", "heads", "_forward", ("_forward(q_part, k_part, v_part,", "_forward(q_part, v_part, k_part,")),
    *errors_in("shared/ops/attention.py", "heads", "_backward",
         ("dq[:, heads], dk[:, keys], dv[:, keys] =", "dq[:, heads], dv[:, keys], dk[:, keys] ="),
         ("lse[heads].contiguous()", "lse[: heads.stop - heads.start].contiguous()"),
         ("dsinks[heads] = found[3]", "dsinks[heads] = -found[3]")),
    *errors_in("shared/ops/attention_heads.py", "heads", "of_heads", ("tensor[:, heads].contiguous()", "-tensor[:, heads].contiguous()")),
    *errors_in("shared/ops/attention_plan.py", "attention", "plan_reference",
         ("& (t < ends[at])", ""), kernels=False),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
def _plan_of_70_tokens(new) -> tuple:
    """(limits, walks) of one causal document."""
    t = torch.arange(128)
    limits = torch.where(t < 70, torch.stack((0 * t, t + 1, t, 0 * t + 70)), 0)
    queries, keys = [[1, 0], [0, 0], [0, 0], [65, 1], [70, 64]], [[0, 1], [0, 64], [63, 69], [70, 70], [70, 70]]
    return limits.to(new.device, torch.int32), new.integers(queries + keys, torch.int32)


def _forward(new):
    heads, plan = (new(70, 4, 64), new(70, 2, 64, seed=1), new(70, 2, 64, seed=2)), _plan_of_70_tokens(new)
    return [(*heads, sinks, *plan, 0.125, *cap) for sinks, *cap in ((None,), (new.exact(4),), (None, 2.0))]


def _backward(new):
    out, lse = new(70, 4, 64, seed=3), 9 + new.exact(4, 128).abs()
    return [(out, *call[:4], 2 * out, lse, *call[4:]) for call in _forward(new)]


def _plans(new):
    documents = new.integers([[0], [70]], torch.int32)
    return [(documents, 70, 70, 0), (documents, 70, 2, 2)]


OPERATORS = {"attention_plan": _plans, "attention_forward": _forward, "attention_backward": _backward}
GPU_TESTS = {
    "attention": ("test_attention.py",),
    "attention_plan": ("test_attention.py",),
    "attention_capped": ("test_attention_of_capped_scores",),
    "attention_wide": ("test_attention_with_heads",),
}
