"""Losses that are a sum over the tokens of a linear head: the forward pass makes the gradients, the backward pass only multiplies them."""

from typing import Any, Callable

from .autocast import outside_autocast
from .autograd import Function

__all__ = ["sum_over_tokens"]


def sum_over_tokens(name: str, run: Callable) -> Any:
    """Makes the autograd function of a sum over the tokens, (hidden, weight, bias, *other tensors, options) -> (sum, *other results), whose
    forward pass makes the gradients, and whose backward pass multiplies them by the incoming one.

    run: (*tensors, options, which of hidden, weight and bias need a gradient) -> (the sum, the other results, which have no gradient,
    `HeadGradients`).
    """

    def forward(ctx, *arguments):
        *tensors, ctx.options = arguments
        ctx.save_for_backward(*tensors)
        total, others, ctx.gradients = run(*arguments, ctx.needs_input_grad[:3])
        ctx.mark_non_differentiable(*others)
        return (total, *others)

    @outside_autocast
    def backward(ctx, dsum, *_):
        tensors, gradients = ctx.saved_tensors, ctx.gradients
        # They are scaled in place and given away; a second backward pass (retain_graph) computes them anew.
        ctx.gradients = None
        if gradients is None:
            gradients = run(*tensors, ctx.options, ctx.needs_input_grad[:3])[2]
        dhidden, dweight, dbias = gradients.times(dsum)
        return (dhidden, dweight, None if dbias is None else dbias.to(tensors[2].dtype), *[None] * (len(tensors) - 2))

    backward.__module__, backward.__qualname__ = run.__module__, f"{name}.backward"
    return type(name, (Function,), {"forward": forward, "backward": backward, "__module__": run.__module__})
