"""kl_div, jsd and tvd, of distributions and of logits, against float64: the oracle, shapes, checks and planted errors."""

from functools import partial
from unittest import mock

import torch

from tests.ops.common import FLOATS, FP16, FP32, assert_rows_close, check_kept, leaf, randn
from tests.ops.generated import generated
from tests.ops.suite import LABELS, Case, of_suite
from tests.tolerances import assert_close

ROW_FACTOR = 4.0  # the gradient of a row's logits is a difference of sums over the row
OPS = ("jsd", "kl_div", "tvd")
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
# Rows of more than one piece and of a part of one, aligned and not.
SHAPES = ((3, 2304), (5, 64), (3, 77), (2, 3, 2100), (2, 4097), (1, 17008), (1, 1))


# ---------------------------------------------------------------- float64, one distribution at a time
def loss_exact(op, x, y, beta=0.5, log_target=False, eps=0.0):
    """The elementwise loss of the definition. Where a probability is 0 its term is left out, before anything is multiplied."""
    if op == "tvd":
        return 0.5 * (x - y).abs()
    if op == "kl_div":
        log_p = y if log_target else y.clamp(min=max(eps, 1e-300)).log()
        p = y.exp() if log_target else y
        return torch.where(p > 0, p * (torch.where(p > 0, log_p, 0.0) - torch.where(p > 0, x, 0.0)), 0.0)
    p, q = y.exp(), x.exp()
    if beta == 0:
        return loss_exact("kl_div", x, y, log_target=True)
    if beta == 1:
        return loss_exact("kl_div", y, x, log_target=True)
    m = beta * p + (1 - beta) * q
    log_m = torch.where(m > 0, m, 1.0).log()
    some_p, some_q = p > 0, q > 0
    of_p = torch.where(some_p, beta * p * (torch.where(some_p, y, 0.0) - log_m), 0.0)
    return of_p + torch.where(some_q, (1 - beta) * q * (torch.where(some_q, x, 0.0) - log_m), 0.0)


def reduced(losses, reduction, labels, ignore_index, batch):
    if labels is not None:
        counted = labels != ignore_index
        losses = torch.where(counted[..., None], losses, 0.0)
        rows = max(int(counted.sum()), 1)
    else:
        rows = losses[..., 0].numel()
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (rows * losses.shape[-1] if reduction == "mean" else batch if batch and labels is None else rows)


def inputs(op, dtype, device, shape, from_logits=False, log_target=False, similar=False):
    """(student's, teacher's). similar: two distributions that differ little, as at the end of a distillation."""
    a = randn(*shape, dtype=torch.float32, device=device, scale=2.0)
    b = randn(*shape, dtype=torch.float32, device=device, seed=1, scale=2.0)
    if similar:
        b = a + 0.05 * b
    if not from_logits:
        a, b = a.log_softmax(-1), b.log_softmax(-1)
        if op == "tvd":
            a, b = a.exp(), b.exp()
        elif op == "kl_div" and not log_target:
            b = b.exp()
    return a.to(dtype), b.to(dtype)


def labels_of(shape, device, ignore_index=-100):
    labels = torch.arange(torch.Size(shape[:-1]).numel(), device=device).view(shape[:-1])
    labels.view(-1)[-1] = ignore_index
    return labels


def check_divergence(ops, device, dtype, op, shape, *, factor=1.0, loss_factor=1.0, floor=1e-2, upstream=None, pair=None, labels=None,
                     ignore_index=-100, **options):
    """factor, loss_factor: of the bounds of the gradient and of the loss. floor: as of `assert_rows_close`. upstream: the gradient of a
    scalar loss; pair: (student's, teacher's) to take."""
    from_logits, reduction = options.get("from_logits", False), options.get("reduction", "mean" if op == "kl_div" else "batchmean")
    kinds = {k: options[k] for k in ("beta", "log_target", "eps") if k in options}
    x, y = pair or inputs(op, dtype, device, shape, from_logits, options.get("log_target", False), options.pop("similar", False))
    x = leaf(x)
    before = x.detach().clone(), y.clone()
    more = dict(options) if labels is None else dict(options, labels=labels, ignore_index=ignore_index)
    loss = getattr(ops, op)(x, y, **more)
    x64, y64 = x.detach().double().cpu().requires_grad_(), y.double().cpu()
    u, v = x64, y64
    if from_logits:
        softmax = torch.softmax if op == "tvd" else torch.log_softmax
        u, v = (softmax(z / options.get("temperature", 1.0), -1) for z in (x64, y64))
        if op == "kl_div":
            kinds["log_target"] = True
    losses = loss_exact(op, u, v, **kinds)
    loss64 = reduced(losses, reduction, None if labels is None else labels.cpu(), ignore_index, shape[0] if op == "kl_div" else None)
    what = f"{op} {tuple(shape)} {options}"
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.shape == loss64.shape, what
    # Losses are sums in float32, whatever the inputs' dtype.
    assert_close(loss, loss64, torch.float32, f"{what} loss", loss_factor)
    if reduction == "none":
        upstream = randn(*loss.shape, dtype=loss.dtype, device=device, seed=2)
    elif upstream is None:
        # Powers of two do not round; fp16's gradients need a loss scale.
        upstream = torch.tensor(2.0**12 if dtype == torch.float16 else 1.0, dtype=loss.dtype, device=device)
    given = upstream.clone()
    (dx,) = torch.autograd.grad(loss, x, upstream, retain_graph=True)
    kept = dx.clone()
    (again,) = torch.autograd.grad(loss, x, upstream)
    (dx64,) = torch.autograd.grad(loss64, x64, upstream.double().cpu())
    assert_rows_close(dx, dx64, dtype, f"{what} gradient", factor, floor, ROW_FACTOR)
    assert_rows_close(again, dx64, dtype, f"{what} second gradient", factor, floor, ROW_FACTOR)
    assert torch.equal(dx, kept), f"{what}: the second backward pass writes into what the first one gave"
    check_kept((x, y, upstream), (*before, given), what)
    with torch.no_grad():
        assert torch.equal(getattr(ops, op)(x, y, **more), loss), f"{what}: other bits without gradients"


def check_zeros(ops, device, dtype, columns):
    """A probability of 0, here and there, contributes nothing and gives no NaN; nor does a row with only one class left."""
    a, b = (randn(4, columns, dtype=torch.float32, device=device, seed=i) for i in (0, 1))
    a[0, ::3] = b[0, ::3] = -float("inf")
    b[1, ::2] = -float("inf")
    b[2, 1:] = -float("inf")
    b[3] = a[3]
    lx, ly = (t.log_softmax(-1).to(dtype) for t in (a, b))
    for beta in (0.0, 0.3, 0.5):  # row 3's gradient is a difference of equal numbers
        check_divergence(ops, device, dtype, "jsd", lx.shape, pair=(lx, ly), beta=beta, floor=0.1)
    for op, pair, options in (("jsd", (ly, lx), {"beta": 1.0}), ("jsd", (ly, lx), {}), ("kl_div", (lx, ly), {"log_target": True}),
                              ("kl_div", (lx, ly.exp()), {}), ("tvd", (lx.exp(), ly.exp()), {})):  # fmt: skip
        check_divergence(ops, device, dtype, op, lx.shape, pair=pair, reduction="batchmean", **options)
    # Where the student gives no probability to what the teacher has, KL is infinite.
    assert ops.jsd(ly, lx, beta=0.0).item() == float("inf")
    for op in OPS:
        check_divergence(ops, device, dtype, op, a.shape, pair=(a.clamp(min=-30).to(dtype), b.clamp(min=-30).to(dtype)), from_logits=True)


def check_far_apart(ops, device, dtype, columns=300):
    """Log-probabilities down to -200, where probabilities and M are 0 in float32."""
    x, y = (randn(3, columns, dtype=torch.float32, device=device, seed=i, scale=60.0).log_softmax(-1).to(dtype) for i in (0, 1))
    for beta in BETAS[1:4]:
        check_divergence(ops, device, dtype, "jsd", x.shape, pair=(x, y), beta=beta)


def check_nan(ops, device, dtype, columns):
    """A NaN of the student or of the teacher arrives in the loss."""
    for op in OPS:
        for place in (0, 1):
            pair = inputs(op, dtype, device, (2, columns))
            pair[place][1, columns // 2] = float("nan")
            x = leaf(pair[0])
            loss = getattr(ops, op)(x, pair[1])
            loss.backward()
            assert loss.isnan(), f"{op}: NaN in argument {place} is lost"
            # The gradient of KL is the teacher's distribution.
            assert x.grad[1, columns // 2].isnan() or (op, place) == ("kl_div", 0), f"{op}: the gradient of a NaN in argument {place}"
    x, y = inputs("kl_div", dtype, device, (2, columns))
    y[0, 0] = -0.25
    assert ops.kl_div(x, y).isnan(), "a negative probability is no number in torch"


def check_nan_logits(ops, device, dtype, columns):
    """A NaN among the teacher's logits arrives in the loss and in all of its row's gradient, and nowhere else."""
    x, y = inputs("jsd", dtype, device, (2, columns), from_logits=True)
    y[1, columns // 2] = float("nan")
    x = leaf(x)
    loss = ops.jsd(x, y, from_logits=True)
    loss.backward()
    assert loss.isnan() and x.grad[1].isnan().all() and x.grad[0].isfinite().all()


def check_labels(ops, device, dtype, shape):
    for op in ("jsd", "tvd", "kl_div"):
        for reduction in ("batchmean", "mean", "sum", "none"):
            labels = labels_of(shape, device)
            check_divergence(ops, device, dtype, op, shape, labels=labels, reduction=reduction)
        check_divergence(ops, device, dtype, op, shape, labels=labels_of(shape, device, 1), ignore_index=1, reduction="sum")
        check_divergence(ops, device, dtype, op, shape, labels=labels_of(shape, device), from_logits=True, temperature=0.7)
        nothing = torch.full(shape[:-1], -100, device=device)
        for from_logits in (False, True):
            x, y = inputs(op, dtype, device, shape, from_logits)
            x = leaf(x)
            loss = getattr(ops, op)(x, y, labels=nothing, from_logits=from_logits)
            loss.backward()
            assert loss == 0 and not x.grad.any(), f"{op}: rows that are all ignored"
    # What an ignored row holds does not matter.
    x, y = inputs("jsd", dtype, device, shape)
    labels = labels_of(shape, device)
    x.view(-1, shape[-1])[-1] = float("nan")
    x = leaf(x)
    loss = ops.jsd(x, y, labels)
    loss.backward()
    assert loss.isfinite() and not x.grad.view(-1, shape[-1])[-1].any()


def check_scaled(ops, device, dtype, op, shape=(3, 300)):
    """An upstream gradient that is not 1: once more rounded where the forward pass wrote the gradient, and right both times."""
    upstream = torch.tensor(3.7 if dtype != torch.float16 else 3000.7, dtype=torch.float32, device=device)
    factor = 1.5 if dtype == torch.bfloat16 else 1.0
    check_divergence(ops, device, dtype, op, shape, upstream=upstream, factor=factor, reduction="batchmean")


def check_target_gradient(ops, device, dtype, op):
    """The teacher's gradient too, where it is asked for."""
    x, y = (leaf(t) for t in inputs(op, dtype, device, (3, 70)))
    getattr(ops, op)(x, y, reduction="batchmean").backward()
    x64, y64 = (t.detach().double().cpu().requires_grad_() for t in (x, y))
    reduced(loss_exact(op, x64, y64), "batchmean", None, -100, 3).backward()
    assert_rows_close(x.grad, x64.grad, dtype, f"{op} student's gradient")
    assert_rows_close(y.grad, y64.grad, dtype, f"{op} teacher's gradient")


def check_strided(ops, device, dtype, op):
    a, b = inputs(op, dtype, device, (6, 130))
    expected = getattr(ops, op)(a[::2, 1:101].contiguous(), b.t()[1:101, ::2].t().contiguous())
    assert torch.equal(getattr(ops, op)(a[::2, 1:101], b.t()[1:101, ::2].t()), expected)


def check_empty(ops, device, dtype):
    for op in OPS:
        for from_logits in (False, True):
            x = leaf(torch.empty(0, 7, dtype=dtype, device=device))
            loss = getattr(ops, op)(x, x.detach(), from_logits=from_logits)
            loss.backward()
            assert loss == 0 and x.grad.shape == (0, 7)


def check_slabs(ops, elements=200):
    """More than a launch's 32-bit offsets reach over, at a small size."""
    with mock.patch.object(ops.softmax_module, "SLAB", elements):
        for op in OPS:
            for from_logits in (False, True):
                check_divergence(ops, "cpu", torch.float32, op, (7, 77), from_logits=from_logits)
                check_divergence(ops, "cpu", torch.float32, op, (7, 77), from_logits=from_logits, labels=labels_of((7, 77), "cpu"))


def check_total(ops, device):
    """More numbers than one block adds up, and more labels than it counts at once."""
    values = randn(50001, dtype=torch.float32, device=device) + 1
    if not ops.divergence_module.kernels_compute(values):
        return  # PyTorch's own sums take their place
    assert_close(ops.divergence_module.total(values), values.double().cpu().sum(), torch.float32, "total")
    labels = torch.arange(10000, device=device) % 3
    assert_close(ops.divergence_module.inverse_count(labels, 1), torch.tensor([1 / 6667.0]), torch.float32, "inverse count")


def all_cases(ops, device, dtypes=FLOATS):
    """(name, function) of every check in some dtypes."""
    for dtype in dtypes:
        for shape in SHAPES:
            for op in OPS:
                yield f"{op} {dtype} {shape}", partial(check_divergence, ops, device, dtype, op, shape, reduction="batchmean")
                options = {"from_logits": True, "temperature": 2.0, "reduction": "batchmean"}
                yield f"{op} of logits {dtype} {shape}", partial(check_divergence, ops, device, dtype, op, shape, **options)
        for beta in BETAS:
            for options in ({}, {"from_logits": True}, {"reduction": "none"}, {"similar": True}):
                # Of nearly equal distributions both are differences of nearly equal numbers, the loss of the second order.
                factors = {"factor": 8.0 if dtype == torch.float32 else 1.0, "loss_factor": 16.0} if "similar" in options else {}
                yield f"jsd {beta} {options} {dtype}", partial(check_divergence, ops, device, dtype, "jsd", (3, 300), beta=beta, **factors,
                                                               **options)
        for op in OPS:
            yield f"{op} scaled {dtype}", partial(check_scaled, ops, device, dtype, op)
            yield f"{op}, teacher's gradient {dtype}", partial(check_target_gradient, ops, device, dtype, op)
            yield f"{op} strided {dtype}", partial(check_strided, ops, device, dtype, op)
        scale = {"upstream": torch.tensor(2.0**20, device=device)} if dtype == torch.float16 else {}
        yield f"kl, mean {dtype}", partial(check_divergence, ops, device, dtype, "kl_div", (3, 300), **scale)
        yield f"kl, log_target {dtype}", partial(check_divergence, ops, device, dtype, "kl_div", (3, 300), log_target=True, reduction="sum")
        yield f"kl, eps {dtype}", partial(check_divergence, ops, device, dtype, "kl_div", (3, 300), eps=1e-3, reduction="sum")
        for columns in (96, 2100):
            yield f"zeros {dtype} {columns}", partial(check_zeros, ops, device, dtype, columns)
            yield f"NaN {dtype} {columns}", partial(check_nan, ops, device, dtype, columns)
            yield f"NaN of logits {dtype} {columns}", partial(check_nan_logits, ops, device, dtype, columns)
        yield f"far apart {dtype}", partial(check_far_apart, ops, device, dtype)
        yield f"large {dtype}", partial(check_large_logits, ops, device, dtype)
        yield f"labels {dtype}", partial(check_labels, ops, device, dtype, (2, 3, 96))
        yield f"empty {dtype}", partial(check_empty, ops, device, dtype)
    yield "total", partial(check_total, ops, device)


def check_large_logits(ops, device="cpu", dtype=FP32):
    """Takes rows of one number, one that one class dominates by the largest number, and one around 4000: as far from other logits as in
    float64, and not from themselves."""
    top = torch.finfo(dtype).max
    x, y = torch.zeros(7, 300, dtype=dtype, device=device), randn(7, 300, dtype=dtype, device=device)
    x[0], x[1], x[2], x[3], x[4], x[5, 0] = -min(1e20, top), -min(1e9, top), -top, top, 0.6 * top, top
    x[6] = 4000 + 2 * y[0]
    for op in ("jsd", "tvd"):
        for temperature in (1.0, 1.7):
            check_divergence(ops, device, dtype, op, (7, 300), pair=(x, y), from_logits=True, reduction="sum", temperature=temperature)
        student = leaf(x)
        loss = getattr(ops, op)(student, x.clone(), from_logits=True)
        (dx,) = torch.autograd.grad(loss, student)
        assert loss.abs() <= 1e-5 and dx.isfinite().all() and dx.abs().max() <= 1e-3, f"{op}: {loss}, {dx.abs().max()}"


CHECKS = of_suite({
    "jsd": lambda ops: [check_divergence(ops, "cpu", FP32, "jsd", (3, 1100), beta=beta) for beta in (0.1, 0.0, 1.0)],
    "long": lambda ops: [check_divergence(ops, "cpu", FP32, op, (2, 17001)) for op in ("jsd", "kl_div")],
    "even": lambda ops: check_divergence(ops, "cpu", FP32, "jsd", (3, 1100)),
    "kl": lambda ops: check_divergence(ops, "cpu", FP32, "kl_div", (3, 2304), eps=1e-3),
    "tvd": lambda ops: check_divergence(ops, "cpu", FP32, "tvd", (3, 2304)),
    "logits": lambda ops: [check_divergence(ops, "cpu", FP32, op, (3, 2304), from_logits=True, temperature=2.0) for op in OPS],
    "large_logits": check_large_logits,
    "skewed_logits": lambda ops: check_divergence(ops, "cpu", FP32, "jsd", (3, 300), from_logits=True, beta=0.1),
    "nan_logits": lambda ops: check_nan_logits(ops, "cpu", FP32, 64),
    "labels": lambda ops: check_labels(ops, "cpu", FP32, (2, 3, 40)),
    "zeros": lambda ops: check_zeros(ops, "cpu", FP32, 90),
    "far_apart": lambda ops: check_far_apart(ops, "cpu", FP32),
    "nan": lambda ops: check_nan(ops, "cpu", FP32, 64),
    "scaled": lambda ops: [check_scaled(ops, "cpu", FP32, op) for op in OPS],
    "scaled_logits": lambda ops: check_divergence(ops, "cpu", FP32, "jsd", (3, 300), from_logits=True, upstream=torch.tensor(3.7)),
    "scaled_labels": lambda ops: check_divergence(ops, "cpu", FP16, "jsd", (3, 300), labels=labels_of((3, 300), "cpu"),
                                                  upstream=torch.tensor(3000.7)),
    "fp16": lambda ops: check_divergence(ops, "cpu", FP16, "jsd", (3, 3000), upstream=torch.tensor(1.1 * 2.0**20), reduction="mean"),
    "slabs": check_slabs,
    "total": lambda ops: check_total(ops, "cpu"),
})
_KERNELS, _OPERATION, _SUMS = "kernel_src/divergence.py", "shared/ops/divergence.py", "kernel_src/sums.py"
MUTANTS = (
    *generated(_KERNELS, "jsd or even or zeros or kl or skewed_logits or nan_logits or labels or logits or nan",
               "at_end between counted even_terms js_piece kl_divergence log2_parts logit_terms row_scale skip tv_terms"),
    *generated(_KERNELS, "long or logits or tvd", "logit_gradient tv_distance"),
    *generated("kernel_src/cross_entropy.py", "large_logits", "exponents"),
    *generated(_SUMS, "labels or total", "inverse_count span_sum"),
    *generated(_OPERATION, "fp16 or logits", "_Divergence.forward _DivergenceOfLogits.forward"),
    (_KERNELS, "span", "first + ct.arange", "ct.arange", "long"),
    (_KERNELS, "divergence_of_logits", "two_sums(loss, g, TILE)", "two_sums(g, g, TILE)", "logits"),
    (_KERNELS, "finite", "ct.maximum(x, FLOOR)", "x", "zeros"),
    (_KERNELS, "span", "ct.minimum(SPAN // TILE, ", "ct.maximum(SPAN // TILE, ", "long"),
    (_KERNELS, "skip", "ct.scatter(partial, (row, part), 0.0, check_bounds=False)", "pass", "labels"),
    (_KERNELS, "kl_divergence", "ct.maximum(eps, SMALLEST)", "SMALLEST", "kl"),
    (_KERNELS, "js_divergence", "writes, -1, TILE", "writes, 1, TILE", "jsd"),
    (_KERNELS, "tv_distance", "read(y, (row, cols), 0))", "read(x, (row, cols), 0))", "tvd"),
    (_KERNELS, "logit_terms", "lse_y, row, temperature", "lse_x, row, temperature", "logits"),
    (_KERNELS, "log2_softmax", "log_sum, temperature", "log_sum", "logits"),
    ("kernel_src/softmax.py", "softmax_combine", "write_lse(lse, row, m, ct.log2(s) * LN2)", "write_lse(lse, row, m, 0.0)", "logits"),
    (_KERNELS, "logit_gradient", "write_within(dx, (row, cols), ct.zeros(cols.shape, dtype=ct.float32))", "pass", "labels"),
    (_OPERATION, "_Divergence.backward", "gradient, ctx.gradient = ctx.gradient, None", "gradient = ctx.gradient", "scaled"),
    (_OPERATION, "_Divergence.backward", "multiply(gradient, dloss)", "pass", "scaled"),
    (_OPERATION, "_backward", "factor = factor * inverse_of_count", "factor = inverse_of_count", "scaled_labels"),
    (_OPERATION, "_logits_backward", "factor = factor * scale", "factor = factor", "logits"),
    (_OPERATION, "_logits_forward", "total(part_loss) * scale", "total(part_loss)", "logits"),
    (_OPERATION, "_DivergenceOfLogits.backward", "(dloss, ", "(dloss * 0 + 1, ", "scaled_logits"),
)


# ---------------------------------------------------------------- in the tests of every operation
def _sample(call):
    def sample(ops, new):
        p, t = (new.exact(48, 1024, seed=i).detach().log_softmax(-1) for i in (9, 10))
        return lambda p: call(ops, p, t), (leaf(p),)

    return sample


ROWS = {"aligned": lambda n: ((2, n), (2, n))}
SLABS = {"slabs": ((9, 40), (9, 40))}
OPERATIONS = {
    "kl_div": Case(lambda ops, x, y: ops.kl_div(x, y.detach().abs()), **ROWS,
                   sample=_sample(lambda ops, p, t: ops.kl_div(p, t.exp(), "batchmean"))),
    "kl_div, labels": Case(lambda ops, x, y: ops.kl_div(x, y.detach().abs(), labels=LABELS), **SLABS),
    "jsd": Case(lambda ops, x, y: ops.jsd(x, y.detach()), **ROWS, sample=_sample(lambda ops, p, t: ops.jsd(p, t)), half=True),
    "jsd, labels": Case(lambda ops, x, y: ops.jsd(x, y.detach(), LABELS), **SLABS),
    "jsd, of logits": Case(lambda ops, x, y: ops.jsd(x, y.detach(), from_logits=True), **ROWS, half=True),
    "jsd, of logits and labels": Case(lambda ops, x, y: ops.jsd(x, y.detach(), LABELS, from_logits=True), **SLABS),
    "tvd": Case(lambda ops, x, y: ops.tvd(x, y.detach()), **ROWS, sample=_sample(lambda ops, p, t: ops.tvd(p.exp(), t.exp()))),
    "tvd, of logits": Case(lambda ops, x, y: ops.tvd(x, y.detach(), from_logits=True), **ROWS, **SLABS),
}


def check_large(ops, device):
    for op in OPS:
        check_divergence(ops, device, torch.bfloat16, op, (129, 128256), reduction="batchmean")


GPU_TESTS = {"divergence": ("test_operation[divergence", "test_operation[linear_jsd")}


def _of_divergence(new):
    x, y = (new(3, 40, seed=i).log_softmax(-1) for i in (0, 1))
    labels = new.integers([1, 0, -100])
    options = (None, "js", 1 / 3, False, 0.5), (labels, "js", 1.0, True, 0.0), (None, "tv", 1.0, False, 0.0)
    return [(x, y, *each, -100) for each in options]


def _of_logits(new):
    return [(x, y, labels, "js", *rest, 2.0) for x, y, labels, kind, *rest in _of_divergence(new) if kind != "tv"]


def _rows_of_logits(new):
    return 3 + new.exact(3, 2), 3 + new.exact(3, 2, seed=1), new.exact(3, seed=2)


OPERATORS = {
    "divergence_forward": lambda new: [(*call, writes) for call in _of_divergence(new) for writes in (True, False)],
    "divergence_backward": lambda new: [(new.exact(1)[0], *call) for call in _of_divergence(new)],
    "divergence_of_logits_forward": _of_logits,
    "divergence_of_logits_backward": lambda new: [(new.exact(1)[0], *x[:3], *_rows_of_logits(new), *x[3:]) for x in _of_logits(new)],
}
