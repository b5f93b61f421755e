"""The options of every loss: what makes no sense is named by each of them, and what a CPU takes a GPU takes too."""

import pytest
import torch

from tests.ops.common import FP32, randn

ROWS = randn(4, 9, dtype=FP32, device="cpu")
TEACHER = randn(4, 9, dtype=FP32, device="cpu", seed=1)
HIDDEN, HEAD = randn(4, 3, dtype=FP32, device="cpu", seed=2), randn(9, 3, dtype=FP32, device="cpu", seed=3)
LABELS = torch.tensor([1, 0, 8, 3])
LOSSES = {
    "cross_entropy": lambda ops, labels, **options: ops.cross_entropy(ROWS, labels, **options),
    "linear_cross_entropy": lambda ops, labels, **options: ops.linear_cross_entropy(HIDDEN, HEAD, labels, **options),
    "jsd": lambda ops, labels, **options: ops.jsd(ROWS.log_softmax(-1), TEACHER.log_softmax(-1), labels, **options),
    "jsd of logits": lambda ops, labels, **options: ops.jsd(ROWS, TEACHER, labels, from_logits=True, **options),
    "tvd": lambda ops, labels, **options: ops.tvd(ROWS.softmax(-1), TEACHER.softmax(-1), labels, **options),
    "tvd of logits": lambda ops, labels, **options: ops.tvd(ROWS, TEACHER, labels, from_logits=True, **options),
    "kl_div": lambda ops, labels, **options: ops.kl_div(ROWS.log_softmax(-1), TEACHER.softmax(-1), labels=labels, **options),
    "linear_jsd": lambda ops, labels, **options: ops.linear_jsd(HIDDEN, HEAD, -HIDDEN, HEAD, labels, **options),
}
each_loss = pytest.mark.parametrize("name", LOSSES)


@each_loss
@pytest.mark.parametrize("ignored", (True, False, None, 1.0, "1", 2**31, -(2**31), 2**63, -(2**70)))
def test_an_ignore_index_that_is_no_integer_of_32_bits_is_named(suite_ops, name, ignored):
    """A kernel gets 32 bits, and PyTorch takes no bool for an integer: True would stand for class 1."""
    with pytest.raises(ValueError, match="^ignore_index is .+, expected an integer of 32 bits"):
        LOSSES[name](suite_ops, LABELS, ignore_index=ignored)


@each_loss
@pytest.mark.parametrize("ignored", (2**31 - 1, 1 - 2**31, -100, 0, 3))
def test_an_ignore_index_of_32_bits(suite_ops, name, ignored):
    """A row with that label is ignored: the mean is that of the others."""
    losses = [LOSSES[name](suite_ops, LABELS, reduction="sum"), LOSSES[name](suite_ops, LABELS.clone().fill_(-5), ignore_index=-5)]
    assert losses[0].isfinite() and losses[0] > 0 and losses[1] == 0
    rest = LABELS.clone()
    rest[1] = ignored
    expected = LABELS.clone()
    expected[1], expected[LABELS == ignored] = -100, -100
    torch.testing.assert_close(LOSSES[name](suite_ops, rest, ignore_index=ignored), LOSSES[name](suite_ops, expected))


@pytest.mark.parametrize("name", ("linear_cross_entropy", "cross_entropy"))
@pytest.mark.parametrize("items", (0, 0.0, torch.tensor(0), torch.tensor([0.0])), ids=str)
def test_a_loss_of_no_items_is_infinite_unless_no_label_counts(suite_ops, name, items):
    """As the division is; a loss of 0 would hide a wrong count."""
    assert LOSSES[name](suite_ops, LABELS, num_items=items).isposinf().all()
    assert LOSSES[name](suite_ops, torch.full_like(LABELS, -100), num_items=items).eq(0).all()


@pytest.mark.parametrize("name", ("linear_cross_entropy", "linear_jsd"))
@pytest.mark.parametrize("dtype", (torch.float16, torch.float64, torch.int32))
def test_an_accum_dtype_that_nothing_is_added_up_in_is_named(suite_ops, name, dtype):
    with pytest.raises(ValueError, match=f"^accum_dtype is {dtype}, expected None, the weight's dtype torch.float32, or torch.float32"):
        LOSSES[name](suite_ops, LABELS, accum_dtype=dtype)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    (
        ("cross_entropy", {"softcap": 0}, "softcap is 0, expected a positive number"),
        ("cross_entropy", {"softcap": float("inf")}, "softcap is inf, expected a positive number"),
        ("linear_cross_entropy", {"softcap": 0.0}, "softcap is 0.0, expected a positive number"),
        ("cross_entropy", {"label_smoothing": float("nan")}, "label_smoothing is nan, expected a number from 0 to 1"),
        ("cross_entropy", {"reduction": "batchmean"}, "reduction is 'batchmean', expected 'mean', 'sum' or 'none'"),
        ("jsd", {"beta": 1.5}, "beta is 1.5, expected a number from 0 to 1"),
        ("linear_jsd", {"beta": float("nan")}, "beta is nan, expected a number from 0 to 1"),
        ("linear_jsd", {"temperature": 0}, "temperature is 0, expected a positive number"),
        ("jsd of logits", {"temperature": float("inf")}, "temperature is inf, expected a positive number"),
        ("jsd", {"reduction": "average"}, "reduction is 'average', expected 'none', 'mean', 'batchmean' or 'sum'"),
        ("kl_div", {"eps": 1.0}, "eps is 1.0, expected a number from 0 to 1"),
    ),
)
def test_a_number_that_makes_no_sense_is_named(suite_ops, name, options, expected):
    with pytest.raises(ValueError, match=f"^{expected}"):
        LOSSES[name](suite_ops, LABELS, **options)
