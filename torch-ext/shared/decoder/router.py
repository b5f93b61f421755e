"""The router of a mixture of experts: which experts each token goes to, with which scores, and the gradient of its logits."""

from typing import NamedTuple, Optional, Tuple

import torch
from torch.nn.functional import linear

from ..ops.arguments import fail
from ..ops.arrays import accumulation_dtype

__all__ = ["SOFTMAX", "Router", "Scores", "check_choice", "choose_experts", "logits_of", "rounded", "router_backward"]


class Scores(NamedTuple):
    """How a router scores experts by its logits, and which of them it chooses among.

    of: "softmax" or "sigmoid" of the logits. groups: of neighbouring experts; only those of `chosen` of them are chosen, whose `best`
    highest scores have the highest sum. eps: added to the sum that the scores of a token's experts are divided by, where they are; least:
    what that sum counts as at least. factor: of all scores. wide: whether logits are products in the dtype of the arithmetic. rounds:
    whether scores are rounded to the dtype of the model.
    """

    of: str = "softmax"
    groups: int = 1
    chosen: int = 1
    best: int = 1
    eps: float = 0.0
    least: float = 0.0
    factor: float = 1.0
    wide: bool = False
    rounds: bool = True

    def need_logits(self, normalised: bool) -> bool:
        """Whether the backward pass reads the logits: not where the scores are the softmax over a token's experts alone."""
        return not (normalised and self._is_plain())

    def _is_plain(self) -> bool:
        return self.of == "softmax" and not self.eps and not self.least and self.factor == 1

    def sum_of(self, scores: torch.Tensor) -> torch.Tensor:
        """What the scores of a token's experts [tokens, top-k] are divided by [tokens, 1]."""
        total = scores.sum(-1, keepdim=True)
        total = total + self.eps if self.eps else total
        return total.clamp(min=self.least) if self.least else total

    def of_all(self, logits: torch.Tensor) -> torch.Tensor:
        """The scores of all experts, in the dtype of the arithmetic."""
        precise = accumulation_dtype(logits.dtype)
        return torch.softmax(logits, -1, dtype=precise) if self.of == "softmax" else torch.sigmoid(logits.to(precise))

    def within_groups(self, ranked: torch.Tensor) -> torch.Tensor:
        """What experts are ranked by [tokens, experts], -inf in the groups that are not chosen."""
        if self.chosen == self.groups:
            return ranked
        grouped = ranked.unflatten(1, (self.groups, -1))
        of_groups = grouped.topk(self.best, -1)[0].sum(-1)
        mask = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, of_groups.topk(self.chosen, -1, sorted=False)[1], False)
        return grouped.masked_fill(mask[:, :, None], float("-inf")).flatten(1)


SOFTMAX = Scores()


class Router(NamedTuple):
    """weight: [experts, hidden]; bias: [experts] or None. top_k: experts a token goes to. normalised: whether their probabilities are
    divided by their sum. by_logits: whether they are chosen by their logits, which need no softmax over all then; with `normalised`, and
    without the next two. correction: [experts], added to scores where experts are chosen, not to what they are scored with; or None."""

    weight: torch.Tensor
    top_k: int
    normalised: bool
    bias: Optional[torch.Tensor] = None
    by_logits: bool = False
    correction: Optional[torch.Tensor] = None
    scores: Scores = SOFTMAX


def check_choice(experts: int, top_k: int, normalised: bool, by_logits: bool, kind: Scores, correction: Optional[torch.Tensor]) -> None:
    """Raises ValueError when that many experts cannot be chosen among in this way."""
    if not 1 <= top_k <= experts:
        fail("router.top_k", top_k, f"from 1 to the {experts} experts")
    if by_logits and (not normalised or correction is not None or kind != SOFTMAX):
        fail("router.by_logits", True, "a router whose probabilities are divided by their sum, and no more")
    if kind.chosen != kind.groups and (experts % kind.groups or not 1 <= kind.chosen < kind.groups or kind.best > experts // kind.groups):
        fail("router.scores", kind, f"groups of the {experts} experts, of which some are chosen")


def logits_of(y: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], kind: Scores) -> torch.Tensor:
    """[tokens, experts] of the router's input [tokens, hidden]."""
    if not kind.wide:
        return linear(y, weight, bias)
    precise = accumulation_dtype(y.dtype)
    return linear(y.to(precise), weight.to(precise), None if bias is None else bias.to(precise))


def choose_experts(
    logits: torch.Tensor, top_k: int, normalised: bool, by_logits: bool = False, kind: Scores = SOFTMAX,
    correction: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(scores, expert), [tokens, top-k] each, of a router's logits [tokens, experts]; scores are in the dtype of the arithmetic, and as
    exact as they would be in that of the logits."""
    if by_logits:
        chosen, expert = torch.topk(logits, top_k, -1)
        return torch.softmax(chosen, -1, dtype=accumulation_dtype(logits.dtype)), expert
    of_all = kind.of_all(logits)
    ranked = kind.within_groups(of_all if correction is None else of_all + correction)
    scores, expert = torch.topk(ranked, top_k, -1)
    if ranked is not of_all:
        scores = of_all.gather(-1, expert)
    if normalised:
        scores = scores / kind.sum_of(scores)
    return scores if kind.factor == 1 else scores * kind.factor, expert


def rounded(scores: torch.Tensor, dtype: torch.dtype, kind: Scores = SOFTMAX) -> torch.Tensor:
    """Scores with the exactness that the model gives them, in the dtype that they are in."""
    return scores.to(dtype).to(scores.dtype) if kind.rounds else scores


def router_backward(dscores, scores, expert, logits, shape, normalised, dtype, kind: Scores = SOFTMAX) -> torch.Tensor:
    """The gradient of a router's logits [tokens, experts], in a dtype. dscores, scores: [tokens, top-k] in the dtype of the arithmetic,
    before rounding; logits: None where they are not needed (`Scores.need_logits`)."""
    if logits is not None:
        of_all = kind.of_all(logits)
        scores, dscores = of_all.gather(1, expert), dscores * kind.factor
        if normalised:
            total = kind.sum_of(scores)
            within = (dscores * scores).sum(-1, keepdim=True) / total
            dscores = (dscores - torch.where(total > kind.least, within, 0.0)) / total
    of_scores = scores * dscores
    if kind.of == "sigmoid":
        return torch.zeros(shape, dtype=dtype, device=scores.device).scatter_(1, expert, (of_scores * (1 - scores)).to(dtype))
    total = of_scores.sum(-1, keepdim=True)
    if logits is None:
        return torch.zeros(shape, dtype=dtype, device=scores.device).scatter_(1, expert, (of_scores - scores * total).to(dtype))
    return of_all.mul_(-total).scatter_add_(1, expert, of_scores).to(dtype)
