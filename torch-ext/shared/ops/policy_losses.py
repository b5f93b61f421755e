"""Losses of reinforcement learning with groups of answers, from hidden states and a linear head: GRPO and its variants.

With log p of a token by the policy, by the one that made the answer (old) and by the reference model, r = exp(log p - log p_old), of every
token or of a whole answer, and A the answer's advantage, a variant is a row of `VARIANTS`: what a token costs, and what the sum over the
tokens is divided by.
"""

import math
import warnings
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from .arguments import describe, fail
from .linear_log_probs import linear_log_probs

__all__ = ["PolicyOptions", "check_numbers", "linear_grpo_loss"]

LEVELS = ("token", "sequence")
SMALLEST_RATIO = math.log(1e-8)
LARGEST_LOG_RATIO = 20.0


class PolicyOptions(NamedTuple):
    """Numbers of the formulas; see `linear_grpo_loss`."""

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: Optional[float] = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    max_completion_length: Optional[int] = None
    num_items_in_batch: Union[None, int, float, torch.Tensor] = None


class Tokens(NamedTuple):
    """What a policy loss reads of every token [answers, tokens], or of every answer [answers, 1].

    log_ratio: log p - log p_old, 0 where the mask is. ratio: r. advantage: 0 where the mask is. correction: for the engine that made the
    answers, 1 where the mask is, or None.
    """

    log_p: torch.Tensor
    log_ratio: torch.Tensor
    ratio: torch.Tensor
    advantage: torch.Tensor
    mask: torch.Tensor
    correction: Optional[torch.Tensor] = None


class GRPOOutput(NamedTuple):
    """What `linear_grpo_loss` returns. Only `loss` has a gradient. kl: of the policy to the reference model, the mean over the tokens, None
    where beta is 0; clip_ratio: the part of the tokens whose ratio was clipped."""

    loss: torch.Tensor
    kl: Optional[torch.Tensor]
    clip_ratio: torch.Tensor


# ---------------------------------------------------------------- what a token costs: (cost, is it clipped)
Cost = Tuple[torch.Tensor, torch.Tensor]


def _corrected(cost, t: Tokens):
    return cost if t.correction is None else cost * t.correction


def _clipped(t: Tokens, options: PolicyOptions) -> Cost:
    low, high = 1 - options.epsilon_low, 1 + options.epsilon_high
    ratio = t.ratio if options.delta is None else t.ratio.clamp(max=options.delta)
    cost = -torch.minimum(ratio * t.advantage, t.ratio.clamp(low, high) * t.advantage)
    return _corrected(cost, t), ((t.ratio < low) & (t.advantage < 0)) | ((t.ratio > high) & (t.advantage > 0))


def _cispo(t: Tokens, options: PolicyOptions) -> Cost:
    """arXiv:2506.13585: the ratio, bounded from above by epsilon_high itself, only weighs the token's log-probability."""
    cost = -t.ratio.clamp(max=options.epsilon_high).detach() * t.advantage * t.log_p
    return _corrected(cost, t), (t.ratio > options.epsilon_high) & (t.advantage > 0)


def _sapo(t: Tokens, options: PolicyOptions) -> Cost:
    """arXiv:2511.20347: a sigmoid instead of clipping."""
    temperature = torch.where(t.advantage > 0, options.sapo_temperature_pos, options.sapo_temperature_neg)
    cost = -torch.sigmoid(temperature * (t.ratio - 1)) * (4 / temperature) * t.advantage
    return _corrected(cost, t), torch.zeros_like(t.ratio, dtype=torch.bool)


def _vespo(t: Tokens, options: PolicyOptions) -> Cost:
    """The weight of an answer, of its ratio w, is exp(l + k * log w - l * w), without gradient."""
    log_w = (t.log_ratio.detach().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO) * t.mask).sum(1, keepdim=True)
    if t.correction is not None:
        log_w = log_w + t.correction.log().clamp(SMALLEST_RATIO, LARGEST_LOG_RATIO).sum(1, keepdim=True)
    log_w = log_w.clamp(SMALLEST_RATIO, LARGEST_LOG_RATIO)
    positive = t.advantage >= 0
    k = torch.where(positive, options.vespo_k_pos, options.vespo_k_neg)
    rate = torch.where(positive, options.vespo_lambda_pos, options.vespo_lambda_neg).clamp(min=1e-4)
    weight = torch.exp(rate + k * log_w - rate * log_w.exp()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return -weight * t.advantage * t.log_p, torch.zeros_like(t.ratio, dtype=torch.bool)


# ---------------------------------------------------------------- what their sum is
def _mean_of_answers(cost, mask, _):
    return ((cost * mask).sum(1) / mask.sum(1).clamp(min=1)).sum() / max(mask.shape[0], 1)


def _mean_of_tokens(cost, mask, _):
    return (cost * mask).sum() / mask.sum().clamp(min=1)


def _per_length(cost, mask, options):
    if options.max_completion_length is None:
        fail("max_completion_length", None, "the most tokens an answer may have, by which dr_grpo divides")
    return (cost * mask).sum() / (max(mask.shape[0], 1) * options.max_completion_length)


def _per_item(cost, mask, options):
    return (cost * mask).sum() / items_of_process(mask, options.num_items_in_batch)


def _sum_of_answers(cost, mask, _):
    return (cost * mask).sum() / max(mask.shape[0], 1)


def items_of_process(mask: torch.Tensor, num_items: Union[None, int, float, torch.Tensor] = None) -> torch.Tensor:
    """The tokens of all processes, by default those that their masks count, over the number of processes; at least 1."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if num_items is None:
        total = mask.sum(dtype=torch.float32)
        if distributed:
            torch.distributed.all_reduce(total)
    else:
        total = torch.as_tensor(num_items, dtype=torch.float32).to(mask.device, non_blocking=True)
    return (total / (torch.distributed.get_world_size() if distributed else 1)).clamp(min=1)


def _per_place(cost, mask, _):
    return (cost * mask.sum(1, keepdim=True)).sum() / max(cost.numel(), 1)


class PolicyLoss(NamedTuple):
    """cost: of a token; total: of all; of_tokens: it has no form for ratios of whole answers; of_masked: masked tokens count too."""

    cost: Callable
    total: Callable
    of_tokens: bool = False
    of_masked: bool = False


VARIANTS: Dict[str, PolicyLoss] = {
    "grpo": PolicyLoss(_clipped, _mean_of_answers),
    "bnpo": PolicyLoss(_clipped, _mean_of_tokens),
    "dr_grpo": PolicyLoss(_clipped, _per_length),
    "dapo": PolicyLoss(_clipped, _per_item),
    "luspo": PolicyLoss(_clipped, _sum_of_answers),
    # As in Liger: the same where every token counts, or where ratios are of whole answers and beta is 0.
    "luspo_of_all": PolicyLoss(_clipped, _per_place, of_masked=True),
    "cispo": PolicyLoss(_cispo, _per_item, True),
    "sapo": PolicyLoss(_sapo, _mean_of_answers, True),
    "vespo": PolicyLoss(_vespo, _per_item, True),
}


# ---------------------------------------------------------------- the loss
def check_options(loss: str, level: str, options: PolicyOptions) -> None:
    """Raises ValueError for what does not exist and for numbers that no formula takes."""
    if loss not in VARIANTS:
        fail("loss_type", repr(loss), f"one of {', '.join(VARIANTS)}")
    if level not in LEVELS:
        fail("importance_sampling_level", repr(level), "'token' or 'sequence'")
    if level == "sequence" and VARIANTS[loss].of_tokens:
        raise ValueError(
            f"Sequence-level importance sampling is not supported for loss_type={loss!r}: importance_sampling_level is 'sequence', "
            "expected 'token'"
        )
    check_numbers(options, SAPO if VARIANTS[loss].cost is _sapo else ("delta",) if VARIANTS[loss].cost is _clipped else ())


SAPO = ("sapo_temperature_pos", "sapo_temperature_neg")


def check_numbers(options: PolicyOptions, names: Sequence[str] = (*SAPO, "delta")) -> None:
    """Raises ValueError for numbers that no formula takes. names: those that are checked."""
    for name in names:
        number = getattr(options, name)
        if number is not None and number <= 0:
            raise ValueError(f"{name} must be positive, got {number}")


def _log_probs(hidden, weight, tokens, counted, bias, temperature) -> torch.Tensor:
    """[answers, tokens]; 0, and no product on a CPU, where nothing counts."""
    target = torch.where(counted, tokens, -100)
    return linear_log_probs(hidden, weight, target, bias, temperature=temperature).log_probs


def linear_grpo_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    *,
    loss: str = "dapo",
    ref_log_probs: Optional[torch.Tensor] = None,
    old_log_probs: Optional[torch.Tensor] = None,
    ref_hidden: Optional[torch.Tensor] = None,
    ref_weight: Optional[torch.Tensor] = None,
    ref_bias: Optional[torch.Tensor] = None,
    use_reference: bool = True,
    beta: float = 0.04,
    temperature: float = 1.0,
    importance_sampling_level: str = "token",
    correction: Optional[torch.Tensor] = None,
    use_bias_correction_kl: bool = False,
    **numbers: Any,
) -> GRPOOutput:
    """Computes the loss of GRPO or of one of its variants from hidden states and a linear head.

    Args:
        hidden: [answers, tokens, features]; weight: [classes, features]; bias: [classes] or None.
        tokens: [answers, tokens] int64, those of the answers.
        mask: [answers, tokens], what a token counts; what does not count costs nothing and may be any number.
        advantages: [answers], or [answers, tokens].
        loss: a name of `VARIANTS`. "luspo" leaves masked tokens out; "luspo_of_all" counts them too, as Liger does.
        ref_log_probs, old_log_probs: [answers, tokens], by the reference model, and by the model that made the answers; None for the policy
            as it is now. ref_hidden, ref_weight, ref_bias: what the first are made of where they are not given.
        use_reference: False compares the policy with itself instead of a reference model.
        beta: what the KL divergence to the reference model is multiplied by before it is added.
        temperature: of the policy's and the reference model's distribution.
        importance_sampling_level: "token", or "sequence" for one ratio an answer (GSPO, arXiv:2507.18071).
        correction: [answers], [answers, 1] or [answers, tokens], for the engine that made the answers.
        use_bias_correction_kl: the KL divergence is multiplied by the ratio.
        numbers: epsilon_low=0.2 and epsilon_high=0.2, how far a ratio may be from 1 (cispo: epsilon_high itself is the largest);
            delta=None, the largest ratio of all; max_completion_length, which dr_grpo divides by; num_items_in_batch, which dapo, cispo
            and vespo divide by, over the number of processes: by default the tokens of all processes that count; and those of sapo and
            vespo, see `PolicyOptions`.

    Returns:
        A GRPOOutput, in float32 (float64 where hidden is).

    Raises:
        ValueError: when shapes, dtypes, devices or options do not fit.
    """
    options = PolicyOptions(**numbers)
    check_options(loss, importance_sampling_level, options)
    if loss == "dr_grpo" and options.max_completion_length is None:
        _per_length(mask, mask, options)
    _check(hidden, tokens, mask, advantages, ref_log_probs, old_log_probs, correction)
    variant = VARIANTS[loss]
    counted = torch.ones_like(mask, dtype=torch.bool) if variant.of_masked else mask != 0
    log_p = _log_probs(hidden, weight, tokens, counted, bias, temperature)
    old = log_p.detach() if old_log_probs is None else old_log_probs.detach().to(log_p.dtype)
    log_ratio = torch.where(counted, log_p - old, 0.0)
    of_ratio = log_ratio
    if importance_sampling_level == "sequence":
        of_ratio = (log_ratio * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    ratio = of_ratio.exp()
    advantages = _where_counted(counted, advantages, 0.0)
    correction = None if correction is None else _where_counted(counted, correction, 1.0)
    cost, clipped = variant.cost(Tokens(log_p, log_ratio, ratio, advantages, mask, correction), options)
    of_all, divergence = mask.sum().clamp(min=1), None
    if beta != 0.0:
        given = (ref_log_probs, ref_hidden, ref_weight, ref_bias) if use_reference else None
        reference = log_p.detach() if given is None else _reference(tokens, counted, temperature, *given).to(log_p.dtype)
        distance = torch.where(counted, reference - log_p, 0.0)
        kl = torch.expm1(distance) - distance
        kl = kl * ratio if use_bias_correction_kl else kl
        cost, divergence = cost + beta * kl, (kl.detach() * mask).sum() / of_all
    return GRPOOutput(variant.total(cost, mask, options), divergence, (clipped * mask).sum() / of_all)


def _where_counted(counted, numbers, other: float) -> torch.Tensor:
    """Numbers of every token [answers, tokens] or of every answer [answers, 1], another one where no token counts. numbers: may lack the
    second dimension."""
    numbers = numbers[:, None] if numbers.dim() == 1 else numbers
    return torch.where(counted if numbers.shape == counted.shape else counted.any(1, keepdim=True), numbers, other)


def _reference(tokens, counted, temperature, log_probs, hidden, weight, bias) -> torch.Tensor:
    if log_probs is not None:
        if hidden is not None:
            warnings.warn("ref_log_probs and ref_hidden are given. Using ref_per_token_logps, which are ref_log_probs", stacklevel=3)
        return log_probs.detach()
    if hidden is None or weight is None:
        absent = "ref_hidden" if hidden is None else "ref_weight"
        fail(absent, None, "the reference model's, or ref_log_probs; without a reference model pass use_reference=False")
    with torch.no_grad():
        return _log_probs(hidden, weight, tokens, counted, bias, temperature)


def _check(hidden, tokens, mask, advantages, ref_log_probs, old_log_probs, correction) -> None:
    if hidden.dim() != 3:
        fail("hidden", describe(hidden), "[answers, tokens, features]")
    shape = hidden.shape[:-1]
    every = {"tokens": tokens, "mask": mask, "ref_log_probs": ref_log_probs, "old_log_probs": old_log_probs}
    for name, tensor in every.items():
        if tensor is not None and tensor.shape != shape:
            fail(name, describe(tensor), f"{list(shape)}, one number a token")
    allowed = {"advantages": (shape[:1], shape), "correction": (shape[:1], (shape[0], 1), shape)}
    for name, tensor in (("advantages", advantages), ("correction", correction)):
        if tensor is not None and tuple(tensor.shape) not in [tuple(s) for s in allowed[name]]:
            fail(name, describe(tensor), " or ".join(str(list(s)) for s in allowed[name]))
