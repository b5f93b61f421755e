"""linear_jsd against float64: the oracle, shapes, checks and planted errors."""

from functools import partial
from unittest import mock

import torch

from tests.ops.common import FLOATS, assert_close, assert_rows_close, check_kept, exact, leaf, randn
from tests.ops.suite import Case, of_suite

CASES = (
    {},
    {"shape": (2, 5), "labels": True},
    {"beta": 0.0, "temperature": 2.0},
    {"beta": 1.0, "labels": True},
    {"beta": 0.1, "bias": True},
    {"classes": 77, "bias": True, "labels": True, "temperature": 0.7},
    {"reduction": "sum", "upstream": 0.25},
    {"upstream": 3.7, "labels": True},
    {"shape": (0,)},
)


def jsd_exact(z, t, beta, temperature):
    """Computes every row's divergence in float64. z, t: logits."""
    x, y = (v.div(temperature).log_softmax(-1) for v in (z, t))
    if beta in (0.0, 1.0):
        return ((y - x) * y.exp() if beta == 0.0 else (x - y) * x.exp()).sum(-1)
    m = torch.log(beta * y.exp() + (1 - beta) * x.exp())
    return (beta * y.exp() * (y - m) + (1 - beta) * x.exp() * (x - m)).sum(-1)


def logits_of(head, head64):
    """The logits of a layer, in float64 for autograd, with the values that the layer itself gives on its device. A GEMM adds up in an order
    and a precision of its own, so a logit next to a tie of its dtype may be rounded the other way than an exact one: in bf16 that changes a
    logit of 10 by 0.06, and with it a gradient that one token rules by 6 %. head, head64: (hidden, weight, bias)."""
    hidden, weight, bias = head64
    exact_logits = hidden @ weight.t() + (0.0 if bias is None else bias)
    found = torch.nn.functional.linear(*(None if t is None else t.detach() for t in head))
    if found.numel():
        assert_close(found, exact_logits.detach(), found.dtype, "the layer's logits")
    return exact_logits + (found.double().cpu() - exact_logits.detach())


def chunks_of(ops, tokens=None, **changes):
    """Has heads multiply chunks of a number of tokens, by default as many as they plan. changes: of other fields of the plan."""
    plan = ops.linear_head_module.plan_chunks
    changed = plan if tokens is None else lambda *a: plan(*a)._replace(tokens=tokens, **changes)
    return mock.patch.object(ops.linear_head_module, "plan_chunks", changed)


def check_linear_jsd(
    ops, device, dtype, shape=(9,), features=64, teacher_features=48, classes=300, labels=False, bias=False, beta=0.5, temperature=1.0,
    reduction="batchmean", upstream=1.0, needs=(True, True, True), chunk=None, first=0,
):  # fmt: skip
    """needs: whether the gradients of hidden, weight and bias are asked for. chunk: tokens of a chunk, instead of all, and first: those
    that the first one may have, in the memory of the weight's gradient."""
    hidden, weight = randn(*shape, features, dtype=dtype, device=device), randn(classes, features, dtype=dtype, device=device, seed=1,
                                                                                scale=0.2)
    teacher = randn(*shape, teacher_features, dtype=dtype, device=device, seed=2), randn(classes, teacher_features, dtype=dtype,
                                                                                         device=device, seed=3, scale=0.2)
    vectors = [randn(classes, dtype=dtype, device=device, seed=4 + i) if bias else None for i in range(2)]
    student = [leaf(t).requires_grad_(need) if t is not None else None for t, need in zip((hidden, weight, vectors[0]), needs)]
    target = (torch.arange(hidden[..., 0].numel(), device=device) % 3 - 1).view(shape) if labels else None
    given = [t for t in (*student, *teacher, *vectors) if t is not None]
    before = [t.detach().clone() for t in given]
    options = {"beta": beta, "temperature": temperature, "reduction": reduction, "ignore_index": -1}
    arguments = {"bias": student[2], "teacher_bias": vectors[1], **options}
    with chunks_of(ops, tokens=chunk, first=first):
        loss = ops.linear_jsd(student[0], student[1], *teacher, target, **arguments)
        with torch.no_grad():
            alone = ops.linear_jsd(student[0], student[1], *teacher, target, **arguments)
    student64 = [None if t is None else exact(t) for t in student]
    teacher64 = [None if t is None else t.double().cpu() for t in (*teacher, vectors[1])]
    z, t = logits_of(student, student64), logits_of((*teacher, vectors[1]), teacher64)
    losses = jsd_exact(z, t, beta, temperature).flatten()
    counted = torch.ones_like(losses, dtype=torch.bool) if target is None else target.flatten().cpu() != -1
    loss64 = torch.where(counted, losses, 0.0).sum() / (1 if reduction == "sum" else max(int(counted.sum()), 1))
    what = f"linear JSD {tuple(shape)} {options}"
    assert loss.dtype == torch.float32 and loss.shape == ()
    # Chunks, and a bias in the GEMM, may be added up in another way than the layer's own logits.
    bound = dtype if chunk or bias else torch.float32
    assert_close(loss, loss64, bound, f"{what} loss")
    assert_close(alone, loss64, bound, f"{what} loss without gradients")
    leaves = [t for t, need in zip(student, needs) if t is not None and need]
    leaves64 = [t for t, need in zip(student64, needs) if t is not None and need]
    dloss = torch.tensor(upstream * (2.0**8 if dtype == torch.float16 else 1.0), device=device)
    found = torch.autograd.grad(loss, leaves, dloss, retain_graph=True)
    again = torch.autograd.grad(loss, leaves, dloss)
    wanted = torch.autograd.grad(loss64, leaves64, dloss.double().cpu())
    for i, (a, b, gradient) in enumerate(zip(found, again, wanted, strict=True)):
        assert_rows_close(a, gradient, dtype, f"{what} gradient {i}", 1.5 if chunk else 1, floor=0.3)
        assert_rows_close(b, gradient, dtype, f"{what} gradient {i} again", 1.5 if chunk else 1, floor=0.3)
    check_kept(given, before, what)


def check_all_ignored(ops, device, dtype):
    hidden, weight = leaf(randn(4, 32, dtype=dtype, device=device)), leaf(randn(50, 32, dtype=dtype, device=device))
    loss = ops.linear_jsd(hidden, weight, hidden.detach(), weight.detach(), torch.full((4,), -100, device=device))
    loss.backward()
    assert loss == 0 and not hidden.grad.any() and not weight.grad.any()


def check_needs(ops, device, dtype):
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        check_linear_jsd(ops, device, dtype, bias=True, needs=needs)


def all_cases(ops, device, dtypes=FLOATS):
    """(name, function) of every check in some dtypes."""
    for dtype in dtypes:
        for i, options in enumerate(CASES):
            yield f"case {i} {dtype}", partial(check_linear_jsd, ops, device, dtype, **options)
        yield f"chunks {dtype}", partial(check_linear_jsd, ops, device, dtype, (11,), chunk=4, labels=True, bias=True)
        yield f"chunks behind a larger one {dtype}", partial(check_linear_jsd, ops, device, dtype, (11,), chunk=4, first=8, labels=True,
                                                             bias=True)
        yield f"needs {dtype}", partial(check_needs, ops, device, dtype)
        yield f"all ignored {dtype}", partial(check_all_ignored, ops, device, dtype)


OPERATION, SUM = "shared/ops/linear_jsd.py", "shared/ops/token_sums.py"
F32 = torch.float32
MUTANTS = (
    (OPERATION, "_run", "teacher_hidden[rows]", "teacher_hidden[: logits.shape[0]]", "chunks"),
    (OPERATION, "_run", "labels[rows]", "labels[: logits.shape[0]]", "chunks"),
    ("shared/ops/divergence.py", "sums_of_logits", "log_sum_exp(z, numbers[1])", "log_sum_exp(z)", "loss"),
    (OPERATION, "_KernelPiece.rows", "row_sum(part_loss)", "part_loss[:, 0]", "wide"),
    (OPERATION, "_KernelPiece.rows", "self.slope = row_sum(part_slope)", "self.slope = part_slope[:, 0].contiguous()", "wide"),
    (OPERATION, "_KernelPiece.gradient", "slope, factor,", "slope, factor * 2,", "loss"),
    (OPERATION, "_Piece.factor", "return scale * power, power", "return scale, power", "fp16"),
    (OPERATION, "_scale", "inverse_of_count(labels, ignore_index", "inverse_of_count(labels, -100", "labels"),
    (OPERATION, "_TorchPiece.gradient", "self.labels, self.options, factor", "None, self.options, factor", "PyTorch", False),
)
CHECKS = of_suite({
    "loss": lambda ops: check_linear_jsd(ops, "cpu", F32, temperature=2.0, upstream=3.7),
    "chunks": lambda ops: check_linear_jsd(ops, "cpu", F32, (11,), chunk=4, labels=True),
    "wide": lambda ops: check_linear_jsd(ops, "cpu", F32, (3,), classes=2500),
    "labels": lambda ops: check_linear_jsd(ops, "cpu", F32, labels=True),
    "fp16": lambda ops: check_linear_jsd(ops, "cpu", torch.float16),
    "PyTorch": lambda ops: check_linear_jsd(ops, "cpu", F32, labels=True),
})


# ---------------------------------------------------------------- in the tests of every operation
def _sample(ops, new):
    teacher = new.normal(48, 1024, seed=1).detach(), new.normal(96, 1024, scale=0.03, seed=1).detach()
    return lambda x, w: ops.linear_jsd(x, w, *teacher), (new.normal(48, 1024), new.normal(96, 1024, scale=0.03))


OPERATIONS = {"linear_jsd": Case(None, sample=_sample)}


def check_large(ops, device):
    check_linear_jsd(ops, device, torch.bfloat16, (515,), 512, 384, 20000, labels=True)
