"""LayerNorm: y = weight * (x - mean) * rstd + bias over the last dimensions (arXiv 1607.06450)."""

from typing import Dict, Optional, Sequence, Tuple

import torch

from ..runtime.device import multiprocessors
from ..runtime.graphs import is_recording
from ..runtime.launch import Kernel, ships
from ..runtime.replay import constant
from .arguments import describe, fail, need_floats
from .arrays import accumulation_dtype, aligned, column_sum_of, new_like, sum_of_rows
from .autograd import Function, apply_function, needs_formula
from .operators import halves, traceable
from .rows import SEGMENT, as_segments, groups_of_columns, kernels_take, one_block_a_row, one_block_a_sum, per_row, rows_of, slabs

__all__ = ["layer_norm", "layer_norm_backward", "layer_norm_forward", "layer_norm_reference"]

# Blocks that an SM holds in the backward pass of rows in registers, by the longest row; longer ones take the two kernels for any length
# (kernel_src/layer_norm.py).
BLOCKS_PER_SM = {
    torch.bfloat16: ((1024, 4), (2048, 3), (4096, 2), (8192, 1)),
    torch.float16: ((4096, 2),),
    torch.float32: ((2048, 2),),
}
EXACT = {torch.bfloat16: (4096,)}  # lengths of rows with kernels of their own
GROUPS_PER_SM = 8  # blocks that walk over the rows of some columns
Parameter = Optional[torch.Tensor]


_forward_kernel = Kernel("layer_norm_forward", "layer_norm_long_forward", grid=one_block_a_row, views=as_segments(4, 5))
_exact_forward_kernel = Kernel("layer_norm_exact_forward", grid=one_block_a_row)
_backward_kernel = Kernel("layer_norm_exact_backward", "layer_norm_backward", grid=one_block_a_sum)
_row_means_kernel = Kernel("layer_norm_row_means", grid=one_block_a_row, views=as_segments(3, 4, 5))
_columns_kernel = Kernel("layer_norm_columns_backward", grid=groups_of_columns, views=as_segments(4, 5, 6))


def statistics_of(x: torch.Tensor, rows: int) -> torch.Tensor:
    """A tensor for the mean and the rstd of each row of x, [2, rows], not filled. Both start at aligned addresses, as kernels need them;
    numbers between them, which nobody writes, are no part of it."""
    return per_row(x, 2, -(-rows // 4) * 4)[:, :rows]


def layer_norm_reference(x, weight, bias, eps) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean, rstd) in PyTorch, which can differentiate y."""
    xf = x.to(accumulation_dtype(x.dtype))
    mean = xf.mean(-1, keepdim=True)
    deviation = xf - mean
    rstd = torch.rsqrt(deviation.square().mean(-1, keepdim=True) + eps)
    y = deviation * rstd if weight is None else weight * (deviation * rstd)
    return (y if bias is None else y + bias).to(x.dtype), mean.flatten(), rstd.flatten()


def layer_norm_backward_reference(dy, x, weight, mean, rstd) -> Tuple[torch.Tensor, torch.Tensor]:
    """(dx, [dweight, dbias]) in PyTorch."""
    acc = accumulation_dtype(x.dtype)
    mean, rstd = (t.reshape(x.shape[:-1] + (1,)) for t in (mean, rstd))
    n, d = (x.to(acc) - mean) * rstd, dy.to(acc)
    g = d if weight is None else d * weight.to(acc)
    dx = (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True)) * rstd
    return dx.to(x.dtype), torch.stack([sum_of_rows(t) for t in (d * n, d)]).to(x.dtype if weight is None else weight.dtype)


_filled: Dict[tuple, torch.Tensor] = {}  # by the number, the length, the dtype and the device


def _read_by_kernels(parameter: Parameter, number: float, x: torch.Tensor, like: Parameter) -> torch.Tensor:
    """A weight or bias [n] as kernels read it: of a LayerNorm without it, `number` n times, of the dtype of `like` or x.

    Kernels alone read that tensor, so it is made once in a process, and waited for, as the next pass may be on another stream. While a
    CUDA graph is recorded a new one is made, which the graph fills at each replay.
    """
    n = x.shape[-1]
    if parameter is not None:
        return rows_of(parameter, n)[0]
    key = number, n, (x if like is None else like).dtype, x.device
    found = _filled.get(key)
    if found is None:
        with torch.inference_mode(False):
            found = torch.full((n,), number, dtype=key[2], device=x.device)
        if is_recording(x):
            return found
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()
        _filled[key] = constant(found)
    return found


def _forward(x: torch.Tensor, weight: Parameter, bias: Parameter, eps: float) -> Tuple[torch.Tensor, torch.Tensor]:
    """(y, statistics), the mean and the rstd of each row of x, as `statistics_of` lays them out."""
    n = x.shape[-1]
    count = x.numel() // n if n else 0
    statistics = statistics_of(x, count)
    if not _fits(x, weight, bias):
        y, *found = layer_norm_reference(x, weight, bias, eps)
        return y, statistics.copy_(torch.stack(found))
    rows, weight, bias = rows_of(x, n), _read_by_kernels(weight, 1.0, x, bias), _read_by_kernels(bias, 0.0, x, weight)
    y, (mean, rstd) = new_like(rows), statistics
    kernel = _exact_forward_kernel if weight.dtype == x.dtype and n in EXACT.get(x.dtype, ()) else _forward_kernel
    for part in slabs(rows):
        kernel(rows[part], weight, bias, y[part], mean[part], rstd[part], eps)
    return y.view(x.shape), statistics


def _forward_fake(x: torch.Tensor, weight: Parameter, bias: Parameter, eps: float) -> Tuple[torch.Tensor, torch.Tensor]:
    n = x.shape[-1]
    return x.new_empty(x.shape), statistics_of(x, x.numel() // n if n else 0)


def _fits(x: torch.Tensor, *parameters: Parameter, others: Sequence[torch.Tensor] = ()) -> bool:
    """Whether kernels take this, and the package has them: a decoder's may run without."""
    given = [each for each in parameters if each is not None]
    return kernels_take(x, *given or (x,), others=others) and ships("layer_norm")


def _backward(
    dy: torch.Tensor, x: torch.Tensor, weight: Parameter, statistics: torch.Tensor, need_parameters: bool
) -> Tuple[torch.Tensor, torch.Tensor]:
    """(dx, [dweight, dbias]); the second is empty unless it is needed. statistics: of `_forward`."""
    nothing = (x if weight is None else weight).new_empty(0)
    mean, rstd = statistics
    if not _fits(x, weight, others=(dy,)):
        dx, parameters = layer_norm_backward_reference(dy, x, weight, mean, rstd)
        return dx, parameters if need_parameters else nothing
    n = x.shape[-1]
    dy, x_rows, weight = rows_of(dy, n), rows_of(x, n), _read_by_kernels(weight, 1.0, x, None)
    mean, rstd = aligned(mean), aligned(rstd)  # whoever kept them elsewhere may have brought them closer together
    dx = new_like(x_rows)
    blocks = _blocks_per_sm(x.dtype, weight.dtype, n)
    if blocks and n % SEGMENT:  # that kernel is built for aligned rows alone
        dy, x_rows, weight = aligned(dy), aligned(x_rows), aligned(weight)
    parts = list(slabs(dy, x_rows))
    partials = []
    for part in parts:
        arguments = dx[part], dy[part], x_rows[part], weight, mean[part], rstd[part]
        count = part.stop - part.start
        if blocks:
            partial = per_row(x, min(count, blocks * multiprocessors(x)), 2, n)
            _backward_kernel(*arguments, partial)
        else:
            partial = per_row(x, min(count, max(1, GROUPS_PER_SM * multiprocessors(x) * 1024 // n)), 2, n)
            means = per_row(x, count, 2)
            _row_means_kernel(*arguments[1:], means)
            _columns_kernel(*arguments, means, partial)
        partials.append(partial)
    if not need_parameters:
        return dx.view(x.shape), nothing
    return dx.view(x.shape), column_sum_of([each.view(-1, 2 * n) for each in partials], weight.dtype).view(2, n)


def _blocks_per_sm(x_dtype, weight_dtype, length: int) -> int:
    """Number of blocks per SM of the kernel for rows in registers, 0 where none takes such rows."""
    if x_dtype != weight_dtype or length * x_dtype.itemsize % 16:
        return 0
    return next((blocks for longest, blocks in BLOCKS_PER_SM[x_dtype] if length <= longest), 0)


layer_norm_forward = traceable("layer_norm_forward", _forward, _forward_fake)
layer_norm_backward = traceable("layer_norm_backward", _backward, then=halves)


class LayerNormFunction(Function):
    def forward(ctx, x, weight, bias, eps):
        y, statistics = layer_norm_forward(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, statistics)
        return y

    def backward(ctx, dy):
        need = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        dx, dweight, dbias = layer_norm_backward(dy, *ctx.saved_tensors, need)
        return dx, dweight if ctx.needs_input_grad[1] else None, dbias if ctx.needs_input_grad[2] else None, None


def layer_norm(
    x: torch.Tensor,
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    eps: float = 1e-5,
    normalized_shape: Optional[Tuple[int, ...]] = None,
) -> torch.Tensor:
    """LayerNorm over the last dimensions, in fp32, rounded once.

    x: [..., *normalized_shape], bf16, fp16 or fp32 (float64 runs in PyTorch). weight, bias: [*normalized_shape], of x's dtype or fp32; None
    for 1 and 0. normalized_shape: by default the shape of weight or bias, or the last dimension. Returns a tensor like x. Differentiable
    in x, weight and bias. Raises ValueError when shapes, dtypes or devices do not fit.
    """
    given = [(name, p) for name, p in (("weight", weight), ("bias", bias)) if p is not None]
    shape = tuple(normalized_shape) if normalized_shape is not None else tuple(given[0][1].shape) if given else tuple(x.shape[-1:])
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        fail("x", describe(x), f"a tensor whose last dimensions are {list(shape)}")
    need_floats(x=x, **dict(given))
    for name, parameter in given:
        if tuple(parameter.shape) != shape or parameter.device != x.device:
            fail(name, describe(parameter), f"one value for each of the last dimensions {list(shape)} of x, on {x.device}")
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        fail("bias", describe(bias), f"of the dtype of weight, {weight.dtype}")
    if weight is None and bias is not None:
        weight = bias.new_ones(shape)
    if len(shape) > 1:
        weight, bias = (None if each is None else each.flatten() for each in (weight, bias))
        return layer_norm(x.flatten(-len(shape)), weight, bias, eps).view(x.shape)
    if needs_formula(x, weight, bias):
        return layer_norm_reference(x, weight, bias, float(eps))[0]
    return apply_function(LayerNormFunction, x, weight, bias, float(eps))


SELF_CHECKS = {"layer_norm": lambda i: i.call(layer_norm, *i.rows(1), i.leaf(i.hidden), i.leaf(i.hidden))}
