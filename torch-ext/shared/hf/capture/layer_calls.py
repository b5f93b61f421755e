"""What a call of a decoder layer is, for its replay: what stands in its way, and what has to be equal."""

from typing import Callable, Optional, Sequence

import torch

from ...runtime.device import PLAIN, is_ordinary
from ..attention.attention import documents_of
from ..attention.defaults import exchanges
from ..attention.masks import Visible
from ..family.arguments import CACHE
from ..layer.products import products_of
from ..parts.explanation import Reason
from ..parts.lookups import mode_in_force
from ..parts.modules import all_are_listened_to
from ..parts.tree import HOOKS
from ..parts.watch import SIMPLE
from .graphed_checkpoints import is_checkpointed, why_not_graphed, why_packed
from .graphed_layers import autocast_dtype

__all__ = ["check_weights", "described", "is_listened_to", "is_planned", "obstacle", "read_by_layer"]

OF_THE_LOSS = frozenset(("num_items_in_batch", "num_items", "shift_labels", "ignore_index", "labels"))  # pass through a layer unread
OF_DOCUMENTS = frozenset(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))  # what a plan of the attention says already


def check_weights(layers: Sequence[torch.nn.Module], can_record: Callable[[torch.device], bool]) -> None:
    """Raises RuntimeError or ValueError where the weights of a model's layers keep their calls from being replayed. can_record: tells
    whether a device has graphs."""
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    if not parameters or any(getattr(parameter, "_fsdp_flattened", False) for parameter in parameters):
        raise RuntimeError("the decoder layers are under FSDP, which moves their weights in each pass; a graph reads them where they were")
    devices = {parameter.device for parameter in parameters}
    if len(devices) != 1 or not can_record(*devices):
        raise ValueError(
            f"the decoder layers are on {', '.join(sorted(map(str, devices)))}, expected one CUDA device: graphs exist on GPUs only"
        )


def obstacle(layer, x, args) -> Optional[Reason]:
    """Why a layer's call in training cannot be replayed, whatever its other arguments are; None where it can."""
    if is_checkpointed(layer):
        found = why_not_graphed(layer)
        if found is not None:
            return found
    if len(args) != 1:
        return Reason("call", "a layer did not get its input, and only that, by position")
    if all_are_listened_to() or any(HOOKS(vars(layer))):
        return Reason("hooks", "there are hooks on a layer")
    mode = mode_in_force()
    if mode:
        return Reason("below", mode)
    if torch._C._len_torch_dispatch_stack():
        return Reason("below", "a TorchDispatchMode is in force, which would see none of what a graph does")
    if not is_ordinary(x):
        return Reason("tensor", "the input of a layer is not an ordinary tensor")
    return why_packed(layer)


def is_listened_to(layer) -> bool:
    """Tells whether there are hooks on a layer or in it."""
    return any(any(HOOKS(vars(module))) for module in layer.modules())


def described(layer, x, kwargs):
    """(key, tensors, reason) of a layer's arguments: what has to be equal for a replay, and the tensors that are copied for it."""
    key: list = [x.shape, x.dtype, x.device, x.requires_grad, products_of(layer)]
    key.append(autocast_dtype(x.device.type))
    tensors: list = []
    planned = is_planned(layer, kwargs)
    for name, value in read_by_layer(kwargs, planned):
        if type(value) in SIMPLE:
            key += (name, value)
            continue
        if type(value) is Visible:
            if exchanges(value.exchange, layer):
                return None, (), Reason("parallel", "DeepSpeed's Ulysses exchanges tokens for heads in each layer, which no graph records")
            if value.rule is None:
                text = "there is padding between the tokens of a row, or another mask for which the attention has no plan"
                return None, (), Reason("call", text)
            key += (name, Visible)  # another kind of pass than one without a mask, whose attention is not ours; a plan says all else
            if planned:
                plan = value.plan(x.device, *_documents(layer, value, kwargs))
                tensors += (plan.limits, plan.walks)
                key += (plan.limits.shape, plan.walks.shape, plan.window)  # by a window, products choose the keys that they read
            continue
        parts = value if type(value) is tuple else (value,)
        for part in parts:
            if type(part) not in PLAIN or part.requires_grad:
                text = f"the argument {name} of a layer is a {type(value).__name__}"
                if name == CACHE:
                    return None, (), Reason("cache", f"{text}. Call the model with use_cache=False")
                return None, (), Reason("call", text)
            tensors.append(part)
            key += (name, part.shape, part.dtype, part.device)
    if not torch.is_grad_enabled():
        key += _adapters(layer)
    return tuple(key), tensors, None


def _adapters(layer) -> list:
    """Returns the state of PEFT's switches in a layer. Reference passes run without its adapters, or with other ones, and alternate with
    passes that use them."""
    found: list = []
    for module in layer.modules():
        state = module.__dict__
        if "_disable_adapters" in state:
            found += (state["_disable_adapters"], str(state.get("_active_adapter")))
    return found


def _documents(layer, visible, kwargs):
    """What `documents_of` finds for a layer's attention."""
    return documents_of(visible, kwargs, getattr(layer._modules.get("self_attn"), "sinks", None))


def is_planned(layer, kwargs) -> bool:
    """Tells whether a plan says which tokens a layer's attention sees, as `attention_forward` decides it."""
    visible = kwargs.get("attention_mask")
    if type(visible) is not Visible or visible.rule is None:
        return False
    return not visible.is_plain() or any(found is not None for found in _documents(layer, visible, kwargs))


def read_by_layer(kwargs, planned: bool):
    """The arguments of a layer that it reads. planned: of `is_planned`."""
    return [pair for pair in kwargs.items() if not (pair[0] in OF_THE_LOSS or (planned and pair[0] in OF_DOCUMENTS))]
