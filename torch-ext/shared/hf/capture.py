"""Replays a model's decoder layers as CUDA graphs in training, for batches of one shape: two launches for several layers instead of about
forty for each.

With few tokens the host cannot start a layer's kernels as fast as the GPU finishes them. The layers' forward and backward passes are
therefore recorded once (torch.cuda.CUDAGraph) and replayed. Everything that is not exactly what was recorded runs as before: other shapes,
evaluation, generation, hooks, gradient checkpointing, a second forward pass ahead of the first one's backward pass.

The first training pass of a shape runs as before and is looked at, the second one is recorded at its first layer. Layers of which each
takes what the one before it returned, and no other tensors than that one, share a graph: the call of the first one replays it, and those
of the others return what it has computed for them. The graphs share a pool of memory. They are recorded in the order in which they are
replayed, so what one leaves free the next one uses, and the output of one is where the next one reads its input.
"""

import contextlib
import gc
import operator
import warnings
import weakref
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from ..ops.attention import AttentionPlan
from ..ops.common import once_differentiable
from ..runtime.device import PLAIN, is_ordinary
from .attention import documents_of
from .binding import BoundForward
from .masks import Rule, Visible
from .modules import LAYER, SAVED, all_are_listened_to

GRAPHS = SAVED + "graphs"  # on a layer: its `_Layer`; on the causal LM: its `_Model`
WITHOUT_GRAPHS = SAVED + "without_graphs"  # on a layer: the forward that stood on it before, None where there was none
OF_THE_LOSS = frozenset(("num_items_in_batch", "num_items", "shift_labels", "ignore_index", "labels"))  # pass through a layer unread
OF_DOCUMENTS = frozenset(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))  # what a plan of the attention says already
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
SIMPLE = (type(None), bool, int, float, str, torch.dtype, torch.device)
RECORDINGS = 3  # of one shape with fewer than REPLAYS passes for each, after which a model that changes all the time runs as before
REPLAYS = 16
TOGETHER = 7  # layers of one graph, at most: so few that the host starts a graph while the GPU still works on the one before
PLANS = 8  # kinds of passes that a model is looked at for: of its shapes, each with and without a mask


@contextlib.contextmanager
def _without_garbage_collection():
    """Python collects no garbage meanwhile. A captured model that is garbage takes its graphs along, and where a graph is destroyed while
    another is recorded, CUDA gives up the recording."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _end_given_up(device: torch.device, pool) -> None:
    """Ends on the current stream what torch leaves of a recording that CUDA gave up (2.11 does; pytorch/pytorch#176752 and #180395 mended
    it): the allocator takes it to go on, and so does the random number generator, which raises an error in all that draws and in each
    replay of other graphs."""
    names = "_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"  # torch 2.6 and 2.7 have the second one
    end = next(getattr(torch._C, name) for name in names if hasattr(torch._C, name))
    with contextlib.suppress(RuntimeError):  # of a torch that has ended it for the allocator
        end(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
    # The generator leaves a recording at the end of one that succeeds. A new state (Generator.graphsafe_set_state) would help what draws
    # outside of graphs alone: those that there are keep the old one.
    graph, written = torch.cuda.CUDAGraph(), torch.empty(1, device=device)
    graph.capture_begin(capture_error_mode="thread_local")
    written.zero_()  # torch warns of a graph without any work
    graph.capture_end()


class Graph:
    """What a function does on the GPU, recorded in a pool of memory."""

    def __init__(self, recorder: "Recorder"):
        self.graph, self.recorder = torch.cuda.CUDAGraph(), recorder

    def record(self, function: Callable[[], Any]) -> Any:
        """Returns what the function returns, whose tensors have their values after each `replay`."""
        with torch.cuda.stream(self.recorder.stream), _without_garbage_collection():
            # Other threads (a loader that pins memory) may go on meanwhile.
            self.graph.capture_begin(pool=self.recorder.pool, capture_error_mode="thread_local")
            try:
                return function()
            finally:
                self._end()

    def _end(self) -> None:
        try:
            self.graph.capture_end()
        except Exception:
            _end_given_up(self.recorder.device, self.recorder.pool)
            self.recorder.take_another_pool()
            raise

    def replay(self) -> None:
        self.graph.replay()


class Recorder:
    """Makes graphs of one device that share a pool of memory."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.take_another_pool()

    def take_another_pool(self) -> None:
        """For the next graphs. The allocator of pinned memory takes a recording that CUDA gave up to go on, and no other in its pool."""
        self.pool = torch.cuda.graph_pool_handle()

    def graph(self) -> Graph:
        return Graph(self)

    def __enter__(self):
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # a pool takes no memory that the others keep for themselves
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return self

    def __exit__(self, *error):
        torch.cuda.current_stream(self.device).wait_stream(self.stream)


def can_record(device: torch.device) -> bool:
    return device.type == "cuda"


def is_recording(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


_NEEDS_GRAD = operator.attrgetter("requires_grad")


class _Watch:
    """Notices what a graph of modules would not: moved or replaced weights, other submodules, hooks, switches. A look takes 10 us a
    decoder layer: everything is compared by functions that are no Python."""

    STANDARD = frozenset(nn.Module().__dict__) | {GRAPHS}

    def __init__(self, modules: Iterable[nn.Module]):
        self.hooks: List[dict] = []
        self.sized: List[dict] = []
        self.tensors: List[torch.Tensor] = []
        identical: List[Tuple[dict, str, Any]] = []
        equal: List[Tuple[dict, str, Any]] = []
        for part in (part for module in modules for part in module.modules()):
            state = part.__dict__
            self.hooks += [state[name] for name in HOOKS]
            for held in (state, state["_modules"], state["_parameters"], state["_buffers"]):
                self.sized.append(held)
                for key, value in held.items():
                    if held is state and key in self.STANDARD and key != "training":
                        continue
                    if isinstance(value, torch.Tensor):
                        self.tensors.append(value)
                    if isinstance(value, (list, tuple, set, dict)) and _is_simple(value):
                        equal.append((held, key, value if isinstance(value, tuple) else value.copy()))
                    elif type(value) in SIMPLE and type(value) is not bool or key == "forward":
                        equal.append((held, key, value))
                    else:
                        identical.append((held, key, value))
        self.identical, self.equal = (tuple(zip(*found)) or ((), (), ()) for found in (identical, equal))
        self.sizes = self._sizes()
        self.facts = self._facts()

    def _sizes(self) -> List[int]:
        return list(map(len, self.sized))

    def _facts(self) -> list:
        """Where the tensors lie and whether they need a gradient."""
        return [*map(torch.Tensor.data_ptr, self.tensors), *map(_NEEDS_GRAD, self.tensors)]

    def same(self) -> bool:
        if any(self.hooks) or self._sizes() != self.sizes:
            return False
        owners, keys, values = self.identical
        if not all(map(operator.is_, map(dict.get, owners, keys), values)) or self._facts() != self.facts:
            return False
        owners, keys, values = self.equal
        return all(map(operator.eq, map(dict.get, owners, keys), values))


def _is_simple(container) -> bool:
    """True for a container of plain numbers and names, which can be compared."""
    values = list(container.values()) if isinstance(container, dict) else container
    return all(type(value) in SIMPLE for value in values)


class _Input:
    """The memory from which graphs read an argument that many layers get: filled once a pass."""

    def __init__(self, like: torch.Tensor):
        self.buffer = like.clone()
        self.source: Any = lambda: None
        self.version = -1

    def load(self, tensor: torch.Tensor) -> None:
        if self.source() is tensor and self.version == tensor._version:
            return
        self.buffer.copy_(tensor)
        self.source, self.version = weakref.ref(tensor), tensor._version


class _Ticket:
    """Stands in `open` from a replayed forward pass until its backward pass, or until nobody can ask for that any more."""

    def __init__(self, open_: set):
        self.open = open_
        open_.add(id(self))

    def close(self) -> None:
        self.open.discard(id(self))

    __del__ = close


class _Unit:
    """The graphs of layers that follow each other, and the memory that they read and write."""

    def __init__(self, plan, first: int, layers, seen, key):
        """first: the number of the first layer; seen: what each of `layers` got; key: of the first one."""
        self.plan, self.first, self.key, self.autocast = plan, first, key, seen[0].autocast
        slots = [[plan.inputs[number] for number in layer.numbers] for layer in seen]
        self.kwargs = [_with_tensors(layer.kwargs, iter(mine)) for layer, mine in zip(seen, slots)]
        self.slots = slots[0]
        self.watch = _Watch(layers)
        self.parameters = list(dict.fromkeys(p for layer in layers for p in layer.parameters() if p.requires_grad))
        self.recorded: List[torch.Tensor] = []  # what stood for each of them while the graphs were recorded
        self.gradients: List[Optional[torch.Tensor]] = []
        self.computed: List[torch.Tensor] = []
        self.outputs: List[torch.Tensor] = []
        self.frozen: List[bool] = []  # of each layer: whether its output needs no gradient
        self.dx: Optional[torch.Tensor] = None
        self.dout: Optional[torch.Tensor] = None

    def layers(self) -> list:
        return self.plan.model.layers[self.first : self.first + len(self.kwargs)]

    def record_forward(self, recorder, layers, x: torch.Tensor) -> None:
        self.x = x
        self.forward = recorder.graph()
        twins = {id(p): _twin(p) for p in self.parameters}
        self.recorded = list(twins.values())

        def function():
            with _exchanged(layers, twins):
                self.computed = _run_all(layers, self.x, self.kwargs)
            return tuple(self.computed)

        self.outputs = [output.detach() for output in self.forward.record(function)]
        self.frozen = [not output.requires_grad for output in self.computed]
        for output in self.computed:
            _refuse_leaves(output, self.parameters)

    def record_backward(self, recorder, next_dx: Optional[torch.Tensor]) -> None:
        if self.frozen[-1]:
            return
        self.dout = torch.empty_like(self.outputs[-1]) if next_dx is None else next_dx
        wanted = self._wanted(self.x, self.recorded)
        self.backward = recorder.graph()
        found = self.backward.record(lambda: torch.autograd.grad(self.computed[-1], wanted, self.dout, allow_unused=True))
        self.dx, self.gradients = self._sorted(found)

    def _wanted(self, x, parameters) -> list:
        return [*([x] if x.requires_grad else []), *parameters]

    def _sorted(self, found: Sequence) -> Tuple[Optional[torch.Tensor], list]:
        """(the gradient of x, those of the parameters)"""
        return (found[0], list(found[1:])) if self.x.requires_grad else (None, list(found))

    def release_gradients(self) -> None:
        """Moves the gradients that parameters still have from the last backward pass out of the memory that this one writes."""
        for parameter, gradient in zip(self.parameters, self.gradients):
            kept = parameter.grad
            if kept is not None and gradient is not None and kept.data_ptr() == gradient.data_ptr():
                parameter.grad = kept.clone()

    def gradients_of_some(self, douts: Sequence[Optional[torch.Tensor]], versions: Sequence[int]) -> tuple:
        """(the gradient of x, those of the parameters) where others than the last layer's output have one: somebody has used or changed
        what a layer returned before the next one got it, which happened not when the pass was looked at. The layers run again, and from
        the next pass on each has graphs of its own.

        versions: of the outputs when they were returned.
        """
        self.plan.apart = self.plan.stale = True
        behind = 1 + max(i for i, dout in enumerate(douts) if dout is not None)
        device, dtype = self.x.device.type, self.autocast
        with torch.enable_grad(), torch.autocast(device, dtype, enabled=dtype is not None):
            x = self.x.detach().requires_grad_(self.x.requires_grad)
            outputs = _run_all(self.layers()[:behind], x, self.kwargs)
            for again, output, version in zip(outputs, self.outputs, versions):
                if output._version == version and not torch.equal(again, output):
                    raise RuntimeError(
                        "the output of a captured layer was used beside the next layer, for which the layers ran again, and drew other "
                        "random numbers. Call reset() to run the model without graphs"
                    )
            used = [(output, dout) for output, dout in zip(outputs, douts) if dout is not None]
            roots, gradients = map(list, zip(*used))
            return self._sorted(torch.autograd.grad(roots, self._wanted(x, self.parameters), gradients, allow_unused=True))


def _twin(parameter: nn.Parameter) -> nn.Parameter:
    """A leaf over the memory of a parameter, to record with.

    Autograd's node of the parameter itself remembers the stream of the pass that made it, and lives as long as somebody holds a loss or an
    output of that pass: a recording through it would wait for that stream, which CUDA refuses. And hooks of the parameter see the
    gradient that a replay returns, not the one of the recording.
    """
    twin = type(parameter)(parameter.detach())
    twin.__dict__.update((name, value) for name, value in parameter.__dict__.items() if not name.startswith("_"))
    return twin


@contextlib.contextmanager
def _exchanged(layers, twins: Dict[int, nn.Parameter]):
    """Has modules hold the twins of their parameters, by the parameters' id."""
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
    """Raises RuntimeError where an output depends on one of the parameters themselves: a layer that keeps them elsewhere than as the
    parameters of its modules would be recorded without their gradients."""
    refused = {id(parameter) for parameter in parameters}
    seen, ahead = set(), [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in refused:
            raise RuntimeError(f"a parameter of shape {list(node.variable.shape)} is used that no module holds under a name of its own")
        ahead += [following for following, _ in node.next_functions]


def _run_all(layers, x: torch.Tensor, kwargs: Sequence[dict]) -> List[torch.Tensor]:
    """What each of layers behind each other returns."""
    outputs = []
    for layer, mine in zip(layers, kwargs):
        x = _run(layer, (x,), mine)
        outputs.append(x)
    return outputs


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, unit, x, *parameters):
        ctx.unit = unit
        ctx.ticket = _Ticket(unit.plan.model.open)
        ctx.set_materialize_grads(False)
        if x.data_ptr() != unit.x.data_ptr():
            unit.x.copy_(x)
        unit.forward.replay()
        outputs = [output.detach() for output in unit.outputs]
        ctx.versions = [output._version for output in outputs]
        ctx.mark_non_differentiable(*(output for output, frozen in zip(outputs, unit.frozen) if frozen))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *douts):
        unit, ticket = ctx.unit, ctx.ticket
        if ticket is None:
            raise RuntimeError(
                "the backward pass of a captured layer ran a second time (retain_graph=True), and the graphs have written over what it "
                "needs. Call reset() to run the model without them"
            )
        ctx.ticket = None
        ticket.close()
        *inner, dout = douts
        if any(gradient is not None for gradient in inner):
            dx, gradients = unit.gradients_of_some(douts, ctx.versions)
            return (None, dx, *gradients)
        if dout is None:
            return (None,) * (2 + len(unit.parameters))
        unit.release_gradients()
        if dout.data_ptr() != unit.dout.data_ptr():
            unit.dout.copy_(dout)
        unit.backward.replay()
        return (None, *(None if t is None else t.detach() for t in (unit.dx, *unit.gradients)))


class _Before:
    """A layer's output as it was returned, and the arguments that the layer got."""

    __slots__ = ("output", "version", "kwargs")

    def __init__(self, output: torch.Tensor, kwargs: dict):
        self.output, self.version, self.kwargs = output, output._version, kwargs

    def leads_to(self, x: torch.Tensor, kwargs: dict) -> bool:
        """Tells whether that output, unchanged, and those very arguments are what another layer gets."""
        mine = self.kwargs
        if x is not self.output or x._version != self.version or kwargs.keys() != mine.keys():
            return False
        return all(map(operator.is_, map(kwargs.get, mine), mine.values()))


class _Ahead:
    """What a graph has computed for layers behind its first one, whose calls are still to come."""

    def __init__(self, unit: _Unit, outputs: Sequence[torch.Tensor], kwargs: dict, tensors: Sequence[torch.Tensor]):
        """kwargs: what the first layer got; tensors: those of them that were copied."""
        self.outputs, self.tensors, self.autocast = outputs, tensors, unit.autocast
        self.versions = [tensor._version for tensor in tensors]
        self.first, self.next, self.behind = unit.first, unit.first + 1, unit.first + len(outputs)
        self.before = _Before(outputs[0], kwargs)

    def take(self, index: int, x: torch.Tensor, args, kwargs) -> Optional[torch.Tensor]:
        """The output of a layer, where its call is the recorded one; None where it is another."""
        if index != self.next or len(args) != 1 or not self.before.leads_to(x, kwargs):
            return None
        if [tensor._version for tensor in self.tensors] != self.versions or _autocast_dtype(x.device.type) != self.autocast:
            return None
        output = self.outputs[index - self.first]
        self.next += 1
        self.before = _Before(output, kwargs)
        return output


def _autocast_dtype(device: str) -> Optional[torch.dtype]:
    """The dtype of autocast where it is on."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class _Planned(Visible):
    """Stands in a recorded layer for the `Visible` of a pass: the plan is where the graphs read it."""

    def __init__(self, seen: Visible):
        super().__init__(seen.arguments, Rule(seen.rule.window), None)

    def is_plain(self) -> bool:
        return False

    def filled(self, limits: torch.Tensor, walks: torch.Tensor) -> "_Planned":
        self.kept = AttentionPlan.__new__(AttentionPlan)
        self.kept.tokens, self.kept.causal, self.kept.window = self.batch * self.tokens, True, self.rule.window
        self.kept.limits, self.kept.walks = limits, walks
        return self

    def plan(self, device, cu_seqlens=None, position_ids=None) -> AttentionPlan:
        return self.kept


class _Seen(NamedTuple):
    """What a layer got. key: of `_described`; numbers: of its tensors among all that the layers get; kwargs: without the tensors; joins:
    whether it got the very output and the very arguments of the layer before it, and neither of them drew random numbers."""

    key: tuple
    numbers: List[int]
    kwargs: dict
    autocast: Optional[torch.dtype]
    joins: bool


class _Plan:
    """A training pass of one kind, by what its first layer gets: looked at, then recorded, then replayed."""

    def __init__(self, model):
        self.model = model
        self.seen: List[_Seen] = []  # of each layer
        self.examples: Dict[int, Tuple[int, torch.Tensor]] = {}  # by id, while the pass lasts: the number of a tensor, and itself
        self.units: Dict[int, _Unit] = {}  # by the number of their first layer
        self.inputs: List[_Input] = []
        self.recordings = self.replays = 0
        self.failure = ""
        self.apart = False  # whether each layer has to have graphs of its own
        self.stale = False  # whether the graphs are of no use any more

    def look(self, layer, key, x, tensors, kwargs) -> torch.Tensor:
        """Runs a layer as before, and remembers what it got."""
        numbers = []
        for tensor in tensors:
            number, _ = self.examples.setdefault(id(tensor), (len(self.examples), tensor))
            numbers.append(number)
        joins = self.model.before is not None and self.model.before.leads_to(x, kwargs)
        state = _random_state(x.device)
        read = {name: _without_tensors(value) for name, value in _read(kwargs)}
        output = _run(layer, (x,), kwargs)
        drew = not torch.equal(state, _random_state(x.device))
        self.seen.append(_Seen(key, numbers, read, _autocast_dtype(x.device.type), joins and not drew))
        self.model.before = None if drew else _Before(output, kwargs)
        if len(self.seen) == len(self.model._layers):
            self.inputs = [_Input(tensor) for _, tensor in self.examples.values()]
            self.examples, self.model.before = {}, None
        return output

    def forget(self) -> None:
        """Begins again with looking."""
        self.seen, self.examples, self.units, self.inputs, self.stale = [], {}, {}, [], False

    def _groups(self) -> List[slice]:
        """The layers that have a graph in common."""
        runs: List[list] = []  # of layers that may be in one
        for number, seen in enumerate(self.seen):
            first = self.seen[runs[-1][0]] if runs else None
            follows = first is not None and seen.joins and not self.apart and seen.autocast == first.autocast
            if follows:
                runs[-1].append(number)
            else:
                runs.append([number])
        groups = []
        for run in runs:
            parts = -(-len(run) // TOGETHER)
            ends = [run[0] + len(run) * part // parts for part in range(parts + 1)]
            groups += map(slice, ends, ends[1:])
        return groups

    def record(self, x: torch.Tensor) -> None:
        """Records all layers, forward in order and backward in reverse."""
        model, layers, units = self.model, self.model.layers, []
        for group in self._groups():
            units.append(_Unit(self, group.start, layers[group], self.seen[group], self.seen[group.start].key))
        with model.recorder(x.device) as recorder:
            here = torch.empty_like(x).requires_grad_(x.requires_grad)
            for unit in units:
                unit.record_forward(recorder, unit.layers(), here)
                here = unit.outputs[-1].detach().requires_grad_(not unit.frozen[-1])
            after = None
            for unit in reversed(units):
                unit.record_backward(recorder, after)
                after = unit.dx
        for unit in units:
            unit.computed, unit.recorded = [], []
        self.units = {unit.first: unit for unit in units}
        self.recordings += 1


def _random_state(device: torch.device) -> torch.Tensor:
    """What changes when random numbers are drawn."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _without_tensors(value):
    if isinstance(value, torch.Tensor):
        return torch.Tensor
    if type(value) is tuple:
        return tuple(map(_without_tensors, value))
    if type(value) is Visible:
        return Visible(value.arguments, value.rule, None) if value.is_plain() else _Planned(value)
    return value


def _with_tensors(value, inputs):
    if value is torch.Tensor:
        return next(inputs).buffer
    if type(value) is tuple:
        return tuple(_with_tensors(part, inputs) for part in value)
    if type(value) is _Planned:
        return value.filled(next(inputs).buffer, next(inputs).buffer)
    if type(value) is dict:
        return {name: _with_tensors(part, inputs) for name, part in value.items()}
    return value


class _Model:
    """The layers of a model, the shapes that are wanted, and the passes that were seen of them."""

    def __init__(self, layers):
        self._layers = [weakref.ref(layer) for layer in layers]
        self.shapes: set = set()
        self.plans: Dict[tuple, _Plan] = {}
        self.current: Optional[_Plan] = None
        self.next = -1  # the layer that the current pass comes to next
        self.before: Optional[_Before] = None  # of the layer that the current pass was at last, while it is looked at
        self.ahead: Optional[_Ahead] = None  # while it is replayed
        self.open: set = set()
        self.reasons: List[str] = []  # why passes of a wanted shape ran as before
        self._recorder: Optional[Recorder] = None

    def __deepcopy__(self, memo):
        return None

    def __reduce__(self):
        return (type(None), ())

    @property
    def layers(self) -> list:
        return [layer() for layer in self._layers]

    def recorder(self, device) -> Recorder:
        """What makes the next graphs: where it can, with the pool of those that there are. One that no graph uses any more cannot be used
        again."""
        if self._recorder is None or not any(plan.units for plan in self.plans.values()):
            self._recorder = Recorder(device)
        return self._recorder

    def give_up(self, reason: str) -> None:
        self.current = self.before = self.ahead = None
        if reason not in self.reasons:
            self.reasons.append(reason)
            warnings.warn(f"captured layers run as before: {reason}", RuntimeWarning, stacklevel=2)

    def release_gradients(self) -> None:
        """Moves all gradients that parameters still have from earlier passes out of the memory that graphs write.

        A gradient may lie where the forward graph of another layer, or of another shape, keeps what it computes: all of them share a
        pool, in which a backward pass takes what the ones before it have read. So it happens before anything of a pass is replayed.
        """
        for plan in self.plans.values():
            for unit in plan.units.values():
                unit.release_gradients()

    def begin(self, key, x) -> None:
        """Chooses what is done with a pass, at its first layer."""
        self.current = self.before = self.ahead = None
        self.next = 0
        if self.open:
            return  # an earlier forward pass waits for its backward pass
        self.release_gradients()
        if key not in self.plans and len(self.plans) == PLANS:
            self.give_up(f"there are more than {PLANS} kinds of passes by shape, mask and arguments")
            return
        plan = self.plans.setdefault(key, _Plan(self))
        if plan.units and (plan.stale or not plan.units[0].watch.same()):  # of the others, when the pass comes to them
            plan.forget()
        if plan.seen and not plan.units:
            if len(plan.seen) < len(self._layers):
                plan.forget()  # the last pass came not to its end
            elif plan.recordings >= RECORDINGS + plan.replays // REPLAYS:
                plan.failure = f"the model changed after each of {plan.recordings} captures (weights moved, adapters or hooks exchanged)"
            else:
                try:
                    plan.record(x)
                except Exception as error:  # whatever a layer does that a graph cannot hold
                    plan.failure = f"the layers cannot be captured ({type(error).__name__}: {error})"
        if plan.failure:
            plan.forget()
            self.give_up(plan.failure)
            return
        plan.replays += bool(plan.units)
        self.current = plan


class _Layer:
    """A layer's place in its model. A copy of the model (copy.deepcopy, pickle) has none: it runs as before."""

    def __init__(self, model: _Model, index: int):
        self.model, self.index = model, index

    def __deepcopy__(self, memo):
        return None

    def __reduce__(self):
        return (type(None), ())


def _obstacle(layer, x, args) -> str:
    """Why a layer's call in training cannot be replayed, whatever its other arguments are; "" when it can."""
    if getattr(layer, "gradient_checkpointing", False):
        return "gradient checkpointing is on"
    if len(args) != 1:
        return "a layer did not get its input, and only that, by position"
    if all_are_listened_to() or any(layer.__dict__[name] for name in HOOKS):
        return "there are hooks on a layer"
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if hooks is not None and hooks(False) is not None:
        return "saved tensors are packed by hooks (offloading)"
    if not is_ordinary(x):
        return "the input of a layer is no ordinary tensor"
    return ""


def _described(x, kwargs):
    """(key, tensors, reason) of a layer's arguments: what has to be equal for a replay, and the tensors that are copied for it."""
    key: list = [x.shape, x.dtype, x.device, x.requires_grad]
    key.append(_autocast_dtype(x.device.type))
    tensors: list = []
    for name, value in _read(kwargs):
        if type(value) in SIMPLE:
            key += (name, value)
            continue
        if type(value) is Visible:
            if value.rule is None:
                return None, (), "there is padding between the tokens of a row, or another mask of which the attention makes no plan"
            key += (name, value.rule.window)
            if not value.is_plain():
                plan = value.plan(x.device, *documents_of(value, kwargs, None))
                tensors += (plan.limits, plan.walks)
                key += (plan.limits.shape, plan.walks.shape)
            continue
        parts = value if type(value) is tuple else (value,)
        for part in parts:
            if type(part) not in PLAIN or part.requires_grad:
                advice = ". Call the model with use_cache=False" if name == "past_key_values" else ""
                return None, (), f"the argument {name} of a layer is a {type(value).__name__}{advice}"
            tensors.append(part)
            key += (name, part.shape, part.dtype, part.device)
    return tuple(key), tensors, ""


def _read(kwargs):
    """The arguments of a layer that it reads."""
    planned = type(kwargs.get("attention_mask")) is Visible and not kwargs["attention_mask"].is_plain()
    return [pair for pair in kwargs.items() if not (pair[0] in OF_THE_LOSS or (planned and pair[0] in OF_DOCUMENTS))]


def _run(layer, args, kwargs):
    """Calls the forward that a layer has without its graphs."""
    before = layer.__dict__.get(WITHOUT_GRAPHS)
    return before(*args, **kwargs) if before is not None else type(layer).forward(layer, *args, **kwargs)


def captured_forward(layer, *args, **kwargs):
    """Of a layer under `capture`: replays its graphs where the call is what they were recorded of."""
    place = layer.__dict__.get(GRAPHS)
    if place is None or torch.compiler.is_compiling() or not (layer.training and torch.is_grad_enabled()):
        return _run(layer, args, kwargs)
    model, x = place.model, args[0] if args else kwargs["hidden_states"]
    if tuple(x.shape[:-1]) not in model.shapes or is_recording(x):
        return _run(layer, args, kwargs)
    ahead = model.ahead
    if ahead is not None:
        output = ahead.take(place.index, x, args, kwargs)
        if output is not None:
            model.next = ahead.next
            if ahead.next == ahead.behind:
                model.ahead = None
            return output
        model.ahead = model.current = None  # from here on the pass is another one than that which was recorded
    reason = _obstacle(layer, x, args)
    key, tensors = None, ()
    if not reason:
        key, tensors, reason = _described(x, kwargs)
    if reason:
        model.give_up(reason)
        return _run(layer, args, kwargs)
    if place.index == 0:
        model.begin(key, x)
    plan = model.current
    if plan is None or model.next != place.index:
        model.current = None
        return _run(layer, args, kwargs)
    if not plan.units:
        model.next += 1
        return plan.look(layer, key, x, tensors, kwargs)
    unit = plan.units[place.index]
    if unit.key != key:
        model.give_up("the layers got other arguments than when they were captured")
        return _run(layer, args, kwargs)
    if place.index and not unit.watch.same():
        plan.stale, model.current = True, None
        return _run(layer, args, kwargs)
    for slot, tensor in zip(unit.slots, tensors):
        slot.load(tensor)
    outputs = _Replay.apply(unit, x, *unit.parameters)
    model.next += 1
    if len(outputs) > 1:
        model.ahead = _Ahead(unit, outputs, kwargs, tensors)
    return outputs[0]


setattr(captured_forward, LAYER, captured_forward)


def release(module: nn.Module) -> None:
    """Takes the graphs off a layer, and leaves the forward on it that was there before."""
    state = module.__dict__
    before = state.pop(WITHOUT_GRAPHS, None)
    if state.pop(GRAPHS, None) is None and before is None:
        return
    if getattr(state.get("forward"), "bound_function", None) is captured_forward:
        if before is None:
            del state["forward"]
        else:
            state["forward"] = before


def is_wanted(causal_lm: nn.Module, shape: torch.Size) -> bool:
    """Tells whether the layers of a causal LM are to be replayed for a batch of a shape [batch, tokens], which must then keep it."""
    model = causal_lm.__dict__.get(GRAPHS)
    return model is not None and tuple(shape) in model.shapes


def capture(layers: List[nn.Module], causal_lms: List[nn.Module], batch: int, tokens: int) -> None:
    """Replays the decoder layers of a model for inputs [batch, tokens]; see `capture` of a package. causal_lms: what holds them."""
    for name, number in (("batch", batch), ("tokens", tokens)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} is {number!r}, expected a positive int")
    devices = {parameter.device for layer in layers for parameter in layer.parameters()}
    if len(devices) != 1 or not can_record(*devices):
        raise ValueError(
            f"the decoder layers are on {', '.join(sorted(map(str, devices)))}, expected one CUDA device: graphs exist on GPUs only"
        )
    place = layers[0].__dict__.get(GRAPHS)
    if place is None or place.model.layers != layers:
        model = _Model(layers)
        for index, layer in enumerate(layers):
            release(layer)
            state = layer.__dict__
            if "_hf_hook" in state:
                raise RuntimeError("accelerate has put a hook on a decoder layer (device_map, offloading), which a graph would pass by")
            state[WITHOUT_GRAPHS], state[GRAPHS] = state.get("forward"), _Layer(model, index)
            state["forward"] = BoundForward(captured_forward, layer)
    model = layers[0].__dict__[GRAPHS].model
    model.shapes.add((batch, tokens))
    for causal_lm in causal_lms:
        causal_lm.__dict__[GRAPHS] = model


def captured_passes(layer: nn.Module) -> Tuple[List[tuple], List[str]]:
    """([(batch and tokens, whether they are recorded by now)], [why a pass ran as before]) of a layer's model; empty without `capture`."""
    place = layer.__dict__.get(GRAPHS)
    if place is None:
        return [], []
    recorded = {tuple(key[0][:-1]) for key, plan in place.model.plans.items() if plan.units}
    return [(shape, shape in recorded) for shape in sorted(place.model.shapes)], place.model.reasons
