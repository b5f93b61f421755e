"""Makes autograd nodes of functions over named tuples of optional tensors.

A half of a decoder layer is a forward function, a backward function and a description. `Node` makes the autograd function of them, which
saves what the backward function reads, and whose calls are replayed where they can be; and it chooses PyTorch's operations where these must
run instead. For a graph of torch.compile or torch.export it makes an operator of each of the two functions.
"""

from functools import partial, update_wrapper
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from ..ops.autocast import outside_autocast
from ..ops.autograd import apply_function, once_differentiable
from ..ops.second_run import Rest, apply_in_parts, keep, kept_of, unfinished
from ..runtime.device import is_ordinary
from ..runtime.replay import IDENTITIES, replayed_with_products
from .eight_bits import groups_in_eight
from .graph import InGraph, in_graph_of
from .projection import SIZE, CodedWeight, EightBitWeight, NodeLayout, Projection, by_projection, layout_of

__all__ = ["Given", "Gradients", "Node"]

Shape = Tuple[type, Tuple[int, ...]]  # of a tree: its class, and for each field the length of a list, or ONE
ONE = -1


def flat(tree: Sequence) -> list:
    """Lists the tensors of a named tuple of optional tensors and lists of these, None for those that are absent."""
    found: list = []
    for part in tree:
        if type(part) is list:
            found += part
        else:
            found.append(part)
    return found


def shape_of(tree: Sequence) -> Shape:
    """Describes a tree, for `filled`."""
    return type(tree), tuple([len(part) if type(part) is list else ONE for part in tree])


def count_of(shape: Shape) -> int:
    """Returns how many tensors a tree of a shape has."""
    return sum([1 if length == ONE else length for length in shape[1]])


def filled(shape: Shape, values: Sequence):
    """Returns the tree of a shape that `flat` lists as these values."""
    kind, lengths = shape
    parts = list(values)
    for place, length in enumerate(lengths):
        if length != ONE:
            parts[place : place + length] = [parts[place : place + length]]
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


class Given(NamedTuple):
    """What a node's functions compute with.

    tensors: the node's named tuple, None for what is absent, and in a backward pass for what the node does not keep. parts: the tensors of
    all projections, as `tensors_of` lists them. sizes: the node's numbers, () in a backward pass. whole: what `side_by_side` finds of
    neighbouring weights. in_graph: whether an operator runs, in which no two results may be parts of one tensor.
    """

    layout: NodeLayout
    tensors: Any
    parts: list
    sizes: Tuple[int, ...]
    whole: Optional[torch.Tensor]
    in_graph: bool


class Gradients(NamedTuple):
    """The gradients of `Given.tensors` and `Given.parts`, or which of them are needed; None where there are none."""

    tensors: Any
    parts: list


class Form:
    """All of a node's call but its tensors and sizes. There is one object for each combination, unless its layout is not replayable.

    tensors: how many of the node's named tuple are present. packed: whether `NodeLayout.whole_of` may find neighbours that the node reads.
    saved, started: the shapes of what the node's functions return, and count: of the results, known once they have run. order: in a graph,
    the place of each of `saved` among the operator's results, -1 for None. needs: what `needed` returned before. coded: where a
    `CodedWeight` is among what is present.
    """

    __slots__ = (
        "coded", "count", "dropped", "in_graph", "kind", "layout", "needs", "order", "packed", "places", "saved", "started", "tensors",
    )  # fmt: skip

    def __init__(self, layout: NodeLayout, tensors, dropped: Sequence[str], packs: bool, in_graph: bool):
        self.packed, self.count, self.in_graph = packs and bool(layout.neighbours), 0, in_graph
        self.order: Sequence[int] = ()
        self.layout, self.kind = layout, type(tensors)
        self.places = [i for i, tensor in enumerate(tensors) if tensor is not None]
        self.tensors = len(self.places)
        self.coded = [self.tensors + place for place in layout.coded]
        self.dropped = [self.places.index(self.kind._fields.index(name)) for name in dropped]
        self.saved: Any = None
        self.started: Any = None
        self.needs: Dict[Tuple[bool, ...], Gradients] = {}

    def trees(self, present: Sequence) -> Tuple[Any, list]:
        """The node's named tuple and the list of parts of what is present of both, or of something for each of these."""
        found: list = [None] * len(self.kind._fields)
        for place, one in zip(self.places, present):
            found[place] = one
        return self.kind(*found), self.layout.all_of(present[self.tensors :])

    def whole_of(self, present: Sequence) -> Optional[torch.Tensor]:
        """What `side_by_side` finds of the neighbouring weights among what is present."""
        return self.layout.whole_of(present[self.tensors :])

    def given(self, present: Sequence, sizes: Tuple[int, ...], whole: Optional[torch.Tensor]) -> Given:
        return Given(self.layout, *self.trees(present), sizes, whole, self.in_graph)

    def needed(self, needs: Tuple[bool, ...]) -> Gradients:
        """What needs a gradient. needs: of what is present."""
        found = self.needs.get(needs)
        if found is None:
            tensors, parts = self.trees(needs)
            found = self.needs[needs] = Gradients(self.kind(*map(bool, tensors)), parts)
        return found

    def present(self, gradients: Gradients) -> list:
        """Lists the gradients of what is present."""
        return [*[gradients.tensors[place] for place in self.places], *self.layout.present(gradients.parts)]

    def kept(self, present: Sequence) -> Sequence:
        """Returns what is present, with None for what the backward pass does not read."""
        return [None if i in self.dropped else one for i, one in enumerate(present)] if self.dropped else present

    def in_tensors(self, present: Sequence) -> Sequence:
        """Returns what is present, and what follows it, as a replayed call takes it: codes in place of weights, and their scales last."""
        if not self.coded or not self.layout.replayable:
            return present
        found, weights = list(present), [present[place] for place in self.coded]
        for place, weight in zip(self.coded, weights):
            found[place] = weight.codes
        return found + [weight.scale for weight in weights]

    def in_weights(self, tensors: Sequence) -> Sequence:
        """Returns what `in_tensors` was given."""
        if not self.coded or not self.layout.replayable:
            return tensors
        count = len(tensors) - len(self.coded)
        found = list(tensors[:count])
        for place, scale in zip(self.coded, tensors[count:]):
            found[place] = EightBitWeight(found[place], scale)
        return found


IDENTITIES.add(Form)


class Node:
    """A forward and a backward function as one differentiable operation.

    Args:
        name: of the autograd function.
        check: raises ValueError when arguments do not fit. Its arguments are the description, the node's named tuple, all projections, the
            sizes and the dtype of the products. A replayed call has the arguments of an earlier one, which was checked.
        reference: of the same arguments, returns the results, computed by PyTorch's operations, which every kind of tensor takes.
        forward: `Given` -> (results, saved), named tuples or lists of optional tensors, results without None.
        backward: (`Given`, gradients of the results, saved, what needs a gradient as `Gradients`) -> `Gradients`.
        start, finish: forward in two parts for `apply_in_parts`: `Given` -> (started, saved), and (`Given`, started, saved) -> the only
            result, which has the first tensor's shape.
        in_graph: what a graph gets instead of `reference`. Then forward returns contiguous tensors there, also by another layout; those
            that are both results and saved are the last results and the first that are saved.
        passes_on: whether the first tensor is one more result, for the residual connection, and its gradient the last one.
        packs: whether `Given.whole` is read.
        dropped: (the description, node's named tuple) -> the names of the tensors that the backward function does not read.
        in_parts: (node's named tuple) -> whether the backward function reads nothing that `finish` makes.
        spends: the names of saved tensors that the backward function writes over, and makes again where they are None, as in a second
            backward pass. Such a node is not replayed: a plan writes to none of its arguments.
    """

    def __init__(
        self,
        name: str,
        check: Callable,
        reference: Callable,
        forward: Callable,
        backward: Callable,
        start: Optional[Callable] = None,
        finish: Optional[Callable] = None,
        in_graph: Optional[InGraph] = None,
        passes_on: bool = False,
        packs: bool = True,
        dropped: Callable[[Any, Any], Sequence[str]] = lambda spec, tensors: (),
        in_parts: Callable[[Any], bool] = lambda tensors: True,
        spends: Sequence[str] = (),
    ):
        self.check, self.reference, self.forward, self.backward = check, reference, forward, backward
        self.passes_on, self.packs, self.dropped = passes_on, packs, dropped
        self.start, self.finish, self.in_parts, self.spends = start, finish, in_parts, spends
        # A report of what is replayed names the node's own functions.
        self.run = update_wrapper(partial(_run, self), forward)
        self.gradients = update_wrapper(partial(_gradients, self), backward)
        again = (lambda function: function) if spends else replayed_with_products
        self.run_again, self.gradients_again = again(self.run), again(self.gradients)
        self.function = _function(name, self)
        self.in_graph = None if in_graph is None else in_graph_of(self, in_graph)

    def __call__(self, spec: tuple, tensors, groups: Sequence[Sequence[Projection]], sizes: Tuple[int, ...], dtype: torch.dtype,
                 products: str = "bf16"):
        """Returns the results. tensors: the node's named tuple, its first one [..., features]; groups: the projections by what they read;
        dtype: of the products; products: "fp8" for those in eight bits where they are possible and pay (eight_bits.py)."""
        present: list = [part for group in groups for projection in group for part in projection[:SIZE] if part is not None]
        dense = [part for part in present if not isinstance(part, CodedWeight)]
        compiling = torch.compiler.is_compiling()
        eights = () if products == "bf16" else groups_in_eight(groups, dtype, tensors[0])
        if compiling or not is_ordinary(*tensors, *dense):
            projections = [projection for group in groups for projection in group]
            self.check(spec, tensors, projections, sizes, dtype)
            if compiling and self.in_graph is not None:
                return self.in_graph(spec, tensors, groups, sizes, dtype, present, eights)
            return self.reference(spec, tensors, projections, sizes, dtype)
        layout = layout_of(spec, groups, dtype, eights)
        form = self.form_of(layout, tensors)
        arguments = form, sizes, *[tensor for tensor in tensors if tensor is not None], *present
        if self.start is not None and self.in_parts(tensors):
            return apply_in_parts(self.function, *arguments)
        return apply_function(self.function, None, *arguments)

    def form_of(self, layout: NodeLayout, tensors) -> Form:
        key = self, tuple([tensor is not None for tensor in tensors])
        found = layout.forms.get(key)
        if found is None:
            found = layout.forms[key] = self.new_form(layout, tensors)
        return found

    def new_form(self, layout: NodeLayout, tensors, in_graph: bool = False) -> Form:
        return Form(layout, tensors, self.dropped(layout.spec, tensors), self.packs, in_graph)


def _run(node: Node, *args) -> list:
    """Returns the results, or what `start` returns, and what is saved. args: what is present, as of `Form.in_tensors`; whole, sizes,
    whether to finish, form."""
    *present, whole, sizes, finish, form = args
    given, layout = form.given(form.in_weights(present), sizes, whole), form.layout
    if not form.in_graph:
        projections = [Projection(*each) for each in by_projection(given.parts)]
        node.check(layout.spec, given.tensors, projections, sizes, layout.dtype)
    first, saved = node.forward(given) if finish or node.start is None else node.start(given)
    form.saved, found = shape_of(saved), flat(first)
    if finish:
        form.count = len(found)
    else:  # whose layout may be a new one, of which nothing has finished yet
        form.started, form.count = shape_of(first), 1
    found += flat(saved)
    return _once_each(form, found) if form.in_graph else found


def _once_each(form: Form, found: Sequence[Optional[torch.Tensor]]) -> List[torch.Tensor]:
    """Returns what an operator returns of the results and what is saved, of which some may be both."""
    places: Dict[int, int] = {}
    results: List[torch.Tensor] = []
    for tensor in found:
        if tensor is not None and id(tensor) not in places:
            places[id(tensor)] = len(results)
            results.append(tensor.contiguous())
    form.order = [-1 if tensor is None else places[id(tensor)] for tensor in found[form.count :]]
    return results


def _gradients(node: Node, *args, spent: bool = False) -> list:
    """Returns the gradients of what is present. args: the gradients of the results; what is present and saved, as of `Form.in_tensors`;
    whole, needs (of what is present), form. spent: whether an earlier backward pass has written over what the node spends."""
    *values, whole, needs, form = args
    first, count = form.count + node.passes_on, len(needs)
    grads, kept = values[:first], form.in_weights(values[first:])
    saved = filled(form.saved, kept[count:])
    if node.spends and (spent or form.in_graph):  # an operator writes to none of its arguments
        spare = {name: None if spent else getattr(saved, name) for name in node.spends}
        saved = saved._replace(**{name: None if tensor is None else tensor.clone() for name, tensor in spare.items()})
    found = form.present(node.backward(form.given(kept[:count], (), whole), grads, saved, form.needed(needs)))
    return [grad.contiguous() for grad in found if grad is not None] if form.in_graph else found


def _function(name: str, node: Node):
    """Makes the autograd function of a node."""

    def forward(ctx, rest: Rest, form: Form, sizes: Tuple[int, ...], *present):
        """rest: as of `apply_in_parts`."""
        run, whole = node.run_again if form.layout.replayable else node.run, form.whole_of(present) if form.packed else None
        found = run(*form.in_tensors(present), whole, sizes, rest is None, form)
        first = form.count if rest is None else count_of(form.started)
        keep(ctx, (*form.kept(present), *found[first:]))
        ctx.form, ctx.spent = form, False
        if rest is not None:
            return unfinished(rest, partial(_finish, node, form, sizes, present, found), present[0].shape, present[0])
        if node.passes_on:
            return (*found[:first], present[0].view_as(present[0]))
        return found[0] if first == 1 else tuple(found[:first])

    @outside_autocast
    def backward(ctx, *grads):
        form, kept, needs = ctx.form, kept_of(ctx), ctx.needs_input_grad[3:]
        run = node.gradients_again if form.layout.replayable else node.gradients
        if node.spends:
            run, ctx.spent = partial(run, spent=True) if ctx.spent else run, True
        whole = form.whole_of(kept) if form.packed else None
        return (None, None, None, *run(*grads, *form.in_tensors(kept), whole, needs, form))

    backward.__module__, backward.__qualname__ = node.backward.__module__, f"{name}.backward"
    methods = {"forward": staticmethod(forward), "backward": staticmethod(once_differentiable(backward))}
    return type(name, (torch.autograd.Function,), {**methods, "__module__": node.forward.__module__})


def _finish(node: Node, form: Form, sizes: Tuple[int, ...], present: Sequence, found: Sequence) -> torch.Tensor:
    """Computes the result of a node that has started."""
    first = count_of(form.started)
    assert node.finish is not None
    return node.finish(form.given(present, sizes, None), filled(form.started, found[:first]), filled(form.saved, found[first:]))
