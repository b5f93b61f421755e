"""Linear projections of one input inside an autograd node, each with a low-rank adapter beside its weight where it has one:

    y = x @ weight.T + scaling * (dropout(x) @ a.T @ b.T + bias)          (LoRA, arXiv 2106.09685)

The adapter is added to the product by a GEMM, so nothing as wide as y is made for it, and what is kept for the backward pass is
`scaling * dropout(x) @ a.T`, as narrow as the rank. Where no weight needs a gradient the input is not asked for either. Dropout keeps
no mask: the generator's state before it is kept, and the backward pass draws the same numbers again.
"""

from typing import List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch.nn.functional import dropout, linear

from ..runtime.replay import IDENTITIES
from .common import KEPT, fail, side_by_side
from .low_rank import FEW, low_rank_add, low_rank_gradients

FP32 = torch.float32
# A product of half precision numbers with a result in fp32, which the GEMM has anyway, needs no second kernel to widen it.
_MM_WIDENS = "dtype" in torch.ops.aten.mm.overloads()


class FourBitWeight:
    """A weight [out, in] that another library keeps in four bits and makes dense for one product at a time. dequantize: the
    library's function of the weight and its state."""

    __slots__ = ("weight", "dequantize")
    requires_grad = False

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

    weight: [out, in]. a: [rank, in] and b: [out, rank] of its adapter, or None for both; bias: [out], the adapter's, or None. Of the
    dtype in which products are made, or wider: then they are rounded to it, once a forward pass, and their gradients are of their own
    dtype. scaling: of the adapter, its bias included. dropout: the probability with which an element of the adapter's input is zeroed.
    """

    weight: Union[torch.Tensor, FourBitWeight]
    a: Optional[torch.Tensor] = None
    b: Optional[torch.Tensor] = None
    bias: Optional[torch.Tensor] = None
    scaling: float = 1.0
    dropout: float = 0.0


OF_ONE = 4  # tensors of a projection among the arguments of an autograd function


def tensors_of(projections: Sequence[Projection]) -> list:
    """Lists weight, a, b and bias of each, as an autograd function takes them."""
    return [part for projection in projections for part in projection[:OF_ONE]]


def numbers_of(projections: Sequence[Projection]) -> tuple:
    """The scaling and dropout of each."""
    return tuple(projection[OF_ONE:] for projection in projections)


def scalings_without_dropout(projections: Sequence[Projection]) -> List[float]:
    """The scaling of each. Raises ValueError for what a graph has no operator for: `is_traceable` says so first."""
    for i, projection in enumerate(projections):
        if not is_traceable(projection):
            fail(f"projections[{i}]", "with dropout, or a weight in four bits", "neither, where torch.compile or torch.export traces")
    return [projection.scaling for projection in projections]


def is_traceable(projection: Projection) -> bool:
    """Whether a graph may contain a projection: nothing is drawn from a generator, and the weight is a tensor."""
    return not projection.dropout and not isinstance(projection.weight, FourBitWeight)


def from_parts(tensors: Sequence, numbers: Sequence[tuple]) -> List[Projection]:
    """The projections that `tensors_of` and `numbers_of` took apart."""
    return [Projection(*tensors[OF_ONE * i : OF_ONE * i + OF_ONE], *number) for i, number in enumerate(numbers)]


def projection_reference(x: torch.Tensor, projection: Projection) -> torch.Tensor:
    """A projection in PyTorch, which can differentiate it. x: [..., in], of the dtype in which products are made."""
    weight, a, b, bias, scaling, probability = projection
    dtype = x.dtype
    y = linear(x, weight.dense(dtype) if isinstance(weight, FourBitWeight) else weight.to(dtype))
    if a is None:
        return y
    low = linear(dropout(x, probability) if probability else x, a.to(dtype))
    return y + linear(low, b.to(dtype), None if bias is None else bias.to(dtype)) * scaling


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def _dropped_again(x: torch.Tensor, probability: float, state: torch.Tensor) -> torch.Tensor:
    """dropout(x) with the numbers that follow a state of the generator, which is left as it was."""
    generator = _generator(x.device)
    now = generator.get_state()
    generator.set_state(state)
    try:
        return dropout(x, probability)
    finally:
        generator.set_state(now)


def _product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """left @ right in a dtype."""
    if dtype == left.dtype:
        return torch.mm(left, right)
    if _MM_WIDENS and dtype == FP32 and left.is_cuda:
        return torch.mm(left, right, out_dtype=FP32)
    return torch.mm(left, right).to(dtype)


class Copies:
    """Copies of tensors into others, made together: PEFT's adapters are in fp32, and a launch for each would be 14 of a layer's hundred.
    One of a part that is not contiguous would make them one launch each."""

    def __init__(self) -> None:
        self.sources: List[torch.Tensor] = []
        self.targets: List[torch.Tensor] = []

    def add(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        self.sources += sources
        self.targets += targets

    def make(self) -> None:
        if self.sources:
            torch._foreach_copy_(self.targets, self.sources)


def _rounded_adapters(adapters: Sequence[Projection], dtype: torch.dtype, copies: Copies) -> Tuple[torch.Tensor, List[torch.Tensor]]:
    """(all rows of the adapters' a in one matrix, each b) in a dtype, once the copies are made; a matrix itself where nothing has to be
    done for it."""
    rows, others = [adapter.a for adapter in adapters], [adapter.b for adapter in adapters]
    a = rows[0]
    if _makes_rows(rows, dtype):
        ranks = [tensor.shape[0] for tensor in rows]
        a = torch.empty((sum(ranks), a.shape[1]), dtype=dtype, device=a.device)
        copies.add(rows, [a] if len(rows) == 1 else torch.split_with_sizes(a, ranks))
    rounded = [b if b.dtype == dtype else torch.empty_like(b, dtype=dtype, memory_format=torch.contiguous_format) for b in others]
    copies.add([b for b, new in zip(others, rounded) if new is not b], [new for b, new in zip(others, rounded) if new is not b])
    return a, rounded


def _makes_rows(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """Whether `_rows_in_one` makes a new matrix of these."""
    return len(tensors) > 1 or tensors[0].dtype != dtype


def _rows_in_one(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """All rows of matrices in one of a dtype; the matrix itself where it is the only one and has it."""
    if len(tensors) == 1:
        return tensors[0].to(dtype)
    rows = sum(tensor.shape[0] for tensor in tensors)
    return torch.cat([t.detach() for t in tensors], out=torch.empty((rows, tensors[0].shape[1]), dtype=dtype, device=tensors[0].device))


def shapes_made(projections: Sequence[Projection], dtype: torch.dtype, tokens: int) -> List[Sequence[int]]:
    """The shapes of what `Projections.made` lists, all of `dtype`."""
    adapters = [projection for projection in projections if projection.a is not None]
    rank, shapes = sum(adapter.a.shape[0] for adapter in adapters), []
    if adapters:
        shapes.append((tokens, rank))
        if _makes_rows([adapter.a for adapter in adapters], dtype):
            shapes.append((rank, adapters[0].a.shape[1]))
    weights = [projection.weight for projection in projections]
    if any(weight.dtype != dtype for weight in weights):
        shapes.append((sum(weight.shape[0] for weight in weights), weights[0].shape[1]))
    return shapes + [adapter.b.shape for adapter in adapters if adapter.b.dtype != dtype]


LOOK = object()  # stands for weights that may lie side by side


def _whole_of(weights: Sequence[torch.Tensor]) -> Optional[torch.Tensor]:
    return None if len(weights) == 1 else side_by_side(weights)


class Projections:
    """The projections of one input, between the forward and the backward pass of an autograd node.

    `forward` leaves the tensors that the backward pass needs in the object; `saved` hands them over, for `save_for_backward`, and
    `loaded` makes an object that has them again. The other attributes are numbers and names.
    """

    def __init__(
        self,
        projections: Sequence[Projection],
        dtype: torch.dtype,
        made: Optional[Sequence[torch.Tensor]] = None,
        whole=LOOK,
        copies: Optional[Copies] = None,
    ):
        """dtype: of the products. made: in the backward pass of an operator, what `made` gave in its forward pass. whole: what
        `side_by_side` finds of the weights, where the caller knows it. copies: those that the caller makes before `forward`."""
        self._describe(projections, dtype)
        weights = [None if i in self.four_bit else projection.weight for i, projection in enumerate(projections)]
        if whole is LOOK:
            whole = None if self.four_bit else _whole_of(weights)
        self.whole = whole
        found = None if made is None else list(made)
        self.a = self.low = None
        self.b: list = []
        if self.spans:
            adapters = [projections[i] for i in self.spans]
            if found is None:
                mine = Copies() if copies is None else copies
                self.a, self.b = _rounded_adapters(adapters, dtype, mine)
                if copies is None:
                    mine.make()
            else:
                rows, self.low = [adapter.a for adapter in adapters], found.pop(0)
                self.a = found.pop(0) if _makes_rows(rows, dtype) else rows[0]
        if self.rounded_whole:
            if found is not None:
                self.whole = found.pop(0)
            else:
                self.whole = _rows_in_one(weights, dtype) if self.whole is None else self.whole.to(dtype)
            weights = self.whole.split(self.rows)
        self.weights = [None if weight is None else weight.to(dtype) for weight in weights]
        if self.spans and found is not None:
            self.b = [adapter.b if adapter.b.dtype == dtype else found.pop(0) for adapter in adapters]

    def _describe(self, projections: Sequence[Projection], dtype: torch.dtype) -> None:
        """Sets what is no tensor."""
        self.dtype = dtype
        self.rows = [projection.weight.shape[0] for projection in projections]
        self.four_bit = {i: p.weight for i, p in enumerate(projections) if isinstance(p.weight, FourBitWeight)}
        self.dtypes = [None if i in self.four_bit else p.weight.dtype for i, p in enumerate(projections)]
        self.spans: dict = {}  # of the projections with an adapter, by their place: its columns in `low`
        start = 0
        for i, projection in enumerate(projections):
            if projection.a is not None:
                self.spans[i] = slice(start, start + projection.a.shape[0])
                start = self.spans[i].stop
        self.rank = start
        self.scalings = [projection.scaling for projection in projections]
        self.dropouts = [projection.dropout for projection in projections]
        self.drops = any(self.dropouts[i] for i in self.spans)
        self.adapter_dtypes = [tuple(None if t is None else t.dtype for t in projection[1:OF_ONE]) for projection in projections]
        self.states: dict = {}
        self.rounded_whole = any(weight_dtype not in (None, dtype) for weight_dtype in self.dtypes) and not self.four_bit

    def made(self, projections: Sequence[Projection]) -> list:
        """Lists those of the tensors for the backward pass that are not the projections' own, behind `forward`: their shapes are
        those of `shapes_made`, and no two share memory."""
        adapters = [projections[i] for i in self.spans]
        tensors = [self.low] if adapters else []
        if adapters and _makes_rows([adapter.a for adapter in adapters], self.dtype):
            tensors.append(self.a)
        if self.rounded_whole:
            tensors.append(self.whole)
        return tensors + [b for b, adapter in zip(self.b, adapters) if adapter.b.dtype != self.dtype]

    def _weight(self, i: int) -> torch.Tensor:
        return self.four_bit[i].dense(self.dtype) if i in self.four_bit else self.weights[i]

    def forward(self, x: torch.Tensor, biases: Sequence[Optional[torch.Tensor]], in_one: bool = True, onto=None, out=None) -> list:
        """What each projection makes of x [tokens, in]: [tokens, out].

        biases: of the adapters. in_one: whether weights that lie side by side are one product. onto: [tokens, out], added to the only
        projection's result, with `out`. out: [tokens, all rows], where the results go side by side.
        """
        if self.spans:
            self.low = self._low(x)
        return self._with_adapters(self._products(x, in_one, onto, out), biases)

    def again(self, x: torch.Tensor, biases: Sequence[Optional[torch.Tensor]], in_one: bool = True, out=None) -> list:
        """What `forward` returned, bit for bit, in the backward pass: the products with the adapters' a are there."""
        return self._with_adapters(self._products(x, in_one, None, out), biases)

    def _products(self, x: torch.Tensor, in_one: bool, onto, out) -> list:
        if onto is not None:
            results = [torch.addmm(onto, x, self._weight(0).t(), out=out)]
        elif self.whole is not None and in_one:
            results = list((linear(x, self.whole) if out is None else torch.mm(x, self.whole.t(), out=out)).split(self.rows, 1))
        elif out is None:
            results = [linear(x, self._weight(i)) for i in range(len(self.rows))]
        else:
            results = [torch.mm(x, self._weight(i).t(), out=part) for i, part in enumerate(out.split(self.rows, 1))]
        return results

    def _with_adapters(self, results: list, biases: Sequence[Optional[torch.Tensor]]) -> list:
        for (i, span), b in zip(self.spans.items(), self.b):
            low_rank_add(results[i], self.low[:, span], b, transposed=True)
            if biases[i] is not None:
                results[i].add_(biases[i].to(self.dtype), alpha=self.scalings[i])
        return results

    def _low(self, x: torch.Tensor) -> torch.Tensor:
        """scaling * dropout(x) @ a.T of all adapters, side by side."""
        low = x.new_empty((x.shape[0], self.rank))
        scalings = {self.scalings[i] for i in self.spans}
        if not self.drops and len(scalings) == 1:
            return low.addmm_(x, self.a.t(), beta=0, alpha=scalings.pop())
        for i, span in self.spans.items():
            dropped = x
            if self.dropouts[i]:
                self.states[i] = _generator(x.device).get_state()
                dropped = dropout(x, self.dropouts[i])
            low[:, span].addmm_(dropped, self.a[span].t(), beta=0, alpha=self.scalings[i])
        return low

    def saved(self) -> list:
        """Hands over the tensors that the backward pass needs."""
        if self.rounded_whole:
            tensors = [self.a, self.low, self.whole, *self.b]
        else:  # the weights themselves, of which autograd notices when they are written to before the backward pass
            tensors = [self.a, self.low, *self.weights, *self.b]
        self.whole = self.a = self.low = None
        self.weights, self.b = [], []
        return tensors

    def loaded(
        self, tensors: Sequence[Optional[torch.Tensor]], whole=LOOK
    ) -> Tuple["Projections", Sequence[Optional[torch.Tensor]]]:
        """An object like this one with the tensors that `saved` handed over, and those that are left. whole: as of `Projections`."""
        new, start = object.__new__(Projections), 3 if self.rounded_whole else 2 + len(self.rows)
        new.__dict__.update(self.__dict__)
        new.a, new.low = tensors[:2]
        if self.rounded_whole:
            new.whole = tensors[2]
            new.weights = list(new.whole.split(self.rows))
        else:
            new.weights = tensors[2:start]
            new.whole = (None if self.four_bit else _whole_of(new.weights)) if whole is LOOK else whole
        end = start + len(self.spans)
        new.b = tensors[start:end]
        return new, tensors[end:]

    def low_gradient(self, grads: Sequence[torch.Tensor]) -> Optional[torch.Tensor]:
        """The gradient of dropout(x) @ a.T of all adapters, side by side; grads: of the results, [tokens, out] each."""
        if not self.spans:
            return None
        low = grads[0].new_empty((grads[0].shape[0], self.rank))
        for (i, span), b in zip(self.spans.items(), self.b):
            low[:, span].addmm_(grads[i], b, beta=0, alpha=self.scalings[i])
        return low

    def input_gradient(self, grads: Sequence[torch.Tensor], dlow: Optional[torch.Tensor],
                       together: Optional[torch.Tensor] = None) -> torch.Tensor:
        """The gradient of x, [tokens, in]. dlow: of `low_gradient`. together: where the grads lie side by side, the matrix that they are
        in."""
        if self.whole is not None and together is not None:
            dx = torch.mm(together, self.whole)
        else:
            dx = torch.mm(grads[0], self._weight(0))
            for i in range(1, len(grads)):
                dx.addmm_(grads[i], self._weight(i))
        if dlow is None:
            return dx
        if not self.drops:
            low_rank_add(dx, dlow, self.a)
            return dx
        for i, span in self.spans.items():
            if self.dropouts[i]:
                dx += _dropped_again(torch.mm(dlow[:, span], self.a[span]), self.dropouts[i], self.states[i])
            else:
                dx.addmm_(dlow[:, span], self.a[span])
        return dx

    def gradients(self, grads: Sequence[torch.Tensor], dlow: Optional[torch.Tensor], x, needs: Sequence[bool]) -> list:
        """The gradients of weight, a, b and bias of each projection, None for those that `needs` leaves out.

        x: a function that gives the input [tokens, in]; called once, and only when a weight or an a needs it.
        """
        found: list = [None] * len(needs)
        y = x() if any(needs[OF_ONE * i] or needs[OF_ONE * i + 1] for i in range(len(grads))) else None
        for i, grad in enumerate(grads):
            at = OF_ONE * i
            if needs[at]:
                found[at] = _product(grad.t(), y, self.dtypes[i])
            if i not in self.spans:
                continue
            span, (a_dtype, b_dtype, bias_dtype) = self.spans[i], self.adapter_dtypes[i]
            both = None
            if needs[at + 1] and needs[at + 2] and a_dtype == b_dtype and not self.dropouts[i]:
                both = low_rank_gradients(grad, self.low[:, span], y, dlow[:, span], a_dtype)
            if both is not None:
                found[at + 1 : at + 3] = both
            elif needs[at + 2]:
                found[at + 2] = _product(grad.t(), self.low[:, span], b_dtype)
            if needs[at + 3]:
                found[at + 3] = (grad.sum(0, dtype=torch.promote_types(grad.dtype, FP32)) * self.scalings[i]).to(bias_dtype)
        wanted = [i for i in self.spans if needs[OF_ONE * i + 1] and found[OF_ONE * i + 1] is None]
        # One product for all, and each gradient in a storage of its own: of several in one, accelerate would save one. With few tokens it
        # is the number of launches that counts, and a product each needs no copy.
        apart = _MM_WIDENS and dlow is not None and dlow.is_cuda and dlow.shape[0] <= FEW
        together = len(wanted) > 1 and len(wanted) == len(self.spans) and not self.drops and not apart
        if together and self.adapter_dtypes[wanted[0]][0] != self.dtype:
            product = torch.mm(dlow.t(), y)
            for i in wanted:
                found[OF_ONE * i + 1] = product[self.spans[i]].to(self.adapter_dtypes[i][0], copy=True)
            return found
        for i in wanted:
            dropped = _dropped_again(y, self.dropouts[i], self.states[i]) if self.dropouts[i] else y
            found[OF_ONE * i + 1] = _product(dlow[:, self.spans[i]].t(), dropped, self.adapter_dtypes[i][0])
        return found


class Layout(Projections):
    """All of some projections but their tensors: what an operator of them depends on beside the tensors that it gets. There is one for each
    combination, which is only equal to itself."""

    def __init__(self, projections: Sequence[Projection], dtype: torch.dtype):
        self._describe(projections, dtype)
        self.a = self.low = self.whole = None
        self.weights, self.b = [], []
        self.numbers = numbers_of(projections)
        self.tensors = OF_ONE * len(projections)
        self.kept = (2 if self.rounded_whole else 1 + len(projections)) + 1 + len(self.spans)  # tensors that `saved` lists
        self.makes_rows = bool(self.spans) and _makes_rows([projections[i].a for i in self.spans], dtype)

    def projections(self, tensors: Sequence) -> List[Projection]:
        """Those with other tensors of the same kinds, as `tensors_of` lists them."""
        return from_parts(tensors, self.numbers)

    def whole_of(self, tensors: Sequence) -> Optional[torch.Tensor]:
        """What `side_by_side` finds of the weights among the tensors that `tensors_of` lists."""
        return side_by_side(tensors[::OF_ONE]) if len(self.rows) > 1 else None

    def whole_of_saved(self, tensors: Sequence) -> Optional[torch.Tensor]:
        """The same among those that `saved` lists."""
        return None if self.rounded_whole or len(self.rows) == 1 else side_by_side(tensors[2 : 2 + len(self.rows)])

    def saved_of(self, tensors: Sequence, made: Sequence[torch.Tensor]) -> Tuple[list, Sequence[torch.Tensor]]:
        """What `saved` lists, of the projections' tensors and what `made` gave, and what is left of that."""
        found: list = [None, None]
        at = 0
        if self.spans:
            found = [made[1] if self.makes_rows else tensors[OF_ONE * next(iter(self.spans)) + 1], made[0]]
            at = 1 + self.makes_rows
        if self.rounded_whole:
            found.append(made[at])
            at += 1
        else:
            found += tensors[::OF_ONE]
        for i in self.spans:
            b = tensors[OF_ONE * i + 2]
            if b.dtype != self.dtype:
                b = made[at]
                at += 1
            found.append(b)
        return found, made[at:]


IDENTITIES.add(Layout)
_layouts: dict = {}


def layout_of(projections: Sequence[Projection], dtype: torch.dtype) -> Optional[Layout]:
    """The `Layout` of projections; None where they draw random numbers, or have a weight in four bits: no functions of tensors."""
    key: list = [dtype]
    for weight, a, b, bias, scaling, probability in projections:
        if type(weight) is FourBitWeight:
            return None
        key += (weight.dtype, weight.shape[0])
        if a is None or b is None:
            key.append((a is None, b is None, bias is None))
        elif probability:
            return None
        else:
            key += (a.dtype, a.shape[0], b.dtype, None if bias is None else bias.dtype, scaling or str(scaling))  # 0.0 and -0.0 are equal
    found = _layouts.get(tuple(key))
    if found is None:
        if len(_layouts) >= KEPT:
            _layouts.clear()
        found = _layouts[tuple(key)] = Layout(projections, dtype)
    return found


def layouts_of(groups: Sequence[Sequence[Projection]], dtype: torch.dtype) -> Optional[List[Layout]]:
    """The `Layout` of each group, or None where one has none."""
    found = []
    for group in groups:
        layout = layout_of(group, dtype)
        if layout is None:
            return None
        found.append(layout)
    return found
