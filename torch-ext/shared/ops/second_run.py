"""Lets a checkpoint skip the last products of an autograd function when it runs the function again for the backward pass.

A non-reentrant checkpoint reruns its function in the backward pass, and stops as soon as everything that the first run saved has been saved
again. But an autograd function saves only after its forward pass has returned, its last products included, and its backward pass does not
need those. So in a backward pass such a function saves early and returns a placeholder for its result; a second node, `_Finished`, computes
the result from there, and a rerun that stops never gets to it. Where one does (a reentrant checkpoint, several layers in a checkpoint), the
result is the same.
"""

from typing import Callable, List, Optional, Sequence

import torch

from .autograd import Function, apply_function

__all__ = ["Rest", "apply_in_parts", "are_watched", "in_backward_pass", "packed_by_checkpoint", "unfinished"]

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
    return any(type(torch._C._get_dispatch_stack_at(mode)).__module__ == "torch.utils.checkpoint" for mode in range(modes))


def packed_by_checkpoint() -> bool:
    """Tells whether a checkpoint that is not reentrant forgets what is saved now, or finds it again in its second run."""
    hooks = None if _hooks is None else _hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


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
