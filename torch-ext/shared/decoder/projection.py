"""Linear projections of one input, as data: their tensors, their metadata, and how a node retrieves both.

    y = x @ weight.T + bias + scaling * (dropout(x) @ a.T @ b.T + adapter_bias)          (LoRA, arXiv 2106.09685)
"""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union, final

import torch
from torch.nn.functional import dropout, linear

from ..ops.arguments import fail
from ..ops.neighbours import side_by_side
from ..ops.operators import KEPT, constant
from ..ops.quantised import E4M3, dense_of
from ..runtime.replay import IDENTITIES

__all__ = [
    "FP32", "SIZE", "CodedWeight", "EightBitWeight", "FourBitWeight", "Group", "NodeLayout", "PartNeeds", "Parts", "Projection",
    "by_projection", "check_projection", "flat_parts", "in_parts", "is_traceable", "layout_of", "need_traceable", "needs_in_parts",
    "projection_of", "projection_reference", "told_of",
]  # fmt: skip

FP32 = torch.float32


class CodedWeight:
    """A frozen weight [out, in] that is kept in fewer bits than it is multiplied in, and is no tensor to autograd, which saves none."""

    __slots__ = ()
    requires_grad = False
    shape: Any
    device: Any

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Makes the weight for one product at a time."""
        raise NotImplementedError


@final
class EightBitWeight(CodedWeight):
    """A weight in codes of e4m3, with one scale that is a power of two. codes: [out, in], of e4m3 or its bytes; scale: [1] fp32."""

    __slots__ = ("codes", "scale")
    codes: torch.Tensor
    scale: torch.Tensor

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor):
        self.codes, self.scale = codes if codes.dtype == E4M3 else codes.view(E4M3), scale

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return dense_of(self.codes, self.scale, dtype)


@final
class FourBitWeight(CodedWeight):
    """A weight [out, in] that another library keeps in four bits. dequantize: the library's function of the weight and its state."""

    __slots__ = ("weight", "dequantize")
    weight: Any  # a tensor with a `quant_state`, of a class that is not imported here

    def __init__(self, weight: torch.Tensor, dequantize):
        self.weight, self.dequantize = weight, dequantize

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.weight.quant_state.shape)

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return self.dequantize(self.weight.data, self.weight.quant_state).to(dtype)


class Projection(NamedTuple):
    """One linear layer.

    weight: [out, in]; bias: [out] or None. a: [rank, in] and b: [out, rank] of its adapter, or None for both; adapter_bias: [out] or None.
    Each is of the dtype in which products are made, or wider: then it is rounded to that, once a forward pass, and its gradient is of its
    own dtype. scaling: of the adapter, its bias included. dropout: the probability with which an element of the adapter's input is zeroed.
    """

    weight: Union[torch.Tensor, CodedWeight]
    bias: Optional[torch.Tensor] = None
    a: Optional[torch.Tensor] = None
    b: Optional[torch.Tensor] = None
    adapter_bias: Optional[torch.Tensor] = None
    scaling: float = 1.0
    dropout: float = 0.0


class Parts(NamedTuple):
    """The tensors of a projection, their gradients or their dtypes. A weight may be a `CodedWeight`."""

    weight: Any = None
    bias: Any = None
    a: Any = None
    b: Any = None
    adapter_bias: Any = None


class PartNeeds(NamedTuple):
    """Which tensors of a projection need a gradient."""

    weight: bool
    bias: bool
    a: bool
    b: bool
    adapter_bias: bool


SIZE = len(Parts._fields)


def tensors_of(projections: Sequence[Projection]) -> list:
    """Lists the tensors of projections, as an autograd function takes them."""
    return [part for projection in projections for part in projection[:SIZE]]


def by_projection(values: Sequence) -> List[Sequence]:
    """Cuts what is listed for each of `tensors_of` by projection."""
    return [values[start : start + SIZE] for start in range(0, len(values), SIZE)]


def in_parts(tensors: Sequence) -> List[Parts]:
    """Cuts what `tensors_of` lists by projection."""
    return [Parts._make(each) for each in by_projection(tensors)]


def flat_parts(*groups: Sequence[Parts]) -> list:
    """Lists what the parts of all projections hold, in the order of `tensors_of`."""
    return [tensor for group in groups for parts in group for tensor in parts]


def needs_in_parts(needs: Sequence) -> List[PartNeeds]:
    """Cuts by projection what is listed for each of `tensors_of`: whether it needs a gradient."""
    return [PartNeeds._make(each) for each in by_projection(needs)]


def is_traceable(projection: Projection) -> bool:
    """Whether a graph may contain a projection: nothing is drawn from a generator, and the weight is a tensor."""
    return not projection.dropout and not isinstance(projection.weight, CodedWeight)


def need_traceable(projections: Sequence[Projection]) -> None:
    """Raises ValueError for what a graph has no operator for: `is_traceable` says so first."""
    for i, projection in enumerate(projections):
        if not is_traceable(projection):
            fail(f"projections[{i}]", "with dropout, or a weight in codes", "neither, where torch.compile or torch.export traces")


class Told(NamedTuple):
    """Stands in for a tensor of a projection: all that its `Group` reads."""

    shape: Sequence[int]  # the first number of it
    dtype: torch.dtype


def told_of(projection: Projection) -> tuple:
    """All of a projection without dropout but its tensors, as constants of a graph."""
    rank, rows = 0 if projection.a is None else constant(projection.a.shape[0]), constant(projection.weight.shape[0])
    parts: tuple = projection[:SIZE]
    return rows, rank, constant(projection.scaling), tuple([None if part is None else part.dtype for part in parts])


def projection_of(told: Sequence) -> Projection:
    """Rebuilds a projection from JSON of what `told_of` returned, with a `Told` in place of each tensor."""
    rows, rank, scaling, dtypes = told
    lengths = rows, rows, rank, rows, rows  # of `Parts`
    parts = [None if dtype is None else Told((length,), getattr(torch, dtype[len("torch.") :])) for length, dtype in zip(lengths, dtypes)]
    return Projection._make([*parts, scaling, 0.0])


def projection_reference(x: torch.Tensor, projection: Projection) -> torch.Tensor:
    """A projection in PyTorch, which can differentiate it. x: [..., in], of the dtype in which products are made."""
    weight, bias, a, b, adapter_bias, scaling, probability = projection
    dtype = x.dtype
    dense = weight.dense(dtype) if isinstance(weight, CodedWeight) else weight.to(dtype)
    y = linear(x, dense, None if bias is None else bias.to(dtype))
    if a is None or b is None:
        return y
    low = linear(dropout(x, probability) if probability else x, a.to(dtype))
    return y + linear(low, b.to(dtype), None if adapter_bias is None else adapter_bias.to(dtype)) * scaling


def check_projection(name: str, projection: Projection, rows: Optional[int], columns: int, dtype: torch.dtype, device) -> None:
    """Raises ValueError when shapes, dtypes or devices of a projection do not fit."""
    weight, bias, a, b, adapter_bias, *_ = projection
    if len(weight.shape) != 2 or rows not in (None, weight.shape[0]) or weight.shape[1] != columns or weight.device != device:
        fail(f"{name}.weight", f"{list(weight.shape)} on {weight.device}", f"[{rows or 'any'}, {columns}] on {device}")
    if not isinstance(weight, CodedWeight) and weight.dtype not in (dtype, FP32):
        fail(f"{name}.weight", f"{weight.dtype} {list(weight.shape)} on {weight.device}", f"{dtype} or torch.float32")
    if (a is None) != (b is None) or (a is None and adapter_bias is not None):
        fail(name, "half of an adapter", "a and b, or neither")
    out, rank = weight.shape[0], 0 if a is None else a.shape[0]
    of_parts = (("bias", bias, (out,)), ("a", a, (rank, columns)), ("b", b, (out, rank)), ("adapter_bias", adapter_bias, (out,)))
    for part, tensor, shape in of_parts:
        if tensor is not None and (tensor.shape != shape or tensor.dtype not in (dtype, FP32) or tensor.device != device):
            found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            fail(f"{name}.{part}", found, f"{dtype} or torch.float32 {list(shape)} on {device}")


class Group:
    """All of the projections of one input but their tensors: what a node of them depends on beside the tensors that it gets."""

    def __init__(self, projections: Sequence[Projection], dtype: torch.dtype, eight: bool = False):
        """dtype: of the products. eight: whether they are made in eight bits (eight_bits.py), and of `dtype` in their results alone."""
        self.dtype, self.eight = dtype, eight
        self.tensors = SIZE * len(projections)
        self.rows = [sum(projection.weight.shape[:1]) for projection in projections]  # 0 of a scalar, which is refused later
        self.coded = any(isinstance(projection.weight, CodedWeight) for projection in projections)
        self.dtypes = [Parts._make([getattr(part, "dtype", None) for part in projection[:SIZE]]) for projection in projections]
        self.spans: Dict[int, slice] = {}  # of each projection with an adapter: its columns in `low`
        start = 0
        for i, projection in enumerate(projections):
            if projection.a is not None:
                self.spans[i] = slice(start, start + projection.a.shape[0])
                start = self.spans[i].stop
        self.rank = start
        self.scalings = [projection.scaling for projection in projections]
        self.dropouts = [projection.dropout for projection in projections]
        self.drops = any(self.dropouts[i] for i in self.spans)
        self.biased = any(projection.bias is not None for projection in projections)
        rounded = any(of.weight not in (None, dtype) for of in self.dtypes)
        self.rounds_weights = rounded and not self.coded  # all of them into one matrix
        self.makes_a = len(self.spans) > 1 or any(self.dtypes[i].a != dtype for i in self.spans)  # one matrix of all
        self.replayable = not self.drops and not any(isinstance(projection.weight, FourBitWeight) for projection in projections)


class NodeLayout:
    """All of a node but its tensors: its description, and projections by what they read. There is one object for each combination, unless
    `replayable` is False: then what the node computes does not follow from its tensors alone."""

    __slots__ = ("coded", "count", "dtype", "forms", "groups", "neighbours", "places", "replayable", "spec")
    spec: Any  # the description of its node: `Inputs`, `Outputs` or the sparse half's

    def __init__(self, spec: tuple, groups: Sequence[Sequence[Projection]], dtype: torch.dtype, eights: Sequence[int] = ()):
        """dtype: of the products. eights: the places of the groups whose products are made in eight bits."""
        self.spec, self.dtype = spec, dtype
        self.forms: dict = {}  # of `node.Form`, by node and what is present of its tensors
        self.groups = [Group(group, dtype, i in eights) for i, group in enumerate(groups)]
        self.replayable = is_replayable(spec) and all(group.replayable for group in self.groups)
        parts = [part for group in groups for part in tensors_of(group)]
        self.count = len(parts)
        # An autograd function gets the tensors that are not None: of twenty arguments sixteen would be.
        self.places = [i for i, part in enumerate(parts) if part is not None]
        self.coded = [i for i, place in enumerate(self.places) if isinstance(parts[place], CodedWeight)]  # among those
        inner = self.groups[-2] if len(self.groups) > 1 else self.groups[-1] if self.groups else None
        start = sum(group.tensors for group in self.groups[:-2]) if len(self.groups) > 1 else 0
        several = inner is not None and len(inner.rows) > 1 and (inner.eight or not inner.coded)
        weights = range(start, start + inner.tensors, SIZE) if inner is not None and several else ()
        self.neighbours = [self.places.index(place) for place in weights]

    def present(self, tensors: Sequence) -> list:
        """The tensors of all projections, without those that are absent."""
        return [tensors[place] for place in self.places]

    def all_of(self, present: Sequence) -> list:
        """The list that `present` was taken from, or of another thing for each of these tensors; None in the other places."""
        found: list = [None] * self.count
        for place, one in zip(self.places, present):
            found[place] = one
        return found

    def whole_of(self, present: Sequence) -> Optional[torch.Tensor]:
        """Returns the matrix in which q, k and v, or gate and up, lie side by side, weights or their codes; None where they lie apart.

        present: the tensors of the node that are not None."""
        weights = [present[place] for place in self.neighbours]
        return side_by_side([each.codes if isinstance(each, EightBitWeight) else each for each in weights]) if weights else None

    def by_group(self, tensors: Sequence) -> List[Sequence]:
        """Cuts what `tensors_of` lists of all projections by group."""
        found, start = [], 0
        for group in self.groups:
            found.append(tensors[start : start + group.tensors])
            start += group.tensors
        return found


IDENTITIES.add(NodeLayout)


def is_replayable(spec: tuple) -> bool:
    """Whether what a node of a description launches may be replayed: in tiles of tokens there is too much of it, and the device is slower
    than the host."""
    return not getattr(spec, "tile", 0)


_layouts: dict = {}


def layout_of(spec: tuple, groups: Sequence[Sequence[Projection]], dtype: torch.dtype, eights: Tuple[int, ...] = ()) -> NodeLayout:
    """Returns the `NodeLayout` of a node: a new one each time for projections that draw random numbers, or whose weight another library
    makes, and for a description with experts in codes, which a table would keep."""
    key: list = [spec, dtype, *map(len, groups), *([eights] if eights else [])]
    replayable = is_replayable(spec) and not any(getattr(spec, "coded", ()))
    for group in groups:
        for weight, bias, a, b, adapter_bias, scaling, probability in group:
            if probability or isinstance(weight, FourBitWeight):
                replayable = False
                break
            of_bias = None if bias is None else bias.dtype
            stored = weight.dtype if isinstance(weight, torch.Tensor) else type(weight)
            if a is None and b is None and adapter_bias is None:
                key.append((stored, weight.shape, of_bias))
            elif a is None or b is None:
                key.append((stored, weight.shape, of_bias, a is None, b is None, adapter_bias is None))
            else:
                of_adapter = None if adapter_bias is None else adapter_bias.dtype
                number = scaling or str(scaling)  # 0.0 and -0.0 are equal
                key.append((stored, weight.shape, of_bias, a.dtype, a.shape, b.dtype, of_adapter, number))
    whole = tuple(key)
    found = _layouts.get(whole) if replayable else None
    if found is None:
        found = NodeLayout(spec, groups, dtype, eights)
        if replayable:
            if len(_layouts) >= KEPT:
                _layouts.clear()
            _layouts[whole] = found
    return found
