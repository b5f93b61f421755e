"""Compares every operation that a package ships, on this machine, with float64 on the CPU.

In float64 an operation runs in PyTorch, so the same function is its own reference. What is compared are its results and the gradients of
all its arguments, in each dtype that has kernels. `SELF_CHECKS` of an operation's own file says how it is called: by title, a function
that draws arguments from `Inputs` and returns the results.
"""

import contextlib
import importlib
import pkgutil
import threading
import time
from concurrent.futures import Future
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import torch

from ... import ops
from ...runtime import launch
from ...runtime.artifacts import ArtifactError, KernelMissing
from ...runtime.device import why_no_kernels
from ...runtime.tuning import tuner

__all__ = ["run"]

# The largest relative error ||found - exact|| / ||exact||: a few roundings in a row. A kernel that computes something else is far beyond.
BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-4}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class CheckInputs:
    """Draws the same arguments in one dtype on a device and, as these round to, in float64 on the CPU."""

    tokens, hidden, width, classes, long = 130, 1024, 128, 2000, 40000

    def __init__(self, device: torch.device, dtype: torch.dtype, exact: bool, seed: int = 0):
        self.device = torch.device("cpu") if exact else device
        self.dtype, self.exact = dtype, exact
        self.generator = torch.Generator().manual_seed(seed)
        self.leaves: List[torch.Tensor] = []

    def call(self, function: Callable, *arguments, **options):
        """Returns what an operation gives, of any number of drawn arguments."""
        return function(*arguments, **options)

    def constant(self, *shape: int, scale: float = 1.0, shift: float = 0.0, of: Optional[Callable] = None) -> torch.Tensor:
        """Returns normal numbers, or a function of them, that need no gradient."""
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale + shift
        rounded = (of(drawn) if of else drawn).to(self.dtype)
        return rounded.double() if self.exact else rounded.to(self.device)

    def leaf(self, *shape: int, scale: float = 1.0, shift: float = 0.0, of: Optional[Callable] = None) -> torch.Tensor:
        """Returns numbers like `constant`, whose gradient is compared."""
        drawn = self.constant(*shape, scale=scale, shift=shift, of=of)
        self.leaves.append(drawn.requires_grad_())
        return drawn

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """Returns int64 numbers from 0 to high - 1."""
        return torch.randint(high, shape, generator=self.generator).to(self.device)

    def row(self, *values: int) -> torch.Tensor:
        """Returns int32 numbers."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def turns(self, *shape: int) -> torch.Tensor:
        """Returns complex numbers of length 1, in single or double precision."""
        angles = torch.randn(shape, generator=self.generator)
        found = torch.polar(torch.ones_like(angles), angles)
        return found.to(torch.complex128) if self.exact else found.to(self.device)

    def rows(self, count: int, width: int = hidden) -> List[torch.Tensor]:
        """Returns `count` leaves [tokens, width]."""
        return [self.leaf(self.tokens, width) for _ in range(count)]

    def heads(self, *counts: int, last: bool = False, width: int = width) -> List[torch.Tensor]:
        """Returns a leaf for each number of heads, [1, heads, tokens, width], or with the heads after the tokens."""
        return [self.leaf(1, self.tokens, n, width) if last else self.leaf(1, n, self.tokens, width) for n in counts]

    def angles(self, *shape: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """Returns two tables, of cosines and sines."""
        return self.constant(*shape), self.constant(*shape)

    def linear(self, out: int, inner: int) -> torch.Tensor:
        """Returns a leaf [out, inner] of a weight's size."""
        return self.leaf(out, inner, scale=inner**-0.5)

    def mlp(self) -> Tuple[torch.Tensor, ...]:
        """Returns the leaves x, gate_weight, up_weight and down_weight."""
        return self.leaf(self.tokens, 256), self.linear(512, 256), self.linear(512, 256), self.linear(256, 512)

    def labels(self) -> torch.Tensor:
        return self.integers(self.classes, self.tokens)

    def class_weight(self) -> torch.Tensor:
        return self.constant(self.classes, of=torch.sigmoid)

    def head(self, inner: int = hidden) -> Tuple[torch.Tensor, ...]:
        """Returns the leaves hidden and weight of a linear head, and labels."""
        return self.leaf(self.tokens, inner), self.linear(self.classes, inner), self.labels()

    def logits(self, of: Optional[Callable] = None) -> torch.Tensor:
        return self.leaf(self.tokens, self.classes, of=of)

    def log_probs(self) -> torch.Tensor:
        return self.logits(lambda x: x.log_softmax(-1))

    def probs(self) -> torch.Tensor:
        return self.logits(lambda x: x.softmax(-1))


Check = Callable[[CheckInputs], Union[torch.Tensor, Tuple]]


class Outcome(NamedTuple):
    """title: of the check; errors: the largest relative error of its results and gradients, by dtype; failures: what went wrong."""

    title: str
    errors: Dict[torch.dtype, float]
    failures: Tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join([*(f"{NAMES[dtype]} {error:.1e}" for dtype, error in self.errors.items()), *self.failures])


class Outcomes(NamedTuple):
    """cases: one each; where: the device; kernels: how many kernels of how many of this build were launched; seconds: that it took."""

    cases: Tuple[Outcome, ...]
    where: str
    kernels: Tuple[int, int]
    seconds: float


def checks() -> Dict[str, Check]:
    """Returns what `SELF_CHECKS` of every file of operations in this package have, by title, and the optimizer's."""
    found: Dict[str, Check] = {}
    for name in [*(f"...ops.{info.name}" for info in pkgutil.iter_modules(ops.__path__)), "..optimizer"]:
        with contextlib.suppress(ModuleNotFoundError):  # not every package ships an optimizer
            found.update(getattr(importlib.import_module(name, __package__), "SELF_CHECKS", {}))
    return found


def results_of(check: Check, inputs: CheckInputs) -> List[torch.Tensor]:
    """Returns the results of an operation and the gradients of its arguments, in float64 on the CPU."""
    found = check(inputs)
    outputs = [x for x in ([found] if isinstance(found, torch.Tensor) else found) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    inputs.generator.manual_seed(1)
    differentiable = [x for x in outputs if x.requires_grad]
    gradients = [inputs.constant(*x.shape).to(x.dtype) for x in differentiable]
    if differentiable:
        torch.autograd.backward(differentiable, gradients)
    parts = outputs + [leaf.grad for leaf in inputs.leaves if leaf.grad is not None]
    return [part.detach().double().cpu() for part in parts]


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns ||found - exact|| / ||exact||; infinite for another shape or a value that is not finite."""
    if found.shape != exact.shape or not torch.isfinite(found).all():
        return float("inf")
    scale = exact.norm().item()
    return (found - exact).norm().item() / scale if scale else (found - exact).norm().item()


def outcome_of(title: str, check: Check, device: torch.device) -> Optional[Outcome]:
    """Returns what an operation gives in every dtype; None where the package ships its file for what else is in it, and not its kernels."""
    errors, failures = {}, []
    for dtype, bound in BOUNDS.items():
        try:
            found = results_of(check, CheckInputs(device, dtype, False))
            exact = results_of(check, CheckInputs(device, dtype, True))
            error = max(relative_error(*pair) for pair in zip(found, exact)) if len(found) == len(exact) else float("inf")
        except KernelMissing:
            return None
        except Exception as wrong:  # one that fails takes no other along
            text = (str(wrong).splitlines() or [""])[0][:200]
            failures.append(f"{NAMES[dtype]} fails with {type(wrong).__name__}: {text}")
            continue
        errors[dtype] = error
        if not error <= bound:
            failures.append(f"{NAMES[dtype]} is off by {error:.1e}, expected at most {bound:.0e}")
    return Outcome(title, errors, tuple(failures))


def kernels_launched() -> Tuple[int, int]:
    """Returns how many of this build's kernels were launched in this process, and how many the loaded operations know."""
    known, used = set(), set()
    for kernel in tuner.kernels:
        for name in kernel.names:
            with contextlib.suppress(ArtifactError):
                known.update([name] if launch.backend.artifacts.variants(name) else [])
        used |= known.intersection(kernel.names) if kernel.was_launched() else set()
    return len(used), len(known)


def in_own_modes(function: Callable, device: torch.device) -> Any:
    """Calls a function in a thread of its own: the caller's no_grad, inference mode, autocast, default device and other modes hold in the
    caller's thread alone. Its default dtype holds everywhere, and is float32 meanwhile."""
    dtype, done = torch.get_default_dtype(), Future()  # type: ignore[var-annotated]

    def call():
        try:
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    torch.set_default_dtype(torch.float32)
    try:
        threading.Thread(target=call, daemon=True).start()
        return done.result()
    finally:
        torch.set_default_dtype(dtype)


def run(device: Optional[torch.device] = None) -> Outcomes:
    """Compares every operation of this package on a device, by default the current GPU or the CPU, with float64, whatever modes of PyTorch
    the caller is in."""
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    started = time.perf_counter()
    outcomes = in_own_modes(lambda: [outcome_of(title, check, device) for title, check in checks().items()], device)
    done = [outcome for outcome in outcomes if outcome is not None]
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    reason = why_no_kernels(device)
    return Outcomes(tuple(done), f"{where} ({reason})" if reason else where, kernels_launched(), time.perf_counter() - started)
