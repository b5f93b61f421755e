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


def product_calls(products: Callable[[Inputs, str], list[tuple[int, int, int]]]) -> Callable[[Inputs, str], Callable[[], object]]:
    """Return the floor of an operation whose matrix products [m, k] x [k, n] are products(inputs, mode), as (m, n, k)."""

    def floor(inputs: Inputs, mode: str) -> Callable[[], object]:
        like, shapes = inputs.leaves[0], products(inputs, mode)
        operands = {}
        for m, n, k in shapes:
            # Normal numbers: a GPU's clock depends on how many bits change.
            left, right = (torch.randn(shape, device=like.device, dtype=torch.float32).to(like.dtype) for shape in ((m, k), (k, n)))
            operands[m, n, k] = left, right, torch.empty(m, n, device=like.device, dtype=like.dtype)

        def call() -> None:
            for shape in shapes:
                left, right, out = operands[shape]
                torch.mm(left, right, out=out)

        return call

    return floor
