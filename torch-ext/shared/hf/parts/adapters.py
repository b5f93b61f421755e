"""Takes linear layers apart into what an operation multiplies by: PyTorch's own, ours in eight bits, bitsandbytes' in four, and PEFT's LoRA
around each; and PEFT's LoRA on the parameters of experts and routers.

Only what is exactly as those libraries wrote it, with its own forward, without hooks, and with weights that are
ordinary tensors; all else is None, and called as the module that it is. Neither library is imported here: a layer of theirs can only exist
once they are. Everything is read from `__dict__`: a look-up of an attribute on a module costs 0.3 us, and a layer has seven of them.
"""

import sys
from typing import Any, Dict, Iterable, List, Optional, Union

import torch
from torch import nn

from ...decoder.projection import FourBitWeight, Projection, is_traceable
from ...ops.expert_adapters import ExpertAdapter, ExpertAdapters
from .eight_bit_linear import EightBitLinear
from .explanation import Reason
from .modules import has_class_forward, is_transformers_own, own_forward, runs_torchs
from .weights import held, plain_weight, why_not_plain

__all__ = ["expert_adapters_or_reason", "inside_wrappers", "is_untouched", "projection_or_reason", "projections", "router_weight_or_reason"]

LORA = {"peft.tuners.lora.layer": "Linear", "peft.tuners.lora.bnb": "Linear4bit"}  # by module: the class whose sum is `Projection`'s
WRAPPER = ("peft.tuners.lora.layer", "ParamWrapper")  # adds an adapter to a parameter of the module in it
EXPERTS = {"gate_up_proj": "gate_up", "down_proj": "down"}  # parameters of experts: the fields of `ExpertAdapters`
FOUR_BIT = ("bitsandbytes.nn.modules", "Linear4bit")
FP32 = torch.float32


def is_untouched(layer, module: str, name: str) -> bool:
    """Tells whether a layer is of a library's class, and a call of it runs the forward that its library wrote, and nothing else."""
    cls = type(layer)
    return (cls.__module__, cls.__name__) == (module, name) and is_transformers_own(own_forward(layer), module, f"{name}.forward")


def four_bit_weight(layer, dtype: torch.dtype) -> Optional[FourBitWeight]:
    """The weight of a layer of bitsandbytes that does nothing but multiply by it, in a dtype; None for all else."""
    if not is_untouched(layer, *FOUR_BIT):
        return None
    state = layer.__dict__
    weight = held(layer, "weight")
    quantised = getattr(weight, "quant_state", None)
    if held(layer, "bias") is not None or quantised is None or weight.requires_grad or type(weight).__name__ != "Params4bit":
        return None
    if not state.get("compute_type_is_set") and state.get("compute_dtype") is None:
        return None  # it takes its dtype from the input of its first call
    if state.get("compute_dtype") != dtype or len(quantised.shape) != 2 or getattr(quantised, "packing_format_for_cpu", False):
        return None
    return FourBitWeight(weight, sys.modules["bitsandbytes"].functional.dequantize_4bit)


def _base(layer, dtype: torch.dtype, wider: bool) -> Union[Projection, Reason]:
    """A layer without adapters, or why it has to be called."""
    if type(layer) is nn.Linear:
        reason = why_not_plain(layer, True)
        if reason is not None:
            return reason
        weight, bias = held(layer, "weight"), held(layer, "bias")
        if not (weight.dtype == dtype or (wider and weight.dtype == FP32)):
            return Reason("dtype", f"its weight is {weight.dtype} where the products are {dtype}")
        if bias is not None and bias.dtype != weight.dtype:
            return Reason("dtype", f"its bias is {bias.dtype} where the weight is {weight.dtype}")
        return Projection(weight, bias)
    if type(layer) is EightBitLinear:
        reason, bias = why_not_plain(layer, True, EightBitLinear, "codes"), held(layer, "bias")
        if reason is None and bias is not None and bias.dtype not in (dtype, FP32):
            reason = Reason("dtype", f"its bias is {bias.dtype} where the products are {dtype}")
        return reason or Projection(layer.in_codes(), bias)
    found = four_bit_weight(layer, dtype)
    return Projection(found) if found is not None else why_not_plain(layer) or Reason("called", "it is called as it is")


def projections(layers: Iterable, dtype: torch.dtype, wider: bool = False) -> Optional[List[Projection]]:
    """What linear layers multiply by, in products of a dtype; None where one of them has to be called.

    wider: whether a weight may be in fp32 where dtype is not, as under autocast.
    """
    found: list = [(_base if type(layer) is nn.Linear else projection_or_reason)(layer, dtype, wider) for layer in layers]
    for one in found:
        if type(one) is not Projection:
            return None
    return None if torch.compiler.is_compiling() and not all(map(is_traceable, found)) else found


def projection_or_reason(layer, dtype: torch.dtype, wider: bool = False) -> Union[Projection, Reason]:
    """Returns what one layer of `projections` multiplies by, or why it has to be called."""
    cls = type(layer)
    name = None if cls is nn.Linear else LORA.get(cls.__module__)
    if name is None:
        return _base(layer, dtype, wider)
    if cls.__name__ != name:
        return Reason("called", f"PEFT's {cls.__name__} is called as it is")
    active = _active(layer, name)
    if isinstance(active, Reason):
        return active
    base = _base(layer.__dict__["_modules"].get("base_layer"), dtype, wider)
    if isinstance(base, Reason):
        return base.of("below the adapter")
    if not active:
        return base
    found: Any = _adapted(base, layer, active, dtype)
    if not isinstance(found, Reason) and found.a.dtype != dtype and not layer.__dict__.get("cast_input_dtype_enabled", True):
        return Reason("adapter", "PEFT was told not to cast the adapter's input")
    return found


def _active(layer, name: str) -> Union[str, Reason]:
    """The name of the adapter that a LoRA layer of PEFT's class adds, "" for none; or why that cannot be told. name: of the class."""
    if not is_untouched(layer, type(layer).__module__, name):
        return Reason("hooks", "hooks listen to the LoRA layer, or its forward was replaced")
    state = layer.__dict__
    merged, disabled = state.get("merged_adapters"), state.get("_disable_adapters")
    if merged is None or disabled is None or state.get("lora_variant") is None or state.get("scaling") is None:
        return Reason("adapter", "this version of PEFT keeps its adapters otherwise")
    if disabled and merged:
        return Reason("adapter", "merged adapters are disabled: the next call takes them out of the weight")
    if disabled or merged:
        return ""
    active, adapters = state.get("_active_adapter"), state["_modules"]["lora_A"].__dict__["_modules"]
    named = [name for name in ([active] if type(active) is str else active) if name in adapters]
    if len(named) > 1:
        return Reason("adapters", f"{len(named)} adapters are active at once")
    return named[0] if named else ""


def _adapted(base: Projection, layer, active: str, dtype: torch.dtype) -> Union[Projection, Reason]:
    """A projection with the active adapter of a LoRA layer."""
    state, device = layer.__dict__, base.weight.device
    modules, variants = state["_modules"], state["lora_variant"]
    if active in variants:
        return Reason("variant", f"the adapter is a variant of LoRA ({type(variants[active]).__name__})")
    a = plain_weight(modules["lora_A"].__dict__["_modules"][active])
    last = modules["lora_B"].__dict__["_modules"].get(active)
    b = plain_weight(last, state["lora_bias"].get(active, False))
    probability = _dropout(modules["lora_dropout"].__dict__["_modules"].get(active))
    scaling = state["scaling"].get(active)
    if a is None or b is None:
        return Reason("adapter", "lora_A or lora_B is no plain torch.nn.Linear")
    if probability is None:
        return Reason("adapter", "the adapter's dropout is not torch.nn.Dropout")
    if type(scaling) not in (float, int):
        return Reason("adapter", f"the adapter's scaling is a {type(scaling).__name__}")
    bias = held(last, "bias")
    for tensor in (a, b, bias):
        if tensor is not None and tensor.dtype not in (dtype, FP32):
            return Reason("dtype", f"the adapter is {tensor.dtype} where the products are {dtype}")
        if tensor is not None and tensor.device != device:
            return Reason("adapter", f"the adapter is on {tensor.device}, the weight on {device}")
    return base._replace(a=a, b=b, adapter_bias=bias, scaling=float(scaling), dropout=probability)


def _is_wrapper(module) -> bool:
    return (type(module).__module__, type(module).__name__) == WRAPPER


def inside_wrappers(module):
    """The module inside those with which PEFT adapts parameters of it (`target_parameters`); any other module itself."""
    while _is_wrapper(module):
        module = module.__dict__["_modules"]["base_layer"]
    return module


def _parameter_adapters(module, dtype: torch.dtype, weight, swapped: bool) -> Union[Dict[str, Any], Reason]:
    """The adapters in force that PEFT has around a module, by the parameter that each is of, as projections; or why the module has to be
    called. weight: a parameter. swapped: whether they hold the rows of the result before the columns of the input, in more than two
    dimensions."""
    found: Dict[str, Any] = {}
    while _is_wrapper(module):
        name, active = module.__dict__.get("parameter_name"), _active(module, WRAPPER[1])
        adapter = _adapted(Projection(weight), module, active, dtype) if active and not isinstance(active, Reason) else active
        if isinstance(adapter, Reason):
            return adapter.of(f"the adapter of {name}")
        if isinstance(adapter, Projection):
            if module.__dict__.get("_did_swap_in_out_features") is not swapped:  # older ones: a and b of W's transpose
                return Reason("adapter", "this version of PEFT keeps its adapters otherwise")
            if name in found or adapter.adapter_bias is not None or adapter.dropout:
                return Reason("adapter", f"the adapter of {name} has a bias or dropout, or is one of two")
            found[name] = adapter
        module = module.__dict__["_modules"]["base_layer"]
    return found


def expert_adapters_or_reason(experts, dtype: torch.dtype, weight: torch.Tensor, transposed: bool) -> Union[ExpertAdapters, Reason]:
    """The adapters that PEFT has around a module of experts; or why it has to be called. weight, transposed: of the experts."""
    found = _parameter_adapters(experts, dtype, weight, not transposed)
    if isinstance(found, Reason):
        return found
    others = [name for name in found if name not in EXPERTS]
    if others or (found and weight.shape[0] == 1):
        return Reason("adapter", f"PEFT adds its adapter to {', '.join(others or found)} itself")
    return ExpertAdapters(**{EXPERTS[name]: ExpertAdapter(each.a, each.b, each.scaling) for name, each in found.items()})


def router_weight_or_reason(router, dtype: torch.dtype, weight: torch.Tensor) -> Union[torch.Tensor, Reason]:
    """The weight [experts, hidden] of a router with the adapter that PEFT has around it, made as PEFT makes it: a product that is small
    here. Or why the router has to be called."""
    found = _parameter_adapters(router, dtype, weight, False)
    if isinstance(found, Reason):
        return found
    if found.keys() - {"weight"}:
        return Reason("adapter", f"PEFT adds its adapter to {', '.join(found)} itself")
    for each in found.values():
        weight = weight + (each.b @ each.a * each.scaling).to(weight.dtype)
    return weight


def _dropout(layer) -> Optional[float]:
    """The probability with which a layer zeroes an element now; None for a layer that has to be called."""
    cls = type(layer)
    if cls is not nn.Identity and cls is not nn.Dropout or not runs_torchs(layer, cls) or not has_class_forward(layer):
        return None
    if cls is nn.Identity:
        return 0.0
    state = layer.__dict__
    if not state["training"]:
        return 0.0
    probability = state["p"]
    return probability if type(probability) in (float, int) and 0 <= probability < 1 and not state["inplace"] else None
