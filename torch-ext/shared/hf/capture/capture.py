"""Replays a model's decoder layers as CUDA graphs in training, for batches of one shape, or for the lengths that come most often: two
launches for several layers instead of about forty for each.

With few tokens the host cannot start a layer's kernels as fast as the GPU finishes them. The layers' forward and backward passes are
therefore recorded once and replayed. Everything that is not exactly what was recorded runs as before: other shapes, evaluation, generation,
hooks, a second forward pass before the first one's backward pass.

Training also needs forward passes without gradients (DPO's reference, GRPO's old log-probabilities), often between a pass and its backward
pass. A `CapturedModel` of their own has their graphs, which must not overwrite what that pass saved for its backward pass.

The pass that a model is in (`CapturedModel.current`) is an `ObservedPass`, a `ReplayedPass`, or None where it runs as before.
"""

import sys
import threading
import warnings
import weakref
from typing import ContextManager, Dict, Iterable, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import nn

from ...ops.second_run import in_backward_pass
from ...runtime.graphs import GraphPool, can_record, is_recording, memory_of
from ..parts.binding import BoundForward
from ..parts.explanation import Reason
from ..parts.modules import SAVED, WITHOUT_GRAPHS, marked
from ..parts.tree import NotCopied, walk
from .asked_each_pass import answer, take_back
from .captured_passes import Kind, ObservedPass, ReplayedPass
from .graph_memory import Memory
from .graph_sizes import GraphSizes
from .graphed_checkpoints import is_checkpointed, why_not_graphed
from .graphed_layers import GRAPHS, run
from .layer_calls import check_weights, described, obstacle

__all__ = [
    "AS_TOLD", "CapturedModel", "capture", "captured_passes", "captured_sizes", "is_wanted", "lengths_are_captured", "model_of", "release",
]  # fmt: skip

SEVERAL = -1  # threads that train a model
AS_TOLD = SAVED + "captured_as_told"  # on a decoder: the `CapturedModel` of its layers, where the option captured them
OF_MEMORY = 4  # graphs of several sizes take at most one of that many parts of the device's memory
STARTS = 4  # with another pool, at most: where sizes come in turn that do not fit together, each would take the others' graphs
LARGER = 1.5  # times what a pool began with: larger sizes find no room in the pieces that smaller ones left, and begin another one
KINDS = 8  # kinds of passes that are recorded for a model: of its shapes, each with and without a mask


class CapturedModel(NotCopied):
    """The layers of a model, the shapes that are to be replayed, and the kinds of passes that came."""

    def __init__(self, layers: List[nn.Module], trained: "Optional[CapturedModel]" = None):
        """trained: None for passes with gradients; for passes without, the model of those with."""
        self._layers = [weakref.ref(layer) for layer in layers]
        self._trained = trained
        self.shapes: set = set() if trained is None else trained.shapes
        self.sizes: Optional[GraphSizes] = None  # of passes of other shapes, if any are to be replayed
        self.memory = Memory()
        self.starts = 0  # with other pools
        self.as_told = False  # the option of `apply` or `kernelize` captured it, which also takes it back
        self.kinds: Dict[tuple, Kind] = {}
        self.current: Union[ObservedPass, ReplayedPass, None] = None
        self.waiting: set = set()  # replayed forward passes before the end of their backward pass
        self.reasons: List[Reason] = []  # why passes of a wanted shape ran as before
        self.thread: Optional[int] = None  # the one that trains, or `SEVERAL`; of passes with gradients alone
        self.lock: ContextManager = threading.RLock() if trained is None else trained.lock  # held while a pass begins
        self._pool: Optional[GraphPool] = None
        self._began_with = 0  # numbers in the input of a layer that was recorded in it first
        self.without_gradients: Optional[CapturedModel] = CapturedModel(layers, self) if trained is None else None

    @property
    def layers(self) -> list:
        return [layer() for layer in self._layers]

    def pool(self, x: torch.Tensor) -> GraphPool:
        """The pool of the existing graphs, in which those of layers that get `x` are recorded. One that no graph uses any more cannot be
        used again."""
        if self._pool is not None and self._pool.device != x.device:  # the model was moved
            self.forget_graphs()
        if self._pool is None or not self._has_graphs():
            self._pool, self._began_with = GraphPool(x.device), x.numel()
            self.memory.forget_pool()
        return self._pool

    def nbytes(self) -> int:
        """Returns the bytes of the memory that the existing graphs took, of passes without gradients too."""
        mine = 0 if self._pool is None or not self._has_graphs() else self._pool.nbytes
        return mine if self.without_gradients is None else mine + self.without_gradients.nbytes()

    def _has_graphs(self) -> bool:
        return any(kind.graphed for kind in self.kinds.values())

    def takes_too_much(self) -> bool:
        """Tells whether graphs of several sizes take more memory than they may."""
        return self.sizes is not None and (self._trained or self).nbytes() > self.sizes.nbytes

    def starts_over(self, x: Optional[torch.Tensor] = None) -> bool:
        """Where graphs take too much memory, or those of layers that get `x` would, forgets all of them, so that they are recorded again in
        another pool when they come again. Returns whether it did. Graphs of passes without gradients go first, and may be enough."""
        if x is None:
            if self.without_gradients is not None and self.takes_too_much():
                self.without_gradients.forget_graphs()
            wanted = self.takes_too_much()
        else:
            wanted = self.sizes is not None and self._has_graphs() and x.numel() > LARGER * self._began_with
        if not wanted or self.starts == STARTS:
            return False
        self.starts += 1
        self.forget_graphs()
        return True

    def forget_graphs(self) -> None:
        """Forgets all graphs, which are recorded again when they come again."""
        self.current = None
        for kind in self.kinds.values():
            kind.forget_graphs()
        if self._trained is not None:  # its results are copies, so nothing reads the pool any more
            self.memory.forget_pool()

    def wants(self, shape: tuple) -> bool:
        """Tells whether passes of a shape (batch, tokens) are to be replayed."""
        return self.sizes is not None or shape in self.shapes

    def run_as_before(self, reason: Reason) -> None:
        """Replays no more of the current pass, and warns once why. Passes without gradients give no warning: some of them, such as those of
        generation, were never meant to be replayed."""
        self.current = None
        if self._trained is None and reason not in self.reasons:
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
                    if self.without_gradients is not None:
                        self.without_gradients.kinds.clear()
                        self.without_gradients.current = None
                    self.run_as_before(Reason("threads", "a second thread trains the model"))
                elif self.thread != SEVERAL:
                    self.thread = here
        return self.thread == here

    def begin(self, key: tuple, x: torch.Tensor) -> None:
        """Begins a pass at the first layer."""
        with self.lock:
            self.current = None
            if self.waiting or (self._trained or self).thread == SEVERAL or not can_record(x.device):
                return
            kind = self._kind(key, tuple(x.shape[:-1]))
            if kind is not None:
                # A gradient may lie where a graph that ran for an earlier one writes next: a backward pass takes what those before it read.
                self.memory.release_gradients()
                self.current = kind.begin(x)

    def _kind(self, key: tuple, shape: tuple) -> Optional[Kind]:
        """The kind of a pass that is to be replayed, or recorded for that; None for others."""
        if shape in self.shapes:
            asked = sum(tuple(each[0][:-1]) in self.shapes for each in self.kinds)
            if key not in self.kinds and asked == KINDS:
                self.run_as_before(Reason("call", f"there are more than {KINDS} kinds of passes by shape, mask and arguments"))
                return None
        elif self.sizes is not None:
            choice = self.sizes.choose(key)
            if choice.instead_of is not None:
                self.kinds.pop(choice.instead_of, None)
            if not choice.chosen:
                return None
        return self.kinds.setdefault(key, Kind(self))


class LayerPlace(NotCopied):
    """A layer's place in its model."""

    def __init__(self, model: CapturedModel, index: int):
        self.model, self.index = model, index


@marked
def captured_forward(layer, *args, **kwargs):
    """The forward of a layer under `capture`: replays its graphs where the call is the recorded one."""
    place = layer.__dict__.get(GRAPHS)
    if place is None or torch.compiler.is_compiling() or in_backward_pass():  # a checkpoint's second run
        return run(layer, args, kwargs)
    model, x = place.model, args[0] if args else kwargs["hidden_states"]
    if torch.is_grad_enabled():
        here = model.is_trained_here()
    else:
        reason = why_not_graphed(layer) if place.index == 0 and is_checkpointed(layer) else None  # a reentrant one's first run
        if reason is not None and model.wants(tuple(x.shape[:-1])):
            model.run_as_before(reason)
        here = model.thread == threading.get_ident() and not is_checkpointed(layer) and not torch.is_inference_mode_enabled()
        model = model.without_gradients
    if not (here and layer.training) or not model.wants(tuple(x.shape[:-1])) or is_recording(x):
        return run(layer, args, kwargs)
    current = model.current  # of which a second thread may make None
    if current is None and place.index:  # the first layer has decided it
        return run(layer, args, kwargs)
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


def release(module: nn.Module) -> None:
    """Takes the graphs off a layer or a model, and puts back the forward that it had before."""
    state = module.__dict__
    take_back(module)
    before = state.pop(WITHOUT_GRAPHS, None)
    state.pop(GRAPHS, None)  # None of a copy, which has no graphs
    if getattr(state.get("forward"), "bound_function", None) is captured_forward:
        if before is None:
            del state["forward"]
        else:
            state["forward"] = before


def model_of(layer: nn.Module) -> Optional[CapturedModel]:
    """What is captured of the model of a layer, or of a layer that this stands around."""
    place = layer.__dict__.get(GRAPHS)  # before a walk: this is asked in each pass
    places = (module.__dict__.get(GRAPHS) for module in (walk(layer) if place is None else ()))
    place = next(filter(None, places), None) if place is None else place
    return None if place is None else place.model


def _of_decoder(decoder: nn.Module) -> Optional[CapturedModel]:
    return next(map(model_of, getattr(decoder, "layers", ())), None)


def is_wanted(decoder: nn.Module, shape: torch.Size) -> bool:
    """Tells whether the layers of a decoder are to be replayed for a batch of a shape [batch, tokens]. Its padding must then stay."""
    model = _of_decoder(decoder)
    return model is not None and tuple(shape) in model.shapes


def lengths_are_captured(decoder: nn.Module) -> bool:
    """Tells whether a pass of a decoder in training may get graphs by the length of its row, so that lengths had better be few."""
    model = _of_decoder(decoder)
    return model is not None and model.sizes is not None and decoder.training


def capture(
    layers: List[nn.Module], asked: Iterable[nn.Module], batch: Optional[int], tokens: Optional[int], sizes: int, memory: Optional[float]
) -> None:
    """Replays the decoder layers of a model for inputs [batch, tokens], or the sizes that come most often; see `capture` of a package.
    asked: what trainers ask of in each pass: the model, and what holds the layers in it."""
    by_shape = batch is not None or tokens is not None
    for name, number in (("batch", batch), ("tokens", tokens)) if by_shape else (("sizes", sizes),):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} is {number!r}, expected a positive int")
    if memory is not None and not (isinstance(memory, (int, float)) and memory > 0):
        raise ValueError(f"memory is {memory!r}, expected GiB, a positive number, or None")
    check_weights(layers, can_record)
    if any("_hf_hook" in layer.__dict__ for layer in layers):
        raise RuntimeError("accelerate has put a hook on a decoder layer (device_map, offloading), which a graph would pass by")
    place = layers[0].__dict__.get(GRAPHS)
    if place is None or place.model.layers != layers:
        model = CapturedModel(layers)
        for index, layer in enumerate(layers):
            release(layer)
            state = layer.__dict__
            state[WITHOUT_GRAPHS], state[GRAPHS] = state.get("forward"), LayerPlace(model, index)
            state["forward"] = BoundForward(captured_forward, layer)
    model = layers[0].__dict__[GRAPHS].model
    model.as_told = False
    if by_shape:
        model.shapes.add((batch, tokens))
    else:
        device = next(layers[0].parameters()).device
        nbytes = memory_of(device) // OF_MEMORY if memory is None else int(memory * 2**30)
        model.sizes, model.without_gradients.sizes = GraphSizes(sizes, nbytes), GraphSizes(sizes, nbytes)
    for each in asked:
        answer(each)


class Captured(NamedTuple):
    """Holds how much of a training `capture` without a shape replays. sizes: how many have graphs; seen: how many kinds of passes there
    were; share: of all passes, those of a size that has graphs; nbytes: the memory that the graphs take."""

    sizes: int
    seen: int
    share: float
    nbytes: int


def captured_sizes(layer: nn.Module) -> Optional[Captured]:
    """Returns what is captured of the sizes of a layer's model; None unless `capture` was called without a shape."""
    model = model_of(layer)
    if model is None or model.sizes is None:
        return None
    sizes, kinds = model.sizes, model.kinds
    recorded = [key for key in sizes.chosen if key in kinds and kinds[key].graphed]
    share = sum(sizes.passes[key] for key in recorded) / max(sum(sizes.passes.values()), 1)
    return Captured(len(recorded), len(sizes.passes), share, model.nbytes())


def captured_passes(layer: nn.Module) -> Tuple[List[tuple], List[Reason]]:
    """([(batch and tokens, whether they are recorded by now)], [why a pass ran as before]) of a layer's model; empty without `capture`."""
    model = model_of(layer)
    if model is None:
        return [], []
    recorded = {tuple(key[0][:-1]) for key, kind in model.kinds.items() if kind.graphed}
    return [(shape, shape in recorded) for shape in sorted(model.shapes)], model.reasons
