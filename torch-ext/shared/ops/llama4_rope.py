"""Rotary position embedding of neighbouring pairs as complex numbers, Llama 4's (arXiv 2104.09864)."""

import torch

from .arguments import describe, fail, need_floats
from .arrays import Pair
from .autograd import Function, apply_function, needs_formula
from .operators import traceable
from .pair_rotary import rotary_complex_reference, rotate_pairs

__all__ = ["rotary_complex"]

rotary_complex_forward = traceable("rotary_complex", rotate_pairs)


class _RotaryComplex(Function):
    def forward(ctx, q, k, table):
        ctx.save_for_backward(table)
        return rotary_complex_forward(q, k, table, False)

    def backward(ctx, dq, dk):
        return (*rotary_complex_forward(dq, dk, *ctx.saved_tensors, True), None)


def rotary_complex(q: torch.Tensor, k: torch.Tensor, freqs: torch.Tensor) -> Pair:
    """Rotates queries and keys by complex numbers, both in one launch: neighbouring columns of a head are a complex number's parts.

    q: [batch, tokens, heads, head_dim]; k: the same with its own number of heads; any strides. freqs: complex [tokens, head_dim / 2] or
    [batch or 1, tokens, head_dim / 2], a dimension of 1 after the tokens allowed: each batch row has positions of its own. Returns new
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


SELF_CHECKS = {"rotary_complex": lambda i: i.call(rotary_complex, *i.heads(8, 2, last=True), i.turns(i.tokens, i.width // 2))}
