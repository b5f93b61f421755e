"""A gated MLP over shards of its tokens: of what is as wide as the intermediate layer, only one shard's exists at a time, in buffers that
all shards share.

The forward saves x and the weights alone. The backward computes each shard's activations again (two GEMMs more than an MLP that
keeps them: eleven), and adds the weights' gradients up in place, by the GEMMs themselves. The weights are inputs of the autograd
function and get their gradients once, so DDP, FSDP, ZeRO, `autograd.grad`, a frozen x and frozen weights work as with any other
operation. (Liger's writes .grad from inside the backward, once a shard.)
"""

import functools
from typing import List, Optional, Tuple

import torch
from torch.nn.functional import linear

from .arguments import fail, need_floats
from .autocast import as_autocast, outside_autocast, without_autocast
from .autograd import Function, autocasts, needs_formula
from .gated_activation import APPROXIMATE, backward_in_place, forward_into, forward_reference
from .operators import traceable
from .products import write_product
from .second_run import Rest, apply_in_parts, unfinished
from .swiglu import check_mlp

__all__ = ["tiled_geglu", "tiled_mlp", "tiled_swiglu"]

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


def _length(tokens: int, hidden: int, shards: Optional[int], trains: bool) -> int:
    """The tokens of a shard, of which the last one may have fewer. trains: whether a weight gets a gradient. Each shard reads and writes
    that whole again, which takes longer than its product where a shard has less than `hidden` tokens, and the gradients of the weights
    take more memory than such a shard; so none is shorter then."""
    length = -(-tokens // shards) if shards else hidden
    return max(1, length, min(tokens, hidden) if trains else 0)


def _shards(tokens: int, length: int) -> List[slice]:
    return [slice(start, min(start + length, tokens)) for start in range(0, tokens, length)]


def _buffers(x: torch.Tensor, length: int, intermediate: int) -> List[torch.Tensor]:
    """Room for a shard's gate, up and what becomes of them."""
    return [x.new_empty((min(length, x.shape[0]), intermediate)) for _ in range(3)]


def _forward(
    x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor, activation: str, length: int
) -> torch.Tensor:
    """x: [tokens, hidden]."""
    y = x.new_empty((x.shape[0], down_weight.shape[0]))
    buffers = _buffers(x, length, gate_weight.shape[0])
    for part in _shards(x.shape[0], length):
        gate, up, hidden = (buffer[: part.stop - part.start] for buffer in buffers)
        write_product(gate, x[part], gate_weight.t())
        write_product(up, x[part], up_weight.t())
        forward_into(gate, up, hidden, activation)
        write_product(y[part], hidden, down_weight.t())
    return y


def _add_product(total: Optional[torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """total + a b, in place where there is a total."""
    return torch.mm(a, b) if total is None else total.addmm_(a, b)


def _backward(
    dy: torch.Tensor, x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor,
    activation: str, length: int, need_x: bool, need_gate: bool, need_up: bool, need_down: bool,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dx, dgate_weight, dup_weight, ddown_weight), empty where they are not needed."""
    dx = torch.empty_like(x) if need_x else x.new_empty(0)
    dgate_weight = dup_weight = ddown_weight = None
    buffers = _buffers(x, length, gate_weight.shape[0])
    for part in _shards(x.shape[0], length):
        gate, up, hidden = (buffer[: part.stop - part.start] for buffer in buffers)
        torch.mm(x[part], gate_weight.t(), out=gate)
        torch.mm(x[part], up_weight.t(), out=up)
        torch.mm(dy[part], down_weight, out=hidden)  # its gradient
        backward_in_place(hidden, gate, up, activation)
        dgate, dup = gate, up  # and hidden is itself
        if need_down:
            ddown_weight = _add_product(ddown_weight, dy[part].t(), hidden)
        if need_gate:
            dgate_weight = _add_product(dgate_weight, dgate.t(), x[part])
        if need_up:
            dup_weight = _add_product(dup_weight, dup.t(), x[part])
        if need_x:
            torch.mm(dgate, gate_weight, out=dx[part]).addmm_(dup, up_weight)
    found = zip((dgate_weight, dup_weight, ddown_weight), (gate_weight, up_weight, down_weight), (need_gate, need_up, need_down))
    # Without tokens there was no shard.
    dgate, dup, ddown = [d if d is not None else torch.zeros_like(w) if need else w.new_empty(0) for d, w, need in found]
    return dx, dgate, dup, ddown


def _fake_backward(dy, x, gate_weight, up_weight, down_weight, activation, length, *needs):
    return tuple(t.new_empty(t.shape if need else 0) for t, need in zip((x, gate_weight, up_weight, down_weight), needs))


tiled_mlp_forward = traceable(
    "tiled_mlp_forward", _forward, lambda x, gate, up, down, activation, length: x.new_empty((x.shape[0], down.shape[0]))
)
tiled_mlp_backward = traceable("tiled_mlp_backward", _backward, _fake_backward)


class _TiledMLP(Function):
    def forward(ctx, rest: Rest, x, gate_weight, up_weight, down_weight, activation, length):
        ctx.save_for_backward(x, gate_weight, up_weight, down_weight)
        ctx.options = activation, length
        make = functools.partial(tiled_mlp_forward, x, gate_weight, up_weight, down_weight, activation, length)
        return make() if rest is None else unfinished(rest, make, (x.shape[0], down_weight.shape[0]), x)

    @outside_autocast
    def backward(ctx, dy):
        needs = ctx.needs_input_grad[1:5]
        results = tiled_mlp_backward(dy, *ctx.saved_tensors, *ctx.options, *needs)
        return (None, *[result if need else None for result, need in zip(results, needs)], None, None)


def tiled_mlp(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    activation: str = "silu",
    shards: Optional[int] = None,
) -> torch.Tensor:
    """Computes down(act(gate(x)) * up(x)) without biases, shard by shard of the tokens, storing only x for the backward pass.

    x: [..., hidden]; gate_weight, up_weight: [intermediate, hidden]; down_weight: [hidden, intermediate], all of one dtype and device.
    activation: "silu", "gelu_tanh" or "gelu". shards: how many at most; by default tokens / hidden, rounded up, and never more where a
    weight gets a gradient. The result does not depend on it but for rounding: such a gradient is rounded to its dtype once a shard.
    Returns [..., hidden]; under autocast all four are cast to its dtype, as by `mlp`. Differentiable in all four tensors. Raises ValueError
    when shapes, dtypes, devices or options do not fit.
    """
    need_floats(x=x)
    if autocasts(x.device):
        x, gate_weight, up_weight, down_weight = as_autocast(x.device, x, gate_weight, up_weight, down_weight)
        with without_autocast(x.device):
            return tiled_mlp(x, gate_weight, up_weight, down_weight, activation, shards)
    check_mlp(x, gate_weight, up_weight, down_weight)
    if activation not in ACTIVATIONS:
        fail("activation", repr(activation), f"one of {', '.join(ACTIVATIONS)}")
    if shards is not None and (not isinstance(shards, int) or shards < 1):
        fail("shards", shards, "a positive int, or None")
    if needs_formula(x, gate_weight, up_weight, down_weight):
        hidden = forward_reference(linear(x, gate_weight), linear(x, up_weight), activation, 1.0, 1.0)
        return linear(hidden, down_weight)
    flat = x.reshape(-1, x.shape[-1])
    trains = torch.is_grad_enabled() and any(weight.requires_grad for weight in (gate_weight, up_weight, down_weight))
    length = _length(flat.shape[0], x.shape[-1], shards, trains)
    return apply_in_parts(_TiledMLP, flat, gate_weight, up_weight, down_weight, activation, length).view(x.shape)


def tiled_swiglu(x, gate_weight, up_weight, down_weight, shards: Optional[int] = None) -> torch.Tensor:
    """`tiled_mlp` with SiLU."""
    return tiled_mlp(x, gate_weight, up_weight, down_weight, "silu", shards)


def tiled_geglu(x, gate_weight, up_weight, down_weight, shards: Optional[int] = None, approximate: str = "tanh") -> torch.Tensor:
    """`tiled_mlp` with GELU; approximate: "tanh", or "none" for the one with erf."""
    if approximate not in APPROXIMATE:
        fail("approximate", repr(approximate), "'tanh' or 'none'")
    return tiled_mlp(x, gate_weight, up_weight, down_weight, APPROXIMATE[approximate], shards)


SELF_CHECKS = {
    "tiled_swiglu": lambda i: i.call(tiled_swiglu, *i.mlp(), shards=2),
    "tiled_geglu": lambda i: i.call(tiled_geglu, *i.mlp(), shards=2),
}
