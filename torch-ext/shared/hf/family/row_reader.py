"""Reads the row of a family off its layers: what the forwards of a decoder layer, attention, the MLP and the experts compute, evaluated one
by one, as the fields of a `Family`. A part that computes what no row can say is called as the module that it is, if the layer around it is
understood; the reasons say what stopped it."""

import ast
import inspect
import sys
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from torch import nn

from ..parts.explanation import Reason
from ..parts.facts import Fact, NotServed, Path, follow
from ..parts.lookups import ROTARY
from ..parts.modules import ACTIVATIONS, original_forward
from .arguments import former
from .calls import ANGLES, ARGUMENT, COS, IMPLEMENTATIONS, SIN, argument_names, kind_of
from .evaluator import Evaluator
from .experts import MOE, experts_or_reason
from .expressions import INPUT, Op, Tensor, commutes
from .families import Family, LayerNorms, Sparse
from .probes import Angles, NormKind, norm_kind, rotary_kind, router_kind

ATTENTION = "self_attn"
LAYER = "DecoderLayer"
ACTIVATION_NAMES = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh"}
Facts = Dict[str, Any]


class Row(NamedTuple):
    """family: what was read, without head and model. called: for each part that is called, what stopped its row. tests: of each layer, the
    facts that decided what it computes, by the attributes that lead to them: while one of them is another, the row is not that layer's.
    arguments: which the forwards have beside those that a row knows, and their defaults, for which they were read."""

    family: Family
    called: Dict[str, str]
    tests: Tuple[Dict[Path, Any], ...]
    arguments: Dict[str, Any]


class _Reading:
    """Reads several layers of one class. They have to agree.

    absent: of `Family`, as paths. norms: those that were found. tests, arguments: as of a `Row`.
    """

    def __init__(self, layers: Sequence[nn.Module], hidden: int, angles: Optional[Angles]):
        self.layers, self.hidden, self.angles = layers, hidden, angles
        self.cls = type(layers[0])
        self.modeling, self.prefix = self.cls.__module__, self.cls.__name__.removesuffix(LAYER)
        self.absent: Dict[Path, None] = {}
        self.norms: List[nn.Module] = []
        self.tests: List[Dict[Path, Any]] = [{} for _ in layers]
        self.arguments: Dict[str, Any] = {}

    def evaluated(self, layer: int, at: Path, angles: Any = ANGLES, roles: Mapping[str, str] = {}) -> Tuple[Any, Evaluator]:
        """What the forward of a layer's module returns, and its evaluator: in training and in evaluation the same."""
        module: Any = follow(self.layers[layer], at)
        found = [Evaluator(module, roles, training) for training in (False, True)]
        values = [each.run(self.hidden, angles) for each in found]
        if found[1].asks_for_implementation:
            found += [Evaluator(module, roles, True, name) for name in IMPLEMENTATIONS]
            values += [each.run(self.hidden, angles) for each in found[2:]]
        of_all = [(value, each.attended and each.attended._replace(dropout=None), each.rotary) for value, each in zip(values, found)]
        if any(each != of_all[0] for each in of_all):
            raise NotServed(f"{found[0].text.name} computes something else in training, or with another implementation of attention")
        for each in found:
            self.tests[layer].update({(*at, *path): held for path, held in each.tests.items()})
            self.arguments.update(each.arguments)
        return values[1], found[1]

    def keep(self, at: Path, found: Evaluator, but: Sequence[Path] = ()) -> None:
        """Notes what has to stay nothing, zero or false for the row to hold."""
        self.absent.update(dict.fromkeys((*at, *path) for path in found.skipped if path not in but))


def _same(values: Sequence[Any], what: str) -> Any:
    for value in values:
        if value != values[0]:
            raise NotServed(f"{what} differs from layer to layer: {values[0]} and {value}")
    return values[0]


# ---------------------------------------------------------------- the layer
class _Branch(NamedTuple):
    before: Optional[str]
    behind: Optional[str]
    multiplier: Any
    dropout: Tuple[str, ...]
    part: str
    of: Op


def _branch(op: Op, kind: str) -> _Branch:
    """Takes apart what a branch adds to the residual stream. kind: of the part in it."""
    multiplier, dropout, behind, before, whole = None, [], None, None, op
    if op.kind == "times":
        multiplier, op = op.name, op.of[0]
    if op.kind == "dropout":
        dropout, op = [op.name], op.of[0]
    if op.kind == "norm":
        behind, op = op.name, op.of[0]
    if op.kind != kind:
        raise NotServed(f"the layer adds {whole}")
    part, op = op.name, op.of[0]
    if op.kind == "norm":
        before, op = op.name, op.of[0]
    return _Branch(before, behind, multiplier, tuple(dropout), part, op)


def _layer(reading: _Reading, index: int) -> Facts:
    layer = reading.layers[index]
    value, found = reading.evaluated(index, ())
    if not isinstance(value, Tensor) or value.shape != ("B", "S", reading.hidden) or value.op.kind != "add":
        raise NotServed(f"{found.text.name} returns {getattr(value, 'op', value)}")
    for total, added in (value.op.of, value.op.of[::-1]):
        if _holds(added, "block") and total.kind == "add" and INPUT in total.of:
            first, last = _branch(next(each for each in total.of if each != INPUT), "attention"), _branch(added, "block")
            break
    else:
        raise NotServed(f"{found.text.name} returns {value.op}")
    multiplier = first.multiplier
    of_layer = type(multiplier) is tuple and len(multiplier) == 1 and multiplier[0] in vars(layer)
    one = multiplier == last.multiplier and (multiplier is None or of_layer)
    if (first.of, last.of, first.part, one) != (INPUT, total, ATTENTION, True):
        raise NotServed(f"{found.text.name} returns {value.op}")
    read = dict.fromkeys(part.attr for part in ast.walk(found.text.node) if isinstance(part, ast.Attribute))
    absent = [name for name in read if layer._modules.get(name, 0) is None or vars(layer).get(name, 0) is None]
    reading.keep((), found, [path for path, names in found.skipped.items() if {path[0], *names} & {*absent}])
    return {
        "norms": LayerNorms(first.before, first.behind, last.before, last.behind), "block": last.part,
        "multiplier": multiplier and multiplier[0], "dropouts": (*first.dropout, *last.dropout), "absent": tuple(absent),
    }  # fmt: skip


def _holds(op: Op, kind: str) -> bool:
    """Whether a branch with a part of some kind is what is added."""
    while op.kind in ("times", "dropout", "norm"):
        op = op.of[0]
    return op.kind == kind


# ---------------------------------------------------------------- attention
def _attention(reading: _Reading) -> Facts:
    found = [reading.evaluated(i, (ATTENTION,), (COS, SIN)) for i in range(len(reading.layers))]
    modules: List[Any] = [layer._modules[ATTENTION] for layer in reading.layers]
    made = [_attention_of(value, each) for value, each in found]
    for i, (_, each) in enumerate(found):
        if each.asks_for_angles and {**_attention_of(*reading.evaluated(i, (ATTENTION,), Fact(None))), "turned": True} != made[i]:
            raise NotServed(f"{each.text.name} computes something else without angles")
    row = {name: _same([each[name] for each in made], name) for name in ("qk_norm", "qkv", "position_scale")}
    flags, paths = [each["turned"] for each in made], {path for _, each in found for path in each.turning}
    switch: Sequence[Path] = ()
    if paths or not all(flags):
        switch = [path for path in paths if len(path) == 1 and all(bool(vars(m).get(path[0])) == f for m, f in zip(modules, flags))]
        if len(paths) != 1 or not switch:
            raise NotServed(f"{found[0][1].text.name} turns by {sorted(paths)}, no attribute alone")
        row["turned"] = switch[0][0]
    for _, each in found:
        reading.keep((ATTENTION,), each, switch)
    names = dict.fromkeys(name for _, each in found for name in each.attended.options)  # type: ignore[union-attr]
    row["options"] = tuple(filter(None, (_option(name, [each.attended.options.get(name) for _, each in found]) for name in names)))  # type: ignore
    turning = [each.rotary for (_, each), flag in zip(found, flags) if flag]
    if turning:
        row.update(_rotary(reading, _same(turning, "the rotary embedding")))
    if row["qk_norm"] != "none":
        reading.norms += [module._modules[name] for module in modules for name in ("q_norm", "k_norm")]
    return row


def _rotary(reading: _Reading, function) -> Facts:
    if getattr(sys.modules[reading.modeling], ROTARY, None) is not function or reading.angles is None:
        raise NotServed(f"the rotary embedding is not {ROTARY} of the layer's own module, with the decoder's angles")
    return rotary_kind(function, reading.angles)._asdict()


def _attention_of(value, found: Evaluator) -> Facts:
    """What one attention computes before and behind its implementation."""
    if type(value) is not tuple or not isinstance(value[0], Tensor) or found.attended is None:
        raise NotServed(f"{found.text.name} returns no result of attention's implementation")
    if value[0].op != Op("linear", "o_proj", (Op("attended"),)):
        raise NotServed(f"{found.text.name} returns {value[0].op}")
    q, k, v = (each.op for each in (found.attended.q, found.attended.k, found.attended.v))
    scale: Tuple[str, ...] = ()
    if q.kind == "multiply" and any(each.kind == "of positions" for each in q.of):
        of_positions, q = sorted(q.of, key=lambda each: each.kind != "of positions")
        function, *entries = of_positions.name
        where: List[Path] = [getattr(each, "path", ()) for each in entries]
        if any(path[:2] != ("config", "rope_parameters") or len(path) != 3 for path in where):
            raise NotServed(f"{found.text.name} scales queries by {of_positions}")
        scale = (function.__name__, *(path[-1].strip("[]") for path in where))
    turned = q.kind == "turned"
    if turned != (k.kind == "turned") or v.kind == "turned":
        raise NotServed(f"{found.text.name} turns only one of q and k, or v")
    q, k = (each.of[0] if turned else each for each in (q, k))
    norm = "none"
    if q.kind in ("norm", "norm of heads") and k.kind == q.kind and (q.name, k.name) == ("q_norm", "k_norm"):
        norm, q, k = {"norm": "whole", "norm of heads": "head"}[q.kind], q.of[0], k.of[0]
    if all(each.kind == "linear" and each.of == (INPUT,) for each in (q, k, v)):
        qkv = tuple(each.name for each in (q, k, v))
    elif {each.kind for each in (q, k, v)} == {"columns"} and q.of == k.of == v.of and q.of[0].kind == "linear" and q.of[0].of == (INPUT,):
        bounds = [bound for each in (q, k, v) for bound in each.name]
        if bounds[0] != 0 or bounds[1::2][:-1] != bounds[2::2]:
            raise NotServed(f"{found.text.name} takes q, k, v from {bounds}")
        qkv = (q.of[0].name,)
    else:
        raise NotServed(f"{found.text.name} makes q, k, v by {q}; {k}; {v}")
    return {"qk_norm": norm, "qkv": qkv, "position_scale": scale, "turned": turned}


def _option(name: str, values) -> Optional[Tuple[str, ...]]:
    """How an option that attention is called with is found: from the same attribute in each layer."""
    if all(isinstance(value, Tensor) and value.op.kind == "position_ids" for value in values):
        return None  # the layer hands them on
    if all(isinstance(value, Fact) and value == Fact(None, (ARGUMENT, name)) for value in values):
        return None  # the same
    held = [value.op.kind == "parameter" if isinstance(value, Tensor) else False for value in values]
    path = _same([value.op.name if of_tensor else getattr(value, "path", ()) for value, of_tensor in zip(values, held)], name)
    if not path or path[0] == ARGUMENT:
        if all(isinstance(value, Fact) and value.value is None for value in values):
            return None
        raise NotServed(f"attention's {name} is computed, and no attribute")
    return (name, *path)


# ---------------------------------------------------------------- the MLP and the experts
def _mlp(reading: _Reading, index: int, at: Path) -> Facts:
    module: Any = follow(reading.layers[index], at)
    value, found = reading.evaluated(index, at)
    op = value.op if isinstance(value, Tensor) else Op("something else")
    gated = op.of[0] if op.kind == "linear" else op
    if gated.kind != "multiply" or [each.kind for each in gated.of].count("activation") != 1:
        raise NotServed(f"{found.text.name} returns {op}")
    act, up = sorted(gated.of, key=lambda each: each.kind != "activation")
    gate = act.of[0]
    if gate.kind == up.kind == "linear" and gate.of == up.of == (INPUT,):
        gate_up: Tuple[str, ...] = (gate.name, up.name)
    elif gate.kind == up.kind == "columns" and gate.of == up.of and gate.of[0].kind == "linear" and gate.of[0].of == (INPUT,):
        half = up.name[0]
        if (gate.name, up.name) != ((0, half), (half, 2 * half)):
            raise NotServed(f"{found.text.name} takes gate and up from {gate.name} and {up.name}")
        gate_up = (gate.of[0].name,)
    else:
        raise NotServed(f"{found.text.name} returns {op}")
    module_of_act: Any = module._modules[act.name]
    activation = ACTIVATION_NAMES.get(type(module_of_act).__name__)
    if activation is None or type(module_of_act).__module__ not in (ACTIVATIONS, "torch.nn.modules.activation"):
        raise NotServed(f"{found.text.name} has the activation {type(module_of_act).__name__}")
    reading.keep(at, found)
    name = argument_names(original_forward(module))[0]
    return {"gate_up": gate_up, "down": op.name, "act": act.name, "activation": activation, "mlp_argument": name}


def _sparse(reading: _Reading, index: int, at: Path) -> Sparse:
    module: Any = follow(reading.layers[index], at)
    parts = module._modules
    experts: Any = parts["experts"]
    gates = {f"{name}_gate" for name in parts}
    others = {name: part for name, part in parts.items() if part is not None and name != "experts" and name not in gates}
    routers = [name for name, part in others.items() if "weight" in part._parameters and kind_of(part) == "part"]
    shared = [name for name, part in others.items() if name not in routers]
    if len(routers) != 1 or len(shared) > 1:
        raise NotServed(f"{type(module).__name__} has the parts {', '.join(parts)}")
    router = routers[0]
    roles = {router: "router", "experts": "experts", **dict.fromkeys(shared, "mlp")}
    value, found = reading.evaluated(index, at, roles=roles)
    value = value[0] if type(value) is tuple else value
    kind = router_kind(parts[router], reading.hidden)
    expert, scores = (Op(each, router, (INPUT,)) for each in (("last", "first") if kind.experts_last else ("first", "last")))
    wanted = plain = Op("experts", "experts", (INPUT, expert, scores))
    if shared:
        score = Op("sigmoid", None, (Op("linear", f"{shared[0]}_gate", (INPUT,)),))
        wanted = commutes("add", plain, commutes("multiply", score, Op("mlp", shared[0], (INPUT,))))
    if not isinstance(value, Tensor) or value != Tensor(wanted, ("B", "S", reading.hidden)):
        raise NotServed(f"{found.text.name} returns {getattr(value, 'op', value)}")
    if getattr(original_forward(experts), "__globals__", {}).get("__name__") != MOE:
        raise NotServed(f"{type(experts).__name__} has no use_experts_implementation of transformers around it")
    why = experts_or_reason(experts)
    if isinstance(why, Reason):
        raise NotServed(f"{type(experts).__name__}: {why.text}")
    if shared and _mlp(reading, index, (*at, shared[0]))["activation"] != "silu":
        raise NotServed(f"{shared[0]} has another activation than SiLU")
    reading.keep(at, found)
    classes = type(module).__name__, type(parts[router]).__name__, type(experts).__name__
    return Sparse(classes, router, kind.by_logits, "".join(shared), "router_indices" in argument_names(original_forward(experts)))


def _block(reading: _Reading, name: str) -> Facts:
    """The MLP and the experts of layers, which may be one or the other."""
    row: Facts = {"mlp": False}
    modules: List[Any] = [layer._modules[name] for layer in reading.layers]
    dense = [i for i, module in enumerate(modules) if "experts" not in module._modules]
    sparse = [_sparse(reading, i, (name,)) for i in range(len(modules)) if i not in dense]
    made = [{"mlp_name": type(modules[i]).__name__, **_mlp(reading, i, (name,))} for i in dense]
    if sparse:
        row["sparse"] = _same(sparse, "the experts")
    if made:
        row.update({key: _same([each[key] for each in made], key) for key in made[0]}, mlp=True)
    elif sparse[0].classes[0] != f"{reading.prefix}MLP" and _is_used(reading.modeling, f"{reading.prefix}MLP"):
        row["mlp"] = True  # of layers that this configuration has none of
    if row.get("mlp_name") == f"{reading.prefix}MLP":
        del row["mlp_name"]
    return row


def _is_used(modeling: str, name: str) -> bool:
    """Tells whether a module defines a class and makes one of it."""
    module = sys.modules[modeling]
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, SyntaxError):
        return False
    return any(isinstance(part, ast.Call) and getattr(part.func, "id", "") == name for part in ast.walk(tree))


# ---------------------------------------------------------------- all of it
def row_of(layers: Sequence[nn.Module], hidden: int, angles: Optional[Angles]) -> Row:
    """Reads the row of a family. layers: of its decoder, all of one class, with sizes that differ from each other where they may; hidden:
    the width of the residual stream; angles: of its model, None where it has none. Raises `NotServed` where the layer itself is not
    understood."""
    reading = _Reading(layers, hidden, angles)
    if any(type(layer) is not reading.cls for layer in layers):
        raise NotServed(f"the decoder has layers of {', '.join(sorted({type(layer).__name__ for layer in layers}))}")
    of_layers = [_layer(reading, i) for i in range(len(layers))]
    row: Facts = {name: _same([each[name] for each in of_layers], name) for name in of_layers[0]}
    called: Dict[str, str] = {}
    for name, read in ((ATTENTION, lambda: _attention(reading)), (row["block"], lambda: _block(reading, row["block"]))):
        before = dict(reading.absent), list(reading.norms)
        try:
            row.update(read())
        except NotServed as error:
            called[name] = str(error)
            reading.absent, reading.norms = before
            if name != ATTENTION:
                row["mlp"] = False
    reading.norms += [layer._modules[name] for layer in layers for name in row["norms"] if name]  # type: ignore[misc]
    row.update(_norms(reading))
    arguments = argument_names(original_forward(layers[0]))
    row["absent"] = *row["absent"], *(".".join(path) for path in reading.absent if path[-1] not in row["absent"])
    family = Family("", reading.modeling, reading.prefix, **row, takes=tuple(map(former, arguments)), called=tuple(called))
    return Row(family, called, tuple(reading.tests), reading.arguments)


def _norms(reading: _Reading) -> Facts:
    classes = {type(norm): norm for norm in reading.norms}
    kinds: List[NormKind] = [norm_kind(norm) for norm in classes.values()]
    kind: NormKind = _same(kinds, "a norm")
    return {"offset": kind.offset, "rounds": kind.rounds, "norm_argument": kind.argument}


def class_names(layers: Sequence[nn.Module], family: Family) -> Tuple[str, ...]:
    """The names of the classes whose forwards a fused layer takes apart, as these layers have them. Raises `NotServed` for one of another
    module than the layer's."""
    found: Dict[type, None] = {}
    for layer in layers:
        parts = [layer, *(layer._modules[name] for name in family.norms if name)]
        for name in (ATTENTION, family.block):
            if name not in family.called:
                parts += [module for module in layer._modules[name].modules() if kind_of(module) in ("part", "norm")]  # type: ignore[union-attr]
        found.update(dict.fromkeys(type(part) for part in parts))
    for cls in found:
        if cls.__module__ != family.modeling:
            raise NotServed(f"{cls.__name__} is of {cls.__module__}, and the layer of {family.modeling}")
    return tuple(cls.__name__ for cls in found)
