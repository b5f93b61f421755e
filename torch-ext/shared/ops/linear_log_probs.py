"""Log-probabilities of labels, entropies and more of a linear head, without ever holding all its logits: what losses of preference and
reinforcement learning are made of.

The tokens are taken in chunks (linear_head.py), whose logits for the whole vocabulary are there once, in hidden's dtype, with and without
gradients: log-probabilities of a policy and of its reference are equal where both are the same model.

The gradients g of log_probs and u of entropy are one number a token, so the gradient of a token's hidden state is g * a + u * b, where a
and b, the gradients of that token's log-probability and entropy, are known in the forward pass. Where the head is frozen (LoRA) the forward
pass makes them, while the logits are there, and the backward pass has no product with the vocabulary: two products instead of three, or
three with b. Each is one GEMM over the whole vocabulary, added up in float32 and rounded once; TRL, which cuts the vocabulary, keeps such
sums in float32 because a rounding for each part lets the entropy drift. Against float64 the hidden states' gradient in bf16 has an error of
2.73e-3, and 2.68e-3 where it is made in the backward pass, as TRL's is.

A trained head needs the logits in the backward pass too, for the weight's gradient: the fourth product makes them again. There are three
where the gradient of the log-probabilities is known in advance (`coefficients`), or where the forward pass leaves all logits behind
(`recompute=False`), over which their gradient is written. Otherwise it leaves as many columns of them as fit into the memory of the
weight's gradient (log_prob_columns.py), and makes the gradient of the hidden states as with a frozen head. Where entropies or mean logits
get a gradient, the backward pass makes all logits again.
"""

from typing import Any, Dict, NamedTuple, Optional, Sequence

import torch

from ..runtime.device import kernels_run_on
from .arguments import describe, fail, need_device
from .arrays import accumulation_dtype
from .autocast import as_autocast, outside_autocast
from .autograd import Function, autocasts, needs_formula
from .cross_entropy import check_labels, check_one_value_a_class
from .linear_head import scaled
from .log_prob_chunks import Kept, LogProbOptions, called, run
from .log_prob_columns import Columns, is_worth_it
from .log_probs import OUTPUTS, LikelihoodPiece, TokenLogProbs, Upstream, checked_scores, of_logits, piece_of
from .token_sums import sum_over_tokens

__all__ = ["linear_log_probs"]

GRADIENT, COLUMNS, LOGITS, NOTHING = "gradient", "columns", "logits", "nothing"  # what a backward pass has of the forward pass's logits
DIFFERENTIABLE = ("log_probs", "entropy", "mean_logits")
# By the shape of a head: whether the last backward pass brought a gradient of its entropies. The next forward pass makes b, or leaves it.
_entropy_had_gradient: dict = {}


class LinearLogProbsOutput(NamedTuple):
    """What `linear_log_probs` returns: [...] each in float32 (float64 where hidden is), is_top1 in bool; what was not asked for is None."""

    log_probs: torch.Tensor
    entropy: Optional[torch.Tensor] = None
    log_sum_sq_probs: Optional[torch.Tensor] = None
    mean_logits: Optional[torch.Tensor] = None
    is_top1: Optional[torch.Tensor] = None
    weighted_sum: Optional[torch.Tensor] = None


class _LogProbs(Function):
    """The results that were asked for, in the order of OUTPUTS. needs: whether hidden, weight and bias require a gradient.

    What the backward pass has of the forward pass's logits (`ctx.has`): the gradient made of them (GRADIENT, a frozen head), that and some
    of their columns (COLUMNS), all of them (LOGITS), or nothing (NOTHING)."""

    def forward(ctx: Any, hidden, weight, bias, target, options: LogProbOptions, needs):
        has = ctx.has = _what_is_kept(hidden, weight, options, needs)
        ctx.options, ctx.needs, ctx.head, ctx.spent, upstream, columns = options, needs, tuple(weight.shape), False, Upstream(), None
        if has in (GRADIENT, COLUMNS):
            upstream = Upstream(log_probs=torch.ones_like(target, dtype=accumulation_dtype(hidden.dtype)))
        if has == COLUMNS:
            columns = Columns.new(hidden, weight)
        now = needs if has in (GRADIENT, LOGITS) else (needs[0] and has == COLUMNS, False, False)
        both = has == GRADIENT and options.entropy_early
        found, kept = called(hidden, weight, bias, target, upstream, options, now, both, has == LOGITS, columns=columns)
        logits, ctx.choice = [] if kept is None else kept.logits, kept and kept.choice
        ctx.plan = columns and columns.plan
        if columns is not None:
            logits = [columns.lse, columns.gradient, *columns.apart]
        results = [row for name, row in zip(OUTPUTS, found[:5]) if name in options.outputs]
        # What another gradient than those that are known would take; nothing of it is kept where none can come.
        again = has != GRADIENT or "mean_logits" in options.outputs or ("entropy" in options.outputs and not options.entropy_early)
        ctx.save_for_backward(found[5], found[8], found[11], found[12], *((hidden, weight, bias, target, *logits) if again else ()))
        ctx.mark_non_differentiable(*[r for name, r in zip(options.outputs, results) if name not in DIFFERENTIABLE])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @outside_autocast
    def backward(ctx: Any, *grads):
        options, (a, a_factor, b, b_factor, *tensors) = ctx.options, ctx.saved_tensors
        given = dict(zip(options.outputs, grads))
        upstream = Upstream(*(given.get(name) for name in DIFFERENTIABLE))
        if all(t is None for t in upstream):
            return (None,) * 6
        if "entropy" in options.outputs and not torch.compiler.is_compiling() and ctx.has in (GRADIENT, COLUMNS, NOTHING):
            _entropy_had_gradient[ctx.head] = upstream.entropy is not None
        if ctx.has == GRADIENT and upstream.mean_logits is None and (upstream.entropy is None or options.entropy_early):
            pairs = (upstream.log_probs, a, a_factor), (upstream.entropy, b, b_factor)
            return _combined([pair for pair in pairs if pair[0] is not None]), None, None, None, None, None
        hidden, weight, bias, target, *logits = tensors
        upstream = Upstream(*(None if t is None else t.to(accumulation_dtype(hidden.dtype)).contiguous() for t in upstream))
        spent, ctx.spent = ctx.spent, True
        if ctx.has == COLUMNS and upstream.entropy is None and upstream.mean_logits is None:
            # What is kept is written over; a second backward pass (retain_graph) keeps it again, and gives the same bits.
            columns = Columns(ctx.plan, logits[0], logits[1].data, [t.data for t in logits[2:]]) if not spent else None
            return (*_of_columns(ctx, columns, hidden, weight, bias, target, upstream.log_probs, a), None, None, None)
        # They are written over, unseen by autograd; a second backward pass (retain_graph) makes them again.
        kept = None if ctx.choice is None else Kept([] if spent else [t.data for t in logits], ctx.choice)
        options = options._replace(outputs=("log_probs",))
        found, _ = called(hidden, weight, bias, target, upstream, options, ctx.needs, kept=kept)
        gradients = [scaled(*pair, None) if need else None for need, pair in zip(ctx.needs, zip(found[5:8], found[8:11]))]
        if gradients[2] is not None:
            gradients[2] = gradients[2].to(bias.dtype)
        return (*gradients, None, None, None)


def _what_is_kept(hidden, weight, options: LogProbOptions, needs) -> str:
    if not (needs[1] or needs[2]):
        return GRADIENT
    if not options.recompute:
        return LOGITS
    # Columns serve a gradient of log_probs alone; in fp16 their factors would have to be those of all columns, and a tracer sees no memory
    # that is two things.
    others = "mean_logits" in options.outputs or options.entropy_early
    fits = needs[1] and hidden.dtype != torch.float16 and weight.element_size() >= hidden.element_size() and hidden.numel() and len(weight)
    if others or not fits or torch.compiler.is_compiling() or _piece(hidden, weight, options) is LikelihoodPiece:
        return NOTHING
    return COLUMNS if is_worth_it(hidden, weight) else NOTHING


def _piece(hidden, weight, options: LogProbOptions):
    """The class that computes the rows of a chunk."""
    kernels = hidden.dtype != torch.float64 and kernels_run_on(hidden, weight)
    return piece_of(kernels, options.scores, options.outputs, Upstream())[0]


def _of_columns(ctx, columns: Optional[Columns], hidden, weight, bias, target, upstream, a) -> list:
    """The gradients of hidden, weight and bias."""
    if columns is None:
        columns = Columns.new(hidden, weight)
        called(hidden, weight, bias, target, Upstream(), ctx.options, (False, False, False), columns=columns)
    piece, needed = _piece(hidden, weight, ctx.options), bias if ctx.needs[2] else None
    dweight, dbias = columns.weight_gradients(hidden, weight, bias, needed is not None, target, upstream, piece, ctx.options)
    dhidden = _combined([(upstream, a, a.new_empty(0))]) if ctx.needs[0] else None
    return [dhidden, dweight, None if dbias is None else dbias.to(bias.dtype)]


def _combined(terms) -> torch.Tensor:
    """The sum of number * gradient of every token, in float32, rounded once. terms: (number [tokens], gradient [tokens, features], its
    factor [tokens, 1], empty for none)."""
    products = []
    for number, gradient, factor in terms:
        product = gradient * (number[:, None] if factor.numel() == 0 else number[:, None] * factor)
        products.append(torch.where(number[:, None] == 0, 0.0, product))  # as where the head is trained: 0 times infinity is 0
    total = products[0] if len(products) == 1 else products[0].add_(products[1])
    return total.to(terms[0][1].dtype)


def _weighted_sum(hidden, weight, bias, target, coefficients, options: LogProbOptions, needs):
    """(sum(coefficients * log_probs), the results, the gradients), whatever is trained."""
    found = run(hidden, weight, bias, target, Upstream(coefficients), options, needs)
    return (found.rows.log_probs * coefficients).sum(), [row for row in found.rows if row is not None], found.gradients


_WeightedSum = sum_over_tokens("_WeightedSum", _weighted_sum)


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    *,
    temperature: float = 1.0,
    softcap: Optional[float] = None,
    scale: float = 1.0,
    outputs: Sequence[str] = ("log_probs",),
    ignore_index: int = -100,
    coefficients: Optional[torch.Tensor] = None,
    entropy_gradient: Optional[bool] = None,
    skip_ignored: Optional[bool] = None,
    accum_dtype: Optional[torch.dtype] = None,
    recompute: bool = True,
) -> LinearLogProbsOutput:
    """Computes for each token the log-probability of its target, and more on demand, from hidden states and a linear head, one chunk of
    logits at a time.

    With z = softcap * tanh(scale * (hidden @ weight.T + bias) / softcap) / temperature and p = softmax(z): log_probs is log p[target],
    entropy is -sum(p * log p), log_sum_sq_probs is log(sum(p^2)), mean_logits is the mean of z, and is_top1 tells whether the target is the
    first of the largest.

    Args:
        hidden: [..., features], bf16, fp16 or fp32 (float64 runs in PyTorch); under autocast cast to its dtype.
        weight: [classes, features], of hidden's dtype, or another that is cast to it; its gradient has the weight's own dtype.
        target: [...] int64, hidden's leading dimensions.
        bias: [classes] or None; as weight.
        temperature, softcap, scale: see above; softcap None for none.
        outputs: which of "log_probs", "entropy", "log_sum_sq_probs", "mean_logits" and "is_top1" are computed; log_probs always is.
        ignore_index: tokens with this target have the result 0 and no gradient.
        coefficients: [...] fp32, what each log-probability is to be multiplied by. `weighted_sum` is the sum of the products then, and
            alone has a gradient; known now, it takes three products with a trained head instead of four.
        entropy_gradient: whether the forward pass over a frozen head makes the gradient of the entropies as well, one more product. None:
            where the last backward pass over a head of this shape brought one. A wrong guess costs time only.
        skip_ignored: whether ignored tokens are taken out in front of the products. None: on a CPU; on a GPU the host waits to count them.
        accum_dtype: what the weight's gradient is added up in over the chunks, as in `linear_cross_entropy`.
        recompute: whether the backward pass over a trained head makes logits again, those columns of which it finds none in the memory of
            the weight's gradient: none for as many tokens as there are features, 38 % for twice as many; all of them where there are fewer
            than 768 features, or many times as many tokens. False: all logits are kept from
            the forward pass, in hidden's dtype, [tokens, classes], and it takes three products. Nothing is kept with `coefficients`, with
            a frozen head, without gradients, and under `torch.compile`; a second backward pass makes the logits again.

    Returns:
        A LinearLogProbsOutput. log_probs, entropy and mean_logits are differentiable in hidden, weight and bias; no gradient is computed
        for one that does not require it. Logits are rounded to hidden's dtype, as the layer would do it; all else is float32.

    Raises:
        ValueError: when shapes, dtypes, devices or options do not fit, and on a CPU for a target outside [0, classes), which a GPU, where
            looking would wait for the device, treats like ignore_index.
    """
    if autocasts(hidden.device):
        hidden = as_autocast(hidden.device, hidden)[0]  # type: ignore[assignment]
    _check(hidden, weight, target, bias, coefficients, ignore_index)
    unknown = [name for name in outputs if name not in OUTPUTS]
    if isinstance(outputs, str) or unknown:
        fail("outputs", repr(outputs), f"some of {', '.join(OUTPUTS)}")
    if accum_dtype not in (None, torch.float32, hidden.dtype):
        fail("accum_dtype", accum_dtype, f"None, hidden's dtype {hidden.dtype}, or torch.float32")
    names = tuple(name for name in OUTPUTS if name in outputs or name == "log_probs")
    scores = checked_scores(temperature, softcap, scale, fail)
    shape, hidden, target = target.shape, hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1).contiguous()
    if coefficients is not None:
        coefficients = coefficients.detach().reshape(-1).to(accumulation_dtype(hidden.dtype))
        coefficients = torch.where(target == ignore_index, 0.0, coefficients)  # an infinite one times 0 is no number
    options = LogProbOptions(scores, names, int(ignore_index), accum_dtype, recompute=bool(recompute))
    plain = not torch.compiler.is_compiling()
    kept = None
    if plain and (target.is_cpu if skip_ignored is None else skip_ignored) and not needs_formula(hidden, weight, target, bias):
        counted = target != ignore_index
        if not bool(counted.all()):
            kept = counted.nonzero()[:, 0]
            hidden, target = hidden[kept], target[kept]
            coefficients = coefficients[kept] if coefficients is not None else None
    rows, total = _rows_and_sum(hidden, weight, bias, target, coefficients, options, entropy_gradient)
    if kept is not None:
        rows = [None if row is None else row.new_zeros(shape.numel()).index_copy(0, kept, row) for row in rows]
    shaped: Dict[str, Any] = {name: None if row is None else row.view(shape) for name, row in zip(OUTPUTS, rows)}
    return LinearLogProbsOutput(weighted_sum=total, **shaped)


def _rows_and_sum(hidden, weight, bias, target, coefficients, options: LogProbOptions, entropy_gradient):
    """(Rows, the weighted sum or None), by whatever computes them."""
    compiling = torch.compiler.is_compiling()
    if not compiling and needs_formula(hidden, weight, target, bias):  # there are no chunks of tensors that are not ordinary
        logits = torch.nn.functional.linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))
        rows = of_logits(logits, target, options.scores, options.outputs, options.ignore_index)
        return rows, None if coefficients is None else (rows.log_probs * coefficients).sum()
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias))
    if coefficients is not None and any(needs) and not compiling:
        total, *found = _WeightedSum.apply(hidden, weight, bias, target, coefficients, options)
        return _spread(found, options), total
    if any(needs):
        guess = entropy_gradient
        if guess is None:
            guess = compiling or _entropy_had_gradient.get(tuple(weight.shape), False)
        options = options._replace(entropy_early=bool(guess) and "entropy" in options.outputs)
        rows = _spread(_LogProbs.apply(hidden, weight, bias, target, options, needs), options)
    else:
        found, _ = called(hidden, weight, bias, target, Upstream(), options, (False, False, False))
        rows = TokenLogProbs(*(row if name in options.outputs else None for name, row in zip(OUTPUTS, found)))
    return rows, None if coefficients is None else (rows.log_probs * coefficients).sum()


def _spread(found: Sequence[torch.Tensor], options: LogProbOptions) -> TokenLogProbs:
    return TokenLogProbs(**dict(zip(options.outputs, found)))


def _check(hidden, weight, target, bias, coefficients, ignore_index) -> None:
    if hidden.dim() == 0 or not hidden.is_floating_point():
        fail("hidden", describe(hidden), "a floating point tensor [..., features]")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or not weight.is_floating_point():
        fail("weight", describe(weight), f"a floating point tensor [classes, {hidden.shape[-1]}] for hidden, which is {describe(hidden)}")
    if target.shape != hidden.shape[:-1] or target.dtype != torch.int64:
        fail("target", describe(target), f"torch.int64 {list(hidden.shape[:-1])}, one label a token")
    check_one_value_a_class("bias", bias, weight.shape[0])
    if bias is not None and not bias.is_floating_point():
        fail("bias", describe(bias), "of a floating point dtype")
    if coefficients is not None and (coefficients.shape != target.shape or not coefficients.is_floating_point()):
        fail("coefficients", describe(coefficients), f"a floating point tensor {list(target.shape)}, one number a token")
    need_device("hidden", hidden.device, weight=weight, target=target, bias=bias, coefficients=coefficients)
    check_labels(target, weight.shape[0], ignore_index)


SELF_CHECKS = {
    "linear_log_probs": lambda i: i.call(linear_log_probs, *i.head(), outputs=("log_probs", "entropy")),
}
