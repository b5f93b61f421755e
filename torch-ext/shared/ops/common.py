"""What the operations share: checks of arguments, and how a tracer sees a function."""

import functools
import itertools
import re
from numbers import Integral
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import torch

from ..._ops import add_op_namespace_prefix
from ..runtime.device import PLAIN, is_ordinary, kernels_run_on, prepare_backward, prepared
from ..runtime.launch import GRID_MAX, INT32_MAX, Kernel, overlaps
from ..runtime.replay import replayed, replayed_with_products
from .inductor import with_fallback

TORCH_MIN = (2, 6)
_any_autocasts = getattr(torch._C, "_is_any_autocast_enabled", None)  # a tenth of what a look at one device costs
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead
KEPT = 1024  # combinations of shapes and strides that an operator remembers its results' strides of
LIBRARY = "_bastile_library"  # on the namespace of this build's operators
HALF = (torch.bfloat16, torch.float16)
REACH = INT32_MAX  # elements: what a kernel counts an array's places in
SLAB = 2**30  # elements that one launch reaches over: offsets into an array are 32-bit


class _NoContext:
    """Stands in for autograd's context where no backward pass will ask for it."""

    def save_for_backward(self, *tensors) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def apply_function(function, *arguments):
    """function.apply(*arguments), of an autograd function without setup_context, on ordinary tensors (`needs_formula`).

    Those checks have passed already, so this skips torch's `apply` and calls the implementation. Where gradients are switched off it is
    the forward alone: that is half of what a small operation costs the host, and generating text is made of small operations.
    """
    if torch.compiler.is_compiling():
        return function.apply(*arguments)
    if not torch.is_grad_enabled():
        return function.forward(_NoContext(), *arguments)
    if not prepared:
        for argument in arguments:
            if type(argument) in PLAIN and argument.is_cuda:
                prepare_backward(argument.get_device())
                break
    # A tensor that outlived its transform of torch.func still has its wrapper around it, and looks like any other.
    return super(torch.autograd.Function, function).apply(*[_unwrap_if_dead(a) if type(a) in PLAIN else a for a in arguments])


def always(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that gives the tensor."""
    return lambda: tensor


def once_differentiable(backward: Callable) -> Callable:
    """Marks the backward function of an autograd function as one that has no derivative: with create_graph=True its gradients are as
    ever, and differentiating them raises RuntimeError.

    torch's decorator of that name lets them pass where the incoming gradients need no derivative, though they depend on what the forward
    pass saved too: the second derivative is then wrong without a word. This one costs nothing where no graph of the backward pass is made.
    """
    function = backward.__qualname__.split(".")[-2].strip("_").removesuffix("Function")
    message = (
        f"trying to differentiate twice: {backward.__module__.rpartition('.')[2]}.{function} has no second derivative. Leave this "
        "operation to PyTorch, or differentiate with torch.func, for which it consists of PyTorch's operations"
    ).encode()

    @functools.wraps(backward)
    def call(ctx, *grads):
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        return found if torch.compiler.is_compiling() else _not_differentiable(found, message)

    return call


def _not_differentiable(gradients, message: bytes):
    """The gradients as results of a function whose own gradient is an error."""
    one = not isinstance(gradients, tuple)
    leaves = [None if g is None else g.detach().requires_grad_() for g in ((gradients,) if one else gradients)]
    if not any(leaf is not None for leaf in leaves):
        return gradients
    return torch._C._functions.DelayedError(message, len(leaves))(*leaves)  # type: ignore[arg-type]  # takes None, too


def needs_formula(first: torch.Tensor, *others: Optional[torch.Tensor]) -> bool:
    """True when an operation must be PyTorch's own operations on these arguments, which every kind of tensor and every transform takes:
    an autograd function of ours works on ordinary tensors alone (`is_ordinary`), and where torch.compile or torch.export traces it."""
    return not (torch.compiler.is_compiling() or is_ordinary(first, *others))


def autocasts(device: torch.device) -> bool:
    """True when autocast is on for a device. torch.is_autocast_enabled raises for those without autocast, such as meta."""
    if _any_autocasts is not None and not torch.compiler.is_compiling() and not _any_autocasts():
        return False
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def numbers_in(version: str, count: int = 2) -> Tuple[int, ...]:
    """The first numbers of a version, before what a plus adds to it."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:count])


def check_torch(version: str) -> None:
    """Raises ImportError for a torch that is older than any that the package was tested with."""
    if numbers_in(version) < TORCH_MIN:
        expected = ".".join(map(str, TORCH_MIN))
        raise ImportError(f"torch is {version}, expected torch>={expected}. Run: pip install 'torch>={expected}'")


check_torch(torch.__version__)


def fail(argument: str, found, expected: str, error=ValueError):
    """Raises the error of a wrong argument."""
    raise error(f"{argument} is {found}, expected {expected}")


def describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that the arithmetic is done in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def kernels_compute(x: torch.Tensor, *others: Optional[torch.Tensor]) -> bool:
    """Whether kernels run on these tensors and have something to do: x is neither in float64 nor empty."""
    return x.dtype != torch.float64 and kernels_run_on(x, *others) and x.numel() > 0


def constant_when_traced(function: Callable) -> Callable:
    """Marks a function whose result torch.compile takes as a constant, as torch.compiler.assume_constant_result does; that one imports
    the compiler to set the mark."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def constant(number: Any) -> Any:
    """The number itself, and in a graph of torch.compile a constant of it: the graph is compiled again for another number.

    A tracer may hold a number as a symbol, all of them with dynamic=True, and those that have changed once without; a graph's text and
    lists of numbers have room for constants only. What a tracer makes of `itertools.groupby` is constant in every torch from 2.6 on.
    """
    if not torch.compiler.is_compiling():
        return number
    return [found for found, _ in itertools.groupby((number,), key=lambda each: each)][0]


def _replayed_with_lists(function: Callable) -> Callable:
    """`replayed_with_products` of a function that also takes lists of numbers, which have no signature: it gets tuples instead."""
    again = replayed_with_products(function)
    return lambda *args: again(*[tuple(arg) if type(arg) is list else arg for arg in args])


def _contiguous(function: Callable) -> Callable:
    """The function itself, which PyTorch's operations compute on tensors without data, with contiguous results."""

    def fake(*args):
        found = function(*args)
        return found.new_empty(found.shape) if isinstance(found, torch.Tensor) else tuple([each.new_empty(each.shape) for each in found])

    return fake


def traceable(
    name: str, function: Callable, fake: Optional[Callable] = None, then: Optional[Callable] = None, computes: bool = False
) -> Callable:
    """`function`, which a tracer (torch.compile, torch.export) sees as one operator.

    In eager mode it is the function itself, which replay.py runs again where it can. fake: the same function on tensors without data, where
    that needs more than the formula of PyTorch, such as the tensors' numbers, or has other strides than contiguous results. A
    tracer relies on the strides that it gives, so the operator's results get them. then: called with the results, gives what is returned
    instead, such as parts of one of them, which an operator may not return; replayed too. computes: whether the function also computes with
    PyTorch, as of `replayed_with_products`. The operator is defined without torch.library.custom_op, whose calls cost 13 us more each.
    """
    fake, expected = fake or _contiguous(function), {}  # type: ignore[var-annotated]

    def layouts(args) -> tuple:
        key = tuple([(a.dtype, a.shape, a.stride()) if isinstance(a, torch.Tensor) else tuple(a) if type(a) is list else a for a in args])
        found = expected.get(key)
        if found is None:
            results = fake(*[arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args])
            if len(expected) >= KEPT:
                expected.clear()
            results = (results,) if isinstance(results, torch.Tensor) else results
            found = expected[key] = tuple((t.shape, t.stride()) for t in results)
        return found

    again = _replayed_with_lists(function) if computes else replayed(function)

    @functools.wraps(function)
    def operator_function(*args):
        results = again(*args)
        if isinstance(results, torch.Tensor):
            return _laid_out(name, results, layouts(args)[0])
        return tuple(_laid_out(name, *each) for each in zip(results, layouts(args)))

    operator = operator_of(name, operator_function, fake)
    if then is None:
        return lambda *args: (operator if torch.compiler.is_compiling() else again)(*args)
    whole = replayed(lambda *args: then(*function(*args)))
    return lambda *args: then(*operator(*args)) if torch.compiler.is_compiling() else whole(*args)


def halves(gradient: torch.Tensor, parameters: torch.Tensor) -> tuple:
    """The gradients of two parameters that are stored side by side; None for both where there are none. For `traceable`."""
    return (gradient, *(parameters.view(2, -1) if parameters.numel() else (None, None)))


def operator_of(name: str, function: Callable, fake: Callable) -> Callable:
    """The operator of this build that calls `function` and looks like `fake`; the one that exists where this build is loaded twice."""
    namespace, _, _ = add_op_namespace_prefix(name).partition("::")
    operators = getattr(torch.ops, namespace)
    if not hasattr(operators, name):
        if not hasattr(operators, LIBRARY):
            setattr(operators, LIBRARY, torch.library.Library(namespace, "FRAGMENT"))  # its operators live as long as it does
        library = getattr(operators, LIBRARY)
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
        library.define(name + torch.library.infer_schema(function, mutates_args=()), tags=tags)
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace}::{name}", with_fallback(fake, getattr(operators, name).default), lib=library)
    return getattr(operators, name).default


def _laid_out(name: str, found: torch.Tensor, expected: tuple) -> torch.Tensor:
    """`found` with the strides of the fake result, whose shape it must have: (shape, strides)."""
    shape, strides = expected
    if found.shape != shape:
        raise RuntimeError(f"{name} gave {list(found.shape)} where its fake function gave {list(shape)}: please report this")
    if found.stride() == strides:
        return found
    return torch.empty_strided(shape, strides, dtype=found.dtype, device=found.device).copy_(found)


column_sum_kernel = Kernel("column_sum", grid=lambda c, partial, out: (-(-partial.shape[1] // c["COLS"]),))


def column_sum(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sums of the columns of contiguous fp32 partial results, in `dtype`."""
    out = partial.new_empty(partial.shape[1], dtype=dtype)
    column_sum_kernel(partial, out)
    return out


def new_like(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of the same shape, dtype and device, not filled; 1.5 us cheaper than torch.empty with these as arguments."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def flat_rows(x: torch.Tensor) -> torch.Tensor:
    """x as [rows, last dimension]; x itself where it is so: a view costs the host a node of autograd's."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def sum_of_rows(x: torch.Tensor) -> torch.Tensor:
    """Sums x [..., n] over all dimensions but the last."""
    return x if x.dim() == 1 else x.flatten(0, -2).sum(0)


def as_rows(*vectors: int) -> Callable[..., List[torch.Tensor]]:
    """Makes the `views` of a kernel on rows: each tensor as [rows, last dimension], but as they are those at the positions `vectors`."""

    def views(*tensors: torch.Tensor) -> List[torch.Tensor]:
        return [t if i in vectors or t.dim() == 2 else t.reshape(-1, t.shape[-1]) for i, t in enumerate(tensors)]

    return views


def split_rows(*arrays: torch.Tensor) -> Optional[Iterator[List[torch.Tensor]]]:
    """Cuts arrays that have a row for each block at the largest grid; those with another first dimension (weights) stay whole.

    Without rows there is no part, so nothing is launched.
    """
    rows = arrays[0].shape[0]
    if 0 < rows <= GRID_MAX[0]:
        return None
    most = GRID_MAX[0] // 64 * 64  # every part starts at an aligned address, of one number a row too
    return ([t[start : start + most] if t.shape[0] == rows else t for t in arrays] for start in range(0, rows, most))


class ElementwiseKernel(Kernel):
    """A kernel on every element of tensors of one shape and dtype.

    exact: takes rows [rows, columns] that a TILE of its variants divides; contiguous tensors are viewed as rows of one TILE. checked:
    takes any number of elements, flat. Tensors are contiguous, or aligned [rows, columns] whose columns a TILE divides. Calling it
    raises ValueError when their shapes or dtypes differ.
    """

    def __init__(self, exact: str, checked: str):
        super().__init__(exact, checked, grid=lambda c, first, *_: (-(-first.numel() // c["TILE"]),), views=self._rows, split=self._slabs)

    def tiles(self) -> tuple:
        """Lists the lengths that rows of the exact kernel are multiples of, the preferred one first."""
        return self.constants("TILE", self.names[0])

    def takes_rows_of(self, columns: int) -> bool:
        """Tells whether rows of so many elements may have a stride of their own."""
        return columns % min(self.tiles()) == 0

    def _rows(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        first = tensors[0]
        for i, tensor in enumerate(tensors):
            if tensor.shape != first.shape or tensor.dtype != first.dtype or tensor.device != first.device:
                fail(f"tensor {i} of {self.names[0]}", describe(tensor), f"like the first, which is {describe(first)}")
        if not all(tensor.is_contiguous() for tensor in tensors):
            return tensors
        aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        tile = next((tile for tile in self.tiles() if aligned and first.numel() and first.numel() % tile == 0), None)
        return [tensor.view(-1, tile) if tile else tensor.view(-1) for tensor in tensors]

    @staticmethod
    def _slabs(*arrays: torch.Tensor) -> Optional[Iterator[List[torch.Tensor]]]:
        if arrays[0].numel() == 0:
            return iter(())
        rows = max(1, SLAB // max(array.stride(0) for array in arrays))
        if arrays[0].shape[0] <= rows:
            return None
        return ([array[start : start + rows] for array in arrays] for start in range(0, arrays[0].shape[0], rows))


def within_reach(*elements: int) -> bool:
    """Whether arrays of so many elements each are within a kernel's reach; what is not goes in parts, or to PyTorch's operations."""
    return max(elements) <= REACH


BLOCK = "_bastile_block"  # on the storage of a weight that `lay_side_by_side` placed: the tensor that holds it and its neighbours


@torch.inference_mode(False)
@torch.no_grad()
def lay_side_by_side(weights: Sequence[torch.Tensor]) -> None:
    """Moves weights [rows, columns] of one number of columns, dtype and device side by side into one piece of memory.

    Each gets a storage of its own over its part, because what saves models keeps one of the tensors that share a storage. A slice of
    a storage is such a one, and keeps the whole piece alive. CUDA's allocator does not know it: `weight.record_stream` does nothing.
    """
    block = torch.cat([weight.detach() for weight in weights])
    start = 0
    for weight in weights:
        storage = block.untyped_storage()[start : start + weight.nbytes]
        setattr(storage, BLOCK, block)  # PyTorch keeps the Python object of a storage, and so the mark, as long as the storage
        start += weight.nbytes
        weight.data = block.new_empty(0).set_(storage, 0, weight.shape)  # type: ignore[call-overload]  # a storage that is a slice


def side_by_side(weights: Sequence[torch.Tensor]) -> Optional[torch.Tensor]:
    """The [all rows, columns] tensor whose rows are exactly those of these weights, in this order, where `lay_side_by_side` put them
    there and nothing has moved them since; else None, and None for a tracer, whose tensors lie nowhere.

    Neighbours by chance do not count: nothing keeps the memory of one alive as long as that of another.
    """
    if torch.compiler.is_compiling():
        return None
    block = getattr(weights[0].untyped_storage(), BLOCK, None)
    if block is None:
        return None
    start, dtype, (all_rows, columns) = block.data_ptr(), block.dtype, block.shape
    row, rows = columns * dtype.itemsize, 0
    for weight in weights:  # what lies at an address of the block, which is alive, lies in the block
        if weight.data_ptr() != start + rows * row or weight.dtype != dtype or not weight.is_contiguous() or weight.is_neg():
            return None
        more, width = weight.shape
        if width != columns:
            return None
        rows += more
    return block if rows == all_rows else None


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a contiguous copy: when its last dimension is strided, or two elements may be one (expanded, overlapping)."""
    shape, steps = tensor.shape, tensor.stride()
    if len(shape) == 2 and steps[1] == 1 and steps[0] >= shape[1]:  # rows, each after the one before: what is asked for most
        return tensor
    if tensor.is_contiguous() or (steps[-1] == 1 and not overlaps(shape, steps)):
        return tensor
    return tensor.contiguous()


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`unit_stride`, with a copy too when the address or a stride is not a multiple of 16 bytes: for kernels that exist only in
    an aligned form."""
    tensor = unit_stride(tensor)
    size, odd = tensor.element_size(), tensor.data_ptr()
    for step in tensor.stride()[:-1]:
        odd |= step * size
    return tensor.clone(memory_format=torch.contiguous_format) if odd & 15 else tensor


def checked_index(ignore_index: int) -> int:
    """Returns the ignore_index of a loss as an int.

    Raises ValueError for what is no integer, True among it, and for one beyond 32 bits, which is how a kernel gets it.
    """
    number = isinstance(ignore_index, (int, torch.SymInt, Integral)) and not isinstance(ignore_index, bool)
    if not number or abs(ignore_index) > INT32_MAX:
        fail("ignore_index", repr(ignore_index), "an integer of 32 bits")
    return int(ignore_index)


def need_floats(**tensors: torch.Tensor) -> None:
    """Raises ValueError for a tensor that is not of a floating point dtype."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            fail(name, describe(tensor), "a floating point tensor")
