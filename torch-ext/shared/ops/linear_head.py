"""A linear head whose logits are never all there: the walk over its tokens in chunks, and the products that follow the logits.

For each chunk one GEMM makes the logits in a buffer, a loss turns them into their own gradient in place, and two GEMMs carry that on to the
hidden states and the weight. What the loss is, the walk does not know. The memory of the weight's gradient, as large as the logits of
`features` tokens and empty until the first chunk is through, is the buffer of that one where it takes half of it at most.
"""

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch

from ..runtime.device import kernels_run_on, multiprocessors
from ..runtime.launch import Kernel
from ..runtime.replay import replayed
from .arguments import fail
from .arrays import SLAB, accumulation_dtype
from .products import accumulate_product, write_product, write_wide_product
from .second_run import are_watched

__all__ = [
    "ALIGNED", "LARGE_CHUNK", "HeadGradients", "add_product", "carry_to_hidden", "check_accum_dtype", "fp16_factor", "multiply",
    "plan_chunks", "scaled", "walk", "write_logits", "write_wide_logits",
]  # fmt: skip

LARGE_CHUNK = 1600 * 2**20  # bytes of a chunk's logits: 5120 tokens of Qwen3's vocabulary in bf16
SMALL_CHUNK = 600 * 2**20  # 2048 tokens
FEW_CHUNKS = 4  # whose products are added up in half precision
ALIGNED = 128  # elements: where logits begin in the memory of a gradient, and rows of it that a product of their own writes
SLICE = 8192  # classes of the weight's gradient that are copied at once where a product has to be

_scale_kernel = Kernel(
    "scale_in_place", grid=lambda c, x, factor: (min(-(-x.shape[0] // c["TILE"]), 8 * multiprocessors(x)),), reads=("factor",)
)


class HeadGradients(NamedTuple):
    """The gradients that were asked for, None for the others. factors: in fp16 the fp32 factor by which each is still to be multiplied,
    [tokens, 1] for the hidden states' and [] for the others; None in other dtypes."""

    hidden: Optional[torch.Tensor] = None
    weight: Optional[torch.Tensor] = None
    bias: Optional[torch.Tensor] = None
    factors: Tuple[Optional[torch.Tensor], ...] = (None, None, None)

    def times(self, number: Optional[torch.Tensor] = None) -> tuple:
        """(hidden, weight, bias), in place multiplied by a number and by what they are still to be multiplied by."""
        for gradient, factor in zip(self[:3], self.factors):
            by = number if factor is None else factor if number is None else factor * number
            if gradient is not None and by is not None:
                multiply(gradient, by)
        return self[:3]


class HeadChunks(NamedTuple):
    """How a linear head is walked over: the tokens of a chunk, the dtype in which the weight's gradient is added up, and the tokens that
    the first chunk may have instead, in the memory of that gradient."""

    tokens: int
    accum_dtype: torch.dtype
    first: int = 0


def plan_chunks(
    tokens: int,
    classes: int,
    dtype: torch.dtype,
    accum_dtype: Optional[torch.dtype] = None,
    weight_gradient: bool = True,
    features: int = 0,
    logits_of_token: int = 1,
) -> HeadChunks:
    """Chooses the chunks so that their logits take neither more tokens nor more classes than a bounded memory holds.

    Where nothing rounds between chunks (no gradient of the weight, or one that is added up in float32) a chunk has 2048 tokens at most and
    SMALL_CHUNK bytes of logits; 1024 tokens without a gradient of the weight, which each chunk would read and write: on an H200, 0.4 % to
    3 % more time for 8192 to 2048 tokens of Qwen3-8B's frozen head than with 2048, in half the memory. A sum in half precision rounds once
    a chunk, so there are never more than four chunks then, and a smaller one comes first (`chunk_slices`): of 2048 tokens, and of 9/32 of
    all from 7282 tokens on, up to LARGE_CHUNK bytes. With 5/16, measured on an H200 against float64, at Qwen3's vocabulary in bf16: 1.13
    times the error of one GEMM at 8192 tokens and 1.24 times at 16384; up to 2 times (four roundings) where rows hold large numbers when
    the small sums of later chunks arrive. With 9/32, a tenth less memory, the error for log-probabilities was 1.050 times one GEMM's,
    with 5/16 1.046 times. Where three and a half chunks of LARGE_CHUNK do not hold all tokens (17920 at Qwen3's vocabulary), their sum is
    float32, which rounds once, at the end, and takes 4 bytes an element of the weight. So it always is for fp16, whose sums would overflow.

    Multiples of 256 tokens fill the GEMMs' tiles.

    features: of the weight. The first chunk may have as many tokens as leave half of the gradient's memory free, 2048 at most.
    logits_of_token: how many the loss keeps, two where there is a teacher. Both of the first chunk lie in the gradient's memory then, and
    where two chunks of 1024 tokens after it are enough, these are half as large as they would be.
    """
    accum_dtype = torch.float32 if dtype == torch.float16 else accum_dtype or dtype
    bytes_of_token = max(classes, 1) * dtype.itemsize
    most = _whole_tiles(LARGE_CHUNK // bytes_of_token)
    in_gradient = min(2048, features * accum_dtype.itemsize // (2 * dtype.itemsize)) if weight_gradient else 0
    if weight_gradient and logits_of_token > 1 and most >= 1024 and tokens <= in_gradient + 2048:
        return HeadChunks(min(tokens, 1024), accum_dtype, in_gradient)
    if weight_gradient and accum_dtype.itemsize == 2:
        if tokens <= (2 * FEW_CHUNKS - 1) * most // 2:  # the first of four chunks is 5/9 of one at most: with four equal ones, 2.1 times
            step = max(2048, -(-9 * tokens // (32 * 256)) * 256)
        else:
            step, accum_dtype = tokens, torch.float32
        step = min(tokens, most, step)
    else:
        step = min(tokens, 2048 if weight_gradient else 1024, _whole_tiles(SMALL_CHUNK // (logits_of_token * bytes_of_token)))
    return HeadChunks(step, accum_dtype, min(step, in_gradient))


def check_accum_dtype(accum_dtype: Optional[torch.dtype], dtype: torch.dtype) -> None:
    """Raises ValueError where a gradient of a weight of `dtype` cannot be added up in accum_dtype."""
    if accum_dtype not in (None, dtype) and (accum_dtype != torch.float32 or dtype == torch.float64):
        fail("accum_dtype", accum_dtype, f"None, the weight's dtype {dtype}, or torch.float32")


def _whole_tiles(tokens: int) -> int:
    """Rounds down to a multiple of 512 tokens where there are so many; the result is at least 1 and at most 2^20, a grid's blocks."""
    return max(1, min(tokens // 512 * 512 or tokens, 2**20))


def chunk_slices(tokens: int, step: int, first: int = 0):
    """Slices that cover the tokens: the rest, then whole steps. A partial sum that is small has a small rounding error. first: what the
    first slice may be, where that is more than the rest: it takes some of the steps then."""
    start = stop = 0
    if tokens:
        rest = tokens - (-(-tokens // step) - 1) * step
        stop = rest + max(0, min(first, tokens) - rest) // step * step
    while start < tokens:
        yield slice(start, stop)
        start, stop = stop, stop + step


# ---------------------------------------------------------------- fp16
# What fp16 cannot hold is brought into its range by powers of two, which change no digit, found on the device from the largest number
# there is: the gradient of a chunk's logits; of the hidden states, each token's; of weight and bias, the whole. What the numbers have to
# be multiplied by again goes along with them, and meets the gradient from above (a GradScaler's loss scale) in float32, before anything
# is rounded to fp16 for good.
FP16_HIGH = 2.0**14
FP16_POWERS = 2.0**40  # beyond which float32, in which the weight's gradient waits for the next chunk, might overflow


def fp16_factor(largest: torch.Tensor) -> torch.Tensor:
    """The power of two that brings `largest`, fp32, to between half of FP16_HIGH and all of it; 1 for 0, infinity and NaN."""
    above = largest / torch.frexp(largest).mantissa  # the next power of two
    factor = (FP16_HIGH / above).clamp(1 / FP16_POWERS, FP16_POWERS)
    return torch.where(torch.isfinite(largest) & (largest > 0), factor, 1.0)


def _into_fp16(wide_gradient: torch.Tensor, largest: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """(fp16, factor), whose product is the gradient, which is written over. largest: of its absolute values."""
    factor = fp16_factor(largest)
    return wide_gradient.mul_(factor).to(torch.float16), 1 / factor


def _product_in_float32(x, y) -> torch.Tensor:
    """x @ y of fp16 matrices [tokens, classes] and [classes, features]."""
    if x.is_cuda and "dtype" in torch.ops.aten.mm.overloads():
        product = torch.ops.aten.mm.dtype(x, y, torch.float32)
        return product.clone() if are_watched() else product  # the caller writes over it
    product = torch.zeros(x.shape[0], y.shape[1], dtype=torch.float32, device=x.device)
    for start in range(0, y.shape[0], SLICE):
        part = slice(start, start + SLICE)
        accumulate_product(product, x[:, part].float(), y[part].float())
    return product


def _room_of(gradient: Optional[torch.Tensor], tokens: int, dtype: torch.dtype):
    """(where the logits [tokens, classes] of a first chunk go in the memory of the weight's gradient, which is not read before it is
    written; as much room that is still free, flat; the classes whose gradients lie in front of those logits). (None, None, 0) where it
    has no room."""
    if gradient is None or gradient.numel() == 0:
        return None, None, 0
    classes, memory = gradient.shape[0], gradient.view(-1).view(dtype)
    start = (memory.numel() - tokens * classes) // ALIGNED * ALIGNED
    in_front = start * classes // memory.numel() // ALIGNED * ALIGNED
    if start < tokens * classes or in_front == 0:
        return None, None, 0
    return memory[start : start + tokens * classes].view(tokens, classes), memory[:start], in_front


def _write_product_over(total, logits, y, in_front: int) -> None:
    """total = logits.T @ y, where the logits lie in total's memory, after the rows `in_front`: the rows that they cover wait for a
    copy of their own logits."""
    others = logits[:, in_front:].clone()
    add_product(total[:in_front], logits[:, :in_front].t(), y, True)
    add_product(total[in_front:], others.t(), y, True)


def add_product(total, x, y, first: bool) -> None:
    """total += x @ y, accumulated in total's dtype; for the first product whatever is in total is forgotten.

    x: [classes, tokens]; y: [tokens, features].
    """
    beta = 0.0 if first else 1.0
    if total.dtype == x.dtype and first:
        write_product(total, x, y)
    elif total.dtype == x.dtype:
        accumulate_product(total, x, y)
    elif x.is_cuda and "dtype_out" in torch.ops.aten.addmm.overloads():
        write_wide_product(total, x, y, total, beta=beta)
    else:  # PyTorch before 2.8, and CPUs
        y = y.to(total.dtype)
        for start in range(0, total.shape[0], SLICE):
            part = slice(start, start + SLICE)
            accumulate_product(total[part], x[part].to(total.dtype), y, beta=beta)


# ---------------------------------------------------------------- the walk
def write_logits(
    logits: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], factor: float = 1.0
) -> None:
    """logits = factor * (hidden @ weight.T + bias), in place of whatever was there; multiplied before it is rounded."""
    if factor != 1.0:
        first = (logits, 0.0) if bias is None else (bias, factor)
        write_product(logits, hidden, weight.t(), first[0], beta=first[1], alpha=factor)
    else:
        write_product(logits, hidden, weight.t(), bias)


def write_wide_logits(logits: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> None:
    """Writes them in float32, not rounded to hidden's dtype. Autocast, which would round them, does not see products that have an `out`."""
    if hidden.dtype == logits.dtype:
        return write_logits(logits, hidden, weight, bias)
    if hidden.is_cuda and "dtype_out" in torch.ops.aten.mm.overloads():
        write_wide_product(logits, hidden, weight.t())
    else:
        for start in range(0, weight.shape[0], SLICE):
            part = slice(start, start + SLICE)
            write_product(logits[:, part], hidden.to(logits.dtype), weight[part].to(logits.dtype).t())
    if bias is not None:
        logits.add_(bias)


def carry_to_hidden(gradient, weight, factor: Any, out, out_factor: Optional[torch.Tensor]) -> None:
    """out = gradient @ weight, of a chunk's logits: one GEMM over the whole vocabulary, which adds up in float32 and rounds once. In fp16
    the gradient was multiplied by factor, and out_factor [chunk, 1] gets what out is still to be multiplied by."""
    if out_factor is None:
        write_product(out, gradient, weight)
    else:
        product = _product_in_float32(gradient, weight)
        out[:], out_factor[:] = _into_fp16(product, product.abs().amax(1, keepdim=True))
        out_factor /= factor


def walk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    loss_of: Callable,
    results: Sequence[Optional[torch.Tensor]],
    scale: Optional[torch.Tensor],
    needs: Tuple[bool, bool, bool],
    accum_dtype: Optional[torch.dtype] = None,
    logits_of_token: int = 1,
    parameter_dtype: Optional[torch.dtype] = None,
    wide: bool = False,
    factor: float = 1.0,
    logits_kept: Optional[List[torch.Tensor]] = None,
    gradient_kept: Optional[List[torch.Tensor]] = None,
) -> HeadGradients:
    """Writes the results of a loss for every token, and returns the gradients of sum(loss * scale) that `needs` asks for.

    hidden: [tokens, features]; weight: [classes, features]; bias: [classes] or None. loss_of: called with the logits of a chunk
    [chunk, classes], the slice of its tokens, and room for as many numbers of their dtype as they are, flat, or None, returns what has
    rows(), a tuple of [chunk] or None for each of `results`, [tokens] or None; and gradient(scale), which writes over the logits and
    returns the power of two that they were multiplied by in fp16, else None. The room is its own until gradient() has returned. scale: [1]
    or [tokens], fp32. needs: whether the gradients of hidden, weight and bias are wanted. accum_dtype, logits_of_token: as of
    `plan_chunks`. parameter_dtype: torch.float32 for gradients of weight and bias that are not rounded to their dtype, as they are by
    default. wide: the logits that loss_of gets, and whose gradient it writes over them, are float32 (float64), without a rounding. factor:
    what they are multiplied by otherwise, of which the gradient that is written over them takes account. logits_kept: a list. Where it is
    empty, each chunk's logits stay in it, in memory of their own; otherwise they are taken from it instead of made. scale is None in the
    first walk, which makes no gradients but has the chunks of the second. gradient_kept: a list, which gets the gradient of the logits; all
    tokens are one chunk then.
    """
    tokens, classes = hidden.shape[0], weight.shape[0]
    acc = accumulation_dtype(hidden.dtype)
    step, accum_dtype, first = plan_chunks(tokens, classes, hidden.dtype, accum_dtype, needs[1], weight.shape[1], logits_of_token)
    first = 0 if wide else first
    if gradient_kept is not None:
        step = max(tokens, 1)
    if scale is None:
        needs = False, False, False
    dhidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if needs[0] else None
    dweight = torch.empty(weight.shape, dtype=accum_dtype, device=hidden.device) if needs[1] else None
    dbias = torch.zeros(classes, dtype=acc, device=hidden.device) if needs[2] else None
    fp16 = hidden.dtype == torch.float16
    hidden_factor = torch.ones((tokens, 1), dtype=acc, device=hidden.device) if fp16 else None
    unit: Any = None  # of fp16: what the weight's gradient is multiplied by so far
    buffer = logits = piece = room = None
    made = iter(logits_kept or ())
    for rows in chunk_slices(tokens, step, first):
        piece = None  # of the chunk before: what it holds is as large as what the next one makes
        part = hidden[rows]
        logits, room, in_front = next(made, None), None, 0
        is_made = logits is not None
        if logits_kept is not None and not is_made:
            logits = torch.empty((part.shape[0], classes), dtype=hidden.dtype, device=hidden.device)
            logits_kept.append(logits)
        elif not is_made and rows.start == 0 and (rows.stop > step or rows.stop == tokens <= first):  # else it saves no memory
            logits, room, in_front = _room_of(dweight, rows.stop, hidden.dtype)
        if logits is None:
            if buffer is None or buffer.shape[0] < part.shape[0]:
                buffer = torch.empty((max(step, part.shape[0]), classes), dtype=acc if wide else hidden.dtype, device=hidden.device)
            logits = buffer[: part.shape[0]]
        if wide:
            write_wide_logits(logits, part, weight, bias)
        elif not is_made:
            write_logits(logits, part, weight, bias, factor)
        piece = loss_of(logits, rows, room)
        for whole, mine in zip(results, piece.rows()):
            if whole is not None:
                whole[rows] = mine
        if scale is None or not any(needs):
            continue
        power = piece.gradient(scale if scale.numel() == 1 else scale[rows])
        logits = logits.to(hidden.dtype)
        if gradient_kept is not None:
            gradient_kept.append(logits)
        if dhidden is not None:
            carry_to_hidden(logits, weight, power, dhidden[rows], None if hidden_factor is None else hidden_factor[rows])
        if dbias is not None:
            dbias.add_(logits.sum(0, dtype=acc) if power is None else logits.sum(0, dtype=acc) / power)
        if dweight is not None:
            if unit is not None:
                multiply(dweight, power / unit)
            unit = power
            if in_front:
                _write_product_over(dweight, logits, part, in_front)
            else:
                add_product(dweight, logits.t(), part, rows.start == 0)
    del buffer, logits, piece, room  # before the gradients are copied into their dtype
    if dweight is not None and tokens == 0:
        dweight.zero_()
    kept = parameter_dtype == torch.float32
    if dweight is not None and not (fp16 and tokens):
        dweight = dweight.to(parameter_dtype or weight.dtype)
    if dbias is not None and bias is not None and not (fp16 and tokens):
        dbias = dbias.to(parameter_dtype or bias.dtype)
    if not fp16 or tokens == 0:
        return HeadGradients(dhidden, dweight, dbias)
    weight_factor = bias_factor = None
    if dweight is not None and kept:
        dweight.div_(unit)
    elif dweight is not None:
        dweight, weight_factor = _into_fp16(dweight, torch.linalg.vector_norm(dweight, float("inf")))
        weight_factor = weight_factor / unit
    if dbias is not None and not kept:
        dbias, bias_factor = _into_fp16(dbias, dbias.abs().amax())
    return HeadGradients(dhidden, dweight, dbias, (hidden_factor, weight_factor, bias_factor))


@replayed
def multiply(gradient: torch.Tensor, factor: torch.Tensor) -> tuple:
    """gradient *= factor, in place; one factor of 1 for all costs nothing. factor: of one element, or one a row. Returns nothing."""
    if gradient.numel() == 0:
        return ()
    if factor.numel() > 1:
        gradient.mul_(factor)
    elif gradient.dtype != torch.float64 and gradient.is_contiguous() and kernels_run_on(gradient, factor):
        flat, factor = gradient.view(-1), factor.to(torch.float32).view(1)
        for start in range(0, flat.shape[0], SLAB):
            _scale_kernel(flat[start : start + SLAB], factor)
    else:
        gradient.mul_(factor.view(1))  # of one dimension, not rounded to the gradient's dtype
    return ()


def scaled(gradient, factor, number):
    """gradient * factor * number, rounded once, in a tensor of its own; factor: of one element or one a row, empty for none; number: [] or
    None."""
    by = number if factor.numel() == 0 else factor if number is None else factor * number
    if by is None:
        return gradient
    return (gradient * (by if by.dim() else by.view(1))).to(gradient.dtype)  # what has no dimension would be rounded first
