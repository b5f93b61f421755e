"""Rotary position embedding, alone and after the RMSNorms of q and k."""

import torch

from tests.ops.common import BF16, FP32, alone, errors_in, exact, leaf, on_cpu, randn
from tests.ops.generated import generated
from tests.ops.rms_norm import norm, rms_norm_exact
from tests.ops.signature import Signature
from tests.tolerances import assert_close


def rotary_exact(q, k, cos, sin, unsqueeze_dim):
    def rotate_half(x):
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), -1)

    if cos.shape[-1] != q.shape[-1]:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def check_rotary(ops, device, dtype, batch, tokens, heads, kv_heads, head_dim, *, unsqueeze_dim=1, half=False, tables=1):
    """q and k in the layout that Qwen3's attention passes: views of what the projections wrote. Angles are random, so a
    backward pass that mixes the halves of cos and sin up fails."""
    leaves = [leaf(randn(batch, tokens, h, head_dim, dtype=dtype, device=device, seed=i)) for i, h in enumerate((heads, kv_heads))]
    q, k = (x.transpose(1, 2) if unsqueeze_dim == 1 else x for x in leaves)
    width = head_dim // 2 if half else head_dim
    cos, sin = (randn(tables, tokens, width, dtype=dtype, device=device, seed=i) for i in (5, 6))
    results = ops.rotary(q, k, cos, sin, unsqueeze_dim)
    grads = [randn(*r.shape, dtype=dtype, device=device, seed=8 + i) for i, r in enumerate(results)]
    torch.autograd.backward(results, grads)
    leaves64 = [exact(x) for x in leaves]
    q64, k64 = (x.transpose(1, 2) if unsqueeze_dim == 1 else x for x in leaves64)
    results64 = rotary_exact(q64, k64, cos.double().cpu(), sin.double().cpu(), unsqueeze_dim)
    torch.autograd.backward(results64, [g.double().cpu() for g in grads])
    for name, found, wanted in zip("qk", results, results64):
        assert found.dtype == dtype
        assert_close(found, wanted, dtype, f"rotary {name}")
    for name, found, wanted in zip("qk", leaves, leaves64):
        assert_close(found.grad, wanted.grad, dtype, f"rotary d{name}")


ROTARY_CASES = (
    dict(batch=2, tokens=3, heads=16, kv_heads=8, head_dim=128),
    dict(batch=1, tokens=2, heads=40, kv_heads=8, head_dim=128, tables=1),
    dict(batch=2, tokens=3, heads=5, kv_heads=3, head_dim=128, tables=2),
    dict(batch=2, tokens=3, heads=8, kv_heads=2, head_dim=128, half=True),
    dict(batch=1, tokens=4, heads=12, kv_heads=4, head_dim=64, half=True, unsqueeze_dim=2),
    dict(batch=2, tokens=3, heads=6, kv_heads=1, head_dim=80),
    dict(batch=1, tokens=2, heads=3, kv_heads=2, head_dim=258, unsqueeze_dim=2),
    dict(batch=1, tokens=2, heads=3, kv_heads=2, head_dim=2, tables=1),
)


def check_qk_norm_rotary(
    ops, device, dtype, batch, tokens, heads, kv_heads, head_dim, *, half=False, tables=1, packed=False, gated=False, eps=1e-6, offset=0.0,
    rounds="first", rotary_dim=0
):  # fmt: skip
    """packed: q and k are slices of one projection's output; gated: every head of it is twice as wide, and its second half something else.
    Three roundings in the forward pass, as in the model."""
    base = leaf(randn(batch, tokens, heads + kv_heads, head_dim * (1 + gated), dtype=dtype, device=device))
    q, k = base[:, :, :heads, :head_dim], base[:, :, heads:, :head_dim]
    if not packed:
        q, k = q.contiguous(), k.contiguous()
    weights = [leaf(randn(head_dim, dtype=dtype, device=device, seed=1 + i) + 1 - offset) for i in range(2)]
    turned = rotary_dim or head_dim
    width = turned // 2 if half else turned
    cos, sin = (randn(tables, tokens, width, dtype=dtype, device=device, seed=i) for i in (5, 6))
    results = ops.qk_norm_rotary(q, k, *weights, cos, sin, eps, offset, rounds, rotary_dim)
    grads = [randn(*r.shape, dtype=dtype, device=device, seed=8 + i) for i, r in enumerate(results)]
    torch.autograd.backward(results, grads)
    base64, weights64 = exact(base), [exact(w) for w in weights]
    heads64 = base64[:, :, :heads, :head_dim], base64[:, :, heads:, :head_dim]
    normed = [rms_norm_exact(x, w, eps, offset).transpose(1, 2) for x, w in zip(heads64, weights64)]
    parts = rotary_exact(*[x[..., :turned] for x in normed], cos.double().cpu(), sin.double().cpu(), 1)
    results64 = [torch.cat((part, x[..., turned:]), -1) for part, x in zip(parts, normed)]
    torch.autograd.backward(results64, [g.double().cpu() for g in grads])
    for name, found, wanted in zip("qk", results, results64):
        assert found.dtype == dtype
        assert_close(found, wanted, dtype, f"qk_norm_rotary {name}")
    assert_close(base.grad, base64.grad, dtype, "qk_norm_rotary dq, dk")
    for name, found, wanted in zip("qk", weights, weights64):
        assert_close(found.grad, wanted.grad, dtype, f"qk_norm_rotary d{name}_weight")


QK_NORM_ROTARY_CASES = (
    dict(batch=1, tokens=3, heads=32, kv_heads=8, head_dim=128),
    dict(batch=2, tokens=3, heads=16, kv_heads=8, head_dim=128),
    dict(batch=2, tokens=2, heads=40, kv_heads=8, head_dim=128, tables=2),
    dict(batch=1, tokens=2, heads=64, kv_heads=8, head_dim=128, packed=True),
    dict(batch=3, tokens=1, heads=24, kv_heads=8, head_dim=128, half=True),
    dict(batch=1, tokens=5, heads=12, kv_heads=4, head_dim=128, packed=True),
    dict(batch=2, tokens=3, heads=6, kv_heads=3, head_dim=128),
    dict(batch=2, tokens=3, heads=4, kv_heads=2, head_dim=16),
)


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "rotary": on_cpu(check_rotary, FP32, 2, 3, 16, 8, 128),
    "rotary_square": on_cpu(check_rotary, FP32, 2, 8, 8, 8, 128),
    "rotary_bf16": on_cpu(check_rotary, BF16, 2, 3, 40, 8, 128),
    "rotary_many_k": on_cpu(check_rotary, BF16, 1, 2, 16, 16, 128),
    "rotary_odd": on_cpu(check_rotary, FP32, 2, 3, 11, 3, 258),
    "rotary_odd_half": on_cpu(check_rotary, FP32, 1, 4, 12, 4, 64, half=True),
    "qk_norm_rotary": on_cpu(check_qk_norm_rotary, FP32, 2, 3, 16, 8, 128),
    "qk_norm_rotary_rows": on_cpu(check_qk_norm_rotary, FP32, 4, 3, 8, 8, 128),
    "qk_norm_rotary_tokens": on_cpu(check_qk_norm_rotary, FP32, 1, 19, 8, 8, 128),
    "qk_norm_rotary_eps": on_cpu(check_qk_norm_rotary, FP32, 1, 3, 8, 8, 128, eps=0.5),
    "qk_norm_rotary_alone": alone("qk_norm_rotary"),
    "qk_norm_rotary_bf16": on_cpu(check_qk_norm_rotary, BF16, 2, 3, 40, 8, 128),
    "qk_norm_rotary_many_k": on_cpu(check_qk_norm_rotary, FP32, 1, 3, 16, 16, 128),
}
MUTANTS = [
    *generated("kernel_src/qk_norm_rotary.py", "qk_norm_rotary", "backward forward inverse_rms"),
    *generated("kernel_src/qk_norm_rotary.py", "qk_norm_rotary_tokens or qk_norm_rotary", "qk_norm_rotary_backward"),
    *generated("kernel_src/rotary.py", "rotary_odd", "rotary_any rotate_any"),
    *generated("kernel_src/rotary.py", "rotary", "rotate rotate_back"),
    *generated("shared/ops/rotary.py", "qk_norm_rotary_alone", "_QKNormRotary.backward norm_backward_into"),
    *generated("shared/ops/rotary.py", "qk_norm_rotary", "_QKNormRotary.forward"),
    *generated("shared/ops/rotary.py", "rotary", "_Rotary.forward"),
    *generated("shared/ops/part_rotary.py", "rotary or rotary_many_k", "heads_grid"),
    *generated("shared/ops/rotary_reference.py", "rotary_odd_half", "_full_width", kernels=False),
    *generated("shared/ops/rotary_reference.py", "rotary", "rotary_backward_reference", kernels=False),
    *errors_in("kernel_src/rotary.py", "rotary", "angles",
         ("token % table.shape[0]", "token"),
         ("(row, part)", "(row, 0)")),
    *errors_in("kernel_src/rotary.py", "rotary", "rotate_group",
         ("if BACKWARD", "if not BACKWARD"),
         ("write_heads(y, token, group, 1", "write_heads(y, token, group, 0"),
         ("read_heads(x, token, group, 1", "read_heads(x, token, 0, 1")),
    *errors_in("kernel_src/rotary.py", "rotary", "rotary",
         ("angles(cos, token, FULL", "angles(cos, token, 0"),
         ("k.shape[1] // K_HEADS", "q.shape[1] // Q_HEADS"),
         ("group < k.shape[1]", "group < 0 * k.shape[1]"),
         ("Q_HEADS // Q_TAIL", "0", "rotary_bf16"),
         ("Q_TAIL > 0", "Q_TAIL > 99", "rotary_bf16")),
    *errors_in("kernel_src/rotary.py", "rotary_odd", "rotary_any",
         ("token % cos.shape[0]", "token"),
         ("ct.cdiv(q.shape[1], Q_HEADS)", "q.shape[1] // Q_HEADS")),
    *errors_in("kernel_src/rotary.py", "rotary_odd", "rotate_any",
         ("ct.minimum(group * HEADS + ct.arange(HEADS, dtype=ct.int32), x.shape[1] - 1)",
          "(group * HEADS + ct.arange(HEADS, dtype=ct.int32))"),
         ("x.shape[2] // 2", "x.shape[2] // 2 - 1")),
    *errors_in("kernel_src/qk_norm_rotary.py", "qk_norm_rotary", "forward",
         ("norm_weight(weight, 1, HALF)", "norm_weight(weight, 0, HALF)"),
         ("write_heads(y, token, group, 1, y2)", "write_heads(y, token, group, 1, y1)")),
    *errors_in("kernel_src/qk_norm_rotary.py", "qk_norm_rotary", "qk_norm_rotary_forward",
         ("forward(k, k_out, k_weight", "forward(k, k_out, q_weight"),
         ("Q_HEADS // Q_TAIL", "0", "qk_norm_rotary_bf16"),
         ("angles(sin, token, FULL", "angles(sin, token, 0")),
    *errors_in("kernel_src/qk_norm_rotary.py", "qk_norm_rotary", "backward",
         ("range(ct.bid(0), ct.cdiv(x.shape[0]", "range(0, ct.cdiv(x.shape[0]", "qk_norm_rotary_tokens"),
         ("ct.cdiv(x.shape[0], TOKENS)", "x.shape[0] // TOKENS", "qk_norm_rotary_tokens"),
         ("rotate_back(g1, g2", "rotate(g1, g2")),
    *errors_in("kernel_src/qk_norm_rotary.py", "qk_norm_rotary_rows", "token_angles",
         ("tokens * TOKENS % table.shape[0]", "tokens * TOKENS"),
         ("tokens * TOKENS %", "tokens %"),
         ("rows - table.shape[0]", "rows"),
         ("part * HALF +", "")),
    *errors_in("kernel_src/qk_norm_rotary.py", "qk_norm_rotary", "column_sum_pair",
         ("sum_columns(second, second_out", "sum_columns(first, second_out"),
         ("ct.bid(1) == 0", "ct.bid(0) >= 0")),
    *errors_in("kernel_src/qk_norm_rotary.py", "qk_norm_rotary", "qk_norm_rotary_backward",
         ("dk_weight, cos, sin, group - q_groups", "dk_weight, cos, sin, group - q_groups + 1"),
         ("ct.bid(0) * k_groups + group - q_groups", "ct.bid(0) * k_groups", "qk_norm_rotary_many_k")),
    *errors_in("shared/ops/rotary.py", "rotary", "_Rotary.forward",
         ("ctx.heads_dim = heads_dim", "ctx.heads_dim = 3 - heads_dim", "rotary_square")),
    *errors_in("shared/ops/rotary.py", "rotary", "_Rotary.backward",
               ("return (*rotary_backward(dq, dk,", "return (*rotary_forward(dq, dk,")),
    *errors_in("shared/ops/rotary.py", "rotary", "_launch", ("_kernels[backward]", "_kernels[0]")),
    *errors_in("shared/ops/rotary.py", "qk_norm_rotary", "_QKNormRotary.forward",
         ("= eps, offset, rotary_dim", "= 0.0, offset, rotary_dim", "qk_norm_rotary_eps")),
    *errors_in("shared/ops/rotary.py", "qk_norm_rotary_alone", "_QKNormRotary.backward",
         ("ctx.needs_input_grad[:4]", "ctx.needs_input_grad[1:5]")),
    *errors_in("shared/ops/rotary.py", "qk_norm_rotary", "norm_backward_into",
         ("k_out.copy_(dk)", "pass"), kernels=False),
    *errors_in("shared/ops/rotary.py", "qk_norm_rotary", "norm_backward_into",
         ("(*partials, *sums)", "(*partials, *sums[::-1])"),
         ("(*partials, *sums)", "(*partials[::-1], *sums)")),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
def _angles(s):
    return {"cos": (s.tables, s.tokens, s.table), "sin": (s.tables, s.tokens, s.table)}


SIGNATURES = {
    "rotary": Signature(
        lambda s: {name: (s.batch, n, s.tokens, s.width) for name, n in zip("qk", s.heads)} | _angles(s),
        lambda q, k, cos, sin: rotary_exact(q, k, cos, sin, 1),
        constant=("cos", "sin"),
    ),
    "qk_norm_rotary": Signature(
        lambda s: {**{name: (s.batch, s.tokens, n, s.width) for name, n in zip("qk", s.heads)},
                   "q_weight": (s.width,), "k_weight": (s.width,), **_angles(s)},
        lambda q, k, q_weight, k_weight, cos, sin: rotary_exact(*(norm(x, w).transpose(1, 2) for x, w in ((q, q_weight), (k, k_weight))),
                                                                cos, sin, 1),
        constant=("cos", "sin"),
    ),
}  # fmt: skip


def _heads(new, seed=0):
    """q and k, with their heads last, and two tables."""
    return new(2, 3, 8, 128, seed=seed), new(2, 3, 4, 128, seed=seed + 1), new(1, 3, 128, seed=6), new(1, 3, 128, seed=7)


def _turned(new, seed=0):
    q, k, *tables = _heads(new, seed)
    return q.transpose(1, 2), k.transpose(1, 2), *tables


def _normed(new):
    q, k, *tables = _heads(new)
    return q, k, new(128, seed=4), new(128, seed=5), *tables, 1e-6


OPERATORS = {
    "rotary_forward": lambda new: [(*_turned(new), 1), (*_heads(new), 2)],
    "rotary_backward": lambda new: [(*_turned(new, 2), 1), (*_heads(new), 2)],
    "qk_norm_rotary_forward": lambda new: [_normed(new)],
    "qk_norm_rotary_backward": lambda new: [(*_turned(new, 2)[:2], *_normed(new), need, not need) for need in (True, False)],
}
GPU_TESTS = {
    "rotary": ("test_ops.py::test_rotary", "test_gpt_oss.py::test_rotary"),
    "qk_norm_rotary": ("test_qk_norm_rotary",),
}
