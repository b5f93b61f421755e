"""Reads off decoder layers where their norms, attention, the MLP or the experts stand, and with what around them: the frame that a row has
for them."""

import ast
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from torch import nn

from ..parts.facts import Fact, NotServed, Path, follow
from .calls import ANGLES, COS, IMPLEMENTATIONS, RESULT, SIN, GivenArgument, Handed
from .evaluator import Evaluator
from .expressions import INPUT, Op, Tensor, commutes
from .families import LayerNorms
from .probes import Angles

__all__ = ["STREAM", "Facts", "Frame", "Reading", "alike", "layer_facts", "same"]

LAYER = "DecoderLayer"
STREAM = Op("residual stream")  # behind both branches
AROUND = "linear", "norm", "activation", "add", "multiply", "times", "written", "parameter", "buffer"  # may be done to it
Facts = Dict[str, Any]


class Reading:
    """Reads several layers of one class. They have to agree.

    absent: of `Family`, as paths. norms: those that were found. tests, arguments: as of a `Row`.
    """

    def __init__(self, layers: Sequence[nn.Module], hidden: int, angles: Optional[Angles], without_angles: bool = False):
        self.layers, self.hidden, self.angles, self.without_angles = layers, hidden, angles, without_angles
        self.cls = type(layers[0])
        self.modeling, self.prefix = self.cls.__module__, self.cls.__name__.removesuffix(LAYER)
        self.absent: Dict[Path, None] = {}
        self.norms: List[nn.Module] = []
        self.tests: List[Dict[Path, Any]] = [{} for _ in layers]
        self.arguments: Dict[str, Any] = {}

    def evaluated(self, layer: int, at: Path, angles: Any = ANGLES, roles: Mapping[str, str] = {}) -> Tuple[Any, Evaluator]:
        """Returns the result of a forward of a layer's module, the same in training and in evaluation, and its evaluator in training."""
        module: Any = follow(self.layers[layer], at)
        found = [Evaluator(module, roles, training) for training in (False, True)]
        values = [each.run(self.hidden, angles) for each in found]
        if found[1].asks_for_implementation:
            found += [Evaluator(module, roles, True, name) for name in IMPLEMENTATIONS]
            values += [each.run(self.hidden, angles) for each in found[2:]]
        of_all = [
            (value, each.attended and each.attended._replace(dropout=None), each.rotary, each.handed)
            for value, each in zip(values, found)
        ]
        if any(each != of_all[0] for each in of_all):
            raise NotServed(f"{found[0].text.name} computes something else in training, or with another implementation of attention")
        for each in found:
            self.tests[layer].update({(*at, *path): held for path, held in each.tests.items()})
            self.arguments.update(each.arguments)
        return values[1], found[1]

    def keep(self, at: Path, found: Evaluator, but: Sequence[Path] = ()) -> None:
        """Notes what has to stay nothing, zero or false for the row to hold."""
        self.absent.update(dict.fromkeys((*at, *path) for path in found.skipped if path not in but))


def same(values: Sequence[Any], what: str) -> Any:
    for value in values:
        if value != values[0]:
            raise NotServed(f"{what} differs from layer to layer: {values[0]} and {value}")
    return values[0]


class Frame(NamedTuple):
    """Holds the parts of a layer that a `Family` has no field for. handed: how attention is called. then: what is done to the residual
    stream after both branches, or None. returns: None for the stream alone, or what stands in a tuple: "" for the stream, the number
    of one of attention's results, or None. factors: as of an `Evaluator`."""

    handed: Handed
    then: Optional[Op]
    returns: Optional[Tuple[Any, ...]]
    factors: Dict[str, Any]


class _Branch(NamedTuple):
    before: Optional[str]
    behind: Optional[str]
    multiplier: Any
    dropout: Tuple[str, ...]
    part: str
    of: Op
    beside: str


def _branch(op: Op, kind: str) -> _Branch:
    """Takes apart what a branch adds to the residual stream. kind: of the part in it."""
    multiplier, dropout, behind, before, beside, whole = None, [], None, None, "", op
    if op.kind == "times":
        multiplier, op = op.name, op.of[0]
    if op.kind == "dropout":
        dropout, op = [op.name], op.of[0]
    if op.kind == "norm":
        behind, op = op.name, op.of[0]
    if _is_pair(op, kind):
        op, other = op.of
        beside = other.name
    if op.kind != kind:
        raise NotServed(f"the layer adds {whole}")
    part, op = op.name, op.of[0]
    if op.kind in ("norm", "block"):
        before, op = op.name, op.of[0]
    return _Branch(before, behind, multiplier, tuple(dropout), part, op, beside)


def _is_pair(op: Op, kind: str) -> bool:
    """Tells whether two parts of a kind read the same, and their results are added."""
    return op.kind == "add" and [each.kind for each in op.of] == [kind, kind] and op.of[0].of == op.of[1].of


def _terms(op: Op) -> List[Op]:
    """Returns the terms of a sum."""
    return [term for each in op.of for term in _terms(each)] if op.kind == "add" else [op]


def _holds(op: Op, kind: str) -> bool:
    """Whether a branch with a part of some kind is what is added."""
    while op.kind in ("times", "dropout", "norm"):
        op = op.of[0]
    return op.kind == kind or _is_pair(op, kind)


def _frame(op: Op) -> Optional[Tuple[_Branch, _Branch, bool]]:
    """Takes apart the sum of the residual stream and both branches: (these, whether the second reads what the layer gets, as the first
    does); None for another sum."""
    terms = _terms(op)
    first, last = ([each for each in terms if _holds(each, kind)] for kind in ("attention", "block"))
    pair = Op("add", None, tuple(last))
    if _is_pair(pair, "block"):
        terms, last = [each for each in terms if each not in last] + [pair], [pair]
    if len(terms) != 3 or terms.count(INPUT) != 1 or len(first) != 1 or len(last) != 1:
        return None
    branches = _branch(first[0], "attention"), _branch(last[0], "block")
    between = commutes("add", INPUT, first[0])
    if branches[0].of != INPUT or branches[1].of not in (INPUT, between) or (branches[1].of == between and between not in op.of):
        return None
    return (*branches, branches[1].of == INPUT)


def _sums(op: Op) -> List[Op]:
    """All sums in an operation, from the outermost on."""
    return [op] * (op.kind == "add") + [found for each in op.of for found in _sums(each)]


def _around(op: Op, core: Op) -> Optional[Op]:
    """An operation with `STREAM` for what is in it; None where something else than `AROUND` is done to that."""
    if op == core:
        return STREAM
    of = [_around(each, core) for each in op.of]
    return None if op.kind not in AROUND or None in of else op._replace(of=tuple(of))  # type: ignore[arg-type]


def layer_facts(reading: Reading, index: int) -> Tuple[Facts, Frame]:
    """Returns the row that describes a layer's own forward. Raises `NotServed`."""
    layer: Any = reading.layers[index]
    value, found = reading.evaluated(index, ())
    several = type(value) is tuple
    results = [each for each in value if isinstance(each, Tensor)] if several else [value]
    refused = NotServed(f"{found.text.name} returns {getattr(value, 'op', value)}")
    if len(results) != 1 or not isinstance(results[0], Tensor) or results[0].shape != ("B", "S", reading.hidden):
        raise refused
    op = results[0].op
    core, frame = next(((each, found) for each, found in ((each, _frame(each)) for each in dict.fromkeys(_sums(op))) if found), (op, None))
    then = _around(op, core)
    if frame is None or then is None:
        raise refused
    first, last, parallel = frame
    multiplier, block, beside = first.multiplier, last.part, last.beside
    if beside and "experts" in getattr(layer._modules[beside], "_modules", ()):
        block, beside = beside, block
    of_layer = type(multiplier) is tuple and len(multiplier) == 1 and multiplier[0] in vars(layer)
    if multiplier != last.multiplier or not (multiplier is None or of_layer):
        raise refused
    returns = tuple(map(_returned, value)) if several else None
    if returns is not None and False in returns:
        raise refused
    read = dict.fromkeys(part.attr for part in ast.walk(found.text.node) if isinstance(part, ast.Attribute))
    absent = [name for name in read if layer._modules.get(name, 0) is None or vars(layer).get(name, 0) is None]
    reading.keep((), found, [path for path, names in found.skipped.items() if {path[0], *names} & {*absent}])
    facts = {
        "norms": LayerNorms(first.before, first.behind, last.before, last.behind), "block": block, "attention": first.part,
        "multiplier": multiplier and multiplier[0], "dropouts": tuple(dict.fromkeys((*first.dropout, *last.dropout))),
        "absent": tuple(absent), "parallel": parallel, "beside": beside,
    }  # fmt: skip
    return facts, Frame(found.handed[first.part], None if then == STREAM else then, returns, found.factors)


def _returned(value: Any) -> Any:
    """An entry of `Frame.returns`; False where it is not known."""
    if isinstance(value, Tensor):
        return ""
    if isinstance(value, GivenArgument) and value.name.startswith(RESULT):
        return int(value.name[len(RESULT) :])
    return None if isinstance(value, Fact) and value.value is None and not value.path else False


def alike(layers: Sequence[nn.Module], hidden: int) -> List[List[int]]:
    """The numbers of a decoder's layers, in groups of one class whose own forwards do the same, and call attention with the same."""
    groups: Dict[Any, List[int]] = {}
    for i, layer in enumerate(layers):
        try:
            reading = Reading([layer], hidden, None)
            facts, frame = layer_facts(reading, 0)
            key: Any = type(layer), repr(sorted(facts.items())), repr(frame), _options(reading, facts["attention"])
        except NotServed as error:
            key = type(layer), str(error)
        groups.setdefault(key, []).append(i)
    return [*groups.values()]


def _options(reading: Reading, name: str) -> str:
    """Where a layer's attention has what it calls its implementation with: a window may be an attribute in some layers, and None in others.
    "" where attention is not read."""
    try:
        attended = reading.evaluated(0, (name,), (COS, SIN))[1].attended
    except NotServed:
        return ""
    options: Dict[str, Any] = attended.options if attended else {}
    return repr({option: getattr(value, "op", getattr(value, "path", ())) for option, value in options.items()})
