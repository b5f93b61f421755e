"""Each operation against float64, on any device: tests/cpu runs them through the interpreter, tests/gpu with the real cubins."""

import contextlib
import importlib

import torch

from tests.tolerances import RELATIVE_ERROR, assert_close

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def randn(*shape, dtype, device, seed=0, scale=1.0):
    """Normal random numbers that are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(device=device, dtype=dtype)


def leaf(tensor):
    return tensor.detach().requires_grad_()


def exact(tensor):
    """The same numbers in float64, to differentiate."""
    return tensor.detach().double().cpu().requires_grad_()


# ---------------------------------------------------------------- RMSNorm
def rms_norm_exact(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def check_rms_norm(ops, device, dtype, shape, weight_dtype=None, eps=1e-6, view=lambda x: x):
    """view: makes the operation's input out of a contiguous tensor (a transpose, a slice)."""
    weight_dtype = weight_dtype or dtype
    base = leaf(randn(*shape, dtype=dtype, device=device))
    x = view(base)
    weight = leaf(randn(x.shape[-1], dtype=weight_dtype, device=device, seed=1) + 1)
    y = ops.rms_norm(x, weight, eps)
    dy = randn(*y.shape, dtype=y.dtype, device=device, seed=2)
    y.backward(dy)
    base64, weight64 = exact(base), exact(weight)
    y64 = rms_norm_exact(view(base64), weight64, eps)
    y64.backward(dy.double().cpu())
    what = f"RMSNorm {tuple(shape)}"
    assert y.dtype == torch.promote_types(dtype, weight_dtype)
    assert_close(y, y64, dtype, f"{what} y")
    assert_close(base.grad, base64.grad, dtype, f"{what} dx")
    assert_close(weight.grad, weight64.grad, weight_dtype if weight_dtype == dtype else torch.float32, f"{what} dweight", 2)


# Whole rows of Qwen3, short rows, and rows that fit nothing; numbers of rows that fill no tile.
RMS_NORM_SHAPES = (
    (3, 1024),
    (5, 2048),
    (2, 2560),
    (7, 4096),
    (1, 5120),
    (2, 3, 5, 128),
    (33, 64),
    (9, 256),
    (17, 128),
    (4, 1000),
    (3, 77),
    (2, 3),
    (3, 6000),
    (2, 1025),
)


def check_add_rms_norm(ops, device, dtype, shape, eps=1e-6):
    """The sum is rounded to the model's dtype before it is normalised, which is one rounding more."""
    x, residual = (leaf(randn(*shape, dtype=dtype, device=device, seed=i)) for i in range(2))
    weight = leaf(randn(shape[-1], dtype=dtype, device=device, seed=2) + 1)
    y, total = ops.add_rms_norm(x, residual, weight, eps)
    dy, dtotal = (randn(*shape, dtype=dtype, device=device, seed=3 + i) for i in range(2))
    torch.autograd.backward((y, total), (dy, dtotal))
    x64, residual64, weight64 = exact(x), exact(residual), exact(weight)
    total64 = x64 + residual64
    y64 = rms_norm_exact(total64, weight64, eps)
    torch.autograd.backward((y64, total64), (dy.double().cpu(), dtotal.double().cpu()))
    assert_close(total, total64, dtype, "total")
    assert_close(y, y64, dtype, "add + RMSNorm y", 1.5)
    for name, found, wanted in (("x", x, x64), ("residual", residual, residual64), ("weight", weight, weight64)):
        assert_close(found.grad, wanted.grad, dtype, f"add + RMSNorm d{name}", 1.5)


ADD_RMS_NORM_SHAPES = ((3, 1024), (2, 2, 2048), (5, 2560), (2, 4096), (3, 5120), (4, 999), (7, 128))


def check_wide_rms_norm_weight(ops, device, dtype, shape, eps=1e-5):
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


def check_that_wide_rms_norm_rounds_once(ops, device, dtype, shape, eps=1e-5):
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
WIDE_RMS_NORM_SHAPES = ((3, 2880), (2, 3, 77), (19, 64), (2, 4096), (1, 4097))


# ---------------------------------------------------------------- rotary
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
    ops, device, dtype, batch, tokens, heads, kv_heads, head_dim, *, half=False, tables=1, packed=False, eps=1e-6
):
    """packed: q and k are slices of one projection's output. Three roundings in the forward pass, as in the model."""
    base = leaf(randn(batch, tokens, heads + kv_heads, head_dim, dtype=dtype, device=device))
    q, k = base[:, :, :heads], base[:, :, heads:]
    if not packed:
        q, k = q.contiguous(), k.contiguous()
    weights = [leaf(randn(head_dim, dtype=dtype, device=device, seed=1 + i) + 1) for i in range(2)]
    width = head_dim // 2 if half else head_dim
    cos, sin = (randn(tables, tokens, width, dtype=dtype, device=device, seed=i) for i in (5, 6))
    results = ops.qk_norm_rotary(q, k, *weights, cos, sin, eps)
    grads = [randn(*r.shape, dtype=dtype, device=device, seed=8 + i) for i, r in enumerate(results)]
    torch.autograd.backward(results, grads)
    base64, weights64 = exact(base), [exact(w) for w in weights]
    normed = [rms_norm_exact(x, w, eps).transpose(1, 2) for x, w in zip((base64[:, :, :heads], base64[:, :, heads:]), weights64)]
    results64 = rotary_exact(*normed, cos.double().cpu(), sin.double().cpu(), 1)
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


# ---------------------------------------------------------------- SwiGLU and the MLP
def check_swiglu(ops, device, dtype, shape, view=lambda x: x):
    base = [leaf(randn(*shape, dtype=dtype, device=device, seed=i, scale=2.0)) for i in range(2)]
    gate, up = map(view, base)
    out = ops.swiglu(gate, up)
    dout = randn(*out.shape, dtype=dtype, device=device, seed=3)
    out.backward(dout)
    base64 = [exact(x) for x in base]
    gate64, up64 = map(view, base64)
    out64 = torch.nn.functional.silu(gate64) * up64
    out64.backward(dout.double().cpu())
    assert_close(out, out64, dtype, f"SwiGLU {shape}")
    for name, found, wanted in zip(("dgate", "dup"), base, base64):
        assert_close(found.grad, wanted.grad, dtype, f"SwiGLU {shape} {name}")


SWIGLU_SHAPES = ((2, 1024), (3, 3072), (1, 2056), (5, 777), (1, 1), (7,), (2, 3, 520), (1, 1023))


def check_mlp(ops, device, dtype, tokens, hidden, intermediate):
    """The GEMMs round their results, so the errors are those of four roundings in a row."""
    x = leaf(randn(1, tokens, hidden, dtype=dtype, device=device))
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    weights = [leaf(randn(*s, dtype=dtype, device=device, seed=1 + i, scale=s[1] ** -0.5)) for i, s in enumerate(shapes)]
    y = ops.mlp(x, *weights)
    dy = randn(*y.shape, dtype=dtype, device=device, seed=7)
    y.backward(dy)
    x64, weights64 = exact(x), [exact(w) for w in weights]
    gate, up = (x64 @ w.t() for w in weights64[:2])
    y64 = (torch.nn.functional.silu(gate) * up) @ weights64[2].t()
    y64.backward(dy.double().cpu())
    assert_close(y, y64, dtype, "MLP y")
    for name, found, wanted in zip(("x", "gate", "up", "down"), (x, *weights), (x64, *weights64)):
        assert_close(found.grad, wanted.grad, dtype, f"MLP d{name}")


# ---------------------------------------------------------------- linear + cross entropy
def cross_entropy_exact(hidden, weight, target, bias=None, *, softcap=0.0, lse_square_scale=0.0, num_items=None, class_weight=None,
                        ignore_index=-100, reduction="mean", label_smoothing=0.0, use_token_scaling=False, accum_dtype=None, part="loss",
                        rounded=False):
    """part: "loss", or "z_loss" for what lse_square_scale adds to it. rounded: logits are made in hidden's dtype, as a model makes
    them, and only what lies behind them is float64."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if rounded:
        logits = logits.double()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    class_weight = None if class_weight is None else class_weight.double()
    options = {"ignore_index": ignore_index, "reduction": "none"}
    loss = torch.nn.functional.cross_entropy(logits, target, class_weight, label_smoothing=label_smoothing, **options)
    counted = target != ignore_index
    z_loss = torch.where(counted, lse_square_scale * torch.logsumexp(logits, -1).square(), 0.0)
    loss = z_loss if part == "z_loss" else loss + z_loss
    if use_token_scaling:
        loss = loss * torch.exp(-torch.nn.functional.cross_entropy(logits, target, **options)).detach()
    if num_items is not None:
        return loss.sum() / num_items
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    items = counted.sum() if class_weight is None else class_weight[target[counted]].sum()
    return loss.sum() / items if counted.any() else loss.sum() * 0


def token_scaling_factor(options) -> float:
    """By how much the tolerance grows: tokens with large logits of their labels dominate, and those are the ones with the largest
    rounding errors, 2^-7 in the exponent for a logit of 3 in bf16."""
    return 3.0 if options.get("use_token_scaling") else 1.0


RETURNS = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens")


def labels(tokens, classes, ignored, ignore_index=-100):
    """Random ones, a part of them ignored."""
    generator = torch.Generator().manual_seed(2)
    target = torch.randint(0, classes, (tokens,), generator=generator)
    target[torch.rand(tokens, generator=generator) < ignored] = ignore_index
    return target, torch.rand(classes, generator=generator) + 0.5


def check_linear_cross_entropy(ops, device, dtype, tokens, features, classes, *, bias=False, class_weight=False, ignored=0.2, upstream=0.5, **options):
    """hidden and weight are scaled so that logits are of order 1. upstream: the gradient that reaches a scalar loss."""
    hidden = leaf(randn(tokens, features, dtype=dtype, device=device))
    weight = leaf(randn(classes, features, dtype=dtype, device=device, seed=1, scale=features**-0.5))
    target, weights = labels(tokens, classes, ignored, options.get("ignore_index", -100))
    b = leaf(randn(classes, dtype=dtype, device=device, seed=3)) if bias else None
    leaves = [hidden, weight] + ([b] if bias else [])
    leaves64 = [exact(x) for x in leaves]
    weights = weights if class_weight else None
    asked = {name: options.pop(name) for name in RETURNS if name in options}
    if asked:  # every other counted token is predicted right
        best = torch.nn.functional.linear(*leaves64).argmax(-1)
        right = (target != options.get("ignore_index", -100)) & (torch.arange(tokens) % 2 == 0)
        target = torch.where(right, best, target)
    found = ops.linear_cross_entropy(
        hidden, weight, target.to(device), b, class_weight=None if weights is None else weights.to(device), **options, **asked
    )
    loss = found.loss if asked else found
    dloss = randn(*loss.shape, dtype=torch.float32, device=device, seed=4) if loss.dim() else torch.tensor(upstream, device=device)
    if dtype == torch.float16 and options.get("use_token_scaling"):
        dloss = dloss * 1024  # a loss scale, without which these gradients are below fp16's smallest normal number
    loss.backward(dloss)
    loss64 = cross_entropy_exact(*leaves64[:2], target, *leaves64[2:], class_weight=weights, **options)
    loss64.backward(dloss.double().cpu())
    # Logits of order 1 are rounded to the model's dtype, which is an error of 2^-9 in the exponent of each probability.
    factor = token_scaling_factor(options)
    assert loss.dtype == torch.float32
    assert_close(loss, loss64, dtype, "loss", factor)
    for name, mine, wanted in zip(("dhidden", "dweight", "dbias"), leaves, leaves64):
        assert mine.grad.dtype == dtype
        assert_close(mine.grad, wanted.grad, dtype, f"linear cross entropy {name} {options}", factor)
    if asked:
        check_what_else_the_loss_returns(found, asked, leaves64, target, weights, dtype, options)


def check_what_else_the_loss_returns(found, asked, leaves64, target, weights, dtype, options):
    """The z-loss, the predictions, which are right to the rounding of the logits, and their accuracy. None of them has a gradient."""
    assert not any(x.requires_grad for x in found[1:] if x is not None)
    assert [x is not None for x in found[1:]] == [asked.get(name, False) for name in RETURNS]
    with torch.no_grad():
        if asked.get("return_z_loss"):
            z_loss64 = cross_entropy_exact(*leaves64[:2], target, *leaves64[2:], class_weight=weights, part="z_loss", **options)
            assert_close(found.z_loss, z_loss64, dtype, "z-loss", token_scaling_factor(options))
        counted = target != options.get("ignore_index", -100)
        if asked.get("return_predicted_tokens"):
            predicted = found.predicted_tokens.cpu()
            assert predicted.dtype == torch.int64 and (predicted[~counted] == -1).all() and (predicted[counted] >= 0).all()
            logits = torch.nn.functional.linear(*leaves64)[counted]
            gap = logits.amax(-1) - logits.gather(1, predicted[counted, None])[:, 0]
            assert (gap <= 2 * RELATIVE_ERROR[dtype] * logits.abs().amax(-1)).all(), "a predicted token is not the most probable one"
            if asked.get("return_token_accuracy"):
                right = (predicted == target).float()
                if found.loss.dim() == 0:
                    right = right[counted].mean() if counted.any() else torch.tensor(0.0)
                    assert 0.4 <= right <= 0.8 or not counted.any() or len(target) < 10
                assert_close(found.token_accuracy, right, torch.float32, "token accuracy")


def check_evaluation(ops, device, dtype, tokens, features, classes, *, class_weight=False, bound=None, **options):
    """Without gradients, the loss of every token, where the logits are not rounded. bound: the dtype of the tolerance."""
    hidden = randn(tokens, features, dtype=dtype, device=device)
    weight = randn(classes, features, dtype=dtype, device=device, seed=1, scale=features**-0.5)
    target, weights = labels(tokens, classes, 0.2, options.get("ignore_index", -100))
    target, weights = target.to(device), weights.to(device) if class_weight else None
    weight64, rows64 = weight.double(), []
    for rows in torch.arange(tokens, device=device).split(512):
        rows64.append(cross_entropy_exact(hidden[rows].double(), weight64, target[rows], class_weight=weights, **{**options, "reduction": "none"}))
    exact_rows, bound = torch.cat(rows64), bound or torch.float32
    loss = ops.linear_cross_entropy(hidden, weight, target, class_weight=weights, **{**options, "reduction": "none"})
    assert loss.dtype == torch.float32 and (loss[target == options.get("ignore_index", -100)] == 0).all()
    factor = token_scaling_factor(options)
    assert_close(loss, exact_rows, bound, f"evaluation of {tokens} tokens {options}", factor)
    # Parameters of a model require gradients all the same.
    with torch.no_grad():
        total = ops.linear_cross_entropy(leaf(hidden), leaf(weight), target, class_weight=weights, **{**options, "reduction": "sum"})
    assert_close(total, exact_rows.sum(), bound, "evaluation, sum", factor)


def check_fp16_range(ops, device, classes, tokens, upstream, class_weight, *, bias=False, large=1.0, one_label=False, **options):
    """Gradients of the loss that fp16 holds at the end, of what it may not hold on the way. upstream: a loss scale. class_weight: of
    labels. large: a factor of the first feature. Labels rise with the tokens, so chunks differ in their weights."""
    fp16 = torch.float16
    hidden = randn(tokens, 16, dtype=fp16, device=device, scale=0.5)
    hidden[:, 0] = hidden[:, 0].abs() * large  # of one sign: the gradient of the weight is a sum over the tokens
    hidden = leaf(hidden)
    weight = randn(classes, 16, dtype=fp16, device=device, seed=1, scale=0.25)
    weight[:, 0] /= large
    weight = leaf(weight)
    leaves = [hidden, weight] + ([leaf(randn(classes, dtype=fp16, device=device, seed=2))] if bias else [])
    target = torch.full((tokens,), 3) if one_label else torch.arange(tokens) * classes // tokens
    weights = None if class_weight is None else class_weight(torch.arange(classes)).float()
    exact_leaves = [exact(x) for x in leaves]
    wanted = cross_entropy_exact(*exact_leaves[:2], target, *exact_leaves[2:], class_weight=weights, **options)
    (wanted * upstream).sum().backward()
    weights = None if weights is None else weights.to(device)
    found = ops.linear_cross_entropy(*leaves[:2], target.to(device), *leaves[2:], class_weight=weights, **options)
    assert_close(found, wanted, fp16, "loss", 3)
    (found * upstream).sum().backward()
    for name, mine, theirs in zip(("dhidden", "dweight", "dbias"), leaves, exact_leaves):
        assert theirs.grad.abs().max() < torch.finfo(fp16).max
        assert_close(mine.grad, theirs.grad, fp16, f"fp16 {name} {options}", 3)


# Class weights, or hidden states, that take the gradient of the logits or their sums out of fp16's range.
FP16_CASES = (
    dict(class_weight=lambda label: torch.where(label % 2 == 0, 5000.0, 1.0)),
    dict(class_weight=lambda label: torch.full(label.shape, 5000.0), reduction="sum", upstream=2.0**-10),
    dict(class_weight=lambda label: torch.full(label.shape, 1e-8)),
    dict(class_weight=lambda label: torch.full(label.shape, 1e-8), label_smoothing=0.1),
    dict(class_weight=lambda label: torch.full(label.shape, 1e-8), reduction="sum", upstream=2.0**24),
    dict(class_weight=lambda label: torch.where(label < 20, 5e3, 5e-3), bias=True),
    dict(large=2.0**13, one_label=True),
    dict(large=2.0**13, one_label=True, reduction="none", upstream=2.0**-8),
    dict(large=2.0**-8, one_label=True, reduction="sum"),
)


# Numbers of tokens, features and classes that fill no tile, one tile, and some.
EVALUATION_SHAPES = ((1, 64, 17), (3, 1088, 40), (5, 64, 256), (200, 128, 513), (130, 192, 1000))
EVALUATION_CASES = (
    dict(),
    dict(ignore_index=3),
    dict(class_weight=True),
    dict(lse_square_scale=1e-2, use_token_scaling=True),
)
LOSS_CASES = (
    dict(),
    dict(reduction="sum"),
    dict(reduction="none"),
    dict(num_items=37),
    dict(ignore_index=0),
    dict(ignored=1.0),
    dict(label_smoothing=0.1),
    dict(class_weight=True),
    dict(class_weight=True, label_smoothing=0.2, reduction="none"),
    dict(softcap=3.0),
    dict(lse_square_scale=1e-2),
    dict(bias=True, softcap=5.0, lse_square_scale=1e-3, label_smoothing=0.05, class_weight=True),
    dict(use_token_scaling=True),
    dict(use_token_scaling=True, reduction="none", lse_square_scale=1e-2),
    dict(use_token_scaling=True, ignored=1.0, lse_square_scale=1e-2, return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True),
    dict(return_z_loss=True, lse_square_scale=1e-2),
    dict(return_predicted_tokens=True, return_token_accuracy=True),
    dict(return_token_accuracy=True, return_predicted_tokens=True, return_z_loss=True, reduction="none", lse_square_scale=1e-2, bias=True),
    dict(return_z_loss=True, lse_square_scale=1e-2, use_token_scaling=True, num_items=37, label_smoothing=0.1, softcap=4.0),
    dict(accum_dtype=torch.float32),
    dict(accum_dtype=torch.float32, reduction="none", class_weight=True),
)
LOSS_SHAPES = ((5, 32, 4096), (3, 16, 4099), (4, 24, 9001), (1, 8, 17))


# ---------------------------------------------------------------- experts
def experts_exact(hidden, expert, scores, gate_up, down, gate_up_bias=None, down_bias=None, *, transposed=False, interleaved=False,
                  alpha=0.0, limit=float("inf")):
    """A loop over the experts, as transformers' eager implementation."""
    if not transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    out = torch.zeros_like(hidden)
    for e in range(gate_up.shape[0]):
        token, k = torch.where(expert == e)
        x = hidden[token] @ gate_up[e]
        x = x if gate_up_bias is None else x + gate_up_bias[e]
        gate, up = (x[:, ::2], x[:, 1::2]) if interleaved else x.chunk(2, -1)
        if alpha:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            gated = (up + 1) * (gate * torch.sigmoid(alpha * gate))
        else:
            gated = torch.nn.functional.silu(gate) * up
        y = gated @ down[e]
        y = y if down_bias is None else y + down_bias[e]
        out = out.index_add(0, token, scores[token, k, None] * y)
    return out


def routing(tokens, experts, top_k, skew=0.0, absent=0.0, seed=0):
    """Different experts for each token; skew: how much the first ones are preferred; absent: the share of ids that are no expert."""
    generator = torch.Generator().manual_seed(seed)
    preference = torch.randn(tokens, experts, generator=generator) - skew * torch.arange(experts)
    expert = preference.topk(top_k, -1).indices
    expert[torch.rand(expert.shape, generator=generator) < absent] = experts
    return expert


def check_experts(ops, device, dtype, tokens, hidden, width, experts, top_k, *, gpt_oss=True, skew=0.0, absent=0.0, frozen=(),
                  scores_dtype=None, limit=7.0):
    """frozen: what requires no gradient."""
    expert, made, options = experts_inputs(device, dtype, tokens, hidden, width, experts, top_k, gpt_oss, skew, absent, scores_dtype, limit)
    leaves = {name: tensor if name in frozen else leaf(tensor) for name, tensor in made.items()}
    exacts = {name: exact(tensor) for name, tensor in made.items()}

    def run(function, tensors, expert):
        hidden, scores, *weights = tensors.values()
        return function(hidden, expert, scores, *weights, **options)

    out = run(ops.experts, leaves, expert)
    out64 = run(experts_exact, exacts, expert.cpu())
    assert out.dtype == dtype
    # The output of the first GEMM, the gated rows and those of the second GEMM are rounded, as in the model.
    assert_close(out, out64, dtype, "experts", 1.25)
    dout = randn(tokens, hidden, dtype=dtype, device=device, seed=6)
    out.backward(dout)
    out64.backward(dout.double().cpu())
    for name in made:
        if name in frozen:
            assert leaves[name].grad is None
            continue
        assert leaves[name].grad.dtype == leaves[name].dtype
        assert_close(leaves[name].grad, exacts[name].grad, dtype, f"experts d{name}", 1.25)


def experts_inputs(device, dtype, tokens, hidden, width, experts, top_k, gpt_oss=True, skew=0.0, absent=0.0, scores_dtype=None, limit=7.0):
    """(expert, the tensors that are differentiated by name, options). The biases put gate and up on both sides of each clamp, far
    from where rounding decides."""
    expert = routing(tokens, experts, top_k, skew, absent).to(device)
    made = {
        "hidden": randn(tokens, hidden, dtype=dtype, device=device),
        "scores": randn(tokens, top_k, dtype=torch.float32, device=device, seed=1).softmax(-1).to(scores_dtype or dtype),
        "gate_up": randn(experts, 2 * width, hidden, dtype=dtype, device=device, seed=2, scale=hidden**-0.5),
        "down": randn(experts, hidden, width, dtype=dtype, device=device, seed=3, scale=width**-0.5),
    }
    options = {}
    if gpt_oss:
        made["gate_up"], made["down"] = (made[name].transpose(1, 2).contiguous() for name in ("gate_up", "down"))
        made["gate_up_bias"] = (randn(experts, 2 * width, dtype=torch.float32, device=device, seed=4).round().clamp(-1, 1) * 12).to(dtype)
        made["down_bias"] = randn(experts, hidden, dtype=dtype, device=device, seed=5)
        options = {"transposed": True, "interleaved": True, "alpha": 1.702, "limit": limit}
    return expert, made, options


def experts_run(ops, device, dtype, *sizes, **options):
    """(leaves by name, a call of the operation on them)"""
    expert, made, options = experts_inputs(device, dtype, *sizes, **options)
    leaves = {name: leaf(tensor) for name, tensor in made.items()}
    hidden, scores, *weights = leaves.values()
    return leaves, lambda: ops.experts(hidden, expert, scores, *weights, **options)


def check_second_backward_of_experts(ops, device):
    """The first one writes over what the forward pass saved."""
    leaves, run = experts_run(ops, device, torch.bfloat16, 19, 24, 64, 4, 2)
    out = run()
    first = torch.autograd.grad(out, leaves.values(), leaves["hidden"].detach(), retain_graph=True)
    second = torch.autograd.grad(out, leaves.values(), leaves["hidden"].detach())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def check_nan_in_experts(ops, device, gpt_oss):
    """In one expert's gate, which a clamp must not turn into a number."""
    leaves, run = experts_run(ops, device, torch.float32, 9, 8, 64, 4, 2, gpt_oss=gpt_oss)
    gate = leaves["gate_up_bias"][1, 0] if gpt_oss else leaves["gate_up"][1, 0]
    gate.data.fill_(float("nan"))
    assert torch.equal(run().isnan().all(1).cpu(), (routing(9, 4, 2) == 1).any(1))


def check_grouped_gemm(ops, device, dtype, counts, k, n, absent=0):
    """Both grouped GEMMs, with both orders of the weight in memory. counts: the rows of each expert; behind them lie `absent` rows
    of none, all NaN."""
    module = importlib.import_module(f"{ops.__name__}.shared.ops.grouped_gemm")
    ends = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
    here = sum(counts)
    x, y = (randn(here + absent, columns, dtype=dtype, device=device, seed=i) for i, columns in enumerate((k, n)))
    x[here:], y[here:] = torch.nan, torch.nan
    parts = [slice(end - count, end) for count, end in zip(counts, ends.tolist(), strict=True)]
    groups = module.Groups(ends, x.shape[0])
    weight = randn(len(counts), k, n, dtype=dtype, device=device, seed=2, scale=k**-0.5)
    expected = torch.cat([x[part].double() @ weight[e].double() for e, part in enumerate(parts)])
    for stored in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
        assert_close(module.grouped_mm(x, stored, groups)[:here], expected, dtype, f"grouped_mm, strides {stored.stride()}")
    expected = torch.stack([x[part].double().t() @ y[part].double() for part in parts])
    found = module.grouped_outer(x, y, groups)
    assert_close(found, expected, dtype, "grouped_outer")
    assert not found[[e for e, count in enumerate(counts) if not count]].any(), "an expert without rows has a gradient"


# Counts on both sides of the rows that a block takes and of those that a step takes.
GROUPED_CASES = (
    dict(counts=[3, 0, 5, 1], k=24, n=40),
    dict(counts=[0, 0, 261, 0], k=72, n=136),
    dict(counts=[128, 64, 0, 1, 129], k=136, n=264, absent=7),
    dict(counts=[0, 33, 31, 0], k=64, n=128, absent=150),
    dict(counts=[0, 0], k=16, n=8, absent=9),
    dict(counts=[2] * 19, k=8, n=264),
    dict(counts=[17], k=200, n=8),
)
EXPERTS_CASES = (
    dict(tokens=37, hidden=24, width=64, experts=4, top_k=2),
    dict(tokens=70, hidden=16, width=128, experts=5, top_k=3, skew=0.6),
    dict(tokens=9, hidden=24, width=20, experts=8, top_k=4, absent=0.3),
    dict(tokens=25, hidden=10, width=7, experts=16, top_k=1),
    dict(tokens=3, hidden=24, width=33, experts=8, top_k=8),
    dict(tokens=33, hidden=1032, width=64, experts=3, top_k=2, skew=3.0),
    dict(tokens=37, hidden=24, width=64, experts=4, top_k=2, gpt_oss=False),
    dict(tokens=9, hidden=10, width=31, experts=8, top_k=5, gpt_oss=False, absent=0.3),
    dict(tokens=6, hidden=16, width=128, experts=12, top_k=8, gpt_oss=False, scores_dtype=torch.float32),
)
EXPERTS_FROZEN = (
    ("gate_up", "down", "gate_up_bias", "down_bias"),
    ("gate_up", "gate_up_bias"),
    ("down", "down_bias"),
    ("hidden", "scores"),
    ("hidden", "scores", "gate_up", "down", "gate_up_bias"),
    ("scores", "gate_up_bias"),
)


# ---------------------------------------------------------------- AdamW
def adamw_exact(param, grad, exp_avg, exp_avg_sq, step, lr, betas, eps, weight_decay):
    """(param, exp_avg, exp_avg_sq) after a step, in float64."""
    param, grad, exp_avg, exp_avg_sq = (t.detach().double().cpu() for t in (param, grad, exp_avg, exp_avg_sq))
    exp_avg = betas[0] * exp_avg + (1 - betas[0]) * grad
    exp_avg_sq = betas[1] * exp_avg_sq + (1 - betas[1]) * grad.square()
    change = exp_avg / (1 - betas[0] ** step) / ((exp_avg_sq / (1 - betas[1] ** step)).sqrt() + eps)
    return param - lr * weight_decay * param - lr * change, exp_avg, exp_avg_sq


# Pieces that a block takes whole, sizes that are none, nothing.
ADAMW_SHAPES = ((5, 1024), (512,), (3, 77), (1501,), (2, 0))


@contextlib.contextmanager
def limit(package, module, name, value):
    """Another value of a limit in one of the package's modules of operations, so that tests may be small."""
    module = importlib.import_module(f"{package.__name__}.shared.ops.{module}")
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def small_parameters_too(package):
    """AdamW's kernel takes parameters of any size."""
    return limit(package, "adamw", "SMALLEST", 0)


def check_adamw(package, device, dtype, shapes=ADAMW_SHAPES, offset=0, lr=0.05, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.2):
    """Three steps, each from where the last one came to, in two groups; every second parameter begins a step later.
    offset: elements between the start of the memory and of each tensor."""

    def placed(shape, seed):
        flat = randn(offset + torch.Size(shape).numel(), dtype=dtype, device=device, seed=seed)
        return flat[offset:].view(shape)

    params = [torch.nn.Parameter(placed(shape, i)) for i, shape in enumerate(shapes)]
    half = len(params) // 2
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    optimizer = package.AdamW([{"params": params[:half]}, {"params": params[half:], "lr": 2 * lr, "weight_decay": 0.0}], **options)
    for step in (1, 2, 3):
        expected = []
        for i, param in enumerate(params):
            late = i % 2
            param.grad = None if late and step == 1 else placed(param.shape, 100 * step + i)
            if param.grad is not None:
                state = optimizer.state[param] or {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
                mine = {**options, "lr": 2 * lr, "weight_decay": 0.0} if i >= half else options
                expected.append((param, adamw_exact(param, param.grad, state["exp_avg"], state["exp_avg_sq"], step - late, **mine)))
        with small_parameters_too(package):
            assert optimizer.step() is None
        for param, wanted in expected:
            state = optimizer.state[param]
            for name, found, exactly in zip(("param", "exp_avg", "exp_avg_sq"), (param, state["exp_avg"], state["exp_avg_sq"]), wanted, strict=True):
                assert_close(found, exactly, dtype, f"AdamW {name} of {list(param.shape)} after step {step}")
    assert [optimizer.state[param]["step"].item() for param in params] == [3.0 - i % 2 for i in range(len(params))]
