"""A linear layer whose frozen weight is kept in eight bits.

| of the layer            | what it is                                                                                     |
|-------------------------|------------------------------------------------------------------------------------------------|
| the parameter `codes`   | codes of e4m3 as bytes: integers, which no cast of a model changes, and which get no gradient   |
| the buffer `scale_bits` | their scale, a power of two in float32, as an integer for the same reason                      |
| the property `weight`   | the numbers that both stand for, made anew each time it is read, and not to be written to      |
| in a state dict         | `weight` in float8_e4m3fn and `weight_scale_inv`, as transformers' FineGrainedFP8 has them;    |
|                         | without `saves_codes` the numbers, as `weight`                                                 |
"""

from typing import List, Optional

import torch
from torch import nn
from torch.nn.functional import linear

from ...decoder.nodes import product_dtype
from ...decoder.projection import EightBitWeight
from ...ops.arguments import fail
from ...ops.quantised import E4M3, dense_of, quantise_together
from .weights import is_plain

__all__ = ["BLOCK", "EightBitLinear", "ReadOnly", "dense_of_blocks", "why_not_finite"]

BLOCK = 128  # rows and columns for which FineGrainedFP8 has a scale; all of a weight's are equal here
WRITES = "__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__", "__set__"  # and every method whose name ends in "_"
SHARING = vars(torch._C.TensorBase)["data"].__get__, torch.Tensor.detach  # what gives the same memory again, and is no view
REFUSED = (
    "a weight in eight or four bits cannot be written to: its numbers are made when they are read. Call sixteen_bits(model) first, for "
    "example before merge_and_unload()"
)


class ReadOnly(torch.Tensor):
    """The numbers of a weight in codes. A write would be lost, so it raises RuntimeError."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name, named = getattr(func, "__name__", ""), kwargs or {}
        written = [named.get("out")]
        if name in WRITES or (name.endswith("_") and not name.endswith("__")):
            written += [*args[:1], named.get("tensor"), named.get("input"), named.get("self")]
        written += [one for each in written if isinstance(each, (list, tuple)) for one in each]  # of `torch._foreach_mul_`
        if any(isinstance(each, cls) for each in written):
            raise RuntimeError(REFUSED)
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **named)
            shared = isinstance(found, torch.Tensor) and (found._is_view() or func in SHARING)
            return found.as_subclass(cls) if shared else found


class _Product(torch.autograd.Function):
    """x W^T + bias, which keeps W's codes for the backward pass and makes W anew there."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, codes, scale, bias):
        return linear(x, dense_of(codes, scale, x.dtype), bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[1:3])

    @staticmethod
    def backward(ctx, dy):
        codes, scale = ctx.saved_tensors
        dx = dy @ dense_of(codes, scale, dy.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None


class EightBitLinear(nn.Linear):
    """A torch.nn.Linear in eight bits, as `eight_bits` makes it. Called by itself, it multiplies in its input's dtype, or autocast's."""

    codes: torch.Tensor  # [out, in] uint8
    scale_bits: torch.Tensor  # [1] int32
    dense_dtype: torch.dtype  # of `weight`, when it is read
    saves_codes: bool

    @classmethod
    def take(cls, layer: nn.Linear, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, saves_codes: bool = True) -> None:
        """Makes a torch.nn.Linear one of these, in place, which frees its weight. codes: [out, in] of e4m3; scale: [1] fp32; dtype: of
        `weight`, when it is read; saves_codes: whether state dicts have the codes, or the numbers that they stand for."""
        for name in [name for name in layer._parameters if name != "bias"]:
            del layer._parameters[name]
        layer.__class__ = cls
        assert isinstance(layer, cls)
        layer.dense_dtype, layer.saves_codes = dtype, saves_codes
        layer.codes = nn.Parameter(codes.view(torch.uint8), requires_grad=False)
        layer.register_buffer("scale_bits", scale.view(torch.int32), persistent=False)

    def give_back(self) -> None:
        """Makes it a torch.nn.Linear again, whose frozen weight has the numbers that the codes stand for."""
        weight = self.in_codes().dense(self.dense_dtype)
        del self.codes, self.scale_bits, self.dense_dtype, self.saves_codes
        self.__class__ = nn.Linear  # type: ignore[assignment]
        self._parameters["weight"] = nn.Parameter(weight, requires_grad=False)

    def in_codes(self) -> EightBitWeight:
        return EightBitWeight(self.codes.detach(), self.scale_bits.view(torch.float32))

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        dense = self.in_codes().dense(self.dense_dtype)
        return dense.as_subclass(ReadOnly) if is_plain(dense) else dense

    @weight.setter
    def weight(self, value) -> None:
        raise RuntimeError(REFUSED)

    @property
    def weight_scale_inv(self) -> torch.Tensor:
        """The scale for each block, [blocks of rows, of columns] fp32: one block of a length into which BLOCK-wise ones do not go evenly,
        since transformers divides by their number."""
        counts = [(length, -(-length // BLOCK)) for length in (self.out_features, self.in_features)]
        blocks = [1 if length % count else count for length, count in counts]
        return self.scale_bits.view(torch.float32).repeat(blocks[0], blocks[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias, dtype = self.in_codes(), self.bias, product_dtype(x)
        return _Product.apply(x.to(dtype), weight.codes, weight.scale, None if bias is None else bias.to(dtype))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weight in eight bits"

    def register_parameter(self, name: str, param: Optional[nn.Parameter]) -> None:
        if name == "weight":
            raise RuntimeError(REFUSED)
        super().register_parameter(name, param)

    def _apply(self, fn, recurse=True):
        device = self.scale_bits.device
        if fn(torch.empty((0,), dtype=torch.uint8, device=device)).dtype != torch.uint8:  # `module.type(dtype)` casts integers too
            fail("a weight in eight bits", "to be cast byte by byte", "a cast that leaves integers alone: model.to(dtype)", RuntimeError)
        self.dense_dtype = fn(torch.empty((0,), dtype=self.dense_dtype, device=device)).dtype
        return super()._apply(fn, recurse)

    # ---------------------------------------------------------------- state dicts
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        codes = destination.pop(f"{prefix}codes")
        if not self.saves_codes:
            destination[f"{prefix}weight"] = self.in_codes().dense(self.dense_dtype)
            return
        destination[f"{prefix}weight"], destination[f"{prefix}weight_scale_inv"] = codes.view(E4M3), self.weight_scale_inv

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        """Takes codes with one scale as they are, and rounds everything else anew: a weight in 16 bits, codes with scales of blocks."""
        name, found, scale = f"{prefix}weight", dict(state_dict), None
        weight, scales = found.pop(name, None), found.pop(f"{name}_scale_inv", None)
        if weight is not None:
            why = _why_not_loaded(weight, scales)
            if why:
                error_msgs.append(f"{name} {why}")
                return
            scale = None if scales is None else only_scale(scales)
            if scale is None:
                (weight,), scale = quantise_together([weight if scales is None else dense_of_blocks(weight, scales)])
            found[f"{prefix}codes"] = weight.view(torch.uint8)
        missing: List[str] = []
        before = len(error_msgs)
        super()._load_from_state_dict(found, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        missing_keys += [name if key == f"{prefix}codes" else key for key in missing]
        if scale is not None and len(error_msgs) == before:
            self.scale_bits = scale.to(self.codes.device).view(torch.int32)  # which `assign` may have moved


def _why_not_loaded(weight: torch.Tensor, scales: Optional[torch.Tensor]) -> str:
    """Why a weight [out, in] of a state dict is not taken, "" where it is. scales: what goes with its codes, None for none."""
    if scales is None:
        if weight.dtype == E4M3:
            return "is in eight bits without weight_scale_inv, the scale of its codes"
        if weight.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            return f"is {weight.dtype}, expected torch.float8_e4m3fn with weight_scale_inv, or numbers in 16 or 32 bits"
        return why_not_finite(weight)
    if weight.dtype != E4M3:
        return f"is {weight.dtype} with weight_scale_inv, expected torch.float8_e4m3fn"
    blocks = [-(-length // BLOCK) for length in weight.shape]
    if scales.numel() != 1 and list(scales.shape) != blocks and only_scale(scales) is None:
        return f"has scales {list(scales.shape)}, expected {blocks}, one for each block of {BLOCK} x {BLOCK}, or one for all"
    return ""


def why_not_finite(weight: torch.Tensor) -> str:
    """Why numbers of a state dict are not taken, "" where they are: one infinity or NaN would spread to all that share its scale."""
    known = is_plain(weight) and not weight.is_meta
    return "is not finite, expected numbers without infinities and NaN" if known and not bool(weight.isfinite().all()) else ""


def only_scale(scales: torch.Tensor) -> Optional[torch.Tensor]:
    """The scale [1] fp32 of all blocks, None where there are several, or none that is a power of two."""
    flat = scales.flatten().float()
    is_power = float(flat[0]) > 0 and float(flat[0].frexp().mantissa) == 0.5
    return flat[:1].clone() if is_power and bool((flat == flat[0]).all()) else None


def dense_of_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers [out, in] fp32 that codes with a scale a block of BLOCK x BLOCK stand for. scales: [blocks of rows, of columns], or one
    for all blocks."""
    rows, columns = codes.shape
    if scales.numel() == 1:
        return codes.float() * scales.float()
    return codes.float() * scales.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
