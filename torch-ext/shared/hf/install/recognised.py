"""Recognises the decoder layers of a model of no row of the table: reads their row off a small copy of them, compares this with the layers'
own forwards there, and says what stopped it where it does not hold."""

import inspect
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import nn

from ..family.arguments import forward_like
from ..family.calls import argument_names, kind_of
from ..family.ownership import describe, slot_of
from ..family.row_reader import ATTENTION, Row, class_names, row_of
from ..family.versions import changed_texts, release
from ..layer.checkpointing import checkpointed
from ..layer.decoder_layer import decoder_layer_forward
from ..layer.recognised_layer import FACTS, RecognisedLayer
from ..parts.explanation import Reason
from ..parts.facts import NotServed
from ..parts.lookups import LAYER, SAVED
from ..parts.modules import all_are_listened_to, for_class, original_forward
from ..parts.weights import weight_within
from .small_copy import check_on_copy, on_the_side, small_copy

# What fused layers rely on beside the forwards that are read: their texts have to be those of tested releases.
RELIED_ON = "transformers.modeling_layers", "transformers.activations", "transformers.integrations.moe"
READ = SAVED + "read"  # on a forward of recognised layers: what serves them


class Recognised(NamedTuple):
    """layers: of one decoder; own: what serves them, by this forward; row: what was read."""

    layers: Tuple[nn.Module, ...]
    own: RecognisedLayer
    forward: Callable
    row: Row


def decoders_in(model: nn.Module) -> List[Any]:
    """The modules of a model that are an embedding of tokens and layers."""
    with_tokens = (module for module in model.modules() if "embed_tokens" in module._modules)
    return [module for module in with_tokens if isinstance(module._modules.get("layers"), nn.ModuleList)]


def recognise(decoder: Any, experts: bool = True) -> Union[Recognised, Reason]:
    """Reads and compares the layers of a decoder, or says why they are not served. experts: whether the package has the kernels of experts;
    else these are called."""
    try:
        with on_the_side():
            return _recognised(decoder, tuple(decoder.layers), experts)
    except NotServed as error:
        return Reason("row", str(error))
    except Exception as error:  # of the user's classes, whose attributes are read
        return Reason("row", f"{type(decoder).__name__} could not be read: {type(error).__name__}: {error}")


def _recognised(decoder: Any, layers: Tuple[Any, ...], experts: bool) -> Recognised:
    if not layers:
        raise NotServed(f"{type(decoder).__name__} has no layers")
    unknown = [name for module in RELIED_ON for name in changed_texts(module)]
    if unknown:
        raise NotServed(f"transformers {release()} has an unknown text of {', '.join(unknown)}")
    if all_are_listened_to():
        raise NotServed("hooks listen to all modules of the process, and would to those of a small copy")
    small = small_copy(decoder, layers)
    row = row_of(small.layers, small.config.hidden_size, small.angles)
    if row.family.sparse is not None and not experts:
        row = _without_experts(row)
    family = row.family
    own = RecognisedLayer(family, class_names(small.layers, family), row.called, row.arguments)
    own.attention_input = argument_names(original_forward(small.layers[0]._modules[ATTENTION]))[0]
    kinds: Dict[Any, int] = {}
    for i, (layer, copy, tests) in enumerate(zip(layers, small.layers, row.tests)):
        _check_parts(layer, copy)
        vars(copy)[FACTS] = tests
        other = own.why_other(layer, tests)
        if other is not None:
            raise NotServed(f"a small copy is another one than layer {i}: {other.text}")
        kinds.setdefault((*sorted((path, repr(held)) for path, held in tests.items()), type(copy._modules[family.block])), i)
    weight = weight_within(layers[0]._modules[next(name for name in family.norms if name)])
    dtype = torch.float32 if weight is None else weight.dtype
    for i in kinds.values():
        check_on_copy(own, small, i, dtype)
    return Recognised(layers, own, _forward_of(own, layers[0]), row)


def _without_experts(row: Row) -> Row:
    """A row for a package that has no kernels of experts."""
    block = row.family.block
    family = row.family._replace(sparse=None, mlp=False, called=(*row.family.called, block))
    return row._replace(family=family, called={**row.called, block: "this package has no kernels of experts; bastile/qwen3 has"})


def _check_parts(layer: nn.Module, copy: nn.Module) -> None:
    """Raises `NotServed` where a layer holds modules of other classes than its class makes."""
    for name, module in copy.named_modules():
        found = layer.get_submodule(name)
        if kind_of(module) in ("part", "norm") and not isinstance(found, type(module)):
            raise NotServed(f"{name} of a layer is a {type(found).__name__}, expected a {type(module).__name__}")


def _forward_of(own: RecognisedLayer, layer: nn.Module) -> Callable:
    """The forward of ours for layers, with the arguments of their own. Where those decide otherwise than they were read, their own runs."""
    original: Any = original_forward(layer)

    def run(layer, given):
        return decoder_layer_forward(own, layer, given) if own.is_read_for(given) else original(layer, **given)

    forward = checkpointed(forward_like(inspect.signature(original), run))
    describe(forward, original)
    for each in (forward, for_class(forward)):
        setattr(each, LAYER, each)
        setattr(each, READ, own)
    return forward


def read_of(layer: nn.Module) -> Optional[RecognisedLayer]:
    """What serves a layer that has a forward for recognised ones; None for another."""
    return getattr(vars(layer).get(slot_of(layer)), READ, None)
