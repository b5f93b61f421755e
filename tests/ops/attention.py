"""Attention against float64: its oracle, cases of documents, and its kernels run one by one."""

import math
from typing import NamedTuple

import torch

from kernel_src import attention as kernels
from kernel_src.attention_plan import BLOCK, LIMITS, TILE, WALKS, attention_plan
from tests.interpreter import interpret
from tests.tolerances import RELATIVE_ERROR, assert_close

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

    def __str__(self):
        return "-".join(str(x).replace("torch.", "") for x in self if x is not None).replace(" ", "")


def packed(*lengths):
    """Documents of these lengths behind each other."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


CASES = (
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


# ---------------------------------------------------------------- exact
def reach(case: Case) -> "tuple[int, int]":
    """How many keys before and behind itself a query sees at most, in its document."""
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


def exact_attention(q, k, v, mask, scale, sinks=None):
    """[tokens, heads, head_dim] in float64, differentiable; rows that see nothing are zero."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~mask, -math.inf)
    column = s.new_full((s.shape[0], s.shape[1], 1), -1e4 if sinks is None else 0.0)
    column = column if sinks is None else column + sinks[:, None, None]
    p = torch.cat([s, column], 2).softmax(2)[:, :, :-1] * mask.any(1)[:, None]
    return torch.einsum("hqk,khd->qhd", p, v)


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
    sinks = randn(case.heads, dtype=torch.float32) if case.sinks else None
    return Inputs(q, k, v, sinks, randn(case.tokens, case.heads, case.head_dim))


def scale_of(case: Case) -> float:
    return case.head_dim**-0.5 if case.scale is None else case.scale


def exact_results(case: Case, x: Inputs) -> dict:
    leaves = {n: t.double().cpu().requires_grad_() for n, t in zip("qkv", x[:3], strict=True)}
    if x.sinks is not None:
        leaves["sinks"] = x.sinks.double().cpu().requires_grad_()
    out = exact_attention(leaves["q"], leaves["k"], leaves["v"], visible(case), scale_of(case), leaves.get("sinks"))
    out.backward(x.dout.double().cpu())
    return {"out": out.detach(), **{"d" + name: leaf.grad for name, leaf in leaves.items()}}


# ---------------------------------------------------------------- checks
def assert_rows_close(found, exact, dtype, what):
    """As `assert_close`, and every row of every head on its own: within 4 times the table's bound of its own norm, or of a typical
    row's where it is shorter (the gradient of a query that sees one key is zero, made of terms that are not)."""
    assert_close(found, exact, dtype, what)
    error = (found.double().cpu() - exact).norm(dim=-1)
    norms = exact.norm(dim=-1)
    typical = norms.square().mean().sqrt()
    bound = 4 * RELATIVE_ERROR[dtype] * torch.maximum(norms, typical) + 1e-5
    if (error > bound).any():
        row = int((error - bound).flatten().argmax())
        token, head = divmod(row, found.shape[1])
        raise AssertionError(
            f"{what} in {dtype}: the row of token {token}, head {head} is off by {error.flatten()[row]:.2e}, "
            f"expected at most {bound.flatten()[row]:.2e} (its norm is {norms.flatten()[row]:.2e})"
        )


def assert_results_close(found: dict, case: Case, x: Inputs) -> None:
    exact = exact_results(case, x)
    assert found.keys() >= exact.keys(), f"results {sorted(found)}, expected {sorted(exact)}"
    for name, wanted in exact.items():
        if name == "dsinks":
            assert_close(found[name], wanted, case.dtype, f"{name} of {case}")
        else:
            assert_rows_close(found[name], wanted, case.dtype, f"{name} of {case}")
    nothing = ~visible(case).any(1)
    assert not found["out"][nothing].any(), f"rows of {case} that see nothing are not zero"


# ---------------------------------------------------------------- the plan
def make_plan(case: Case, run=interpret) -> dict:
    """The plan's arrays by the names of the kernels' parameters."""
    blocks = -(-case.tokens // BLOCK)
    starts, ends = (torch.tensor(x, dtype=torch.int32) for x in zip(*case.documents, strict=True))
    tables = {"limits": torch.full((LIMITS, blocks * BLOCK), -7, dtype=torch.int32), "walks": torch.full((WALKS, blocks), -7, dtype=torch.int32)}
    left, right = reach(case)
    numbers = min(left, case.tokens), min(right, case.tokens), len(starts).bit_length(), case.tokens
    grid = (-(-blocks * BLOCK // TILE), 3)
    run(attention_plan, grid, (starts, ends, *tables.values(), *numbers, TILE, BLOCK))
    return tables


def check_plan(case: Case, run=interpret) -> None:
    """Intervals are the rows and columns of the mask; walks reach all that is seen, and claim no mask is needed only where all is seen;
    the longest walk comes first."""
    plan, mask = make_plan(case, run), visible(case)
    limits, walks_of = plan["limits"].split(2), plan["walks"].long().split(5)
    for side, rows in enumerate((mask, mask.T)):
        name, walks = (("limits of queries", "walks of queries"), ("limits of keys", "walks of keys"))[side]
        first, behind = limits[side]
        t = torch.arange(case.tokens)
        found = (t >= first[:, None]) & (t < behind[:, None])
        assert (found[: case.tokens] == rows).all(), f"{name} of {case} is wrong"
        assert not (behind > first)[case.tokens :].any(), f"{name} of {case}: rows behind the last token see something"
        block, start, full, full_end, end = walks_of[side]
        assert block.sort().values.tolist() == list(range(len(block))), f"{walks} of {case} are not of each block once"
        lengths = end - start
        assert (lengths[:-1] >= lengths[1:]).all(), f"{walks} of {case} do not begin with the longest"
        for b, *ends in zip(block.tolist(), start.tolist(), full.tolist(), full_end.tolist(), end.tolist(), strict=True):
            mine = rows[b * BLOCK : (b + 1) * BLOCK]
            some, every = mine.any(0).nonzero().flatten().tolist(), mine.all(0).nonzero().flatten().tolist()
            bounds = (some[0], some[-1] + 1) if some else (0, 0)
            if all(s < e for s, e in case.documents):
                assert (ends[0], ends[3]) == bounds, f"{walks} of {case}, block {b}: {ends}, expected {bounds}"
            else:  # a walk may start at an empty document
                assert not some or (ends[0] <= bounds[0] and ends[3] >= bounds[1]), f"{walks} of {case}, block {b}: {ends}, expected {bounds}"
            assert set(range(ends[1], ends[2])) == set(every), f"{walks} of {case}, block {b}: {ends}, all see {every}"


# ---------------------------------------------------------------- the kernels
class Tiles(NamedTuple):
    """STEP and MASK of the forward, dq and dkv kernels."""

    forward: tuple
    dq: tuple
    dkv: tuple


TILES = (
    Tiles((128, kernels.SOME_STEPS), (64, kernels.SOME_STEPS), (64, kernels.SOME_STEPS)),
    Tiles((64, kernels.SOME_STEPS), (32, kernels.EVERY_STEP), (32, kernels.EVERY_STEP)),
)


def run_kernels(case: Case, x: Inputs, tiles: Tiles, run=interpret) -> dict:
    """Every result by its name, from the kernels alone."""
    plan, blocks = make_plan(case), -(-case.tokens // BLOCK)
    new = {n: torch.full_like(t, math.nan, memory_format=torch.contiguous_format) for n, t in zip(("out", "dq", "dk", "dv"), (x.q, *x[:3]), strict=True)}
    lse, delta = (torch.full((case.heads, blocks * BLOCK), math.nan) for _ in range(2))
    scale = scale_of(case)
    base2 = scale * kernels.LOG2E
    constants = [(BLOCK, step, case.head_dim, 3, mask) for step, mask in tiles]
    tables = plan["limits"], plan["walks"]
    if x.sinks is None:
        run(kernels.attention_forward, (blocks * case.heads,), (*x[:3], *tables, new["out"], lse, base2, *constants[0]))
    else:
        run(kernels.attention_sink_forward, (blocks * case.heads,), (*x[:4], *tables, new["out"], lse, base2, *constants[0]))
    arrays = (*x[:3], new["out"], x.dout, lse, *tables, delta, new["dq"])
    run(kernels.attention_backward_dq, (blocks * case.heads,), (*arrays, base2, scale, *constants[1]))
    arrays = (*x[:3], x.dout, lse, delta, *tables, new["dk"], new["dv"])
    run(kernels.attention_backward_dkv, (blocks * case.kv_heads,), (*arrays, base2, scale, *constants[2]))
    if x.sinks is not None:
        new["dsinks"] = torch.full_like(x.sinks, math.nan)
        run(kernels.attention_sink_gradient, (case.heads,), (x.sinks, lse, delta, new["dsinks"], case.tokens, kernels.SINK_TILE))
    return new


def check_kernels(case: Case, tiles: Tiles, run=interpret) -> None:
    x = inputs_of(case)
    assert_results_close(run_kernels(case, x, tiles, run), case, x)
