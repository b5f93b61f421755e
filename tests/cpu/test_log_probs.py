"""What linear_log_probs and linear_divergence say of wrong arguments, and what they do under autocast and in float64."""

import pytest
import torch

from tests.ops.common import randn
from tests.ops.suite import suite

HIDDEN, WEIGHT, TARGET = (4, 8), (10, 8), (4,)


def arguments(**changed):
    given = {"hidden": torch.zeros(HIDDEN), "weight": torch.zeros(WEIGHT), "target": torch.zeros(TARGET, dtype=torch.int64)}
    return {**given, **changed}


WRONG = {
    "temperature": ({"temperature": 0}, "temperature is 0, expected a positive number"),
    "negative temperature": ({"temperature": -1.0}, "temperature is -1.0"),
    "infinite temperature": ({"temperature": float("inf")}, "temperature is inf"),
    "softcap": ({"softcap": 0.0}, "softcap is 0.0, expected a positive number, or None"),
    "negative softcap": ({"softcap": -30.0}, "softcap is -30.0"),
    "scale": ({"scale": float("nan")}, "scale is nan, expected a finite number"),
    "outputs": ({"outputs": ("log_probs", "entropies")}, "outputs is .*expected some of log_probs, entropy"),
    "outputs as text": ({"outputs": "entropy"}, "outputs is 'entropy'"),
    "label": ({"target": torch.tensor([0, 1, 10, 2])}, "target is 10 at one of its places, expected labels from 0 to 9, or -100"),
    "negative label": ({"target": torch.tensor([0, 1, -2, 2])}, "target is -2"),
    "labels": ({"target": torch.zeros(3, dtype=torch.int64)}, r"target is .*expected torch.int64 \[4\]"),
    "labels' dtype": ({"target": torch.zeros(4, dtype=torch.int32)}, "target is torch.int32"),
    "weight": ({"weight": torch.zeros(10, 7)}, r"weight is .*expected a floating point tensor \[classes, 8\]"),
    "weight's dtype": ({"weight": torch.zeros(10, 8, dtype=torch.uint8)}, "weight is torch.uint8"),
    "weight's device": ({"weight": torch.zeros(10, 8, device="meta")}, "weight is .*meta, expected on the device of hidden"),
    "bias": ({"bias": torch.zeros(9)}, r"bias is .*expected \[10\]"),
    "hidden": ({"hidden": torch.zeros(4, 8, dtype=torch.int64)}, "hidden is torch.int64"),
    "coefficients": ({"coefficients": torch.zeros(5)}, r"coefficients is .*expected a floating point tensor \[4\]"),
    "accum_dtype": ({"accum_dtype": torch.float16}, "accum_dtype is torch.float16"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(qwen3, name):
    changed, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        qwen3.linear_log_probs(**arguments(**changed))


WRONG_OF_TWO = {
    "temperature": ({"temperature": 0}, "^temperature is 0, expected a positive number"),
    "beta": ({"beta": 1.5}, "beta is 1.5, expected a number from 0 to 1"),
    "softcap": ({"softcap": 0.0}, "^softcap is 0.0, expected a positive number, or None"),
    "teacher's softcap": ({"teacher_softcap": -1.0}, "teacher_softcap is -1.0, expected a positive number"),
    "teacher's scale": ({"teacher_scale": float("inf")}, "teacher_scale is inf, expected a finite number"),
    "hidden": ({"hidden": torch.zeros(4, 8, dtype=torch.int64)}, "^hidden is torch.int64"),
    "teacher's hidden": ({"teacher_hidden": torch.zeros(3, 6)}, r"teacher_hidden is .*expected a floating point tensor \[4\]"),
    "weight": ({"weight": torch.zeros(10, 7)}, r"^weight is .*expected a floating point tensor \[classes, 8\]"),
    "teacher's classes": ({"teacher_weight": torch.zeros(11, 6)}, r"teacher_weight is .*expected a floating point tensor \[10, 6\]"),
    "teacher's dtype": ({"teacher_weight": torch.zeros(10, 6, dtype=torch.uint8)}, "teacher_weight is torch.uint8"),
    "bias": ({"bias": torch.zeros(9)}, r"^bias is .*expected \[10\]"),
    "teacher's bias": ({"teacher_bias": torch.zeros(9)}, r"teacher_bias is .*expected \[10\]"),
    "teacher's device": ({"teacher_hidden": torch.zeros(4, 6, device="meta")}, "teacher_hidden is .*meta, expected on the device of hid"),
}


@pytest.mark.parametrize("name", WRONG_OF_TWO)
def test_a_wrong_argument_of_a_divergence_is_named(qwen3, name):
    changed, message = WRONG_OF_TWO[name]
    given = {**arguments(), "teacher_hidden": torch.zeros(4, 6), "teacher_weight": torch.zeros(10, 6)}
    del given["target"]
    assert not qwen3.linear_divergence(**given).divergence.any()
    with pytest.raises(ValueError, match=message):
        qwen3.linear_divergence(**{**given, **changed})


def test_autocast_decides_the_dtype(qwen3):
    """Autocast treats the head as a linear layer: logits in bf16, gradients in the dtypes of the weights."""
    hidden, weight = randn(*HIDDEN, dtype=torch.float32, device="cpu"), randn(*WEIGHT, dtype=torch.float32, device="cpu", seed=1)
    target, found = torch.arange(4), []
    for cast in (True, False):
        x, w = (t.clone().requires_grad_() for t in (hidden, weight))
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            given = (x, w) if cast else (x.to(torch.bfloat16), w.to(torch.bfloat16))
            row = qwen3.linear_log_probs(*given, target).log_probs
        row.sum().backward()
        found.append((row, x.grad, w.grad))
    assert found[0][2].dtype == torch.float32
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    assert torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("cast", (False, True), ids=("bf16", "autocast"))
def test_a_divergence_rounds_neither_logits_nor_biases(qwen3, cast):
    """Both are added up in float32: with states and weights that bf16 holds, only the results' float32 is between it and float64."""
    x, w, y, v = (randn(*shape, dtype=torch.bfloat16, device="cpu", seed=i) for i, shape in enumerate(((5, 8), (10, 8), (5, 6), (10, 6))))
    bias, other = (randn(10, dtype=torch.float32, device="cpu", seed=i) for i in (7, 8))
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        given = [t.float() if cast else t for t in (x, w, y, v)]
        found = qwen3.linear_divergence(*given, bias, other, beta=0.5)
    p, q = (torch.log_softmax(a.double() @ b.double().t() + c.double(), -1) for a, b, c in ((x, w, bias), (y, v, other)))
    m = torch.logaddexp(p, q) - torch.tensor(2.0).log()
    torch.testing.assert_close(found.divergence.double(), 0.5 * (p.exp() * (p - m) + q.exp() * (q - m)).sum(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.entropy.double(), -(p.exp() * p).sum(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recompute", (True, False))
def test_gradient_checkpointing_drops_the_logits_that_are_kept(qwen3, recompute, monkeypatch):
    """Its backward pass computes the forward pass again, and keeps them until then."""
    from torch.utils.checkpoint import checkpoint

    monkeypatch.setattr(suite(qwen3).log_prob_columns_module, "LEAST", 0)  # of so few features none would be kept

    found = []
    for checkpointed in (False, True):
        leaves = [randn(*shape, dtype=torch.bfloat16, device="cpu", seed=i).requires_grad_() for i, shape in enumerate((HIDDEN, WEIGHT))]

        def row(hidden, weight):
            return qwen3.linear_log_probs(hidden, weight, torch.arange(4), recompute=recompute).log_probs

        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):  # noqa: B023
            result = checkpoint(row, *leaves, use_reentrant=False) if checkpointed else row(*leaves)
        assert ((4, 10) in saved) == (not checkpointed and not recompute)
        assert ((80,) in saved) == (not checkpointed and recompute), "columns of them in the memory of the weight's gradient"
        found.append((result.detach(), *torch.autograd.grad(result.sum(), leaves)))
    assert all(map(torch.equal, *found))


def test_a_gradient_is_right(qwen3):
    hidden, weight, bias = (randn(*shape, dtype=torch.float64, device="cpu", seed=i).requires_grad_() for i, shape in
                            enumerate(((4, 3), (5, 3), (5,))))

    def call(hidden, *head):
        w, b = head or (weight.detach(), bias.detach())
        options = {"outputs": ("entropy", "mean_logits"), "softcap": 3.0, "scale": 0.5}
        found = qwen3.linear_log_probs(hidden, w, torch.tensor([0, 4, -100, 2]), b, **options)
        return found.log_probs, found.entropy, found.mean_logits

    for leaves in ((hidden, weight, bias), (hidden,)):
        assert torch.autograd.gradcheck(call, leaves)
