"""Rotary position embedding of neighbouring pairs as complex numbers, Llama 4's (arXiv 2104.09864)."""

from typing import Tuple

import torch

from ..runtime.device import kernels_run_on
from ..runtime.launch import Kernel
from .common import apply_function, describe, fail, need_floats, needs_formula, new_like, once_differentiable, traceable, unit_stride
from .mrope import heads_grid, token_slabs

Pair = Tuple[torch.Tensor, torch.Tensor]

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
def _fits(q, k, table):
    return q.dtype in FORMATS and table.dtype == torch.float32 and q.shape[-1] <= WIDEST and kernels_run_on(q, k, table)


def _rotate(q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, backward: bool) -> Pair:
    """table: [batch or 1, tokens, head_dim / 2, 2] float, the parts of the complex numbers (a tracer has no complex operators)."""
    if not _fits(q, k, table):
        freqs = torch.view_as_complex(table)
        return rotary_complex_reference(q, k, freqs.conj() if backward else freqs)
    q, k = map(_pairs_aligned, (q, k))
    outs = new_like(q), new_like(k)
    if q.numel() or k.numel():
        for tensors, (angles,) in token_slabs((q, k, *outs), (table.contiguous().flatten(2),)):
            _kernels[q.dtype, int(backward)](*tensors, angles)
    return outs


rotary_complex_forward = traceable(
    "rotary_complex", _rotate, lambda q, k, table, backward: (q.new_empty(q.shape), k.new_empty(k.shape))
)


class _RotaryComplex(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, table):
        ctx.save_for_backward(table)
        return rotary_complex_forward(q, k, table, False)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk):
        return (*rotary_complex_forward(dq, dk, *ctx.saved_tensors, True), None)


def rotary_complex(q: torch.Tensor, k: torch.Tensor, freqs: torch.Tensor) -> Pair:
    """Rotates queries and keys by complex numbers, both in one launch: neighbouring columns of a head are a complex number's parts.

    q: [batch, tokens, heads, head_dim]; k: the same with its own number of heads; any strides. freqs: complex [tokens, head_dim / 2] or
    [batch or 1, tokens, head_dim / 2], a dimension of 1 behind the tokens allowed: each batch row has positions of its own. Returns new
    tensors of q's and k's shapes. bf16, fp16 and fp32 with complex64 and head_dim up to 256 run in the kernels, in float32; the rest in
    PyTorch. Differentiable in q and k, and in PyTorch also in freqs. Raises ValueError when shapes, dtypes or devices do not fit.
    """
    need_floats(q=q, k=k)
    if q.dim() != 4 or q.shape[-1] % 2:
        fail("q", describe(q), "[batch, tokens, heads, head_dim] with an even head_dim")
    if k.dim() != 4 or (*k.shape[:2], k.shape[3]) != (*q.shape[:2], q.shape[3]) or k.dtype != q.dtype or k.device != q.device:
        fail("k", describe(k), f"q's batch, tokens, head_dim, dtype and device; q is {describe(q)}")
    batch, tokens, _, width = q.shape
    found = freqs.squeeze(-2) if freqs.dim() == 4 and freqs.shape[2] == 1 else freqs
    found = found.unsqueeze(0) if found.dim() == 2 else found
    if not freqs.is_complex() or found.dim() != 3 or found.shape[0] not in (1, batch) or found.shape[1:] != (tokens, width // 2):
        fail("freqs", describe(freqs), f"complex [{batch} or 1, {tokens}, {width // 2}]")
    if freqs.device != q.device:
        fail("freqs", describe(freqs), f"on the device of q, {q.device}")
    if freqs.requires_grad or needs_formula(q, k, freqs):
        return rotary_complex_reference(q, k, found)
    return apply_function(_RotaryComplex, q, k, torch.view_as_real(found.resolve_conj()))
