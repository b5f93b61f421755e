"""`eight_bits` and `sixteen_bits`: the frozen weights of decoder layers in codes, once, and back."""

from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ...ops.arguments import fail
from ...ops.quantised import quantise_together
from ..parts.adapters import is_untouched
from ..parts.eight_bit_linear import BLOCK, EightBitLinear, dense_of_blocks
from ..parts.explanation import Reason
from ..parts.four_bit_experts import give_back, held_in
from ..parts.packing import pack_groups
from ..parts.weights import held, need_frozen, why_not_plain
from .decoder_layer import FusedLayer
from .sparse_block import is_sparse

__all__ = ["CONFIG", "Layers", "configs_of", "eight_bits", "explain_weights", "save_as_they_are", "sixteen_bits"]

CONFIG = "quantization_config"
FINE_GRAINED = "transformers.integrations.finegrained_fp8", "FP8Linear"
Layers = Iterable[Tuple[FusedLayer, nn.Module]]


def _linears_of(own: FusedLayer, layer) -> List[Dict[str, nn.Module]]:
    """The linear layers of a decoder layer whose weights may be in eight bits, by name and by what they read: of one with experts, those of
    attention and of mixers."""
    parts, family = layer.__dict__["_modules"], own.family
    groups: List[Tuple[str, ...]] = [(mixer.name, mixer.output) for mixer in family.mixers if mixer.name in parts]
    if not family.mixers and not own.calls_attention:
        groups += [(family.attention, *family.qkv), (family.attention, family.output)]
    if not own.calls_mlp and not is_sparse(parts[family.block]):
        groups += [(family.block, *family.gate_up), (family.block, family.down)]
    return [{f"{part}.{name}": parts[part].__dict__["_modules"][name] for name in names} for part, *names in groups]


def _below_adapters(layer) -> Any:
    """The layer that adapters of PEFT stand around; any other layer itself."""
    while "base_layer" in layer.__dict__["_modules"]:
        layer = layer.__dict__["_modules"]["base_layer"]
    return layer


class FrozenLinear(NamedTuple):
    """A linear layer, and the numbers of its weight in 16 or 32 bits, made when they are called for. dtype: of the weight."""

    layer: nn.Linear
    numbers: Callable[[], torch.Tensor]
    dtype: torch.dtype


def _found(name: str, layer) -> FrozenLinear:
    """Raises ValueError where a layer is not torch.nn.Linear, or transformers' FP8Linear, with a frozen weight and without hooks."""
    weight: torch.Tensor = held(layer, "weight")
    if is_untouched(layer, *FINE_GRAINED):
        scales, block = held(layer, "weight_scale_inv"), layer.block_size
        if layer.activation_scheme != "dynamic" or block is None or tuple(block) != (BLOCK, BLOCK):
            fail(name, f"in blocks of {block} with {layer.activation_scheme} scales of its input", f"blocks of {BLOCK}, dynamic")
        found = FrozenLinear(layer, lambda: dense_of_blocks(weight.detach(), scales.detach()), torch.bfloat16)
    else:
        reason = why_not_plain(layer, True)
        if reason is not None:
            fail(name, f"no plain torch.nn.Linear ({reason.text})", "one, in 16 or 32 bits, whole on its device and without hooks")
        found = FrozenLinear(layer, weight.detach, weight.dtype)
    need_frozen(f"{name}.weight", weight)
    if not bool(found.numbers().isfinite().all()):
        fail(f"{name}.weight", "not finite", "numbers without infinities and NaN")
    return found


def eight_bits(layers: Layers, model: nn.Module) -> nn.Module:
    """Turns the weights of decoder layers to eight bits; see `eight_bits` of a package."""
    names, layers = {module: name for name, module in model.named_modules()}, list(layers)
    groups = [(f"{names[layer]}.", group) for own, layer in layers for group in _linears_of(own, layer)]
    if not groups:
        fail("model", f"a {type(model).__name__}", "a model with decoder layers of this package's families", TypeError)
    # No library reads codes beside experts in 16 or four bits, so there the numbers are what is saved, which all read.
    sparse = any(is_sparse(layer.__dict__["_modules"][own.family.block]) for own, layer in layers)
    found: List[List[FrozenLinear]] = []
    for prefix, group in groups:  # all of them, before anything is changed
        linears = {prefix + name: _below_adapters(linear) for name, linear in group.items()}
        found.append([_found(name, linear) for name, linear in linears.items() if type(linear) is not EightBitLinear])
    configs = configs_of(model, "mxfp4" if sparse else "fp8")
    for of_one_input in filter(None, found):
        codes, scale = quantise_together([each.numbers() for each in of_one_input])
        for (linear, _, dtype), each in zip(of_one_input, codes):
            EightBitLinear.take(linear, each, scale.clone(), dtype, saves_codes=not sparse)
    for _, layer in layers:  # products read those of one input as one matrix, and would join them in each pass
        pack_groups(layer, codes_alone=True)
    for part, config in () if sparse else configs:
        setattr(config, CONFIG, _as_fine_grained(part))
        save_as_they_are(part, "Fp8Dequantize")
    return model


def sixteen_bits(model: nn.Module) -> nn.Module:
    """Turns weights in eight and in four bits back; see `sixteen_bits` of a package."""
    written = set()  # what a configuration says of weights that are turned back
    for module in model.modules():
        if isinstance(module, EightBitLinear):
            written |= {"fp8"} if module.saves_codes else set()
            module.give_back()
        written |= {made.kind.lower() for _, _, made in held_in(module)}
        give_back(module)
    for part, config in configs_of(model, "fp8", "mxfp4"):
        if _method_of(config) not in written:
            continue
        if any(map(_is_fine_grained, part.modules())):  # transformers' own, which stay so
            setattr(config, CONFIG, _as_fine_grained(part))
        else:
            delattr(config, CONFIG)
    return model


def _method_of(config) -> Optional[str]:
    """How a model of a configuration is quantised, None where it is not."""
    method = getattr(getattr(config, CONFIG, None), "quant_method", None)
    return None if method is None else str(getattr(method, "value", method))


def _is_fine_grained(module: nn.Module) -> bool:
    """Tells transformers' layer in eight bits."""
    return (type(module).__module__, type(module).__name__) == FINE_GRAINED


def configs_of(model: nn.Module, *known: str) -> List[Tuple[nn.Module, Any]]:
    """[(model of transformers, its configuration)], of those that `save_pretrained` writes. Raises ValueError for one that is quantised by
    another method than those that are known."""
    from transformers import PreTrainedModel

    found: Dict[int, Tuple[nn.Module, Any]] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            found.setdefault(id(module.config), (module, module.config))
    for _, config in found.values():
        method = _method_of(config)
        if method is not None and method not in known:
            fail("model", f"quantised by {method}", "one whose weights are in 16 bits")
    return list(found.values())


def _as_fine_grained(model: nn.Module):
    """What transformers reads in a saved configuration, to load codes with their scales."""
    from transformers import FineGrainedFP8Config

    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    others = [name for name, module in linears.items() if not isinstance(module, EightBitLinear) and not _is_fine_grained(module)]
    plain = [name.replace(".base_layer", "") for name in others if ".lora_" not in name]
    return FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK), modules_to_not_convert=plain)


def save_as_they_are(model: nn.Module, operation: str) -> None:
    """Has transformers save the weights of a model that it loaded from codes as they are now, which it would quantise again, or give the
    names of codes. operation: with which it took the codes apart."""
    conversions = getattr(model, "_weight_conversions", None) or ()
    names = [[type(each).__name__ for each in getattr(conversion, "operations", None) or ()] for conversion in conversions]
    if [operation] in names:
        kept = [conversion for conversion, each in zip(conversions, names) if each != [operation]]
        model._weight_conversions = kept  # type: ignore[assignment]


def explain_weights(layer: nn.Module) -> List[Tuple[str, Optional[Reason]]]:
    """[(which weights of a decoder layer are in eight bits, and the memory that saves, None)]; nothing where nothing is."""
    named = {name: module for name, module in layer.named_modules() if isinstance(module, EightBitLinear)}
    saved = sum(module.in_features * module.out_features * (module.dense_dtype.itemsize - 1) - 4 for module in named.values())
    names = ", ".join(name.replace(".base_layer", "").rpartition(".")[2] for name in named)
    return [(f"weights of {names} in eight bits, {saved / 2**20:.1f} MiB saved", None)] if named else []
