"""The gated delta rule of Qwen3.5, Qwen3-Next and OLMo-Hybrid (arXiv 2412.06464), in chunks of 64 tokens; kernel_src/gated_delta.py has the
formulas of the forward pass, gated_delta_backward.py those of the backward pass.

Saved are the arguments and the inverse of each chunk's triangle, 128 bytes a token and value head; the rest is recomputed. No sum is
made by atomics: two runs give the same bits, and so do documents packed into a row and each in a row of its own.
"""

from typing import Any, List, Optional, Tuple

import torch

from ..runtime.device import kernels_run_on, multiprocessors
from ..runtime.launch import Kernel, contiguous_copy
from .arrays import SLAB, accumulation_dtype, aligned
from .autocast import outside_autocast
from .autograd import Function, apply_function, needs_formula
from .delta_chunks import CHUNK, DeltaChunks, check_arguments, chunks_of, chunks_of_rows
from .operators import traceable

__all__ = ["EPS", "WIDTH", "fits", "gated_delta_rule", "normalised"]

WIDTH = 128  # of the keys and values that the kernels take
COLUMNS = (32, 64, 128)  # of the values that a block of a walk may have
EPS = 1e-6  # of the L2 norm of q and k


def _chunks_by_heads(place: int, parts: int = 1):
    """The grid of a kernel with a block, or several for parts, for each chunk and each head of its argument number `place`, [chunks * 64,
    heads, width]."""
    return lambda c, *arrays: (arrays[place].shape[0] // CHUNK * arrays[place].shape[1] * parts,)


def _documents_by_columns(bounds: int, heads: int):
    """The grid of a walk: a block for each document, each head, and each BV columns of the values."""
    return lambda c, *arrays: (arrays[bounds].shape[1] * arrays[heads].shape[1], WIDTH // c["BV"])


def _walks(name: str, bounds: int, heads: int):
    """{(whether states are carried, columns of a block): the kernel}"""
    grid = _documents_by_columns(bounds, heads)
    return {(carry, columns): Kernel(name, grid=grid, where={"CARRY": carry, "BV": columns}) for carry in (0, 1) for columns in COLUMNS}


def _columns(bounds: torch.Tensor, heads: int) -> int:
    """The columns of a walk's blocks: as few as leave a multiprocessor for each block, so that few documents take all of them, and many
    read what their blocks have in common as seldom as may be."""
    built = _any_walk.constants("BV", device=bounds.get_device())
    blocks, most = bounds.shape[1] * heads * WIDTH, multiprocessors(bounds)
    return next((columns for columns in built if blocks // columns <= most), built[-1])


_place_keys = {norm: Kernel("delta_place_keys", grid=_chunks_by_heads(3), where={"NORM": norm}) for norm in (0, 1)}
_place_values = Kernel("delta_place_values", grid=_chunks_by_heads(4))
# Of keys without a norm, fp16 might not hold what comes of them.
_invert = {norm: Kernel(name, grid=_chunks_by_heads(4)) for norm, name in enumerate(("delta_invert", "delta_invert_bounded"))}
_prepare = Kernel("delta_prepare", grid=_chunks_by_heads(2))
_any_walk = Kernel("delta_walk", grid=_documents_by_columns(6, 9))
_walk, _states, _reverse = _walks("delta_walk", 6, 9), _walks("delta_states", 4, 2), _walks("delta_reverse", 6, 4)
_scores = {norm: Kernel("delta_scores", grid=_chunks_by_heads(0), where={"NORM": norm}) for norm in (0, 1)}
_inverse = {norm: Kernel("delta_inverse", grid=_chunks_by_heads(0), where={"NORM": norm}) for norm in (0, 1)}
_gates = Kernel("delta_gates", grid=_chunks_by_heads(1))
_keys = {norm: Kernel("delta_keys", grid=_chunks_by_heads(0, parts=2), where={"NORM": norm}) for norm in (0, 1)}


# ---------------------------------------------------------------- PyTorch
def normalised(x: torch.Tensor, norm: bool) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) if norm else x


def gated_delta_rule_reference(q, k, v, g, beta, chunks: DeltaChunks, initial, scale: float, norm: bool):
    """Computes `gated_delta_rule` of flat tokens with PyTorch's operations, differentiably. Returns (out, final states)."""
    dtype = accumulation_dtype(q.dtype)
    (count, heads, width), table = v.shape, chunks.table.long()
    row = torch.arange(CHUNK, device=v.device)
    inside = row < table[1][:, None]
    tokens = torch.where(inside, table[0][:, None] + row, count)  # the token after the last one is made of zeros

    def placed(x):  # [chunks, heads, 64, ...]
        x = torch.cat((x.to(dtype), x.new_zeros((1, *x.shape[1:]), dtype=dtype)))[tokens].transpose(1, 2)
        return x.repeat_interleave(heads // x.shape[1], 1) if x.shape[1] != heads else x

    queries, keys, values, decays, betas = (placed(x) for x in (normalised(q.to(dtype), norm), normalised(k.to(dtype), norm), v, g, beta))
    gamma, betas = decays.cumsum(-1), betas[..., None]
    lower = row[:, None] >= row
    decay = (gamma[..., :, None] - gamma[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    before, last = gamma.exp()[..., None], gamma[..., -1:]
    triangle = (decay * (betas * (keys @ keys.mT))).tril(-1) + torch.eye(CHUNK, dtype=dtype, device=v.device)
    sides = torch.cat((betas * before * keys, betas * values), -1)
    w, u = torch.linalg.solve_triangular(triangle, sides, upper=False, unitriangular=True).split((keys.shape[-1], width), -1)
    scores, seen = scale * decay * (queries @ keys.mT), scale * before * queries
    kept, whole = (last - gamma).exp()[..., None] * keys, last.exp()[..., None]

    first, end = chunks.bounds.long()
    longest = chunks.longest if chunks.longest is not None else int((end - first).max())
    state = v.new_zeros((first.shape[0], heads, keys.shape[-1], width), dtype=dtype) if initial is None else initial.to(dtype)
    results, places = [], []
    for i in range(longest):
        documents = (end - first > i).nonzero().flatten()
        at, s = first[documents] + i, state[documents]
        new = u[at] - w[at] @ s
        results.append(seen[at] @ s + scores[at] @ new)
        places.append(at)
        state = state.index_copy(0, documents, s * whole[at] + kept[at].mT @ new)
    out = v.new_zeros(v.shape)
    if not results:  # of no token, and still a function of everything
        return out + sum(x.sum() for x in (q, k, v, g, beta)).to(v.dtype), state
    found, at = torch.cat(results), torch.cat(places)
    rows = inside[at]
    return out.index_copy(0, tokens[at][rows], found.transpose(1, 2)[rows].to(v.dtype)), state


def _reference_backward(dout, dfinal, q, k, v, g, beta, chunks, initial, scale, norm):
    leaves: List[Any] = [None if x is None else x.detach().requires_grad_() for x in (q, k, v, g, beta, initial)]
    with torch.enable_grad():
        out, final = gated_delta_rule_reference(*leaves[:5], chunks, leaves[5], scale, norm)  # type: ignore[call-arg]
    results, grads = ((out,), (dout,)) if dfinal is None else ((out, final), (dout, dfinal))
    given = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad(results, given, grads, allow_unused=True, materialize_grads=True))
    return tuple(None if leaf is None else next(found) for leaf in leaves)


# ---------------------------------------------------------------- kernels
def _has_kernels(q, v) -> bool:
    """Tells whether kernels exist for this dtype and these sizes, on any device: bf16, keys and values of 128, offsets within 32 bits."""
    shaped = q.dtype == torch.bfloat16 and q.shape[-1] == v.shape[-1] == WIDTH and v.shape[0] > 0
    return shaped and v.shape[0] * v.shape[1] * WIDTH < SLAB


def fits(q, k, v, *others) -> bool:
    """Tells whether the kernels run on these tensors. The backward pass asks again, with the same tensors."""
    return _has_kernels(q, v) and kernels_run_on(q, k, v, *others)


def _place(q, k, v, g, beta, table, norm: bool):
    """(queries, keys, values, gamma, betas, q_rstd, k_rstd) in whole chunks."""
    rows, (key_heads, heads) = table.shape[1] * CHUNK, (k.shape[1], v.shape[1])
    queries, keys, values = (q.new_empty((rows, count, WIDTH)) for count in (key_heads, key_heads, heads))
    gamma, betas = (torch.empty((heads, rows), dtype=torch.float32, device=q.device) for _ in range(2))
    q_rstd, k_rstd = (torch.empty((key_heads, rows), dtype=torch.float32, device=q.device) for _ in range(2))
    _place_keys[norm](q, k, table, queries, keys, q_rstd, k_rstd, EPS)
    _place_values(v, g, beta, table, values, gamma, betas)
    return queries, keys, values, gamma, betas, q_rstd, k_rstd


def _made(queries, keys, values, gamma, betas, table, inverses, scale: float):
    """(W, U, P) of every chunk."""
    w, u = (values.new_empty(values.shape) for _ in range(2))
    p = values.new_empty((*values.shape[:2], CHUNK))
    _prepare(queries, keys, values, gamma, betas, table, inverses, w, u, p, scale)
    return w, u, p


def _carried(state: Optional[torch.Tensor], like: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """(a state that is read, one that is written), of one element where no state is carried."""
    if state is None:
        return tuple(torch.empty((1, 1, WIDTH, WIDTH), dtype=torch.float32, device=like.device) for _ in range(2))  # type: ignore
    return state, torch.empty_like(state)


def _inverses_shape(q, v, table) -> tuple:
    return (table.shape[1] * CHUNK, v.shape[1], CHUNK) if _has_kernels(q, v) else (0,)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    table: torch.Tensor,
    bounds: torch.Tensor,
    initial: Optional[torch.Tensor],
    longest: Optional[int],
    scale: float,
    norm: bool,
    carry: bool,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (out, final states, inverses). The final states are empty if nothing is carried, the inverses if no kernels exist.

    A tracer must know the shapes without knowing whether the kernels or PyTorch will run, so PyTorch returns zeros for the inverses.
    """
    inverses = v.new_empty(_inverses_shape(q, v, table))
    if not fits(q, k, v, g, beta, table, initial):
        out, final = gated_delta_rule_reference(q, k, v, g, beta, DeltaChunks(table, bounds, longest), initial, scale, norm)
        return out, final if carry else final.new_empty(0), inverses.zero_()
    q, k, v = aligned(q), aligned(k), aligned(v)
    if carry and initial is None:
        initial = torch.zeros((bounds.shape[1], v.shape[1], WIDTH, WIDTH), dtype=torch.float32, device=v.device)
    queries, keys, values, gamma, betas, _, _ = _place(q, k, v, g, beta, table, norm)
    _invert[norm](keys, gamma, betas, table, inverses)
    w, u, p = _made(queries, keys, values, gamma, betas, table, inverses, scale)
    out, (start, final) = torch.empty_like(v, memory_format=torch.contiguous_format), _carried(initial, v)
    _walk[carry, _columns(bounds, v.shape[1])](queries, keys, w, u, p, gamma, bounds, table, start, out, final, scale)
    return out, final if carry else final.new_empty(0), inverses


def _backward(
    dout: torch.Tensor,
    dfinal: Optional[torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    table: torch.Tensor,
    bounds: torch.Tensor,
    initial: Optional[torch.Tensor],
    inverses: torch.Tensor,
    longest: Optional[int],
    scale: float,
    norm: bool,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k, v, g, beta and the initial states; the last is empty where there are none."""
    if not fits(q, k, v, g, beta, table, initial):
        chunks = DeltaChunks(table, bounds, longest)
        *found, dinitial = _reference_backward(dout, dfinal, q, k, v, g, beta, chunks, initial, scale, norm)
        return (*found, g.new_empty(0) if dinitial is None else dinitial)
    # The kernels ran, so they go on, whatever the memory of the incoming gradients holds.
    q, k, v = aligned(q), aligned(k), aligned(v)
    dout, dfinal = aligned(dout.resolve_neg()), None if dfinal is None else contiguous_copy(dfinal)
    group = v.shape[1] // k.shape[1]
    # The states of all chunks and heads may be more than offsets of 32 bits reach.
    most = max(1, SLAB // (table.shape[1] * group * WIDTH * WIDTH))
    if most >= k.shape[1]:
        *found, dinitial = _heads_backward(q, k, v, g, beta, inverses, dout, table, bounds, initial, dfinal, scale, norm)
        return (*found, dinitial if initial is not None else g.new_empty(0))  # type: ignore[return-value]
    results = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta))
    dinitial = g.new_empty(0) if initial is None else torch.empty_like(initial)
    for start in range(0, k.shape[1], most):
        some, all_of = slice(start, start + most), slice(start * group, (start + most) * group)
        parts = q[:, some], k[:, some], v[:, all_of], g[:, all_of], beta[:, all_of], inverses[:, all_of], dout[:, all_of]
        before, after = [None if x is None else x[:, all_of].contiguous() for x in (initial, dfinal)]
        found = _heads_backward(*parts, table, bounds, before, after, scale, norm)
        for whole, heads, part in zip((*results, dinitial), (some, some, all_of, all_of, all_of, all_of), found):
            if part is not None and whole.numel():
                whole[:, heads].copy_(part)
    return (*results, dinitial)  # type: ignore[return-value]


def _heads_backward(q, k, v, g, beta, inverses, dout, table, bounds, initial, dfinal, scale: float, norm: bool):
    """The gradients of some heads."""
    carry = initial is not None or dfinal is not None
    shape = bounds.shape[1], v.shape[1], WIDTH, WIDTH
    if carry:
        initial, dfinal = (torch.zeros(shape, dtype=torch.float32, device=v.device) if x is None else x for x in (initial, dfinal))
    queries, keys, values, gamma, betas, q_rstd, k_rstd = _place(q, k, v, g, beta, table, norm)
    inverses = aligned(inverses)
    w, u, p = _made(queries, keys, values, gamma, betas, table, inverses, scale)
    states, dstates = (v.new_empty((table.shape[1], *shape[1:])) for _ in range(2))
    news, dnews = values.new_empty(values.shape), values.new_empty(values.shape)
    begin, _ = _carried(initial, v)
    columns = _columns(bounds, v.shape[1])
    _states[carry, columns](keys, w, u, gamma, bounds, begin, states, news)
    behind, dinitial = _carried(dfinal, v)
    _reverse[carry, columns](queries, keys, w, p, dout, gamma, bounds, table, behind, dstates, dnews, dinitial, scale)
    dq, dk, dv, dg, dbeta = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta))
    halved = 1 in _scores[norm].constants("SPLIT", device=k.get_device())  # the GPU's registers hold no more
    dgamma, partial = gamma.new_empty((3 if halved else 1) * gamma.shape[0], gamma.shape[1]), torch.empty_like(keys, dtype=torch.float32)
    _scores[norm](queries, keys, gamma, states, dstates, news, dout, table, q_rstd, dq, dgamma, partial, scale)
    if halved:
        squares = p  # whose memory nothing needs any more
        _gates(keys, values, gamma, betas, inverses, states, dnews, table, dgamma, squares, dv, dbeta, dg)
        _keys[norm](keys, gamma, betas, inverses, states, dnews, squares, table, k_rstd, partial, dk)
    else:
        _inverse[norm](keys, values, gamma, betas, inverses, states, dnews, table, k_rstd, dgamma, partial, dk, dv, dbeta, dg)
    return dq, dk, dv, dg, dbeta, dinitial if carry else None


def _fake_forward(q, k, v, g, beta, table, bounds, initial, longest, scale, norm, carry):
    dtype = accumulation_dtype(q.dtype)
    final = g.new_empty((bounds.shape[1], v.shape[1], k.shape[2], v.shape[2]) if carry else 0, dtype=dtype)
    return v.new_empty(v.shape), final, v.new_empty(_inverses_shape(q, v, table))


def _fake_backward(dout, dfinal, q, k, v, g, beta, table, bounds, initial, inverses, longest, scale, norm):
    found = [x.new_empty(x.shape) for x in (q, k, v, g, beta)]
    return (*found, g.new_empty(0) if initial is None else initial.new_empty(initial.shape))


rule_forward = traceable("gated_delta_rule_forward", _forward, _fake_forward)
rule_backward = traceable("gated_delta_rule_backward", _backward, _fake_backward)


class _GatedDeltaRule(Function):
    def forward(ctx, q, k, v, g, beta, initial, table, bounds, longest, scale, norm, carry):
        out, final, inverses = rule_forward(q, k, v, g, beta, table, bounds, initial, longest, scale, norm, carry)
        ctx.save_for_backward(q, k, v, g, beta, table, bounds, initial, inverses)
        ctx.set_materialize_grads(False)
        ctx.options = longest, scale, norm
        return out, final

    @outside_autocast
    def backward(ctx, dout, dfinal):
        *tensors, initial, inverses = ctx.saved_tensors
        dout = torch.zeros_like(tensors[2]) if dout is None else dout
        dfinal = None if dfinal is None or dfinal.numel() == 0 else dfinal.contiguous()
        *found, dinitial = rule_backward(dout, dfinal, *tensors, initial, inverses, *ctx.options)
        gradients = (*found, None if initial is None else dinitial)
        needed = [grad if need else None for grad, need in zip(gradients, ctx.needs_input_grad)]
        return (*needed, None, None, None, None, None, None)


# ---------------------------------------------------------------- public
def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    cu_seqlens: Optional[torch.Tensor] = None,
    initial_state: Optional[torch.Tensor] = None,
    output_final_state: bool = False,
    scale: Optional[float] = None,
    l2_norm: bool = False,
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Computes the gated delta rule over the tokens of each document.

    Args:
        q, k: [batch, tokens, key heads, K].
        v: [batch, tokens, heads, V], of q's dtype; the key heads divide the heads.
        g: [batch, tokens, heads], the logarithm of each token's decay, at most 0; computed with in fp32.
        beta: [batch, tokens, heads], how much of the old value each token replaces, between 0 and 2.
        cu_seqlens: [documents + 1], where documents start in a batch of one row; by default each row is a document. Documents do not see
            each other.
        initial_state: [documents, heads, K, V], the state before each document; zeros by default.
        output_final_state: whether to return the state after each document.
        scale: of q; K ** -0.5 by default.
        l2_norm: whether q and k are divided by their L2 norms first, as Qwen3.5 does.

    Returns:
        The output [batch, tokens, heads, V] in v's dtype, and the final states [documents, heads, K, V] in fp32, or None. Differentiable
        in the first five arguments and in `initial_state`.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit.

    bf16 with K = V = 128 runs in the kernels, the rest in PyTorch.
    """
    check_arguments(q, k, v, g, beta, cu_seqlens, initial_state)
    batch, length = q.shape[:2]
    chunks = chunks_of_rows(batch, length, q.device) if cu_seqlens is None else chunks_of(cu_seqlens, length)
    q, k, v, g, beta = (x.flatten(0, 1) for x in (q, k, v, g, beta))
    initial = None if initial_state is None else initial_state.to(accumulation_dtype(q.dtype)).contiguous().resolve_neg()
    scale, carry = q.shape[-1] ** -0.5 if scale is None else float(scale), bool(output_final_state) or initial is not None
    if needs_formula(q, k, v, g, beta, initial, chunks.table):
        out, final = gated_delta_rule_reference(q, k, v, g, beta, chunks, initial, scale, bool(l2_norm))
    else:
        if q.dtype == torch.bfloat16:
            g, beta = g.to(torch.float32), beta.to(torch.float32)
        numbers = (x.resolve_neg() for x in (q, k, v, g.contiguous(), beta.contiguous()))  # so `fits` answers alike in both passes
        arguments = chunks.table, chunks.bounds, chunks.longest, scale, bool(l2_norm), carry
        out, final = apply_function(_GatedDeltaRule, *numbers, initial, *arguments)
    return out.view(batch, length, *v.shape[1:]), final if output_final_state else None


SELF_CHECKS = {
    "gated_delta_rule": lambda i: i.call(
        gated_delta_rule, *(i.leaf(1, i.tokens, 2, WIDTH, of=lambda x: x / x.norm(dim=-1, keepdim=True)) for _ in range(2)),
        i.leaf(1, i.tokens, 4, WIDTH), i.leaf(1, i.tokens, 4, of=lambda x: -0.1 * x.abs()), i.leaf(1, i.tokens, 4, of=torch.sigmoid),
    ),
}
