"""The norm and the rotary embedding of the heads of families other than Qwen3, against float64: as operations, and as the decoder layer
calls them by a description."""

import functools
import importlib
import types

import torch

from tests.ops.common import BF16, CPU, FLOATS, FP16, FP32, errors_in, exact, leaf, randn
from tests.ops.generated import generated
from tests.ops.residual_norm import module
from tests.ops.rms_norm import rms_norm_exact
from tests.ops.rotary import check_qk_norm_rotary
from tests.tolerances import assert_close

GEMMA = dict(offset=1.0, rounds="last")
# Gemma 3: 4B and 1B, and 27B; Qwen3.5: 9B and 35B; heads and parts of them without kernels.
CASES = (
    dict(batch=2, tokens=3, heads=8, kv_heads=4, head_dim=256, **GEMMA),
    dict(batch=1, tokens=5, heads=4, kv_heads=1, head_dim=256, tables=1, packed=True, **GEMMA),
    dict(batch=2, tokens=2, heads=5, kv_heads=3, head_dim=128, tables=2, **GEMMA),
    dict(batch=2, tokens=3, heads=16, kv_heads=4, head_dim=256, rotary_dim=64, gated=True, packed=True, tables=2, **GEMMA),
    dict(batch=1, tokens=3, heads=3, kv_heads=2, head_dim=256, rotary_dim=64, rounds="first"),
    dict(batch=1, tokens=3, heads=3, kv_heads=2, head_dim=256, rotary_dim=64, half=True, **GEMMA),
    dict(batch=1, tokens=3, heads=3, kv_heads=1, head_dim=96, rotary_dim=32, **GEMMA),
)


def operation(ops):
    return types.SimpleNamespace(qk_norm_rotary=module(ops, "rotary").qk_norm_rotary)


def check(ops, device, dtype, **case):
    check_qk_norm_rotary(operation(ops), device, dtype, **case)


def check_gradients_into_a_projection(ops, device, dtype):
    """The gradients of q and k go to where these lie in the gradient of one projection, aligned or not, and the rest of it stays as it
    is."""
    into = module(ops, "rotary").norm_backward_into
    whole = randn(1, 5, 6, 512, dtype=dtype, device=device)
    q, k = whole[:, :, :4, :256], whole[:, :, 4:, :256]
    weights = [randn(256, dtype=dtype, device=device, seed=i) for i in (1, 2)]
    tables = [randn(1, 5, 64, dtype=dtype, device=device, seed=i) for i in (3, 4)]
    grads = [randn(1, x.shape[2], 5, 256, dtype=dtype, device=device, seed=5 + i) for i, x in enumerate((q, k))]
    wanted = module(ops, "rotary").qk_norm_rotary_backward(*grads, q, k, *weights, *tables, 1e-6, True, True, 1.0, 64)
    for width in (512, 513):
        dwhole = torch.full((1, 5, 6, width), 7.0, dtype=dtype, device=device)
        outs = dwhole[:, :, :4, :256], dwhole[:, :, 4:, :256]
        found = into(*outs, *grads, q, k, *weights, *tables, 1e-6, True, True, 1.0, 64)
        assert (dwhole[..., 256:] == 7).all()
        for a, b in zip((*outs, *found), wanted):
            assert_close(a, exact(b), dtype, "a gradient in a projection's")


# Gemma 3, Qwen3.5, heads without kernels; GLM-4, ERNIE 4.5, Phi-4-mini, Phi-3-mini, OLMo 2. rotated: the columns that are turned.
DESCRIBED = (
    dict(head_dim=256, norm=("head", 1.0, "last")),
    dict(head_dim=256, rotated=64, norm=("head", 1.0, "last")),
    dict(head_dim=96, rotated=32, norm=("head", 0.0, "first")),
    dict(head_dim=128, rotated=64, rotary="pairs"),
    dict(head_dim=128, rotary="pairs"),
    dict(head_dim=128, rotated=96),
    dict(head_dim=96),
    dict(head_dim=64, norm=("whole", 0.0, "last")),
)
# Norms of whole rows with kernels: OLMo 2 1B, and 32B, whose 40 heads are two tiles. wide: what is fp32: angles in every OLMo, weights in
# an fp32 model under autocast.
WHOLE = dict(head_dim=128, heads=(16, 16), norm=("whole", 0.0, "last"), wide=("angles",))
ROWS = (
    WHOLE,
    {**WHOLE, "heads": (40, 8), "tables": 2},
    {**WHOLE, "wide": ("angles", "weights"), "norm": ("whole", 0.25, "first")},
    {**WHOLE, "wide": ()},
)


def _turned_exactly(x, cos, sin, rotary, rotated):
    """The formula of either kind, of [batch, tokens, heads, head_dim] in float64."""
    part, rest = x[..., :rotated], x[..., rotated:]
    if rotary == "pairs":
        cos, sin = (t[..., : rotated // 2].repeat_interleave(2, -1) for t in (cos, sin))
        other = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
    else:
        other = torch.cat((-part[..., rotated // 2 :], part[..., : rotated // 2]), -1)
    return torch.cat((part * cos.unsqueeze(2) + other * sin.unsqueeze(2), rest), -1)


def check_described(ops, device, dtype, head_dim, rotated=None, rotary="halves", norm=None, tables=1, heads=(4, 2), wide=(), eps=1e-6):
    """What the decoder layer calls, of the layout of a packed projection. heads: of q and of k. wide: what is fp32 whatever the dtype."""
    (count, kv_count), of_angles, of_weights = heads, *[FP32 if name in wide else dtype for name in ("angles", "weights")]
    heads, spec = (importlib.import_module(f"{ops.__name__}.shared.decoder.{name}") for name in ("heads", "spec"))
    batch, tokens, width = 2, 3, rotated or head_dim
    kind, offset, rounds = norm or ("none", 0.0, "first")
    description = spec.Inputs(head_dim, heads=spec.Norm(eps, offset, rounds), whole=kind == "whole", rotary=rotary, turned=rotated or 0)
    base = randn(batch, tokens, count + kv_count + 2, head_dim, dtype=dtype, device=device)
    pair = base[:, :, :count], base[:, :, count : count + kv_count]
    cos, sin = (randn(tables, tokens, width, dtype=of_angles, device=device, seed=i) for i in (5, 6))
    lengths = [x.shape[2] * head_dim if kind == "whole" else head_dim for x in pair]
    weights = [randn(n, dtype=of_weights, device=device, seed=1 + i) + 1 - offset for i, n in enumerate(lengths)] if norm else [None, None]
    given = heads.Heads(*pair, *weights, cos, sin)
    *found, q_rstd, k_rstd = heads.heads_forward(description, given)
    grads = [randn(*x.shape, dtype=dtype, device=device, seed=8 + i) for i, x in enumerate(found)]
    exact64 = [leaf(exact(x)) for x in (*pair, *(weights if norm else ()))]
    wanted = []
    for x, weight in zip(exact64[:2], exact64[2:] or (None, None)):
        normed = x if weight is None else rms_norm_exact(x.flatten(2) if kind == "whole" else x, weight, eps, offset).view(x.shape)
        wanted.append(_turned_exactly(normed, cos.double().cpu(), sin.double().cpu(), rotary, width).transpose(1, 2))
    for name, mine, right in zip("qk", found, wanted):
        assert mine.dtype == dtype
        assert_close(mine, right, dtype, f"described heads {name}")
    torch.autograd.backward(wanted, [g.double().cpu() for g in grads])
    kept = given if norm else given._replace(q=None, k=None)
    together = torch.empty_like(base)
    outs = together[:, :, :count], together[:, :, count : count + kv_count]
    for places in (None, outs):
        result = heads.heads_backward(description, *grads, kept, (q_rstd, k_rstd), (norm is not None,) * 2, places)
        mine = (*(places or result[:2]), *(result[2:] if norm else ()))
        for name, gradient, right in zip(("dq", "dk", "dq_norm", "dk_norm"), mine, exact64):
            assert_close(gradient, right.grad, dtype, f"described heads {name}")


def check_slabs(ops, device, dtype):
    """More tokens than one launch reaches over, with the bound put low, and angles that repeat for every sequence."""
    kernels = module(ops, "head_norm_kernels")
    before, kernels.SLAB = kernels.SLAB, 4 * 3 * 256
    try:
        check(ops, device, dtype, batch=3, tokens=3, heads=3, kv_heads=2, head_dim=256, rotary_dim=64, **GEMMA)
        check_described(ops, device, BF16, **{**WHOLE, "tables": 2})
    finally:
        kernels.SLAB = before


def all_cases(ops, device, dtypes=FLOATS):
    """(name, function) of every check. ops: a loaded package."""
    for dtype in dtypes:
        for case in CASES:
            yield f"{case}", functools.partial(check, ops, device, dtype, **case)
        for case in DESCRIBED:
            yield f"described {case}", functools.partial(check_described, ops, device, dtype, **case)
        for case in ROWS if dtype == BF16 else ROWS[:1]:
            yield f"rows {case}", functools.partial(check_described, ops, device, dtype, **case)
        yield "into a projection", functools.partial(check_gradients_into_a_projection, ops, device, dtype)
    yield "slabs", functools.partial(check_slabs, ops, device, dtypes[0])


# ---------------------------------------------------------------- planted errors
SMALL = dict(device=CPU, dtype=FP32, batch=2, tokens=3, heads=3, kv_heads=2, **GEMMA)
CHECKS = {
    "whole": functools.partial(check, **SMALL, head_dim=128),
    "part": functools.partial(check, **SMALL, head_dim=256, rotary_dim=64, eps=0.5),
    "many": functools.partial(check, **{**SMALL, "tokens": 13}, head_dim=128),
    "described": functools.partial(check_described, device=CPU, dtype=FP32, head_dim=128, norm=("head", 1.0, "last")),
    "pairs": functools.partial(check_described, device=CPU, dtype=FP32, head_dim=128, rotated=64, rotary="pairs", tables=2),
    "partial": functools.partial(check_described, device=CPU, dtype=FP32, head_dim=128, rotated=96),
    "turned alone": functools.partial(check_described, device=CPU, dtype=FP32, head_dim=128, tables=2),
    "slabs": functools.partial(check_slabs, device=CPU, dtype=FP16),
    "rows": functools.partial(
        check_described, device=CPU, dtype=BF16, **{**WHOLE, "heads": (40, 8), "tables": 2, "norm": ("whole", 0.25, "last")}, eps=0.5
    ),
    "into": functools.partial(check_gradients_into_a_projection, device=CPU, dtype=FP32),
}
ROW_FILE, ROW_KERNELS = "kernel_src/row_norm_rotary.py", "shared/ops/row_norm_kernels.py"
FILE, OPERATION, KERNELS = "kernel_src/head_norm_rotary.py", "shared/ops/rotary.py", "shared/ops/head_norm_kernels.py"
DECODER = "shared/decoder/heads.py"
MUTANTS = [
    *generated(FILE, "part", "backward forward gradient_of head_norm_rotary_forward heads_of"),
    *generated(FILE, "whole", "head_norm_rotary_backward"),
    *generated("kernel_src/llama4_rope.py", "pairs", "llama4_rope"),
    *generated(ROW_FILE, "rows",
               "backward forward half_of heads_from row_norm_rotary_backward row_norm_rotary_forward turned weight_halves"),
    *generated(DECODER, "pairs", "pair_table"),
    *generated(KERNELS, "slabs or into", "gradients_by",
               same={"written = [new_like(out) for out in outs]": "a copy more, of the same numbers"}),
    *generated(KERNELS, "slabs", "launches_of"),
    *errors_in(FILE, "part", "heads_of", ("row // x.shape[1]", "row // x.shape[0]")),
    *errors_in(FILE, "whole", "read_angles", ("columns_from(HALF, HALF)", "columns_from(0, HALF)", "whole")),
    *errors_in(FILE, "part", "forward", ("total = total + squares(x3)", "pass"), ("total = total + squares(x4)", "pass"),
               ("2 * HALF + REST1 + REST2", "2 * HALF")),
    *errors_in(FILE, "part", "normed", ("WIDTH), offset", "WIDTH), 0.0")),
    *errors_in(FILE, "part", "head_norm_rotary_forward", ("k_weight, cos, sin, block", "q_weight, cos, sin, block")),
    *errors_in(FILE, "part", "backward", ("range(block, pieces", "range(0, pieces"),
               ("write_sums(partial, block, acc4", "write_sums(partial, block, acc4 + acc4")),
    *errors_in(ROW_FILE, "rows", "angles_of", ("token % table.shape[0]", "0 * token")),
    *errors_in(ROW_FILE, "rows", "forward", ("turned(t1, t2, r, weight, HEADS", "turned(t1, t2, r, weight, 0")),
    *errors_in(ROW_FILE, "rows", "backward", ("range(block, x.shape[0]", "range(0, x.shape[0]")),
    *errors_in(ROW_KERNELS, "rows", "backward_into", ("*partials, offset)", "*partials, 0.0)")),
    *errors_in(DECODER, "rows", "heads_backward", ("rstds, spec.heads.offset, needs", "rstds[::-1], spec.heads.offset, needs")),
    *errors_in("shared/ops/arrays.py", "slabs", "column_sum_of", ("torch.cat(list(partials))", "partials[0]")),
    *errors_in(KERNELS, "into", "gradients_by", ("if result is not out:", "if False:")),
    *errors_in(OPERATION, "turned alone", "rotary_backward_into", ("_kernels[1]", "_kernels[0]")),
    *errors_in(OPERATION, "part", "_QKNormRotary.forward", ("= eps, offset, rotary_dim", "= eps, 0.0, rotary_dim")),
    *errors_in(DECODER, "described", "heads_forward", ("*spec.heads[:3], spec.turned", "spec.heads.eps, 0.0, 'last', spec.turned")),
    *errors_in(DECODER, "described", "heads_backward", ("*needs, spec.heads.offset", "*needs, 0.0")),
    *errors_in(DECODER, "pairs", "pair_table", ("enumerate((cos, sin))", "enumerate((sin, cos))")),
    *errors_in("kernel_src/llama4_rope.py", "pairs", "llama4_rope", ("ct.where(turned, sin, 0.0)", "ct.where(turned, sin, 1.0)")),
    *errors_in(DECODER, "pairs", "_turned", ("pair_table(spec, cos, sin), back", "pair_table(spec, cos, sin), False")),
    *errors_in(DECODER, "partial", "_turned", ("spec.turned // 2, 2, back", "spec.turned // 2, 2, False")),
    *errors_in("shared/ops/rotary_reference.py", "part", "of_part", ("torch.cat((part,", "torch.cat((x[..., :rotary_dim],"), kernels=False),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
GPU_TESTS = {"head_norm_rotary": ("test_heads",), "row_norm_rotary": ("test_heads",)}
