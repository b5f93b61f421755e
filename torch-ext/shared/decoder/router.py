"""The router of a mixture of experts: which experts each token goes to, with which scores, and the gradient of its logits."""

from typing import NamedTuple, Optional, Tuple

import torch

from ..ops.common import accumulation_dtype


class Router(NamedTuple):
    """weight: [experts, hidden]; bias: [experts] or None. top_k: experts a token goes to. normalised: whether their probabilities are
    divided by their sum. by_logits: whether they are chosen by their logits, which need no softmax over all then; with `normalised`."""

    weight: torch.Tensor
    top_k: int
    normalised: bool
    bias: Optional[torch.Tensor] = None
    by_logits: bool = False


def choose_experts(logits: torch.Tensor, top_k: int, normalised: bool, by_logits: bool = False) -> Tuple[torch.Tensor, torch.Tensor]:
    """(scores, expert), [tokens, top-k] each, of a router's logits [tokens, experts]; scores are in the dtype of the arithmetic, and as
    exact as they would be in that of the logits."""
    precise = accumulation_dtype(logits.dtype)
    if by_logits:
        chosen, expert = torch.topk(logits, top_k, -1)
        return torch.softmax(chosen, -1, dtype=precise), expert
    scores, expert = torch.topk(torch.softmax(logits, -1, dtype=precise), top_k, -1)
    if normalised:
        scores = scores / scores.sum(-1, keepdim=True)
    return scores, expert


def rounded(scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scores with the exactness that the model gives them, in the dtype that they are in."""
    return scores.to(dtype).to(scores.dtype)


def router_backward(dscores, scores, expert, logits, shape, normalised, dtype) -> torch.Tensor:
    """The gradient of a router's logits [tokens, experts], in a dtype. dscores, scores: [tokens, top-k] in the dtype of the arithmetic,
    before rounding; logits: None where the router is `normalised`, whose scores are the softmax over the chosen experts alone."""
    of_scores = scores * dscores
    total = of_scores.sum(-1, keepdim=True)
    if normalised:
        return torch.zeros(shape, dtype=dtype, device=scores.device).scatter_(1, expert, (of_scores - scores * total).to(dtype))
    dlogits = torch.softmax(logits, -1, dtype=scores.dtype).mul_(-total)
    return dlogits.scatter_add_(1, expert, of_scores).to(dtype)
