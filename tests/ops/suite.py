"""The operations of the package for Liger's users, and those of heads, found by what their files here say of them."""

import contextlib
import functools
import importlib
import types
from collections.abc import Callable
from typing import NamedTuple

import torch

from tests.ops import collected, files
from tests.ops.common import BF16, FP32, launched, leaf, randn
from tests.ops.signature import Operations

LABELS = torch.tensor([1, -100, 3, 0, 39, 7, 2, -100, 5])  # of the rows of `Case.slabs`


class Case(NamedTuple):
    """How the tests of every operation call one.

    call: of the operations and tensors, gives one tensor. aligned: of a length n, the shapes of tensors with rows of n, for odd addresses.
    slabs: shapes of tensors, for launches in parts. rows: how many of the tensors, the first ones, may be a single row without a dimension
    of rows, 0 for none. half: whether its gradient in fp16 is computed otherwise than in fp32. sample: of the operations and `Tensors`,
    gives a function and what it is differentiated in, at a size that its kernels take.
    """

    call: Callable | None
    aligned: Callable | None = None
    slabs: tuple | None = None
    rows: int = 0
    half: bool = False
    sample: Callable | None = None


class Tensors(NamedTuple):
    """Makes the tensors of a sample, which need gradients."""

    device: str
    dtype: torch.dtype = BF16

    def normal(self, *shape, seed=0, scale=1.0):
        return leaf(randn(*shape, dtype=self.dtype, device=self.device, seed=seed, scale=scale))

    def exact(self, *shape, seed=0):
        return leaf(randn(*shape, dtype=FP32, device=self.device, seed=seed))

    def ones(self, count):
        return leaf(torch.ones(count, dtype=self.dtype, device=self.device))


@functools.cache
def names() -> tuple:
    """The files here of the suite's operations."""
    return tuple(sorted(name for name, module in files().items() if hasattr(module, "all_cases") and hasattr(module, "OPERATIONS")))


def module_of(name: str):
    """A file here, by name."""
    return files()[name]


def cases_with(field: str) -> dict:
    """The operations' cases that have something in a field."""
    return {name: case for name, case in collected("OPERATIONS").items() if getattr(case, field)}


@functools.cache
def modules_of_functions() -> dict:
    """The file of torch-ext/shared/ops that each operation lies in."""
    tables = [(getattr(module, "MODULE", name), getattr(module, "OPERATIONS", {})) for name, module in files().items()]
    return {name.partition(",")[0]: module for module, cases in tables for name in cases}


class SuiteOperations(Operations):
    """The operations of the suite as attributes, with the arguments that they have there, and `<module>_module` for what lies beside
    one."""

    def launched(self) -> int:
        """How many kernels the interpreter has run."""
        return len(launched(self.packages[0]))

    def __getattr__(self, name):
        module = name.removesuffix("_module")
        for package in self.packages:
            with contextlib.suppress(ModuleNotFoundError):
                found = importlib.import_module(f"{package.__name__}.shared.ops.{modules_of_functions().get(module, module)}")
                if name in collected("WITH_LIGERS_ARGUMENTS"):
                    return functools.partial(collected("WITH_LIGERS_ARGUMENTS")[name], found)
                return found if module != name else getattr(found, name)
        raise AttributeError(f"none of {self.packages} ships the operation {name}")


def suite(*packages) -> SuiteOperations:
    """The operations of loaded packages, each from the first that ships it."""
    return SuiteOperations(*packages)


def in_order(name: str, packages: list, ships) -> list:
    """Packages, first those that ship the kernels which the tests of an operation are to launch: another that has its Python alone would
    run it in other kernels. ships(package, operation of kernel_src): whether it has these."""
    wanted = [kernel for kernel, tests in collected("GPU_TESTS").items() if f"test_operation[{name}" in tests]
    return sorted(packages, key=lambda package: not all(ships(package, kernel) for kernel in wanted))


def of_suite(checks: dict) -> dict:
    """Checks of the suite's operations as `CHECKS` has them, functions of a package."""
    return {name: lambda package, check=check: check(suite(package)) for name, check in checks.items()}


def check_all_cases(ops, name: str, device, dtype) -> None:
    """Raises AssertionError with what each case of a file here says that fails in a dtype. ops: of `suite`."""
    failures = []
    for case, check in module_of(name).all_cases(ops, device, (dtype,)):
        try:
            check()
        except AssertionError as error:
            failures.append(f"{case}: {error}")
    assert not failures, "\n".join(failures)


# ---------------------------------------------------------------- samples
def sample(ops, name: str, device, dtype=BF16) -> tuple:
    """(function, the tensors that it takes and is differentiated in) of an operation with a sample. ops: of `suite`."""
    # Without the look-up of an attribute, which torch.compile would trace.
    functions = types.SimpleNamespace(**{function: getattr(ops, function) for function in modules_of_functions()})
    return collected("OPERATIONS")[name].sample(functions, Tensors(device, dtype))


def run(call, leaves) -> tuple:
    """The result and the gradients."""
    result = call(*leaves)
    return (result, *torch.autograd.grad(result, leaves, torch.ones_like(result)))
