"""What PyTorch's operators do while a block of code runs: how many run, how large their results are, and what new memory holds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_


class Operators(TorchDispatchMode):
    """counts: a function of an operator and its arguments, called before it runs, whose results are added up in `count`; an operator stands
    for its own runs. sizes: a function of a tensor that an operator returns, whose largest result is `largest`."""

    def __init__(self, counts: Callable = lambda operator, args: 0, sizes: Callable | None = None):
        super().__init__()
        self.counts = (lambda operator, args: operator is counts) if isinstance(counts, torch._ops.OpOverload) else counts
        self.sizes, self.count, self.largest = sizes, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += self.counts(function, args)
        results = function(*args, **(kwargs or {}))
        if self.sizes is not None:
            self.largest = max([self.largest, *(self.sizes(each) for each in tree_leaves(results) if isinstance(each, torch.Tensor))])
        return results


def is_product(operator, args) -> bool:
    """Tells whether an operator multiplies matrices."""
    return operator.overloadpacket in PRODUCTS


@contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """PyTorch fills each tensor that it allocates with NaN or the largest integer, so that what is read or returned unwritten shows."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1000).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
