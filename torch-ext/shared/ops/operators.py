"""What a tracer (torch.compile, torch.export) sees of an operation: one operator, and constants."""

import functools
import itertools
from typing import Any, Callable, Optional

import torch

from ..._ops import add_op_namespace_prefix
from ..runtime.replay import replayed, replayed_with_products
from .inductor import with_fallback

__all__ = ["KEPT", "constant", "constant_when_traced", "halves", "operator_of", "traceable"]

KEPT = 1024  # combinations of shapes and strides that an operator remembers its results' strides of
LIBRARY = "_bastile_library"  # on the namespace of this build's operators


def constant_when_traced(function: Callable) -> Callable:
    """Marks a function whose result torch.compile takes as a constant, as torch.compiler.assume_constant_result does; that one imports
    the compiler to set the mark."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def constant(number: Any) -> Any:
    """The number itself, and in a graph of torch.compile a constant of it: the graph is compiled again for another number.

    A tracer may hold a number as a symbol, all of them with dynamic=True, and those that have changed once without; a graph's text and
    lists of numbers have room for constants only. What a tracer makes of `itertools.groupby` is constant in every torch from 2.6 on.
    """
    if not torch.compiler.is_compiling():
        return number
    return [found for found, _ in itertools.groupby((number,), key=lambda each: each)][0]


def _replayed_with_lists(function: Callable) -> Callable:
    """`replayed_with_products` of a function that also takes lists of numbers, which have no signature: it gets tuples instead."""
    again = replayed_with_products(function)
    return lambda *args: again(*[tuple(arg) if type(arg) is list else arg for arg in args])


def _contiguous(function: Callable) -> Callable:
    """The function itself, which PyTorch's operations compute on tensors without data, with contiguous results."""

    def fake(*args):
        found = function(*args)
        return found.new_empty(found.shape) if isinstance(found, torch.Tensor) else tuple([each.new_empty(each.shape) for each in found])

    return fake


def traceable(
    name: str, function: Callable, fake: Optional[Callable] = None, then: Optional[Callable] = None, computes: bool = False
) -> Callable:
    """`function`, which a tracer (torch.compile, torch.export) sees as one operator.

    In eager mode it is the function itself, which replay.py runs again where it can. fake: the same function on tensors without data, where
    that needs more than the formula of PyTorch, such as the tensors' numbers, or has other strides than contiguous results. A
    tracer relies on the strides that it gives, so the operator's results get them. then: called with the results, gives what is returned
    instead, such as parts of one of them, which an operator may not return; replayed too. computes: whether the function also computes with
    PyTorch, as of `replayed_with_products`. The operator is defined without torch.library.custom_op, whose calls cost 13 us more each.
    """
    fake, expected = fake or _contiguous(function), {}  # type: ignore[var-annotated]

    def layouts(args) -> tuple:
        key = tuple([(a.dtype, a.shape, a.stride()) if isinstance(a, torch.Tensor) else tuple(a) if type(a) is list else a for a in args])
        found = expected.get(key)
        if found is None:
            results = fake(*[arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args])
            if len(expected) >= KEPT:
                expected.clear()
            results = (results,) if isinstance(results, torch.Tensor) else results
            found = expected[key] = tuple((t.shape, t.stride()) for t in results)
        return found

    again = _replayed_with_lists(function) if computes else replayed(function)

    @functools.wraps(function)
    def operator_function(*args):
        results = again(*args)
        if isinstance(results, torch.Tensor):
            return _laid_out(name, results, layouts(args)[0])
        return tuple(_laid_out(name, *each) for each in zip(results, layouts(args)))

    operator = operator_of(name, operator_function, fake)
    if then is None:
        return lambda *args: (operator if torch.compiler.is_compiling() else again)(*args)
    whole = replayed(lambda *args: then(*function(*args)))
    return lambda *args: then(*operator(*args)) if torch.compiler.is_compiling() else whole(*args)


def halves(gradient: torch.Tensor, parameters: torch.Tensor) -> tuple:
    """The gradients of two parameters that are stored side by side; None for both where there are none. For `traceable`."""
    return (gradient, *(parameters.view(2, -1) if parameters.numel() else (None, None)))


def operator_of(name: str, function: Callable, fake: Callable) -> Callable:
    """The operator of this build that calls `function` and looks like `fake`; the one that exists where this build is loaded twice."""
    namespace, _, _ = add_op_namespace_prefix(name).partition("::")
    operators = getattr(torch.ops, namespace)
    if not hasattr(operators, name):
        if not hasattr(operators, LIBRARY):
            setattr(operators, LIBRARY, torch.library.Library(namespace, "FRAGMENT"))  # its operators live as long as it does
        library = getattr(operators, LIBRARY)
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
        library.define(name + torch.library.infer_schema(function, mutates_args=()), tags=tags)
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace}::{name}", with_fallback(fake, getattr(operators, name).default), lib=library)
    return getattr(operators, name).default


def _laid_out(name: str, found: torch.Tensor, expected: tuple) -> torch.Tensor:
    """`found` with the strides of the fake result, whose shape it must have: (shape, strides)."""
    shape, strides = expected
    if found.shape != shape:
        raise RuntimeError(f"{name} gave {list(found.shape)} where its fake function gave {list(shape)}: please report this")
    if found.stride() == strides:
        return found
    return torch.empty_strided(shape, strides, dtype=found.dtype, device=found.device).copy_(found)
