"""Replays a model's decoder layers as CUDA graphs in training, for batches of one shape: two launches for several layers instead of about
forty for each.

With few tokens the host cannot start a layer's kernels as fast as the GPU finishes them. The layers' forward and backward passes are
therefore recorded once and replayed. Everything that is not exactly what was recorded runs as before: other shapes, evaluation, generation,
hooks, a second forward pass before the first one's backward pass.

Passes are of one kind when their first layers get arguments that are alike. A kind of pass is in one of these states (`State`):

| state    | what its next pass does                                            | then                                                 |
|----------|--------------------------------------------------------------------|------------------------------------------------------|
| UNSEEN   | runs as before, and what each layer gets is observed               | OBSERVED, or UNSEEN where it was interrupted         |
| OBSERVED | records all layers when it comes to the first one, and is replayed | RECORDED, or REFUSED                                 |
| RECORDED | is replayed                                                        | OUTDATED where a layer, or the use of an output, has |
|          |                                                                    | changed                                              |
| OUTDATED | as UNSEEN                                                          | as UNSEEN                                            |
| REFUSED  | runs as before; `Kind.obstacle` says why, with one warning         | REFUSED                                              |

The pass that a model is in (`Model.current`) is an `ObservedPass`, a `ReplayedPass`, or None where it runs as before.

Layers of which each takes what the one before it returned, and no other tensors, share a graph: the call of the first one replays it, and
those of the others return what it has computed for them. Graphs are recorded in the order in which they are replayed, in one pool of
memory: what one leaves free the next one uses, and the output of one is where the next one reads its input.
"""

import enum
import sys
import threading
import warnings
import weakref
from typing import Dict, List, Optional, Tuple, Union

import torch
from torch import nn

from ..ops.second_run import in_backward_pass
from ..runtime.graphs import GraphPool, can_record, is_recording
from .binding import BoundForward
from .explanation import Reason
from .graphed_checkpoints import is_checkpointed, why_not_graphed, without_hooks
from .graphed_layers import (
    GRAPHS,
    WITHOUT_GRAPHS,
    GraphedLayers,
    Handover,
    InputBuffer,
    Observed,
    Outputs,
    autocast_dtype,
    run,
    without_tensors,
)
from .layer_calls import check_weights, described, is_planned, obstacle, read_by_layer
from .modules import LAYER

RECORDINGS = 3  # of a kind with fewer than REPLAYS passes for each, after which a model that changes all the time runs as before
REPLAYS = 16
TOGETHER = 7  # layers of one graph, at most: so few that the host starts a graph while the GPU still works on the one before
SEVERAL = -1  # threads that train a model
KINDS = 8  # kinds of passes that are recorded for a model: of its shapes, each with and without a mask


class State(enum.Enum):
    UNSEEN = "unseen"
    OBSERVED = "observed"
    RECORDED = "recorded"
    OUTDATED = "outdated"
    REFUSED = "refused"


class Kind:
    """A kind of training pass, by what its first layer gets."""

    def __init__(self, model: "Model"):
        self.model = model
        self.state = State.UNSEEN
        self.obstacle: Optional[Reason] = None  # why it is REFUSED
        self.observed: List[Observed] = []  # of each layer, from OBSERVED on
        self.inputs: List[InputBuffer] = []
        self.graphed: Dict[int, GraphedLayers] = {}  # from RECORDED on, by the number of their first layer
        self.recordings = self.replays = 0
        self.shares_graphs = True  # whether a graph may be of several layers

    def begin(self, x: torch.Tensor) -> "Union[ObservedPass, ReplayedPass, None]":
        """Begins a pass at the first layer, whose input is `x`."""
        if self.state is State.RECORDED and not self.graphed[0].watch.same():  # the others are asked when the pass comes to them
            self.state = State.OUTDATED
        if self.state is State.OUTDATED:
            self._forget(State.UNSEEN)
        if self.state is State.OBSERVED:
            self._record(x)
        if self.state is State.REFUSED and self.obstacle is not None:
            self.model.run_as_before(self.obstacle)
            return None
        if self.state is State.RECORDED:
            self.replays += 1
            for buffer in self.inputs:
                buffer.begin_pass()
            return ReplayedPass(self)
        return ObservedPass(self)

    def end_observation(self, observed: List[Observed], examples: List[torch.Tensor]) -> None:
        self.state, self.observed, self.inputs = State.OBSERVED, observed, list(map(InputBuffer, examples))

    def outputs_are_used_between(self) -> None:
        """Gives each layer graphs of its own from the next recording on."""
        self.shares_graphs = False
        if self.state is State.RECORDED:
            self.state = State.OUTDATED

    def _forget(self, state: State) -> None:
        self.state, self.observed, self.graphed, self.inputs = state, [], {}, []

    def _record(self, x: torch.Tensor) -> None:
        if self.recordings >= RECORDINGS + self.replays // REPLAYS:
            text = f"the model changed after each of {self.recordings} captures (weights moved, adapters or hooks exchanged)"
            self.obstacle = Reason("changing", text)
        else:
            try:
                self.graphed = self._recorded(x)
                self.recordings += 1
                self.state = State.RECORDED
            except Exception as error:  # whatever a layer does that a graph cannot hold
                self.obstacle = Reason("call", f"the layers cannot be captured ({type(error).__name__}: {error})")
        if self.obstacle is not None:
            self._forget(State.REFUSED)

    def _recorded(self, x: torch.Tensor) -> Dict[int, GraphedLayers]:
        """Records all layers, forward in order and backward in reverse."""
        model, layers = self.model, self.model.layers
        if any(seen.drew and is_checkpointed(layer) for seen, layer in zip(self.observed, layers)):
            raise RuntimeError("a checkpointed layer draws random numbers (dropout), and its second run would draw others")
        graphed = [
            GraphedLayers(group.start, layers[group], self.observed[group], self.inputs, model.waiting, self.outputs_are_used_between)
            for group in self._groups()
        ]
        with without_hooks(), model.pool(x.device) as pool:  # those of the first layer's checkpoint
            here = torch.empty_like(x).requires_grad_(x.requires_grad)
            for some in graphed:
                some.record_forward(pool, here)
                here = some.outputs[-1].detach().requires_grad_(not some.frozen[-1])
            after = None
            for some in reversed(graphed):
                some.record_backward(pool, after)
                after = some.dx
        for some in graphed:
            some.end_recording()
        return {some.first: some for some in graphed}

    def _groups(self) -> List[slice]:
        """The layers that share a graph."""
        runs: List[List[int]] = []  # of layers that may
        for number, seen in enumerate(self.observed):
            if runs and seen.joins and self.shares_graphs and seen.autocast == self.observed[runs[-1][0]].autocast:
                runs[-1].append(number)
            else:
                runs.append([number])
        groups: List[slice] = []
        for numbers in runs:
            parts = -(-len(numbers) // TOGETHER)
            ends = [numbers[0] + len(numbers) * part // parts for part in range(parts + 1)]
            groups += map(slice, ends, ends[1:])
        return groups


class ObservedPass:
    """A pass whose layers run as before while it is observed what they get."""

    def __init__(self, kind: Kind):
        self.kind, self.next = kind, 0  # the number of the next layer
        self.observed: List[Observed] = []
        self.examples: Dict[int, Tuple[int, torch.Tensor]] = {}  # by id: the number of a tensor, and itself
        self.handover: Optional[Handover] = None  # of the last layer, unless it drew random numbers

    def call(self, layer, args, kwargs, key, tensors) -> torch.Tensor:
        x = args[0]
        numbers = [self.examples.setdefault(id(tensor), (len(self.examples), tensor))[0] for tensor in tensors]
        joins = self.handover is not None and self.handover.leads_to(x, kwargs)
        state = _random_state(x.device)
        planned = is_planned(layer, kwargs)
        read = {name: without_tensors(value, planned) for name, value in read_by_layer(kwargs, planned)}
        output = run(layer, args, kwargs)
        drew = not torch.equal(state, _random_state(x.device))
        self.observed.append(Observed(key, numbers, read, autocast_dtype(x.device.type), joins and not drew, drew))
        self.handover = None if drew else Handover(output, kwargs)
        self.next += 1
        model = self.kind.model
        if self.next == len(model.layers):
            self.kind.end_observation(self.observed, [tensor for _, tensor in self.examples.values()])
            model.current = None
        return output


class ReplayedPass:
    """A pass whose layers are replayed."""

    def __init__(self, kind: Kind):
        self.kind, self.next = kind, 0  # the number of the next layer
        self.outputs: Optional[Outputs] = None  # computed already for the next layers

    def take(self, index: int, x: torch.Tensor, args, kwargs) -> Optional[torch.Tensor]:
        """The output of a layer that was computed with an earlier one's. None where it has to be replayed, or is not the recorded call:
        then the pass runs as before from here on."""
        if self.outputs is None:
            return None
        output = self.outputs.take(x, args, kwargs) if index == self.next else None
        if output is None:
            self.kind.model.current = None
            return None
        self.next += 1
        if self.outputs.all_taken:
            self.outputs = None
        return output

    def call(self, layer, args, kwargs, key, tensors) -> torch.Tensor:
        kind, graphed = self.kind, self.kind.graphed[self.next]
        if graphed.key != key:
            kind.model.run_as_before(Reason("call", "the layers got other arguments than when they were captured"))
            return run(layer, args, kwargs)
        if self.next and not graphed.watch.same():
            kind.state, kind.model.current = State.OUTDATED, None
            return run(layer, args, kwargs)
        outputs = graphed.call(args[0], tensors)
        self.next += 1
        if len(outputs) > 1:
            self.outputs = Outputs(graphed, outputs, kwargs, tensors)
        return outputs[0]


class _NotCopied:
    """Becomes None in a copy of what holds it (copy.deepcopy, pickle): a copied model runs as before."""

    def __deepcopy__(self, memo):
        return None

    def __reduce__(self):
        return (type(None), ())


class Model(_NotCopied):
    """The layers of a model, the shapes that are to be replayed, and the kinds of passes that came."""

    def __init__(self, layers: List[nn.Module]):
        self._layers = [weakref.ref(layer) for layer in layers]
        self.shapes: set = set()
        self.kinds: Dict[tuple, Kind] = {}
        self.current: Union[ObservedPass, ReplayedPass, None] = None
        self.waiting: set = set()  # replayed forward passes before the end of their backward pass
        self.reasons: List[Reason] = []  # why passes of a wanted shape ran as before
        self.thread: Optional[int] = None  # the one that trains, or `SEVERAL`
        self.lock = threading.RLock()  # held while a pass begins
        self._pool: Optional[GraphPool] = None

    @property
    def layers(self) -> list:
        return [layer() for layer in self._layers]

    def pool(self, device: torch.device) -> GraphPool:
        """The pool of the existing graphs, in which the next are recorded. One that no graph uses any more cannot be used again."""
        if self._pool is None or not any(kind.graphed for kind in self.kinds.values()):
            self._pool = GraphPool(device)
        return self._pool

    def run_as_before(self, reason: Reason) -> None:
        """Replays no more of the current pass, and warns once why."""
        self.current = None
        if reason not in self.reasons:
            self.reasons.append(reason)
            warnings.warn(f"captured layers run as before: {reason.text}", RuntimeWarning, stacklevel=2)

    def is_trained_here(self) -> bool:
        """Tells whether this thread is the one that trains the model. A second one ends all replays: gradients of graphs lie in memory that
        the next pass writes, and while that moves them away, what another thread adds to them would be lost."""
        here = threading.get_ident()
        if self.thread not in (here, SEVERAL):
            with self.lock:  # while a pass is recorded, the layers hold other parameters
                if self.thread in sys._current_frames():
                    self.thread = SEVERAL
                    self.kinds.clear()
                    self.run_as_before(Reason("threads", "a second thread trains the model"))
                elif self.thread != SEVERAL:
                    self.thread = here
        return self.thread == here

    def begin(self, key: tuple, x: torch.Tensor) -> None:
        """Begins a pass at the first layer."""
        with self.lock:
            self.current = None
            if self.waiting or self.thread == SEVERAL:
                return
            self._release_gradients()
            if key not in self.kinds and len(self.kinds) == KINDS:
                self.run_as_before(Reason("call", f"there are more than {KINDS} kinds of passes by shape, mask and arguments"))
                return
            self.current = self.kinds.setdefault(key, Kind(self)).begin(x)

    def _release_gradients(self) -> None:
        """Moves all gradients that parameters still have from earlier passes out of the memory that graphs write.

        A gradient may lie where the forward graph of another layer, or of another shape, keeps what it computes: all of them share a
        pool, in which a backward pass takes what the ones before it have read. So it happens before anything of a pass is replayed.
        """
        for kind in self.kinds.values():
            for graphed in kind.graphed.values():
                graphed.release_gradients()


class Place(_NotCopied):
    """A layer's place in its model."""

    def __init__(self, model: Model, index: int):
        self.model, self.index = model, index


def _random_state(device: torch.device) -> torch.Tensor:
    """What changes when random numbers are drawn."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def captured_forward(layer, *args, **kwargs):
    """The forward of a layer under `capture`: replays its graphs where the call is the recorded one."""
    place = layer.__dict__.get(GRAPHS)
    if place is None or torch.compiler.is_compiling() or in_backward_pass():  # a checkpoint's second run
        return run(layer, args, kwargs)
    model, x = place.model, args[0] if args else kwargs["hidden_states"]
    if not torch.is_grad_enabled():
        reason = why_not_graphed(layer) if place.index == 0 and is_checkpointed(layer) else None  # a reentrant one's first run
        if reason is not None and tuple(x.shape[:-1]) in model.shapes:
            model.run_as_before(reason)
        return run(layer, args, kwargs)
    if not (model.is_trained_here() and layer.training) or tuple(x.shape[:-1]) not in model.shapes or is_recording(x):
        return run(layer, args, kwargs)
    current = model.current  # of which a second thread may make None
    if isinstance(current, ReplayedPass):
        output = current.take(place.index, x, args, kwargs)
        if output is not None:
            return output
    reason = obstacle(layer, x, args)
    key, tensors = None, ()
    if reason is None:
        key, tensors, reason = described(layer, x, kwargs)
    if reason is not None:
        model.run_as_before(reason)
        return run(layer, args, kwargs)
    if place.index == 0:
        model.begin(key, x)
    current = model.current
    if current is None or current.next != place.index:
        model.current = None
        return run(layer, args, kwargs)
    return current.call(layer, args, kwargs, key, tensors)


setattr(captured_forward, LAYER, captured_forward)


def release(module: nn.Module) -> None:
    """Takes the graphs off a layer, and puts back the forward that it had before."""
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
    """Tells whether the layers of a causal LM are to be replayed for a batch of a shape [batch, tokens]. Its padding must then stay."""
    model = causal_lm.__dict__.get(GRAPHS)
    return model is not None and tuple(shape) in model.shapes


def capture(layers: List[nn.Module], causal_lms: List[nn.Module], batch: int, tokens: int) -> None:
    """Replays the decoder layers of a model for inputs [batch, tokens]; see `capture` of a package. causal_lms: what holds them."""
    for name, number in (("batch", batch), ("tokens", tokens)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} is {number!r}, expected a positive int")
    check_weights(layers, can_record)
    place = layers[0].__dict__.get(GRAPHS)
    if place is None or place.model.layers != layers:
        model = Model(layers)
        for index, layer in enumerate(layers):
            release(layer)
            state = layer.__dict__
            if "_hf_hook" in state:
                raise RuntimeError("accelerate has put a hook on a decoder layer (device_map, offloading), which a graph would pass by")
            state[WITHOUT_GRAPHS], state[GRAPHS] = state.get("forward"), Place(model, index)
            state["forward"] = BoundForward(captured_forward, layer)
    model = layers[0].__dict__[GRAPHS].model
    model.shapes.add((batch, tokens))
    for causal_lm in causal_lms:
        causal_lm.__dict__[GRAPHS] = model


def captured_passes(layer: nn.Module) -> Tuple[List[tuple], List[Reason]]:
    """([(batch and tokens, whether they are recorded by now)], [why a pass ran as before]) of a layer's model; empty without `capture`."""
    place = layer.__dict__.get(GRAPHS)
    if place is None:
        return [], []
    recorded = {tuple(key[0][:-1]) for key, kind in place.model.kinds.items() if kind.graphed}
    return [(shape, shape in recorded) for shape in sorted(place.model.shapes)], place.model.reasons
