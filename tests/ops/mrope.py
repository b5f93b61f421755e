"""Multimodal and partial rotary embedding: the models' own formulas in float64, what must hold, and errors that must be noticed."""

from functools import partial

import torch

from tests.ops.common import FLOATS, assert_rows_close, exact, leaf, randn
from tests.ops.generated import generated
from tests.ops.suite import Case, of_suite


def chosen_exact(table, sections, interleaved):
    """[3, batch, tokens, 2 * half] -> [batch, tokens, 2 * half], as transformers does it for Qwen2-VL and for Qwen3-VL."""
    if not interleaved:
        pieces = table.split(list(sections) * 2, dim=-1)
        return torch.cat([piece[i % 3] for i, piece in enumerate(pieces)], -1)
    halves = []
    for half in table.chunk(2, -1):
        chosen = half[0].clone()
        for part in (1, 2):
            places = slice(part, 3 * sections[part], 3)
            chosen[..., places] = half[part, ..., places]
        halves.append(chosen)
    return torch.cat(halves, -1)


def rotary_exact(x, cos, sin):
    """x: [batch, heads, tokens, head_dim]; cos, sin: [batch or 1, tokens, rotary_dim]."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    a, b = turned.chunk(2, -1)
    return torch.cat((turned * cos.unsqueeze(1) + torch.cat((-b, a), -1) * sin.unsqueeze(1), rest), -1)


def check(run, device, dtype, batch, tokens, heads, head_dim, heads_dim, tables, view, formula):
    """Compares q and k, and their gradients, with formula(x), of [batch, heads, tokens, head_dim] in float64. run: of q, k and tables."""
    shape = lambda n: (batch, n, tokens, head_dim) if heads_dim == 1 else (batch, tokens, n, head_dim)  # noqa: E731
    base = [leaf(randn(*shape(n), dtype=dtype, device=device, seed=i)) for i, n in enumerate(heads)]
    results = run(*map(view, base), *tables)
    upstream = [randn(*r.shape, dtype=dtype, device=device, seed=4 + i) for i, r in enumerate(results)]
    given = [t.detach().clone() for t in (*base, *tables, *upstream)]
    torch.autograd.backward(results, upstream)
    for i, name in enumerate("qk"):
        x64 = exact(base[i])
        x = view(x64) if heads_dim == 1 else view(x64).transpose(1, 2)
        y64 = formula(x)
        y64 = y64 if heads_dim == 1 else y64.transpose(1, 2)
        y64.backward(upstream[i].double().cpu())
        assert results[i].dtype == dtype
        assert_rows_close(results[i], y64, dtype, f"{name} rotated")
        assert_rows_close(base[i].grad, x64.grad, dtype, f"d{name}")
    assert all(map(torch.equal, given, (*base, *tables, *upstream))), "something of the caller's is overwritten"


def check_multimodal(
    ops, device, dtype, batch=2, tokens=3, heads=(12, 2), head_dim=128, sections=(16, 24, 24), rows=None, interleaved=False,
    unsqueeze_dim=1, narrow=False, view=lambda x: x, table=lambda t: t,
):  # fmt: skip
    """rows: of the batch in cos and sin; narrow: tables half as wide; table: how they lie in memory. Both halves of the tables differ
    otherwise, and are no cosines: each is seen."""
    half = sum(sections)
    shape = (3, batch if rows is None else rows, tokens, half if narrow else 2 * half)
    tables = [table(randn(*shape, dtype=dtype, device=device, seed=6 + i)) for i in range(2)]
    wide = [torch.cat((t, t), -1) if narrow else t for t in tables]
    tables64 = [chosen_exact(t.double().cpu(), sections, interleaved) for t in wide]
    run = lambda q, k, cos, sin: ops.rotary_multimodal(q, k, cos, sin, sections, unsqueeze_dim, interleaved)  # noqa: E731
    check(run, device, dtype, batch, tokens, heads, head_dim, unsqueeze_dim, tables, view, lambda x: rotary_exact(x, *tables64))


def check_partial(ops, device, dtype, batch=2, tokens=3, heads=(5, 2), head_dim=80, rotary_dim=32, rows=None, unsqueeze_dim=1,
                  table=lambda t: t):
    shape = (batch if rows is None else rows, tokens, rotary_dim)
    tables = [randn(*shape, dtype=dtype, device=device, seed=6 + i) for i in range(2)]
    tables64 = [t.double().cpu() for t in tables]
    run = lambda q, k, cos, sin: ops.partial_rotary(q, k, table(cos), table(sin), None, unsqueeze_dim)  # noqa: E731
    formula = lambda x: rotary_exact(x, *tables64)  # noqa: E731
    check(run, device, dtype, batch, tokens, heads, head_dim, unsqueeze_dim, tables, lambda x: x, formula)


MULTIMODAL_CASES = (
    {},
    {"rows": 1, "heads": (28, 4)},
    {"interleaved": True, "sections": (24, 20, 20)},
    {"unsqueeze_dim": 2},
    {"narrow": True},
    {"head_dim": 96, "sections": (8, 12, 12)},
    {"head_dim": 18, "sections": (3, 3, 3), "interleaved": True, "heads": (3, 9)},
    {"head_dim": 160, "sections": (0, 40, 40)},
    {"head_dim": 160, "sections": (16, 24, 24)},
    {"head_dim": 64, "sections": (8, 8, 16), "rows": 1},
    {"interleaved": True, "sections": (32, 16, 16)},
    {"view": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)},
    {"tokens": 0},
    {"table": lambda t: t[:1].expand(3, -1, -1, -1)},
    {"table": lambda t: t[:, :1].expand(-1, 2, -1, -1)},
    {"table": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3)},
    {"tokens": 37, "heads": (3, 1)},
)
PARTIAL_CASES = (
    {},
    {"head_dim": 64, "rotary_dim": 16, "rows": 1, "table": lambda t: t[0]},
    {"head_dim": 256, "rotary_dim": 64, "unsqueeze_dim": 2},
    {"head_dim": 130, "rotary_dim": 2, "table": lambda t: t.unsqueeze(1)},
    {"head_dim": 64, "rotary_dim": 64},
)
KERNEL, OPERATION = "kernel_src/mrope.py", "shared/ops/mrope.py"
MUTANTS = (
    *generated(KERNEL, "multimodal or interleaved", "mrope part_of"),
    *generated("shared/ops/part_rotary.py", "PyTorch", "part_rotary_reference", kernels=False),
    *generated(OPERATION, "multimodal", "_MRoPE.backward _MRoPE.forward"),
    *generated(KERNEL, "odd", "mrope_pick"),
    *generated(KERNEL, "multimodal or narrow", "mrope_pick_groups"),
    (KERNEL, "pick", "(part, rows, cols)", "(part % 2, rows, cols)", "odd"),
    (KERNEL, "mrope_pick", "pick(sin, sin_picked", "pick(cos, sin_picked", "odd"),
    (KERNEL, "mrope_pick_groups", "ct.gather(sin, (part", "ct.gather(cos, (part", "multimodal"),
    (KERNEL, "read_head", "mask=head > last", "mask=head > last + 1", "multimodal"),
    (KERNEL, "read_head", "ct.maximum(head - q.shape[1], 0)", "ct.maximum(head - q.shape[1], 1)", "multimodal"),
    (KERNEL, "write_head", "head >= q.shape[1]", "head > q.shape[1]", "multimodal"),
    (KERNEL, "mrope", "token % cos.shape[0]", "0", "multimodal"),
    (KERNEL, "mrope", "read(sin, (row, second))", "read(sin, (row, first))", "multimodal"),
    (KERNEL, "mrope_any", "cos.shape[1] - half", "0", "odd"),
    (KERNEL, "mrope_any", "q.shape[2] - 2 * half", "0 * half", "partial"),
    (KERNEL, "copy_part", "ct.gather(x, at, check_bounds=False)", "ct.gather(y, at, check_bounds=False)", "partial"),
    (KERNEL, "rotate_part", "x.shape[1] - 1", "x.shape[1] - 2", "odd"),
    (OPERATION, "pick_reference", "_chosen(sin,", "_chosen(cos,", "PyTorch", False),
    (OPERATION, "_pick", "int(interleaved)", "0", "interleaved"),
    (OPERATION, "_pick", "half | time | height", "half", "odd"),
    (OPERATION, "_pick", "not interleaved and ", "", "interleaved eights"),
)
CHECKS = of_suite({
    "multimodal": lambda ops: check_multimodal(ops, "cpu", torch.bfloat16),
    "interleaved": lambda ops: check_multimodal(ops, "cpu", torch.bfloat16, interleaved=True, sections=(24, 20, 20)),
    "interleaved eights": lambda ops: check_multimodal(ops, "cpu", torch.bfloat16, interleaved=True, sections=(32, 16, 16)),
    "narrow": lambda ops: check_multimodal(ops, "cpu", torch.bfloat16, narrow=True, tokens=5),
    "odd": lambda ops: check_multimodal(ops, "cpu", torch.float32, batch=1, tokens=5, head_dim=96, sections=(8, 12, 12)),
    "partial": lambda ops: check_partial(ops, "cpu", torch.float32),
    "PyTorch": lambda ops: check_multimodal(ops, "cpu", torch.float32),
})


def all_cases(ops, device, dtypes=FLOATS):
    """(name, function) of every check in some dtypes."""
    for dtype in dtypes:
        for i, options in enumerate(MULTIMODAL_CASES):
            yield f"multimodal {i} {dtype}", partial(check_multimodal, ops, device, dtype, **options)
        for i, options in enumerate(PARTIAL_CASES):
            yield f"partial {i} {dtype}", partial(check_partial, ops, device, dtype, **options)


# ---------------------------------------------------------------- in the tests of every operation
def _sample(of_tables):
    def sample(ops, new):
        cos, sin = (new.normal(3, 2, 16, 128, seed=i).detach() for i in (7, 8))
        return of_tables(ops, cos, sin), (new.normal(2, 4, 16, 128, seed=4), new.normal(2, 4, 16, 128, seed=5))

    return sample


def _partial_of(ops, cos, sin):
    part = [table[0, ..., :64].contiguous() for table in (cos, sin)]
    return lambda q, k: sum(ops.partial_rotary(q, k, *part))


OPERATIONS = {
    "partial_rotary": Case(
        lambda ops, q, k, cos, sin: torch.cat(ops.partial_rotary(q, k, cos.detach(), sin.detach()), 1),
        aligned=lambda n: ((2, 2, 3, n // 2 * 2), (2, 1, 3, n // 2 * 2), (1, 3, n // 2 * 2), (1, 3, n // 2 * 2)),
        slabs=((2, 2, 4, 24), (2, 1, 4, 24), (2, 4, 16), (2, 4, 16)),
        sample=_sample(_partial_of),
    ),
    "rotary_multimodal": Case(
        lambda ops, q, k, cos, sin: torch.cat(ops.rotary_multimodal(q, k, cos.detach(), sin.detach(), (2, 3, 3)), 1),
        slabs=((2, 2, 4, 24), (2, 1, 4, 24), (3, 2, 4, 16), (3, 2, 4, 16)),
        sample=_sample(lambda ops, cos, sin: lambda q, k: sum(ops.rotary_multimodal(q, k, cos, sin, (16, 24, 24)))),
    ),
}


def check_large(ops, device):
    check_multimodal(ops, device, torch.bfloat16, 2, 1025, (28, 4))


def _rotated(new):
    """q and k with the heads before the tokens and after them."""
    tables = new(1, 5, 64), new(1, 5, 64, seed=1)
    for heads_dim in (1, 2):
        q, k = (new(2, 5, heads, 64) for heads in (4, 2))
        yield (*((q, k) if heads_dim == 2 else (q.transpose(1, 2), k.transpose(1, 2))), *tables, 32, heads_dim)


OPERATORS = {
    "mrope_pick": lambda new: [(new(3, 1, 5, 64), new(3, 1, 5, 64, seed=1), 32, *rest) for rest in ((16, 8, 8, False), (12, 10, 10, True))],
    "mrope": lambda new: [(*call, backward) for call in _rotated(new) for backward in (True, False)],
}
