"""Whether the prebuilt kernels run where a tensor lives; if not, says once why and what to do about it."""

import os
import threading
import warnings
from typing import Dict, Optional

import torch
from torch import nn
from torch.autograd import forward_ad

from . import launch
from .artifacts import ArtifactError, host
from .driver import MIN_DRIVER, DriverError
from .torch_version import check_torch

__all__ = [
    "PLAIN", "is_ordinary", "is_transformed", "kernels_run_on", "multiprocessors", "prepare_backward", "prepared", "version_of",
    "why_no_kernels",
]  # fmt: skip

check_torch(torch.__version__)

PLAIN = (torch.Tensor, nn.Parameter)
BACKWARD_THREAD = "bastile-backward"
_TRACERS = [key for name, key in torch._C._TorchDispatchModeKey.__members__.items() if name in ("FAKE", "PROXY", "FUNCTIONAL")]

prepared: set = set()  # devices whose first backward pass will find what it needs
_lock = threading.Lock()
_ready: Dict[int, bool] = {}
_warned: set = set()
_multiprocessors: Dict[int, int] = {}


class KernelsUnavailable(RuntimeError):
    """The kernels cannot run on this GPU and BASTILE_STRICT=1 asks for an error."""


def is_ordinary(first: torch.Tensor, *others: Optional[torch.Tensor]) -> bool:
    """True when tensors of one device are numbers in memory and nothing else, of which only autograd's backward pass wants to know.

    False for DTensor, FakeTensor and all other subclasses, for meta tensors, inside the transforms of torch.func, inside a level of
    forward-mode AD, and while a mode traces or fakes what PyTorch's operations do. None stands for an argument that was not given.
    """
    for tensor in (first, *others):
        if type(tensor) not in PLAIN and tensor is not None:
            return False
    return not (is_transformed() or first.is_meta)


def is_transformed() -> bool:
    """True inside the transforms of torch.func and a level of forward-mode AD, and while a mode traces or fakes PyTorch's operations."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    return bool(torch._C._len_torch_dispatch_stack()) and any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)


def version_of(tensor: torch.Tensor) -> Optional[int]:
    """Counts the writes to a tensor that went through PyTorch's operations; None for one of `torch.inference_mode()`, whose writes nobody
    counts. torch.distributed, NumPy, DLPack and `.data` write uncounted, so equal versions say something of our own tensors only, or
    within a forward pass."""
    return None if tensor.is_inference() else tensor._version


def kernels_run_on(first: torch.Tensor, *others: Optional[torch.Tensor]) -> bool:
    """True when an operation on these tensors of one device goes to the prebuilt kernels, False when it goes to PyTorch.

    Tensors that are not ordinary go to PyTorch (`is_ordinary`), and so do those that hold their numbers with the sign turned.
    CPU tensors do, which is what is documented. A GPU without usable kernels does so with one warning, or raises
    KernelsUnavailable under BASTILE_STRICT=1.
    """
    on_gpu = first.is_cuda
    if not (on_gpu or launch.backend.runs_on_cpu):
        return False
    for tensor in (first, *others):  # as is_ordinary, in one loop
        if tensor is not None and (type(tensor) not in PLAIN or tensor.is_neg()):
            return False
    if is_transformed():
        return False
    if not on_gpu:
        return first.is_cpu
    index = first.get_device()
    ready = _ready.get(index)
    if ready is None:
        with _lock:
            ready = _ready.get(index)
            if ready is None:
                ready = _ready[index] = _probe(index)
    return ready


def why_no_kernels(device: torch.device) -> str:
    """Why the prebuilt kernels do not run on a device; "" where they do. Raises nothing and remembers nothing."""
    if device.type != "cuda":
        return f"no GPU ({device.type}): PyTorch's operations run"
    try:
        _check(torch.cuda.current_device() if device.index is None else device.index)
    except (ArtifactError, DriverError, KernelsUnavailable) as error:
        return str(error)
    return ""


def multiprocessors(tensor: torch.Tensor) -> int:
    """Returns the number of multiprocessors of the tensor's device."""
    index = tensor.get_device()
    count = _multiprocessors.get(index)
    if count is None:
        count = _multiprocessors[index] = launch.backend.multiprocessors(index)
    return count


def forget() -> None:
    """Looks at every device again at its next use; for tests, and after a driver was repaired."""
    with _lock:
        _ready.clear()
        _warned.clear()
        prepared.clear()


def _probe(index: int) -> bool:
    if torch.is_grad_enabled():
        prepare_backward(index)
    try:
        _check(index)
    except (ArtifactError, DriverError, KernelsUnavailable) as error:
        if os.environ.get("BASTILE_STRICT") == "1":
            why = f"{error} (BASTILE_STRICT=1 makes this an error)"
            raise KernelsUnavailable(f"Bastile's kernels do not run on cuda:{index}: {why}") from error
        message = f"Bastile's kernels do not run on cuda:{index} and PyTorch's operations take their place: {error}."
        if message not in _warned:
            _warned.add(message)
            warnings.warn(message, RuntimeWarning, stacklevel=4)
        return False
    return True


class _AskForHandle(torch.autograd.Function):
    """Has PyTorch make autograd's thread of a device, and the cuBLAS handle of that thread, in its backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        dx = dy.clone()  # a launch, which gives the thread its CUDA context: PyTorch warns where a handle is the first to want one
        torch.cuda.current_blas_handle()
        return dx


def prepare_backward(index: int) -> None:
    """Lets another thread do what the first backward pass on a device would wait 80 ms for, while this one looks at the kernels: PyTorch
    has a handle of cuBLAS for each thread that asks for a product. Only once, and not while a graph is captured."""
    if index in prepared or torch.cuda.is_current_stream_capturing():
        return
    prepared.add(index)
    stream = torch.cuda.current_stream(index)  # a handle has a workspace for each stream

    def prepare() -> None:
        try:
            with torch.cuda.device(index), torch.cuda.stream(stream):
                _AskForHandle.apply(torch.zeros(1, device="cuda", requires_grad=True)).backward()
        except RuntimeError:
            pass  # the first real use reports what is wrong with the device

    threading.Thread(target=prepare, name=BACKWARD_THREAD).start()


def _check(index: int) -> None:
    """Raises what keeps the kernels from running on a device; ends with a real launch, which is where some drivers fail."""
    backend = launch.backend
    if torch.version.cuda is None:
        raise KernelsUnavailable("this build of torch is not for CUDA. Install one that is")
    major, minor = torch.cuda.get_device_capability(index)
    name = torch.cuda.get_device_name(index)
    version = backend.version()
    if version < MIN_DRIVER:
        raise KernelsUnavailable(
            f"the driver supports CUDA {version // 1000}.{version % 1000 // 10}, "
            f"expected {MIN_DRIVER // 1000}.{MIN_DRIVER % 1000 // 10} or newer. Install driver R580 or newer"
        )
    if not backend.artifacts.architectures():
        raise KernelsUnavailable(f"there are no kernels for {host()} hosts")
    if not backend.architecture(index):
        built = ", ".join(backend.artifacts.architectures())
        raise KernelsUnavailable(
            f"{name} has compute capability {major}.{minor}, and there are kernels for {built}. A newer version of this package may have it"
        )
    backend.artifacts.verify(backend.architecture(index))
    backend.artifacts.unpack_ahead(backend.architecture(index))
    with torch.cuda.device(index):
        x = torch.ones((2, 4), dtype=torch.float32, device="cuda")
        total = torch.zeros(4, dtype=torch.float32, device="cuda")
        if not torch.cuda.is_current_stream_capturing():
            _column_sum(x, total)
            torch.cuda.synchronize(index)
            if total.tolist() != [2.0] * 4:
                raise KernelsUnavailable("a first launch gave a wrong result")


_column_sum = launch.Kernel("column_sum", grid=lambda c, partial, out: (-(-partial.shape[1] // c["COLS"]),))
