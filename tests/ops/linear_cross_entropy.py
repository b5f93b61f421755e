"""Linear head and cross entropy: the loss, its gradients and its other results."""

import torch

from tests.ops.common import BF16, CPU, FP16, FP32, again, errors_in, exact, leaf, limit, on_cpu, randn
from tests.ops.generated import generated
from tests.ops.signature import Signature
from tests.tolerances import RELATIVE_ERROR, assert_close


def cross_entropy_exact(hidden, weight, target, bias=None, *, softcap=0.0, lse_square_scale=0.0, num_items=None, class_weight=None,
                        ignore_index=-100, reduction="mean", label_smoothing=0.0, use_token_scaling=False, accum_dtype=None, part="loss",
                        rounded=False):
    """part: "loss", or "z_loss" for what lse_square_scale adds to it. rounded: logits are made in hidden's dtype, as a model makes
    them, and only what follows them is float64."""
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


def check_linear_cross_entropy(ops, device, dtype, tokens, features, classes, *, bias=False, class_weight=False, ignored=0.2, upstream=0.5,
                               **options):
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
    dict(use_token_scaling=True, ignored=1.0, lse_square_scale=1e-2, return_z_loss=True, return_token_accuracy=True,
         return_predicted_tokens=True),
    dict(return_z_loss=True, lse_square_scale=1e-2),
    dict(return_predicted_tokens=True, return_token_accuracy=True),
    dict(return_token_accuracy=True, return_predicted_tokens=True, return_z_loss=True, reduction="none", lse_square_scale=1e-2, bias=True),
    dict(return_z_loss=True, lse_square_scale=1e-2, use_token_scaling=True, num_items=37, label_smoothing=0.1, softcap=4.0),
    dict(accum_dtype=torch.float32),
    dict(accum_dtype=torch.float32, reduction="none", class_weight=True),
)
LOSS_SHAPES = ((5, 32, 4096), (3, 16, 4099), (4, 24, 9001), (1, 8, 17))


def check_labels_out_of_range(ops):
    """On a GPU they count like ignore_index: what the CPU's check of the labels keeps from the kernels."""
    hidden, weight = leaf(randn(5, 8, dtype=FP32, device=CPU)), leaf(randn(17, 8, dtype=FP32, device=CPU, seed=1))
    target = torch.tensor([3, -7, 17, 2**40, 16])
    with limit(ops, "linear_cross_entropy", "_check", lambda *_: None):
        ops.linear_cross_entropy(hidden, weight, target).backward()
    hidden64, weight64 = exact(hidden), exact(weight)
    target64 = torch.where((target >= 0) & (target < 17), target, -100)
    torch.nn.functional.cross_entropy(hidden64 @ weight64.t(), target64).backward()
    assert_close(hidden.grad, hidden64.grad, FP32, "labels out of range, dhidden")
    assert_close(weight.grad, weight64.grad, FP32, "labels out of range, dweight")


def check_piece_of_minus_infinity(ops):
    """A bias of -inf over all classes of one tile, as a mask of the vocabulary makes it. The targets are the first columns of pieces."""
    hidden, weight = leaf(randn(2, 4, dtype=FP32, device=CPU)), leaf(randn(8200, 4, dtype=FP32, device=CPU, seed=1))
    bias = torch.zeros(8200)
    bias[8192:] = -float("inf")
    target = torch.tensor([0, 2048])
    loss = ops.linear_cross_entropy(hidden, weight, target, bias)
    loss.backward()
    hidden64 = exact(hidden)
    loss64 = torch.nn.functional.cross_entropy(hidden64 @ weight.detach().double().t() + bias, target)
    loss64.backward()
    assert_close(loss, loss64, FP32, "loss")
    assert_close(hidden.grad, hidden64.grad, FP32, "dhidden")


def check_second_backward_pass(ops):
    hidden, weight = leaf(randn(3, 8, dtype=FP32, device=CPU)), leaf(randn(17, 8, dtype=FP32, device=CPU, seed=1))
    loss = ops.linear_cross_entropy(hidden, weight, torch.tensor([1, 2, 3]))
    (first,) = torch.autograd.grad(loss, hidden, torch.tensor(0.5), retain_graph=True)
    first = first.clone()
    (second,) = torch.autograd.grad(loss, hidden, torch.tensor(0.5))
    assert_close(second, first.double(), FP32, "second backward pass")


def check_fp16_gradients_of_many_tokens(ops):
    """A probability of 1 / 1500 divided by 2000 tokens is among the last numbers above zero that fp16 has."""
    check_linear_cross_entropy(ops, CPU, FP16, 2000, 4, 1500, upstream=1.0, ignored=0.0)


def check_the_range_of_fp16(ops):
    """Chunks of tokens whose class weights are 10^6 apart, with a bias."""
    with limit(ops, "linear_head", "SMALL_CHUNK", 16 * 40 * 2):
        check_fp16_range(ops, CPU, 40, 64, 1.0, lambda target: torch.where(target < 20, 5e3, 5e-3), bias=True)


def check_unreduced_loss(ops):
    """Computes a loss for every token, with all that the backward pass needs again."""
    again("linear_cross_entropy")(ops)
    check_linear_cross_entropy(ops, CPU, FP32, 5, 16, 40, reduction="none", bias=True, class_weight=True)


def check_loss_in_a_graph(ops):
    """Reduced and a token, traced: the loss and its gradients, with one from above that is not 1."""
    hidden, weight = randn(5, 32, dtype=FP32, device=CPU), randn(9, 32, dtype=FP32, device=CPU, seed=1)
    target, above = torch.tensor([3, 8, -100, 0, 7]), {"mean": torch.tensor(3.0), "none": torch.arange(1.0, 6.0)}
    function = ops.linear_cross_entropy
    for reduction, upstream in above.items():
        torch._dynamo.reset()
        compiled = torch.compile(lambda h, w, how=reduction: function(h, w, target, reduction=how), backend="aot_eager", fullgraph=True)
        leaves, exact_leaves = [leaf(hidden), leaf(weight)], [exact(hidden), exact(weight)]
        loss = compiled(*leaves)
        wanted = torch.nn.functional.cross_entropy(exact_leaves[0] @ exact_leaves[1].t(), target, reduction=reduction)
        assert_close(loss, wanted, FP32, f"loss {reduction}")
        gradients, wanted = torch.autograd.grad(loss, leaves, upstream), torch.autograd.grad(wanted, exact_leaves, upstream.double())
        for found, expected in zip(gradients, wanted, strict=True):
            assert_close(found, expected, FP32, f"gradient {reduction}", 2)


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "loss_in_a_graph": check_loss_in_a_graph,
    "labels": check_labels_out_of_range,
    "minus_infinity": check_piece_of_minus_infinity,
    "second_backward": check_second_backward_pass,
    "fp16_range": check_the_range_of_fp16,
    "fp16_loss": check_fp16_gradients_of_many_tokens,
    "loss_again": again("linear_cross_entropy"),
    "loss_unreduced": check_unreduced_loss,
    "loss": on_cpu(check_linear_cross_entropy, FP32, 3, 16, 8203),
    "loss_ignores_0": on_cpu(check_linear_cross_entropy, FP32, 8, 16, 17, ignore_index=0),
    "loss_pieces": on_cpu(check_linear_cross_entropy, FP32, 2, 8, 65 * 8192 + 5, ignored=0.0),
    "loss_none": on_cpu(check_linear_cross_entropy, FP32, 5, 16, 1003, reduction="none"),
    "loss_items": on_cpu(check_linear_cross_entropy, FP32, 5, 16, 40, num_items=37),
    "loss_smooth": on_cpu(check_linear_cross_entropy, FP32, 4, 16, 4107, label_smoothing=0.2, class_weight=True),
    "loss_softcap": on_cpu(check_linear_cross_entropy, FP32, 3, 16, 4107, softcap=3.0),
    "loss_bias": on_cpu(check_linear_cross_entropy, FP32, 5, 16, 40, bias=True),
    "loss_chunks": on_cpu(check_linear_cross_entropy, FP32, 2100, 4, 9),
    "loss_chunks_none": on_cpu(check_linear_cross_entropy, FP32, 2100, 4, 9, reduction="none"),
    "loss_none_weighted": on_cpu(check_linear_cross_entropy, FP32, 5, 16, 40, reduction="none", class_weight=True),
    "loss_nothing_counted": on_cpu(check_linear_cross_entropy, FP32, 5, 16, 40, ignored=1.0),
    "loss_smooth_ignored": on_cpu(check_linear_cross_entropy, FP32, 8, 16, 17, label_smoothing=0.2, ignore_index=0),
    "loss_returns": on_cpu(
        check_linear_cross_entropy, FP32, 20, 16, 17, lse_square_scale=0.1, use_token_scaling=True,
        return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True,
    ),
    "loss_in_gradient": on_cpu(check_linear_cross_entropy, FP32, 32, 64, 300),
    "loss_chunks_accum": on_cpu(check_linear_cross_entropy, BF16, 2100, 4, 9, accum_dtype=FP32),
    "loss_slices": on_cpu(check_linear_cross_entropy, BF16, 4, 8, 9000, accum_dtype=FP32),
}  # fmt: skip
MUTANTS = [
    *generated("kernel_src/cross_entropy.py", "loss or loss_softcap or loss_smooth or labels or minus_infinity",
               "cap cross_entropy_combine cross_entropy_statistics cross_entropy_statistics_weighted join_partials "
               "shift_of write_gradient write_gradient_weighted"),
    *generated("shared/ops/cross_entropy.py", "loss_smooth or loss_returns or loss_smooth_ignored",
               "Chunk.coefficients Chunk.scaled Chunk.weighted shares_of"),
    *generated("shared/ops/linear_cross_entropy.py", "loss_in_a_graph", "_TracedReduced.backward _PerToken.forward", kernels=False),
    *generated("shared/ops/linear_cross_entropy.py", "loss_again or loss_smooth", "_reduced"),
    *generated("shared/ops/linear_head.py", "loss_chunks_accum or fp16_range", "_into_fp16 add_product", kernels=False),
    *generated("shared/ops/cross_entropy.py", "loss_ignores_0 or fp16_loss", "Chunk.in_range is_counted", kernels=False),
    *errors_in("kernel_src/cross_entropy.py", "loss", "piece",
         ("block // pieces", "0"),
         ("block % pieces", "0"),
         ("// pieces", "// (pieces + 1)")),
    *errors_in("kernel_src/cross_entropy.py", "loss_smooth", "read_logits", ("padding_value=MINUS_INFINITY", "padding_value=0")),
    *errors_in("kernel_src/cross_entropy.py", "loss", "cross_entropy_statistics", ("padding_value=MINUS_INFINITY", "padding_value=0")),
    *errors_in("kernel_src/cross_entropy.py", "loss", "join_partials", ("padding_value=MINUS_INFINITY", "padding_value=1e4")),
    *errors_in("kernel_src/cross_entropy.py", "loss", "cross_entropy_combine",
         ("write_lse(lse, row, m, log_sum)", "write_lse(lse, row, m, 0.0)"),
         ("z = cap(z, softcap)", "z = z", "loss_softcap")),
    *errors_in("kernel_src/cross_entropy.py", "loss", "cross_entropy_gradient", ("ct.gather(scale, 0, check_bounds=False)", "1.0")),
    *errors_in("kernel_src/cross_entropy.py", "loss", "write_gradient",
         ("lane < TILE", "lane < 1"),
         ("lane >= 0", "lane > 0", "minus_infinity"),
         ("ct.zeros((TILE,), dtype=out.dtype)", "ct.full((TILE,), 1.0, dtype=out.dtype)", "loss_ignores_0"),
         ("(t != ignore_index) & ", "", "loss_ignores_0"),
         (" & (t < logits.shape[1])", "", "labels"),
         (" & (t >= 0)", "", "labels"),
         ("probabilities(read_logits(logits, row, cols), lse, row)", "ct.exp2(read_logits(logits, row, cols) * LOG2E)")),
    *errors_in("shared/ops/cross_entropy.py", "loss_smooth", "KernelChunk.loss",
         ('distance_of(self.lse, part_max, part_total, shares, statistics.constant("TILE"))', "joined(self.lse)")),
    *errors_in("shared/ops/cross_entropy.py", "loss_returns", "Chunk.rows",
         ("torch.where(counted, z_loss_of(self.lse.detach(), options), 0.0)", "z_loss_of(self.lse.detach(), options)"),
         ("torch.where(counted, self.logits.detach().argmax(1), -1)", "self.logits.detach().argmax(1)"),
         ("self.logits.detach().argmax(1)", "self.logits.detach().argmin(1)"),
         ("loss, z_loss = loss * self.scaling", "loss, z_loss = loss"),
         ("z_loss * self.scaling", "z_loss"),
         ("torch.exp(-self.likelihood.detach())", "torch.exp(self.likelihood.detach())")),
    *errors_in("shared/ops/linear_cross_entropy.py", "loss_none_weighted", "_PerToken.forward",
         ("ctx.save_for_backward(hidden, weight, bias, target, class_weight)",
          "ctx.save_for_backward(hidden, weight, bias, target, None)")),
    *errors_in("shared/ops/linear_cross_entropy.py", "loss_in_a_graph", "_TracedReduced.forward",
         ("rows.loss.sum() * scale.view(())", "rows.loss.sum()"), kernels=False),
    *errors_in("shared/ops/linear_cross_entropy.py", "loss_in_a_graph", "_TracedReduced.backward",
         ("scaled(saved[6], saved[4], dloss)", "saved[6]"), kernels=False),
    *errors_in("shared/ops/linear_cross_entropy.py", "loss_in_a_graph", "_PerToken.backward",
         ("scale = dlosses.to(", "scale = torch.ones_like(dlosses).to("), kernels=False),
    *errors_in("shared/ops/linear_cross_entropy.py", "loss_smooth", "_reduced",
         ("_run(hidden, weight, bias, target, class_weight, scale,", "_run(hidden, weight, bias, target, None, scale,")),
    *errors_in("shared/ops/cross_entropy.py", "loss_nothing_counted", "reduction_scale",
               ("torch.where(items == 0, of_none, 1.0 / items)", "(1.0 / items)")),
    *errors_in("shared/ops/cross_entropy.py", "loss_smooth", "reduction_scale",
         ("torch.where(counted, class_weight[torch.where(counted, target, 0)], 0.0).sum()", "counted.sum()")),
    *errors_in("shared/ops/cross_entropy.py", "loss_returns", "output_of",
         (".clamp(min=1)", ".clamp(min=1) * 2"),
         ("(rows.predicted >= 0).sum()", "(rows.predicted >= -1).sum()"),
         ("reduced(rows.z_loss, scale)", "rows.z_loss.sum()")),
    *errors_in("shared/ops/linear_head.py", "loss_chunks_accum", "add_product",
         ("x[part].to(total.dtype), y, beta=beta", "x[part].to(total.dtype), y, beta=0.0"), kernels=False),
    *errors_in("shared/ops/cross_entropy.py", "loss_items", "reduction_scale", ("if num_items is not None", "if False")),
    *errors_in("shared/ops/linear_head.py", "loss_bias", "walk", ("dbias.add_(logits.sum(0, dtype=acc) if", "dbias.add_(logits[0] if")),
    *errors_in("shared/ops/linear_head.py", "loss_chunks", "walk",
         ("power, dhidden[rows]", "power, dhidden[: part.shape[0]]"),
         ("else scale[rows]", "else scale[: part.shape[0]]", "loss_chunks_none"), kernels=False),
    *errors_in("shared/ops/linear_head.py", "loss_in_gradient", "_write_product_over", (".clone()", ""), kernels=False),
    *errors_in("shared/ops/linear_head.py", "loss_chunks", "add_product", ("accumulate_product(total, x, y)", "write_product(total, x, y)"),
               kernels=False),
    *errors_in("shared/ops/cross_entropy.py", "loss_softcap", "TorchChunk.gradient", ("gradient.mul_(slope)", "pass"), kernels=False),
    *errors_in("shared/ops/linear_head.py", "fp16_range", "carry_to_hidden", ("out_factor /= factor", "pass")),
    *errors_in("shared/ops/linear_head.py", "fp16_range", "walk",
         ("multiply(dweight, power / unit)", "pass"),
         ("weight_factor / unit", "weight_factor"),
         ("logits.sum(0, dtype=acc) / power", "logits.sum(0, dtype=acc)"), kernels=False),
    *errors_in("shared/ops/token_sums.py", "loss", "sum_over_tokens",
         ("gradients.times(dsum)", "gradients.times()"),
         ("ctx.gradients = None", "pass", "second_backward")),
    *errors_in("shared/ops/linear_cross_entropy.py", "loss_unreduced", "_PerToken.forward",
         ("save_for_backward(hidden", "save_for_backward(-hidden"), ("target, class_weight)", "target.clamp(max=0), class_weight)")),
    *errors_in("shared/ops/linear_cross_entropy.py", "loss_unreduced", "_PerToken.backward",
         ("scale = dlosses.to(", "scale = torch.ones_like(dlosses).to(")),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
SIGNATURES = {
    "linear_cross_entropy": Signature(
        lambda s: {"hidden": (*s.rows, s.features), "weight": (s.classes, s.features), "target": s.rows,
                   **s.optional(bias=(s.classes,)), **s.optional(class_weight=(s.classes,))},
        lambda hidden, weight, target, bias=None, **options: cross_entropy_exact(hidden.flatten(0, -2), weight, target.flatten(), bias,
                                                                                 **options),
        constant=("target", "class_weight"),
        options={
            "reduction": ("mean", "sum", "none"),
            "ignore_index": (-100, 0, 2),
            "label_smoothing": (0.1, 0.5),
            "softcap": (2.0, 30.0),
            "lse_square_scale": (1e-4, 0.1),
            "num_items": (1, 5, 37),
        },
    )
}  # fmt: skip


def _calls(new):
    hidden, weight, target = new(5, 64, seed=14), new(40, 64, seed=15), new.integers([3, 39, -100, 0, 7])
    scale, none = new.exact(1, seed=16).abs(), (-100, [0.0, 0.0, 0.0], [False] * 4, None)
    bias, class_weight, every = new(40, seed=17), new.exact(40, seed=18).abs(), (-100, [0.1, 20.0, 0.01], [False, True, True, True], FP32)
    calls = [
        (hidden, weight, None, target, None, None, [False] * 3, *none),
        (hidden, weight, None, target, None, scale, [True, False, False], *none),
        (hidden, weight, bias, target, class_weight, scale.expand(5).contiguous(), [True] * 3, *every),
    ]
    return calls if hidden.dtype == FP16 else [*calls, (hidden, weight, bias, target, None, scale, [True] * 3, *none, True)]


OPERATORS = {"linear_cross_entropy_run": _calls}
GPU_TESTS = {"linear_cross_entropy": ("test_linear_cross_entropy", "test_evaluation")}
