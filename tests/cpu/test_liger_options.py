"""Every option of a loss with Liger's names reaches the operation: through the module, the function and the autograd function."""

import importlib

import pytest
import torch

from tests.ops.common import FP32, leaf, randn

ROWS, CLASSES = 6, 12
X, Y = (randn(ROWS, CLASSES, dtype=FP32, device="cpu", seed=i) for i in range(2))
LOG_X, LOG_Y = X.log_softmax(-1), Y.log_softmax(-1)
HIDDEN, HEAD = randn(ROWS, 4, dtype=FP32, device="cpu", seed=2), randn(CLASSES, 4, dtype=FP32, device="cpu", seed=3)
OTHER, OTHER_HEAD = randn(ROWS, 5, dtype=FP32, device="cpu", seed=4), randn(CLASSES, 5, dtype=FP32, device="cpu", seed=5)
LABELS = torch.tensor([3, 0, -100, 8, 3, 11])
WEIGHT = torch.linspace(0.5, 1.5, CLASSES)
OF_CROSS_ENTROPY = {
    "lse_square_scale": 0.3, "label_smoothing": 0.2, "reduction": "sum", "softcap": 1.5, "return_z_loss": True,
    "return_token_accuracy": True, "return_predicted_tokens": True,
}  # fmt: skip
# Module, function, the tensors of a call of the module and of the function, the options and what they are here, those that the module's
# constructor has another name for.
CASES = {
    "cross entropy": ("LigerCrossEntropyLoss", "liger_cross_entropy", (X, LABELS), None, {**OF_CROSS_ENTROPY, "weight": WEIGHT}),
    "linear cross entropy": (
        "LigerFusedLinearCrossEntropyLoss", "liger_fused_linear_cross_entropy", (HEAD, HIDDEN, LABELS), (HIDDEN, HEAD, LABELS),
        {**OF_CROSS_ENTROPY, "ce_weight": WEIGHT, "use_token_scaling": True},
    ),
    "kl": ("LigerKLDIVLoss", "liger_kl_div", (LOG_X, LOG_Y.exp()), None, {"eps": 0.1, "reduction": "sum"}),
    "jsd": ("LigerJSD", "liger_jsd", (LOG_X, LOG_Y, LABELS), None, {"beta": 0.2, "ignore_index": 3}),
    "tvd": ("LigerTVDLoss", "liger_tvd", (LOG_X.exp(), LOG_Y.exp(), LABELS), None, {"reduction": "sum", "ignore_index": 3}),
    "linear jsd": (
        "LigerFusedLinearJSD", "liger_fused_linear_jsd", (HIDDEN, HEAD, OTHER, OTHER_HEAD, LABELS), None,
        {"jsd_beta": 0.2, "ignore_index": 3, "temperature": 2.0},
    ),
}  # fmt: skip
EACH = [(name, option) for name, case in CASES.items() for option in case[4]]


def numbers(found):
    """The tensors of a result, as one vector, with None where there is none."""
    parts = found if isinstance(found, tuple) else (found,)
    return [None if part is None else part.double().flatten() for part in parts]


def same(one, other):
    return len(one) == len(other) and all(
        a is b is None or (a is not None and b is not None and a.shape == b.shape and torch.allclose(a, b)) for a, b in zip(one, other)
    )


@pytest.mark.parametrize(("name", "option"), EACH, ids=lambda found: found)
def test_an_option_changes_what_the_module_and_the_function_compute(liger, name, option):
    """Both in the same way."""
    module, function, of_module, of_function, options = CASES[name]
    n, of_function = liger.liger_names, of_function or of_module
    shared = {"reduction": "batchmean"} if name in ("kl", "tvd") else {}  # where the function's default is another
    given = {**shared, option: options[option]}
    plain, found = (numbers(getattr(n, module)(**extra)(*of_module)) for extra in (shared, given))
    by_function = numbers(getattr(n, function)(*of_function, **given))
    assert same(found, by_function), f"{module} and {function} differ"
    assert not same(plain, found), f"{option} changes nothing"


def exactly(name, options):
    """In float64."""
    if name == "kl":
        y = LOG_Y.exp().double()
        return (y * (y.clamp(min=options["eps"]).log() - LOG_X.double())).sum() / ROWS
    counted = LABELS != options["ignore_index"]
    distance = (LOG_X.exp() - LOG_Y.exp()).double().abs().sum(-1) / 2
    return distance[counted].mean()


@pytest.mark.parametrize(("name", "options"), (("kl", {"eps": 0.2}), ("tvd", {"ignore_index": 3})), ids=str)
def test_what_an_option_computes(liger, name, options):
    module, _, tensors, *_ = CASES[name]
    found = getattr(liger.liger_names, module)(reduction="batchmean", **options)(*tensors)
    torch.testing.assert_close(found.double(), exactly(name, options), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ("linear cross entropy", "linear jsd"))
@pytest.mark.parametrize("wanted", (torch.float32, None))
def test_the_dtype_that_the_gradient_of_the_head_is_added_up_in(liger, monkeypatch, name, wanted):
    linear_head = importlib.import_module(f"{liger.__name__}.shared.ops.linear_head")
    plan, found = linear_head.plan_chunks, []
    monkeypatch.setattr(linear_head, "plan_chunks", lambda *args: found.append(plan(*args)) or found[-1])
    module, function, of_module, of_function, _ = CASES[name]
    for call, tensors in ((getattr(liger.liger_names, module)(accum_dtype=wanted), of_module),
                          (lambda *t: getattr(liger.liger_names, function)(*t, accum_dtype=wanted), of_function or of_module)):  # fmt: skip
        leaves = [leaf(t.bfloat16()) if t.is_floating_point() else t for t in tensors]
        call(*leaves).backward()
    assert [chunks.accum_dtype for chunks in found] == [wanted or torch.bfloat16] * 2
