"""`four_bits`: the frozen experts of decoder layers in four bits, once, which `sixteen_bits` turns back."""

from typing import Any, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ...ops.arguments import fail
from ...ops.four_bits import BLOCK
from ..family.experts import WEIGHTS, experts_gate
from ..parts.adapters import inside_wrappers
from ..parts.explanation import Reason
from ..parts.four_bit_experts import KINDS, held_in, is_of_bitsandbytes, take, take_from_bitsandbytes
from ..parts.weights import held, is_plain, need_frozen
from .decoder_layer import FusedLayer
from .eight_bit_weights import CONFIG, Layers, configs_of, save_as_they_are
from .sparse_block import is_sparse

__all__ = ["explain_experts", "four_bits"]

GPT_OSS = "gpt_oss"  # the type of models whose experts in MXFP4 other libraries read
DTYPES = torch.bfloat16, torch.float16, torch.float32
# As OpenAI released the model: the configuration names what is not in MXFP4.
OTHERS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def experts_of(own: FusedLayer, layer) -> List[nn.Module]:
    """The module of a decoder layer's experts, below adapters of PEFT; none of a dense layer."""
    block = layer.__dict__["_modules"].get(own.family.block)
    if own.family.sparse is None or block is None or not is_sparse(block):
        return []
    return [inside_wrappers(block.__dict__["_modules"]["experts"])]


class ExpertWeight(NamedTuple):
    """A weight that is to be in four bits. transposed: whether products add up over its rows."""

    module: nn.Module
    name: str
    transposed: bool


def _found(prefix: str, module, kind: str) -> List[ExpertWeight]:
    """Raises ValueError where the weights of a module of experts are not ordinary, frozen and finite."""
    if experts_gate(module) is None:
        fail(prefix, f"a {type(module).__name__} with a gate that is not known", "experts that this package computes")
    already = {each.name for each in held_in(module)}
    found = [ExpertWeight(module, name, bool(module.is_transposed)) for name in WEIGHTS if name not in already]
    for _, name, transposed in found:
        if is_of_bitsandbytes(module, name):
            if kind != "nf4":
                fail("kind", repr(kind), f"'nf4': bitsandbytes keeps {prefix}.{name} in four bits")
            continue
        weight: Any = held(module, name)
        if not is_plain(weight) or weight.dim() != 3 or weight.dtype not in DTYPES:
            fail(f"{prefix}.{name}", f"a {type(weight).__name__}", "an ordinary parameter [experts, rows, columns] in 16 or 32 bits")
        need_frozen(f"{prefix}.{name}", weight)
        length = weight.shape[1 if transposed else 2]
        if kind == "mxfp4" and length % BLOCK:
            fail(f"{prefix}.{name}", f"one of {length} numbers a sum", f"a multiple of {BLOCK} of them, or kind='nf4'")
        if not all(bool(each.isfinite().all()) for each in weight.detach()):
            fail(f"{prefix}.{name}", "not finite", "numbers without infinities and NaN")
    return found


def four_bits(layers: Layers, model: nn.Module, kind: Optional[str]) -> nn.Module:
    """Turns the experts of decoder layers to four bits; see `four_bits` of a package."""
    names = {module: name for name, module in model.named_modules()}
    modules = [experts for own, layer in layers for experts in experts_of(own, layer)]
    if not modules:
        fail("model", f"a {type(model).__name__}", "a model with decoder layers of experts of this package's families", TypeError)
    kinds = {_kind_of(module, kind) for module in modules}
    if len(kinds) != 1:
        fail("model", f"one with experts for {' and '.join(sorted(kinds))}", "experts of one kind, or `kind`")
    (chosen,) = kinds
    configs = configs_of(model, "mxfp4")
    found = [each for module in modules for each in _found(names[module], module, chosen)]  # all of them, before anything is changed
    for module, name, transposed in found:
        if is_of_bitsandbytes(module, name):
            take_from_bitsandbytes(module, name)
        else:
            made, codes = KINDS[chosen].made(held(module, name).detach(), transposed)
            take(module, name, made, codes)
    for part, config in configs if chosen == "mxfp4" else ():
        from transformers.utils.quantization_config import Mxfp4Config

        setattr(config, CONFIG, Mxfp4Config(modules_to_not_convert=OTHERS))
        save_as_they_are(part, "Mxfp4Dequantize")
    return model


def _kind_of(module: nn.Module, kind: Optional[str]) -> str:
    """The kind of codes for a module of experts. Raises ValueError for one that it cannot have."""
    released = getattr(getattr(module, "config", None), "model_type", None) == GPT_OSS
    inside = {type(each.made) for each in held_in(module)}
    known = [name for name, made in KINDS.items() if made in inside]
    chosen = kind or (known[0] if known else "mxfp4" if released else "nf4")
    if chosen not in KINDS or (chosen == "mxfp4" and not released):
        fail("kind", repr(kind), "'nf4', or for GPT-OSS 'mxfp4': no library reads other models' experts so")
    if known and known != [chosen]:
        fail("kind", repr(kind), f"{known[0]!r}, which the model's experts are in: call sixteen_bits(model) first")
    return chosen


def explain_experts(layer: nn.Module) -> List[Tuple[str, Optional[Reason]]]:
    """[(which weights of a decoder layer's experts are in four bits, and the memory that saves, None)]; nothing where nothing is."""
    found = [each for module in layer.modules() for each in held_in(module)]
    saved = sum(made.shape.numel() * made.dense_dtype.itemsize - codes.nbytes - made.nbytes() for _, codes, made in found)
    names = ", ".join(name for name, *_ in found)
    return [(f"{names} of experts in {found[0].made.kind}, {saved / 2**20:.1f} MiB saved", None)] if found else []
