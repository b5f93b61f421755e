"""Says of a model what runs fused, and of the rest why it does not and what to do. The reasons are those of the functions that decide."""

from collections import Counter
from typing import Callable, List, Tuple

import torch

from ..ops.common import side_by_side
from ..runtime.device import why_no_kernels
from . import trl
from .capture import captured_passes
from .causal_lm import why_head_is_not_plain, why_logits_are_wanted, why_loss_is_not_standard
from .explanation import Explanation, explanation_of
from .modules import is_marked, plain_weight
from .packing import GROUPS
from .wrapped import inside

# By a part of a reason: what to do about it. The first that is found counts.
ADVICE = (
    ("TRL's own function", "call apply() or kernelize(model) with log_probs=True"),
    ("the head is", "load the head as plain floating point weights, or accept that TRL's trainers compute with it themselves"),
    ("not on a GPU", "move the model to a CUDA device"),
    ("transformers' own forward", "call apply(), or kernelize(model)"),
    ("ZeRO-3", "make whole decoder layers its unit: deepspeed.utils.set_z3_leaf_modules(model, [type(model.model.layers[0])])"),
    ("hooks", "remove the hooks, or accept that these parts are called one by one"),
    ("gradient checkpointing", "captured layers need gradient checkpointing switched off"),
    ("use_cache=False", "set model.config.use_cache = False for training"),
    ("it has a bias", "nothing: a linear layer with a bias is called as it is"),
    ("adapters are active at once", "activate one adapter, or merge the others"),
    ("variant of LoRA", "plain LoRA (no DoRA) is fused"),
    ("autocast to", "train in the dtype of the weights, or in float32 weights under autocast"),
    ("products are", "load the model in one dtype"),
    ("where the weight is", "load the model in one dtype"),
    ("skip_logits", "leave skip_logits out of the options of the loss"),
    ("loss_function", "leave model.loss_function as it is, or pass the options of the loss to apply()"),
    ("separate in memory", "call pack(model)"),
    ("forward was replaced", "call apply() or kernelize() before accelerate, TRL or others wrap the model"),
    ("a forward that someone else gave it", "call apply() or kernelize() before accelerate, TRL or others wrap the model"),
    ("is called as it is", "nothing: what lies around it is fused"),
)


def _runs_ours(module) -> bool:
    return is_marked(inside(getattr(module.forward, "__func__", None)))


def _why_apart(layer) -> List[Tuple[str, str]]:
    """[(group of weights, "" or why one GEMM cannot read it as one matrix)] of a layer whose groups are plain."""
    found = []
    for group in GROUPS:
        owner = next((module for module in layer.modules() if all(hasattr(module, name) for name in group)), None)
        weights = [plain_weight(getattr(owner, name, None), True) for name in group] if owner is not None else [None]
        plain = [weight for weight in weights if weight is not None]
        if len(plain) == len(weights):
            together = side_by_side(plain) is not None
            found.append((f"{', '.join(group)} as one GEMM", "" if together else "the weights are separate in memory"))
    return found


def explain(model, layers: List[Tuple[torch.nn.Module, Callable]], causal_lms: List[torch.nn.Module]) -> Explanation:
    """Makes the table of `explain` of a package. layers: each with its function of a layer and an input that returns
    [(part, "" or why it is not fused)]."""
    found: Counter = Counter()
    for causal_lm in causal_lms:
        reason = "transformers' own forward"
        if _runs_ours(causal_lm):
            reason = why_loss_is_not_standard(causal_lm) or why_logits_are_wanted(causal_lm) or why_head_is_not_plain(causal_lm)
        found["loss without logits", reason] += 1
    for layer, explain_layer in layers:
        if not _runs_ours(layer):
            found["decoder layer", "transformers' own forward"] += 1
            continue
        weight = next(layer.parameters())
        norm = next((p for name, p in layer.named_parameters() if "norm" in name), weight)
        x = torch.empty((1, 1, norm.shape[-1]), dtype=norm.dtype, device=norm.device)
        for pair in (*explain_layer(layer, x), *_why_apart(layer)):
            found[pair] += 1
    reason_of_trl = trl.why_not(model)
    if reason_of_trl is not None:
        found[trl.PART, reason_of_trl] += 1
    devices = sorted({str(parameter.device) for layer, _ in layers for parameter in layer.parameters()})
    for device in devices:
        reason = why_no_kernels(torch.device(device))
        found[f"kernels on {device}", reason] += 1
    passes, reasons = captured_passes(layers[0][0])
    for shape, recorded in passes:
        found[f"captured [{shape[0]}, {shape[1]}]",
              "" if recorded else "; ".join(reasons) or "no training pass of this shape was seen twice"] += len(layers)
    return explanation_of(found, ADVICE)
