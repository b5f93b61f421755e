"""Computes log-probabilities and more of a linear head one chunk of logits at a time, with the gradients that are asked for; for
`linear_log_probs`, whose autograd functions call `called` and `run`."""

from typing import List, NamedTuple, Optional, Sequence, Tuple, Type

import torch

from ..runtime.device import kernels_run_on
from .arrays import accumulation_dtype
from .linear_head import HeadGradients, carry_to_hidden, walk
from .log_prob_columns import Columns
from .log_probs import OUTPUTS, Piece, ScoreOptions, TokenLogProbs, Upstream, piece_of
from .operators import traceable

__all__ = ["Kept", "LogProbOptions", "called", "run"]


class LogProbOptions(NamedTuple):
    """Options of the computation. entropy_early: whether the forward pass over a frozen head makes the gradient of the entropies.
    recompute: whether the backward pass over a trained head makes logits again."""

    scores: ScoreOptions
    outputs: Tuple[str, ...]
    ignore_index: int = -100
    accum_dtype: Optional[torch.dtype] = None
    entropy_early: bool = False
    recompute: bool = True


class Kept(NamedTuple):
    """The logits of all chunks, which a backward pass writes their gradient over, empty once it has, and what `piece_of` chose for them."""

    logits: List[torch.Tensor]
    choice: Tuple[Type[Piece], float]


class _Part:
    """A chunk, as `walk` asks for it. keep: called with the piece when it knows its rows, before their gradient replaces the logits."""

    def __init__(self, piece, upstream: Upstream, carry_entropy, keep=None):
        self.piece, self.upstream, self.carry_entropy, self.keep = piece, upstream, carry_entropy, keep

    def rows(self):
        found = self.piece.rows()
        if self.keep is not None:
            self.keep(self.piece)
        return found

    def gradient(self, _):
        other = None if self.carry_entropy is None else torch.empty_like(self.piece.logits)
        factor, other_factor = self.piece.write_gradient(self.upstream, other)
        if other is not None:
            self.carry_entropy(other, other_factor)
        return factor


class FoundLogProbs(NamedTuple):
    """Results, gradients, and b with what it is still to be multiplied by."""

    rows: TokenLogProbs
    gradients: HeadGradients
    of_entropy: Optional[torch.Tensor] = None
    entropy_factor: Optional[torch.Tensor] = None
    kept: Optional[Kept] = None


def run(
    hidden, weight, bias, target, upstream: Upstream, options: LogProbOptions, needs, entropy_too=False, keep=False,
    kept: Optional[Kept] = None, columns: Optional[Columns] = None,
) -> FoundLogProbs:  # fmt: skip
    """The results of every token, and the gradients of sum(upstream * results) that `needs` asks for (hidden, weight, bias); entropy_too:
    and that of the sum of the entropies by hidden. keep: instead of gradients, the logits from which a call with `kept` makes them.
    columns: of the logits, which are put into it."""
    tokens, acc, parameter_dtype = hidden.shape[0], accumulation_dtype(hidden.dtype), weight.dtype
    weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    kernels = hidden.dtype != torch.float64 and weight.shape[0] > 0 and kernels_run_on(hidden, weight, bias, target, *upstream)
    kinds = {"is_top1": torch.bool}
    new = {"device": hidden.device}
    found = TokenLogProbs(*(torch.empty(tokens, dtype=kinds.get(n, acc), **new) if n in options.outputs else None for n in OUTPUTS))
    needs_entropy = any(needs) and (entropy_too or upstream.entropy is not None)
    outputs = (*options.outputs, "entropy") if needs_entropy and "entropy" not in options.outputs else options.outputs
    piece, factor = choice = piece_of(kernels, options.scores, outputs, upstream) if kept is None else kept.choice
    of_entropy = torch.empty_like(hidden) if entropy_too else None
    entropy_factor = torch.ones((tokens, 1), dtype=acc, **new) if entropy_too and hidden.dtype == torch.float16 else None

    def loss_of(logits, rows, _):
        part = piece(logits, target[rows], options.scores, outputs, options.ignore_index)
        if of_entropy is None:
            return _Part(part, upstream.at(rows), None, columns and (lambda part: columns.keep(rows, part.logits, part.lse)))
        to, to_factor = of_entropy[rows], None if entropy_factor is None else entropy_factor[rows]
        return _Part(part, upstream.at(rows), lambda gradient, factor: carry_to_hidden(gradient, weight, factor, to, to_factor))

    unit, accum_dtype = torch.ones(1, dtype=acc, **new), options.accum_dtype
    if accum_dtype is None and parameter_dtype == torch.float32:  # which the sum becomes anyhow
        accum_dtype = acc
    logits: Optional[List[torch.Tensor]] = [] if keep else (kept and kept.logits) or None
    scale, count = None if keep else unit, 2 if entropy_too else 1
    gradients = walk(
        hidden, weight, bias, loss_of, found, scale, needs, accum_dtype, count, parameter_dtype, factor=factor, logits_kept=logits
    )
    return FoundLogProbs(found, gradients, of_entropy, entropy_factor, Kept(logits, choice) if keep and logits else None)


# ---------------------------------------------------------------- for tracers
# One operator, whose results are a list without gaps: a tracer sees no chunks. What is absent is empty.
def _run_whole(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    target: torch.Tensor,
    log_probs: Optional[torch.Tensor],
    entropy: Optional[torch.Tensor],
    mean_logits: Optional[torch.Tensor],
    needs: List[bool],
    numbers: List[float],
    wanted: List[bool],
    ignore_index: int,
    accum_dtype: Optional[torch.dtype],
    entropy_too: bool,
) -> List[torch.Tensor]:
    """`run`: five results, three gradients with their factors, and b with its factor; what is absent is empty."""
    options = LogProbOptions(ScoreOptions(*numbers), _names(wanted), ignore_index, accum_dtype)
    found = run(hidden, weight, bias, target, Upstream(log_probs, entropy, mean_logits), options, tuple(needs), entropy_too)
    return _listed(found, hidden, needs)


def _listed(found: FoundLogProbs, hidden, needs: Sequence[bool]) -> List[torch.Tensor]:
    results = *found.rows, *found.gradients[:3], *found.gradients.factors, found.of_entropy, found.entropy_factor
    present = needs[0], needs[1], needs[2]
    factors = [factor if need else None for factor, need in zip(results[8:11], present)]
    return [hidden.new_empty(0) if t is None else t for t in (*results[:8], *factors, *results[11:])]


def _names(wanted: Sequence[bool]) -> Tuple[str, ...]:
    return tuple(name for name, asked in zip(OUTPUTS, wanted) if asked)


def _fake_run(
    hidden, weight, bias, target, log_probs, entropy, mean_logits, needs, numbers, wanted, ignore_index, accum_dtype, entropy_too
):  # fmt: skip
    tokens, acc, fp16 = hidden.shape[0], accumulation_dtype(hidden.dtype), hidden.dtype == torch.float16 and hidden.shape[0] > 0

    def new(present, shape, dtype):
        return hidden.new_empty(shape if present else 0, dtype=dtype if present else hidden.dtype)

    parameters_fp16 = fp16 and weight.dtype != torch.float32
    return [
        *(new(asked, (tokens,), torch.bool if name == "is_top1" else acc) for name, asked in zip(OUTPUTS, wanted)),
        new(needs[0], hidden.shape, hidden.dtype),
        new(needs[1], weight.shape, weight.dtype),
        new(needs[2], (weight.shape[0],), weight.dtype),
        new(fp16 and needs[0], (tokens, 1), acc),
        new(parameters_fp16 and needs[1], (), acc),
        new(parameters_fp16 and needs[2], (), acc),
        new(entropy_too, hidden.shape, hidden.dtype),
        new(fp16 and entropy_too, (tokens, 1), acc),
    ]


_traced_run = traceable("linear_log_probs_run", _run_whole, _fake_run, computes=True)


def called(
    hidden, weight, bias, target, upstream: Upstream, options: LogProbOptions, needs, entropy_too=False, keep=False,
    kept: Optional[Kept] = None, columns: Optional[Columns] = None,
) -> Tuple[List[torch.Tensor], Optional[Kept]]:  # fmt: skip
    """Returns the list of `_run_whole`, and the logits that are kept, of which a tracer sees none."""
    if not torch.compiler.is_compiling():
        found = run(hidden, weight, bias, target, upstream, options, needs, entropy_too, keep, kept, columns)
        return _listed(found, hidden, needs), found.kept
    wanted = [name in options.outputs for name in OUTPUTS]
    rest = list(options.scores), wanted, options.ignore_index, options.accum_dtype, entropy_too
    return list(_traced_run(hidden, weight, bias, target, *upstream, list(needs), *rest)), None
