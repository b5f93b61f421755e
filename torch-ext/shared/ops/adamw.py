"""A step of AdamW on one parameter, in place (arXiv 1711.05101)."""

import math
from typing import Sequence, Tuple

import torch

from ..runtime.device import kernels_run_on
from ..runtime.tuning import DTYPES
from .common import ElementwiseKernel

# Elements of the smallest parameter that a launch of its own is worth: the host needs 8 us for one, in which an H200 steps 2 million.
SMALLEST = 2**20

_kernel = ElementwiseKernel("adamw", "adamw_any")


def fits(tensors: Sequence[torch.Tensor]) -> bool:
    """True when a kernel takes a parameter, its gradient and its two averages, and they are worth a launch: large contiguous tensors
    of one shape and dtype on one GPU with kernels."""
    first = tensors[0]
    dtype, device, shape = first.dtype, first.get_device(), first.shape
    if first.numel() < SMALLEST or dtype not in DTYPES or not kernels_run_on(*tensors):
        return False
    for tensor in tensors:
        if not (tensor.is_contiguous() and tensor.dtype == dtype and tensor.get_device() == device and tensor.shape == shape):
            return False
    return True


def numbers(step: float, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> Tuple[float, ...]:
    """What the kernel needs of a group's options at a step, counted from 1."""
    step_size, root = lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
    return (1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, step_size, root, eps)


def step_in_place(tensors: Sequence[torch.Tensor], floats: Sequence[float]) -> None:
    """tensors: param, grad, exp_avg, exp_avg_sq, for which `fits` holds; floats: of `numbers`."""
    _kernel(*tensors, *floats)


def load(dtype: torch.dtype, device) -> None:
    """Launches the kernel once. An optimizer would import the compiler with it, as torch's do, which takes a second."""
    tensors = [torch.ones(SMALLEST, dtype=dtype, device=device) for _ in range(4)]
    if fits(tensors):
        step_in_place(tensors, numbers(1.0, 1e-3, 0.9, 0.999, 1e-8, 0.0))
