"""Operators for a graph of torch.compile or torch.export, one for each of a node's two functions.

An operator takes the tensors that are not None as one list, the sizes as another, and all else as text, which is read once: each argument
costs the host some time in each call, and a stored graph means the same in another process. What it returns is contiguous and shares no
memory with its arguments or among each other, as a compiler expects it. Its fake function is the node's own, on tensors without data; a
gradient looks like its tensor. Whether weights lie side by side in memory is known when the operator runs, so its results do not show it.
"""

import json
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import torch

from ..._ops import add_op_namespace_prefix
from ..ops.autograd import once_differentiable
from ..ops.operators import constant_when_traced, operator_of
from .projection import NodeLayout, need_traceable, projection_of, told_of
from .spec import constants_of, spec_of

__all__ = ["InGraph", "in_graph_of"]

_text = constant_when_traced(lambda *values: json.dumps(values, default=str))  # a graph has one guard for it


def _of_first_loading(name: str, mine: Any) -> Any:
    """Returns what the first loading of this build keeps by a name: where a build is loaded twice, its operators are those of the first
    loading, so what is known of their results is known there. mine: this loading's."""
    namespace, _, _ = add_op_namespace_prefix(name).partition("::")
    return vars(getattr(torch.ops, namespace)).setdefault(f"_bastile_{name}", mine)


class InGraph(NamedTuple):
    """Says how a node looks in a graph.

    name: of the operator. spec, tensors, saved: the classes of the description, of the node's named tuple and of what is saved.
    constant: names of tensors without a gradient. results: makes the node's results of those of the operator.
    """

    name: str
    spec: type
    tensors: Any
    saved: type
    constant: Sequence[str] = ()
    results: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] = lambda found: found


def in_graph_of(node: Any, of: InGraph) -> Callable:
    """Registers the operators of a `Node`. Returns a function that computes it in a graph, of `Node.__call__`'s arguments, the tensors of
    all projections, and the places of the groups whose products are made in eight bits."""
    forms: Dict[str, Any] = {}
    backwards: Dict[str, tuple] = {}

    def form_of(text: str):
        found = forms.get(text)
        if found is None:
            spec, dtype, there, lengths, told, eights = json.loads(text)
            projections = map(projection_of, told)
            groups = [[next(projections) for _ in range(length)] for length in lengths]
            tensors = of.tensors(*[each or None for each in there])
            layout = NodeLayout(spec_of(of.spec, spec), groups, getattr(torch, dtype[len("torch.") :]), eights)
            found = forms[text] = node.new_form(layout, tensors, True)
        return found

    def first_saved(form) -> int:
        return min((place for place in form.order if place >= 0), default=form.count)

    def backward_of(text: str) -> Tuple[Any, Tuple[bool, ...], List[int]]:
        """(form, what needs a gradient, which of the operator's tensors are the first arguments of `_gradients`, -1 for None)"""
        found = backwards.get(text)
        if found is None:
            forward, needs, count, lengths, order = json.loads(text)
            form = form_of(forward)
            form.count, form.saved, form.order = count, (of.saved, tuple(lengths)), order
            there = [True] * (count + node.passes_on) + [i not in form.dropped for i in range(len(needs))]
            given = iter(range(len(there)))
            places, start = [next(given) if each else -1 for each in there], sum(there) - first_saved(form)
            found = backwards[text] = form, tuple(needs), places + [-1 if place < 0 else start + place for place in order]
        return found

    def run(tensors: List[torch.Tensor], form: str, sizes: List[int]) -> List[torch.Tensor]:
        if torch.is_grad_enabled():  # never in a graph of torch.compile
            with torch.no_grad():
                return run(tensors, form, sizes)
        known = form_of(form)
        whole = known.whole_of(tensors) if known.packed else None
        return list(node.run_again(*tensors, whole, tuple(sizes), True, known))

    @torch.no_grad()
    def fake(tensors, form, sizes):
        return node.run(*tensors, None, tuple(sizes), True, form_of(form))

    def run_gradients(tensors: List[torch.Tensor], form: str, sizes: List[int]) -> List[torch.Tensor]:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return run_gradients(tensors, form, sizes)
        known, needs, places = backward_of(form)
        values = [None if place < 0 else tensors[place] for place in places]
        whole = known.whole_of(values[known.count + node.passes_on :]) if known.packed else None
        return list(node.gradients_again(*values, whole, needs, known))

    def fake_gradients(tensors, form, sizes):
        known, needs, places = backward_of(form)
        start = known.count + node.passes_on
        like = [tensors[max(place, 0)] for place in places[start : start + len(needs)]]  # of what was dropped: like the result
        return [tensor.new_empty(tensor.shape) for tensor, need in zip(like, needs) if need]

    operator, operator_gradients = operator_of(of.name, run, fake), operator_of(f"{of.name}_backward", run_gradients, fake_gradients)

    def backward_text(text, needs):
        form = form_of(text)
        return json.dumps([text, needs, form.count, form.saved[1], form.order])

    # A tracer calls these after the operator, whose fake function has told a form of the same loading what they read.
    known_of_text = (lambda text: form_of(text).count), (lambda text: first_saved(form_of(text))), backward_text
    count_of, start_of, backward_text = map(constant_when_traced, _of_first_loading(f"{of.name}_text", known_of_text))

    def results_of(found, text, x):
        results = of.results(found[: count_of(text)])
        return (*results, x) if node.passes_on else results[0] if len(results) == 1 else tuple(results)

    def forward(ctx, text, sizes, needs, dropped, *present):
        found = operator(list(present), text, list(sizes))
        kept = [one for i, one in enumerate(present) if i not in dropped]
        ctx.save_for_backward(*kept, *found[start_of(text) :])
        ctx.text, ctx.needs = backward_text(text, needs), needs
        return results_of(found, text, present[0].view_as(present[0]))

    def backward(ctx, *grads):
        found = iter(operator_gradients([*grads, *ctx.saved_tensors], ctx.text, []))
        return (None, None, None, None, *[next(found) if need else None for need in ctx.needs])

    backward.__qualname__ = f"{of.name}.backward"
    methods = {"forward": staticmethod(forward), "backward": staticmethod(once_differentiable(backward))}
    function: Any = type(f"{of.name}_in_graph", (torch.autograd.Function,), methods)

    def compute(spec, tensors, groups, sizes, dtype, parts, eights):
        projections = [projection for group in groups for projection in group]
        need_traceable(projections)
        there, lengths = tuple([tensor is not None for tensor in tensors]), tuple([len(group) for group in groups])
        text = _text(constants_of(spec), dtype, there, lengths, tuple([told_of(projection) for projection in projections]), eights)
        present = [*[tensor for tensor in tensors if tensor is not None], *parts]
        names = [name for name, is_there in zip(of.tensors._fields, there) if is_there]
        dropped, constant = ([i for i, name in enumerate(names) if name in listed] for listed in (node.dropped(spec, tensors), of.constant))
        needs = [torch.is_grad_enabled() and one.requires_grad and i not in constant for i, one in enumerate(present)]
        if any(needs):
            return function.apply(text, tuple(sizes), tuple(needs), tuple(dropped), *present)
        return results_of(operator(present, text, list(sizes)), text, tensors[0])

    return compute
