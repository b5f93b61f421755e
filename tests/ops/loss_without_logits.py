"""The loss of every token without gradients, whose logits are nowhere in memory: shapes, checks and planted errors."""

import torch

from tests.ops.common import BF16, CPU, FP16, FP32, errors_in, leaf, limit, on_cpu, randn
from tests.ops.generated import generated
from tests.ops.linear_cross_entropy import cross_entropy_exact, labels, token_scaling_factor
from tests.tolerances import assert_close

# Numbers of tokens, features and classes that fill no tile, one tile, and some.
EVALUATION_SHAPES = ((1, 64, 17), (3, 1088, 40), (5, 64, 256), (200, 128, 513), (130, 192, 1000))
EVALUATION_CASES = (
    dict(),
    dict(ignore_index=3),
    dict(class_weight=True),
    dict(lse_square_scale=1e-2, use_token_scaling=True),
)


def check_evaluation(ops, device, dtype, tokens, features, classes, *, class_weight=False, bound=None, **options):
    """Without gradients, the loss of every token, where the logits are not rounded. bound: the dtype of the tolerance."""
    hidden = randn(tokens, features, dtype=dtype, device=device)
    weight = randn(classes, features, dtype=dtype, device=device, seed=1, scale=features**-0.5)
    target, weights = labels(tokens, classes, 0.2, options.get("ignore_index", -100))
    target, weights = target.to(device), weights.to(device) if class_weight else None
    weight64, rows64 = weight.double(), []
    for rows in torch.arange(tokens, device=device).split(512):
        rows64.append(cross_entropy_exact(hidden[rows].double(), weight64, target[rows], class_weight=weights,
                                          **{**options, "reduction": "none"}))
    exact_rows, bound = torch.cat(rows64), bound or torch.float32
    loss = ops.linear_cross_entropy(hidden, weight, target, class_weight=weights, **{**options, "reduction": "none"})
    assert loss.dtype == torch.float32 and (loss[target == options.get("ignore_index", -100)] == 0).all()
    factor = token_scaling_factor(options)
    assert_close(loss, exact_rows, bound, f"evaluation of {tokens} tokens {options}", factor)
    # Parameters of a model require gradients all the same.
    with torch.no_grad():
        total = ops.linear_cross_entropy(leaf(hidden), leaf(weight), target, class_weight=weights, **{**options, "reduction": "sum"})
    assert_close(total, exact_rows.sum(), bound, "evaluation, sum", factor)


def check_evaluation_in_steps(ops):
    with limit(ops, "loss_without_logits", "PARTIALS_BYTES", 0), limit(ops, "loss_without_logits", "TOKENS_A_READING", 64):
        check_evaluation(ops, CPU, BF16, 100, 64, 40)


def check_evaluation_of_labels_out_of_range(ops):
    hidden, weight = randn(5, 64, dtype=BF16, device=CPU), randn(300, 64, dtype=BF16, device=CPU, seed=1)
    with limit(ops, "linear_cross_entropy", "_check", lambda *_: None):
        losses = ops.linear_cross_entropy(hidden, weight, torch.tensor([3, -7, 300, 2**40, 299]), reduction="none")
    assert_close(losses, cross_entropy_exact(hidden.double(), weight.double(), torch.tensor([3, -100, -100, -100, 299]), reduction="none"),
                 FP32)


def check_evaluation_of_infinities(ops):
    """Logits of -inf in a whole tile of the vocabulary, as a weight that overflowed makes them."""
    hidden, weight = randn(3, 64, dtype=BF16, device=CPU).abs(), randn(300, 64, dtype=BF16, device=CPU, seed=1)
    weight[256:, 0] = -float("inf")
    losses = ops.linear_cross_entropy(hidden, weight, torch.arange(3), reduction="none")
    assert_close(losses, cross_entropy_exact(hidden.double(), weight.double(), torch.arange(3), reduction="none"), FP32)


def check_evaluation_of_large_logits(ops):
    """Takes logits of which 2 to the power of one overflows, and of almost any other distance from the largest too."""
    hidden, weight = 100 * randn(3, 64, dtype=BF16, device=CPU), randn(40, 64, dtype=BF16, device=CPU, seed=1)
    losses = ops.linear_cross_entropy(hidden, weight, torch.arange(3), reduction="none")
    assert_close(losses, cross_entropy_exact(hidden.double(), weight.double(), torch.arange(3), reduction="none"), FP32)


def check_evaluation_of_certain_labels(ops):
    """The label's logit is by far the largest: the loss is 0 but for roundings, and never below."""
    hidden = 10 * randn(40, 256, dtype=BF16, device=CPU)
    weight = torch.cat([hidden, randn(20, 256, dtype=BF16, device=CPU, seed=1)])
    losses = ops.linear_cross_entropy(hidden, weight, torch.arange(40), reduction="none")
    assert (losses >= 0).all() and (losses < 1e-2).all()


def check_evaluation_that_is_not_taken(ops):
    for options in ({"softcap": 2.0}, {"label_smoothing": 0.3}):
        check_evaluation(ops, CPU, BF16, 3, 64, 40, bound=BF16, **options)
    hidden, weight, bias = (randn(*s, dtype=BF16, device=CPU, seed=i) for i, s in enumerate(((3, 64), (40, 64), (40,))))
    target = torch.arange(3)
    loss = ops.linear_cross_entropy(hidden, weight, target, 3 * bias)
    assert_close(loss, cross_entropy_exact(hidden.double(), weight.double(), target, 3 * bias.double()), BF16, "loss", 3)


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "evaluation": on_cpu(check_evaluation, BF16, 200, 128, 300),
    "evaluation_ignores_3": on_cpu(check_evaluation, BF16, 40, 64, 17, ignore_index=3),
    "evaluation_z_loss": on_cpu(check_evaluation, BF16, 5, 64, 17, lse_square_scale=0.1),
    "evaluation_groups": on_cpu(check_evaluation, FP16, 1100, 64, 257),
    "evaluation_labels": check_evaluation_of_labels_out_of_range,
    "evaluation_of_infinities": check_evaluation_of_infinities,
    "evaluation_of_certain_labels": check_evaluation_of_certain_labels,
    "evaluation_of_wide_hidden_states": on_cpu(check_evaluation, BF16, 3, 1088, 40),
    "evaluation_of_large_logits": check_evaluation_of_large_logits,
    "evaluation_steps": check_evaluation_in_steps,
    "evaluation_not_taken": check_evaluation_that_is_not_taken,
}
MUTANTS = [
    *generated("kernel_src/linear_cross_entropy.py", "evaluation or evaluation_groups or evaluation_labels",
               "linear_cross_entropy_combine linear_cross_entropy_statistics"),
    *errors_in("kernel_src/linear_cross_entropy.py", "evaluation", "linear_cross_entropy_statistics",
         ("n == tiles_n - 1", "n == 0"),
         ("n == tiles_n - 1", "n == tiles_n"),
         ("index=(m, k)", "index=(m, 0)"),
         ("index=(n, k)", "index=(n, 0)"),
         ("hidden.shape[1] // TILE_K", "1"),
         ("ct.max(z, 1)", "0.0 * ct.max(z, 1)", "evaluation_of_large_logits"),
         ("ct.scatter(part_max, (rows, n), high", "ct.scatter(part_max, (rows, 0), high"),
         ("(part_sum, (rows, n), total, check_bounds=True", "(part_sum, (rows, n), total, check_bounds=False"),
         ("part_sum, (rows, n), total", "part_sum, (rows, n), total * total")),
    *errors_in("kernel_src/linear_cross_entropy.py", "evaluation", "linear_cross_entropy_combine",
         ("ct.cdiv(hidden.shape[1], TILE)", "hidden.shape[1] // TILE"),
         ("write_lse(lse, row, high, log_sum)", "write_lse(lse, row, high, 0.0)", "evaluation_z_loss")),
    *errors_in("kernel_src/elements.py", "evaluation", "read_padded", ("padding_value=0", "padding_value=1")),
    *errors_in("shared/ops/loss_without_logits.py", "evaluation_steps", "LossWithoutLogits.loss",
         ("self.hidden[rows]", "self.hidden[: rows.stop - start]"),
         ("self.target[rows]", "self.target[: rows.stop - start]"),
         ("self.likelihood[rows]", "self.likelihood[: rows.stop - start]"),
         ("return self.weighted(0.0)", "return self.likelihood", "evaluation_z_loss")),
    *errors_in("shared/ops/loss_without_logits.py", "evaluation_not_taken", "LossWithoutLogits.fits",
         ("options.softcap or ", ""),
         ("options.label_smoothing or ", ""),
         ("self.bias is not None or ", "")),
]  # fmt: skip
