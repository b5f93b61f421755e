"""The check of every provider's results and gradients against float64, before it is timed."""

from collections.abc import Callable

import torch

from .operation import Inputs, Operation, Reference, as_tuple

# A provider beyond this computes something else. How well it rounds is what the error rows say.
BOUNDS = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-4}


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return ||found - exact|| / ||exact|| in float64; infinite for a wrong shape or a value that is not finite."""
    if found.shape != exact.shape or not torch.isfinite(found).all():
        return float("inf")
    scale = exact.norm()
    difference = (found.detach().double() - exact).norm()
    return float(difference / scale) if scale > 0 else float(difference)


def reference(operation: Operation, inputs: Inputs) -> Reference:
    """Return the results and gradients in float64, of the operation's own reference or of its formula."""
    if operation.reference:
        return operation.reference(inputs)
    exact = inputs.to_float64()
    outputs = as_tuple(operation.formula(*exact.leaves, *exact.others))
    gradients = torch.autograd.grad(outputs, exact.leaves, exact.output_gradients or None)
    return Reference(tuple(t.detach() for t in outputs), gradients)


def errors(operation: Operation, function: Callable, inputs: Inputs, exact: Reference) -> dict[str, float]:
    """Return the relative errors of a provider's outputs and gradients, by name."""
    outputs = as_tuple(function(*inputs.leaves, *inputs.others))
    found = {n: relative_error(o.detach(), e) for n, o, e in zip(operation.outputs, outputs, exact.outputs, strict=True)}
    gradients = torch.autograd.grad(outputs, inputs.leaves, inputs.output_gradients or None)
    return found | {n: relative_error(g, e) for n, g, e in zip(operation.gradients, gradients, exact.gradients, strict=True)}


def check(found: dict[str, float], dtype: torch.dtype, bounds=None) -> None:
    """Raise ArithmeticError for the error that is furthest beyond its bound. bounds: by name, instead of that of the dtype."""
    limits = {name: (bounds or {}).get(name, BOUNDS[dtype]) for name in found}
    # Comparisons with a NaN are False: it must not pass for small.
    worst = max(found, key=lambda name: found[name] / limits[name] if found[name] == found[name] else float("inf"))
    if not found[worst] <= limits[worst]:
        raise ArithmeticError(f"wrong result: {worst} is off by {found[worst]:.1e}, expected at most {limits[worst]:.0e}")
