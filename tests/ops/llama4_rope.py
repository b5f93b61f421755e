"""Rotary embedding by complex numbers: the formula in float64, what must hold, and errors that must be noticed."""

from functools import partial

import torch

from tests.ops.common import FLOATS, randn
from tests.ops.generated import generated
from tests.ops.mrope import check
from tests.ops.suite import Case, of_suite


def rotary_complex_exact(x, freqs):
    """x: [batch, tokens, heads, head_dim] float64; freqs: [batch or 1, tokens, head_dim / 2]."""
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], x.shape[-1] // 2,
                                                              2).contiguous()) * freqs.unsqueeze(2)).flatten(3)


def frequencies(rows, tokens, pairs, device):
    """Complex numbers whose length is not 1, other ones for each row: neither a conjugate nor an inverse nor another row passes for
    them."""
    angle, length = randn(rows, tokens, pairs, dtype=torch.float32, device="cpu", seed=8), 1 + torch.arange(pairs) / pairs
    return torch.polar(length.expand(rows, tokens, pairs).contiguous(), 3 * angle).to(device)


def check_rotary_complex(ops, device, dtype, batch=2, tokens=3, heads=(8, 8), head_dim=128, rows=None, view=lambda x: x, table=lambda f: f):
    """rows: of the batch in freqs; view: makes q and k out of contiguous tensors; table: another shape of freqs."""
    q = view(torch.empty(batch, tokens, heads[0], head_dim))  # of which there is no more than the shape
    freqs = frequencies(batch if rows is None else rows, q.shape[1], q.shape[3] // 2, device)
    run = lambda q, k, freqs: ops.rotary_complex(q, k, table(freqs))  # noqa: E731
    formula = lambda x: rotary_complex_exact(x.transpose(1, 2), freqs.to(torch.complex128).cpu()).transpose(1, 2)  # noqa: E731
    check(run, device, dtype, batch, tokens, heads, head_dim, 2, (freqs,), view, formula)


CASES = (
    {},
    {"rows": 1},
    {"heads": (40, 8)},
    {"heads": (5, 1), "head_dim": 88},
    {"heads": (3, 2), "head_dim": 2},
    {"heads": (2, 9), "head_dim": 256, "rows": 1, "table": lambda f: f[0]},
    {"table": lambda f: f.unsqueeze(2)},
    {"view": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)},
    {"view": lambda x: x[:, :, ::2]},
    {"view": lambda x: x[..., 1:127]},
    {"tokens": 0},
)
KERNEL, OPERATION = "kernel_src/llama4_rope.py", "shared/ops/llama4_rope.py"
MUTANTS = (
    *generated(KERNEL, "bf16 or fp32", "join_float32 turn_heads"),
    *generated("shared/ops/pair_rotary.py", "PyTorch", "rotate_pairs", kernels=False),
    (KERNEL, "split_float32", "word >> 32", "word >> 31", "bf16"),
    (KERNEL, "llama4_rope", "token % table.shape[0]", "0", "bf16"),
    (KERNEL, "llama4_rope", "group < ct.cdiv(k.shape[1], K_HEADS)", "group < 1", "many key heads"),
    (OPERATION, "_RotaryComplex.forward", "ctx.save_for_backward(table)", "ctx.save_for_backward(-table)", "bf16"),
    (OPERATION, "_RotaryComplex.backward", "*ctx.saved_tensors, True", "*ctx.saved_tensors, False", "bf16"),
)
CHECKS = of_suite({
    "bf16": lambda ops: check_rotary_complex(ops, "cpu", torch.bfloat16),
    "fp32": lambda ops: check_rotary_complex(ops, "cpu", torch.float32),
    "many key heads": lambda ops: check_rotary_complex(ops, "cpu", torch.bfloat16, heads=(2, 9)),
    "PyTorch": lambda ops: check_rotary_complex(ops, "cpu", torch.float32),
})


def all_cases(ops, device, dtypes=FLOATS):
    """(name, function) of every check in some dtypes."""
    for dtype in dtypes:
        for i, options in enumerate(CASES):
            yield f"case {i} {dtype}", partial(check_rotary_complex, ops, device, dtype, **options)


# ---------------------------------------------------------------- in the tests of every operation
ANGLES = torch.polar(torch.ones(3, 500), randn(3, 500, dtype=torch.float32, device="cpu", seed=30))


def _sample(ops, new):
    freqs = torch.polar(torch.ones(2, 16, 64), randn(2, 16, 64, dtype=torch.float32, device="cpu")).to(new.device)

    def call(q, k):
        return sum(ops.rotary_complex(q.transpose(1, 2), k.transpose(1, 2), freqs))

    return call, (new.normal(2, 4, 16, 128, seed=4), new.normal(2, 4, 16, 128, seed=5))


OPERATIONS = {
    "rotary_complex": Case(
        lambda ops, q, k: torch.cat(ops.rotary_complex(q, k, ANGLES[:, : q.shape[-1] // 2]), 2),
        aligned=lambda n: ((2, 3, 2, min(n, 128) // 2 * 2), (2, 3, 1, min(n, 128) // 2 * 2)),
        sample=_sample,
    ),
    "rotary_complex, angles": Case(
        lambda ops, q, k, f: torch.cat(ops.rotary_complex(q, k, torch.polar(torch.ones_like(f), f.detach())), 2),
        slabs=((2, 4, 2, 24), (2, 4, 1, 24), (2, 4, 12)),
    ),
}


def check_large(ops, device):
    check_rotary_complex(ops, device, torch.bfloat16, 2, 1025, (40, 8))


OPERATORS = {
    "rotary_complex": lambda new: [
        (new(2, 5, 4, 64), new(2, 5, 2, 64, seed=1), new.exact(1, 5, 32, 2), backward) for backward in (True, False)
    ],
}
