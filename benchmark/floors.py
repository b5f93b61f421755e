"""What the device needs for the work alone, measured in the same run as everything that is compared with it."""

from collections.abc import Callable

import torch

from .operation import Inputs, Operation


def copy_call(nbytes: int, device: str) -> Callable[[], object]:
    """Return a copy_ between two buffers that moves `nbytes`: half of them read, half written."""
    source = torch.empty(max(nbytes // 2, 1), dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def floor_call(operation: Operation, inputs: Inputs, mode: str) -> Callable[[], object]:
    """Return the operation's own floor, or a copy of the bytes that it has to move."""
    if operation.floor:
        return operation.floor(inputs, mode)
    return copy_call(operation.work(inputs, mode).nbytes, str(inputs.leaves[0].device))
