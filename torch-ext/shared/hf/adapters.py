"""Takes linear layers apart into what an operation multiplies by: PyTorch's own, PEFT's LoRA around it, and bitsandbytes' in four bits.

Only what is exactly as those libraries wrote it, with a forward that nobody replaced and to which nobody listens, and with weights that are
ordinary tensors; all else is None, and called as the module that it is. Neither library is imported here: a layer of theirs can only exist
once they are. Everything is read from `__dict__`: a look-up of an attribute on a module costs 0.3 us, and a layer has seven of them.
"""

import sys
from typing import Optional

import torch
from torch import nn

from ..ops.projection import FourBitWeight, Projection
from .modules import is_plain, own_forward, plain_weight

LORA = {"peft.tuners.lora.layer": "Linear", "peft.tuners.lora.bnb": "Linear4bit"}  # by module: the class whose sum is `Projection`'s
FOUR_BIT = ("bitsandbytes.nn.modules", "Linear4bit")
FP32 = torch.float32

_forwards: dict = {}  # of the classes above, by class: the forward that their library gave them


def _library_forward(cls, module: str, name: str):
    """The forward that a library gave a class, or None where this is not that class or somebody has replaced its forward."""
    forward = _forwards.get(cls)
    if forward is None:
        found = sys.modules.get(module)
        if found is None or getattr(found, name, None) is not cls:
            return None
        forward = vars(cls).get("forward")
        code = getattr(forward, "__code__", None)
        if code is None or getattr(forward, "__module__", None) != module or forward.__qualname__ != f"{name}.forward" or code.co_name != "forward":
            return None
        if code.co_filename != getattr(found, "__file__", None):
            return None
        _forwards[cls] = forward
    return forward


def _is_untouched(layer, module: str, name: str) -> bool:
    forward = _library_forward(type(layer), module, name)
    return forward is not None and own_forward(layer) is forward


def four_bit_weight(layer, dtype: torch.dtype) -> Optional[FourBitWeight]:
    """The weight of a layer of bitsandbytes that does nothing but multiply by it, in a dtype; None for all else."""
    if type(layer).__module__ != FOUR_BIT[0] or not _is_untouched(layer, *FOUR_BIT):
        return None
    state = layer.__dict__
    parameters = state["_parameters"]
    weight = parameters.get("weight")
    quantised = getattr(weight, "quant_state", None)
    if parameters.get("bias") is not None or quantised is None or weight.requires_grad or type(weight).__name__ != "Params4bit":
        return None
    if not state.get("compute_type_is_set") and state.get("compute_dtype") is None:
        return None  # it takes its dtype from the input of its first call
    if state.get("compute_dtype") != dtype or len(quantised.shape) != 2 or getattr(quantised, "packing_format_for_cpu", False):
        return None
    return FourBitWeight(weight, sys.modules["bitsandbytes"].functional.dequantize_4bit)


def _base(layer, dtype: torch.dtype, wider: bool):
    """The weight of a layer without adapters."""
    weight = plain_weight(layer)
    if weight is None:
        return four_bit_weight(layer, dtype)
    return weight if weight.dtype == dtype or (wider and weight.dtype == FP32) else None


def _plain_linear(layer, with_bias: bool = False):
    """(weight, bias) of a plain layer; None for all else."""
    if not with_bias or type(layer) is not nn.Linear:
        weight = plain_weight(layer)
        return None if weight is None else (weight, None)
    state = layer.__dict__
    parameters = state["_parameters"]
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if own_forward(layer) is not nn.Linear.forward or "forward" in state or not is_plain(weight) or not (bias is None or is_plain(bias)):
        return None
    return weight, bias


def projection(layer, dtype: torch.dtype, wider: bool = False) -> Optional[Projection]:
    """What a linear layer multiplies by, in products of a dtype; None where it has to be called.

    wider: whether a weight may be in fp32 where dtype is not, as under autocast.
    """
    cls = type(layer)
    if cls is nn.Linear:
        weight = plain_weight(layer)
        return None if weight is None or not (weight.dtype == dtype or (wider and weight.dtype == FP32)) else Projection(weight)
    name = LORA.get(cls.__module__)
    if name is None:
        weight = four_bit_weight(layer, dtype)
        return None if weight is None else Projection(weight)
    if cls.__name__ != name or not _is_untouched(layer, cls.__module__, name):
        return None
    state = layer.__dict__
    modules, merged, disabled = state["_modules"], state.get("merged_adapters"), state.get("_disable_adapters")
    variants, scalings = state.get("lora_variant"), state.get("scaling")
    if merged is None or disabled is None or variants is None or scalings is None or (disabled and merged):
        return None  # of another version; or to be unmerged by this call
    weight = _base(modules.get("base_layer"), dtype, wider)
    if weight is None:
        return None
    if disabled or merged:
        return Projection(weight)
    active, adapters = state.get("_active_adapter"), modules["lora_A"].__dict__["_modules"]
    if type(active) is not str:
        named = [name for name in active if name in adapters]
        if len(named) > 1:
            return None
        active = named[0] if named else None
    if active not in adapters:
        return Projection(weight)
    if active in variants:
        return None
    a = plain_weight(adapters[active])
    b = _plain_linear(modules["lora_B"].__dict__["_modules"].get(active), state["lora_bias"].get(active, False))
    probability = _dropout(modules["lora_dropout"].__dict__["_modules"].get(active))
    scaling = scalings.get(active)
    if a is None or b is None or probability is None or type(scaling) not in (float, int):
        return None
    b, bias = b
    for tensor in (a, b, bias):
        if tensor is not None and (tensor.dtype not in (dtype, FP32) or tensor.device != weight.device):
            return None
    if a.dtype != dtype and not state.get("cast_input_dtype_enabled", True):
        return None
    return Projection(weight, a, b, bias, float(scaling), probability)


def _dropout(layer) -> Optional[float]:
    """The probability with which a layer zeroes an element now; None for a layer that has to be called."""
    cls = type(layer)
    if cls is not nn.Identity and cls is not nn.Dropout or own_forward(layer) is not cls.forward or "forward" in layer.__dict__:
        return None
    if cls is nn.Identity:
        return 0.0
    state = layer.__dict__
    if not state["training"]:
        return 0.0
    probability = state["p"]
    return probability if type(probability) in (float, int) and 0 <= probability < 1 and not state["inplace"] else None
