"""Looks at modules of transformers and PyTorch: whose forward a call runs, who listens, and what a layer is made of.

A layer takes the place of one of transformers' classes whose submodules may be anything by then: LoRA, quantised, sharded, hooked. What
is exactly PyTorch's own goes to the operations; everything else is called as transformers would call it.
"""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..runtime.device import PLAIN

SAVED = "_bastile_"  # prefix of the attribute that keeps what `patching` replaced, on the class or module where it stood


OFF = SAVED + "off"  # on a causal LM whose forward accelerate wrapped while it was ours: reset() cannot take it out again


LAYER = SAVED + "layer"  # on a forward of ours: the forward itself, so a wrapper to which functools copies it is told apart


FSDP = "torch.distributed.fsdp"


def is_plain(tensor) -> bool:
    """True for an ordinary tensor or parameter, and for what torch.export puts in its place while it traces."""
    kind = type(tensor)
    return kind in PLAIN or (kind is FakeTensor and torch.compiler.is_compiling())


def all_are_listened_to() -> bool:
    """True while someone has hooks on every module of the process, as torch.utils.flop_counter has: then each must be called."""
    hooks = nn.modules.module
    return bool(
        hooks._global_forward_hooks or hooks._global_forward_pre_hooks or hooks._global_backward_hooks or hooks._global_backward_pre_hooks
    )


def own_forward(module):
    """The function that is all a call of a module runs, its class's or the one that was put on it; None while someone listens to it."""
    state = module.__dict__
    if state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]:
        return None
    forward = state.get("forward")
    return type(module).forward if forward is None else getattr(forward, "__func__", None)


def plain_weight(layer):
    """The weight of a torch.nn.Linear whose call does nothing but multiply by it, an ordinary tensor; None for all else.

    Everything is read from `__dict__`: a look-up of an attribute on a module costs 0.3 us.
    """
    if type(layer) is not nn.Linear:
        return None
    state = layer.__dict__
    parameters = state["_parameters"]
    weight = parameters.get("weight")
    listened_to = state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]
    if listened_to or "forward" in state or parameters.get("bias") is not None or not is_plain(weight):
        return None
    return weight


def sharded_weight(layer):
    """The weight of a torch.nn.Linear that FSDP2 shards as a unit of its own, with which nobody else does anything; None for all
    else. It is whole while the layer is called, and only then."""
    classes, state = type(layer).__mro__, layer.__dict__
    if len(classes) < 3 or classes[2] is not nn.Linear or not classes[1].__module__.startswith(FSDP):
        return None
    hooks = [*state["_forward_hooks"].values(), *state["_forward_pre_hooks"].values()]
    of_fsdp = all((getattr(hook, "__module__", None) or "").startswith(FSDP) for hook in hooks)
    listened_to = not of_fsdp or state["_backward_hooks"] or state["_backward_pre_hooks"]
    if listened_to or "forward" in state or layer.bias is not None or torch.compiler.is_compiling():
        return None
    return layer.weight


def call_with(function, layer, x):
    """Calls a layer, and with it the hooks on it, with another forward."""
    layer.__dict__["forward"] = function
    try:
        return layer(x)
    finally:
        del layer.__dict__["forward"]


def is_silu(activation) -> bool:
    """True for PyTorch's and transformers' SiLU modules, unless someone listens to them."""
    cls = type(activation)
    if cls is not nn.SiLU and cls.__name__ != "SiLUActivation":
        return False
    state = activation.__dict__
    return not (state["_forward_hooks"] or state["_forward_pre_hooks"])


def mark_forwards(*layers) -> None:
    """Marks the forwards of layer classes as this package's own, so that they are told from what others put on a module."""
    for layer in layers:
        setattr(layer.forward, LAYER, layer.forward)


def is_marked(function) -> bool:
    """Tells whether a function is a forward of this package; a wrapper to which functools copied the mark is not."""
    return function is not None and getattr(function, LAYER, None) is function


def original_forward(layer):
    """The `forward` that the class of a module has without us, as a function of the module."""
    cls = type(layer)
    return getattr(cls, SAVED + "forward", None) or cls.forward
