"""Recognises the decoder layers of a model of no row of the table: reads their row off a small copy of them, compares this with the layers'
own forwards there, and says what stopped it where it does not hold."""

import functools
import sys
from typing import Any, Callable, Collection, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple, Union

import torch
from torch import nn

from ..family.calls import kind_of
from ..family.layer_reader import alike
from ..family.mask_reader import FUNCTIONS, why_masks_stay
from ..family.ownership import CALL_BEFORE, bind, forward_for, forward_on, is_wrapper, other_owner
from ..family.probes import flags_of
from ..family.row_reader import Row, class_names, experts_of_called, row_of
from ..family.versions import changed_texts, release
from ..layer.checkpointing import checkpointed
from ..layer.decoder_layer import decoder_layer_forward
from ..layer.recognised_layer import FACTS, RecognisedLayer
from ..parts.adapters import inside_wrappers
from ..parts.explanation import Reason
from ..parts.facts import NotServed
from ..parts.lookups import SAVED
from ..parts.modules import all_are_listened_to, for_class, original_forward, without_fsdp2
from ..parts.weights import weight_within
from . import layers as made
from .small_copy import Small, check_on_copy, on_the_side, small_copy

__all__ = ["Recognised", "Unread", "decoders_in", "put_norms", "read_of", "recognise", "why_attention_stays"]

# What fused layers rely on beside the forwards that are read: their texts have to be those of tested releases.
RELIED_ON = "transformers.modeling_layers", "transformers.activations", "transformers.integrations.moe"
READ = SAVED + "read"  # on a forward of recognised layers: what serves them


class Recognised(NamedTuple):
    """layers: of one decoder, those that do the same; own: what serves them, by this forward; row: what was read."""

    layers: Tuple[nn.Module, ...]
    own: RecognisedLayer
    forward: Callable
    row: Row

    def among(self, layers: Collection[nn.Module]) -> "Recognised":
        """Leaves out the layers that are not among some."""
        pairs = [(layer, tests) for layer, tests in zip(self.layers, self.row.tests) if layer in layers]
        found, tests = zip(*pairs) if pairs else ((), ())
        return self._replace(layers=found, row=self.row._replace(tests=tests))


class Unread(NamedTuple):
    """layers: of one decoder; why: they are not served."""

    layers: Tuple[nn.Module, ...]
    why: Reason


Found = Union[Recognised, Unread]


EMBEDDINGS = {"embed_tokens", "embed_in"}  # what decoders call theirs


def decoders_in(model: nn.Module) -> List[Any]:
    """The modules of a model that are an embedding of tokens and layers."""
    known = (module for module in model.modules() if isinstance(module._modules, dict))  # a scripted module's is another thing
    with_tokens = (module for module in known if not EMBEDDINGS.isdisjoint(module._modules))
    return [module for module in with_tokens if isinstance(module._modules.get("layers"), nn.ModuleList)]


def recognise(decoder: Any, experts: bool = True) -> List[Found]:
    """Reads and compares the layers of a decoder, those that do the same together, or says why they are not served. experts: whether the
    package has the kernels of experts; else these are called."""
    layers = tuple(decoder.layers)
    found = _tried(decoder, layers, lambda: _small(decoder, layers))
    if not isinstance(found, Small):
        return [found]
    results = []
    for group in alike(found.layers, found.config.hidden_size):
        own, small = tuple(layers[i] for i in group), found._replace(layers=[found.layers[i] for i in group])
        results.append(_tried(decoder, own, functools.partial(_recognised, own, small, experts)))
    return results


def _tried(decoder: Any, layers: Tuple[Any, ...], run: Callable[[], Any]) -> Any:
    """run(), or why it does not know the layers."""
    try:
        with on_the_side():
            return run()
    except NotServed as error:
        return Unread(layers, Reason("row", str(error)))
    except Exception as error:  # of the user's classes, whose attributes are read
        return Unread(layers, Reason("row", f"{type(decoder).__name__} could not be read: {type(error).__name__}: {error}"))


def _small(decoder: Any, layers: Tuple[Any, ...]) -> Small:
    if not layers:
        raise NotServed(f"{type(decoder).__name__} has no layers")
    unknown = [name for module in RELIED_ON for name in changed_texts(module)]
    if unknown:
        raise NotServed(f"transformers {release()} has an unknown text of {', '.join(unknown)}")
    wrapper = next(filter(is_wrapper, layers), None)
    if wrapper is not None:
        raise NotServed(f"each layer is inside a {type(wrapper).__name__} already. {CALL_BEFORE}")
    if all_are_listened_to():
        raise NotServed("hooks listen to all modules of the process, and would to those of a small copy")
    return small_copy(decoder, layers)


def _recognised(layers: Tuple[Any, ...], small: Small, experts: bool) -> Recognised:
    row = row_of(small.layers, small.config.hidden_size, small.angles, small.without_angles)
    if row.family.sparse is not None and not experts:
        row = _without_experts(row)
    family = row.family
    blocks = [layer._modules[family.block] for layer in small.layers]
    own = RecognisedLayer(row, class_names(small.layers, family), experts_of_called(blocks) if experts and family.sparse is None else {})
    kinds: Dict[Any, int] = {}
    for i, (layer, copy, tests) in enumerate(zip(layers, small.layers, row.tests)):
        _check_parts(layer, copy)
        vars(copy)[FACTS] = tests
        other = own.why_other(layer, tests)
        if other is not None:
            raise NotServed(f"a small copy is another one than layer {i}: {other.text}")
        kinds.setdefault((*sorted((path, repr(held)) for path, held in tests.items()), type(copy._modules[family.block])), i)
    weight = weight_within(layers[0])
    dtype = torch.float32 if weight is None else weight.dtype
    for i in kinds.values():
        check_on_copy(own, small, i, dtype)
    return Recognised(layers, own, _forward_of(own, layers[0]), row)


def _without_experts(row: Row) -> Row:
    """A row for a package that has no kernels of experts."""
    block = row.family.block
    family = row.family._replace(sparse=None, mlp=False, called=(*row.family.called, block))
    return row._replace(family=family, called={**row.called, block: "this package has no kernels of experts; bastile/moe has"})


def _check_parts(layer: nn.Module, copy: nn.Module) -> None:
    """Raises `NotServed` where a layer holds modules of other classes than its class makes, but for PEFT's around parameters of them."""
    for name, module in copy.named_modules():
        found: Any = layer
        for part in filter(None, name.split(".")):
            found = inside_wrappers(found and found._modules.get(part))
        if kind_of(module) in ("part", "norm") and not isinstance(found, type(module)):
            raise NotServed(f"{name} of a layer is a {type(found).__name__}, expected a {type(module).__name__}")


def _forward_of(own: RecognisedLayer, layer: nn.Module) -> Callable:
    """The forward of ours for layers, with the arguments of their own. Where those decide otherwise than they were read, their own runs."""
    original: Any = original_forward(layer)

    def run(layer, given):
        return decoder_layer_forward(own, layer, given) if own.is_read_for(given) else original(layer, **given)

    forward = forward_for(original, run, checkpointed)
    for each in (forward, for_class(forward)):
        setattr(each, READ, own)
    return forward


def put_norms(decoder: Any) -> None:
    """Gives the norms in parts of a decoder that are called forwards of ours: those of the class, and with the flags, of the norms of its
    layers that were read."""
    forwards: Dict[Any, Callable] = {}
    for layer in decoder.layers:
        own = read_of(layer)
        if own is not None and own.norms and own.family.norm_argument == "hidden_states" and not own.family.centred:
            read = layer._modules[own.norms[0]]
            key = type(read), tuple(flags_of(read).items())
            forwards.setdefault(key, made.norm_while(own.norm(0.0), key[1]))
            _put_norms(own.called_norms(layer), forwards)
    _put_norms(decoder._modules.values(), forwards)


def _put_norms(modules: Iterable[Any], forwards: Mapping[Any, Callable]) -> None:
    for module in modules:
        forward = module and forwards.get((type(module), tuple(flags_of(module).items())))
        if forward is not None and list(module._parameters) == ["weight"] and not other_owner(module):
            bind(module, forward)


def why_attention_stays(decoder: Any) -> Optional[Reason]:
    """Why a decoder without a row may not choose our attention, whose masks are no tensors; None where it may."""
    cls, whose = without_fsdp2(type(decoder)), [(layer, read_of(layer)) for layer in decoder.layers]
    if any(own is None for _, own in whose):
        return Reason("row", "attention has masks of transformers', since some layers are transformers' own")
    modeling = sys.modules.get(cls.__module__)
    if not getattr(decoder, "_supports_sdpa", False) or getattr(cls, "config_class", None) is None or not hasattr(modeling, FUNCTIONS):
        return Reason("row", f"attention is its own: {cls.__name__} takes none of transformers' that another may stand for")
    called = {without_fsdp2(type(layer._modules[own.family.attention])) for layer, own in whose if own is not None and own.calls_attention}
    text = why_masks_stay(cls, called)
    return None if text is None else Reason("row", f"attention has masks of transformers': {text}")


def read_of(layer: nn.Module) -> Optional[RecognisedLayer]:
    """What serves a layer that has a forward for recognised ones; None for another."""
    return getattr(forward_on(layer), READ, None)
