"""A decoder layer whose row was read off its own forwards (row_reader.py): it holds for the layers that it was read of, while what decided
their branches stays as it was."""

import functools
import sys
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from ...decoder.nodes import product_dtype
from ...decoder.norm_projections import norm_projections
from ...ops.autograd import autocasts
from ..family.arguments import CACHE, named
from ..family.calls import ARGUMENT
from ..family.expressions import Op
from ..family.layer_reader import STREAM
from ..family.row_reader import Row
from ..parts.adapters import projections
from ..parts.explanation import Reason
from ..parts.facts import Path, follow, held_at
from ..parts.lookups import SAVED, Lookups, original_forward_of
from ..parts.modules import is_marked, original_forward, own_forward, without_decorators, without_fsdp2
from ..parts.weights import bias_of, weight_of
from .decoder_layer import FusedLayer, Mixed
from .fusable import WHOLE, Groups

__all__ = ["FACTS", "RecognisedLayer"]

FACTS = SAVED + "facts"  # on a layer: what decided its branches, by the attributes that lead to it


GIVEN = "attention_mask", CACHE, "position_embeddings"  # None where a layer was called without


class _Made:
    """Takes the place of one of attention's linear layers, whose product has been computed. given: the placeholder for its input, whose
    values are never read."""

    def __init__(self, given: torch.Tensor, product: torch.Tensor):
        self.given, self.product, self.is_read = given, product, False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x is not self.given:
            raise RuntimeError("attention multiplies something else than its input, and was read otherwise: please report this")
        self.is_read = True
        return self.product


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


class _Ends(NamedTuple):
    """The linear layers at both ends of an attention. inputs: its input projections, by name; output: its last projection. forward: the
    forward that a call of it runs."""

    inputs: Dict[str, nn.Module]
    output: nn.Module
    forward: Callable[..., Any]


class RecognisedLayer(FusedLayer):
    """A row that no table has, as it was read. classes: the names of those that are taken apart. experts: those whose forward is ours,
    though the block around them is called: by the name of the class, `router_indices` of a `Sparse`."""

    def __init__(self, row: Row, classes: Sequence[str], experts: Mapping[str, bool] = {}):
        family = row.family
        super().__init__(family)
        self.called, self.arguments, self.frame, self.around = row.called, row.arguments, row.frame, row.around
        self.classes = tuple(classes)
        self.experts = experts if family.sparse is None else {family.sparse.classes[2]: family.sparse.router_indices}
        self._takes = {*family.takes, *map(named, family.takes)}
        self._told = {argument for _, argument, _ in row.frame.handed.names}
        # What the file of the model has under a name was read; later it may not be another thing.
        home = sys.modules[family.modeling]
        self._forwards = [original_forward_of(getattr(home, name)) for name in classes]
        self._functions = {name: getattr(home, name) for name in self.rotary_functions}
        own = ("eager_attention_forward", *family.position_scale[:1])
        self.lookups = Lookups(self._forwards, own, (family.modeling,))  # type: ignore[misc]

    def explain(self, layer, x) -> List[Tuple[str, Optional[Reason]]]:
        """As of `FusedLayer`, with a row that says that the others were read."""
        rows = super().explain(layer, x)
        if rows[0][0] == WHOLE:
            return rows
        experts = layer._modules[self.family.block]._modules.get("experts") if self.calls_mlp else None  # type: ignore[union-attr]
        more = [("experts", None)] if type(experts).__name__ in self.experts and is_marked(own_forward(experts)) else []
        if any(is_marked(own_forward(norm)) for norm in self.called_norms(layer)):
            more.append(("norms of called parts", None))
        return [(f"read: {without_fsdp2(type(layer)).__name__}.forward", None), *rows, *more]

    def called_norms(self, layer) -> List[nn.Module]:
        """The norms in a layer's parts that are called as the modules that they are, of the class of the norms that are not."""
        family, read = self.family, type(layer._modules[self.norms[0]]) if self.norms else None
        whole = {*self.norms, *(name for name in (family.attention, family.block) if name not in family.called)}
        parts = (part for name, part in layer._modules.items() if part is not None and name not in whole)
        return [module for part in parts for module in part.modules() if type(module) is read]

    def reason_of_called(self, name: str) -> Reason:
        return Reason("called", self.called[name])

    def mix(self, layer, x, attention_mask, cache, position_embeddings, kwargs) -> Mixed:
        """Extends `FusedLayer.mix`: attention receives only the arguments that the layer's own forward passes to it."""
        if not self.calls_attention:
            kwargs = self._handed_on(kwargs)
        return super().mix(layer, x, attention_mask, cache, position_embeddings, kwargs)

    def mix_by_call(self, layer, attention, x, given: Dict[str, Any]) -> Mixed:
        """Extends `FusedLayer.mix_by_call`: where the linear layers at both ends of attention are known, one node computes the norm and the
        input projections, and the last projection is left to the node that follows attention."""
        ends = self.ends(layer, x)
        found = None if ends is None else projections(ends.inputs.values(), x.dtype, autocasts(x.device))
        if ends is None or found is None:
            return super().mix_by_call(layer, attention, x, given)
        norm = self.fused_norm(layer, self.family.norms.inputs)
        spec, bias = self.norm(self.eps(norm)), bias_of(norm)
        *products, residual = norm_projections(x.contiguous(), weight_of(norm), found, spec, x.dtype, bias)
        made = {name: _Made(residual, product) for name, product in zip(ends.inputs, products)}
        between = object.__new__(type(attention))  # a copy of attention without the linear layers at its ends
        vars(between).update(vars(attention), _modules={**attention._modules, **made, self.around.output: _as_it_is})  # type: ignore[union-attr]
        attended, *others = self.call_attention(functools.partial(ends.forward, between), residual, given)
        if not all(each.is_read for each in made.values()):
            self.around = None  # from the next pass on: a weight that is not used gets no gradient, rather than zeros
        return Mixed(attended.reshape(-1, attended.shape[-1]), ends.output, residual, None, tuple(others))

    def ends(self, layer, x) -> Optional[_Ends]:
        """Returns the linear layers at both ends of a called attention if nodes can compute them for the layer's input x, else None."""
        if self.around is None or torch.compiler.is_compiling() or x.dtype != product_dtype(x):
            return None
        attention = layer._modules[self.family.attention]
        inner, forward = attention._modules, own_forward(attention)
        inputs = {name: inner[name] for name in self.around.inputs if inner.get(name) is not None}
        output, norm = inner.get(self.around.output), self.fused_norm(layer, self.family.norms.inputs)
        runs = getattr(without_decorators(forward), "__code__", None) is self.around.code  # and no hooks, or another forward
        return _Ends(inputs, output, forward) if runs and inputs and output is not None and norm is not None else None

    def projection_groups(self, layer, x) -> Groups:
        """Extends `FusedLayer.projection_groups` by the linear layers at both ends of a called attention."""
        ends = self.ends(layer, x)
        if ends is None:
            return super().projection_groups(layer, x)
        output = self.around.output  # type: ignore[union-attr]
        return [(", ".join(["norm", *ends.inputs]), ends.inputs), (output, {output: ends.output})]

    def _handed_on(self, given: Mapping[str, Any]) -> Dict[str, Any]:
        """Returns the arguments that a layer's own forward hands on to attention as they are, and other keywords if it hands them on."""
        rest = self.frame.handed.rest
        return {name: value for name, value in given.items() if name in self._told or (rest and name not in self._takes)}

    def call_attention(self, attention, normed, given: Dict[str, Any]) -> Tuple[Any, ...]:
        handed = self.frame.handed
        told = {name: given.get(argument, value) for name, argument, value in handed.names}
        others = {name: value for name, value in self._handed_on(given).items() if name not in self._takes}
        rest = {name: value for name, value in others.items() if value is not None or name not in GIVEN}
        found = attention(**{handed.input: normed, **told, **rest})
        return found if handed.results else (found,)

    def returned(self, layer, x, mixed: Mixed, given: Dict[str, Any]) -> Any:
        then, returns = self.frame.then, self.frame.returns
        x = x if then is None else _after(then, {STREAM: x}, layer, given)
        return x if returns is None else tuple(x if each == "" else each and mixed.others[each - 1] for each in returns)

    def run_by(self, module) -> bool:
        if type(module) is nn.LayerNorm:
            return super().run_by(module)
        function = own_forward(module)
        function = original_forward(module) if is_marked(function) else function
        return any(function is each for each in self._forwards)

    def rotary(self, name: str) -> bool:
        return getattr(sys.modules[self.modeling], name) is self._functions[name]

    def is_read_for(self, given: Mapping[str, Any]) -> bool:
        """Whether the arguments of a call, by name, are those for which the forwards were read."""
        values = ((given.get(name, default), default) for name, default in self.arguments.items())
        return all(value is default or (type(value) is type(default) and value == default) for value, default in values)

    def why_other(self, layer: nn.Module, facts: Optional[Mapping[Path, Any]] = None) -> Optional[Reason]:
        """As of `FusedLayer`. facts: that decided its branches, by default those that are noted on the layer."""
        for path, held in (vars(layer)[FACTS] if facts is None else facts).items():
            now = held_at(layer, path)
            if now is not held and now != held:
                return Reason("facts", f"{'.'.join(path)} is {now!r}, and was {held!r} when kernelize() read what the layer computes")
        return super().why_other(layer)


def _after(op: Op, known: Dict[Op, Any], layer: nn.Module, given: Mapping[str, Any]) -> Any:
    """Computes what a layer does to its residual stream with its own modules. known: the operations computed so far, which grows; given:
    the layer's arguments by name."""
    if op not in known:
        of = [_after(each, known, layer, given) for each in op.of]
        if op.kind in ("parameter", "buffer"):
            known[op] = follow(layer, op.name)
        elif op.kind == "add":
            known[op] = of[0] + of[1]
        elif op.kind == "multiply":
            known[op] = of[0] * of[1]
        elif op.kind == "times":
            path = op.name if isinstance(op.name, tuple) else ()
            factor = given.get(path[1]) if path[:1] == (ARGUMENT,) else follow(layer, path) if path else op.name
            known[op] = of[0] * factor
        elif op.kind == "written":
            known[op] = of[1].to(of[0].dtype)
        else:
            known[op] = layer._modules[op.name](*of)  # type: ignore[misc]
    return known[op]
