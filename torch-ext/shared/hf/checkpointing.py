"""What of a decoder layer is computed again in the backward pass instead of kept: of a checkpointed layer all but attention, whose output
and log-sum-exp are kept; of any other the MLP's first products.

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
RECOMPUTES_MLP = SAVED + "recomputes_mlp"  # the same
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


def _is_checkpointed(layer) -> bool:
    return layer.__dict__.get("gradient_checkpointing") and layer.training


def _was_told(layer, name: str) -> bool:
    return layer.__dict__.get(name) or getattr(type(layer), name, False)


def keeps_attention(layer) -> bool:
    """Tells whether a layer is checkpointed by transformers, and attention is to be kept."""
    return _is_checkpointed(layer) and not torch.compiler.is_compiling() and _was_told(layer, KEEPS_ATTENTION)


def recomputes_mlp(layer) -> bool:
    """Tells whether the backward pass is to make again what the MLP's first products give. A checkpointed layer does that anyway."""
    return _was_told(layer, RECOMPUTES_MLP) and not _is_checkpointed(layer)


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
    what = f"keep_attention: attn_implementation={name!r} is none whose output can be kept, it is computed again"
    _warn_once(f"{what}. Use 'bastile' or 'sdpa'")


def warn_of_kept_mlp(layer) -> None:
    """Says once that `recompute_mlp` does nothing for a layer whose MLP is not in the fused node."""
    if recomputes_mlp(layer) and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        what = f"recompute_mlp: the MLP of this {type(layer).__name__} is not fused, so what it needs for the backward pass is kept"
        _warn_once(f"{what}. explain(model) says why")


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)
