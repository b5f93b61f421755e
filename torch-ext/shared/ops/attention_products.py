"""Attention for heads that no kernel takes, and flash attention neither: matrix products of PyTorch over a few queries at a time, with
their probabilities in memory. At 512 numbers a head a score costs so many multiplications that storing it costs less than making it again.

Causal alone. Nothing waits for the device: that no query sees a key after it says which keys a product needs.
"""

from typing import Iterator, NamedTuple, Optional

import torch

from .arguments import fail
from .arrays import accumulation_dtype
from .attention import attention_reference
from .attention_plan import AttentionPlan
from .autocast import outside_autocast
from .autograd import Function, apply_function, needs_formula

__all__ = ["Reach", "attention_by_products", "wants_products"]

SCORES = 1 << 26  # of all heads that are in memory at once, in fp32
ROWS = 64, 1024  # queries of a product: the fewest, however long a row is, and the most
LONGEST = 256  # numbers of a head that flash attention takes


class Reach(NamedTuple):
    """Which keys products need, beside what a plan says. rows: of the batch, all of one length, none of whose queries sees another row;
    plain: whether each row is one document without padding; window: of the plan."""

    rows: int
    plain: bool = False
    window: Optional[int] = None


class _Piece(NamedTuple):
    """queries, keys: of the batch's tokens; hidden: [queries, the last of the keys] bool, what queries do not see; seeing: [queries, 1, 1],
    whether a query sees any key; None where all do."""

    queries: slice
    keys: slice
    hidden: torch.Tensor
    seeing: Optional[torch.Tensor]


def _pieces(limits: torch.Tensor, q: torch.Tensor, reach: Reach) -> Iterator[_Piece]:
    tokens = q.shape[0]
    length = tokens // reach.rows
    span = length if reach.window is None else min(length, reach.window + ROWS[1])
    some = max(ROWS[0], min(ROWS[1], SCORES // (q.shape[1] * span)))
    for start in (row + first for row in range(0, tokens, length) for first in range(0, length, some)):
        row = start - start % length
        end = min(start + some, row + length)
        low = row if reach.window is None else max(row, start - reach.window + 1)
        masked = start if reach.plain and reach.window is None else low  # before it, all is seen
        t = torch.arange(masked, end, device=limits.device)
        first, behind = limits[0, start:end, None], limits[1, start:end, None]
        seeing = None if reach.plain else (first < behind)[..., None]
        yield _Piece(slice(start, end), slice(low, end), (t < first) | (t >= behind), seeing)


_KNOWS_DTYPES = "out_dtype" in (torch.bmm.__doc__ or "")


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b of [heads, m, k] and [heads, k, n], as it was summed up: not rounded to the dtype of a."""
    wide = accumulation_dtype(a.dtype)
    if a.is_cuda and a.dtype != wide and _KNOWS_DTYPES:
        return torch.bmm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[queries, heads, head_dim] as [kv_heads, group * queries, head_dim], contiguous."""
    return x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).reshape(kv_heads, -1, x.shape[2])


def _apart(x: torch.Tensor, queries: int) -> torch.Tensor:
    """What `_grouped` makes of [queries, heads, head_dim], as that."""
    return x.unflatten(1, (-1, queries)).permute(2, 0, 1, 3).flatten(1, 2)


def _probabilities(q: torch.Tensor, k: torch.Tensor, piece: _Piece, scale: float) -> torch.Tensor:
    """[kv_heads, group * queries, keys]; those of a query that sees nothing are not used. q: of `_grouped`; k: [kv_heads, keys,
    head_dim]."""
    scores = _product(q, k.mT)
    if scale != 1:
        scores *= scale
    queries, keys = piece.hidden.shape
    last = scores.unflatten(1, (-1, queries))[..., scores.shape[2] - keys :]
    last.masked_fill_(piece.hidden, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, -1)


class _Products(Function):
    def forward(ctx, q, k, v, limits, reach, scale):
        out, (keys, values) = torch.empty_like(q, memory_format=torch.contiguous_format), (x.transpose(0, 1) for x in (k, v))
        for piece in _pieces(limits, q, reach):
            of, at = piece.queries, piece.keys
            p = _probabilities(_grouped(q[of], k.shape[1]), keys[:, at], piece, scale).to(q.dtype)
            found = _apart(p @ values[:, at], of.stop - of.start)
            out[of] = found if piece.seeing is None else found.where(piece.seeing, 0)
        ctx.save_for_backward(q, k, v, limits)
        ctx.reach, ctx.scale = reach, scale
        return out

    @outside_autocast
    def backward(ctx, dout):
        q, k, v, limits = ctx.saved_tensors
        heads, wide = k.shape[1], accumulation_dtype(q.dtype)
        keys, values, dq = k.transpose(0, 1), v.transpose(0, 1), torch.empty_like(q, memory_format=torch.contiguous_format)
        dk, dv = (torch.zeros(keys.shape, dtype=wide, device=k.device) for _ in range(2))
        for piece in _pieces(limits, q, ctx.reach):
            of, at = piece.queries, piece.keys
            queries, gradient = _grouped(q[of], heads), dout[of]
            gradient = _grouped(gradient if piece.seeing is None else gradient.where(piece.seeing, 0), heads)
            p = _probabilities(queries, keys[:, at], piece, ctx.scale)
            ds = torch._softmax_backward_data(_product(gradient, values[:, at].mT), p, -1, wide)
            ds, p = (ds if ctx.scale == 1 else ds.mul_(ctx.scale)).to(q.dtype), p.to(q.dtype)
            dq[of] = _apart(ds @ keys[:, at], of.stop - of.start)
            dk[:, at] += _product(ds.mT, queries)
            dv[:, at] += _product(p.mT, gradient)
        return dq, dk.transpose(0, 1).to(k.dtype), dv.transpose(0, 1).to(v.dtype), None, None, None


def wants_products(q: torch.Tensor) -> bool:
    """Tells whether queries on a GPU are of heads for which PyTorch's attention stores all scores, or computes in operations without tensor
    cores. q: [..., head_dim]."""
    return q.is_cuda and q.shape[-1] > LONGEST


def attention_by_products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, reach: Reach, scale: Optional[float] = None
) -> torch.Tensor:
    """Computes what `attention` does, of one dtype. q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], of any strides; plan:
    a causal one for all tokens. Returns a new contiguous tensor of q's shape; the rows of padding are zero. In half precision scores and
    sums are fp32, probabilities are rounded. Raises ValueError for a plan that is not causal, or another one's tokens."""
    if not plan.causal or plan.tokens != q.shape[0] or plan.tokens % reach.rows:
        fail("plan", f"of {plan.tokens} tokens, causal={plan.causal}", f"a causal one of {q.shape[0]} tokens in {reach.rows} rows")
    scale, limits = q.shape[-1] ** -0.5 if scale is None else float(scale), plan.limits
    if needs_formula(q, k, v, limits):
        return attention_reference(q, k, v, None, limits, scale)[0]
    return apply_function(_Products, q, k, v, limits, reach._replace(window=plan.window), scale)


def _of_documents(q, k, v, cu_seqlens):
    return attention_by_products(q, k, v, AttentionPlan.from_cu_seqlens(cu_seqlens, q.shape[0]), Reach(1))


SELF_CHECKS = {
    "attention (matrix products)": lambda i: i.call(
        _of_documents, *[i.leaf(i.tokens, n, 512) for n in (4, 1, 1)], i.row(0, 50, i.tokens)
    ),
}
