"""What lies around the GEMMs of experts: the rows of a token, the gate with its biases and scores, and the sum over a token's experts."""

import functools
from typing import NamedTuple, Optional, Tuple

import torch

from ..runtime.device import kernels_run_on
from ..runtime.launch import Kernel, ships
from .arrays import accumulation_dtype, within_reach
from .grouped_gemm import Groups
from .products import accumulate_product
from .routing import row_blocks

__all__ = ["Gate", "dense", "gate_backward", "gate_forward", "token_rows", "token_sum"]

Optionals = Optional[torch.Tensor]


def _blocks_grid(c, gate_up, bias, scores, blocks, out, *_):
    return (blocks.shape[1], -(-out.shape[1] // c["COLS"]))


def rows_grid(c, gate_up, scores, out, *_):
    return (-(-out.shape[0] // c["ROWS"]), -(-out.shape[1] // c["COLS"]))


def _tokens_grid(c, y, position, *rest):
    return (position.shape[0], -(-y.shape[1] // c["COLS"]))


_clamped_forward_kernel = Kernel("clamped_gate_forward", grid=_blocks_grid)

_clamped_backward_kernels = [Kernel("clamped_gate_backward", grid=_blocks_grid, where={"WEIGHTS": weights}) for weights in (0, 1)]

_bias_kernel = Kernel("expert_bias_sum", grid=lambda c, partial, stops, out: (-(-out.shape[1] // c["COLS"]), out.shape[0]))

_swiglu_forward_kernel = Kernel("swiglu_rows_forward", grid=rows_grid)

_any_swiglu_backward_kernel = Kernel("swiglu_rows_backward", grid=rows_grid)

_rows_kernel = Kernel("token_rows", grid=_tokens_grid, reads=("x",))

_sum_kernel = Kernel("token_sum", grid=_tokens_grid)

_sum_bias_kernel = Kernel("token_sum_bias", grid=_tokens_grid, reads=("expert", "scores", "bias"))


class Gate(NamedTuple):
    """What lies between the GEMMs. interleaved: gate and up of a column side by side, else gate before up. alpha: of GPT-OSS's
    gate, with its limit; 0 for silu(gate) * up."""

    interleaved: bool
    alpha: float
    limit: float

    def split(self, gate_up: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        if self.interleaved:
            return gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate_up.chunk(2, -1)
        return gate, up

    def apply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[..., 2 * width], its bias added, -> [..., width]."""
        g, u = self.split(gate_up)
        if not self.alpha:
            return torch.nn.functional.silu(g) * u
        g, u = g.clamp(max=self.limit), u.clamp(-self.limit, self.limit)
        return (u + 1) * (g * torch.sigmoid(self.alpha * g))

    def join(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.stack((gate, up), -1).flatten(-2) if self.interleaved else torch.cat((gate, up), -1)


def _rows_expert(ends: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows]: the expert of each row; the last one's for rows of none."""
    number = torch.arange(rows, dtype=ends.dtype, device=ends.device)
    return torch.searchsorted(ends, number, right=True).clamp(max=ends.shape[0] - 1)


def _biased(gate_up, bias, ends):
    x = gate_up.to(accumulation_dtype(gate_up.dtype))
    return x if bias is None else x + bias[_rows_expert(ends, x.shape[0])]


def gate_reference(gate_up, bias, ends, gate: Gate) -> torch.Tensor:
    """The gated rows in the accumulation dtype, before the routing weights."""
    return gate.apply(_biased(gate_up, bias, ends))


def gate_backward_reference(d, gate_up, bias, ends, gate: Gate) -> torch.Tensor:
    """The gradient of gate_up in the accumulation dtype; d: that of the gated rows."""
    g, u = gate.split(_biased(gate_up, bias, ends))
    if not gate.alpha:
        s = torch.sigmoid(g)
        return gate.join(d * u * (s + g * s * (1 - s)), d * g * s)
    keep_gate, keep_up = g <= gate.limit, u.abs() <= gate.limit
    g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
    s = torch.sigmoid(gate.alpha * g)
    dg = d * (u + 1) * s * (1 + gate.alpha * g * (1 - s))
    return gate.join(torch.where(keep_gate, dg, 0.0), torch.where(keep_up, d * g * s, 0.0))


def token_sum_reference(y: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """[tokens, columns] in the accumulation dtype: the sum of each token's rows of y."""
    there = position < y.shape[0]
    rows = y.to(accumulation_dtype(y.dtype))[torch.where(there, position, 0)]
    return torch.where(there[..., None], rows, 0.0).sum(1)


@functools.lru_cache(maxsize=None)
def _swiglu_backward_kernel(columns: int, weights: bool) -> Kernel:
    return Kernel("swiglu_rows_backward", grid=rows_grid, where={"COLS": columns, "WEIGHTS": int(weights)})


def _piece_of(dgated: torch.Tensor, gate_up: torch.Tensor, weights: bool, gate: Gate) -> int:
    """The columns of a piece of a row, each of which has a sum of its own: of swiglu's the longest that divide the width, if any."""
    if gate.alpha:
        return _clamped_backward_kernels[weights].constant("COLS")
    lengths, aligned = _any_swiglu_backward_kernel.constants("COLS"), (dgated.data_ptr() | gate_up.data_ptr()) % 16 == 0
    return max((length for length in lengths if aligned and dgated.shape[1] % length == 0), default=min(lengths))


def _kernels_for(gate_up: torch.Tensor, bias: Optionals, gate: Gate, *others: Optionals) -> bool:
    """There are kernels for GPT-OSS's gate (clamped, interleaved, with a bias) and Qwen3-MoE's (neither of them). others: what else a
    kernel reads. Only packages for models that need them ship GPT-OSS's; the others compute its gate in PyTorch."""
    same = gate.interleaved == bool(gate.alpha) == (bias is not None) and gate_up.shape[0] > 0 and within_reach(gate_up.numel())
    return same and gate_up.dtype != torch.float64 and kernels_run_on(gate_up, bias, *others) and (not gate.alpha or ships("clamped_gate"))


def _words(gate_up: torch.Tensor, bias: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns gate and up of a column as one 32-bit word in half precision, where the kernels take them so."""
    bias = bias.contiguous()
    whole = gate_up.shape[1] % (2 * _clamped_forward_kernel.constant("COLS")) == 0
    packs = gate_up.element_size() == 2 and whole and (bias.data_ptr() | gate_up.data_ptr()) % 16 == 0
    return (gate_up.view(torch.int32), bias.view(torch.int32)) if packs else (gate_up, bias)


def gate_forward(gate_up, bias, scores, ends, gate: Gate) -> torch.Tensor:
    """The gated rows times their scores [rows] fp32. ends: of `Routing`, needed with a bias."""
    if not _kernels_for(gate_up, bias, gate, scores, ends):
        gated = gate_reference(gate_up, bias, ends, gate)
        return (gated * scores[:, None]).to(gate_up.dtype)
    out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
    if not gate.alpha:
        _swiglu_forward_kernel(gate_up, scores, out)
    else:
        blocks, _ = row_blocks(ends, gate_up.shape[0], _clamped_forward_kernel.constant("ROWS"))
        _clamped_forward_kernel(*_words(gate_up, bias), scores, blocks, out, gate.alpha, gate.limit)
    return out


def gate_backward(dgated, gate_up, bias, scores, ends, gate: Gate, weights: bool) -> tuple:
    """(dgate_up, gated rows again, dscores [rows], dbias), written over gate_up and dgated where kernels run.

    dgated: the gradient of the gated rows, not yet multiplied by the scores. ends: as of `gate_forward`. weights: False when neither the
    gated rows nor dbias are needed; then they are None.
    """
    if not _kernels_for(gate_up, bias, gate, dgated, scores, ends):
        d = dgated.to(accumulation_dtype(dgated.dtype))
        gated = gate_reference(gate_up, bias, ends, gate)
        dscores = (d * gated).sum(1)
        dgate_up = gate_backward_reference(d * scores[:, None], gate_up, bias, ends, gate)
        dbias = None
        if weights and bias is not None:
            dbias = torch.stack([dgate_up[rows].sum(0) for _, rows in Groups(ends, dgate_up.shape[0]).slices()]).to(bias.dtype)
        scored = (gated * scores[:, None]).to(gate_up.dtype) if weights else None
        return dgate_up.to(gate_up.dtype), scored, dscores, dbias
    rows, width = dgated.shape
    new = {"dtype": torch.float32, "device": dgated.device}
    columns = _piece_of(dgated, gate_up, weights, gate)
    dscores = torch.empty((rows, -(-width // columns)), **new)
    dbias = None
    if not gate.alpha:
        _swiglu_backward_kernel(columns, weights)(gate_up, scores, dgated, dscores)
    else:
        blocks, stops = row_blocks(ends, rows, _clamped_forward_kernel.constant("ROWS"))
        partial = torch.empty((blocks.shape[1] if weights else 1, 2 * width), **new)
        tensors = (*_words(gate_up, bias), scores, blocks, dgated, dscores, partial)
        _clamped_backward_kernels[weights](*tensors, gate.alpha, gate.limit)
        if weights:
            dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
            _bias_kernel(partial, stops, dbias)
    return gate_up, dgated if weights else None, dscores.sum(1), dbias


def token_rows(x: torch.Tensor, order: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """[rows, columns]: for each row the columns of its token in x: [tokens, columns]. order, position: of `Routing`. What rows of no expert
    hold is undefined where kernels run."""
    reaches = within_reach(x.numel(), order.shape[0] * x.shape[1])
    if x.dtype == torch.float64 or not x.numel() or not reaches or not kernels_run_on(x, position):
        return x[order // position.shape[1]]
    out = x.new_empty((order.shape[0], x.shape[1]))
    _rows_kernel(x, position, out)
    return out


def token_sum(y, position, expert=None, scores=None, bias=None) -> torch.Tensor:
    """[tokens, columns]: the sum of each token's rows of y; with a bias, of its experts' biases times their scores too."""
    reaches = within_reach(y.numel(), position.shape[0] * y.shape[1])
    if y.dtype == torch.float64 or not reaches or not kernels_run_on(y, position, expert, scores, bias):
        total = token_sum_reference(y, position)
        if bias is not None:
            total = total + dense(expert, scores, bias.shape[0], total.dtype) @ bias.to(total.dtype)
        return total.to(y.dtype)
    out = y.new_empty((position.shape[0], y.shape[1]))
    if bias is None:
        _sum_kernel(y, position, out)
    elif not ships("clamped_gate"):
        _sum_kernel(y, position, out)
        accumulate_product(out, dense(expert, scores, bias.shape[0], y.dtype), bias)
    else:
        _sum_bias_kernel(y, position, expert.clamp(-1, bias.shape[0]).to(torch.int32), scores.to(torch.float32), bias, out)
    return out


def dense(expert, scores, experts, dtype) -> torch.Tensor:
    """[tokens, experts]: the routing weights, zero for the experts that a token does not go to."""
    numbers = torch.arange(experts, device=expert.device)
    return torch.where(expert[:, :, None] == numbers, scores[:, :, None].to(accumulation_dtype(dtype)), 0.0).sum(1).to(dtype)
