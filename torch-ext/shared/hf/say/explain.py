"""Says of a model what runs fused, and of the rest why it does not and what to do. The reasons are those of the functions that decide."""

from collections import Counter
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple

import torch

from ...ops.neighbours import side_by_side
from ..attention.attention_choice import name_that_is_kept, runs_between_exchanges, why_no_kernel
from ..capture.capture import captured_passes, captured_sizes
from ..capture.when_told import why_not_captured
from ..family import ownership
from ..layer.eight_bit_weights import explain_weights
from ..layer.four_bit_weights import explain_experts
from ..layer.offload import explain_offload
from ..model import trl
from ..model.causal_lm import why_logits_are_made
from ..model.logits_flow import Flow
from ..model.losses import INSIDE, Read
from ..parts.explanation import MIXERS, Explanation, Reason, explanation_of, losses_of_others, no_kernels
from ..parts.host_embedding import explain_embeddings
from ..parts.packing import GROUPS, why_apart
from ..parts.weights import plain_weight, weight_within

__all__ = ["explain", "explain_losses"]

UNPATCHED = Reason("unpatched", "transformers' own forward")


def _why_not_ours(module, known: Optional[Reason]) -> Reason:
    """Why a call of a module does not come to a forward of ours. known: a reason that is known already."""
    owner = ownership.other_owner(module)
    if known is not None or not owner:
        return known or UNPATCHED
    if owner == trl.USER:
        return Reason("trl_head", "TRL's head is around transformers' own forward")
    return Reason("replaced", f"{owner} gave {type(module).__name__} a forward")


def _why_apart(layer, rows) -> List[Tuple[str, Optional[Reason]]]:
    """[(group of weights, None or why one GEMM cannot read it as one matrix)] of a layer whose groups are plain. rows: what was said of the
    layer: the projections of a mixer that is called are its own."""
    found = []
    for group in GROUPS[1:] if any(part in MIXERS.values() for part, _ in rows) else GROUPS:
        owner = next((module for module in layer.modules() if all(hasattr(module, name) for name in group)), None)
        weights = [plain_weight(getattr(owner, name, None), True) for name in group] if owner is not None else [None]
        plain = [weight for weight in weights if weight is not None]
        if len(plain) == len(weights) and {weight.dim() for weight in plain} == {2}:  # FSDP1 keeps shards of one dimension
            found.append((f"{', '.join(group)} as one GEMM", None if side_by_side(plain) is not None else why_apart(plain)))
    return found


def explain_losses(found: Counter, model, known: Sequence[torch.nn.Module], losses: Read, left: Optional[Reason] = None) -> None:
    """Counts the causal LMs of a model by why their losses come with logits. known: those that a row is for; losses: those whose forwards
    were read; left: why the loss of the first is transformers' own. What another causal LM holds has its loss there, unless that gives it
    labels."""
    givers = [module for module, flow in losses.items() if isinstance(flow, Reason) and flow.code == INSIDE]
    losses = {module: flow for module, flow in losses.items() if module not in givers}
    others = losses_of_others(model, [*known, *(module for module, flow in losses.items() if isinstance(flow, Flow))])
    others = {module: text for module, text in others.items() if not any(module in giver.modules() for giver in givers)}
    held = {part for module in losses for part in module.modules() if part is not module}
    for causal_lm in dict.fromkeys([*known, *losses, *others]):
        flow: Any = losses.get(causal_lm)
        if causal_lm in held:
            continue
        if isinstance(flow, Reason):
            reason: Optional[Reason] = flow
        elif causal_lm in others:
            reason = Reason("class", others[causal_lm])
        elif ownership.runs_ours(causal_lm):
            reason = why_logits_are_made(causal_lm)
        else:
            reason = _why_not_ours(causal_lm, None if flow else left)
        found[LOSS, reason] += 1


LOSS = "loss without logits"
OPERATION_OF = {"decoder layer": "decoder_layer", LOSS: "fused_linear_cross_entropy"}


def explain(model, layers: List[Tuple[torch.nn.Module, Callable]], causal_lms: List[torch.nn.Module],
            left: Mapping[str, Tuple[Reason, int]], losses: Read) -> Explanation:
    """Makes the table of `explain` of a package. layers: each with its function of a layer and an input that returns
    [(part, None or why it is not fused)]. left: operations that stay transformers' own, with the reason and the number of layers. losses:
    as of `explain_losses`."""
    unknown = {part: left[name][0] for part, name in OPERATION_OF.items() if name in left}
    found: Counter = Counter()
    explain_losses(found, model, causal_lms, losses, unknown.get(LOSS))
    for layer, explain_layer in layers:
        found.update((*explain_weights(layer), *explain_experts(layer)))
        if not ownership.runs_ours(layer):
            found["decoder layer", _why_not_ours(layer, unknown.get("decoder layer"))] += 1
            continue
        norms = (weight_within(module) for name, module in layer.named_modules() if "norm" in name)
        norm: Any = next((weight for weight in norms if weight is not None), weight_within(layer))
        x = torch.empty((1, 1, norm.shape[-1]), dtype=norm.dtype, device=norm.device)
        rows = explain_layer(layer, x)
        found.update((*rows, *_why_apart(layer, rows), *explain_offload(layer)))
    found.update(explain_embeddings(model))
    for name in filter(None, (name_that_is_kept(module) for module in model.modules())):
        found["attention", Reason("named", f"attn_implementation={name!r} was asked for by name")] += 1
    found.update(("attention", why) for why in map(why_no_kernel, model.modules()) if why is not None)
    spread = sum(map(runs_between_exchanges, model.modules()))
    if spread:
        found["attention, between the exchanges of DeepSpeed's Ulysses", None] += spread
    if trl.is_imported():
        found[trl.PART, trl.why_not(model)] += 1
    for operation, (why, count) in left.items():
        if operation not in OPERATION_OF.values():
            found[operation, why] += count
    weights: List[Any] = [weight_within(layer) for layer, _ in layers]
    weights += [weight for layer, _ in layers for weight in layer.parameters()]
    devices = sorted({str(weight.device) for weight in weights})
    for device in devices:
        found[f"kernels on {device}", no_kernels(torch.device(device))] += 1
    uncaptured = why_not_captured(layers[0][0])
    if uncaptured is not None:
        found["captured", uncaptured] += len(layers)
    passes, reasons = captured_passes(layers[0][0])
    for shape, recorded in passes:
        reason = None
        if not recorded:
            first = reasons[0] if reasons else Reason("unrecorded", "no training pass of this shape was seen twice")
            reason = first._replace(text="; ".join(each.text for each in reasons) or first.text)
        found[f"captured [{shape[0]}, {shape[1]}]", reason] += len(layers)
    sizes = captured_sizes(layers[0][0])
    if sizes is not None:
        said = f"captured: {sizes.sizes} of {sizes.seen} sizes, {sizes.share:.0%} of the passes, {sizes.nbytes / 2**30:.1f} GiB"
        unrecorded = Reason("unrecorded", "no training pass of a size came again")
        found[said, None if sizes.sizes else reasons[0] if reasons else unrecorded] += len(layers)
        for reason in reasons if sizes.sizes else ():
            found["captured: other passes", reason] += len(layers)
    return explanation_of(found)
