"""Weights of experts that are kept in four bits: MXFP4 as OpenAI released GPT-OSS, and how grouped GEMMs take any of them.

MXFP4 (OCP Microscaling Formats 1.0) has blocks of 32 numbers of a row, each a code of e2m1 times the block's power of two:

    number = (0, 0.5, 1, 1.5, 2, 3, 4 or 6, with a sign) * 2^(scale - 127)

bf16 and float32 hold each of these exactly.
"""

import functools
from typing import Callable, NamedTuple, Tuple, Union

import torch

from ..runtime.device import PLAIN, kernels_run_on
from ..runtime.launch import Kernel, ships
from .arrays import within_reach

__all__ = ["BLOCK", "WHOLE", "CodedExperts", "Weight", "blocks_of", "dense", "dense_of_blocks"]

BLOCK = 32  # numbers of a scale
PAIRS = BLOCK // 2  # bytes of a block: the first number of two is in the lower four bits
SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1's codes
LEAST = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # halfway between them; a size there goes to the even code
UP = tuple(i for i in range(len(LEAST)) if i % 2)  # those that go to the larger one of two
TO_NEXT, TOP = 0x3FFFFF, 2  # added to bits of float32, it carries into the exponent what is more than 1.5 * 2^k; 6 is 1.5 * 2^2
SLAB = 2**18  # blocks that are taken apart at once, whose temporary tensor has 16 MiB
WIDER = {2: torch.int32, 4: torch.int64, 8: torch.complex128}  # two numbers of so many bytes as one


def _words(codes, scales, out):
    """Bytes of codes and of scales as the kernel takes them, four at once, where they lie so."""
    whole = not (scales.shape[0] % 4 or scales.storage_offset() % 4 or codes.storage_offset() % 4)
    return (codes.view(torch.int32), scales.view(torch.int32), out) if whole else (codes, scales, out)


_decode = Kernel("decode_mxfp4", grid=lambda c, codes, scales, out: (-(-out.shape[0] // c["TILE"]),), views=_words)
WHOLE = slice(None)


class CodedExperts(NamedTuple):
    """A frozen weight [experts, rows, columns] that is kept in fewer bits. It stands for the weight in grouped GEMMs, each of which makes
    it for itself and frees it: nothing of its size is kept or saved.

    make: gives the weight, in its dtype and on its device: of its rows (1) or columns (2) a part, from and to multiples of BLOCK. in_parts:
    whether all parts together take no longer than the whole.
    """

    make: Callable[[int, slice], torch.Tensor]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    in_parts: bool = False

    def transpose(self, *dims: int) -> "CodedExperts":
        """The weight the other way; dims: 1 and 2."""
        experts, rows, columns = self.shape
        shape = torch.Size((experts, columns, rows))
        return self._replace(make=lambda dim, part: self.make(3 - dim, part).transpose(*dims), shape=shape)

    def dim(self) -> int:
        return len(self.shape)


Weight = Union[torch.Tensor, CodedExperts]


def dense(weight: Weight) -> torch.Tensor:
    """The tensor that a grouped GEMM multiplies by, of a tensor or of `CodedExperts`."""
    return weight.make(2, WHOLE) if isinstance(weight, CodedExperts) else weight


@functools.lru_cache(maxsize=None)
def _table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[2^16]: by scale * 256 + byte, the two numbers of a byte as one of twice the size. A scale of 255 is NaN."""
    sizes, byte, scale = torch.tensor(SIZES, dtype=torch.float64), torch.arange(256), torch.arange(256)
    codes = torch.cat((sizes, -sizes))
    power = torch.ldexp(torch.ones(256, dtype=torch.float64), scale - 127).where(scale < 255, torch.nan)
    pairs = power[:, None, None] * torch.stack((codes[byte & 15], codes[byte >> 4]), -1)
    return pairs.to(dtype).view(WIDER[dtype.itemsize]).flatten().to(device)


def _chosen(blocks: torch.Size, dim: int, part: slice) -> Tuple[int, int, int]:
    """(the first block, how many of how many blocks) of a part of the rows (1) or numbers (2) that blocks [..., rows, n] hold."""
    if dim == 2:
        start, stop, _ = part.indices(BLOCK * blocks[-1])
        return start // BLOCK, (stop - start) // BLOCK, blocks[-1]
    start, stop, _ = part.indices(blocks[-2])
    return start * blocks[-1], (stop - start) * blocks[-1], blocks[-2] * blocks[-1]


def _has_kernel(codes: torch.Tensor, scales: torch.Tensor, pairs: torch.Tensor, *chosen: int) -> bool:
    if torch.compiler.is_compiling() or not (kernels_run_on(codes, scales) and ships("four_bits")):
        return False
    return within_reach(PAIRS * scales.numel()) and _decode.takes(codes, scales, pairs, *chosen)


def dense_of_blocks(
    blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, dim: int = 2, part: slice = WHOLE
) -> torch.Tensor:
    """The numbers [..., rows, 32 * n] of codes in blocks, exact in bf16 and float32. blocks: [..., rows, n, 16] uint8; scales:
    [..., rows, n] uint8. part: of the rows (dim 1) or of a row's numbers (2), from and to multiples of 32. Beside the result there is
    never more than what SLAB says."""
    first, width, step = _chosen(scales.shape, dim, part)
    shape = (*scales.shape[:-1], BLOCK * width) if dim == 2 else (*scales.shape[:-2], width // scales.shape[-1], BLOCK * scales.shape[-1])
    out = torch.empty(shape, dtype=dtype, device=blocks.device)
    if out.is_meta:
        return out
    codes, scales, pairs = blocks.reshape(-1, PAIRS), scales.reshape(-1), out.view(WIDER[dtype.itemsize]).view(-1, PAIRS)
    if dtype == torch.bfloat16 and _has_kernel(codes, scales, pairs, first, width, step):
        _decode(codes, scales, pairs, first, width, step)
        return out
    if width < step:
        codes, scales = (each.unflatten(0, (-1, step))[:, first : first + width].flatten(0, 1) for each in (codes, scales))
    table_of = _table if type(blocks) in PLAIN else _table.__wrapped__  # a tracer's tensors are not to be kept
    table = table_of(dtype, blocks.device)
    for start in range(0, pairs.shape[0], SLAB):
        place = slice(start, start + SLAB)
        index = (scales[place].int()[:, None] << 8) | codes[place]
        torch.index_select(table, 0, index.flatten(), out=pairs[place].view(-1))
    return out


def blocks_of(weight: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """(blocks [experts, rows, n, 16], scales [experts, rows, n]) uint8 of finite numbers [experts, rows, 32 * n], each rounded to the
    nearest that its block has. The scale is the least one by which the block's largest number is at most 6, and rounds no number that
    came from such blocks."""
    shape = (*weight.shape[:-1], weight.shape[-1] // BLOCK)
    blocks = torch.empty((*shape, PAIRS), dtype=torch.uint8, device=weight.device)
    scales = torch.empty(shape, dtype=torch.uint8, device=weight.device)
    if weight.is_meta:
        return blocks, scales
    bounds = torch.tensor(LEAST, device=weight.device)
    bounds[list(UP)] = torch.nextafter(bounds[list(UP)], torch.zeros((), device=weight.device))
    for expert in range(weight.shape[0]):  # so that what is made in float32 is no larger than one of them
        grouped = weight[expert].unflatten(-1, (-1, BLOCK)).float()
        scale = (((grouped.abs().amax(-1).view(torch.int32) + TO_NEXT) >> 23) - TOP).clamp_(min=0)
        sizes = grouped.abs() * ((254 - scale) << 23).view(torch.float32)[..., None]  # times 2^(127 - scale)
        codes = torch.bucketize(sizes.contiguous(), bounds, out_int32=True).to(torch.uint8) | (grouped.signbit().to(torch.uint8) << 3)
        blocks[expert], scales[expert] = codes[..., ::2] | (codes[..., 1::2] << 4), scale
    return blocks, scales


def _numbers(weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """For `--check`: a weight [rows, 32 * n] in codes and back, multiplied by [32 * n] factors, so that something is rounded."""
    return dense_of_blocks(*blocks_of(weight[None]), weight.dtype)[0] * factors


SELF_CHECKS = {"MXFP4": lambda i: _numbers(i.constant(i.tokens, i.hidden), i.constant(i.hidden))}
