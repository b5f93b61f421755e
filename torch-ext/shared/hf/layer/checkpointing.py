"""Which parts of a decoder layer are recomputed in the backward pass instead of kept: of a checkpointed layer all but attention, whose
output and log-sum-exp are kept; of any other the MLP's first products.

transformers wraps a decoder layer with torch.utils.checkpoint, which runs it once to throw everything away but its input, and once more in
the backward pass. Attention is what its time grows with the square of the tokens by, and what it returns is as small as
the layer's input, so it is kept with that input, on its storage, for as long as the checkpoint keeps what else the layer was called with.
"""

import functools
import itertools
import sys
import weakref
from typing import Any, Callable, Dict, Optional, Tuple

import torch

from ...decoder.nodes import TILE_OF
from ...ops.arguments import fail
from ...ops.recorded import AttentionRecording, Results
from ...ops.second_run import in_backward_pass
from ...runtime.host_memory import Away
from ..family.arguments import CACHE, SINCE_5_24
from ..parts.binding import begin_graphs_after
from ..parts.explanation import warn_once
from ..parts.modules import SAVED, captured_in_first_run, captured_outputs
from ..parts.wrapped import WRAPPING

__all__ = [
    "KEEPS_ATTENTION", "RECOMPUTES_MLP", "attend_once", "captured_alike", "check_recompute", "checkpointed", "is_checkpointed",
    "keeps_attention", "kept_on", "move_to", "place_of", "recomputes_mlp", "tile_of", "warn_of_called_attention", "warn_of_kept_mlp",
    "was_told",
]  # fmt: skip

KEEPS_ATTENTION = SAVED + "keeps_attention"  # on a decoder layer or its class: what apply() or kernelize() was told
RECOMPUTES_MLP = SAVED + "recomputes_mlp"  # the same
KEPT = SAVED + "kept_attention"  # on the storage of a layer's input: `_KeptOfStorage`
MOVED = SAVED + "moved"  # on the storage of a copy of a layer's input: (what `place_of` says of the copy, of the input)
CAPTURED_OUTPUTS = SAVED + "captured_outputs"  # on the angles of a forward pass: names of the outputs captured in it
_numbers = itertools.count()


class _Kept:
    """What attention returned, and the run that it returned it in. place: of the run's input; conditions: other objects of it, its layer
    among them, to which this refers weakly: once one is gone, no run can be the same, and `forget` is called."""

    def __init__(self, place: tuple, conditions: Tuple[Any, ...], results: Optional[Results], forget: Callable):
        self.place, self.results = place, results
        self.conditions = [_reference(condition, forget) for condition in conditions]

    def is_of(self, place, conditions) -> bool:
        same = len(self.conditions) == len(conditions) and all(a() is b for a, b in zip(self.conditions, conditions))
        return same and self.place == place


def _reference(thing, forget: Callable) -> Callable:
    """A function that returns the thing. It refers to it weakly where it can, and calls `forget` when the thing goes."""
    try:
        return weakref.ref(thing, forget)
    except TypeError:  # None, a number
        return lambda: thing


class _KeptOfStorage(dict):
    """Each `_Kept` of one storage by a number. A dictionary that can be referred to weakly: in a cycle, what is forgotten would wait for
    Python's cyclic garbage collector.

    sent_with: returns what takes the layer's input to the host's memory, and takes the results along; None where it stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent_with: Callable[[], Any] = lambda: None

    def _number(self, place, conditions) -> Optional[int]:
        return next((number for number, kept in self.items() if kept.is_of(place, conditions)), None)

    def keep(self, place, conditions, results) -> None:
        """Keeps the results of a run. Of two that are alike, such as two of one tensor with other dropout, neither is kept: nothing tells
        which of them runs again."""
        same = self._number(place, conditions)
        if same is not None:
            self[same].results = None
            return
        number, gone = next(_numbers), self.sent_with()
        if gone is not None:
            results = [(function, tuple(gone.send(each) if _leaves(each) else each for each in found)) for function, found in results]
        self[number] = _Kept(place, conditions, results, functools.partial(_forget, weakref.ref(self), number))

    def take(self, place, conditions) -> Optional[Results]:
        """The results of the same run, which are forgotten, or None."""
        number = self._number(place, conditions)
        if number is None or self[number].results is None:
            return None
        results = self.pop(number).results
        return [(function, tuple(each.take() if isinstance(each, Away) else each for each in found)) for function, found in results]


def _leaves(thing) -> bool:
    return isinstance(thing, torch.Tensor) and thing.is_floating_point() and thing.numel() > 0


def place_of(x: torch.Tensor) -> tuple:
    """Tells a layer's input among all on its storage. A copy that came back is the input that it was made of."""
    here = x.storage_offset(), x.shape, x.stride()
    moved = getattr(x.untyped_storage(), MOVED, None)
    return moved[1] if moved is not None and moved[0] == here else (*here, x._version)


def kept_on(x: torch.Tensor) -> _KeptOfStorage:
    """State kept on the storage of a layer's input."""
    storage = x.untyped_storage()
    found = getattr(storage, KEPT, None)
    if found is None:
        found = _KeptOfStorage()
        setattr(storage, KEPT, found)
    return found


def move_to(x: torch.Tensor, kept: _KeptOfStorage, place: tuple) -> None:
    """Puts what was kept with a layer's input on its copy x. place: of the input."""
    storage = x.untyped_storage()
    if getattr(storage, KEPT, None) is not kept:
        setattr(storage, KEPT, kept)
        setattr(storage, MOVED, ((x.storage_offset(), x.shape, x.stride()), place))


def _forget(of_storage: weakref.ref, number: int, _) -> None:
    kept = of_storage()
    if kept is not None:
        kept.pop(number, None)


def is_checkpointed(layer) -> bool:
    """Tells whether a layer in training is run a second time instead of keeping what its backward pass needs."""
    return bool(layer.__dict__.get("gradient_checkpointing")) and layer.training


def checkpointed(forward: Callable) -> Callable:
    """Makes a decoder layer's forward one for a single module; `forward` itself, its `__wrapped__`, is what goes on a class.

    From transformers 5.23 on, the forward of a decoder layer's class checkpoints (see `wrapped`), and one that stands on a module, where
    `kernelize` and `kernels` put it, hides that. So this one checkpoints by itself, and clears caches as transformers does. Before 5.23
    the layer's `__call__` checkpoints.
    """

    @functools.wraps(forward)
    def checkpointing(layer, *args, **kwargs):
        replayed = is_checkpointed(layer) and (torch.is_grad_enabled() or not SINCE_5_24)
        if replayed and type(layer).__call__ is torch.nn.Module.__call__:
            return layer._gradient_checkpointing_func(functools.partial(forward, layer, **_without_caches(layer, kwargs)), *args)
        return forward(layer, *args, **kwargs)

    begin_graphs_after(checkpointing)
    return checkpointing


def _without_caches(layer, kwargs: Dict[str, Any]) -> Dict[str, Any]:
    """The arguments of a checkpointed layer without what the second run would write again, with transformers' warning if there is any."""
    cleared: Dict[str, Any] = {"use_cache": False}
    if not getattr(layer, "_can_checkpoint_with_cache", False):
        cleared.update({CACHE: None, "layer_past": None})
    found = [f" `{name}={value}`" for name, value in cleared.items() if kwargs.get(name) not in (None, False)]
    if not found:
        return kwargs
    message = f"Caching is incompatible with gradient checkpointing in {type(layer).__name__}. Setting{','.join(found)}."
    sys.modules[WRAPPING].logger.warning_once(message)
    return {name: cleared.get(name, value) for name, value in kwargs.items()}


def was_told(layer, name: str) -> Any:
    """Returns what `kernelize` noted on a layer under a name, or `apply` on its class; False without either."""
    told = layer.__dict__.get(name)
    return getattr(type(layer), name, False) if told is None else told


def keeps_attention(layer) -> bool:
    """Tells whether a layer is checkpointed by transformers, and attention is to be kept."""
    return is_checkpointed(layer) and not torch.compiler.is_compiling() and was_told(layer, KEEPS_ATTENTION)


def recomputes_mlp(layer) -> bool:
    """Tells whether the backward pass is to make again what the MLP's first products give. A checkpointed layer does that anyway."""
    return bool(was_told(layer, RECOMPUTES_MLP)) and not is_checkpointed(layer)


def tile_of(layer) -> int:
    """The tokens for which what the MLP's first products give exists at a time; 0 for all, as where the option is no number."""
    told = was_told(layer, RECOMPUTES_MLP)
    return 0 if isinstance(told, bool) else int(told)


def check_recompute(recompute: Any) -> Any:
    """Returns the value of `recompute_mlp` to note on a layer. Raises ValueError for any other than a bool or a number of tokens."""
    if isinstance(recompute, bool) or recompute is None:
        return bool(recompute)
    if not isinstance(recompute, int) or recompute < 1 or recompute % TILE_OF:
        fail("recompute_mlp", repr(recompute), f"True, False, or the tokens of a tile, a multiple of {TILE_OF}")
    return recompute


def captured_alike(layer, position_embeddings, run: Callable[[], Any]) -> Any:
    """run(), a layer's forward, which takes the same outputs for captured in both runs of a checkpointed layer.

    While transformers captures outputs of a layer's parts, these are called separately. In the second run nothing is captured, and what was
    in the first cannot be read off the layer: another forward pass may have come between them, such as that of TRL's reference, which is
    the same model without its adapters. So it is remembered on what each forward pass makes anew and its checkpoints hold: the angles of
    its positions. Where a layer gets copies of them, as on another device, that of the last pass is assumed (`modules.own_forward`).
    """
    if not layer.__dict__.get("gradient_checkpointing") or torch.compiler.is_compiling():
        return run()
    angles = position_embeddings[0] if isinstance(position_embeddings, (tuple, list)) else position_embeddings
    captured = getattr(angles, CAPTURED_OUTPUTS, None) if in_backward_pass() else None
    if captured is None:
        if isinstance(angles, torch.Tensor):
            setattr(angles, CAPTURED_OUTPUTS, captured_outputs())
        return run()
    token = captured_in_first_run.set(captured)
    try:
        return run()
    finally:
        captured_in_first_run.reset(token)


def attend_once(layer, x: torch.Tensor, conditions: Tuple[Any, ...], attend: Callable[[], torch.Tensor]) -> torch.Tensor:
    """attend(), whose attention runs once for both runs of a checkpointed layer.

    x: the layer's input, which the checkpoint holds; conditions: everything else that decides what attention returns, in both runs the
    same objects. Where anything differs, or x is a copy by then (a checkpoint on the CPU), attention is computed again, with a warning.
    """
    if x.is_inference():  # no backward pass will come
        return attend()
    of_storage, place = kept_on(x), place_of(x)
    conditions = layer, *conditions
    again = in_backward_pass()
    found = of_storage.take(place, conditions) if again else None
    with AttentionRecording(found) as recording:
        attended = attend()
    if again and found is None and recording.results:
        why = "with copies of its tensors (offload=True, save_on_cpu, device_map), within another checkpoint, or twice"
        cure = "Let checkpoints hold tensors where they are, or leave keep_attention out"
        warn_once(f"keep_attention: a checkpoint ran a layer again {why}, and attention was computed again. {cure}")
    if recording.results:
        of_storage.keep(place, conditions, recording.results)
    elif found is None:
        _warn_of(layer)
    return attended


def _warn_of(layer) -> None:
    name = getattr(getattr(layer.self_attn, "config", None), "_attn_implementation", None)
    if name == "sdpa":
        why = "ran as several operations, as with torch 2.6 on a CPU for grouped heads, and its output cannot be kept"
        warn_once(f"keep_attention: attn_implementation='sdpa' {why}: it is computed again. Use 'bastile', or another torch")
    else:
        what = f"keep_attention has no effect with attn_implementation={name!r}: attention is recomputed"
        warn_once(f"{what}. Use 'bastile' or 'sdpa'")


def warn_of_called_attention(layer) -> None:
    """Says once that `keep_attention` does nothing for a layer whose attention is called as the module that it is."""
    if keeps_attention(layer):
        what = f"keep_attention: the attention of this {type(layer).__name__} is not fused, it is computed again"
        warn_once(f"{what}. explain(model) says why")


def warn_of_kept_mlp(layer) -> None:
    """Says once that `recompute_mlp` does nothing for a layer whose MLP is not in the fused node."""
    if recomputes_mlp(layer) and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        what = f"recompute_mlp: the MLP of this {type(layer).__name__} is not fused, so what it needs for the backward pass is kept"
        warn_once(f"{what}. explain(model) says why")
