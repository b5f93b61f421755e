"""Stands in for the coming launcher."""
import torch

from ..runtime.launch import Kernel as Old


class Kernel:
    def __init__(self, *names, grid, views=None, reads=(), where=None):
        self.old, self.views = Old(*names, grid=grid), views
    def __call__(self, *args):
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        numbers = [a for a in args if not isinstance(a, torch.Tensor)]
        if self.views:
            tensors = self.views(*tensors)
        self.old(tensors, *numbers)
