"""What the tests of replayed calls share."""

import importlib

import torch

CALLS = 4  # after which a call that can be replayed is


class Counted:
    """A function as an operator, and how often it is called. computes: with PyTorch too."""

    def __init__(self, replay, function, computes=False):
        self.calls, self.function = 0, function
        self.operator = (replay.replayed_with_products if computes else replay.replayed)(self._call)

    def _call(self, *args):
        self.calls += 1
        return self.function(*args)

    def __call__(self, *args):
        return self.operator(*args)


def rows(count=3, columns=8, start=0.0) -> torch.Tensor:
    return torch.arange(count * columns, dtype=torch.float32).view(count, columns) + start


def sums_of_two(column_sum):
    """An operator of two arguments, with a result that is a part of what it makes."""

    def function(x, y):
        both = torch.empty(2, x.shape[1])
        both_kernels = importlib.import_module(column_sum.__module__).column_sum_kernel
        both_kernels(x, both[0])
        both_kernels(y, both[1])
        return both, both[1]

    return function


def odd(x: torch.Tensor) -> torch.Tensor:
    """Copies the numbers to an address that is no multiple of 16."""
    return torch.empty(x.numel() + 8)[1 : x.numel() + 1].view(x.shape).copy_(x)
