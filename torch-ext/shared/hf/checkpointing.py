"""Gradient checkpointing that keeps attention's output and log-sum-exp, and computes only the rest of a layer again.

transformers wraps a decoder layer's call with torch.utils.checkpoint, which runs the layer once to throw everything away but its input, and
once more in the backward pass. Attention is what its time grows with the square of the tokens by, and what it returns is as small as
the layer's input, so it is kept with that input: on its storage, whose life ends with the checkpoint's.
"""

import warnings
from typing import Any, Callable, NamedTuple, Tuple

import torch

from ..ops.recorded import Recording, Results
from .modules import SAVED

KEEPS_ATTENTION = SAVED + "keeps_attention"  # on a decoder layer or its class: what apply() or kernelize() was told
KEPT = SAVED + "kept_attention"  # on the storage of a layer's input: [`_Kept`]
_warned: set = set()


class _Kept(NamedTuple):
    """What attention returned. layer, place, conditions: of the run; those objects are held, so that no other one takes their identity."""

    layer: torch.nn.Module
    place: tuple
    conditions: Tuple[Any, ...]
    results: Results

    def is_of(self, layer, place, conditions) -> bool:
        same = len(self.conditions) == len(conditions) and all(a is b for a, b in zip(self.conditions, conditions))
        return same and self.layer is layer and self.place == place


def keeps_attention(layer) -> bool:
    """Tells whether a layer is checkpointed by transformers, and attention is to be kept."""
    state = layer.__dict__
    if not state.get("gradient_checkpointing") or not layer.training or torch.compiler.is_compiling():
        return False
    return state.get(KEEPS_ATTENTION) or getattr(type(layer), KEEPS_ATTENTION, False)


def attend_once(layer, x: torch.Tensor, conditions: Tuple[Any, ...], attend: Callable[[], torch.Tensor]) -> torch.Tensor:
    """attend(), whose attention runs once for both runs of a checkpointed layer.

    x: the layer's input, which the checkpoint holds; conditions: everything else that decides what attention returns, in both runs the
    same objects. Where anything differs, or x is a copy by then (a checkpoint on the CPU), attention is computed again.
    """
    storage, place = x.untyped_storage(), (x.storage_offset(), x.shape, x.stride(), x._version)
    kept = getattr(storage, KEPT, None)
    if kept is None:
        kept = []
        setattr(storage, KEPT, kept)
    found = next((one for one in kept if one.is_of(layer, place, conditions)), None)
    if found is not None:
        kept.remove(found)
        if torch._C._current_graph_task_id() == -1:  # not in a backward pass: another forward pass of the same
            found = None
    with Recording(None if found is None else found.results) as recording:
        attended = attend()
    if recording.results:
        kept.append(_Kept(layer, place, conditions, recording.results))
    elif found is None:
        _warn_of(layer)
    return attended


def _warn_of(layer) -> None:
    name = getattr(getattr(layer.self_attn, "config", None), "_attn_implementation", None)
    if name not in _warned:
        _warned.add(name)
        what = f"keep_attention: attn_implementation={name!r} is none whose output can be kept, it is computed again"
        warnings.warn(f"{what}. Use 'bastile' or 'sdpa'", RuntimeWarning, stacklevel=2)
