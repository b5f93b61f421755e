"""Autograd functions: how they are called, what they differentiate, and when an operation is the formula of PyTorch instead."""

import functools
from typing import Any, Callable, List, Optional

import torch

from ..runtime.device import PLAIN, is_ordinary, prepare_backward, prepared

__all__ = ["Function", "always", "apply_function", "autocasts", "needs_formula", "once_differentiable"]

_any_autocasts = getattr(torch._C, "_is_any_autocast_enabled", None)  # a tenth of what a look at one device costs
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead


class _NoContext:
    """Stands in for autograd's context where no backward pass will ask for it."""

    def save_for_backward(self, *tensors) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def apply_function(function, *arguments):
    """function.apply(*arguments), of an autograd function without setup_context, on ordinary tensors (`needs_formula`).

    Those checks have passed already, so this skips torch's `apply` and calls the implementation. Where gradients are switched off it is
    the forward alone: that is half of what a small operation costs the host, and generating text is made of small operations.
    """
    if torch.compiler.is_compiling():
        return function.apply(*arguments)
    if not torch.is_grad_enabled():
        return function.forward(_NoContext(), *arguments)
    if not prepared:
        for argument in arguments:
            if type(argument) in PLAIN and argument.is_cuda:
                prepare_backward(argument.get_device())
                break
    # A tensor that outlived its transform of torch.func still has its wrapper around it, and looks like any other.
    return super(torch.autograd.Function, function).apply(*[_unwrap_if_dead(a) if type(a) in PLAIN else a for a in arguments])


def always(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that gives the tensor."""
    return lambda: tensor


def once_differentiable(backward: Callable) -> Callable:
    """Marks the backward function of an autograd function as one that has no derivative: with create_graph=True its gradients are as
    ever, and differentiating them raises RuntimeError.

    torch's decorator of that name lets them pass where the incoming gradients need no derivative, though they depend on what the forward
    pass saved too: the second derivative is then wrong without a word. This one costs nothing where no graph of the backward pass is made.
    """
    function = backward.__qualname__.split(".")[-2].strip("_").removesuffix("Function")
    message = (
        f"trying to differentiate twice: {backward.__module__.rpartition('.')[2]}.{function} has no second derivative. Leave this "
        "operation to PyTorch, or differentiate with torch.func, for which it consists of PyTorch's operations"
    ).encode()

    @functools.wraps(backward)
    def call(ctx, *grads):
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        return found if torch.compiler.is_compiling() else _not_differentiable(found, message, (*grads, *_leaves_of(ctx)))

    return call


def _not_differentiable(gradients, message: bytes, sources):
    """The gradients as results of a function whose own gradient is an error. sources: what they depend on: torch.autograd.grad of these
    alone would otherwise not come by the error, and take the second derivative for zero."""
    one = not isinstance(gradients, tuple)
    leaves = [None if g is None else g.detach().requires_grad_() for g in ((gradients,) if one else gradients)]
    if not any(leaf is not None for leaf in leaves):
        return gradients
    given = *leaves, *sources
    found = torch._C._functions.DelayedError(message, len(given))(*given)  # type: ignore[arg-type]  # takes None, too
    return found[0] if one else found[: len(leaves)]


def _leaves_of(node) -> List[torch.Tensor]:
    """The tensors at which the graph behind an autograd node begins."""
    found, seen, waiting = [], set(), [node]
    while waiting:
        for function, _ in waiting.pop().next_functions:
            if function is not None and function not in seen:
                seen.add(function)
                waiting.append(function)
                found += [function.variable] if hasattr(function, "variable") else []
    return found


_OfTorch: Any = torch.autograd.Function  # mypy would ask for the decorators that `Function` spares its subclasses


class Function(_OfTorch):
    """Base class of the autograd functions. A subclass has forward(ctx, ...) and backward(ctx, ...). Both become static, and the second one
    has no derivative (`once_differentiable`)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.forward, cls.backward = staticmethod(cls.forward), staticmethod(once_differentiable(cls.backward))


def needs_formula(first: torch.Tensor, *others: Optional[torch.Tensor]) -> bool:
    """True when an operation must be PyTorch's own operations on these arguments, which every kind of tensor and every transform takes:
    an autograd function of ours works on ordinary tensors alone (`is_ordinary`), and where torch.compile or torch.export traces it."""
    return not (torch.compiler.is_compiling() or is_ordinary(first, *others))


def autocasts(device: torch.device) -> bool:
    """True when autocast is on for a device. torch.is_autocast_enabled raises for those without autocast, such as meta."""
    if _any_autocasts is not None and not torch.compiler.is_compiling() and not _any_autocasts():
        return False
    return device.type != "meta" and torch.is_autocast_enabled(device.type)
