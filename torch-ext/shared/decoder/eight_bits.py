"""The products of a group of projections in eight bits, inside an autograd node, by `torch._scaled_mm`. Nothing of it outlives a pass but
the scales, so there is no state, and a second run of the same numbers gives the same bits.

    y = x W^T        a scale a row of x, and one a row of W (an output)
    dx = dy W        a scale a row of dy, and one for all of W: the largest of its rows'
    dw = dy^T x      a scale for all of dy, and one for all of x: the largest of their rows'

A product reads both factors along what it adds up, so W, dy and x are written transposed for the second and the third: W and x from bf16,
and dy from its codes in rows, which are half the bytes and are rounded a second time only below 2^-6 of the scale. The kernels that make
dy, and x for y, can therefore write codes alone. A scale that is too large costs nothing up to 2^12 (e4m3 is a floating point format), so
the largest of the rows' scales will do, and nothing has to be searched for a maximum. A product in e4m3 has 28 dB, one in bf16 55 dB: that
is the rounding of the factors, and the sums are exact in dx and dw; in y they are not quite (`use_fast_accum`), which adds nothing that can
be seen beside it.

A weight that is kept in codes (`EightBitWeight`) has one scale, which the weights of one input share, since dx adds up over all their rows:
y reads the codes as they lie, and dx the same codes transposed. Those of several weights are read as one matrix where they lie side by
side, and are copied into one in each pass where they do not.
"""

from typing import Dict, List, Optional, Sequence, Tuple, Union

import torch

from ..ops.operators import constant_when_traced
from ..ops.quantised import E4M3, STEP, Operand, Quantised, quantise_rows, quantise_transposed
from ..ops.second_run import are_watched
from ..runtime.device import why_no_kernels
from ..runtime.launch import INT32_MAX, ships
from ..runtime.torch_version import numbers_in
from .projection import CodedWeight, EightBitWeight, Group, Projection

__all__ = ["FEWEST", "KINDS", "EightBits", "fewest_of", "groups_in_eight", "why_not_eight"]

BF16 = torch.bfloat16
KINDS = ("bf16", "fp8")  # of products
# Of tokens. The twelve products of a layer of Qwen3-8B, quantising included, take 0.68 of bf16's time at 8192 tokens on an H200, 0.87 at
# 2048 and 1.09 at 1024.
FEWEST = 2048
# So many times more of frozen weights in bf16, which are quantised for two products instead of three: LoRA over twelve layers takes 0.82 of
# bf16's time at 4096 tokens and 1.13 at 2048.
OF_FROZEN = 2
Weight = Union[torch.Tensor, EightBitWeight]
CAPABILITY = (9, 0)  # of the GPUs on which this was tried
TORCH, CUDA = (2, 9), (12, 9)  # from which on cuBLAS multiplies with a scale a row
_devices: Dict[Tuple[str, int], str] = {}  # what `why_not_on` said of each


def _scales_rows_on_cpu() -> bool:
    codes, scales = torch.zeros((STEP, STEP)).to(torch.float8_e4m3fn), torch.ones((STEP, 1))
    try:
        torch._scaled_mm(codes, codes.t(), scales, scales.t(), out_dtype=BF16)
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return True


def why_not_on(kind: str, index: int) -> str:
    """Why a device, of a type and with an index, has no products in eight bits; "" where it has. It may wait for the device."""
    if numbers_in(torch.__version__) < TORCH:
        return f"torch is {torch.__version__}, and they need 2.9"
    if kind == "cuda":
        if numbers_in(torch.version.cuda or "") < CUDA:
            return f"torch is built for CUDA {torch.version.cuda}, and they need 12.9"
        capability = torch.cuda.get_device_capability(index)
        if capability != CAPABILITY:
            return "they were tried on GPUs of compute capability {}.{} alone, and this one has {}.{}".format(*CAPABILITY, *capability)
        if not ships("quantise"):
            return "this package does not ship the kernels that make their operands"
        return why_no_kernels(torch.device(kind, index))
    return "" if kind == "meta" or (kind == "cpu" and _scales_rows_on_cpu()) else f"this torch has none on {kind}"


@constant_when_traced
def _why_not_here(kind: str, index: int) -> str:
    """`why_not_on`, asked once."""
    if (kind, index) not in _devices:
        _devices[kind, index] = why_not_on(kind, index)
    return _devices[kind, index]


def fewest_of(group: Sequence[Projection]) -> int:
    """The tokens from which on products of projections of one input pay in eight bits."""
    made_for_two = not any(isinstance(each.weight, CodedWeight) or each.weight.requires_grad for each in group)
    return FEWEST * (OF_FROZEN if made_for_two else 1)


def why_not_eight(group: Sequence[Projection], dtype: torch.dtype, tokens: Optional[int] = None) -> str:
    """Why the products of projections of one input are not made in eight bits; "" where they are. dtype: of the products otherwise;
    tokens: of the input, None for many."""
    for projection in group:
        weight = projection.weight
        if isinstance(weight, CodedWeight) and not isinstance(weight, EightBitWeight):
            return "a weight is in four bits"
        stored = dtype if isinstance(weight, CodedWeight) else weight.dtype
        if stored != BF16 or dtype != BF16:
            return f"a weight is {stored} and the products are {dtype}, expected torch.bfloat16"
        if weight.shape[0] % STEP or weight.shape[1] % STEP:
            return f"a weight is {list(weight.shape)}, expected multiples of {STEP}"
        if projection.bias is not None and projection.bias.dtype != BF16:
            return f"a bias is {projection.bias.dtype}, expected torch.bfloat16"
    first = group[0].weight
    if tokens is not None and tokens < fewest_of(group):
        return f"there are {tokens} tokens, and they pay from {fewest_of(group)} on"
    if tokens is not None and tokens * max(first.shape[1], sum([each.weight.shape[0] for each in group])) > INT32_MAX:
        return f"{tokens} tokens at once are more numbers than their kernels count"
    index = first.device.index
    return _why_not_here(first.device.type, 0 if index is None else index)


def groups_in_eight(groups: Sequence[Sequence[Projection]], dtype: torch.dtype, x: torch.Tensor) -> Tuple[int, ...]:
    """The places of the groups whose products are made in eight bits. x: [..., features] of the tokens."""
    tokens = x.numel() // max(x.shape[-1], 1)
    return tuple([i for i, group in enumerate(groups) if group and not why_not_eight(group, dtype, tokens)])


def _multiplied(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, fast: bool = False, bias=None, out=None):
    """a @ b.T of codes along their rows, in bf16, with scales a row or one for all."""
    if a_scale.numel() > 1:
        a_scale, b_scale = a_scale.unsqueeze(1), b_scale.unsqueeze(0)
    if out is None or are_watched():
        found = torch._scaled_mm(a, b.t(), a_scale, b_scale, bias, None, BF16, fast)
        return found if out is None else out.copy_(found)
    return torch._scaled_mm(a, b.t(), a_scale, b_scale, bias, None, BF16, fast, out=out)


def _write_rows(weight: Weight, out: Quantised) -> None:
    """A weight with a scale a row, in `out`; of one that is in codes, the bytes are copied."""
    if isinstance(weight, EightBitWeight):
        out.codes.copy_(weight.codes)
        out.scales.copy_(weight.scale)
    else:
        quantise_rows(weight, out)


def _as_they_lie(weights: Sequence[Weight], whole: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """The codes [all rows, in] of weights that are all in codes, where one matrix has them; else None. whole: as of `EightBits`."""
    if not all(isinstance(weight, EightBitWeight) for weight in weights):
        return None
    return weights[0].codes if len(weights) == 1 else whole  # type: ignore[union-attr]


class EightBits:
    """The products of one group in a forward or a backward pass. What they multiply may be in codes already."""

    def __init__(self, group: Group, weights: Sequence[Weight], whole: Optional[torch.Tensor]):
        """weights: [out, in] of each projection; whole: all of them, or all of their codes, where they lie side by side."""
        self.rows = group.rows
        self._codes = _as_they_lie(weights, whole)
        self.weights: Sequence[Weight] = weights if whole is None or self._codes is not None else [whole]
        self._x: Optional[Quantised] = None
        self._w: Optional[Quantised] = None
        self._dy: Optional[Quantised] = None  # between two gradients that read it
        self.scales: Tuple[torch.Tensor, ...] = ()  # of the rows of x and of the weights

    def begin(self, x: Operand) -> None:
        """Quantises both factors of y. x: [tokens, in]."""
        self._x = x if isinstance(x, Quantised) else quantise_rows(x)
        if self._codes is not None:
            self._w = Quantised(self._codes, self._scales_of_rows())
        else:
            self._w, start = Quantised.empty(sum(self.rows), self._x.codes.shape[1], self._x.codes.device), 0
            for weight in self.weights:
                _write_rows(weight, self._w.rows(start, start + weight.shape[0]))
                start += weight.shape[0]
        self.scales = self._x.scales, self._w.scales

    def _scales_of_rows(self) -> torch.Tensor:
        """[all rows] fp32, of weights in codes."""
        parts = [weight.scale.expand(rows) for weight, rows in zip(self.weights, self.rows)]  # type: ignore[union-attr]
        return torch.cat(parts, out=torch.empty((sum(self.rows),), dtype=torch.float32, device=parts[0].device))

    def forward(self, x: torch.Tensor, bias: Optional[torch.Tensor], in_one: bool, out: Optional[torch.Tensor]) -> List[torch.Tensor]:
        """y [tokens, out] of each projection. x: [tokens, in], or the codes of what `begin` had; bias: [all rows]; in_one: whether all are
        one product, as they are with `out`, [tokens, all rows], where they go side by side."""
        if self._x is None:  # in the backward pass, which loads the scales
            self.begin(Quantised(x, self.scales[0]) if x.dtype == E4M3 else x)
        (x8, x_scales), (w8, w_scales) = self._x, self._w  # type: ignore[misc]  # `begin` has set them
        self._x = self._w = None
        if in_one or out is not None:
            return list(_multiplied(x8, w8, x_scales, w_scales, True, bias, out).split(self.rows, 1))
        biases = [None] * len(self.rows) if bias is None else bias.split(self.rows)
        parts = zip(w8.split(self.rows), w_scales.split(self.rows), biases)
        return [_multiplied(x8, part, x_scales, scales, True, of_part) for part, scales, of_part in parts]

    def _of_gradient(self, dy: Operand, again: bool) -> Quantised:
        """dy in codes. again: whether they are asked for once more."""
        found = self._dy
        if found is None:
            found = dy if isinstance(dy, Quantised) else quantise_rows(dy)
        self._dy = found if again else None
        return found

    def input_gradient(self, dy: Operand, weights_follow: bool = False) -> torch.Tensor:
        """dx [tokens, in]. dy: [tokens, all rows]; weights_follow: whether `weight_gradients` is called afterwards."""
        found, scales = self._of_gradient(dy, weights_follow), self.scales[1]
        first = self.weights[0]
        one = len(self.weights) == 1 and isinstance(first, EightBitWeight)
        top = first.scale if one else scales.amax(0, keepdim=True)  # type: ignore[union-attr]
        w = Quantised.empty(first.shape[1], found.codes.shape[1], top.device)
        if self._codes is not None:
            quantise_transposed(Quantised(self._codes, scales), top, w)
        else:
            self._write_transposed(top, w)
        return _multiplied(found.codes, w.codes, found.scales, w.scales)

    def _write_transposed(self, top: torch.Tensor, out: Quantised) -> None:
        """The weights that do not lie in one matrix, transposed, side by side. top: the scale of all."""
        start = 0
        for weight in self.weights:
            stop = start + weight.shape[0]
            source = Quantised(weight.codes, self.scales[1][start:stop]) if isinstance(weight, EightBitWeight) else weight
            quantise_transposed(source, top, out._replace(codes=out.codes[:, start:stop]))
            start = stop

    def weight_gradients(self, dy: Operand, x: torch.Tensor, wanted: Sequence[bool]) -> List[Optional[torch.Tensor]]:
        """dw [out, in] of each projection, None for those that are not wanted. dy, x: [tokens, all rows], [tokens, in]."""
        if not any(wanted):
            return [None] * len(wanted)
        found = self._of_gradient(dy, self._dy is None)
        dy_top, x_top = (scales.amax(0, keepdim=True) for scales in (found.scales, self.scales[0]))
        dys, xs = quantise_transposed(found, dy_top).codes.split(self.rows), quantise_transposed(x, x_top).codes
        return [_multiplied(part, xs, dy_top, x_top) if need else None for part, need in zip(dys, wanted)]
