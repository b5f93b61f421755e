"""Frozen weights of experts that are kept in four bits: as parametrizations of PyTorch, which PEFT adapts and DDP and FSDP2 take.

| of a module of experts        | what it is                                                                                            |
|-------------------------------|-------------------------------------------------------------------------------------------------------|
| `parametrizations.NAME.original` | codes, as a parameter of bytes, which no cast of a model changes, and which gets no gradient       |
| `parametrizations.NAME[0]`    | what turns them into numbers (`Mxfp4`, `Nf4`)                                                          |
| the property `NAME`           | the numbers, made anew each time it is read, and not to be written to                                   |
| in a state dict               | MXFP4: `NAME_blocks` and `NAME_scales`, as GPT-OSS was released; NF4: as bitsandbytes saves parameters |
"""

import importlib
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple, Type

import torch
from torch import nn
from torch.nn.utils import parametrize

from ...ops.four_bits import WHOLE, CodedExperts, blocks_of, dense_of_blocks
from .eight_bit_linear import ReadOnly, why_not_finite
from .weights import is_plain

__all__ = [
    "KINDS", "Mxfp4", "Nf4", "Parametrizations", "give_back", "held_in", "is_of_bitsandbytes", "take", "take_from_bitsandbytes",
    "weight_or_codes",
]  # fmt: skip

OF_BITSANDBYTES = "bitsandbytes.nn.parametrize", "Bnb4bitParametrization"
LISTS, NAMES = "parametrizations", "_names_in_state_dicts"


def _functional() -> Any:
    """bitsandbytes' functions. Raises ImportError where it is not installed."""
    return importlib.import_module("bitsandbytes").functional


class FourBits(nn.Module):
    """Turns the codes of one weight into its numbers."""

    kind: str  # for people
    suffix: str  # of its codes' name in a state dict
    in_parts: bool  # of `CodedExperts`
    shape: torch.Size  # of the weight
    dense_dtype: torch.dtype  # of its numbers

    def __init__(self, shape: torch.Size, dtype: torch.dtype):
        super().__init__()
        self.shape, self.dense_dtype = shape, dtype

    @classmethod
    def made(cls, weight: torch.Tensor, transposed: bool) -> Tuple["FourBits", torch.Tensor]:
        """(one of these, codes) of a weight. transposed: whether products add up over its rows."""
        raise NotImplementedError

    def numbers(self, codes: torch.Tensor, dim: int = 2, part: slice = WHOLE) -> torch.Tensor:
        """Makes the weight, or a part of its rows (1) or columns (2)."""
        raise NotImplementedError

    def beside(self) -> Dict[str, torch.Tensor]:
        """Returns the tensors kept beside the codes, by the suffix of the weight's name in a state dict."""
        raise NotImplementedError

    def nbytes(self) -> int:
        """Bytes beside the codes."""
        return sum(tensor.nbytes for tensor in self.beside().values())

    def why_not_loaded(self, state: Dict[str, Any], name: str) -> str:
        """Why what a state dict has of a weight is not taken, "" where it is."""
        weight = state.get(name)
        return why_not_finite(weight) if weight is not None and weight.is_floating_point() else ""

    def load(self, state: Dict[str, Any], name: str) -> Dict[str, Any]:
        """Takes what a state dict has of a weight out of it: numbers, which are rounded, or codes. Returns what the parametrization loads
        of it, by its own names."""
        raise NotImplementedError

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        found = self.numbers(codes)
        return found.as_subclass(ReadOnly) if is_plain(found) else found

    def _apply(self, fn, recurse=True):
        device = next(iter(self.beside().values())).device
        self.dense_dtype = fn(torch.empty((0,), dtype=self.dense_dtype, device=device)).dtype
        return super()._apply(fn, recurse)


class Mxfp4(FourBits):
    """codes: [experts, rows, columns / 32, 16] uint8, of the weight with its input's numbers last; scales: without the last length."""

    kind, suffix, in_parts = "MXFP4", "_blocks", True

    def __init__(self, shape: torch.Size, dtype: torch.dtype, scales: torch.Tensor, transposed: bool):
        super().__init__(shape, dtype)
        self.scales, self.transposed = nn.Parameter(scales, requires_grad=False), transposed

    @classmethod
    def made(cls, weight, transposed):
        blocks, scales = blocks_of(weight.transpose(1, 2) if transposed else weight)
        return cls(weight.shape, weight.dtype, scales, transposed), blocks

    def numbers(self, codes, dim=2, part=WHOLE):
        found = dense_of_blocks(codes, self.scales, self.dense_dtype, 3 - dim if self.transposed else dim, part)
        return found.transpose(1, 2) if self.transposed else found

    def beside(self):
        return {"_scales": self.scales.detach()}

    def load(self, state, name):
        weight, blocks, scales = state.pop(name, None), state.pop(f"{name}_blocks", None), state.pop(f"{name}_scales", None)
        if weight is not None:
            made, blocks = self.made(weight, self.transposed)
            scales = made.scales
        return {"original": blocks, "0.scales": scales}


class Nf4(FourBits):
    """codes: [numbers / 2, 1] uint8, as bitsandbytes packs them; state: its QuantState."""

    kind, suffix, in_parts = "NF4", "", False

    def __init__(self, state):
        super().__init__(torch.Size(state.shape), state.dtype)
        self.state = state

    @classmethod
    def made(cls, weight, transposed=False):
        codes, state = _functional().quantize_4bit(weight.contiguous(), compress_statistics=True, quant_type="nf4")
        return cls(state), codes

    def numbers(self, codes, dim=2, part=WHOLE):
        if codes.is_meta:
            return torch.empty(self.shape, dtype=self.dense_dtype, device=codes.device)
        found = _functional().dequantize_4bit(codes.detach(), self.state)
        return found[(WHOLE,) * dim + (part,)]

    def beside(self):
        return {f".{name}": tensor for name, tensor in self.state.as_dict(packed=True).items()}

    def why_not_loaded(self, state, name):
        weight = state.get(name)
        if weight is None or weight.is_floating_point() or any(key.startswith(f"{name}.") for key in state):
            return super().why_not_loaded(state, name)
        return f"is {weight.dtype} without its scales, such as {name}.absmax"

    def load(self, state, name):
        codes = state.pop(name, None)
        parts = {key[len(name) + 1 :]: state.pop(key) for key in list(state) if key.startswith(f"{name}.")}
        absmax = self.state.absmax
        device = codes.device if absmax.is_meta and codes is not None else absmax.device  # `assign` takes codes where they are
        if codes is not None and codes.is_floating_point():
            made, codes = self.made(codes.to(device))
            self.state = made.state
        elif parts:
            self.state = _functional().QuantState.from_dict(parts, device=device)
        self.state.dtype = self.dense_dtype  # the model's, which a cast may have changed since the codes were saved
        return {"original": codes}

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.state.to(fn(torch.empty((0,), dtype=torch.uint8, device=self.state.absmax.device)).device)
        self.state.dtype = self.dense_dtype
        return self


class Parametrizations(parametrize.ParametrizationList):
    """The list in front of whose numbers PEFT puts its adapters, in its own forward."""

    def append(self, module: nn.Module):
        """Mends what PEFT 0.21 gets wrong with parametrized weights. It takes away again only what is of one class, of which its faster
        form is not, so adapters would add up; and within the adapter of one weight it reads the other, which is then kept without its
        adapter."""
        of_peft = getattr(sys.modules.get(type(module).__module__), "_LoraParameterProxy", None)
        if of_peft is not None and not isinstance(module, of_peft):
            module.__class__ = type(type(module).__name__, (type(module), of_peft), {})
        parametrize._cache.clear()
        return super().append(module)


KINDS: Dict[str, Type[FourBits]] = {"mxfp4": Mxfp4, "nf4": Nf4}


class Held(NamedTuple):
    """A weight in four bits: its attribute, its codes and what turns them into numbers."""

    name: str
    codes: torch.Tensor
    made: FourBits


def held_in(module: nn.Module) -> Iterator[Held]:
    """The weights that a module has in four bits, without what else stands in front of their numbers (PEFT, in its own forward)."""
    lists: Any = module._modules.get(LISTS)
    for name, each in () if lists is None else lists._modules.items():
        if isinstance(each[0], FourBits) and len(each) == 1:
            yield Held(name, each.original, each[0])


def weight_or_codes(module: nn.Module, name: str) -> Any:
    """The weight of a module of experts: in four bits as `CodedExperts`, else as the tensor that it is."""
    for each in held_in(module) if LISTS in module._modules else ():
        if each.name == name and is_plain(each.codes):
            made = each.made
            return CodedExperts(partial(made.numbers, each.codes), made.shape, made.dense_dtype, each.codes.device, made.in_parts)
    return getattr(module, name)


def take(module: nn.Module, name: str, made: FourBits, codes: torch.Tensor) -> None:
    """Replaces a weight of a module by its codes, which frees it."""
    del module._parameters[name]
    module.register_parameter(name, nn.Parameter(codes, requires_grad=False))
    parametrize.register_parametrization(module, name, made, unsafe=True)
    _listen(module)


def _keys_of(module: nn.Module) -> List[str]:
    """The keys that a state dict has of weights in four bits."""
    return [f"{name}{suffix}" for name, _, made in held_in(module) for suffix in (made.suffix, *made.beside())]


def _names_of(module: nn.Module) -> SimpleNamespace:
    """An object of which each key leads to an attribute, name by name."""
    found = SimpleNamespace()
    for key in _keys_of(module):
        part = found
        for name in key.split("."):
            part = vars(part).setdefault(name, SimpleNamespace())
    return found


def _listen(module: nn.Module) -> None:
    # torch.distributed.checkpoint looks for each key of a state dict as an attribute, in the order of its names; these it finds there.
    module.__class__._fqn_modifiers = lambda self: {key.partition(".")[0]: NAMES for key in _keys_of(self)}  # type: ignore[attr-defined]
    setattr(module.__class__, NAMES, property(_names_of))
    for name, *_ in held_in(module):
        module._modules[LISTS]._modules[name].__class__ = Parametrizations  # type: ignore[union-attr]
    if _save not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_save)
        module.register_load_state_dict_pre_hook(_load)


def take_from_bitsandbytes(module: nn.Module, name: str) -> None:
    """Takes a weight as bitsandbytes keeps parameters, as it is: its hooks, which keep numbers while the module runs, are removed."""
    found: Any = module._modules[LISTS]._modules[name]  # type: ignore[union-attr]
    found[0] = Nf4(found[0].quant_state)
    for hooks in (module._forward_hooks, module._forward_pre_hooks, module._state_dict_hooks):
        for key, hook in list(hooks.items()):
            if getattr(getattr(hook, "func", hook), "__module__", None) == OF_BITSANDBYTES[0]:
                del hooks[key]
    _listen(module)


def is_of_bitsandbytes(module: nn.Module, name: str) -> bool:
    """Whether bitsandbytes keeps a weight of a module in four bits."""
    lists = module._modules.get(LISTS)
    found: Any = None if lists is None else lists._modules.get(name)
    return found is not None and len(found) == 1 and (type(found[0]).__module__, type(found[0]).__name__) == OF_BITSANDBYTES


def give_back(module: nn.Module) -> None:
    """Gives a module frozen weights again, with the numbers that its codes stand for. `parametrize.remove_parametrizations` would change
    the class, which deep copies of the module share."""
    found = {name: made.numbers(codes).contiguous() for name, codes, made in held_in(module)}
    lists, cls = module._modules.get(LISTS), type(module)
    for name, numbers in found.items():
        del lists._modules[name]  # type: ignore[union-attr]
        module._parameters[name] = nn.Parameter(numbers, requires_grad=False)
    if found and lists is not None and lists._modules:
        module.__class__ = type(cls.__name__, cls.__bases__, {key: value for key, value in vars(cls).items() if key not in found})
    elif found:
        del module._modules[LISTS]
        module.__class__ = cls.__bases__[0]


def _save(module, state, prefix, local_metadata) -> None:
    for name, _, made in held_in(module):
        within = f"{prefix}{LISTS}.{name}."
        found = {key: state.pop(key) for key in list(state) if key.startswith(within)}
        if found:
            state[f"{prefix}{name}{made.suffix}"] = found[f"{within}original"]
            state.update({f"{prefix}{name}{suffix}": tensor for suffix, tensor in made.beside().items()})


def _load(module, state, prefix, local_metadata, strict, missing, unexpected, errors) -> None:
    for name, _, made in held_in(module):
        why = made.why_not_loaded(state, f"{prefix}{name}")
        if why:
            errors.append(f"{prefix}{name} {why}")
        found = made.load(state, f"{prefix}{name}")
        state.update({f"{prefix}{LISTS}.{name}.{key}": tensor for key, tensor in found.items() if tensor is not None})
