"""Finite logits give finite losses and gradients, however large they are: rows of a mask's number, a class that is ruled out, a row that
is nothing else. Values against float64 where fp32 can tell the logits apart."""

import pytest
import torch

from tests.ops.common import BF16, FP16, FP32, leaf, randn
from tests.ops.suite import suite

TOP = {BF16: torch.finfo(BF16).max, FP32: torch.finfo(FP32).max, FP16: torch.finfo(FP16).max}
OPTIONS = {
    "plain": {},
    "smooth": {"label_smoothing": 0.1},
    "weighted": {"weighted": True},
    "softcap": {"softcap": 30.0},
    "z_loss": {"lse_square_scale": 1e-4, "return_z_loss": True},
    "z_loss of 0": {"return_z_loss": True},
    "all": {"weighted": True, "label_smoothing": 0.2, "lse_square_scale": 1e-4},
}
CLASSES = 70


def rows_of(dtype):
    """Name -> a row of logits; the label is class 0."""
    top, plain = TOP[dtype], randn(CLASSES, dtype=FP32, device="cpu")
    some = torch.arange(CLASSES) % 3 == 1
    found = {
        "a mask's number everywhere": torch.full((CLASSES,), -min(1e20, top)),
        "-1e9 everywhere": torch.full((CLASSES,), -min(1e9, top)),
        "the smallest everywhere": torch.full((CLASSES,), -top),
        "the largest everywhere": torch.full((CLASSES,), top),
        "some are the smallest": plain.masked_fill(some, -top),
        "some are a mask's number": plain.masked_fill(some, -min(1e20, top)),
        "the label is the largest": plain.index_fill(0, torch.tensor([0]), top),
        "another is the largest": plain.index_fill(0, torch.tensor([5]), top),
        "the label is the smallest": plain.index_fill(0, torch.tensor([0]), -top),
        "the largest beside the smallest": torch.full((CLASSES,), -top).index_fill(0, torch.tensor([0]), top),
        "two large ones": plain.index_fill(0, torch.tensor([0]), 0.7 * top).index_fill(0, torch.tensor([5]), 0.9 * top),
    }
    return {name: row.to(dtype) for name, row in found.items()}


def results(call, x, upstream=1.0):
    loss = call(x)
    loss = getattr(loss, "loss", loss)
    return loss.detach(), torch.autograd.grad(loss, x, torch.tensor(upstream))[0]


@pytest.mark.parametrize("dtype", (FP32, BF16, FP16), ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_cross_entropy_of_finite_logits(suite_ops, name, dtype):
    options = dict(OPTIONS[name])
    weight = torch.linspace(0.5, 1.5, CLASSES) if options.pop("weighted", False) else None
    for what, row in rows_of(dtype).items():
        x = leaf(row[None])
        found = suite_ops.cross_entropy(x, torch.zeros(1, dtype=torch.int64), weight, **options)
        z_loss = getattr(found, "z_loss", None)
        loss, gradient = results(lambda x: suite_ops.cross_entropy(x, torch.zeros(1, dtype=torch.int64), weight, **options), x)  # noqa: B023
        assert not loss.isnan() and not gradient.isnan().any(), what
        assert z_loss is None or not z_loss.isnan(), what
        if not options.get("lse_square_scale"):
            assert gradient.isfinite().all() and gradient.abs().max() <= 2, what
            assert loss >= -1e-6 * row.abs().max(), what  # smoothed, a difference of two large numbers
        if name == "z_loss of 0":
            assert z_loss == 0


@pytest.mark.parametrize("reduction", ("mean", "none"))
@pytest.mark.parametrize("name", ("plain", "smooth", "z_loss of 0"))
def test_linear_cross_entropy_of_finite_logits(suite_ops, name, reduction):
    """The logits are finite and as large as the hidden states make them."""
    for size in (1e4, 1e10, 1e18):
        hidden, weight = leaf(torch.full((3, 4), size)), leaf(randn(CLASSES, 4, dtype=FP32, device="cpu", scale=10.0))
        loss = suite_ops.linear_cross_entropy(hidden, weight, torch.arange(3), reduction=reduction, **OPTIONS[name])
        loss, z_loss = getattr(loss, "loss", loss), getattr(loss, "z_loss", None)
        gradients = torch.autograd.grad(loss.sum(), (hidden, weight))
        assert loss.isfinite().all() and all(g.isfinite().all() for g in gradients), size
        assert z_loss is None or not z_loss.any()
        with torch.no_grad():
            again = suite_ops.linear_cross_entropy(hidden, weight, torch.arange(3), reduction=reduction, **OPTIONS[name])
        torch.testing.assert_close(getattr(again, "loss", again), loss.detach())


@pytest.mark.parametrize("weighted", (False, True))
def test_smoothing_of_logits_whose_sum_is_no_number_of_fp32(suite_ops, weighted):
    """Their mean is one: a sum of 100000 logits of 1e36 is not."""
    z = torch.full((1, 100_000), 1e36).index_fill(1, torch.tensor([3]), 0.0)
    weight = torch.linspace(0.5, 1.5, 100_000) if weighted else None
    found = suite_ops.cross_entropy(z, torch.tensor([0]), weight, label_smoothing=0.1)
    weight = None if weight is None else weight.double()
    wanted = torch.nn.functional.cross_entropy(z.double(), torch.tensor([0]), weight, label_smoothing=0.1)
    assert found.isfinite() and abs(found - wanted) <= 1e-6 * 1e36


DIVERGENCES = {
    "jsd": lambda ops, x, y: ops.jsd(x, y, from_logits=True),
    "jsd, beta 0": lambda ops, x, y: ops.jsd(x, y, from_logits=True, beta=0.0),
    "jsd, beta 1": lambda ops, x, y: ops.jsd(x, y, from_logits=True, beta=1.0),
    "jsd, temperature": lambda ops, x, y: ops.jsd(x, y, from_logits=True, beta=0.3, temperature=2.0),
    "kl_div": lambda ops, x, y: ops.kl_div(x, y, "sum", from_logits=True),
    "tvd": lambda ops, x, y: ops.tvd(x, y, from_logits=True),
}


@pytest.mark.parametrize("dtype", (FP32, BF16, FP16), ids=str)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_of_finite_logits(suite_ops, name, dtype):
    """A student and a teacher of each kind of row. To a class that the teacher has ruled out by the smallest number, KL(Q || P) is in base
    2 beyond the largest one."""
    rows = rows_of(dtype)
    teachers = "some are a mask's number" if "beta 1" in name else "some are the smallest", "the smallest everywhere"
    for what, row in rows.items():
        for of_teacher in (*teachers, what):
            x, y = leaf(row[None]), rows[of_teacher][None]
            loss, gradient = results(lambda x: DIVERGENCES[name](suite_ops, x, y), x)  # noqa: B023
            assert not loss.isnan() and not gradient.isnan().any(), (what, of_teacher)
            if of_teacher == what:
                assert loss.abs() <= 1e-4, what


def test_linear_jsd_of_finite_logits(suite_ops):
    for size in (1e4, 1e10, 1e18):
        hidden, weight = leaf(torch.full((3, 4), size)), leaf(randn(CLASSES, 4, dtype=FP32, device="cpu", scale=10.0))
        loss = suite_ops.linear_jsd(hidden, weight, torch.ones(3, 4), randn(CLASSES, 4, dtype=FP32, device="cpu", seed=1), beta=0.5)
        gradients = torch.autograd.grad(loss, (hidden, weight))
        assert 0 <= loss <= 0.7 and all(g.isfinite().all() for g in gradients), size


ONE_NUMBER = (1e7, -1e9, -1e20, 1e20, TOP[FP32], -TOP[FP32])  # every class's logit: the rounded lse is their logit too, or near it


@pytest.mark.parametrize("value", ONE_NUMBER)
def test_a_likelihood_of_logits_that_are_their_lse(suite_ops, value):
    """Where a mask's number stands everywhere every class has the probability 1 / classes."""
    found = suite_ops.cross_entropy(torch.full((2, CLASSES), value), torch.tensor([0, 3]), reduction="none")
    torch.testing.assert_close(found, torch.full((2,), CLASSES).log())


@pytest.mark.parametrize("value", ONE_NUMBER)
@pytest.mark.parametrize("name", ("plain", "smooth", "weighted", "all but z-loss"))
def test_gradients_of_logits_that_are_their_lse(suite_ops, name, value):
    """The gradients of logits and of a head are those of the float64 formula."""
    options = {**OPTIONS["all"], "lse_square_scale": 0.0} if name == "all but z-loss" else dict(OPTIONS[name])
    class_weight = torch.linspace(0.5, 1.5, CLASSES) if options.pop("weighted", False) else None
    x, target = leaf(torch.full((2, CLASSES), value)), torch.tensor([0, 3])
    exact = leaf(x.detach().double())
    given = {"weight": None if class_weight is None else class_weight.double(), "label_smoothing": options.get("label_smoothing", 0.0)}
    formula = torch.nn.functional.cross_entropy(exact, target, **given)
    (wanted,) = torch.autograd.grad(formula, exact)
    hidden, weight = torch.eye(2), leaf(x.detach().T.contiguous())
    losses = {
        "of logits": (suite_ops.cross_entropy(x, target, class_weight, **options), x, wanted),
        "of a head": (suite_ops.linear_cross_entropy(hidden, weight, target, class_weight=class_weight, **options), weight, wanted.T),
    }
    for what, (loss, of, gradient) in losses.items():
        torch.testing.assert_close(loss.double(), formula, msg=lambda m, what=what: f"{what}: {m}")
        torch.testing.assert_close(torch.autograd.grad(loss, of)[0].double(), gradient, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("value", ONE_NUMBER)
def test_log_probs_and_entropy_of_logits_that_are_their_lse(all_operations, value):
    weight, target = leaf(torch.full((CLASSES, 2), value)), torch.tensor([0, 3])
    found = suite(all_operations).linear_log_probs(torch.eye(2), weight, target, outputs=("log_probs", "entropy"))
    wanted = torch.full((2,), CLASSES).log()
    torch.testing.assert_close(found.log_probs, -wanted)
    torch.testing.assert_close(found.entropy, wanted)
    (gradient,) = torch.autograd.grad(found.log_probs.sum(), weight)
    torch.testing.assert_close(gradient, torch.nn.functional.one_hot(target, CLASSES).T - 1 / CLASSES)


@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
def test_linear_jsd_of_logits_that_are_their_lse(suite_ops, dtype):
    """A student that a mask's number fills is uniform, as one of zeros."""
    teacher = torch.eye(2, dtype=dtype), randn(CLASSES, 2, dtype=dtype, device="cpu")
    found = []
    for value in (0.0, -1e9, 1e20):
        weight = leaf(torch.full((CLASSES, 2), value, dtype=dtype))
        loss = suite_ops.linear_jsd(torch.eye(2, dtype=dtype), weight, *teacher, beta=0.5, temperature=1.7)
        found.append((loss.detach(), *torch.autograd.grad(loss, weight)))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
