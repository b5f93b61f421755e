"""A step of AdamW on one parameter, in place (arXiv 1711.05101)."""

import math
from typing import Sequence, Tuple

import torch

from ..runtime.device import kernels_run_on
from ..runtime.launch import Kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Elements of the smallest parameter that a launch of its own is worth: the host needs 8 us for one, in which an H200 steps 2 million.
SMALLEST = 2**20
SLAB = 2**30  # elements that one launch reaches over: offsets into an array are 32-bit
TILE = 512  # elements of one block; sizes that are no multiple of it go to the kernel that checks every index

_kernel = Kernel("adamw", "adamw_any", grid=lambda c, first, *_: (-(-first.numel() // c["TILE"]),))


def fits(tensors: Sequence[torch.Tensor]) -> bool:
    """True when a kernel takes a parameter, its gradient and its two averages, and they are worth a launch: large contiguous tensors
    of one dtype on one GPU with kernels."""
    first = tensors[0]
    dtype, device = first.dtype, first.get_device()
    if first.numel() < SMALLEST or dtype not in DTYPES or not kernels_run_on(first):
        return False
    return all(t.is_contiguous() and t.dtype == dtype and t.get_device() == device and not t.is_neg() for t in tensors)


def numbers(step: float, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> Tuple[float, ...]:
    """What the kernel needs of a group's options at a step, counted from 1."""
    step_size, root = lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
    return (1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, step_size, root, eps)


def step_in_place(tensors: Sequence[torch.Tensor], floats: Sequence[float]) -> None:
    """tensors: param, grad, exp_avg, exp_avg_sq, for which `fits` holds; floats: of `numbers`."""
    first = tensors[0]
    elements = first.numel()
    if elements == 0:
        return
    key = (elements, first.dtype, first.get_device())
    if _kernel.again(key, [t.data_ptr() for t in tensors], floats):
        return
    flat = [t.view(-1) for t in tensors]
    if elements > SLAB:
        for start in range(0, elements, SLAB):
            step_in_place([t[start : start + SLAB] for t in flat], floats)
        return
    whole = elements % TILE == 0 and all(t.data_ptr() % 16 == 0 for t in tensors)
    _kernel.first(key, tensors, [t.view(-1, TILE) for t in flat] if whole else flat, *floats)
