"""Weights that one GEMM can read as one matrix: those of q, k and v, and those of gate and up, side by side in memory. The codes of
weights in eight bits lie so from the start."""

from collections import Counter
from typing import Optional

import torch

from ...ops.neighbours import lay_side_by_side, side_by_side
from ...ops.quantised import E4M3
from .eight_bit_linear import EightBitLinear
from .explanation import Reason
from .weights import held, plain_weight, why_not_plain

__all__ = ["GROUPS", "pack", "pack_groups", "why_apart"]

# The layers of a module whose outputs are computed from one input, in the order of their rows.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def pack(model):
    """Lays the weights of q, k and v, and those of gate and up, of every layer side by side in memory, and returns the model.

    The fused layers then multiply by them at once: fewer and larger GEMMs, most of all with few tokens. Parameters keep their
    names, shapes, values, gradients and optimiser state, and each has a storage of its own, so whatever saves, loads or counts a
    model's tensors finds what it would find without `pack`. Only the memory of a group is freed as one, when the last of its weights
    goes. Needs memory for a copy of one layer's weights while it runs. `eight_bits` does this to the codes that it makes.

    Call it when the model is on its device and of its dtype, before DDP, FSDP or DeepSpeed take the model. Loading a state dict keeps the
    weights together; `model.to(...)` that changes something, `share_memory()`, `load_state_dict(assign=True)` and a copy of the model lay
    them apart again, which costs speed and nothing else: call it again. Layers that are not plain `torch.nn.Linear`, alone or inside of an
    adapter of PEFT (quantised, sharded), layers or weights that two modules hold, weights that are views of a larger storage,
    and those on the meta device stay as they are. Raises TypeError when model is no module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {model!r}, expected a torch.nn.Module")
    pack_groups(model)
    return model


def pack_groups(model, codes_alone: bool = False) -> None:
    """Does what `pack` does. codes_alone: to weights in eight bits alone."""
    # Of those that hold them: a wrapper (checkpoint_wrapper, PEFT's) answers for what it stands around.
    layers = [[module._modules.get(name) for name in group] for module in model.modules() for group in GROUPS]
    held_by = Counter(id(layer) for group in layers for layer in group)
    # What more than one module holds cannot have two neighbours.
    held_by.update(id(each) for module in model.modules() for each in module._parameters.values() if each is not None)
    for group in layers:
        found = [_weight(layer) for layer in group]
        weights = [weight for weight in found if weight is not None and held_by[id(weight)] < 2]
        if len(weights) < len(group) or any(held_by[id(layer)] > 1 for layer in group) or not _alike(weights):
            continue
        in_codes = weights[0].dtype == torch.uint8
        read_as = E4M3 if in_codes else weights[0].dtype
        if (in_codes or not codes_alone) and side_by_side([weight.detach().view(read_as) for weight in weights]) is None:
            lay_side_by_side(weights, read_as)


def _weight(layer) -> Optional[torch.Tensor]:
    """The weight of a plain linear layer, or the codes of one in eight bits, alone or inside an adapter of PEFT; None for all else."""
    layer = getattr(layer, "base_layer", layer)
    if type(layer) is EightBitLinear:
        return None if why_not_plain(layer, True, EightBitLinear, "codes") else held(layer, "codes")
    return plain_weight(layer, True)


def _alike(weights) -> bool:
    """Whether one matrix can hold the weights, and each is all that its storage holds: what is a view of a larger one, as a parameter
    in a flat buffer of DeepSpeed's or FSDP1's, is written and read through that."""
    first = weights[0]
    alone = not _is_any_a_view(weights) and all(w.dim() == 2 and w.device.type != "meta" for w in weights)
    return alone and all(w.dtype == first.dtype and w.device == first.device and w.shape[1] == first.shape[1] for w in weights)


def _is_any_a_view(weights) -> bool:
    return any(weight.untyped_storage().nbytes() != weight.nbytes for weight in weights)


def why_apart(weights) -> Reason:
    """Why one GEMM cannot read weights that are not side by side."""
    if _is_any_a_view(weights):
        return Reason("views", "the weights are views of a larger buffer, and not side by side")
    return Reason("apart", "the weights are separate in memory")
