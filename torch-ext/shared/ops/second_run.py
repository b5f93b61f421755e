"""Lets a checkpoint skip the last products of an autograd function when it runs the function again for the backward pass.

A non-reentrant checkpoint reruns its function in the backward pass, and stops as soon as everything that the first run saved has been saved
again. But an autograd function saves only after its forward pass has returned, its last products included, and its backward pass does not
need those. So in a backward pass such a function saves early and returns a placeholder for its result; a second node, `_Finished`, computes
the result from there, and a rerun that stops never gets to it. Where one does (a reentrant checkpoint, several layers in a checkpoint), the
result is the same.
"""

from typing import Any, Callable, List, Optional, Sequence

import torch
from torch.utils.checkpoint import CheckpointError, checkpoint

from .autograd import Function, apply_function

__all__ = [
    "Rest", "apply_in_parts", "are_a_checkpoints", "are_watched", "in_backward_pass", "keep", "kept_of", "saving_hooks", "unfinished",
]  # fmt: skip

_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # None in old versions of torch

Rest = Optional[List[Callable[[], torch.Tensor]]]


def in_backward_pass() -> bool:
    """Tells whether this thread runs a backward pass: what runs forward then is a checkpoint's second run, or asked for by a hook."""
    return torch._C._current_graph_task_id() != -1


def are_watched() -> bool:
    """Tells whether a selective checkpoint sees this thread's operations. It keeps results of the first run, which nothing may write to,
    and finds them in the second run by its operations, which must be the same."""
    modes = torch._C._len_torch_dispatch_stack()
    if not modes:
        return False
    return any(type(torch._C._get_dispatch_stack_at(mode)).__module__ == checkpoint.__module__ for mode in range(modes))


def saving_hooks() -> Optional[tuple]:
    """Returns the functions that pack and unpack saved tensors here; None if there are none."""
    return None if _hooks is None else _hooks(False)


def are_a_checkpoints(hooks: Optional[tuple]) -> bool:
    """Tells whether such hooks belong to a non-reentrant checkpoint, which drops what its first run saves and reads it from the second."""
    return hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__module__


def _described(thing: Any) -> Any:
    """Describes what both runs of a checkpoint must agree on: a tensor's metadata, as torch compares it, or another object's type."""
    return (thing.shape, thing.dtype, thing.device) if isinstance(thing, torch.Tensor) else type(thing)


def keep(ctx: Any, things: Sequence[Any]) -> None:
    """Saves tensors, None and stand-ins for tensors (`CodedWeight`) for the backward pass of an autograd function.

    Under a checkpoint it saves one empty tensor that carries all of them. A layer with adapters saves thirty, and calling the checkpoint's
    hooks for each would take a tenth of the host's time for a pass.
    """
    if torch.compiler.is_compiling():
        ctx.save_for_backward(*things)
    elif are_a_checkpoints(saving_hooks()) and not are_watched():
        carrier: Any = torch.empty(0, dtype=torch.uint8, device="cpu")  # whatever the default is in either run
        if in_backward_pass():
            # Detached, as a result of the function refers to the function's node, which refers to the carrier.
            carrier.kept = [one.detach() if isinstance(one, torch.Tensor) else one for one in things]
        ctx.described = list(map(_described, things))
        ctx.save_for_backward(carrier)
    else:
        others = {i: one for i, one in enumerate(things) if not (one is None or isinstance(one, torch.Tensor))}
        ctx.described, ctx.others = None, others
        ctx.save_for_backward(*([None if i in others else one for i, one in enumerate(things)] if others else things))


def kept_of(ctx: Any) -> Sequence[Any]:
    """Returns what `keep` saved. Raises CheckpointError if a checkpoint's second run saved tensors of other shapes, dtypes or devices."""
    saved = ctx.saved_tensors
    if not hasattr(ctx, "described"):  # it was traced
        return saved
    if ctx.described is None:
        return [ctx.others.get(i, one) for i, one in enumerate(saved)] if ctx.others else saved
    kept = getattr(saved[0], "kept", None)
    if kept is None or list(map(_described, kept)) != ctx.described:
        raise CheckpointError(
            "torch.utils.checkpoint: the second run of a checkpoint computed with other tensors than the first: their number, shapes, "
            "dtypes or devices differ. Do not change adapters or weights between a forward pass and its backward pass"
        )
    return kept


def apply_in_parts(function, *arguments) -> torch.Tensor:
    """function.apply(rest, *arguments), as `apply_function` does it, of an autograd function with one result.

    Its forward pass does all of it where `rest` is None. Where it is a list, it saves and returns what `unfinished` does.
    """
    if torch.compiler.is_compiling() or are_watched() or not (torch.is_grad_enabled() and in_backward_pass()):
        return apply_function(function, None, *arguments)
    rest: List[Callable[[], torch.Tensor]] = []
    handle = apply_function(function, rest, *arguments)
    return apply_function(_Finished, handle, *rest)


def unfinished(rest: List[Callable[[], torch.Tensor]], finish: Callable[[], torch.Tensor], shape: Sequence[int], like: torch.Tensor):
    """Returns a placeholder for the result, which takes the memory of one number. finish: computes the result; shape: the result's; like: a
    tensor of its dtype and device."""
    rest.append(finish)
    return like.new_empty(()).expand(shape)


class _Finished(Function):
    """Computes the result and returns it instead of the placeholder. Its backward pass hands the gradient on unchanged: the function that
    returned the placeholder computes all gradients."""

    def forward(ctx, handle, finish):
        return finish()

    def backward(ctx, dout):
        return dout, None
