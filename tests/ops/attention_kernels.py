"""Attention's kernels one by one, run by the interpreter, against float64; with other tiles than those that one GPU gets."""

import importlib
import math
from typing import NamedTuple

import torch

from interpreter import interpret
from kernel_src import attention as kernels
from kernel_src.attention_plan import BLOCK, LIMITS, TILE, WALKS
from tests.ops.attention import CAPPED, CASES, WIDE, Case, Inputs, assert_results_close, inputs_of, reach, scale_of, visible
from tests.ops.generated import generated


def module_of(name):
    """A file of kernel_src as it is now: the one with a planted error while there is one."""
    return importlib.import_module(f"kernel_src.{name}")


# ---------------------------------------------------------------- the plan
def make_plan(case: Case) -> dict:
    """The plan's arrays by the names of the kernels' parameters."""
    of = module_of("attention_plan")
    blocks = -(-case.tokens // BLOCK)
    documents = torch.tensor(case.documents, dtype=torch.int32).T.contiguous()
    shapes = {"limits": (LIMITS, blocks * BLOCK), "walks": (WALKS, blocks)}
    tables = {name: torch.full(shape, -7, dtype=torch.int32) for name, shape in shapes.items()}
    left, right = reach(case)
    numbers = min(left, case.tokens), min(right, case.tokens), len(case.documents).bit_length(), case.tokens
    grid = (-(-blocks * BLOCK // TILE), 3)
    interpret(of.attention_plan, grid, (documents, *tables.values(), *numbers, TILE, BLOCK))
    return tables


def check_plan(case: Case) -> None:
    """Intervals are the rows and columns of the mask; walks reach all that is seen, and claim no mask is needed only where all is seen;
    the longest walk comes first."""
    plan, mask = make_plan(case), visible(case)
    limits, walks_of = plan["limits"].split(2), plan["walks"].long().split(5)
    for side, rows in enumerate((mask, mask.T)):
        name, walks = (("limits of queries", "walks of queries"), ("limits of keys", "walks of keys"))[side]
        first, behind = limits[side]
        t = torch.arange(case.tokens)
        found = (t >= first[:, None]) & (t < behind[:, None])
        assert (found[: case.tokens] == rows).all(), f"{name} of {case} is wrong"
        assert not (behind > first)[case.tokens :].any(), f"{name} of {case}: rows after the last token see something"
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
                around = ends[0] <= bounds[0] and ends[3] >= bounds[1]
                assert around or not some, f"{walks} of {case}, block {b}: {ends}, expected {bounds}"
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


class Ran(NamedTuple):
    """What `run_passes` wrote: the results by their names, lse and delta; and all tensors of the kernel that writes dk and dv."""

    results: dict
    lse: torch.Tensor
    delta: torch.Tensor
    of_keys: tuple


def run_passes(case: Case, x: Inputs, forward, dq, dkv, of_forward: tuple, of_backward: tuple, parts: int = 1) -> Ran:
    """Runs the three kernels.

    forward, dq, dkv: (kernel, its constants). of_forward, of_backward: the numbers between a kernel's tensors and its constants. parts: the
    blocks that share a head's columns in the last kernel.
    """
    plan, blocks = make_plan(case), -(-case.tokens // BLOCK)
    like = {"out": x.q, "dq": x.q, "dk": x.k, "dv": x.v}
    new = {name: torch.full_like(t, math.nan, memory_format=torch.contiguous_format) for name, t in like.items()}
    lse, delta = (torch.full((case.heads, blocks * BLOCK), math.nan) for _ in range(2))
    tables, qkv, sinks = (plan["limits"], plan["walks"]), x[:3], x[3:4] if x.sinks is not None else ()
    of_keys = (*qkv, x.dout, lse, delta, *tables, new["dk"], new["dv"])
    queries, keys = (blocks * case.heads,), (blocks * case.kv_heads * parts,)
    interpret(forward[0], queries, (*qkv, *sinks, *tables, new["out"], lse, *of_forward, *forward[1]))
    interpret(dq[0], queries, (*qkv, new["out"], x.dout, lse, *tables, delta, new["dq"], *of_backward, *dq[1]))
    interpret(dkv[0], keys, (*of_keys, *of_backward, *dkv[1]))
    return Ran(new, lse, delta, of_keys)


def run_kernels(case: Case, x: Inputs, tiles: Tiles) -> dict:
    """Every result by its name, from the kernels alone."""
    of, scale = module_of("attention"), scale_of(case)
    base2, constants = scale * kernels.LOG2E, [(BLOCK, step, case.head_dim, 3, mask) for step, mask in tiles]
    forward = of.attention_forward if x.sinks is None else of.attention_sink_forward
    passes = zip((forward, of.attention_backward_dq, of.attention_backward_dkv), constants)
    new, lse, delta, _ = run_passes(case, x, *passes, (base2,), (base2, scale))
    if x.sinks is not None:
        new["dsinks"] = torch.full_like(x.sinks, math.nan)
        interpret(of.attention_sink_gradient, (case.heads,), (x.sinks, lse, delta, new["dsinks"], case.tokens, kernels.SINK_TILE))
    return new


def run_wide(case: Case, x: Inputs, part: int = 128) -> dict:
    """Does what `run_kernels` does, with the tiles of heads of 96 and 256, and with dk and dv by `part` columns where heads are of 256."""
    of, scale, width = module_of("attention"), scale_of(case), 128 if case.head_dim == 96 else case.head_dim
    base2, constants = scale * kernels.LOG2E, (BLOCK, 32, width, 2, kernels.EVERY_STEP)
    dkv, parts = (of.attention_backward_dkv, constants), 1
    if case.head_dim != 96:
        dkv, parts = (module_of("attention_wide").attention_backward_dkv_part, (BLOCK, 32, width, part, 2)), width // part
    passes = (of.attention_forward, constants), (of.attention_backward_dq, constants), dkv
    return run_passes(case, x, *passes, (base2,), (base2, scale), parts).results


def run_capped(case: Case, x: Inputs, tiles: Tiles) -> dict:
    """Does what `run_kernels` does where the scores are capped; with dk and dv by halves of the columns too, where heads are of 256."""
    of, scale = module_of("attention_capped"), scale_of(case)
    base2, inner = case.softcap * kernels.LOG2E, scale / case.softcap
    constants = [(BLOCK, step, case.head_dim, 2, mask) for step, mask in tiles]
    passes = zip((of.attention_capped_forward, of.attention_capped_backward_dq, of.attention_capped_backward_dkv), constants)
    new, *_, of_keys = run_passes(case, x, *passes, (base2, inner), (base2, scale, inner))
    if case.head_dim == 256:
        whole = [new[name].clone() for name in ("dk", "dv")]
        arrays = (*of_keys, base2, scale, inner, BLOCK, tiles.dkv[0], 256, 128, 2)
        interpret(of.attention_capped_backward_dkv_part, (-(-case.tokens // BLOCK) * case.kv_heads * 2,), arrays)
        assert all(map(torch.equal, whole, (new["dk"], new["dv"]))), f"dk and dv of {case} by parts are others"
    return new


def check_capped(case: Case, tiles: Tiles) -> None:
    x = inputs_of(case)
    assert_results_close(run_capped(case, x, tiles), case, x)


def check_wide(case: Case) -> None:
    x = inputs_of(case)
    assert_results_close(run_wide(case, x), case, x)


def check_kernels(case: Case, tiles: Tiles) -> None:
    x = inputs_of(case)
    assert_results_close(run_kernels(case, x, tiles), case, x)


# ---------------------------------------------------------------- planted errors
def check_every_kernel(_package):
    for case in CASES:
        for tiles in TILES:
            check_kernels(case, tiles)


def check_every_wide(_package):
    for case in WIDE:
        check_wide(case)


def check_every_capped(_package):
    for case in CAPPED[:2]:
        check_capped(case, TILES[1])
    check_capped(CAPPED[3], TILES[0])


def check_every_plan(_package):
    for case in CASES:
        check_plan(case)


CHECKS = {
    "attention_kernels": check_every_kernel,
    "attention_plan": check_every_plan,
    "attention_wide": check_every_wide,
    "attention_capped": check_every_capped,
}
MUTANTS = [
    *generated("kernel_src/attention.py", "attention_kernels or attention_capped", "attend backward_dq dkv_step"),
    *generated("kernel_src/attention.py", "attention_kernels",
               "attention_sink_forward attention_sink_gradient backward_dkv interval_of walk_of within write_attended"),
    *generated("kernel_src/attention_plan.py", "attention_plan", "bounds_of rank_of write_limits"),
    *generated("kernel_src/attention_wide.py", "attention_wide or attention_capped", "backward_dkv_part"),
    ("kernel_src/attention.py", "walk_of", "ct.cdiv(full, STEP)", "full // STEP", "attention_kernels"),
    ("kernel_src/attention.py", "walk_of", "full_end // STEP", "ct.cdiv(full_end, STEP)", "attention_kernels"),
    ("kernel_src/attention.py", "attend", "(step < unmasked) | (step >= masked)", "step >= masked", "attention_kernels"),
    ("kernel_src/attention.py", "attend", "(step < unmasked) | (step >= masked)", "step < unmasked", "attention_kernels"),
    ("kernel_src/attention.py", "write_attended", "ct.maximum(total, 1e-30)", "total", "attention_kernels"),
    ("kernel_src/attention.py", "forward", "head // (heads // k.shape[1])", "head % k.shape[1]", "attention_kernels"),
    ("kernel_src/attention.py", "attention_sink_forward", "head // (heads // k.shape[1])", "0", "attention_kernels"),
    ("kernel_src/attention.py", "backward_dq", "head // (heads // k.shape[1])", "head % k.shape[1]", "attention_kernels"),
    ("kernel_src/attention.py", "backward_dq", "(step < unmasked) | (step >= masked)", "step < unmasked", "attention_kernels"),
    ("kernel_src/attention.py", "dkv_step", "if MASKS:", "if 0:", "attention_kernels"),
    ("kernel_src/attention.py", "backward_dkv", "range((unmasked - start) * group)", "range(0)", "attention_kernels"),
    ("kernel_src/attention.py", "backward_dkv", "range((masked - unmasked) * group)", "range(masked - unmasked)",
     "attention_kernels"),
    ("kernel_src/attention.py", "backward_dkv", "range((end - masked) * group)", "range(0)", "attention_kernels"),
    ("kernel_src/attention_wide.py", "part_of", "(step, head, part)", "(step, head, 0)", "attention_wide"),
    ("kernel_src/attention_wide.py", "write_part", "(block, head, part)", "(block, head, 0)", "attention_wide"),
    ("kernel_src/attention_wide.py", "backward_dkv_part", "rest % kv_heads", "0 * rest", "attention_wide"),
    ("kernel_src/attention_wide.py", "backward_dkv_part", "ct.astype(p, dqueries.dtype)", "ct.astype(dp, dqueries.dtype)",
     "attention_wide"),
    ("kernel_src/attention_capped.py", "attention_capped_forward", "scale, inner, BLOCK", "scale, scale, BLOCK", "attention_capped"),
    ("kernel_src/attention_capped.py", "attention_capped_backward_dq", "plain, inner, BLOCK", "inner, inner, BLOCK", "attention_capped"),
    ("kernel_src/attention_capped.py", "attention_capped_backward_dkv", "plain, inner, BLOCK", "plain, plain, BLOCK", "attention_capped"),
    ("kernel_src/attention_capped.py", "attention_capped_backward_dkv_part", "LATENCY, True", "LATENCY, False",
     "attention_capped"),
    ("kernel_src/attention_plan.py", "document_of", "<= t", "< t", "attention_plan"),
    ("kernel_src/attention_plan.py", "document_of", "high - low > 1", "high - low > 2", "attention_plan"),
    ("kernel_src/attention_plan.py", "walk", "+ BLOCK, tokens) - 1", "+ BLOCK, tokens)", "attention_plan"),
    ("kernel_src/attention_plan.py", "walk", "top - left), following", "top - left), 0", "attention_plan"),
    ("kernel_src/attention_plan.py", "walk", "some & bottom_inside &", "some &", "attention_plan"),
    ("kernel_src/attention_plan.py", "walk", "ct.maximum(bottom_start, bottom - left)", "ct.maximum(bottom_start, top - left)",
     "attention_plan"),
    ("kernel_src/attention_plan.py", "walk", "ct.minimum(top_end, top + right + 1)", "ct.minimum(top_end, bottom + right + 1)",
     "attention_plan"),
    ("kernel_src/attention_plan.py", "bounds_of", "ct.minimum(end, tokens)", "end", "attention_plan"),
    ("kernel_src/attention_plan.py", "attention_plan", "ct.where(keys, right, left)", "left", "attention_plan"),
]  # fmt: skip
