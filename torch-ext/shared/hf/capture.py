"""Replays a model's decoder layers as CUDA graphs in training: two launches a layer instead of about forty, for batches of one shape.

With few tokens the host cannot start a layer's kernels as fast as the GPU finishes them. Each layer's forward and backward pass is
therefore recorded once (torch.cuda.CUDAGraph) and replayed. Everything that is not exactly what was recorded runs as before: other shapes,
evaluation, generation, hooks, gradient checkpointing, a second forward pass ahead of the first one's backward pass.

The first training pass of a shape runs as before and is looked at, the second one is recorded at its first layer. The graphs of all layers
share a pool of memory. They are recorded in the order in which they are replayed, so what one leaves free the next one uses, and a layer's
output is where the next one reads its input.
"""

import operator
import warnings
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ..ops.attention import AttentionPlan
from ..runtime.device import PLAIN, is_ordinary
from .attention import Rule, Visible, documents_of
from .binding import BoundForward
from .modules import LAYER, SAVED, all_are_listened_to

GRAPHS = SAVED + "graphs"  # on a layer: its `_Layer`; on the causal LM: its `_Model`
WITHOUT_GRAPHS = SAVED + "without_graphs"  # on a layer: the forward that stood on it before, None where there was none
OF_THE_LOSS = frozenset(("num_items_in_batch", "num_items", "shift_labels", "ignore_index", "labels"))  # pass through a layer unread
OF_DOCUMENTS = frozenset(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))  # what a plan of the attention says already
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
SIMPLE = (type(None), bool, int, float, str, torch.dtype, torch.device)
RECORDINGS = 3  # of one shape with fewer than REPLAYS passes for each, after which a model that changes all the time runs as before
REPLAYS = 16
PLANS = 8  # kinds of passes that a model is looked at for: of its shapes, each with and without a mask


class Graph:
    """What a function does on the GPU, recorded in a pool of memory."""

    def __init__(self, pool, stream):
        self.graph, self.pool, self.stream = torch.cuda.CUDAGraph(), pool, stream

    def record(self, function: Callable[[], Any]) -> Any:
        """Returns what the function returns, whose tensors have their values after each `replay`."""
        with torch.cuda.stream(self.stream):
            # Other threads (a loader that pins memory) may go on meanwhile.
            self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                return function()
            finally:
                self.graph.capture_end()

    def replay(self) -> None:
        self.graph.replay()


class Recorder:
    """Makes graphs of one device that share a pool of memory."""

    def __init__(self, device: torch.device):
        self.device, self.pool, self.stream = device, torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def graph(self) -> Graph:
        return Graph(self.pool, self.stream)

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


class _Watch:
    """Notices what a graph of a module would not: moved or replaced weights, other submodules, hooks, switches."""

    STANDARD = frozenset(nn.Module().__dict__) | {GRAPHS}

    def __init__(self, module: nn.Module):
        owners: List[dict] = []
        keys: List[str] = []
        values: List[Any] = []
        self.sizes, self.hooks, self.equal, self.tensors = [], [], [], []
        for part in module.modules():
            state = part.__dict__
            self.hooks += [state[name] for name in HOOKS]
            for held in (state, state["_modules"], state["_parameters"], state["_buffers"]):
                self.sizes.append((held, len(held)))
                for key, value in held.items():
                    if held is state and key in self.STANDARD and key != "training":
                        continue
                    if isinstance(value, torch.Tensor):
                        self.tensors.append((value, value.data_ptr(), value.requires_grad))
                    if isinstance(value, (list, tuple, set, dict)) and _is_simple(value):
                        self.equal.append((held, key, value if isinstance(value, tuple) else value.copy()))
                    elif type(value) in SIMPLE and type(value) is not bool or key == "forward":
                        self.equal.append((held, key, value))
                    else:
                        owners.append(held)
                        keys.append(key)
                        values.append(value)
        self.identical = owners, keys, values

    def same(self) -> bool:
        if any(self.hooks) or any(len(held) != size for held, size in self.sizes):
            return False
        owners, keys, values = self.identical
        if not all(map(operator.is_, map(dict.get, owners, keys), values)):
            return False
        for tensor, address, needs_grad in self.tensors:
            if tensor.data_ptr() != address or tensor.requires_grad is not needs_grad:
                return False
        for held, key, value in self.equal:
            if held.get(key) != value:
                return False
        return True


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
    """One layer's graphs, and the memory that they read and write."""

    def __init__(self, plan, layer, key, kwargs, slots):
        self.plan, self.key, self.kwargs, self.slots = plan, key, kwargs, slots
        self.watch = _Watch(layer)
        self.parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        self.gradients: List[Optional[torch.Tensor]] = []
        self.dx: Optional[torch.Tensor] = None
        self.dout: Optional[torch.Tensor] = None
        self.number = 0

    def record_forward(self, recorder, call, x: torch.Tensor) -> None:
        self.x = x
        self.forward = recorder.graph()

        def function():
            self.computed = call(self.x, self.kwargs)
            return self.computed

        self.output = self.forward.record(function).detach()

    def record_backward(self, recorder, next_dx: Optional[torch.Tensor]) -> None:
        if not self.computed.requires_grad:
            return
        self.dout = torch.empty_like(self.output) if next_dx is None else next_dx
        wanted = [*([self.x] if self.x.requires_grad else []), *self.parameters]
        self.backward = recorder.graph()
        found = list(self.backward.record(lambda: torch.autograd.grad(self.computed, wanted, self.dout, allow_unused=True)))
        self.dx = found.pop(0) if self.x.requires_grad else None
        self.gradients = found

    def release_gradients(self) -> None:
        """Moves the gradients that parameters still have from the last backward pass out of the memory that this one writes."""
        for parameter, gradient in zip(self.parameters, self.gradients):
            kept = parameter.grad
            if kept is not None and gradient is not None and kept.data_ptr() == gradient.data_ptr():
                parameter.grad = kept.clone()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, unit, x, *parameters):
        ctx.unit = unit
        ctx.ticket = _Ticket(unit.plan.model.open)
        ctx.set_materialize_grads(False)
        if x.data_ptr() != unit.x.data_ptr():
            unit.x.copy_(x)
        unit.forward.replay()
        return unit.output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        unit, ticket = ctx.unit, ctx.ticket
        if ticket is None:
            raise RuntimeError(
                "the backward pass of a captured layer ran a second time (retain_graph=True), and the graphs have written over what it "
                "needs. Call reset() to run the model without them"
            )
        ctx.ticket = None
        ticket.close()
        if dout is None:
            return (None,) * (2 + len(unit.parameters))
        unit.release_gradients()
        if dout.data_ptr() != unit.dout.data_ptr():
            unit.dout.copy_(dout)
        unit.backward.replay()
        return (None, *(None if t is None else t.detach() for t in (unit.dx, *unit.gradients)))


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


class _Plan:
    """A training pass of one kind, by what its first layer gets: looked at, then recorded, then replayed."""

    def __init__(self, model):
        self.model = model
        self.seen: List[tuple] = []  # of each layer: its key, and its arguments with the numbers of shared tensors in them
        self.examples: Dict[int, Tuple[int, torch.Tensor]] = {}  # by id, while the pass lasts: the number of a tensor, and itself
        self.units: List[_Unit] = []
        self.inputs: List[_Input] = []
        self.recordings = self.replays = 0
        self.failure = ""

    def look(self, key, x, tensors, kwargs) -> None:
        numbers = []
        for tensor in tensors:
            number, _ = self.examples.setdefault(id(tensor), (len(self.examples), tensor))
            numbers.append(number)
        self.seen.append((key, numbers, {name: _without_tensors(value) for name, value in _read(kwargs)}))
        if len(self.seen) == len(self.model._layers):
            self.inputs = [_Input(tensor) for _, tensor in self.examples.values()]
            self.examples = {}

    def forget(self) -> None:
        """Begins again with looking."""
        self.seen, self.examples, self.units, self.inputs = [], {}, [], []

    def record(self, x: torch.Tensor) -> None:
        """Records every layer, forward in order and backward in reverse."""
        model, units = self.model, []
        for layer, (key, numbers, kwargs) in zip(model.layers, self.seen):
            slots = [self.inputs[number] for number in numbers]
            units.append(_Unit(self, layer, key, _with_tensors(kwargs, iter(slots)), slots))
        with model.recorder(x.device) as recorder:
            here = torch.empty_like(x).requires_grad_(x.requires_grad)
            for layer, unit in zip(model.layers, units):
                unit.record_forward(recorder, lambda x, kwargs, layer=layer: _run(layer, (x,), kwargs), here)
                here = unit.output.detach().requires_grad_(unit.computed.requires_grad)
            after = None
            for unit in reversed(units):
                unit.record_backward(recorder, after)
                after = unit.dx
        for unit in units:
            unit.computed = None
        self.units = units
        self.recordings += 1


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
        if self._recorder is None:
            self._recorder = Recorder(device)
        return self._recorder

    def give_up(self, reason: str) -> None:
        self.current = None
        if reason not in self.reasons:
            self.reasons.append(reason)
            warnings.warn(f"captured layers run as before: {reason}", RuntimeWarning, stacklevel=2)

    def release_gradients(self) -> None:
        """Moves all gradients that parameters still have from earlier passes out of the memory that graphs write.

        A gradient may lie where the forward graph of another layer, or of another shape, keeps what it computes: all of them share a
        pool, in which a backward pass takes what the ones before it have read. So it happens before anything of a pass is replayed.
        """
        for plan in self.plans.values():
            for unit in plan.units:
                unit.release_gradients()

    def begin(self, key, x) -> None:
        """Chooses what is done with a pass, at its first layer."""
        self.current, self.next = None, 0
        if self.open:
            return  # an earlier forward pass waits for its backward pass
        self.release_gradients()
        if key not in self.plans and len(self.plans) == PLANS:
            self.give_up(f"there are more than {PLANS} kinds of passes by shape, mask and arguments")
            return
        plan = self.plans.setdefault(key, _Plan(self))
        if plan.units and not all(unit.watch.same() for unit in plan.units):
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
    autocast = torch.is_autocast_enabled(x.device.type)
    key.append(torch.get_autocast_dtype(x.device.type) if autocast else None)
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
    model.next += 1
    if not plan.units:
        plan.look(key, x, tensors, kwargs)
        return _run(layer, args, kwargs)
    unit = plan.units[place.index]
    if unit.key != key:
        model.give_up("the layers got other arguments than when they were captured")
        return _run(layer, args, kwargs)
    for slot, tensor in zip(unit.slots, tensors):
        slot.load(tensor)
    return _Replay.apply(unit, x, *unit.parameters)


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
