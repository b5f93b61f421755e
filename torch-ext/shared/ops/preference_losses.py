"""Losses of preferences, from hidden states and a linear head: DPO and its variants, CPO, SimPO, ORPO, and KTO.

Each is a formula of the log-probabilities of whole answers, which `linear_log_probs` makes without ever holding all logits. A loss of pairs
is a row of `PAIRED`: called with what `Pairs` holds and the options, it returns one number a pair.
"""

from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.nn.functional import logsigmoid

from .arguments import describe, fail
from .arrays import accumulation_dtype
from .linear_log_probs import linear_log_probs

__all__ = ["check_paired", "linear_kto_loss", "linear_preference_loss"]


class PreferenceOptions(NamedTuple):
    """Numbers of the formulas. label_smoothing: the part of the preferences that is taken to be wrong; gamma: SimPO's margin;
    discopop_tau: the temperature of DiscoPOP's switch between its two terms."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.0
    discopop_tau: float = 0.05


class Pairs(NamedTuple):
    """log p of the chosen and of the rejected answer of every pair [pairs], minus those of the reference model where there is one."""

    chosen: torch.Tensor
    rejected: torch.Tensor


class PreferenceOutput(NamedTuple):
    """What `linear_preference_loss` returns. Only `loss` has a gradient.

    chosen_log_probs, rejected_log_probs: [pairs], of the policy; chosen_rewards, rejected_rewards: [pairs], beta times those, minus the
    reference's where there is one; chosen_logits_mean, rejected_logits_mean: over all tokens, ignored ones too, and all classes; nll_loss:
    of the chosen answers' tokens, 0 where it was not asked for; log_odds_ratio, log_odds_chosen: of ORPO, else None.
    """

    loss: torch.Tensor
    chosen_log_probs: torch.Tensor
    rejected_log_probs: torch.Tensor
    chosen_logits_mean: torch.Tensor
    rejected_logits_mean: torch.Tensor
    nll_loss: torch.Tensor
    chosen_rewards: torch.Tensor
    rejected_rewards: torch.Tensor
    log_odds_ratio: Optional[torch.Tensor] = None
    log_odds_chosen: Optional[torch.Tensor] = None


class UnpairedOutput(NamedTuple):
    """What `linear_kto_loss` returns: the loss, and sums over the answers that are desirable (chosen) and those that are not (rejected).
    Only `loss` has a gradient."""

    loss: torch.Tensor
    chosen_log_probs: torch.Tensor
    rejected_log_probs: torch.Tensor
    chosen_logits: torch.Tensor
    rejected_logits: torch.Tensor
    chosen_rewards: torch.Tensor
    rejected_rewards: torch.Tensor


# ---------------------------------------------------------------- formulas
def _margin(pairs: Pairs, options: PreferenceOptions) -> torch.Tensor:
    return options.beta * (pairs.chosen - pairs.rejected) - options.gamma


def _rewards(pairs: Pairs, options: PreferenceOptions) -> Tuple[torch.Tensor, torch.Tensor]:
    return options.beta * pairs.chosen, options.beta * pairs.rejected


def _sigmoid(pairs, options):
    m, e = _margin(pairs, options), options.label_smoothing
    return -(1 - e) * logsigmoid(m) - e * logsigmoid(-m)


def _hinge(pairs, options):
    return torch.relu(1 - _margin(pairs, options))


def _exo_pair(pairs, options):
    """KL of the model's preference to the smoothed one (arXiv:2402.00856, eq. 16)."""
    m, e = _margin(pairs, options), torch.tensor(options.label_smoothing, dtype=torch.float64)
    right, wrong = torch.log1p(-e).item(), torch.log(e).item()
    return torch.sigmoid(m) * (logsigmoid(m) - right) + torch.sigmoid(-m) * (logsigmoid(-m) - wrong)


def _nca_pair(pairs, options):
    chosen, rejected = _rewards(pairs, options)
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def _robust(pairs, options):
    m, e = _margin(pairs, options), options.label_smoothing
    return (e * logsigmoid(-m) - (1 - e) * logsigmoid(m)) / (1 - 2 * e)


def _bco_pair(pairs, options):
    chosen, rejected = _rewards(pairs, options)
    return -logsigmoid(chosen) - logsigmoid(-rejected)


def _sppo_hard(pairs, options):
    half = 0.5 / options.beta
    return (pairs.chosen - half) ** 2 + (pairs.rejected + half) ** 2


def _apo_zero(pairs, options):
    chosen, rejected = _rewards(pairs, options)
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def _apo_down(pairs, options):
    return torch.sigmoid(options.beta * pairs.chosen) + torch.sigmoid(-_margin(pairs, options))


def _discopop(pairs, options):
    """arXiv:2406.08414, eq. 5."""
    m = _margin(pairs, options)
    switch = torch.sigmoid(m / options.discopop_tau)
    return -logsigmoid(m) * (1 - switch) + torch.exp(-m) * switch


def log_odds(pairs: Pairs) -> torch.Tensor:
    """log of (odds of the chosen / odds of the rejected answer), odds = p / (1 - p) (arXiv:2403.07691). An answer of probability 1, or
    without a token, has the largest odds that its dtype can tell from infinity."""
    most = -torch.finfo(pairs.chosen.dtype).eps
    chosen, rejected = pairs.chosen.clamp(max=most), pairs.rejected.clamp(max=most)
    return (chosen - torch.log(-torch.expm1(chosen))) - (rejected - torch.log(-torch.expm1(rejected)))


def _orpo(pairs, options):
    return -options.beta * logsigmoid(log_odds(pairs))


PAIRED: Dict[str, Callable] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "orpo": _orpo,
}
SMOOTHED = ("sigmoid", "exo_pair", "robust")


def check_paired(loss: str, label_smoothing: float, beta: float, among: Sequence[str] = tuple(PAIRED)) -> None:
    """Raises ValueError for a loss that does not exist, and for numbers that it cannot be computed with."""
    if loss not in among:
        raise ValueError(f"Unsupported loss_type: {loss!r}, expected one of {', '.join(among)}")
    if loss == "exo_pair" and not 0.0 < label_smoothing < 1.0:
        fail("label_smoothing must be > 0 for loss_type='exo_pair'; it", label_smoothing, "a number between 0 and 1, as 1e-3")
    if loss == "robust" and not 0.0 <= label_smoothing < 0.5:
        fail("label_smoothing must lie in [0.0, 0.5) for loss_type='robust'; it", label_smoothing, "a number from 0 to below 0.5")
    if not 0.0 <= label_smoothing <= 1.0:
        fail("label_smoothing", label_smoothing, "a number from 0 to 1")
    if label_smoothing and loss not in SMOOTHED:
        fail("label_smoothing", label_smoothing, f"0: the loss {loss!r} has none; {', '.join(SMOOTHED)} have")
    if loss == "sppo_hard" and beta == 0:
        fail("beta", beta, "another number: sppo_hard divides by it")


# ---------------------------------------------------------------- answers
class _Answers(NamedTuple):
    """Log-probabilities of every token [answers, tokens], and of every answer [answers]; how many tokens count."""

    of_tokens: torch.Tensor
    whole: torch.Tensor
    counted: torch.Tensor


def _answers(hidden, weight, target, bias, ignore_index: int, average: bool) -> _Answers:
    found = linear_log_probs(hidden, weight, target, bias, ignore_index=ignore_index).log_probs
    counted = (target != ignore_index).sum(1)
    whole = found.sum(1)
    return _Answers(found, whole / counted.clamp(min=1) if average else whole, counted)


@torch.no_grad()
def _sum_of_logits(hidden: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
    """Over the classes and the second dimension of hidden [answers, tokens, features]: [answers]. A sum of logits needs none of them."""
    acc = accumulation_dtype(hidden.dtype)
    found = (hidden.sum(1, dtype=acc) * weight.sum(0, dtype=acc)).sum(-1)  # autocast would round the operands of a matrix product
    return found if bias is None else found + hidden.shape[1] * bias.sum(dtype=acc)


def _reference(name: str, target, hidden, weight, bias, ignore_index: int, average: bool) -> torch.Tensor:
    """Log-probabilities of every answer by the reference model, [answers]."""
    for argument, tensor in (("ref_hidden", hidden), ("ref_weight", weight)):
        if tensor is None:
            fail(argument, None, f"the reference model's, which {name} needs; without a reference model pass use_reference=False")
    if hidden.shape[:-1] != target.shape:
        fail("ref_hidden", describe(hidden), f"{list(target.shape)} and features, as target")
    with torch.no_grad():
        return _answers(hidden, weight, target, bias, ignore_index, average).whole


def _check_answers(hidden, weight, target, bias) -> None:
    if hidden.dim() != 3:
        fail("hidden", describe(hidden), "[answers, tokens, features]")
    if target.shape != hidden.shape[:-1]:
        fail("target", describe(target), f"torch.int64 {list(hidden.shape[:-1])}, one label a token")


# ---------------------------------------------------------------- losses
def linear_preference_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    *,
    loss: str = "sigmoid",
    ref_hidden: Optional[torch.Tensor] = None,
    ref_weight: Optional[torch.Tensor] = None,
    ref_bias: Optional[torch.Tensor] = None,
    use_reference: bool = True,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    gamma: float = 0.0,
    discopop_tau: float = 0.05,
    average_log_prob: bool = False,
    nll_weight: float = 0.0,
    nll_target: Optional[torch.Tensor] = None,
    compute_nll_loss: bool = True,
    ignore_index: int = -100,
) -> PreferenceOutput:
    """Computes a loss of pairs of answers, of which the first is preferred, from hidden states and a linear head.

    Args:
        hidden: [2 * pairs, tokens, features], all chosen answers before all rejected ones.
        weight: [classes, features]; bias: [classes] or None.
        target: [2 * pairs, tokens] int64, already shifted.
        loss: a name of `PAIRED`. "sigmoid" is DPO; with `use_reference=False` CPO; and with `average_log_prob` and `gamma` too SimPO.
            "orpo" is ORPO, which takes averages and no reference model.
        ref_hidden, ref_weight, ref_bias: the reference model's, like hidden, weight and bias but for the features.
        use_reference: whether log-probabilities are compared with those of a reference model.
        beta: what their differences are multiplied by; label_smoothing, gamma, discopop_tau: see `PreferenceOptions`.
        average_log_prob: an answer's log-probability is the mean over its tokens, not the sum. Without a token it is 0.
        nll_weight: what the mean negative log-likelihood of the chosen answers' tokens is multiplied by before it is added.
        nll_target: [2 * pairs, tokens], other labels for it; its own logits are made then.
        compute_nll_loss: False leaves it out and makes it 0.
        ignore_index: tokens with that label do not count.

    Returns:
        A PreferenceOutput, in float32 (float64 where hidden is).

    Raises:
        ValueError: when shapes, dtypes, devices or options do not fit.
    """
    _check_answers(hidden, weight, target, bias)
    if target.shape[0] % 2:
        fail("target", describe(target), "an even number of answers: the chosen ones before the rejected ones")
    check_paired(loss, label_smoothing, beta)
    options, pairs = PreferenceOptions(beta, label_smoothing, gamma, discopop_tau), target.shape[0] // 2
    answers = _answers(hidden, weight, target, bias, ignore_index, average_log_prob)
    policy = compared = Pairs(answers.whole[:pairs], answers.whole[pairs:])
    if use_reference:
        of_reference = _reference(f"the loss {loss!r}", target, ref_hidden, ref_weight, ref_bias, ignore_index, average_log_prob)
        compared = Pairs(policy.chosen - of_reference[:pairs], policy.rejected - of_reference[pairs:])
    total = (PAIRED[loss](compared, options) / max(pairs, 1)).sum()  # squares have a mean where fp32 has no sum of them
    nll = answers.whole.new_zeros(())
    if compute_nll_loss:
        of_tokens, counted = answers.of_tokens[:pairs], answers.counted[:pairs]
        if nll_target is not None:
            if nll_target.shape != target.shape:
                fail("nll_target", describe(nll_target), f"torch.int64 {list(target.shape)}, as target")
            others = _answers(hidden[:pairs], weight, nll_target[:pairs], bias, ignore_index, False)
            of_tokens, counted = others.of_tokens, others.counted
        nll = -of_tokens.sum() / counted.sum().clamp(min=1)
        total = total + nll_weight * nll
    elements = max(pairs * target.shape[1] * weight.shape[0], 1)
    sums = _sum_of_logits(hidden, weight, bias)
    found: Dict[str, Any] = {}
    if loss == "orpo":
        odds = log_odds(Pairs(*(t.detach() for t in policy)))
        found = {"log_odds_ratio": logsigmoid(odds).sum() / max(pairs, 1), "log_odds_chosen": odds.sum() / max(pairs, 1)}
    return PreferenceOutput(
        loss=total,
        chosen_log_probs=policy.chosen.detach(),
        rejected_log_probs=policy.rejected.detach(),
        chosen_logits_mean=sums[:pairs].sum() / elements,
        rejected_logits_mean=sums[pairs:].sum() / elements,
        nll_loss=nll.detach(),
        chosen_rewards=beta * compared.chosen.detach(),
        rejected_rewards=beta * compared.rejected.detach(),
        **found,
    )


def linear_kto_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    preference: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    *,
    kl: Optional[torch.Tensor] = None,
    ref_hidden: Optional[torch.Tensor] = None,
    ref_weight: Optional[torch.Tensor] = None,
    ref_bias: Optional[torch.Tensor] = None,
    use_reference: bool = True,
    beta: float = 0.1,
    average_log_prob: bool = False,
    ignore_index: int = -100,
) -> UnpairedOutput:
    """Computes KTO's loss (arXiv:2402.01306) of answers that are desirable or not, from hidden states and a linear head.

    Args:
        hidden: [answers, tokens, features]; weight: [classes, features]; bias: [classes] or None.
        target: [answers, tokens] int64, already shifted.
        preference: [answers] bool, True for a desirable answer.
        kl: of the policy to the reference model, [] or [answers]; None for 0. Without gradient.
        For the others see `linear_preference_loss`.

    Returns:
        An UnpairedOutput, in float32 (float64 where hidden is).

    Raises:
        ValueError: when shapes, dtypes, devices or options do not fit.
    """
    _check_answers(hidden, weight, target, bias)
    if preference.shape != target.shape[:1] or preference.dtype != torch.bool:
        fail("preference", describe(preference), f"torch.bool {list(target.shape[:1])}, one an answer")
    answers = whole = _answers(hidden, weight, target, bias, ignore_index, average_log_prob).whole
    if use_reference:
        whole = answers - _reference("KTO", target, ref_hidden, ref_weight, ref_bias, ignore_index, average_log_prob)
    beyond = whole if kl is None else whole - kl.detach()
    loss = torch.sigmoid(-beta * torch.where(preference, beyond, -beyond)).sum() / max(target.shape[0], 1)

    def sums(row):
        row = row.detach()
        return torch.where(preference, row, 0.0).sum(), torch.where(preference, 0.0, row).sum()

    return UnpairedOutput(loss, *sums(answers), *sums(_sum_of_logits(hidden, weight, bias)), *sums(beta * whole))
