"""The passes of a captured model: their kinds, and what is recorded and replayed of each.

Passes are of one kind when their first layers get arguments that are alike. A kind of pass is in one of these states (`State`):

| state    | what its next pass does                                            | then                                                 |
|----------|--------------------------------------------------------------------|------------------------------------------------------|
| UNSEEN   | runs as before, and what each layer gets is observed               | OBSERVED, or UNSEEN where it was interrupted         |
| OBSERVED | records all layers when it comes to the first one, and is replayed | RECORDED, or REFUSED                                 |
| RECORDED | is replayed                                                        | OUTDATED where a layer, or the use of an output, has |
|          |                                                                    | changed                                              |
| OUTDATED | as UNSEEN                                                          | as UNSEEN                                            |
| REFUSED  | runs as before; `Kind.obstacle` says why, with one warning         | REFUSED                                              |

Layers of which each takes what the one before it returned, and no other tensors, share a graph: the call of the first one replays it, and
those of the others return what it has computed for them. Graphs are recorded in the order in which they are replayed, in one pool of
memory: what one leaves free the next one uses, and the output of one is where the next one reads its input.
"""

import enum
from typing import Any, Dict, List, Optional, Tuple, Union

import torch

from ..parts.explanation import Reason
from .graph_memory import InputBuffer
from .graphed_checkpoints import is_checkpointed, without_hooks
from .graphed_layers import GraphedLayers, Handover, Observed, ReplayedOutputs, autocast_dtype, run, without_tensors
from .layer_calls import is_listened_to, is_planned, read_by_layer

__all__ = ["Kind", "ObservedPass", "ReplayedPass"]

RECORDINGS = 3  # of a kind with fewer than REPLAYS passes for each, after which a model that changes all the time runs as before
REPLAYS = 16
TOGETHER = 7  # layers of one graph, at most: so few that the host starts a graph while the GPU still works on the one before


class State(enum.Enum):
    UNSEEN = "unseen"
    OBSERVED = "observed"
    RECORDED = "recorded"
    OUTDATED = "outdated"
    REFUSED = "refused"


class Kind:
    """A kind of training pass, by what its first layer gets. model: the `CapturedModel` of capture.py that has it."""

    def __init__(self, model: Any):
        self.model = model
        self.state = State.UNSEEN
        self.obstacle: Optional[Reason] = None  # why it is REFUSED
        self.observed: List[Observed] = []  # of each layer, from OBSERVED on
        self.examples: List[torch.Tensor] = []  # of what the layers got, for what runs while they are recorded
        self.inputs: List[InputBuffer] = []  # from RECORDED on
        self.graphed: Dict[int, GraphedLayers] = {}  # from RECORDED on, by the number of their first layer
        self.recordings = self.replays = 0
        self.shares_graphs = True  # whether a graph may be of several layers

    def begin(self, x: torch.Tensor) -> "Union[ObservedPass, ReplayedPass, None]":
        """Begins a pass at the first layer, whose input is `x`."""
        if self.state is State.RECORDED and not self.graphed[0].watch.same():  # the others are asked when the pass comes to them
            self.state = State.OUTDATED
        if self.state is State.OUTDATED:
            self._forget(State.UNSEEN)
        if self.state is State.OBSERVED and any(map(is_listened_to, self.model.layers)):
            # A graph would go on doing what these hooks do now, after they are removed.
            self.model.run_as_before(Reason("hooks", "there are hooks on parts of a layer"))
            return None
        if self.state is State.OBSERVED:
            self.model.starts_over(x)  # a pool that begins with larger graphs has room for smaller ones
            self._record(x)
            if self.state is State.RECORDED and self.model.starts_over():
                self._record(x)
            if self.state is State.RECORDED and self.model.takes_too_much():
                text = f"graphs take {self.model.nbytes() / 2**30:.1f} GiB with those of {x.shape[0]} rows of {x.shape[1]} tokens"
                self.obstacle = Reason("memory", text)
                self._forget(State.REFUSED)
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
        self.state, self.observed, self.examples = State.OBSERVED, observed, examples

    def record_again(self, moved: bool) -> None:
        """Has the layers recorded again in the next pass. moved: because weights have moved; else each layer gets graphs of its own."""
        self.shares_graphs = self.shares_graphs and moved
        if self.state is State.RECORDED:
            self.state = State.OUTDATED

    def forget_graphs(self) -> None:
        """Forgets the graphs, which are recorded again in the next pass."""
        if self.state is State.RECORDED:
            self.state, self.graphed, self.inputs = State.OBSERVED, {}, []
            self.recordings -= 1

    def _forget(self, state: State) -> None:
        self.state, self.observed, self.examples, self.graphed, self.inputs = state, [], [], {}, []

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
        # Without gradients, this may be the first run of a user's own checkpoint; its second run must draw the same random numbers.
        if any(seen.drew for seen in self.observed) and not torch.is_grad_enabled():
            raise RuntimeError("a layer draws random numbers (dropout) in a pass without gradients")
        self.inputs = [InputBuffer(model.memory, number, example) for number, example in enumerate(self.examples)]
        on_change, here = self.record_again, model.memory.buffer("x", x).requires_grad_(x.requires_grad)
        with without_hooks(), model.pool(x) as pool:  # those of the first layer's checkpoint
            graphed = [
                GraphedLayers(group.start, layers[group], self.observed[group], self.inputs, model.memory, model.waiting, on_change)
                for group in self._groups()
            ]
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
        self.outputs: Optional[ReplayedOutputs] = None  # computed already for the next layers

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
        if self.outputs.taken == len(self.outputs.outputs):
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
            self.outputs = ReplayedOutputs(graphed, outputs, kwargs, tensors)
        return outputs[0]


def _random_state(device: torch.device) -> torch.Tensor:
    """Returns the generator's state, which every draw of random numbers changes."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
