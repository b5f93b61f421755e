"""Graphs of decoder layers that follow each other: one for their forward passes, one for their backward passes.

The graphs read their inputs from memory of their own (`InputBuffer`). A call of the first layer replays the forward graph and returns what
the others will return, too (`ReplayedOutputs`). What the graphs of a model compute lies in one pool of memory, so a second forward pass
is replayed only after the first one's backward pass (`_Ticket`).
"""

import contextlib
import functools
import operator
import weakref
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from ...ops.attention import AttentionPlan
from ...ops.autograd import Function
from ...runtime.device import version_of
from ..attention.masks import Rule, Visible
from ..layer.checkpointing import is_checkpointed
from ..parts.modules import SAVED, WITHOUT_GRAPHS
from ..parts.watch import Watch
from .graph_memory import InputBuffer, Memory, move_gradients
from .graphed_checkpoints import checkpointed, without_their_own

__all__ = [
    "GRAPHS", "GraphedLayers", "Handover", "Observed", "ReplayedOutputs", "autocast_dtype", "run", "without_tensors",
]  # fmt: skip

GRAPHS = SAVED + "graphs"  # on a layer: its place in its model's graphs
VERSION = operator.attrgetter("_version")  # `version_of` in C, of tensors whose writes are counted


def run(layer, args, kwargs):
    """Calls the forward that a layer has without its graphs."""
    before = layer.__dict__.get(WITHOUT_GRAPHS)
    return before(*args, **kwargs) if before is not None else type(layer).forward(layer, *args, **kwargs)


def autocast_dtype(device: str) -> Optional[torch.dtype]:
    """The dtype of autocast where it is on."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class _Ticket:
    """Stands in `waiting` from a replayed forward pass until its backward pass has ended, or can be asked for no more."""

    def __init__(self, waiting: set):
        self.waiting = waiting
        waiting.add(id(self))

    def close(self) -> None:
        self.waiting.discard(id(self))

    __del__ = close


def _end_backward(ticket: _Ticket, memory: Memory) -> None:
    ticket.close()
    if not ticket.waiting:
        memory.end_backward()


class Observed(NamedTuple):
    """What a layer got in an observed pass.

    key: what has to be equal for a replay; numbers: of its tensors among all that the layers get; kwargs: without the tensors; joins:
    whether it got the very output and the very arguments of the layer before it, and neither of them drew random numbers; drew: whether
    it did.
    """

    key: tuple
    numbers: List[int]
    kwargs: dict
    autocast: Optional[torch.dtype]
    joins: bool
    drew: bool


class GraphedLayers:
    """The graphs of layers that follow each other, and the memory that they read and write."""

    def __init__(
        self,
        first: int,
        layers: Sequence[nn.Module],
        observed: Sequence[Observed],
        inputs: Sequence[InputBuffer],
        memory: Memory,
        waiting: set,
        on_change: Callable[[bool], None],
    ):
        """first: number of the first layer in its model; observed: what each of `layers` got; inputs: of all layers of the model; memory:
        shared with the graphs of other sizes; waiting: one entry for each replayed forward pass of the model that waits for its backward
        pass; on_change: called when a backward pass cannot be replayed: with True if weights have moved since the forward pass, with False
        if a layer before the last one got a gradient for its output."""
        self.first, self.key, self.autocast = first, observed[0].key, observed[0].autocast
        self.memory, self.waiting, self.on_change = memory, waiting, on_change
        self.modules = list(map(weakref.ref, layers))
        buffers = [[inputs[number] for number in layer.numbers] for layer in observed]
        self.kwargs = [_with_tensors(layer.kwargs, iter(mine)) for layer, mine in zip(observed, buffers)]
        self.buffers = buffers[0]
        self.watch = Watch(layers, ignored=(GRAPHS,))
        self.counted = [tensor for tensor in self.watch.tensors if not tensor.is_inference()]
        self.saved: List[nn.Parameter] = []
        self.parameters = list(dict.fromkeys(p for layer in layers for p in layer.parameters() if p.requires_grad))
        self.recorded: Dict[int, nn.Parameter] = {}  # what stands for each of them, by its id, while the graphs are recorded
        self.gradients: List[Optional[torch.Tensor]] = []
        self.computed: List[torch.Tensor] = []
        self.outputs: List[torch.Tensor] = []  # of each layer
        self.frozen: List[bool] = []  # of each layer: whether its output needs no gradient
        self.dx: Optional[torch.Tensor] = None
        self.dout: Optional[torch.Tensor] = None

    def layers(self) -> list:
        return [layer() for layer in self.modules]

    def call(self, x: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Tuple[torch.Tensor, ...]:
        """Replays the forward graph. tensors: those that the first layer got. Returns the output of each layer, as a copy where
        no backward pass keeps the next replay from overwriting it."""
        for buffer, tensor in zip(self.buffers, tensors):
            buffer.load(tensor)
        outputs = _Replay.apply(self, x, *self.parameters)
        return tuple(output.clone() for output in outputs) if self.frozen[-1] else outputs

    def record_forward(self, pool, x: torch.Tensor) -> None:
        """Records the forward passes of all layers on `x`, the memory that the graphs read their input from."""
        self.x, layers = x, self.layers()
        self.forward = pool.graph()
        twins = self.recorded = {id(p): _twin(p) for p in self.parameters}
        names = [("output", self.first + number) for number in range(len(layers))]

        def function():
            with _exchanged(layers, twins):
                self.computed = _run_all(layers, self.x, self.kwargs)
            return tuple(self.memory.settled(names, [output.detach() for output in self.computed]))

        self.outputs = list(self.forward.record(function))
        self.frozen = [not output.requires_grad for output in self.computed]
        # Autograd checks the versions of saved weights. A checkpoint saves none: its second run reads the current ones.
        saving = [layer for layer, frozen in zip(layers, self.frozen) if not (frozen or is_checkpointed(layer))]
        self.saved = [weight for layer in saving for weight in layer.parameters() if not weight.is_inference()]
        for output in self.computed:
            _refuse_leaves(output, self.parameters)

    def record_backward(self, pool, next_dx: Optional[torch.Tensor]) -> None:
        """Records the backward passes. next_dx: where the graphs of the layers after these write the gradient of what these return."""
        if self.frozen[-1]:
            return
        self.dout = self.memory.buffer("dout", self.outputs[-1]) if next_dx is None else next_dx
        layers, twins = self.layers(), self.recorded
        wanted = self._wanted(self.x, twins.values())
        self.backward = pool.graph()

        def function():
            with _exchanged(layers, twins), without_their_own(layers):  # checkpointed layers run again
                found = torch.autograd.grad(self.computed[-1], wanted, self.dout, allow_unused=True)
            dx, gradients = self._sorted(found)
            settled = self.memory.settled_gradients(self.first, self.parameters, gradients)
            return (*self.memory.settled([("dx", self.first)], [dx]), *settled)

        self.dx, *self.gradients = self.backward.record(function)

    def _wanted(self, x, parameters) -> list:
        return [*([x] if x.requires_grad else []), *parameters]

    def _sorted(self, found: Sequence) -> Tuple[Optional[torch.Tensor], list]:
        """(the gradient of x, those of the parameters)"""
        return (found[0], list(found[1:])) if self.x.requires_grad else (None, list(found))

    def end_recording(self) -> None:
        """Frees what only recording needed."""
        self.computed, self.recorded = [], {}

    def release_gradients(self) -> None:
        """Moves the gradients that parameters still have from the last backward pass out of the memory that this one writes."""
        move_gradients(self.parameters, self.gradients)

    def gradients_by_running_again(self, douts: Sequence[Optional[torch.Tensor]], versions: Sequence[int], moved: bool) -> tuple:
        """(the gradient of x, those of the parameters), computed without graphs where the backward graph would be wrong.

        Either the output of a layer before the last one was used or changed, unlike in the observed pass; or weights have moved, as when
        FSDP frees them and gathers them in other memory. versions: of the outputs when they were returned. moved: whether weights have.
        """
        self.on_change(moved)
        count = 1 + max(i for i, dout in enumerate(douts) if dout is not None)
        device, dtype = self.x.device.type, self.autocast
        with torch.enable_grad(), torch.autocast(device, dtype, enabled=dtype is not None):
            x = self.x.detach().requires_grad_(self.x.requires_grad)
            outputs = _run_all(self.layers()[:count], x, self.kwargs)
            for again, output, version in zip(outputs, self.outputs, versions):
                if output._version == version and not torch.equal(again, output):
                    what = "weights of a captured layer were replaced between its forward pass and its backward pass" if moved else (
                        "the output of a captured layer was used by something other than the next layer. The layers ran again for that, "
                        "and drew other random numbers"
                    )
                    raise RuntimeError(f"{what}. Call reset() to run the model without graphs")
            used = [(output, dout) for output, dout in zip(outputs, douts) if dout is not None]
            roots, gradients = map(list, zip(*used))
            return self._sorted(torch.autograd.grad(roots, self._wanted(x, self.parameters), gradients, allow_unused=True))


def _twin(parameter: nn.Parameter) -> nn.Parameter:
    """A leaf over the memory of a parameter, to record with.

    Autograd's node of the parameter itself remembers the stream of the pass that made it, and lives as long as a loss or an
    output of that pass does: a recording through it would wait for that stream, which CUDA refuses. And hooks of the parameter see the
    gradient that a replay returns, not the one of the recording.
    """
    twin = type(parameter)(parameter.detach())
    twin.__dict__.update((name, value) for name, value in parameter.__dict__.items() if not name.startswith("_"))
    return twin


@contextlib.contextmanager
def _exchanged(layers, twins: Dict[int, nn.Parameter]):
    """Replaces the parameters of modules by their twins, as a context. twins: by the parameters' id."""
    held = [module._parameters for layer in layers for module in layer.modules()]
    before = [(owner, name, value) for owner in held for name, value in owner.items() if id(value) in twins]
    for owner, name, value in before:
        owner[name] = twins[id(value)]
    try:
        yield
    finally:
        for owner, name, value in before:
            owner[name] = value


def _refuse_leaves(output: torch.Tensor, parameters: Iterable[nn.Parameter]) -> None:
    """Raises RuntimeError where an output depends on one of the parameters themselves, not on its twin.

    A layer that keeps a parameter elsewhere than in its modules' parameters would be recorded without its gradient.
    """
    refused = {id(parameter) for parameter in parameters}
    seen, ahead = set(), [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in refused:
            raise RuntimeError(f"a parameter of shape {list(leaf.shape)} is used that no module holds under a name of its own")
        ahead += [following for following, _ in node.next_functions]


def _run_all(layers, x: torch.Tensor, kwargs: Sequence[dict]) -> List[torch.Tensor]:
    """The output of each layer, run one after the other."""
    outputs = []
    with without_their_own(layers):
        for layer, mine in zip(layers, kwargs):
            x = checkpointed(layer, functools.partial(_run_one, layer, mine), x)
            outputs.append(x)
    return outputs


def _run_one(layer, kwargs: dict, x: torch.Tensor) -> torch.Tensor:
    return run(layer, (x,), kwargs)


class _Replay(Function):
    def forward(ctx: Any, unit, x, *parameters):
        ctx.unit = unit
        ctx.ticket = _Ticket(unit.waiting)
        ctx.set_materialize_grads(False)
        if x.data_ptr() != unit.x.data_ptr():
            unit.x.copy_(x)
        unit.forward.replay()
        outputs = [output.detach() for output in unit.outputs]
        ctx.versions = [output._version for output in outputs]
        ctx.saved_versions = list(map(VERSION, unit.saved))
        ctx.mark_non_differentiable(*(output for output, frozen in zip(outputs, unit.frozen) if frozen))
        return tuple(outputs)

    def backward(ctx: Any, *douts):
        unit, ticket = ctx.unit, ctx.ticket
        if ticket is None:
            raise RuntimeError(
                "the backward pass of a captured layer ran a second time (retain_graph=True), and the graphs have written over what it "
                "needs. Call reset() to run the model without them"
            )
        ctx.ticket = None
        # Until the backward pass has ended, gradients that autograd has yet to add to the parameters' lie in the graphs' memory.
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_end_backward, ticket, unit.memory))
        *inner, dout = douts
        between = any(gradient is not None for gradient in inner)
        if dout is None and not between:
            return (None,) * (2 + len(unit.parameters))
        if list(map(VERSION, unit.saved)) != ctx.saved_versions:
            what = "a weight of a captured layer, between its forward pass and its backward pass"
            raise RuntimeError(f"one of the variables needed for gradient computation has been modified by an inplace operation: {what}")
        moved = unit.watch.moved()
        if between or moved:
            dx, gradients = unit.gradients_by_running_again(douts, ctx.versions, moved)
            return (None, dx, *gradients)
        unit.release_gradients()
        if dout.data_ptr() != unit.dout.data_ptr():
            unit.dout.copy_(dout)
        unit.backward.replay()
        take = torch.clone if _are_handed_out(ctx.next_functions[2:3]) else torch.detach
        return (None, *(None if t is None else take(t) for t in (unit.dx, *unit.gradients)))


def _are_handed_out(edges: Sequence[tuple]) -> bool:
    """Tells whether gradients go to a caller of `torch.autograd.grad`, who may keep them. edges: to one parameter, if any is trained."""
    try:
        return not edges or not torch._C._will_engine_execute_node(edges[0][0])
    except RuntimeError:  # raised for a leaf whose gradient `torch.autograd.grad` was asked for
        return True


class Handover:
    """A layer's output as it was returned, and the arguments that the layer got."""

    __slots__ = ("output", "version", "kwargs")

    def __init__(self, output: torch.Tensor, kwargs: dict):
        self.output, self.version, self.kwargs = output, output._version, kwargs

    def leads_to(self, x: torch.Tensor, kwargs: dict) -> bool:
        """Tells whether another layer gets that output, unchanged, and those very arguments."""
        mine = self.kwargs
        if x is not self.output or x._version != self.version or kwargs.keys() != mine.keys():
            return False
        return all(map(operator.is_, map(kwargs.get, mine), mine.values()))


class ReplayedOutputs:
    """What a replay has computed for the layers after the first one, whose calls are still to come.

    kwargs: what the first layer got; tensors: those of them that were copied.
    """

    def __init__(self, graphed: GraphedLayers, outputs: Sequence[torch.Tensor], kwargs: dict, tensors: Sequence[torch.Tensor]):
        self.outputs, self.tensors, self.autocast = outputs, tensors, graphed.autocast
        self.versions = list(map(version_of, tensors))
        self.weights, self.weights_were = graphed.counted, list(map(VERSION, graphed.counted))
        self.taken = 1
        self.handover = Handover(outputs[0], kwargs)

    def take(self, x: torch.Tensor, args, kwargs) -> Optional[torch.Tensor]:
        """The output of the next layer, where its call is the recorded one; None where it differs."""
        if len(args) != 1 or not self.handover.leads_to(x, kwargs):
            return None
        if list(map(VERSION, self.weights)) != self.weights_were:  # written to between two layers
            return None
        if list(map(version_of, self.tensors)) != self.versions or autocast_dtype(x.device.type) != self.autocast:
            return None
        output = self.outputs[self.taken]
        self.taken += 1
        self.handover = Handover(output, kwargs)
        return output


class _Planned(Visible):
    """Stands in a recorded layer for the `Visible` of a pass. Its plan lies where the graphs read it."""

    def __init__(self, seen: Visible):
        self.window = seen.rule.window if seen.rule else None
        super().__init__(seen.arguments, Rule(self.window), None)

    def is_plain(self) -> bool:
        return False

    def filled(self, limits: torch.Tensor, walks: torch.Tensor) -> "_Planned":
        self.kept = AttentionPlan.__new__(AttentionPlan)
        self.kept.tokens, self.kept.causal, self.kept.window = self.batch * self.tokens, True, self.window
        self.kept.limits, self.kept.walks = limits, walks
        return self

    def plan(self, device, cu_seqlens=None, position_ids=None) -> AttentionPlan:
        return self.kept

    def mask(self, kind: str, dtype: torch.dtype, device: torch.device):
        raise RuntimeError("attention asks for a mask of transformers, in which a graph would go on seeing the documents of this pass")


def without_tensors(value, planned: bool):
    """An argument of a layer with a mark in place of each tensor, for `_with_tensors`. planned: whether a `Visible` is read as a plan."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor
    if type(value) is tuple:
        return tuple(without_tensors(part, planned) for part in value)
    if type(value) is Visible:
        return _Planned(value) if planned else Visible({**value.arguments, "attention_mask": None}, value.rule, None)
    return value


def _with_tensors(value, inputs):
    """The argument again, reading its tensors from the next of `inputs`."""
    if value is torch.Tensor:
        return next(inputs).buffer
    if type(value) is tuple:
        return tuple(_with_tensors(part, inputs) for part in value)
    if type(value) is _Planned:
        return value.filled(next(inputs).buffer, next(inputs).buffer)
    if type(value) is dict:
        return {name: _with_tensors(part, inputs) for name, part in value.items()}
    return value
