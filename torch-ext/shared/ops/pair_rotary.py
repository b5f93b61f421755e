"""Launches of kernel_src/llama4_rope.py: rotary position embedding of neighbouring columns. Without autograd: what llama4_rope.py and the
decoder layer share."""

import torch

from ..runtime.device import kernels_run_on
from ..runtime.launch import Kernel
from .arrays import Pair, new_like, unit_stride
from .part_rotary import heads_grid, token_slabs

__all__ = ["rotary_complex_reference", "rotate_pairs", "takes"]

FORMATS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # FORMAT of the kernel
WIDEST = 256  # columns of the longest head that it takes


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim] -> [tokens, heads, pairs], each pair as an integer of its bits."""
    return tensor.view(torch.int64 if tensor.dtype == torch.float32 else torch.int32)


def _views(q, k, q_out, k_out, table):
    """table: [tokens, 2 * pairs], of which the kernel takes each pair as one word too."""
    return *map(_words, (q, k, q_out, k_out)), table.view(torch.int64)


_kernels = {
    (dtype, backward): Kernel("llama4_rope", grid=heads_grid, views=_views, where={"FORMAT": form, "BACKWARD": backward})
    for dtype, form in FORMATS.items()
    for backward in (0, 1)
}


def _pairs_aligned(x: torch.Tensor) -> torch.Tensor:
    """x itself, or a copy where a pair is not one word at a multiple of its size."""
    x = unit_stride(x)
    if x.data_ptr() % (2 * x.element_size()) or x.storage_offset() % 2 or any(step % 2 for step in x.stride()[:-1]):
        return x.clone(memory_format=torch.contiguous_format)
    return x


# ---------------------------------------------------------------- in PyTorch
def _turn(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    pairs = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (x.shape[-1] // 2, 2))
    # Not view_as_complex: it refuses what begins at an odd number of elements.
    return torch.view_as_real(torch.complex(*pairs.unbind(-1)) * freqs.unsqueeze(2)).flatten(3).to(x.dtype)


def rotary_complex_reference(q: torch.Tensor, k: torch.Tensor, freqs: torch.Tensor) -> Pair:
    """(q, k) rotated, in PyTorch; freqs: [batch or 1, tokens, head_dim / 2] complex."""
    return _turn(q, freqs), _turn(k, freqs)


# ---------------------------------------------------------------- with the kernels
def takes(q: torch.Tensor) -> bool:
    """Tells whether there are kernels for queries of this dtype and head_dim."""
    return q.dtype in FORMATS and q.shape[-1] <= WIDEST


def _fits(q, k, table):
    return takes(q) and table.dtype == torch.float32 and kernels_run_on(q, k, table)


def rotate_pairs(q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, backward: bool) -> Pair:
    """table: [batch or 1, tokens, head_dim / 2, 2] float, the parts of the complex numbers (a tracer has no complex operators). Kernels
    also take one of fewer pairs, and leave the others as they are."""
    if not _fits(q, k, table):
        freqs = torch.view_as_complex(table)
        # conj() only marks the tensor, and PyTorch ignores that mark inside a compiled graph without gradients.
        return rotary_complex_reference(q, k, freqs.conj_physical() if backward else freqs)
    q, k = map(_pairs_aligned, (q, k))
    outs = new_like(q), new_like(k)
    if q.numel() or k.numel():
        for tensors, (angles,) in token_slabs((q, k, *outs), (table.contiguous().flatten(2),)):
            _kernels[q.dtype, int(backward)](*tensors, angles)
    return outs
