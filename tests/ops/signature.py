"""How the tests of every operation call one by name: see `Signature`."""

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from tests.ops import collected, files
from tests.ops.common import randn

TOKENS, HIDDEN, INNER, CLASSES, WIDTH, EXPERTS, TOP_K = 3, 1024, 96, 40, 128, 4, 2


class Sizes(NamedTuple):
    """The sizes at which kernels exist; tests/properties.py draws others, under the same names.

    more: dimensions between the tokens and the last one; length: of rows; features: of a head's input; inner: of an MLP; heads: of q and
    of k; tables: how many tables of angles there are, of `table` numbers.
    """

    tokens: int = TOKENS
    more: tuple = ()
    length: int = HIDDEN
    features: int = HIDDEN
    inner: int = INNER
    classes: int = CLASSES
    batch: int = 2
    heads: tuple = (8, 8)
    width: int = WIDTH
    tables: int = 1
    table: int = WIDTH
    expert_count: int = EXPERTS
    top_k: int = TOP_K
    expert_width: int = WIDTH

    @property
    def rows(self) -> tuple:
        return self.tokens, *self.more

    def optional(self, **shapes) -> dict:
        """Arguments that may be left out: here all are given."""
        return shapes


class Signature(NamedTuple):
    """An operation by the names of its arguments; `SIGNATURES` of a file here has those of its operations, by name.

    shapes: of `Sizes`, the shape of each tensor; formula: what it computes, in PyTorch, of tensors of any floating dtype by the same
    names, which every transform can differentiate; constant: the arguments that have no gradient; rows: how many of the tensors, the
    first ones, have rows of any length and may be a single row without a dimension of rows, 0 for none; sizes: where they are others than
    usual; options: values that tests/properties.py draws, by name; call: of the function and the tensors, where that is no call by name;
    like: (an operation, options): what this one is, in the last package given; function: of a loaded package, gives the function, where
    it is not one of shared/ops; package: the only one that ships its kernels; passes_on: whether its last result is an argument itself;
    alone: by argument, how many more roundings a gradient has that is asked for alone.
    """

    shapes: Callable
    formula: Callable
    constant: tuple = ()
    rows: int = 0
    sizes: dict = {}
    options: dict = {}
    call: Callable = lambda function, found, **options: function(**found, **options)
    like: tuple | None = None
    function: Callable | None = None
    package: str | None = None
    passes_on: bool = False
    alone: dict = {}

    def sized(self, tokens: int = TOKENS) -> dict:
        """The shape of each argument at the usual sizes."""
        return self.shapes(Sizes(tokens=tokens, **self.sizes))

    def of_length(self, tokens: int, length: int) -> tuple:
        """The shapes of the arguments, one after another, with rows of a length."""
        return tuple(self.shapes(Sizes(tokens=tokens, length=length)).values())


@functools.cache
def modules() -> dict:
    """By operation with a signature: the file of torch-ext/shared/ops that it lies in."""
    tables = [(getattr(module, "MODULE", name), getattr(module, "SIGNATURES", {})) for name, module in files().items()]
    return {operation: module for module, signatures in tables for operation in signatures}


class Operations:
    """The operations of loaded packages as attributes, public ones and others; each from the first package that ships it."""

    def __init__(self, *packages):
        self.packages = packages

    def __getattr__(self, name):
        found = self._found(name)
        setattr(self, name, found)  # so that torch.compile need not trace an import
        return found

    def _found(self, name):
        signature = collected("SIGNATURES").get(name)
        if signature and signature.like:
            operation, options = signature.like
            return functools.partial(getattr(Operations(self.packages[-1]), operation), **options)
        for package in self.packages:
            with contextlib.suppress(ModuleNotFoundError):
                if signature and signature.function:
                    return signature.function(package)
                return getattr(importlib.import_module(f"{package.__name__}.shared.ops.{modules().get(name, name)}"), name)
        raise AttributeError(f"none of {self.packages} ships the operation {name}")


class New(NamedTuple):
    """Makes the tensors of `OPERATORS`: name of an operator -> function of this, which gives calls of it, in the layouts and with the
    switches that the operations use."""

    device: torch.device | str
    dtype: torch.dtype

    def __call__(self, *shape, seed=0, dtype=None):
        return randn(*shape, dtype=dtype or self.dtype, device=self.device, seed=seed)

    def exact(self, *shape, seed=0):
        """In float32 whatever the dtype."""
        return self(*shape, seed=seed, dtype=torch.float32)

    def integers(self, rows, dtype=torch.int64):
        return torch.tensor(rows, dtype=dtype, device=self.device)
