"""What a module computes with: its weights, wherever PyTorch, FSDP or DeepSpeed keep them, and why they are not plain."""

from typing import Optional

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ...ops.arguments import fail
from ...runtime.device import PLAIN
from .explanation import Reason
from .lookups import is_by, mode_in_force, replaced_below
from .modules import DEEPSPEED, FORWARDS, FSDP, has_class_forward, own_forward, runs_torchs, without_fsdp2

__all__ = [
    "bias_of", "call_with", "eps_of", "held", "is_plain", "is_torchs_embedding", "need_frozen", "plain_weight", "rows_of", "sharded_weight",
    "weight_of", "weight_within", "why_not_plain",
]  # fmt: skip

_linear = torch._C._nn.linear  # whatever stood for it before this file was read
INSIDE_FSDP1 = "_fsdp_wrapped_module"  # under this name FSDP1's wrapper holds the module inside


def is_plain(tensor) -> bool:
    """True for an ordinary tensor or parameter, and for what torch.export puts in its place while it traces."""
    kind = type(tensor)
    return kind in PLAIN or (kind is FakeTensor and torch.compiler.is_compiling())


def held(module, name: str):
    """Returns what a module computes with under the name of a parameter, or None.

    In a pass under FSDP1, and in a replica of DataParallel, that is a tensor among the module's attributes, and `_parameters` may not
    have it. As in Python's own look-up, an attribute comes first.
    """
    state = module.__dict__
    found = state.get(name)
    return state["_parameters"].get(name) if found is None else found  # under ZeRO-3, only an index gathers what is asked for


def need_frozen(name: str, weight: torch.Tensor, frozen: str = "frozen weights", numbers: str = "numbers") -> None:
    """Raises ValueError for a weight that is to be trained, or that has no numbers yet. frozen, numbers: what is expected, in words."""
    if weight.requires_grad:
        fail(name, "to be trained (requires_grad)", f"{frozen}: call model.requires_grad_(False) first, or get_peft_model")
    if weight.is_meta:
        fail(name, "on the meta device", f"{numbers}: load the model first")


def eps_of(norm) -> Optional[float]:
    """The epsilon of a norm, None for no norm."""
    if norm is None:
        return None
    state = norm.__dict__
    return state["variance_epsilon"] if "variance_epsilon" in state else state["eps"]


def weight_of(norm):
    """The weight of a norm, None for no norm."""
    return None if norm is None else held(norm, "weight")


def bias_of(norm):
    """The bias of a norm, None for no norm and for one without."""
    return None if norm is None else held(norm, "bias")


def weight_within(module) -> Optional[torch.Tensor]:
    """The first tensor that a module or one inside it holds as a parameter, or instead of one; None if there is none."""
    found = next(module.parameters(), None)
    if found is not None:
        return found
    attributes = (value for part in module.modules() for value in part.__dict__.values())
    return next((value for value in attributes if isinstance(value, torch.Tensor) and value.is_floating_point()), None)


def why_not_plain(layer, with_bias: bool = False, kind: type = nn.Linear, name: str = "weight") -> Optional[Reason]:
    """Why a call of a layer does more or other than multiply by the ordinary weight of a torch.nn.Linear; None when it does just that.
    with_bias: whether it may add an ordinary bias. kind: of the layer, torch.nn.Linear or one of ours that computes the same of a parameter
    with a name.

    Everything is read from `__dict__`: a look-up of an attribute on a module costs 0.3 us.
    """
    if type(layer) is not kind:
        return Reason("called", f"a {type(layer).__module__}.{type(layer).__name__} is called as it is")
    state = layer.__dict__
    if state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]:
        return Reason("hooks", "hooks listen to it")
    if not has_class_forward(layer):
        return Reason("replaced", f"its forward was replaced by {getattr(state['forward'], '__module__', 'an object without a module')}")
    bias, weight = held(layer, "bias"), held(layer, name)
    if bias is not None and not with_bias:
        return Reason("bias", "it has a bias")
    if bias is not None and not is_plain(bias):
        return Reason("tensor", f"its bias is a {type(bias).__name__}")
    if not is_plain(weight):
        return Reason("tensor", f"its weight is a {type(weight).__name__}")
    if nn.Linear.forward is not FORWARDS[nn.Linear]:
        return Reason("below", "torch.nn.Linear.forward was replaced")
    replaced = mode_in_force() if nn.functional.linear is _linear else replaced_below(FORWARDS[nn.Linear])
    return Reason("below", replaced) if replaced else None


def plain_weight(layer, with_bias: bool = False):
    """The weight of a torch.nn.Linear whose call does nothing but multiply by it, an ordinary tensor; None for all else. with_bias: as of
    `why_not_plain`."""
    return None if why_not_plain(layer, with_bias) else held(layer, "weight")


def sharded_weight(layer):
    """The weight of a torch.nn.Linear that FSDP or DeepSpeed's ZeRO-3 shards as a unit of its own and that has no hooks but theirs; None
    for all else. It is whole while the layer is called, and only then."""
    inner = inside_fsdp1(layer)
    if inner is not layer:
        alone = own_forward(layer) is type(layer).forward and not torch.compiler.is_compiling()
        return plain_weight(inner) if alone else None
    cls, state = type(layer), layer.__dict__
    by_fsdp = cls is not nn.Linear and without_fsdp2(cls) is nn.Linear
    hooks = [*state["_forward_hooks"].values(), *state["_forward_pre_hooks"].values()]
    owner = FSDP if by_fsdp else DEEPSPEED if cls is nn.Linear and hooks else None
    if owner is None or not all(is_by(owner, hook) for hook in hooks):
        return None
    listened_to = state["_backward_hooks"] or state["_backward_pre_hooks"]
    if listened_to or "forward" in state or held(layer, "bias") is not None or torch.compiler.is_compiling():
        return None
    return held(layer, "weight")


def inside_fsdp1(module):
    """Returns the module inside FSDP1's wrapper; any other module itself."""
    inner = module.__dict__["_modules"].get(INSIDE_FSDP1)
    return module if inner is None or not is_by(FSDP, type(module)) else inner


def rows_of(layer, weight) -> int:
    """Counts the rows of a linear layer's weight, also of one of which ZeRO-3 or FSDP1 keeps only this process's part here."""
    shape = getattr(weight, "ds_shape", weight.shape)
    return shape[0] if len(shape) == 2 else inside_fsdp1(layer).out_features


def call_with(function, layer, x):
    """Calls a layer, and with it the hooks on it and FSDP1's wrapper around it, with another forward."""
    state = inside_fsdp1(layer).__dict__
    state["forward"] = function
    try:
        return layer(x)
    finally:
        del state["forward"]


def is_torchs_embedding(embedding) -> bool:
    """True for a torch.nn.Embedding whose call does nothing but look rows up in an ordinary weight, with a dense gradient."""
    if type(embedding) is not nn.Embedding or not runs_torchs(embedding, nn.Embedding):
        return False
    return embedding.max_norm is None and not embedding.sparse and is_plain(held(embedding, "weight"))
