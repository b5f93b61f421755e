"""What the second run of a checkpoint leaves out: the last products of an autograd function, which its backward pass does not read.

A checkpoint that is not reentrant runs its function again in the backward pass, and stops once everything is saved again that the first run
saved. An autograd function saves when its forward pass has ended. So in a backward pass it saves and returns a tensor that stands for its
result, and what is left to do for that is a node of its own, which a run that stops is never at. Where it is reached (a reentrant
checkpoint, more layers than one in a checkpoint) the result is the same.
"""

from typing import Callable, List, Optional, Sequence

import torch

from .common import apply_function, once_differentiable

Rest = Optional[List[Callable[[], torch.Tensor]]]


def in_backward_pass() -> bool:
    """Tells whether this thread runs a backward pass: what runs forward then is a checkpoint's second run, or asked for by a hook."""
    return torch._C._current_graph_task_id() != -1


def apply_in_parts(function, *arguments) -> torch.Tensor:
    """function.apply(rest, *arguments), as `apply_function` does it, of an autograd function with one result.

    Its forward pass does all of it where `rest` is None. Where it is a list, it saves and returns what `unfinished` does.
    """
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and in_backward_pass()):
        return apply_function(function, None, *arguments)
    rest: List[Callable[[], torch.Tensor]] = []
    handle = apply_function(function, rest, *arguments)
    return apply_function(_Finished, handle, *rest)


def unfinished(rest: List[Callable[[], torch.Tensor]], finish: Callable[[], torch.Tensor], shape: Sequence[int], like: torch.Tensor):
    """Returns what stands for the result, of one number's memory. finish: makes the result; shape: of it; like: of its dtype and device."""
    rest.append(finish)
    return like.new_empty(()).expand(shape)


class _Finished(torch.autograd.Function):
    """The result that a tensor stands for. The gradients are those of the function that left it unfinished."""

    @staticmethod
    def forward(ctx, handle, finish):
        return finish()

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        return dout, None
