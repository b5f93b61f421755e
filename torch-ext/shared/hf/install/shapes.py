"""Finds, in a model of no family of the table, what computes what a family's layers or their parts compute: in a user's own file, in remote
code, in a family of transformers without a row, or in a release whose texts are not recorded. Whole layers are read (recognised.py), and so
is the loss (losses.py). What is left, such as norms outside of them, is known by the text of its forward, never by a name: its fingerprint
must be that of a tested release, the running bytecode must be what the text compiles to, and all that the text names must be what it is in
transformers.
"""

import ast
import functools
import sys
from collections import Counter
from types import FunctionType
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from torch import nn

from ..attention.attention_choice import WITHOUT, lies_where_kernels_run
from ..family.forwards import rotary_of, unless_replaced
from ..family.known_texts import TEXTS
from ..family.ownership import bind, copy_with, forward_on, is_wrapper, other_owner
from ..layer.decoder_layer import FusedLayer
from ..layer.recognised_layer import FACTS
from ..model.losses import Read
from ..parts.explanation import Explanation, Reason, explanation_of
from ..parts.facts import attribute_of
from ..parts.lookups import ROTARY, function_in, replaced_below
from ..parts.modules import without_decorators
from ..parts.texts import globals_in, text_of
from ..parts.weights import held
from ..say.explain import explain, explain_losses
from .layers import mlp_of, rms_norm_of
from .recognised import Recognised, Unread, decoders_in, read_of, recognise, why_attention_stays
from .small_copy import experts_in

__all__ = ["Shapes", "explanation", "put_on"]

HALF = "rotate_half"
OF_EVERY_MODULE = ("torch.nn.modules.module", "transformers.modeling_utils")  # what these classes define is in every model
PARTS = {"rms_norm": "RMSNorm", "swiglu": "MLP", "rope": "rotary embedding"}


class Part(NamedTuple):
    """A module of a model, and the forward that takes the place of its class's."""

    operation: str
    module: nn.Module
    forward: Callable


def put_on(parts: Sequence[Part]) -> None:
    """Gives each part its forward of ours."""
    for _, module, forward in parts:
        bind(module, forward)


class Shapes:
    """What is known of models without a row. rows: of the table, by whose texts parts are known; experts: whether the package has the
    kernels of experts."""

    def __init__(self, rows: Sequence[FusedLayer], experts: bool = False):
        self.rows, self.experts = rows, experts

    def layers(self, model: nn.Module) -> List[Recognised]:
        """Reads the layers of each decoder in a model. Leaves out those that are not served."""
        found = (each for decoder in decoders_in(model) for each in recognise(decoder, self.experts))
        return [each for each in found if isinstance(each, Recognised)]

    def layers_beside(self, model: nn.Module) -> List[Recognised]:
        """Reads the layers of a model with a row that this row does not serve: with a mixer of tokens or experts that it does not know."""
        classes = [(own, getattr(sys.modules.get(own.modeling), own.classes[0], None)) for own in self.rows if own.family.absent]
        left = {module for module in model.modules() for own, cls in classes if cls and isinstance(module, cls) and own.why_other(module)}
        read = [found.among(left) for found in (self.layers(model) if left else ())]
        return [found for found in read if found.layers]

    def put_on_layers(self, found: Recognised, told: Mapping[str, Any]) -> List[nn.Module]:
        """Gives the layers of a decoder, and the experts in them, forwards of ours. told: what is noted on each layer. Returns the layers
        that keep the forward of another library's or the user's."""
        others = []
        for layer, facts in zip(found.layers, found.row.tests):
            for module, forward in experts_in(found.own, layer):
                if not other_owner(module):
                    bind(module, forward)
            if forward_on(layer) is not None and other_owner(layer):
                others.append(layer)
            else:
                bind(layer, found.forward)
                vars(layer).update({**told, FACTS: facts})
        return others

    @functools.cached_property
    def known(self) -> Mapping[Tuple[str, str], Callable]:
        """(operation, fingerprint) -> our forward or, of "rope", (fingerprint of the function that it calls) -> function."""
        found: Dict[Tuple[str, str], Callable] = {}
        for own in self.rows:
            family = own.family
            texts = TEXTS.get(family.modeling, {})
            made = {"rms_norm": (f"{family.prefix}RMSNorm", rms_norm_of(family))}
            if family.gated:  # else an MLP by itself gains nothing
                made["swiglu"] = family.mlp_class(), mlp_of(family)
            for operation, (name, layer) in made.items():
                for fingerprint in texts.get(f"{name}.forward", {}).values():
                    found.setdefault((operation, fingerprint), layer.forward)
            halves = texts.get(HALF, {}).values()
            for fingerprint in texts.get(ROTARY, {}).values():
                for half in halves:
                    found.setdefault(("rope", fingerprint + half), rotary_of(family))
        return found

    def parts(self, model: nn.Module) -> List[Part]:
        """Finds the parts of a model whose class's forward has a known text. Those that hold a forward of their own are left out."""
        rotaries: Dict[Callable, Optional[Callable]] = {}
        found = []
        for module in model.modules():
            forward = type(module).forward
            if "forward" in vars(module) or not _is_called_plainly(module):
                continue
            text = text_of(without_decorators(forward), "forward")
            for operation, fits in _FITS.items():
                ours = None if text is None else self.known.get((operation, text.fingerprint))
                if text is not None and ours is not None and fits(module) and _reads_only_its_state(module, text.node):
                    found.append(Part(operation, module, ours))
            if forward not in rotaries:
                rotaries[forward] = self._with_rotary(forward)
            copy = rotaries[forward]
            if copy is not None:
                found.append(Part("rope", module, copy))
        return found

    def _with_rotary(self, forward) -> Optional[Callable]:
        """A copy of a forward that calls our function where it calls one with the text of a known rotary embedding; None for none."""
        inner = without_decorators(forward)
        if type(inner) is not FunctionType or inner.__closure__:
            return None
        names = {name: self._rotary(inner.__globals__.get(name)) for name in globals_in(inner)}
        ours = {name: function for name, function in names.items() if function is not None}
        return copy_with(forward, ours) if ours else None

    def _rotary(self, function) -> Optional[Callable]:
        function = function_in(function)
        text = text_of(function, ROTARY, (HALF,))
        half = None if text is None else text_of(function.__globals__.get(HALF), HALF)
        rotate = None if text is None or half is None else self.known.get(("rope", text.fingerprint + half.fingerprint))
        return rotate and unless_replaced(rotate, lambda: replaced_below(function), lambda: function)


# ---------------------------------------------------------------- modules
def _is_called_plainly(module: nn.Module) -> bool:
    cls = type(module)
    plain = cls.__call__ is nn.Module.__call__ and cls.__getattr__ is nn.Module.__getattr__
    return plain and cls.__getattribute__ is object.__getattribute__


def _reads_only_its_state(module: nn.Module, node) -> bool:
    """Tells whether all that a forward reads of its module is held by the module or defined for every model: a property or a method of the
    class itself may compute anything."""
    me, cls = node.args.args[0].arg, type(module)
    for part in ast.walk(node):
        name, own = attribute_of(part, me), vars(module)
        if name:
            owner = next((c for c in cls.__mro__ if name in vars(c)), None)
            if owner is None:
                known = name in own or any(name in own[kind] for kind in ("_parameters", "_modules", "_buffers"))
            elif name in own and not hasattr(type(vars(owner)[name]), "__set__"):
                known = True
            else:
                known = owner.__module__ in OF_EVERY_MODULE
            if not known:
                return False
    return True


def _is_norm(module) -> bool:
    eps = [vars(module)[name] for name in ("variance_epsilon", "eps") if name in vars(module)]
    weight = held(module, "weight")
    return set(module._parameters) <= {"weight"} and weight is not None and weight.dim() == 1 and [type(one) for one in eps] == [float]


def _is_mlp(module) -> bool:
    return not module._parameters and all(isinstance(child, nn.Module) for child in module._modules.values())


_FITS: Mapping[str, Callable[[nn.Module], bool]] = {"rms_norm": _is_norm, "swiglu": _is_mlp}


# ---------------------------------------------------------------- what explain says
def explanation(shapes: Shapes, model: nn.Module, ours: Callable[[nn.Module], bool], losses: Read) -> Optional[Explanation]:
    """The table of `explain` of a model without a row, None for one in which nothing is known. ours: tells of a module whether a forward of
    this package is on it."""
    decoders = decoders_in(model)
    layers = [_inside(layer) for decoder in decoders for layer in decoder.layers]
    read = [(layer, own.explain) for layer, own in zip(layers, map(read_of, layers)) if own is not None and ours(layer)]
    if read:
        served = [layer for layer, _ in read]
        unread = {f"layers of {type(each).__name__}": _why_unread(shapes, each, served) for each in decoders}
        left = {
            name: (said[0][0]._replace(text="; ".join(why.text for why, _ in said)), sum(count for _, count in said))
            for name, said in unread.items() if said
        }  # fmt: skip
        for decoder in decoders:
            why = why_attention_stays(decoder) if WITHOUT not in vars(decoder) and lies_where_kernels_run(decoder) else None
            if why is not None and any(map(read_of, map(_inside, decoder.layers))):
                left["attention"] = why, len(decoder.layers)
        stays = "batches keep their padding: what a decoder without a row does between its layers is not read"
        left["padding"] = Reason("padding", stays), len(read)
        return explain(model, read, [], left, losses)
    found: Counter = Counter()
    parts = _all_parts(shapes, model)
    for operation, module, _ in parts:
        reason = None if ours(module) else Reason("unpatched", f"{type(module).__name__}'s own forward")
        found[PARTS[operation], reason] += 1
    explain_losses(found, model, (), losses)
    if not found:
        return None
    known_norms = {id(part.module) for part in parts if part.operation == "rms_norm"}
    for module in model.modules():
        if _is_norm(module) and id(module) not in known_norms:
            text = f"{type(module).__name__}.forward has no text that is known, or reads what its class computes"
            found[PARTS["rms_norm"], Reason("row", text)] += 1
    for decoder in decoders:
        for why, count in _why_unread(shapes, decoder):
            found["decoder layer", why] += count
    if not decoders:
        none = f"{type(model).__name__} has no module with an embedding of tokens and layers, by their usual names"
        found["decoder layer", Reason("row", none)] += 1
    return explanation_of(found)


def _inside(layer: Any) -> Any:
    """The layer inside a library's wrapper, such as FSDP1's; any other layer itself."""
    while is_wrapper(layer) and len(layer._modules) == 1:
        (layer,) = layer._modules.values()
    return layer


def _why_unread(shapes: Shapes, decoder: Any, read: Sequence[nn.Module] = ()) -> List[Tuple[Reason, int]]:
    """Why layers of a decoder have no forward of ours, and how many. read: those that have one."""
    left = [layer for layer in decoder.layers if all(_inside(layer) is not each for each in read)]
    results = recognise(decoder, shapes.experts) if left else []
    whose = Reason("unpatched", "transformers' own forward, or the user's")
    counts = [(found, sum(any(layer is each for each in left) for layer in found.layers)) for found in results]
    return [(found.why if isinstance(found, Unread) else whose, count) for found, count in counts if count]


def _all_parts(shapes: Shapes, model: nn.Module) -> List[Part]:
    """`Shapes.parts`, also of modules that hold a forward of ours already."""
    held = {module: vars(module).pop("forward") for module in model.modules() if "forward" in vars(module)}
    try:
        return shapes.parts(model)
    finally:
        for module, forward in held.items():
            vars(module)["forward"] = forward
