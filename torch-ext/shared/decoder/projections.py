"""Linear projections of one input inside an autograd node: their products, and the gradients of all that they are made of.

An adapter is added to the product by a GEMM, so nothing as wide as y is made for it, and what is kept for the backward pass is
`scaling * dropout(x) @ a.T`, as narrow as the rank. Where no weight needs a gradient the input is not asked for either. Dropout keeps
no mask: the generator's state before it is kept, and the backward pass draws the same numbers again.
"""

from functools import partial
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.nn.functional import linear

from ..ops.dropout import dropped_again, dropped_with_state
from ..ops.low_rank import FEW, low_rank_add, low_rank_gradients
from ..ops.products import accumulate_product, write_product
from ..ops.quantised import Operand
from ..ops.second_run import are_watched
from .eight_bits import EightBits
from .norms import add_norm_backward, normed_again
from .projection import FP32, CodedWeight, Group, PartNeeds, Parts, in_parts
from .spec import Norm

__all__ = [
    "Copies", "NormedInput", "NormedInputGradients", "Projections", "all_made", "normed_input_backward", "of_second_half",
    "of_second_half_loaded",
]  # fmt: skip

# A product of half precision numbers with a result in fp32, which the GEMM has anyway, needs no second kernel to widen it.
_MM_WIDENS = "dtype" in torch.ops.aten.mm.overloads()


def _product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """left @ right in a dtype."""
    if dtype == left.dtype:
        return torch.mm(left, right)
    if _MM_WIDENS and dtype == FP32 and left.is_cuda:
        return torch.mm(left, right, out_dtype=FP32)
    return torch.mm(left, right).to(dtype)


def _column_sum(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of a bias, in a dtype."""
    total = grad.sum(0, dtype=torch.promote_types(grad.dtype, FP32))
    return total if total.dtype == dtype else total.to(dtype)


def _joined(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """All rows of tensors in one of a dtype; the tensor itself where it is the only one and has it."""
    if len(tensors) == 1:
        return tensors[0].to(dtype)
    shape = (sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:])
    return torch.cat([t.detach() for t in tensors], out=torch.empty(shape, dtype=dtype, device=tensors[0].device))


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


class Projections:
    """The projections of one input with their tensors, in a forward or a backward pass.

    What a forward pass makes and the backward pass needs, `made` lists; `loaded` makes the object of the backward pass with it.
    """

    a: torch.Tensor  # where there are adapters: all rows of their a
    low: torch.Tensor  # where there are adapters, after `forward`: `_low` of its input
    whole: Optional[torch.Tensor]
    b: list
    eight: Optional[EightBits]  # where the products are made in eight bits

    def __init__(self, group: Group, tensors: Sequence, whole: Optional[torch.Tensor] = None, copies: Optional[Copies] = None):
        """tensors: of `tensors_of`. whole: what `side_by_side` finds of the weights. copies: the caller's, made before `forward`."""
        self._set(group, tensors)
        self.whole, dtype = whole, group.dtype
        if group.spans:
            mine = Copies() if copies is None else copies
            self._round_adapters(mine)
            if copies is None:
                mine.make()
        if group.rounds_weights:
            weights: list = [parts.weight for parts in self.parts]
            self.whole = _joined(weights, dtype) if whole is None else whole.to(dtype)
        self._set_weights()

    def _set(self, group: Group, tensors: Sequence) -> None:
        self.group, self.parts, self.whole, self.b = group, in_parts(tensors), None, []
        self.states: dict = {}  # of each projection with dropout: the generator's state before it

    def _set_weights(self) -> None:
        """Sets the weights in the dtype of the products, None for a `CodedWeight`."""
        group = self.group
        self.weights: list
        if group.rounds_weights and self.whole is not None:
            self.weights = list(self.whole.split(group.rows))
        else:
            weights = [parts.weight for parts in self.parts]
            self.weights = [None if isinstance(weight, CodedWeight) else weight.to(group.dtype) for weight in weights]
        self.eight = None
        if group.eight:
            weights = [parts.weight if weight is None else weight for parts, weight in zip(self.parts, self.weights)]
            self.eight = EightBits(group, weights, self.whole)

    def _round_adapters(self, copies: Copies) -> None:
        """Sets `a`, all rows of the adapters' a in one matrix, and each b, in the dtype of the products once the copies are made."""
        dtype = self.group.dtype
        rows: list = [self.parts[i].a for i in self.group.spans]
        others: list = [self.parts[i].b for i in self.group.spans]
        self.a = rows[0]
        if self.group.makes_a:
            self.a = torch.empty((self.group.rank, rows[0].shape[1]), dtype=dtype, device=rows[0].device)
            ranks = [tensor.shape[0] for tensor in rows]
            copies.add(rows, [self.a] if len(rows) == 1 else torch.split_with_sizes(self.a, ranks))
        self.b = [b if b.dtype == dtype else torch.empty_like(b, dtype=dtype, memory_format=torch.contiguous_format) for b in others]
        pairs = [(b, new) for b, new in zip(others, self.b) if new is not b]
        copies.add([b for b, _ in pairs], [new for _, new in pairs])

    def made(self) -> list:
        """Lists what the backward pass needs and is not the projections' own, after `forward`. No two of these tensors share memory."""
        group = self.group
        found: list = [] if self.eight is None else list(self.eight.scales)
        found += [self.low] if group.spans else []
        found += [self.a] if group.makes_a else []
        found += [self.whole] if group.rounds_weights else []
        found += [b for i, b in zip(group.spans, self.b) if b is not self.parts[i].b]
        return found + list(self.states.values())

    @classmethod
    def loaded(cls, group: Group, tensors: Sequence, made: Sequence, whole=None) -> Tuple["Projections", Sequence]:
        """The projections in a backward pass, and what is left of `made`. tensors, whole: as of `__init__`."""
        new, left = object.__new__(cls), iter(made)
        new._set(group, tensors)
        new.whole = whole
        scales = [next(left) for _ in range(2 * group.eight)]
        if group.spans:
            new.low = next(left)
            rows: list = [new.parts[i].a for i in group.spans]
            new.a = next(left) if group.makes_a else rows[0]
        if group.rounds_weights:
            new.whole = next(left)
        new._set_weights()
        if new.eight is not None:
            new.eight.scales = tuple(scales)
        new.b = [new.parts[i].b if group.dtypes[i].b == group.dtype else next(left) for i in group.spans]
        new.states = {i: next(left) for i in group.spans if group.dropouts[i]}
        return new, list(left)

    def _weight(self, i: int) -> torch.Tensor:
        weight = self.weights[i]
        return self.parts[i].weight.dense(self.group.dtype) if weight is None else weight

    def forward(self, x: torch.Tensor, in_one: bool = True, onto=None, out=None) -> list:
        """What each projection makes of x [tokens, in]: [tokens, out].

        in_one: whether weights that lie side by side are one product. onto: [tokens, out], added to the only projection's result, with
        `out`, where it `is_one_product`. out: [tokens, all rows], where the results go side by side.
        """
        self.begin(x)
        return self.again(x, in_one, onto, out)

    @property
    def reads_codes(self) -> bool:
        """Whether x may be in codes alone, and so may the results' gradients where no bias needs one: nothing reads them in 16 bits."""
        return self.eight is not None and not self.group.spans

    @property
    def is_one_product(self) -> bool:
        """Whether a result is a single product, which can be added to the stream as it is computed. A bias or an adapter's product that is
        added to the rounded sum is lost wherever it is below the sum's last place."""
        return not (self.eight or self.group.spans or self.group.biased)

    def begin(self, x: Operand, dense: Optional[torch.Tensor] = None) -> None:
        """Makes what `made` lists of x: the products with the adapters' a, and the scales of products in eight bits. dense: x where it is
        in codes and there are adapters."""
        if self.group.spans:
            self.low = self._low(x if isinstance(x, torch.Tensor) else dense)  # type: ignore[arg-type]  # given with codes
        if self.eight is not None:
            self.eight.begin(x)

    def again(self, x: torch.Tensor, in_one: bool = True, onto=None, out=None) -> list:
        """Returns what `forward` returns, bit for bit, once `begin` has run, or in the backward pass, which loads what it made."""
        group = self.group
        results = self._products(x, in_one, onto, out)
        if group.spans and out is None and are_watched():
            results = [result.clone() for result in results]
        for (i, span), b in zip(group.spans.items(), self.b):
            low_rank_add(results[i], self.low[:, span], b, transposed=True)
            bias = self.parts[i].adapter_bias
            if bias is not None:
                results[i].add_(bias.to(group.dtype), alpha=group.scalings[i])
        return results

    def _products(self, x: torch.Tensor, in_one: bool, onto, out) -> list:
        rows, dtype = self.group.rows, self.group.dtype
        biases: list = [parts.bias for parts in self.parts]
        if self.eight is not None:
            return self.eight.forward(x, self._bias(biases), in_one, out)
        if onto is not None:
            return [write_product(out, x, self._weight(0).t(), onto)]
        if self.whole is not None and in_one and (not self.group.biased or None not in biases):
            return list(_affine(x, self.whole, self._bias(biases), out).split(rows, 1))
        outs = [None] * len(rows) if out is None else out.split(rows, 1)
        return [_affine(x, self._weight(i), None if b is None else b.to(dtype), part) for i, (b, part) in enumerate(zip(biases, outs))]

    def _bias(self, biases: Sequence[Optional[torch.Tensor]]) -> Optional[torch.Tensor]:
        """The biases of all projections in one, zeros for a projection without; None where no projection has one."""
        like = next((bias for bias in biases if bias is not None), None)
        if like is None:
            return None
        return _joined([like.new_zeros((rows,)) if b is None else b for b, rows in zip(biases, self.group.rows)], self.group.dtype)

    def _low(self, x: torch.Tensor) -> torch.Tensor:
        """scaling * dropout(x) @ a.T of all adapters, side by side."""
        group = self.group
        low = x.new_empty((x.shape[0], group.rank))
        scalings = {group.scalings[i] for i in group.spans}
        if not group.drops and len(scalings) == 1:
            return accumulate_product(low, x, self.a.t(), beta=0, alpha=scalings.pop())
        for i, span in group.spans.items():
            dropped = x
            if group.dropouts[i]:
                dropped, self.states[i] = dropped_with_state(x, group.dropouts[i])
            accumulate_product(low[:, span], dropped, self.a[span].t(), beta=0, alpha=group.scalings[i])
        return low

    def low_gradient(self, grads: Sequence[torch.Tensor]) -> Optional[torch.Tensor]:
        """The gradient of dropout(x) @ a.T of all adapters, side by side; grads: of the results, [tokens, out] each."""
        group = self.group
        if not group.spans:
            return None
        low = grads[0].new_empty((grads[0].shape[0], group.rank))
        for (i, span), b in zip(group.spans.items(), self.b):
            low[:, span].addmm_(grads[i], b, beta=0, alpha=group.scalings[i])
        return low

    def input_gradient(self, grads: Sequence[torch.Tensor], dlow: Optional[torch.Tensor],
                       together: Optional[Operand] = None, weights_follow: bool = False) -> torch.Tensor:
        """The gradient of x, [tokens, in]. dlow: of `low_gradient`. together: where the grads lie side by side, the matrix that they are
        in; in codes where `reads_codes` allows it. weights_follow: whether those of weights are asked for later."""
        group = self.group
        if self.eight is not None:
            dx = self.eight.input_gradient(grads[0] if together is None else together, weights_follow)
        elif self.whole is not None and isinstance(together, torch.Tensor):
            dx = torch.mm(together, self.whole)
        else:
            dx = torch.mm(grads[0], self._weight(0))
            for i in range(1, len(grads)):
                dx.addmm_(grads[i], self._weight(i))
        if dlow is None:
            return dx
        if not group.drops:
            low_rank_add(dx, dlow, self.a)
            return dx
        for i, span in group.spans.items():
            if group.dropouts[i]:
                dx += dropped_again(torch.mm(dlow[:, span], self.a[span]), group.dropouts[i], self.states[i])
            else:
                dx.addmm_(dlow[:, span], self.a[span])
        return dx

    def gradients(self, grads: Sequence[torch.Tensor], dlow: Optional[torch.Tensor], x: Callable[[], torch.Tensor],
                  needs: Sequence[PartNeeds], together: Optional[Operand] = None) -> List[Parts]:
        """The gradients of the tensors of each projection, None for those that `needs` leaves out.

        x: gives the input [tokens, in]; called once, and only when a weight or an a needs it. together: as of `input_gradient`.
        """
        group, dtypes = self.group, self.group.dtypes
        y = x() if any(need.weight or need.a for need in needs) else None
        eights: list = [None] * len(needs)
        if self.eight is not None and y is not None:
            eights = self.eight.weight_gradients(grads[0] if together is None else together, y, [need.weight for need in needs])
        found = []
        for i, (grad, need) in enumerate(zip(grads, needs)):
            one = Parts(
                weight=_product(grad.t(), y, dtypes[i].weight) if need.weight and y is not None and self.eight is None else eights[i],
                bias=_column_sum(grad, dtypes[i].bias) if need.bias else None,
            )
            found.append(one if i not in group.spans else self._of_adapter(i, grad, dlow, y, need, one))
        self._set_gradients_of_a(found, needs, dlow, y)
        return found

    def _of_adapter(self, i: int, grad, dlow, y, need: PartNeeds, found: Parts) -> Parts:
        """The gradients with those of an adapter, its a only where one kernel gives it with b's."""
        span, dtypes, both = self.group.spans[i], self.group.dtypes[i], None
        if need.a and need.b and dtypes.a == dtypes.b and not self.group.dropouts[i]:
            both = low_rank_gradients(grad, self.low[:, span], y, dlow[:, span], dtypes.a)
        if both is not None:
            found = found._replace(a=both[0], b=both[1])
        elif need.b:
            found = found._replace(b=_product(grad.t(), self.low[:, span], dtypes.b))
        if need.adapter_bias:
            total = grad.sum(0, dtype=torch.promote_types(grad.dtype, FP32)) * self.group.scalings[i]
            found = found._replace(adapter_bias=total.to(dtypes.adapter_bias))
        return found

    def _set_gradients_of_a(self, found: List[Parts], needs: Sequence[PartNeeds], dlow, y) -> None:
        """Puts in those that are still missing."""
        group = self.group
        wanted = [i for i in group.spans if needs[i].a and found[i].a is None]
        # One product for all, and each gradient in a storage of its own: of several in one, accelerate would save one. With few tokens it
        # is the number of launches that counts, and a product each needs no copy.
        apart = _MM_WIDENS and dlow is not None and dlow.is_cuda and dlow.shape[0] <= FEW
        together = len(wanted) > 1 and len(wanted) == len(group.spans) and not group.drops and not apart
        if together and group.dtypes[wanted[0]].a != group.dtype:
            product = torch.mm(dlow.t(), y)
            for i in wanted:
                found[i] = found[i]._replace(a=product[group.spans[i]].to(group.dtypes[i].a, copy=True))
            return
        for i in wanted:
            dropped = dropped_again(y, group.dropouts[i], self.states[i]) if group.dropouts[i] else y
            found[i] = found[i]._replace(a=_product(dlow[:, group.spans[i]].t(), dropped, group.dtypes[i].a))


# ---------------------------------------------------------------- of a normalised input
class NormedInput(NamedTuple):
    """Holds what the projections' input was before its norm. spec: of the norm. x: [tokens, hidden]. norm, rstd: the norm's weight and what
    it saved, None without a norm. dresidual: the gradient that reaches x past the projections. bias: the norm's, or None."""

    spec: Norm
    x: torch.Tensor
    norm: Optional[torch.Tensor]
    rstd: Optional[torch.Tensor]
    dresidual: torch.Tensor
    bias: Optional[torch.Tensor] = None


class NormedInputGradients(NamedTuple):
    """The gradients of x, of the norm's weight and bias, and of the projections, or of the first three whether they are needed; None for
    those that are not."""

    x: Any
    norm: Any
    bias: Any = None
    projections: Sequence[Parts] = ()


def normed_input_backward(
    grads: Sequence[torch.Tensor], given: NormedInput, projections: Projections, need: NormedInputGradients, needs: Sequence[PartNeeds],
    together: Optional[torch.Tensor] = None,
) -> NormedInputGradients:  # fmt: skip
    """Returns the gradients. grads: of the projections' results, [tokens, out] each; needs: of the projections' tensors; together: as of
    `Projections.input_gradient`."""
    spec, x, norm, rstd, dresidual, bias = given
    dlow = projections.low_gradient(grads)
    found = projections.gradients(grads, dlow, partial(normed_again, spec, x, norm, rstd, projections.group.dtype, bias), needs, together)
    dx = dnorm = dbias = None
    if need.x or need.norm or need.bias:
        dy = projections.input_gradient(grads, dlow, together)
        if rstd is None:
            dx = dresidual + dy
        else:
            dx, dnorm, dbias = add_norm_backward(spec, dy, dresidual, x, norm, rstd, need.norm or need.bias)
    of_norm = dnorm if need.norm else None, dbias if need.bias else None
    return NormedInputGradients(dx if need.x else None, *of_norm, found)


# ---------------------------------------------------------------- of the half that follows attention
Pairs = Sequence[Tuple[Group, Sequence]]


def of_second_half(groups: Pairs, whole: Optional[torch.Tensor], copies: Optional[Copies] = None) -> List[Projections]:
    """Makes the projections of each (group, its tensors), of the half of a layer that follows attention.

    whole: the weights of gate and up side by side, which are the group before the last; copies: the caller's, made before `forward`.
    """
    return [Projections(*each, whole if i == len(groups) - 2 else None, copies) for i, each in enumerate(groups)]


def of_second_half_loaded(groups: Pairs, made: Sequence, whole: Optional[torch.Tensor]) -> List[Projections]:
    """Makes the projections of `of_second_half` again for a backward pass. made: what each had made, one after the other."""
    found = []
    for i, (group, tensors) in enumerate(groups):
        projections, made = Projections.loaded(group, tensors, made, whole if i == len(groups) - 2 else None)
        found.append(projections)
    return found


def all_made(found: Sequence[Projections]) -> list:
    """Lists what each of several projections has made, one after the other, as `of_second_half_loaded` takes it."""
    return [tensor for projections in found for tensor in projections.made()]


def _affine(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], out: Optional[torch.Tensor]) -> torch.Tensor:
    """x @ weight.T + bias, in `out` where it is given."""
    if out is None:
        return linear(x, weight, bias)
    return write_product(out, x, weight.t(), bias)
