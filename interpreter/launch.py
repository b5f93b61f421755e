"""`interpret`: a kernel's Python function, called once a block with tiles and arrays in place of its arguments."""

import builtins
import inspect
import types
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile._annotated_function import HeterogeneousTupleNode, LeafAnnotationNode
from cuda.tile._dispatch_mode import DispatchMode
from cuda.tile._execution import is_function_wrapper, is_stub
from cuda.tile.compilation import ArrayConstraint, ConstantConstraint, KernelSignature, ListConstraint, ScalarConstraint, TupleConstraint

from . import accesses, arithmetic, atomics, blocks, reductions, shapes
from .arrays import Array
from .races import Launch
from .signature import check_signature, overlap
from .tiles import RANGES, TILE_DTYPES, InterpreterError, Tile, convert, scalar, tile_of

_MODULES = accesses, arithmetic, atomics, blocks, reductions, shapes
IMPLEMENTED = {inspect.unwrap(stub): fn for module in _MODULES for stub, fn in module.OPS.items()}
MAX_GRID = ((1 << 24) - 1, 65535, 65535)  # cuTile's limit, and CUDA's of the dimensions after the first


def interpret(
    kernel: ct.kernel,
    grid: tuple[int, ...],
    args: tuple,
    *,
    order: str = "forward",
    races: bool = True,
    read_back: bool = True,
    signature: KernelSignature | None = None,
) -> None:
    """Runs `kernel` on CPU tensors, as `ct.launch(stream, grid, kernel, args)` runs it on a GPU, and writes into the tensors.

    Args:
        kernel: a function with the decorator `@ct.kernel`.
        grid: blocks in each of one to three dimensions.
        args: CPU tensors and Python numbers, in the kernel's parameter order.
        order: the order of the blocks, "forward", "reverse" or "random" (the same at each call). Results must not depend on it.
        races: whether to look for races between blocks.
        read_back: whether a block may read what it wrote before, without an atomic's release in between; needs `races`. cuTile orders
            such accesses, but a number that a block had stored, gathered, added to and scattered was not the sum on an H200 (cuTile 1.7).
        signature: when given, the arguments are checked against its promises, and the kernel sees its constant sizes.

    Raises:
        InterpreterError: the kernel breaks a rule of cuTile (types, bounds, races, overflow, aliasing), an argument breaks its
            constraint, or the kernel uses something that is not implemented. The message names the kernel and the block.
    """
    name = kernel._pyfunc.__name__
    if order not in ("forward", "reverse", "random"):
        raise ValueError(f'order must be "forward", "reverse" or "random", got {order!r}')
    if any(isinstance(a, str) for a in inspect.get_annotations(kernel._pyfunc).values()):
        raise InterpreterError(
            f"kernel {name}: the annotations are strings (from __future__ import annotations?), so a ct.Constant may go unseen"
        )
    if not isinstance(grid, tuple) or not 1 <= len(grid) <= 3 or not all(1 <= n <= most for n, most in zip(grid, MAX_GRID)):
        raise InterpreterError(f"kernel {name}: the grid must be one to three sizes from 1 to those of {MAX_GRID}, got {grid}")
    x, y, z = (*grid, 1, 1)[:3]
    launch = Launch((x, y, z), races, read_back)
    try:
        values = bind(kernel, args, launch, signature)
    except InterpreterError as e:
        raise InterpreterError(f"kernel {name}: {e}") from None

    blocks: Any = builtins.range(x * y * z)
    if order == "reverse":
        blocks = reversed(blocks)
    elif order == "random":
        blocks = torch.randperm(x * y * z, generator=torch.Generator().manual_seed(0)).tolist()
    mode = Interpreter(launch)
    function = mode.on_tiles(kernel._pyfunc)
    with mode.as_current(), torch.no_grad():
        for i in blocks:
            block = (i % x, i // x % y, i // (x * y))
            launch.begin(block)
            try:
                function(*values)
            except (InterpreterError, ct.TileError) as e:
                raise InterpreterError(f"kernel {name}, block {block[: len(grid)]}: {e}") from e
            except Exception as e:
                e.add_note(f"in kernel {name}, block {block[: len(grid)]}")
                raise


# ---------------------------------------------------------------- arguments
def bind(kernel: ct.kernel, args: tuple, launch: Launch, signature: KernelSignature | None) -> list:
    """What the kernel's function is called with."""
    annotated = kernel._annotated_function
    names = list(annotated.pysig.parameters)
    if len(args) != len(names):
        raise InterpreterError(f"expected {len(names)} arguments ({', '.join(names)}), got {len(args)}")
    constraints = [None] * len(names)
    if signature is not None:
        check_signature(signature, names, args)
        constraints = signature.parameters
    flat = [element for arg in args for element in (arg if isinstance(arg, (tuple, list)) else (arg,))]
    launch.cover([element for element in flat if isinstance(element, torch.Tensor)])
    arrays: list[tuple[Array, torch.Tensor, tuple[str, ...]]] = []
    nodes = annotated.parameter_annotations
    values = [
        value_of(name, arg, node, constraint, launch, arrays)
        for name, arg, node, constraint in zip(names, args, nodes, constraints, strict=True)
    ]
    for i, (a, x, groups) in enumerate(arrays):
        for b, y, others in arrays[:i]:
            if not set(groups) & set(others) and overlap(x, y):
                a.aliases.append(b.name)
                b.aliases.append(a.name)
    return values


def value_of(name: str, arg, node, constraint, launch: Launch, arrays: list):
    if arg is None:
        raise InterpreterError(f"argument {name} is None, which a kernel does not take")
    if isinstance(arg, tuple):
        nodes = node.items if isinstance(node, HeterogeneousTupleNode) else [getattr(node, "each", node)] * len(arg)
        items = constraint.items if isinstance(constraint, TupleConstraint) else [None] * len(arg)
        return tuple(value_of(f"{name}[{i}]", x, n, c, launch, arrays) for i, (x, n, c) in enumerate(zip(arg, nodes, items, strict=True)))
    if isinstance(arg, list):
        element = constraint.element if isinstance(constraint, ListConstraint) else None
        leaf = LeafAnnotationNode(constant=False, array=node.list.element if node.list else None)
        return [value_of(f"{name}[{i}]", x, leaf, element, launch, arrays) for i, x in enumerate(arg)]
    if isinstance(node, LeafAnnotationNode) and node.constant and constraint is not None and not isinstance(constraint, ConstantConstraint):
        raise InterpreterError(f"argument {name} is a ct.Constant, but its signature has {type(constraint).__name__}")
    if node.constant or isinstance(constraint, ConstantConstraint):
        if isinstance(arg, torch.Tensor):
            raise InterpreterError(f"argument {name} is a ct.Constant and got a tensor")
        return arg
    if isinstance(arg, torch.Tensor):
        array = array_of(name, arg, node, constraint, launch)
        groups = constraint.alias_groups if isinstance(constraint, ArrayConstraint) else ()
        arrays.append((array, arg, groups))
        return array
    if isinstance(arg, bool):
        return scalar(arg, ct.bool_)
    if isinstance(arg, (int, float)):
        dtype = ct.int32 if isinstance(arg, int) else ct.float32
        if isinstance(arg, int) and node.scalar is not None:
            dtype = node.scalar.dtype
        if isinstance(constraint, ScalarConstraint):
            dtype = constraint.dtype
        try:
            return scalar(arg, dtype)
        except InterpreterError as e:
            raise InterpreterError(f"argument {name}: {e}") from None
    raise InterpreterError(f"argument {name} has type {type(arg).__name__}, which a kernel does not take")


def array_of(name: str, tensor: torch.Tensor, node: LeafAnnotationNode, constraint: ArrayConstraint | None, launch: Launch) -> Array:
    if tensor.requires_grad:
        raise InterpreterError(f"argument {name} requires grad; pass a detached tensor")
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise InterpreterError(f"argument {name} must be a strided CPU tensor, got {tensor.layout} on {tensor.device}")
    if tensor.dtype not in TILE_DTYPES:
        raise InterpreterError(f"argument {name} has dtype {tensor.dtype}, which is not implemented")
    dtype, ndim = TILE_DTYPES[tensor.dtype], tensor.ndim
    index_dtype = node.array.index_dtype if node.array is not None else ct.int32
    fixed = {"shape": set(), "strides": set()}
    if node.array is not None:
        fixed = {"shape": {d % ndim for d in node.array.static_shape_dims}, "strides": {d % ndim for d in node.array.static_stride_dims}}
    if constraint is not None:
        index_dtype = constraint.index_dtype
        fixed = {
            "shape": {d for d, n in enumerate(constraint.shape_constant) if n is not None},
            "strides": {d for d, n in enumerate(constraint.stride_constant) if n is not None},
        }
    seen = {}
    for what, values in (("shape", tensor.shape), ("strides", tensor.stride())):
        for v in values:
            if not v <= RANGES[index_dtype][1]:
                raise InterpreterError(f"argument {name} has {what} {tuple(values)}, too large for {index_dtype}")
        seen[what] = [v if d in fixed[what] else scalar(v, index_dtype) for d, v in enumerate(values)]
    memory, offset = launch.memory(tensor, dtype)
    return Array(
        memory, name, dtype, offset, tensor.shape, tensor.stride(), seen["shape"],
        seen["strides"], index_dtype,
    )  # fmt: skip


# ---------------------------------------------------------------- Python on tiles
class TileRange:
    """range() in a kernel: it counts in int32 (or int64) scalars, which are not compile-time constants."""

    def __init__(self, *bounds):
        tiles = [tile_of(b, "a bound of range()") for b in bounds]
        if any(t.ndim or t.dtype not in RANGES for t in tiles):
            raise InterpreterError(f"range() takes integer scalars, got {', '.join(t.describe() for t in tiles)}")
        self.dtype = ct.int64 if any(t.dtype is ct.int64 for t in tiles) else ct.int32
        self.bounds = bounds
        self.range = builtins.range(*(convert(t, self.dtype).value() for t in tiles))
        if self.range.step < 1:
            raise InterpreterError(f"range() needs a positive step, got {self.range.step}")

    def __iter__(self):
        for i in self.range:
            yield Tile(torch.tensor(i), self.dtype)


def static_iter(iterable):
    if isinstance(iterable, TileRange):
        if any(isinstance(b, Tile) for b in iterable.bounds):
            raise InterpreterError("static_iter() needs compile-time bounds")
        return iterable.range
    return iterable


def static_exception(exc):
    return InterpreterError(f"{type(exc).__name__}: {exc}")


def _extreme(of_tiles: Callable, of_numbers: Callable) -> Callable:
    def run(*xs, **kwargs):
        if len(xs) == 2 and any(isinstance(x, Tile) for x in xs):
            return of_tiles(*xs)
        return of_numbers(*xs, **kwargs)

    return run


def _constant(number: type) -> Callable:
    def run(x=0):
        if isinstance(x, Tile):
            raise InterpreterError(f"{number.__name__}() takes a compile-time constant; use ct.astype()")
        return number(x)

    return run


# The names that mean something else in a kernel than in Python.
BUILTINS = {
    "range": TileRange,
    "max": _extreme(arithmetic.maximum, builtins.max),
    "min": _extreme(arithmetic.minimum, builtins.min),
    "int": _constant(int),
    "float": _constant(float),
}

# `cuda.tile` as kernels see it: what may be called on the host too does not pass through the dispatch mode.
REPLACED = {ct.cdiv: arithmetic.cdiv, ct.static_iter: static_iter, ct.static_exception: static_exception}
CUDA_TILE = types.ModuleType("cuda.tile")
CUDA_TILE.__dict__.update({**ct.__dict__, **{f.__name__: new for f, new in REPLACED.items()}})


class Interpreter(DispatchMode):
    """Answers the ct.* calls of one launch."""

    def __init__(self, launch: Launch):
        self.launch = launch
        self.functions: dict[types.FunctionType, types.FunctionType] = {}

    def call_tile_function_from_host(self, func, args, kwargs):
        implementation = IMPLEMENTED.get(func.__wrapped__)
        if implementation is not None:
            return implementation(*args, **kwargs)
        if is_stub(func):
            raise InterpreterError(f"ct.{func.__qualname__} is not implemented")
        return self.on_tiles(func.__wrapped__)(*args, **kwargs)

    def on_tiles(self, function: types.FunctionType) -> types.FunctionType:
        """A copy of a function in which Python's names mean what cuTile understands by them, also in the helpers that it calls."""
        if function not in self.functions:
            names = {**BUILTINS, **function.__globals__}
            cells = tuple(types.CellType() for _ in function.__closure__ or ())
            copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
            copy.__kwdefaults__ = function.__kwdefaults__
            self.functions[function] = copy  # before it is complete: helpers may call each other
            for name in names_in(function.__code__):
                if name in function.__globals__:
                    names[name] = self.adapted(function.__globals__[name])
            for cell, original in zip(cells, function.__closure__ or (), strict=True):
                cell.cell_contents = self.adapted(original.cell_contents)
        return self.functions[function]

    def adapted(self, value):
        if value is ct:
            return CUDA_TILE
        if not isinstance(value, types.FunctionType):
            return value
        if value in REPLACED:
            return REPLACED[value]
        if is_function_wrapper(value) or is_stub(value) or (value.__module__ or "").startswith(("cuda.tile", "torch")):
            return value
        return self.on_tiles(value)


def names_in(code: types.CodeType) -> set[str]:
    """The names of globals (and attributes) in a function and in those defined inside it."""
    return set(code.co_names).union(*(names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)))
