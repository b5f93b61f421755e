"""cross_entropy of logits against float64: the oracle, shapes, checks and planted errors."""

from functools import partial

import torch

from tests.ops.common import FLOATS, assert_rows_close, check_kept, exact, leaf, randn
from tests.ops.generated import generated
from tests.ops.suite import LABELS, Case, of_suite
from tests.tolerances import assert_close

# Rows of several pieces and of a part of one, aligned and not, of more dimensions.
SHAPES = ((5, 64), (3, 4096), (3, 77), (2, 3, 5000), (2, 10001), (1, 2), (0, 7))
OPTIONS = (
    {},
    {"label_smoothing": 0.1},
    {"softcap": 5.0},
    {"lse_square_scale": 0.01},
    {"label_smoothing": 0.2, "softcap": 3.0, "lse_square_scale": 0.1, "weighted": True},
    {"weighted": True},
    {"num_items": 7},
)


def cross_entropy_exact(z, target, weight=None, ignore_index=-100, label_smoothing=0.0, softcap=None, lse_square_scale=0.0):
    """(loss, z-loss, counted, weight of the label), of every token, in float64. The formula of kernel_src/cross_entropy.py."""
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    classes = z.shape[-1]
    w = torch.ones(classes, dtype=torch.float64) if weight is None else weight.double()
    counted = (target != ignore_index) & (target >= 0) & (target < classes)
    label = torch.where(counted, target, 0)
    lse = torch.logsumexp(z, -1)
    loss = (1 - label_smoothing) * w[label] * (lse - z.gather(-1, label[..., None])[..., 0])
    loss = loss + label_smoothing / classes * (w * (lse[..., None] - z)).sum(-1)
    z_loss = lse_square_scale * lse.square()
    return torch.where(counted, loss + z_loss, 0.0), torch.where(counted, z_loss, 0.0), counted, torch.where(counted, w[label], 0.0)


def reduced(losses, reduction, counted_weight, num_items=None):
    losses = losses.flatten()
    if num_items is not None:
        return losses.sum() / num_items
    if reduction == "none":
        return losses
    total = counted_weight.sum()
    return losses.sum() * (1.0 if reduction == "sum" else 0.0 if total == 0 else 1 / total)


def targets(shape, device, ignore_index=-100):
    """Labels from the first class to the last, one of them ignored where there is more than one."""
    rows, classes = torch.Size(shape[:-1]).numel(), shape[-1]
    target = (torch.arange(rows) * 7919 + classes - 1) % classes
    if rows > 1:
        target[1] = ignore_index
    return target.view(shape[:-1]).to(device)


def check_cross_entropy(ops, device, dtype, shape, reduction="mean", weighted=False, num_items=None, ignore_index=-100, upstream=1.7,
                        view=None, **options):
    base = leaf(randn(*shape, dtype=dtype, device=device, scale=3.0))
    x = base if view is None else view(base)
    target = targets(x.shape, device, ignore_index)
    weight = randn(x.shape[-1], dtype=torch.float32, device=device, seed=1).abs() + 0.5 if weighted else None
    before = base.detach().clone()
    loss = ops.cross_entropy(x, target, weight, reduction=reduction, num_items=num_items, ignore_index=ignore_index, **options)
    base64 = exact(base)
    x64 = base64 if view is None else view(base64)
    losses, _, _, weights = cross_entropy_exact(x64, target.cpu(), None if weight is None else weight.cpu(), ignore_index, **options)
    loss64 = reduced(losses, reduction, weights, num_items)
    what = f"cross_entropy {tuple(shape)} {reduction} {options}"
    assert loss.dtype == torch.float32 and loss.shape == loss64.shape, what
    assert_close(loss, loss64, torch.float32, f"{what} loss")
    # What arrives from above is multiplied in before anything is rounded, so that any number will do.
    upstream = upstream * (2.0**10 if dtype == torch.float16 else 1.0)
    dloss = randn(*loss.shape, dtype=torch.float32, device=device, seed=2) * upstream if loss.dim() else torch.tensor(upstream,
                                                                                                                      device=device)
    (dx,) = torch.autograd.grad(loss, base, dloss, retain_graph=True)
    (again,) = torch.autograd.grad(loss, base, dloss)
    (dx64,) = torch.autograd.grad(loss64, base64, dloss.double().cpu())
    assert_rows_close(dx, dx64, dtype, f"{what} gradient")
    assert torch.equal(dx, again), f"{what}: another gradient in the second backward pass"
    check_kept((base,), (before,), what)
    with torch.no_grad():
        same = ops.cross_entropy(x, target, weight, reduction=reduction, num_items=num_items, ignore_index=ignore_index, **options)
    assert torch.equal(same, loss), f"{what}: other bits without gradients"
    check_kept((base,), (before,), what)


def check_returns(ops, device, dtype, shape=(2, 3, 300)):
    """z-loss, accuracy and predictions, for every reduction."""
    x = leaf(randn(*shape, dtype=dtype, device=device, scale=3.0))
    target = targets(shape, device)
    target[0, 0] = x[0, 0].argmax()
    wanted = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
    for reduction in ("mean", "sum", "none"):
        found = ops.cross_entropy(x, target, reduction=reduction, lse_square_scale=0.02, **wanted)
        losses, z_loss, counted, weights = cross_entropy_exact(x.detach().double().cpu(), target.cpu(), lse_square_scale=0.02)
        assert_close(found.loss, reduced(losses, reduction, weights), torch.float32, "loss")
        assert_close(found.z_loss, reduced(z_loss, reduction, weights), torch.float32, "z-loss")
        predicted = torch.where(counted, x.detach().cpu().argmax(-1), -1).flatten()
        assert torch.equal(found.predicted_tokens.cpu(), predicted)
        right = ((predicted == target.cpu().flatten()) & counted.flatten()).float()
        assert_close(found.token_accuracy, right if reduction == "none" else right.sum() / counted.sum(), torch.float32, "accuracy")
        assert found.loss.requires_grad and not found.z_loss.requires_grad


def check_nothing_counted(ops, device, dtype):
    x = randn(3, 50, dtype=dtype, device=device)
    x[1] = float("nan")  # what a token that does not count holds does not matter
    x = leaf(x)
    for options in ({}, {"label_smoothing": 0.1, "lse_square_scale": 0.1}):
        loss = ops.cross_entropy(x, torch.full((3,), -100, device=device), **options)
        (dx,) = torch.autograd.grad(loss, x)
        assert loss == 0 and not dx.any(), options


def check_infinities(ops, device, dtype, columns):
    """Classes that are ruled out by -inf, whole pieces of them."""
    x = randn(3, columns, dtype=dtype, device=device)
    x[0, 1:] = -float("inf")
    x[1, columns // 3 :] = -float("inf")
    x = leaf(x)
    target = torch.zeros(3, dtype=torch.int64, device=device)
    loss = ops.cross_entropy(x, target)
    (dx,) = torch.autograd.grad(loss, x)
    x64 = exact(x)
    loss64 = torch.nn.functional.cross_entropy(x64, target.cpu())
    (dx64,) = torch.autograd.grad(loss64, x64)
    assert_close(loss, loss64, torch.float32, "loss with -inf")
    assert_close(dx, dx64, dtype, "gradient with -inf")


def all_cases(ops, device, dtypes=FLOATS):
    """(name, function) of every check in some dtypes."""
    for dtype in dtypes:
        for shape in SHAPES:
            for reduction in ("mean", "none"):
                yield f"{shape} {reduction} {dtype}", partial(check_cross_entropy, ops, device, dtype, shape, reduction)
        for options in OPTIONS:
            for reduction in ("mean", "sum", "none"):
                yield f"{options} {reduction} {dtype}", partial(check_cross_entropy, ops, device, dtype, (4, 300), reduction, **options)
            yield f"{options} long {dtype}", partial(check_cross_entropy, ops, device, dtype, (2, 5001), **options)
        yield f"ignore_index 3 {dtype}", partial(check_cross_entropy, ops, device, dtype, (4, 300), ignore_index=3)
        yield f"strided {dtype}", partial(check_cross_entropy, ops, device, dtype, (6, 90), view=lambda x: x[::2, 1:81])
        yield f"transposed {dtype}", partial(check_cross_entropy, ops, device, dtype, (80, 6), view=lambda x: x.t())
        yield f"returns {dtype}", partial(check_returns, ops, device, dtype)
        yield f"nothing counted {dtype}", partial(check_nothing_counted, ops, device, dtype)
        yield f"large {dtype}", partial(check_large_logits, ops, device, dtype)
        yield f"large, smooth {dtype}", partial(check_large_logits, ops, device, dtype, label_smoothing=0.1)
        yield f"large, long {dtype}", partial(check_large_logits, ops, device, dtype, 8200, True, label_smoothing=0.1)
        yield f"-inf {dtype}", partial(check_infinities, ops, device, dtype, 9000)


F32 = torch.float32


def check_slabs(ops, elements=200):
    """More than a launch's 32-bit offsets reach over, at a small size."""
    module = ops.softmax_module
    before, module.SLAB = module.SLAB, elements
    try:
        for reduction in ("mean", "none"):
            check_cross_entropy(ops, "cpu", F32, (7, 77), reduction)
            check_cross_entropy(ops, "cpu", F32, (7, 77), reduction, label_smoothing=0.1)
    finally:
        module.SLAB = before


def check_mean_of_many(ops):
    """The mean of more losses than a block adds up at once, in itself: as many rows of logits would take the interpreter a minute."""
    losses, labels = randn(4500, dtype=F32, device="cpu"), torch.arange(4500) % 70 - 1
    labels[::9] = -100
    counted = (labels >= 0) & (labels < 64)
    mean, inverse = ops.sums_module.counted_mean(losses * counted, labels, -100, 64)
    assert_close(mean, losses.double()[counted].mean(), F32, "the mean of the losses")
    assert_close(inverse, 1 / counted.sum().double().view(1), F32, "one over the number of labels that count")


def check_large_logits(ops, device="cpu", dtype=F32, columns=300, weighted=False, **options):
    """Rows of a mask's number, of the least and of the greatest number, of some classes that are ruled out, and one that is ruled by one
    class: losses and gradients as in float64."""
    top = torch.finfo(dtype).max
    x = randn(9, columns, dtype=dtype, device=device)
    x[0], x[1], x[2], x[3] = -min(1e20, top), -min(1e9, top), -top, top
    x[4, 0], x[5, 1], x[6, columns // 2 :] = top, top, -min(1e9, top)
    x[7], x[7, 1::7], x[7, -(columns // 5) :] = top, -top, -top
    x[8], x[8, 0] = -top, top
    target = torch.zeros(9, dtype=torch.int64, device=device)
    weight = torch.linspace(0.5, 1.5, columns, device=device) if weighted else None
    x, x64 = leaf(x), exact(x)
    losses = ops.cross_entropy(x, target, weight, reduction="none", **options)
    wanted = torch.nn.functional.cross_entropy(x64, target.cpu(), None if weight is None else weight.double().cpu(), reduction="none",
                                               **options)
    (dx,) = torch.autograd.grad(losses, x, torch.ones_like(losses))
    (dx64,) = torch.autograd.grad(wanted.sum(), x64)
    if options.get("label_smoothing"):
        assert not losses[8].isnan()  # the mean distance between the largest and the smallest number is none of fp32
        losses, wanted = losses[:8], wanted[:8]
    torch.testing.assert_close(losses.double().cpu(), wanted, rtol=1e-6, atol=1e-3, msg=lambda m: f"losses {options}: {m}")
    rtol = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    atol = 1e-6 if dtype == torch.float16 else 1e-7
    torch.testing.assert_close(dx.double().cpu(), dx64, rtol=rtol, atol=atol, msg=lambda m: f"gradients {options}: {m}")


def check_z_loss_of_0(ops):
    x = torch.full((2, 30), -1e20)
    found = ops.cross_entropy(x, torch.tensor([0, 1]), return_z_loss=True)
    assert found.z_loss == 0 and found.loss.isfinite()


CHECKS = of_suite({
    "large_logits": check_large_logits,
    "large_logits_smooth": lambda ops: check_large_logits(ops, columns=5000, weighted=True, label_smoothing=0.1),
    "z_loss_of_0": check_z_loss_of_0,
    "loss": lambda ops: check_cross_entropy(ops, "cpu", F32, (3, 5000)),
    "loss_items": lambda ops: check_cross_entropy(ops, "cpu", F32, (3, 300), num_items=7),
    "loss_none": lambda ops: check_cross_entropy(ops, "cpu", F32, (3, 300), "none"),
    "loss_smooth": lambda ops: [check_cross_entropy(ops, "cpu", F32, (3, 5000), "none", **OPTIONS[4]),
                                check_cross_entropy(ops, "cpu", F32, (3, 300), **OPTIONS[4])],
    "loss_softcap": lambda ops: check_cross_entropy(ops, "cpu", F32, (3, 300), softcap=5.0),
    "loss_minus_infinity": lambda ops: check_infinities(ops, "cpu", F32, 9000),
    "loss_returns": lambda ops: check_returns(ops, "cpu", F32),
    "loss_nothing": lambda ops: check_nothing_counted(ops, "cpu", F32),
    "loss_slabs": check_slabs,
    "loss_ignored": lambda ops: check_cross_entropy(ops, "cpu", F32, (4, 300), ignore_index=3),
    "mean_of_many": check_mean_of_many,
})
_KERNELS, _OPERATION, _SUMS = "kernel_src/cross_entropy.py", "shared/ops/cross_entropy_of_logits.py", "kernel_src/sums.py"
_CHUNKS = "shared/ops/cross_entropy.py"
MUTANTS = (
    *generated(_KERNELS, "loss_smooth or large_logits or loss", "cross_entropy_backward exponents write_gradient_weighted"),
    *generated(_CHUNKS, "large_logits_smooth or z_loss_of_0", "distance_of z_loss_of"),
    *generated(_SUMS, "mean_of_many or loss", "counted counted_mean"),
    *generated(_OPERATION, "loss", "_CrossEntropy.forward"),
    (_KERNELS, "exponents", "ct.abs(top * scale) < LARGE", "top * scale < LARGE", "large_logits"),
    (_KERNELS, "read_lse", "(row, 1)", "(row, 0)", "loss"),
    (_KERNELS, "cross_entropy_statistics_weighted", "shift_of(m) * 0.5 - z * 0.5", "-z * 0.5", "large_logits_smooth"),
    (_KERNELS, "cross_entropy_statistics_weighted", "shift_of(m) * 0.5 - z * 0.5", "(shift_of(m) - z) * 0.5", "large_logits_smooth"),
    (_KERNELS, "join_partials", "(m - shift) * LOG2E", "m * LOG2E - shift * LOG2E", "large_logits"),
    (_KERNELS, "cross_entropy_combine", "(m - z) + log_sum", "(m + log_sum) - z", "large_logits"),
    (_OPERATION, "_forward", "shares, *partials", "shares * rows.shape[1], *partials", "loss_smooth"),
    (_KERNELS, "last_first", "block_from_last()", "0", "loss"),
    ("shared/ops/sums.py", "counted_mean", "mean.view(()), inverse", "mean.view(()), inverse * 2", "loss"),
    (_OPERATION, "cross_entropy", "and not more", "", "loss_returns"),
    (_OPERATION, "_CrossEntropy.backward", "dloss.contiguous()", "torch.ones_like(dloss)", "loss"),
    (_OPERATION, "_forward_and_mean", "return mean, lse, scale", "return mean, lse, scale * 2", "loss"),
    (_OPERATION, "_backward", "chunk.coefficients(dloss * scale)", "chunk.coefficients(scale)", "loss_smooth"),
    (_OPERATION, "_sum", "* scale.view(())", "", "loss_items"),
)


# ---------------------------------------------------------------- in the tests of every operation
MODULE = "cross_entropy_of_logits"


def _sample(ops, new):
    target = torch.arange(48, device=new.device)
    return lambda x: ops.cross_entropy(x, target), (new.normal(48, 1024),)


OPERATIONS = {
    "cross_entropy": Case(lambda ops, x: ops.cross_entropy(x, torch.arange(2)), aligned=lambda n: ((2, n),), sample=_sample),
    "cross_entropy, smooth": Case(
        lambda ops, x, w: ops.cross_entropy(x, torch.arange(2), w.detach().float(), label_smoothing=0.1),
        aligned=lambda n: ((2, n), (n,)),
    ),
    "cross_entropy, ignored": Case(lambda ops, x: ops.cross_entropy(x, LABELS), slabs=((9, 40),)),
    "cross_entropy, none": Case(lambda ops, x: ops.cross_entropy(x, LABELS, reduction="none"), slabs=((9, 40),)),
    "cross_entropy, smooth and z-loss": Case(
        lambda ops, x: ops.cross_entropy(x, LABELS, label_smoothing=0.1, lse_square_scale=0.1), slabs=((9, 40),)
    ),
}


def check_large(ops, device):
    check_cross_entropy(ops, device, torch.bfloat16, (129, 128256))


GPU_TESTS = {"cross_entropy": ("test_linear_cross_entropy", "test_operation[cross_entropy")}


def _of_cross_entropy(new):
    """(logits, target, class_weight, options), without and with every option."""
    target = new.integers([1, 0, -100])
    return [(new(3, 40), target, None, -100, 0.0, 0.0, 0.0), (new(3, 40), target, new.exact(40).abs(), -100, 0.1, 20.0, 0.01)]


def _of_cross_entropy_backward(new):
    dloss, lse = new.exact(3), 4 + new.exact(3, 2, seed=1).abs()
    return [(dloss, new.exact(1), *call[:3], lse, *call[3:]) for call in _of_cross_entropy(new)]


OPERATORS = {"cross_entropy_forward": _of_cross_entropy, "cross_entropy_backward": _of_cross_entropy_backward}
