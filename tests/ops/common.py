"""What the checks of every operation share: random tensors, their copies in float64, the package's limits, and the form of planted
errors."""

import contextlib
import importlib
import types

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.tolerances import RELATIVE_ERROR, assert_close


def runtime_of(package) -> types.SimpleNamespace:
    """The runtime modules of a loaded package."""
    names = ("artifacts", "launch", "device")
    return types.SimpleNamespace(**{name: importlib.import_module(f"{package.__name__}.shared.runtime.{name}") for name in names})


FLOATS = (torch.bfloat16, torch.float16, torch.float32)
BF16, FP16, FP32 = FLOATS
CPU = "cpu"


def randn(*shape, dtype, device, seed=0, scale=1.0):
    """Normal random numbers that are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(device=device, dtype=dtype)


def leaf(tensor):
    return tensor.detach().requires_grad_()


def exact(tensor):
    """Returns the numbers in float64, as a leaf to differentiate."""
    return tensor.detach().double().cpu().requires_grad_()


# ---------------------------------------------------------------- bounds, and what is the caller's
# An element's rounding error is bounded, not only the norm's: in a short row one badly rounded element may be the largest.
ROW_FACTOR = 2.0


def assert_rows_close(found, wanted, dtype, what="result", factor=1.0, floor=1e-2, row_factor=ROW_FACTOR, terms=0.0):
    """Checks as `assert_close` does, and each row of the last dimension with row_factor times the table's bound. floor: of a typical row's
    size: smaller ones (zeros, or terms of a gradient that cancel) are judged by that. terms: the size of what cancels where the result
    is zero everywhere; what is left of it is judged by that."""
    assert found.dtype == dtype, f"{what} is {found.dtype}, expected {dtype}"
    if wanted.numel() and float(wanted.detach().abs().max()) <= 1e-12 * terms:
        left = float(found.detach().abs().max())
        assert left <= RELATIVE_ERROR[dtype] * factor * terms, f"{what} in {dtype}: {left:.2e} is left of {terms:.2e}, expected nothing"
        return
    assert_close(found, wanted, dtype, what, factor)
    if found.dim() < 2 or found.numel() == 0:
        return
    found, wanted = found.detach().double().cpu(), wanted.detach().double()
    scale = wanted.norm(dim=-1)
    scale = torch.maximum(scale, floor * scale.square().mean().sqrt()).clamp_min(1e-30)
    worst = ((found - wanted).norm(dim=-1) / scale).max().item()
    bound = RELATIVE_ERROR[dtype] * factor * row_factor
    assert worst <= bound, f"{what} in {dtype}: a row's relative error is {worst:.2e}, expected at most {bound:.1e}"


def unchanged(*tensors):
    """A function that fails when one of the tensors has other bits than now."""
    before = [(t, t.detach().clone()) for t in tensors if t is not None]

    def check():
        for tensor, copy in before:
            assert torch.equal(tensor.detach(), copy), "an argument was overwritten"

    return check


def check_kept(tensors, before, what):
    """The caller's tensors hold what they held."""
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor.detach(), old), f"{what} writes into a tensor of the caller's"


def gradient_twice(loss, leaf, upstream=None):
    """The gradient, and that of a second backward pass, which must be the same numbers; upstream: of loss."""
    (first,) = torch.autograd.grad(loss, leaf, upstream, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, leaf, upstream)
    assert torch.equal(first, kept), "the second backward pass writes into what the first one gave"
    return first, second


def backward_twice(result, dy, leaves):
    """The gradients, which a second backward pass must give again, bit for bit."""
    first = torch.autograd.grad(result, leaves, dy, retain_graph=True, allow_unused=False)
    second = torch.autograd.grad(result, leaves, dy)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b), "the second backward pass gives something else"
    return first


@contextlib.contextmanager
def limit(package, module, name, value):
    """Another value of a limit in one of the package's modules of operations, so that tests may be small."""
    module = importlib.import_module(f"{package.__name__}.shared.ops.{module}")
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def self_check_of(package):
    return importlib.import_module(f"{package.__name__}.shared.hf.say.self_check")


def check_each_operation(package, check) -> None:
    """Calls check(call) with every call of `python -m bastile --check`. Raises AssertionError with what each of those that fail says. One
    whose kernels the package's build lacks counts for none: the package ships its file for what else is in it."""
    failures, checked = [], 0
    for title, call in self_check_of(package).checks().items():
        if call.__module__.endswith(".optimizer"):  # which writes to what it is given
            continue
        try:
            check(call)
            checked += 1
        except runtime_of(package).artifacts.KernelMissing:
            continue
        except Exception as error:  # one that fails takes no other along
            failures.append(f"{title}: {type(error).__name__}: {str(error)[:500]}")
    assert checked and not failures, "\n".join(failures)


def launched(ops) -> list:
    """The names of the variants that ran so far."""
    return runtime_of(ops).launch.backend.launched


@contextlib.contextmanager
def mesh_of_one():
    """A device mesh of this process alone."""
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(CPU, (1,))
    finally:
        if alone:
            dist.destroy_process_group()


# ---------------------------------------------------------------- for CHECKS and MUTANTS
def on_cpu(check, *arguments, **options):
    """A check, on CPU tensors, with these arguments after the device."""
    return lambda ops: check(ops, CPU, *arguments, **options)


def never_refused(check):
    """A check in which a launch that a kernel refuses (PromiseError) is as good as a difference."""

    def checked(ops):
        try:
            check(ops)
        except ValueError as error:
            raise AssertionError(str(error)) from error

    return checked


def _autograd(check, operation):
    def checked(ops):
        cases = importlib.import_module("tests.op_cases")  # which takes formulas from the files beside this one
        try:
            getattr(cases, check)(cases.operations(ops), operation, FP32, CPU)
        except RuntimeError as error:  # that autograd refuses a gradient is as good as a difference
            raise AssertionError(f"{operation}: {error}") from error

    return checked


def alone(operation):
    """Each gradient of an operation, asked for alone."""
    return _autograd("check_that_one_gradient_alone_is_the_same", operation)


def again(operation):
    """A second backward pass of an operation."""
    return _autograd("check_a_second_backward_pass", operation)


def errors_in(file, check, function, *pairs, kernels=True):
    """Planted errors of one function, (old, new) each or (old, new, another check), in the form of `MUTANTS`."""
    return [(file, function, old, new, *(other or [check]), kernels) for old, new, *other in pairs]
