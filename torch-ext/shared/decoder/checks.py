"""Whether the arguments of a decoder layer's autograd nodes fit together.

A node checks in its forward pass where that is not replayed: a replayed call has the arguments of an earlier one, which was checked.
"""

from typing import Any, Optional, Sequence

import torch

from ..ops.arguments import describe, fail, need_floats
from .projection import Projection, check_projection
from .spec import Inputs, Norm
from .steps import InputTensors, OutputTensors

__all__ = [
    "check_attended", "check_bias", "check_expert_adapter", "check_inputs", "check_like", "check_mlp", "check_stream", "split_groups",
]  # fmt: skip


def split_groups(projections: Sequence, has_o: bool) -> list:
    """The projections of `norm_mlp` by what they read: attention's output, the norm's, the activation's."""
    *inner, down = projections
    return [inner[:1], inner[1:], [down]] if has_o else [inner, [down]]


def check_inputs(spec: Inputs, tensors: InputTensors, projections: Sequence[Projection], sizes: Sequence[int], dtype) -> None:
    """Raises ValueError when shapes, dtypes or devices do not fit."""
    x, norm, q_norm, k_norm, cos, sin, norm_bias = tensors
    head_dim = spec.head_dim
    if x.dim() < 2 or x.shape[:-1].numel() != sizes[0] * sizes[1]:
        fail("x", describe(x), f"[..., hidden] with {sizes[0]} * {sizes[1]} tokens")
    if len(projections) != (3 if spec.rows is None else 1):
        fail("projections", f"{len(projections)} of them", "q, k and v, or a packed one whose rows the description tells apart")
    check_stream(x, norm, "norm_weight", dtype)
    check_bias(x, "norm_bias", norm_bias, spec.norm, norm)
    for i, projection in enumerate(projections):
        check_projection(f"projections[{i}]", projection, spec.rows and sum(spec.rows), x.shape[-1], dtype, x.device)
        if spec.rows is None and projection.weight.shape[0] % head_dim:
            fail(f"projections[{i}].weight", list(projection.weight.shape), f"a multiple of head_dim {head_dim} rows")
    if (q_norm is None) != (k_norm is None):
        fail("k_norm", "None" if k_norm is None else describe(k_norm), "q_norm and k_norm, or neither")
    q_rows, k_rows, *_ = spec.rows or [projection.weight.shape[0] for projection in projections]
    for name, weight, length in (("q_norm", q_norm, q_rows), ("k_norm", k_norm, k_rows)):
        check_like(x, name, weight, (length if spec.whole else head_dim,))
    if (cos is None) != (spec.rotary == "none") or (cos is None) != (sin is None):
        fail("cos", "None" if cos is None else describe(cos), f"angles, or none, as rotary is {spec.rotary!r}")
    width = spec.turned or head_dim
    for name, table in (("cos", cos), ("sin", sin)):
        if table is None or cos is None:
            continue
        fits = table.dim() == 3 and table.shape[0] in (1, sizes[0]) and table.shape[1] == sizes[1] and table.shape[2] in (width, width // 2)
        if not fits or table.shape != cos.shape or table.dtype not in (x.dtype, torch.float32) or table.device != x.device:
            fail(name, describe(table), f"{x.dtype} or torch.float32 [{sizes[0]} or 1, {sizes[1]}, {width} or {width // 2}] on {x.device}")


def check_mlp(spec: tuple, tensors: OutputTensors, projections: Sequence[Projection], sizes, dtype) -> None:
    """Raises ValueError when shapes, dtypes or devices do not fit."""
    x, attended, after, before, behind, before_bias = tensors
    for name, weight in (("before", before), ("after", after), ("behind", behind)):
        check_stream(x, weight, name, dtype)
    check_bias(x, "before_bias", before_bias, spec.outputs.before, before)  # type: ignore[attr-defined]
    for name, weight in (("after", after), ("behind", behind)):
        if weight is not None and spec.outputs.parallel:  # type: ignore[attr-defined]
            fail(name, describe(weight), "None, for the MLP is beside attention")
    has_o = attended is not None
    gated = spec.outputs.gated  # type: ignore[attr-defined]
    if len(projections) - has_o not in ((2, 3) if gated else (2,)):
        first = "o, " if has_o else ""
        wanted = f"{first}gate, up and down, or {first}gate and up packed and down" if gated else f"{first}gate and down"
        fail("projections", f"{len(projections)} of them", wanted)
    *groups, (down,) = split_groups(projections, has_o)
    hidden, inner = x.shape[-1], groups[-1]
    packed = gated and len(inner) == 1
    intermediate = sum(inner[0].weight.shape[:1]) // (2 if packed else 1)
    for name, projection in zip(("gate_up",) if packed else ("gate", "up"), inner):
        check_projection(name, projection, 2 * intermediate if packed else intermediate, hidden, dtype, x.device)
    check_projection("down", down, hidden, intermediate, dtype, x.device)
    if attended is not None:
        check_attended(x, attended, projections[0], dtype)


def check_attended(x: torch.Tensor, attended: torch.Tensor, o: Projection, dtype: torch.dtype) -> None:
    """Raises ValueError when attention's output or its projection does not fit."""
    hidden, features, heads = x.shape[-1], o.weight.shape[-1], attended.dim() == 4
    check_projection("o", o, hidden, features, dtype, x.device)
    found = (*attended.shape[:2], attended.shape[2:].numel()) if heads else attended.shape
    wanted = (*x.shape[:-1], features) if heads else (x.numel() // hidden if hidden else 0, features)
    if found != wanted or attended.dtype != dtype or attended.device != x.device:
        fail("attended", describe(attended), f"{dtype} [tokens, {features}], or with heads, on {x.device}")


def check_like(x: torch.Tensor, name: str, weight: Optional[torch.Tensor], shape: tuple, wide: bool = False) -> None:
    """Raises ValueError for a weight, unless it is None, that is not of a shape and of x's dtype, or float32 with `wide`, and device."""
    dtypes = (x.dtype, torch.float32) if wide else (x.dtype,)
    if weight is not None and (weight.shape != shape or weight.dtype not in dtypes or weight.device != x.device):
        fail(name, describe(weight), f"{x.dtype} {list(shape)} on {x.device}")


def check_stream(x: torch.Tensor, norm: Optional[torch.Tensor], name: str, dtype: torch.dtype) -> None:
    """Raises ValueError when a residual stream or the weight of its norm does not fit."""
    need_floats(x=x)
    if x.dim() == 0 or x.dtype not in (dtype, torch.float32):
        fail("x", describe(x), f"[..., hidden] of {dtype} or torch.float32")
    check_like(x, name, norm, tuple(x.shape[-1:]))


def check_bias(x: torch.Tensor, name: str, bias: Optional[torch.Tensor], norm: Norm, weight: Optional[torch.Tensor]) -> None:
    """Raises ValueError for a norm's bias, unless it is None, that does not fit, or whose norm is no LayerNorm."""
    check_like(x, name, bias, tuple(x.shape[-1:]))
    if bias is not None and (weight is None or not norm.centred):
        fail(name, describe(bias), "None, for the norm is no LayerNorm")


def check_expert_adapter(x: torch.Tensor, name: str, tensors: Any, experts: int, rows: int, columns: int) -> None:
    """Raises ValueError when an adapter of experts [rows, columns] does not fit. tensors: its a and b, None for both without one."""
    a, b = tensors
    rank = 1 if a is None or a.dim() == 0 else max(a.shape[0] // experts, 1)
    for part, tensor, shape in (("a", a, (experts * rank, columns)), ("b", b, (rows, rank * experts))):
        if a is b is None:
            continue
        if tensor is None or tensor.shape != shape or tensor.dtype not in (x.dtype, torch.float32) or tensor.device != x.device:
            found = "None" if tensor is None else describe(tensor)
            fail(f"{name}.{part}", found, f"{x.dtype} or torch.float32 {list(shape)} on {x.device}")
