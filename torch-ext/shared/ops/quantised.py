"""Operands of products in eight bits, by the kernels of kernel_src/quantise.py: e4m3 codes with scales that are powers of two."""

from typing import List, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from ..runtime.device import kernels_run_on
from ..runtime.launch import Kernel
from .arrays import accumulation_dtype, aligned
from .rows import one_block_a_row
from .swiglu import backward_in_place, swiglu_forward

__all__ = [
    "E4M3", "STEP", "Operand", "Quantised", "dense_of", "quantise_rows", "quantise_together", "quantise_transposed",
    "swiglu_backward_quantised", "swiglu_quantised",
]  # fmt: skip

E4M3 = torch.float8_e4m3fn
TOP = 448.0  # the largest number that it holds
STEP = 16  # what the products want lengths to be multiples of
# Of float32 as bits: inf, 2^-126, what carries a mantissa beyond TOP's into the exponent, and 2^8, TOP's power of two, in the exponent.
INFINITY, LEAST, TO_NEXT, EIGHT = 0x7F800000, 0x00800000, 0x1FFFFF, 8 << 23


class Quantised(NamedTuple):
    """A matrix as codes * scales[:, None]. codes: [rows, columns] of e4m3; scales: [rows] fp32."""

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> "Quantised":
        codes = torch.empty((rows, columns), dtype=E4M3, device=device)
        return cls(codes, torch.empty((rows,), dtype=torch.float32, device=device))

    def rows(self, start: int, stop: int) -> "Quantised":
        return Quantised(self.codes[start:stop], self.scales[start:stop])


Operand = Union[torch.Tensor, Quantised]  # [rows, columns] in bf16, or in codes


def _blocks(c, x, *_):
    return (-(-x.shape[0] // c["ROWS"]) * -(-x.shape[1] // c["TILE"]),)


def _words(*tensors):
    """Four codes of a column as one number, where they lie so."""
    *others, codes, scales = tensors
    whole = not (codes.shape[1] % 4 or codes.stride(0) % 4 or codes.storage_offset() % 4)
    return *others, codes.view(torch.int32) if whole else codes, scales


_rows = Kernel("quantise_rows", grid=one_block_a_row)
_transposed = Kernel("quantise_transposed", grid=_blocks, views=_words)
_recoded = Kernel("recode_transposed", grid=_blocks, views=_words)
_swiglu = Kernel("swiglu_quantised", grid=one_block_a_row)
_swiglu_kept = Kernel("swiglu_quantised_kept", grid=one_block_a_row)
_swiglu_backward = Kernel("swiglu_backward_quantised", grid=one_block_a_row)
_swiglu_backward_kept = Kernel("swiglu_backward_quantised_kept", grid=one_block_a_row)


def quantise_rows(x: torch.Tensor, out: Optional[Quantised] = None) -> Quantised:
    """x [rows, columns] with a scale a row, in `out` where it is given.

    The scale is the least power of two by which all of the row's numbers get within e4m3's, and 2^-126 at the least. NaN stays NaN and does
    not count. A row with an infinity has the scale inf, codes of NaN for infinities and 0 for the rest: a product with it is NaN.
    """
    found = Quantised.empty(x.shape[0], x.shape[1], x.device) if out is None else out
    if kernels_run_on(x):
        source = aligned(x)
        if _rows.takes(source, *found):
            _rows(source, *found)
            return found
    wide = x.to(accumulation_dtype(x.dtype))
    scales = _scale_of(wide.abs().where(~wide.isnan(), 0).amax(1).float())
    found.scales.copy_(scales)
    found.codes.copy_(_coded(wide, scales[:, None]))
    return found


def quantise_transposed(x: Operand, scale: torch.Tensor, out: Optional[Quantised] = None) -> Quantised:
    """x [rows, columns] transposed, all of it with one scale, in `out` where it is given: codes [columns, rows up to a multiple of STEP],
    zeros behind the rows.

    scale: [1] fp32, not below that of any row of x, which `quantise_rows` gives. With inf, infinities are NaN, and the rest is 0; of codes
    the whole row is NaN, as what they stand for is.
    """
    source = x if isinstance(x, Quantised) else (x,)
    rows, columns = source[0].shape
    found = Quantised.empty(columns, -(-rows // STEP) * STEP, scale.device) if out is None else out
    if kernels_run_on(*source, scale):
        kernel, source = (_recoded, source) if len(source) > 1 else (_transposed, (aligned(source[0]),))
        if kernel.takes(*source, scale, *found):
            kernel(*source, scale, *found)
            return found
    numbers = restored(x) if isinstance(x, Quantised) else x.to(accumulation_dtype(x.dtype))
    found.scales.copy_(scale.expand(columns))
    found.codes[:, :rows].copy_(_coded(numbers, scale).t())
    found.codes[:, rows:].copy_(torch.zeros((), dtype=E4M3, device=scale.device))
    return found


def swiglu_quantised(gate: torch.Tensor, up: torch.Tensor, keep: bool = False) -> Tuple[Quantised, Optional[torch.Tensor]]:
    """`quantise_rows` of silu(gate) * up, [rows, columns] each, bit for bit, and with `keep` what it is of, else None."""
    found = Quantised.empty(gate.shape[0], gate.shape[1], gate.device)
    if kernels_run_on(gate, up):
        gate, up = aligned(gate), aligned(up)
        kernel, kept = (_swiglu_kept, [torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)]) if keep else (_swiglu, [])
        if kernel.takes(gate, up, *kept, *found):
            kernel(gate, up, *kept, *found)
            return found, kept[0] if keep else None
        kept.clear()
    hidden = swiglu_forward(gate, up)
    return quantise_rows(hidden, found), hidden if keep else None


def swiglu_backward_quantised(
    dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, keep: bool = False
) -> Tuple[Quantised, Optional[torch.Tensor]]:
    """`quantise_rows` of the [dgate | dup] of `backward_in_place`, bit for bit, and with `keep` what it is of, else None. silu(gate) * up
    goes over dout."""
    if kernels_run_on(dout, gate, up):
        gate, up = aligned(gate), aligned(up)
        rows, columns = gate.shape
        found = Quantised.empty(rows, 2 * columns, gate.device)
        kernel, kept = _swiglu_backward, []
        if keep:
            kernel, kept = _swiglu_backward_kept, [torch.empty((rows, 2 * columns), dtype=gate.dtype, device=gate.device)]
        if kernel.takes(dout, gate, up, *kept, *found):
            kernel(dout, gate, up, *kept, *found)
            return found, kept[0] if keep else None
        kept.clear()
    both = backward_in_place(dout, gate, up)[0]
    return quantise_rows(both), both if keep else None


def _scale_of(largest: torch.Tensor) -> torch.Tensor:
    """The scales of rows whose largest sizes are these, fp32."""
    up = (largest.view(torch.int32) + TO_NEXT) & INFINITY
    return torch.where(up == INFINITY, INFINITY, (up - EIGHT).clamp(min=LEAST)).int().view(torch.float32)


def _coded(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The clamp is for what an infinite scale has not made 0: NaN passes it."""
    return (x * scales.reciprocal()).clamp(-TOP, TOP).to(E4M3)


def quantise_together(tensors: Sequence[torch.Tensor]) -> Tuple[List[torch.Tensor], torch.Tensor]:
    """(codes of each tensor, of e4m3; the scale [1] fp32 of them all, which is the one that the largest row of `quantise_rows` has)."""
    largest = torch.stack([tensor.abs().amax().float() for tensor in tensors])
    scale = _scale_of(largest.amax(0, keepdim=True))
    return [_coded(tensor.to(accumulation_dtype(tensor.dtype)), scale) for tensor in tensors], scale


def dense_of(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that codes with one scale stand for, exact in bf16. codes: of e4m3, or its bytes; scale: [1] fp32."""
    return codes.view(E4M3).to(dtype).mul_(scale)


def restored(quantised: Quantised) -> torch.Tensor:
    """The numbers that codes stand for, in float32."""
    return quantised.codes.float() * quantised.scales[:, None]


def _restored(x: torch.Tensor, factors: torch.Tensor) -> tuple:
    """For `--check`: the forms of a matrix [rows, columns], multiplied by [columns] factors, so that something is rounded."""
    found = quantise_rows(x)
    scale = found.scales.amax(0, keepdim=True)
    transposed = [restored(quantise_transposed(each, scale))[:, : x.shape[0]].t() for each in (x, found)]
    return tuple(each * factors for each in (restored(found), *transposed))


def _restored_swiglu(gate: torch.Tensor, up: torch.Tensor, dout: torch.Tensor) -> tuple:
    """For `--check`: SwiGLU and its gradients. In fp16, of which no products are in eight bits, it would compare where fp16 rounds."""
    gate, up, dout = [x.float() if x.dtype == torch.float16 else x for x in (gate, up, dout)]
    alone = restored(swiglu_quantised(gate, up)[0]), restored(swiglu_backward_quantised(dout.clone(), gate, up)[0])
    kept = [each for found in (swiglu_quantised(gate, up, True), swiglu_backward_quantised(dout, gate, up, True)) for each in found]
    return (*alone, *[restored(each) if isinstance(each, Quantised) else each for each in kept])


SELF_CHECKS = {
    "quantise": lambda i: _restored(i.constant(i.tokens, i.hidden), i.constant(i.hidden)),
    "quantise, long rows": lambda i: _restored(i.constant(i.tokens, 1536), i.constant(1536)),
    "quantise, SwiGLU": lambda i: _restored_swiglu(*(i.constant(i.tokens, 3072) for _ in range(3))),
    "quantise, any rows": lambda i: _restored(i.constant(i.tokens, 80), i.constant(80)),
}
