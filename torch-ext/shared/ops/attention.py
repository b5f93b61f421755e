"""Attention over documents that follow each other in one row of tokens, without padding; kernel_src/attention.py has the formulas.

Which tokens see which is an `AttentionPlan`, made once a batch on the device and shared by every layer's `attention`. Nothing waits for
the device.
"""

import functools
import math
from typing import Any, Dict, Optional, Tuple, Union

import torch

from ..runtime import launch
from ..runtime.artifacts import ArtifactError
from ..runtime.device import is_ordinary, kernels_run_on
from ..runtime.launch import Kernel
from .arguments import describe, fail, need_floats
from .arrays import Pair, accumulation_dtype
from .attention_heads import of_heads, one_head_is_within_reach, parts_of_heads
from .attention_plan import AttentionPlan
from .autocast import as_autocast, outside_autocast, without_autocast
from .autograd import Function, apply_function, autocasts, needs_formula
from .operators import constant_when_traced, traceable
from .recorded import recorded
from .rows import one_block_a_row
from .second_run import keep, kept_of

__all__ = ["attention", "attention_reference", "takes_dtype", "takes_heads"]

LOG2E = math.log2(math.e)

ROWS = 512  # queries that the PyTorch path looks at at once



def _blocks_of(heads_of: int):
    """The grid of a kernel: a block for each BLOCK tokens and each head of its argument number `heads_of`."""
    return lambda c, *arrays: (-(-arrays[0].shape[0] // c["BLOCK"]) * arrays[heads_of].shape[1],)


READS = ("q", "k", "v", "dout")  # what comes from outside, in whatever strides

_forward_kernel = Kernel("attention_forward", grid=_blocks_of(0), reads=READS[:3])

_sink_forward_kernel = Kernel("attention_sink_forward", grid=_blocks_of(0), reads=READS[:3])

_dq_kernel = Kernel("attention_backward_dq", grid=_blocks_of(0), reads=READS)

_dkv_kernel = Kernel("attention_backward_dkv", grid=_blocks_of(1), reads=READS)



def _blocks_of_parts(c, *arrays):
    return (_blocks_of(1)(c, *arrays)[0] * (c["D"] // c["PART"]),)


_dkv_part_kernel = Kernel("attention_backward_dkv_part", grid=_blocks_of_parts, reads=READS)

_capped_forward_kernel = Kernel("attention_capped_forward", grid=_blocks_of(0), reads=READS[:3])

_capped_dq_kernel = Kernel("attention_capped_backward_dq", grid=_blocks_of(0), reads=READS)

_capped_dkv_kernel = Kernel("attention_capped_backward_dkv", grid=_blocks_of(1), reads=READS)

_capped_dkv_part_kernel = Kernel("attention_capped_backward_dkv_part", grid=_blocks_of_parts, reads=READS)

_sink_gradient_kernel = Kernel("attention_sink_gradient", grid=one_block_a_row)


@constant_when_traced
def takes_heads(head_dim: Optional[int], sinks: bool = False, capped: bool = False) -> bool:
    """Tells whether this package has attention's kernels for heads of this length: without sinks and a cap of the scores, or with one of
    them."""
    if sinks and capped:
        return False
    kernel = "attention_sink_forward" if sinks else "attention_capped_forward" if capped else "attention_forward"
    return head_dim in _lengths(launch.backend, kernel, "")


@functools.lru_cache(maxsize=None)
def _lengths(backend, kernel: str, architecture: str) -> frozenset:
    """The lengths of the heads that a kernel of a backend takes, on an architecture or on any."""
    try:
        variants = backend.artifacts.variants(kernel)
    except ArtifactError:  # a copy without kernels, or without this one
        return frozenset()
    kept = [variant for variant in variants if not architecture or architecture in variant.images]
    return frozenset(parameter.shape[2] for variant in kept for parameter in variant.parameters if parameter.name == "q")


def _dkv_kernel_of(k: torch.Tensor, capped: bool = False) -> Kernel:
    """The kernel of dk and dv: the one whose blocks have some of the columns, where the registers of the GPU do not hold all."""
    whole, part = (_capped_dkv_kernel, _capped_dkv_part_kernel) if capped else (_dkv_kernel, _dkv_part_kernel)
    lengths = _lengths(launch.backend, part.names[0], launch.backend.architecture(k.get_device()))
    return part if k.shape[-1] in lengths else whole


def _pieces(q, limits):
    """(rows, keys, mask [rows, keys]) of a few queries at a time. Where reading a number does not wait for a device, keys are only
    those that some query sees."""
    tokens = q.shape[0]
    for start in range(0, tokens, ROWS):
        rows = slice(start, min(start + ROWS, tokens))
        first, behind = limits[0, rows], limits[1, rows]
        low, high = 0, tokens
        if q.is_cpu and is_ordinary(q, limits):
            some = first < behind
            low, high = (int(first[some].min()), int(behind.max())) if some.any() else (0, 1)
        t = torch.arange(low, high, device=q.device)
        yield rows, slice(low, high), (t >= first[:, None]) & (t < behind[:, None])


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[rows, heads, head_dim] as [kv_heads, group, rows, head_dim] in the dtype of the arithmetic."""
    return x.to(accumulation_dtype(x.dtype)).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)


def _heads(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim] as [heads, 1, tokens, head_dim] in the dtype of the arithmetic."""
    return x.to(accumulation_dtype(x.dtype)).transpose(0, 1)[:, None]


def _scores(q, k, scale, softcap):
    """(the scores, and what their gradient is multiplied by, None for 1) of grouped queries and the keys of their heads."""
    s = q @ k.mT * scale
    if not softcap:
        return s, None
    t = torch.tanh(s / softcap)
    return softcap * t, 1 - t * t


def attention_reference(q, k, v, sinks, limits, scale, softcap=0.0) -> Pair:
    """(out, lse [heads, tokens in whole blocks], to base 2). softcap: 0 for none."""
    outs, sums = [], []
    for rows, keys, mask in _pieces(q, limits):
        s = _scores(_grouped(q[rows], k.shape[1]), _heads(k[keys]), scale, softcap)[0].masked_fill(~mask, -math.inf)
        total = torch.logsumexp(s.masked_fill(~mask.any(1)[:, None], 0.0), -1)
        total = total.masked_fill(~mask.any(1), -math.inf)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.to(s.dtype).view(k.shape[1], -1, 1))
        total = total.masked_fill(total == -math.inf, 0.0)  # what sees nothing
        outs.append((torch.exp(s - total[..., None]) @ _heads(v[keys])).flatten(0, 1).transpose(0, 1).to(q.dtype))
        sums.append(total.flatten(0, 1) * LOG2E)
    past = sums[0].new_zeros((q.shape[1], limits.shape[1] - q.shape[0]))
    return torch.cat(outs), torch.cat([*sums, past], 1)


def attention_backward_reference(dout, q, k, v, sinks, out, lse, limits, scale, softcap=0.0):
    """(dq, dk, dv, dsinks); the last one is empty without sinks."""
    dq = q.new_zeros(q.shape)
    dk, dv = (torch.zeros(k.shape, dtype=accumulation_dtype(k.dtype), device=k.device) for _ in range(2))
    dsinks = torch.zeros(0 if sinks is None else q.shape[1], dtype=lse.dtype, device=q.device)
    for rows, keys, mask in _pieces(q, limits):
        queries, gradient = _grouped(q[rows], k.shape[1]), _grouped(dout[rows], k.shape[1])
        s, slope = _scores(queries, _heads(k[keys]), scale, softcap)
        s = s.masked_fill(~mask, -math.inf)
        total = lse[:, rows].unflatten(0, (k.shape[1], -1)) / LOG2E
        p = torch.exp(s - total[..., None])
        delta = (gradient * _grouped(out[rows], k.shape[1])).sum(-1)
        ds = p * (gradient @ _heads(v[keys]).mT - delta[..., None]) * scale
        ds = ds if slope is None else ds * slope
        dq[rows] = (ds @ _heads(k[keys])).flatten(0, 1).transpose(0, 1).to(q.dtype)
        dk[keys] += (ds.mT @ queries).sum(1).transpose(0, 1)
        dv[keys] += (p.mT @ gradient).sum(1).transpose(0, 1)
        if sinks is not None:
            dsinks -= (torch.exp(sinks.to(s.dtype).view(k.shape[1], -1, 1) - total) * delta).sum(-1).flatten()
    return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks


def takes_dtype(dtype: torch.dtype, capped: bool = False) -> bool:
    """Tells whether the kernels take queries of a dtype, without a cap of the scores or with one."""
    return dtype == torch.bfloat16 or (dtype == torch.float16 and not capped)


def _fits(q, k, scale, softcap, sinks, *others) -> bool:
    """True where the kernels take these arguments, however long. (A largest score times a scale of zero or less is not the largest
    product.)"""
    capped = softcap > 0
    halves = takes_dtype(q.dtype, capped) and scale > 0 and takes_heads(q.shape[-1], sinks is not None, capped)
    return halves and kernels_run_on(q, k, sinks, *others) and one_head_is_within_reach(q, k)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: Optional[torch.Tensor],
    limits: torch.Tensor,
    walks: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
) -> Pair:
    """(out as q, lse [heads, tokens in whole blocks])."""
    if not _fits(q, k, scale, softcap, sinks, v, limits, walks):
        return attention_reference(q, k, v, sinks, limits, scale, softcap)
    out, lse = q.new_empty(q.shape), q.new_empty((q.shape[1], limits.shape[1]), dtype=torch.float32)
    cut = parts_of_heads(q, k, v)
    for heads, keys in cut:
        mine = None if sinks is None else sinks[heads].contiguous()
        (q_part,), (k_part, v_part) = of_heads(heads, q), of_heads(keys, k, v)
        out[:, heads], lse[heads] = _forward(q_part, k_part, v_part, mine, limits, walks, scale, softcap)
    if cut:
        pass
    elif softcap:
        _capped_forward_kernel(q, k, v, limits, walks, out, lse, softcap * LOG2E, scale / softcap)
    elif sinks is None:
        _forward_kernel(q, k, v, limits, walks, out, lse, scale * LOG2E)
    else:
        _sink_forward_kernel(q, k, v, sinks, limits, walks, out, lse, scale * LOG2E)
    return out, lse


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: Optional[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    limits: torch.Tensor,
    walks: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv, dsinks); the last one is empty without sinks."""
    if not _fits(q, k, scale, softcap, sinks, v, limits, walks, dout):
        return attention_backward_reference(dout, q, k, v, sinks, out, lse, limits, scale, softcap)
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    dsinks = lse.new_empty(0 if sinks is None else sinks.shape)
    cut = parts_of_heads(q, k, v, dout, out)
    for heads, keys in cut:
        mine = None if sinks is None else sinks[heads].contiguous()
        (dout_part, q_part, out_part), (k_part, v_part) = of_heads(heads, dout, q, out), of_heads(keys, k, v)
        lse_part = lse[heads].contiguous()
        found = _backward(dout_part, q_part, k_part, v_part, mine, out_part, lse_part, limits, walks, scale, softcap)
        dq[:, heads], dk[:, keys], dv[:, keys] = found[:3]
        if sinks is not None:
            dsinks[heads] = found[3]
    if cut:
        return dq, dk, dv, dsinks
    delta, capped = torch.empty_like(lse), softcap > 0
    numbers = (softcap * LOG2E, scale, scale / softcap) if capped else (scale * LOG2E, scale)
    dq_kernel = _capped_dq_kernel if capped else _dq_kernel
    dq_kernel(q, k, v, out, dout, lse, limits, walks, delta, dq, *numbers)
    _dkv_kernel_of(k, capped)(q, k, v, dout, lse, delta, limits, walks, dk, dv, *numbers)
    if sinks is not None:
        _sink_gradient_kernel(sinks, lse, delta, dsinks, q.shape[0])
    return dq, dk, dv, dsinks


def _fake_forward(q, k, v, sinks, limits, walks, scale, softcap=0.0):
    return q.new_empty(q.shape), q.new_empty((q.shape[1], limits.shape[1]), dtype=accumulation_dtype(q.dtype))


def _fake_backward(dout, q, k, v, sinks, out, lse, limits, walks, scale, softcap=0.0):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), lse.new_empty(0 if sinks is None else sinks.shape)


attention_forward = traceable("attention_forward", _forward, _fake_forward)

attention_backward = traceable("attention_backward", _backward, _fake_backward)


class _Attention(Function):
    def forward(ctx, q, k, v, sinks, limits, walks, scale, softcap):
        out, lse = recorded(attention_forward, q, k, v, sinks, limits, walks, scale, softcap)
        keep(ctx, (q, k, v, sinks, out, lse, limits, walks))
        ctx.scale, ctx.softcap = scale, softcap
        return out

    @outside_autocast
    def backward(ctx, dout):
        q, k, v, sinks, out, lse, limits, walks = kept_of(ctx)
        dq, dk, dv, dsinks = attention_backward(dout, q, k, v, sinks, out, lse, limits, walks, ctx.scale, ctx.softcap)
        return dq, dk, dv, None if sinks is None else dsinks, None, None, None, None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Union[AttentionPlan, None] = None,
    *,
    cu_seqlens: Optional[torch.Tensor] = None,
    position_ids: Optional[torch.Tensor] = None,
    padding_mask: Optional[torch.Tensor] = None,
    causal: bool = True,
    window: Optional[int] = None,
    sinks: Optional[torch.Tensor] = None,
    scale: Optional[float] = None,
    softcap: Optional[float] = None,
) -> torch.Tensor:
    """Computes softmax(scale * q @ k.T) @ v, where each query sees the keys of its own document.

    q: [tokens, heads, head_dim] or [batch, tokens, heads, head_dim]; k, v: the same with their own number of heads, which divides q's.
    Parts of one projection's rows are read where they lie. plan: which tokens see which, for all layers of a batch; without one it is made
    here, of cu_seqlens, or of position_ids [batch, tokens] and padding_mask, or of padding_mask, each as `AttentionPlan` takes
    them, or with every row a document, and of causal and window. sinks: [heads], one more score for every query of a head, of a key
    whose value is zero; differentiable. scale: head_dim ** -0.5 if None. softcap: scores s become softcap * tanh(s / softcap), as Gemma 2's
    do. Returns a new contiguous tensor of q's shape; the rows of padding are zero.

    Under autocast q, k and v are cast to its dtype, as those of SDPA are. bf16 and fp16 with a head_dim of 64 or 128 run in the kernels,
    and where a package has them those of 96 and 256 without sinks, and with a softcap those of 128 and 256 in bf16; the rest runs in
    PyTorch. Two runs give the same bits in the kernels.
    Raises ValueError when shapes, dtypes or devices do not fit, or when a plan comes with what it is made of.
    """
    if autocasts(q.device):
        options: Dict[str, Any] = {"cu_seqlens": cu_seqlens, "position_ids": position_ids, "padding_mask": padding_mask}
        options.update(causal=causal, window=window)
        q, k, v = as_autocast(q.device, q, k, v)
        with without_autocast(q.device):
            return attention(q, k, v, plan, sinks=sinks, scale=scale, softcap=softcap, **options)
    _check(q, k, v, sinks, softcap)
    batched = q.dim() == 4
    batch, length = q.shape[:2] if batched else (1, q.shape[0])
    tokens = batch * length
    if plan is not None:
        made_of = {"cu_seqlens": cu_seqlens, "position_ids": position_ids, "padding_mask": padding_mask, "window": window}
        for name, value in made_of.items():
            if value is not None:
                fail(name, "given beside a plan", "None: a plan was made of it")
        if not causal:
            fail("causal", causal, "the default beside a plan, which was made for causal attention or not")
        if plan.tokens != tokens or plan.limits.device != q.device:
            fail("plan", f"for {plan.tokens} tokens on {plan.limits.device}", f"one for {tokens} tokens on {q.device}")
    out_shape = q.shape
    if tokens == 0:
        return q * 1
    if plan is None:
        plan = _plan_of(batch, length, q.device, cu_seqlens, position_ids, padding_mask, causal, window)
    q, k, v = (x.flatten(0, 1) if batched else x for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    softcap = float(softcap or 0.0)
    sinks = None if sinks is None else sinks.to(accumulation_dtype(q.dtype))
    if needs_formula(q, k, v, sinks, plan.limits):
        return attention_reference(q, k, v, sinks, plan.limits, scale, softcap)[0].view(out_shape)
    return apply_function(_Attention, q, k, v, sinks, plan.limits, plan.walks, scale, softcap).view(out_shape)


def _plan_of(batch, length, device, cu_seqlens, position_ids, padding_mask, causal, window):
    if cu_seqlens is not None:
        for name, value in (("position_ids", position_ids), ("padding_mask", padding_mask)):
            if value is not None:
                fail(name, "given beside cu_seqlens", "one of them")
        return AttentionPlan.from_cu_seqlens(cu_seqlens, batch * length, causal, window)
    for name, value in (("position_ids", position_ids), ("padding_mask", padding_mask)):
        if value is not None and value.shape != (batch, length):
            fail(name, describe(value), f"[{batch}, {length}]")
    if position_ids is not None:
        return AttentionPlan.from_position_ids(position_ids, padding_mask, causal, window)
    if padding_mask is not None:
        return AttentionPlan.from_padding_mask(padding_mask, causal, window)
    cu_seqlens = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
    return AttentionPlan.from_cu_seqlens(cu_seqlens, batch * length, causal, window)


def _check(q, k, v, sinks, softcap) -> None:
    need_floats(q=q, k=k, v=v)
    if softcap is not None and not 0.0 < softcap < math.inf:
        fail("softcap", softcap, "a positive number, or None for no cap")
    if q.dim() not in (3, 4):
        fail("q", describe(q), "[tokens, heads, head_dim] or [batch, tokens, heads, head_dim]")
    for name, x in (("k", k), ("v", v)):
        if x.dim() != q.dim() or x.shape[:-2] != q.shape[:-2] or x.shape[-1] != q.shape[-1] or x.shape != k.shape:
            fail(name, describe(x), f"q's tokens and head_dim, and as many heads in k as in v; q is {describe(q)}")
        if x.dtype != q.dtype or x.device != q.device:
            fail(name, describe(x), f"of q's dtype and device, {q.dtype} on {q.device}")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        fail("k", describe(k), f"a number of heads that divides q's, {q.shape[-2]}")
    if sinks is not None and (sinks.shape != q.shape[-2:-1] or sinks.device != q.device or not sinks.is_floating_point()):
        fail("sinks", describe(sinks), f"floats [{q.shape[-2]}] on {q.device}")


def _documents(i, width: int):
    return (i.leaf(i.tokens, n, width) for n in (8, 2, 2))


SELF_CHECKS = {
    "attention (two documents)": lambda i: i.call(attention, *_documents(i, 128), cu_seqlens=i.row(0, 50, i.tokens)),
    "attention (sinks and window)": lambda i: i.call(
        attention, *_documents(i, 64), cu_seqlens=i.row(0, 50, i.tokens), window=32, sinks=i.leaf(8)
    ),
}
