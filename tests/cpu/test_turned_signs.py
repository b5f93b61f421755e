"""Every operation on tensors whose memory holds their numbers with the other sign, or complex ones as their conjugates: each argument and
each incoming gradient, one at a time, through the interpreted kernels. `SELF_CHECKS` of the operations' files and `MORE_CALLS` of
tests/ops say what is called."""

import functools

import pytest
import torch

from tests.ops import collected
from tests.ops.common import BF16, FP32, check_each_operation, launched, self_check_of
from tests.tolerances import relative_error

# What the same numbers may change: an operation may give such tensors to PyTorch, whose steps round in bf16.
BOUND = 3e-2


def turned(tensor):
    """The same numbers, of which memory holds something else."""
    return tensor.conj_physical().conj() if tensor.is_complex() else torch._neg_view(-tensor)


def inputs_of(package, place):
    """Draws arguments, of which the one at a place has its sign turned; `count` of them so far."""

    class Inputs(self_check_of(package).CheckInputs):
        tokens, classes = 24, 300  # few, for the interpreter
        count = 0

        def constant(self, *shape, **options):
            return self.given(super().constant(*shape, **options))

        def turns(self, *shape):
            return self.given(super().turns(*shape))

        def given(self, tensor):
            self.count += 1
            return turned(tensor) if self.count - 1 == place else tensor

        def in_float32(self, draw, *shape, **options):
            """What draw(*shape), one of these methods, gives in float32."""
            self.dtype = FP32
            try:
                return draw(*shape, **options)
            finally:
                self.dtype = BF16

    return Inputs(torch.device("cpu"), BF16, False)


def step(package, call, place=None, upstream=None):
    """(results and gradients, how many arguments there are, how many results with a gradient). place, upstream: of the argument and of
    the incoming gradient whose sign is turned."""
    inputs = inputs_of(package, place)
    found = call(inputs)
    results = [r for r in ((found,) if isinstance(found, torch.Tensor) else found) if isinstance(r, torch.Tensor) and r.is_floating_point()]
    differentiable = [result for result in results if result.requires_grad]
    inputs.generator.manual_seed(1)
    gradients = [torch.randn(result.shape, generator=inputs.generator).to(result.dtype) for result in differentiable]
    if differentiable:
        torch.autograd.backward(differentiable, [turned(g) if i == upstream else g for i, g in enumerate(gradients)])
    parts = [*results, *[leaf.grad for leaf in inputs.leaves if leaf.grad is not None]]
    return [part.detach().clone() for part in parts], inputs.count, len(differentiable)


def check(package, call):
    """Raises AssertionError where the sign of some tensor counts twice or not at all."""
    launched(package).clear()
    wanted, arguments, gradients = step(package, call)
    assert launched(package) and arguments, "nothing ran in a kernel"
    for which, count in (("place", arguments), ("upstream", gradients)):
        for i in range(count):
            found = step(package, call, **{which: i})[0]
            errors = [relative_error(mine, exact) for mine, exact in zip(found, wanted, strict=True)]
            assert max(errors) <= BOUND, f"{which} {i}, with its sign turned, changes results and gradients by {errors}"


def test_every_self_check(interpreted):
    check_each_operation(interpreted, functools.partial(check, interpreted))


@pytest.mark.parametrize("title", collected("MORE_CALLS"))
def test_more_calls(interpreted, title):
    check(interpreted, functools.partial(collected("MORE_CALLS")[title], interpreted))
