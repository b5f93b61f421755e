"""A step of AdamW on one parameter, in place (arXiv 1711.05101)."""

import math
from operator import itemgetter
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import torch

from ..runtime.device import kernels_run_on
from ..runtime.launch import Batch, Kernel
from ..runtime.tuning import DTYPES
from . import arrays
from .arrays import ElementwiseKernel

__all__ = ["Steps", "constants", "fits", "load", "numbers", "numbers_on_device"]

# Elements of the smallest parameter that a kernel of ours steps: PyTorch's fused step takes many small ones with one launch.
SMALLEST = 2**20
KEPT = 8  # ways to put parameters together that are remembered

_data_ptr = torch.Tensor.data_ptr


class _CapturableKernel(ElementwiseKernel):
    """A kernel on every element whose last array is none of those, but numbers for all of them."""

    def _rows(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return [*super()._rows(*tensors[:-1]), tensors[-1]]

    @staticmethod
    def _slabs(*arrays: torch.Tensor) -> Optional[Iterator[List[torch.Tensor]]]:
        parts = ElementwiseKernel._slabs(*arrays[:-1])
        return None if parts is None else ([*part, arrays[-1]] for part in parts)


class _OfFour(Kernel):
    """Four launches of a kernel in one, for tensors of whole pieces. arrays: that one launch has."""

    def __init__(self, name: str, one: ElementwiseKernel, arrays: int):
        def views(*tensors: torch.Tensor) -> List[torch.Tensor]:
            return [array for i in range(0, len(tensors), arrays) for array in one._rows(*tensors[i : i + arrays])]

        super().__init__(name, grid=lambda c, *found: (sum(array.shape[0] for array in found[::arrays]),), views=views)
        self.one = one


_kernel = ElementwiseKernel("adamw", "adamw_any")
_kernel_of_four = _OfFour("adamw_of_four", _kernel, 4)
_capturable = _CapturableKernel("adamw_capturable", "adamw_capturable_any")
_capturable_of_four = _OfFour("adamw_capturable_of_four", _capturable, 5)


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


def constants(beta1: float, beta2: float, eps: float) -> Tuple[float, ...]:
    """What the capturable kernel needs that is the same at every step."""
    return (beta1, 1 - beta1, beta2, 1 - beta2, eps)


def numbers_on_device(
    steps: torch.Tensor, lr: Union[float, torch.Tensor], beta1: float, beta2: float, weight_decay: float
) -> torch.Tensor:
    """What the capturable kernel needs at these steps, counted from 1, that changes from one to the next: [steps, 4], in float32.
    lr: may lie on the device too."""
    steps = steps.double()
    lr = lr.to(steps) if isinstance(lr, torch.Tensor) else lr
    found = torch.empty(len(steps), 4, dtype=torch.float32, device=steps.device)
    found[:, 0] = 1 - lr * weight_decay
    found[:, 1] = lr / (1 - beta1**steps)
    found[:, 2] = (1 - beta2**steps).rsqrt()
    return found


class Steps:
    """Steps parameters in place, each of which `fits`, with as few launches as there can be.

    capturable: the device counts the steps. repeated: the next calls are on tensors that are laid out as those of the first one (they
    may lie elsewhere), so that all launches are prepared at the first call and made by one from then on.
    """

    def __init__(self, capturable: bool, repeated: bool) -> None:
        self._four = _capturable_of_four if capturable else _kernel_of_four
        self._repeated = repeated
        self._batches: Dict[Tuple[int, ...], Tuple[Callable, Batch]] = {}

    def __call__(self, tensors: Sequence[torch.Tensor], places: Tuple[int, ...], floats: Sequence[float]) -> None:
        """tensors: param, grad, exp_avg, exp_avg_sq of one parameter, then of the next; last, where the device counts, the row of
        `numbers_on_device` of each that is stepped. places: of those among the parameters. floats: of `numbers`, or of `constants`."""
        known = self._batches.get(places)
        if known is not None:
            in_order, batch = known
            if batch(list(map(_data_ptr, in_order(tensors))), floats):
                return
        rows = [list(range(4 * place, 4 * place + 4)) for place in places]
        if self._four is _capturable_of_four:
            rows = [[*row, number] for row, number in zip(rows, range(len(tensors) - len(places), len(tensors)))]
        calls, order = [], []
        for together in _in_fours([[tensors[i] for i in row] for row in rows]):
            mine = [i for number in together for i in rows[number]]
            arrays = [tensors[i] for i in mine]
            kernel = self._four if len(together) == 4 else self._four.one
            calls.append((kernel(*arrays, *floats), list(map(_data_ptr, arrays))))
            order += mine
        if self._repeated and all(launch is not None for launch, _ in calls):
            if len(self._batches) >= KEPT:
                self._batches.clear()
            self._batches[places] = itemgetter(*order), Batch(calls)


def _in_fours(rows: Sequence[Sequence[torch.Tensor]]) -> Iterator[List[int]]:
    """The numbers of rows that one launch takes: four of one dtype, or one."""
    waiting: Dict[torch.dtype, List[int]] = {}
    for number, row in enumerate(rows):
        if not _is_whole(row):
            yield [number]
            continue
        places = waiting.setdefault(row[0].dtype, [])
        places.append(number)
        if len(places) == 4:
            yield places
            del waiting[row[0].dtype]
    for places in waiting.values():
        yield from ([place] for place in places)


def _is_whole(row: Sequence[torch.Tensor]) -> bool:
    """Whether the kernel of four takes a parameter: as pieces that are all full, at aligned addresses, within reach of one launch."""
    count = row[0].numel()
    return 0 < count <= arrays.SLAB and count % _kernel_of_four.constant("TILE") == 0 and not any(tensor.data_ptr() & 15 for tensor in row)


def load(dtype: torch.dtype, device) -> None:
    """Launches the kernel once. An optimizer would import the compiler with it, as torch's do, which takes a second."""
    tensors = [torch.ones(SMALLEST, dtype=dtype, device=device) for _ in range(4)]
    if fits(tensors):
        _kernel(*tensors, *numbers(1.0, 1e-3, 0.9, 0.999, 1e-8, 0.0))
