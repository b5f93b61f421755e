"""Reads the row of a family off its layers: what the forwards of a decoder layer, attention, the MLP and the experts compute, evaluated one
by one, as the fields of a `Family`. A part that computes what no row can say is called as the module that it is, if the layer around it is
understood; the reasons say what stopped it."""

import ast
import inspect
import sys
from typing import Any, Callable, Collection, Dict, List, NamedTuple, Optional, Sequence, Tuple

from torch import nn

from ..parts.explanation import Reason
from ..parts.facts import Fact, NotServed, Path, follow
from ..parts.lookups import ROTARY
from ..parts.modules import ACTIVATION_CLASSES, original_forward
from .arguments import former
from .around import Around, around_of
from .calls import ARGUMENT, COS, SIN, argument_names, kind_of
from .evaluator import Evaluator
from .experts import MOE, experts_or_reason
from .expressions import INPUT, Op, Tensor, commutes
from .families import Family, Sparse
from .layer_reader import Facts, Frame, Reading, layer_facts, same
from .probes import Angles, NormKind, flags_of, norm_kind, rotary_kind
from .router_probe import router_kind

__all__ = ["Row", "class_names", "experts_of_called", "row_of"]

ACTIVATION_NAMES = {"SiLU": "silu", "SiLUActivation": "silu", **ACTIVATION_CLASSES}
GATED = "silu", "gelu_tanh"  # what may be multiplied by up
ACTIVATING = "activation", "silu"  # a module, or the function
WINDOW = "sliding_window"  # what attention's implementation calls it, and modules


class Row(NamedTuple):
    """family: what was read, without head and model. called: for each part that is called, what stopped its row. tests: of each layer, the
    facts that decided what it computes, by the attributes that lead to them: while one of them is another, the row is not that layer's.
    arguments: which the forwards have beside those that a row knows, and their defaults, for which they were read. frame: what else the
    layers' own forwards do. around: the linear layers at both ends of an attention that is called, None where they are not known."""

    family: Family
    called: Dict[str, str]
    tests: Tuple[Dict[Path, Any], ...]
    arguments: Dict[str, Any]
    frame: Frame
    around: Optional[Around] = None


# ---------------------------------------------------------------- attention
def _attention(reading: Reading, name: str, frame: Frame) -> Facts:
    if frame.handed.unlike or any(type(each) is int for each in frame.returns or ()):
        raise NotServed(frame.handed.unlike or "its layer returns what it returns beside its result")
    angles: Any = Fact(None) if reading.without_angles else (COS, SIN)
    reading.arguments.update({"position_embeddings": None} if reading.without_angles else {})
    found = [reading.evaluated(i, (name,), angles) for i in range(len(reading.layers))]
    modules: List[Any] = [layer._modules[name] for layer in reading.layers]
    made = [_attention_of(value, each) for value, each in found]
    for i, (_, each) in enumerate(found):
        with_angles = {field: made[i][field] for field in ("turned", "turned_first")}
        if each.asks_for_angles and {**_attention_of(*reading.evaluated(i, (name,), Fact(None))), **with_angles} != made[i]:
            raise NotServed(f"{each.text.name} computes something else without angles")
    row = {field: same([each[field] for each in made], field) for field in made[0] if field not in ("turned", "part", "turned_first")}
    flags, paths = [each["turned"] for each in made], {path for _, each in found for path in each.turning}
    switch: Sequence[Path] = ()
    takes_angles = not reading.without_angles and "position_embeddings" in argument_names(original_forward(reading.layers[0]))
    if paths or not all(flags if takes_angles else flags[:0]):
        one = sorted(path for path in paths if len(path) == 1)
        switch = [path for path in one if all(bool(vars(m).get(path[0])) == f for m, f in zip(modules, flags))]
        windowed = _windowed(modules, flags, paths, [each.attended.options.get(WINDOW) for _, each in found])  # type: ignore[union-attr]
        if windowed:
            row["windowed"], switch = windowed, [(windowed,)]
        elif switch:  # what else decides is among the tests
            row["turned"] = switch[0][0]
        elif not (takes_angles and all(flags)):
            raise NotServed(f"{found[0][1].text.name} turns by {sorted(paths)}, no attribute alone")
    for _, each in found:
        reading.keep((name,), each, switch)
    names = dict.fromkeys(option for _, each in found for option in each.attended.options)  # type: ignore[union-attr]
    values = {each: [one.attended.options.get(each) for _, one in found] for each in names}  # type: ignore[union-attr]
    windows = WINDOW if "windowed" in row else ""
    row["options"] = tuple(filter(None, ((each, each) if each == windows else _option(each, values[each]) for each in names)))
    turning = [each.rotary for (_, each), flag in zip(found, flags) if flag]
    if turning:
        part = same([each["part"] for each, flag in zip(made, flags) if flag], "the part of a head that is turned")
        row["turned_first"] = same([each["turned_first"] for each, flag in zip(made, flags) if flag], "where heads are turned")
        row.update(_rotary(reading, same(turning, "the rotary embedding"), modules[0].head_dim, part))
    reading.norms += [module._modules[each] for module in modules for each in row["head_norms"]]
    return row if row["head_norms"] else {field: value for field, value in row.items() if field != "head_norms"}


def _windowed(modules: Sequence[Any], flags: Sequence[bool], paths: Collection[Path], given: Sequence[Any]) -> str:
    """`windowed` of a `Family`, "" where layers turn heads, or have a window, by something else. flags: whether each turns its heads, which
    `paths` decide; given: the window that each calls attention with."""
    names = [path[0] for path in paths if path != (WINDOW,)]
    if len(names) != 1 or {*paths} != {(names[0],), (WINDOW,)}:
        return ""
    held = [(vars(module).get(WINDOW), bool(vars(module).get(names[0]))) for module in modules]
    turns = [window is None or has for window, has in held]
    has_window = [getattr(value, "path", None) == (WINDOW,) for value in given]
    return names[0] if turns == [*flags] and has_window == [has for _, has in held] else ""


def _rotary(reading: Reading, function, head_dim: int, part: Optional[int]) -> Facts:
    """The rotation of heads. part: the width of the part that is rotated, None for whole heads."""
    if getattr(sys.modules[reading.modeling], ROTARY, None) is not function or reading.angles is None:
        raise NotServed(f"the rotary embedding is not {ROTARY} of the layer's own module, with the decoder's angles")
    if part is None:
        return rotary_kind(function, reading.angles)._asdict()
    angles = reading.angles.of_heads(head_dim)
    kind = rotary_kind(function, angles._replace(head_dim=part))
    if angles.cos.shape[-1] != part or kind.partial or kind.half_angles:
        raise NotServed(f"{ROTARY} turns a part of what it gets")
    return kind._replace(partial=True)._asdict()


def _attention_of(value, found: Evaluator) -> Facts:
    """What one attention computes before and behind its implementation."""
    if type(value) is not tuple or not isinstance(value[0], Tensor) or found.attended is None:
        raise NotServed(f"{found.text.name} returns no result of attention's implementation")
    output = value[0].op
    if output != Op("linear", output.name, (Op("attended"),)):
        raise NotServed(f"{found.text.name} returns {output}")
    q, k, v = (each.op for each in (found.attended.q, found.attended.k, found.attended.v))
    scale: Tuple[str, ...] = ()
    if q.kind == "multiply" and any(each.kind == "of positions" for each in q.of):
        of_positions, q = sorted(q.of, key=lambda each: each.kind != "of positions")
        function, *entries = of_positions.name
        where: List[Path] = [getattr(each, "path", ()) for each in entries]
        if any(path[:2] != ("config", "rope_parameters") or len(path) != 3 for path in where):
            raise NotServed(f"{found.text.name} scales queries by {of_positions}")
        scale = (function.__name__, *(path[-1].strip("[]") for path in where))
    turned, part, norm, turned_first = False, None, "none", False
    norms: Tuple[Any, ...] = ()
    for _ in range(2):  # the rotary embedding and the norms, in either order
        if q.kind == k.kind == "turned" and q.name == k.name and not turned:
            turned, part, turned_first, q, k = True, q.name, bool(norms), q.of[0], k.of[0]
        elif q.kind == k.kind and q.kind in ("norm", "norm of heads") and not norms:
            norms = q.name, k.name
            norm, q, k = {"norm": "whole", "norm of heads": "head"}[q.kind], q.of[0], k.of[0]
    if "turned" in (q.kind, k.kind, v.kind) or (turned_first and norm == "whole"):
        raise NotServed(f"{found.text.name} turns only one of q and k, or v, or other parts of them, or heads in front of a norm of all")
    if all(each.kind == "linear" and each.of == (INPUT,) for each in (q, k, v)):
        qkv = tuple(each.name for each in (q, k, v))
    elif {each.kind for each in (q, k, v)} == {"columns"} and q.of == k.of == v.of and q.of[0].kind == "linear" and q.of[0].of == (INPUT,):
        bounds = [bound for each in (q, k, v) for bound in each.name]
        if bounds[0] != 0 or bounds[1::2][:-1] != bounds[2::2]:
            raise NotServed(f"{found.text.name} takes q, k, v from {bounds}")
        qkv = (q.of[0].name,)
    else:
        raise NotServed(f"{found.text.name} makes q, k, v by {q}; {k}; {v}")
    dropout = found.attended.dropout.path[0] if found.attended.dropout.path else ""
    of_heads = {"qk_norm": norm, "head_norms": norms, "position_scale": scale, "attention_dropout": dropout}
    return {**of_heads, "qkv": qkv, "output": output.name, "turned": turned, "part": part, "turned_first": turned_first}


def _option(name: str, values) -> Optional[Tuple[str, ...]]:
    """How an option that attention is called with is found: from the same attribute in each layer."""
    if all(isinstance(value, Tensor) and value.op.kind == "position_ids" for value in values):
        return None  # the layer hands them on
    if all(isinstance(value, Fact) and value == Fact(None, (ARGUMENT, name)) for value in values):
        return None  # the same
    held = [value.op.kind == "parameter" if isinstance(value, Tensor) else False for value in values]
    path = same([value.op.name if of_tensor else getattr(value, "path", ()) for value, of_tensor in zip(values, held)], name)
    if not path or path[0] == ARGUMENT:
        if all(isinstance(value, Fact) and value.value is None for value in values):
            return None
        raise NotServed(f"attention's {name} is computed, and no attribute")
    return (name, *path)


# ---------------------------------------------------------------- the MLP and the experts
def _mlp(reading: Reading, index: int, at: Path) -> Facts:
    module: Any = follow(reading.layers[index], at)
    value, found = reading.evaluated(index, at)
    op = value.op if isinstance(value, Tensor) else Op("something else")
    hidden = op.of[0] if op.kind == "linear" else op
    gated = op.kind != "linear" or hidden.kind not in ACTIVATING
    if gated and (hidden.kind != "multiply" or [each.kind in ACTIVATING for each in hidden.of].count(True) != 1):
        raise NotServed(f"{found.text.name} returns {op}")
    act, up = sorted(hidden.of, key=lambda each: each.kind not in ACTIVATING) if gated else (hidden, hidden.of[0])
    gate = act.of[0]
    if not gated and gate.kind == "linear" and gate.of == (INPUT,):
        gate_up: Tuple[str, ...] = (gate.name,)
    elif gated and gate.kind == up.kind == "linear" and gate.of == up.of == (INPUT,):
        gate_up = (gate.name, up.name)
    elif gated and gate.kind == up.kind == "columns" and gate.of == up.of and gate.of[0].kind == "linear" and gate.of[0].of == (INPUT,):
        half = up.name[0]
        if (gate.name, up.name) != ((0, half), (half, 2 * half)):
            raise NotServed(f"{found.text.name} takes gate and up from {gate.name} and {up.name}")
        gate_up = (gate.of[0].name,)
    else:
        raise NotServed(f"{found.text.name} returns {op}")
    activation = "silu" if act.kind == "silu" else ACTIVATION_NAMES.get(type(module._modules[act.name]).__name__, "")
    if activation not in (GATED if gated else {*ACTIVATION_NAMES.values()}):
        raise NotServed(f"{found.text.name} has the activation {type(module._modules[act.name]).__name__}")
    reading.keep(at, found)
    name = argument_names(original_forward(module))[0]
    return {"gate_up": gate_up, "down": op.name, "act": act.name or "", "activation": activation, "mlp_argument": name, "gated": gated}


def _sparse(reading: Reading, index: int, at: Path, beside: str) -> Sparse:
    """Reads a block of experts. beside: the layer's MLP whose result is added to theirs, or ""."""
    module: Any = follow(reading.layers[index], at)
    parts = module._modules
    experts: Any = parts["experts"]
    gates = {f"{name}_gate" for name in parts}
    others = {name: part for name, part in parts.items() if part is not None and name != "experts" and name not in gates}
    routers = [name for name, part in others.items() if "weight" in part._parameters and kind_of(part) == "part"]
    shared = [name for name, part in others.items() if name not in routers]
    if len(routers) != 1 or len(shared) + bool(beside) > 1:
        raise NotServed(f"{type(module).__name__} has the parts {', '.join(parts)}")
    router = routers[0]
    roles = {router: "router", "experts": "experts", **dict.fromkeys(shared, "mlp")}
    value, found = reading.evaluated(index, at, roles=roles)
    value = value[0] if type(value) is tuple else value
    held = [Op(kind, (name,)) for kind, of in (("parameter", module._parameters), ("buffer", module._buffers)) for name in of]
    kind = router_kind(parts[router], reading.hidden, len(held) == 1)
    of = INPUT, *held
    expert, scores = (Op(each, router, of) for each in (("last", "first") if kind.experts_last else ("first", "last")))
    plain = Op("experts", "experts", (INPUT, expert, scores))
    wanted, gated = [plain], bool(shared) and f"{shared[0]}_gate" in parts
    if shared:
        mlp = Op("mlp", shared[0], (INPUT,))
        score = Op("sigmoid", None, (Op("linear", f"{shared[0]}_gate", (INPUT,)),))
        branch = commutes("multiply", score, mlp) if gated else mlp
        wide = (Op("in fp32", None, (each,)) for each in (plain, branch))  # whose sum is rounded once, as ours
        wanted = [commutes("add", plain, branch), commutes("add", *wide)]
    if not isinstance(value, Tensor) or value not in [Tensor(each, ("B", "S", reading.hidden)) for each in wanted]:
        raise NotServed(f"{found.text.name} returns {getattr(value, 'op', value)}")
    router_indices = _router_indices(experts)
    of_shared: Facts = {}
    for path in [(*at, *shared)] if shared else [(beside,)] if beside else []:
        of_mlp = _mlp(reading, index, path)
        if of_mlp["activation"] != "silu" or not of_mlp["gated"]:
            raise NotServed(f"{path[-1]} has another activation than SiLU, or no gate")
        of_shared = {"shared": path[-1], "projections": (*of_mlp["gate_up"], of_mlp["down"]), "act": of_mlp["act"]}
    reading.keep(at, found)
    reading.tests[index].update({(*at, router, name): value for name, value in kind.flags.items()})
    classes = type(module).__name__, type(parts[router]).__name__, type(experts).__name__
    correction = (router, *kind.scored.correction) if kind.scored.correction else tuple(held[0].name) if held else ()
    scored = kind.scored._replace(correction=correction)
    return Sparse(classes, router, kind.by_logits, "", router_indices, gated or not of_shared, scored)._replace(**of_shared)


def _router_indices(experts: nn.Module) -> bool:
    """Whether experts are called with arguments of that name, of a module that our grouped products are for. Raises `NotServed`."""
    name, forward = type(experts).__name__, original_forward(experts)
    if getattr(forward, "__globals__", {}).get("__name__") != MOE:
        raise NotServed(f"{name} has no use_experts_implementation of transformers around it")
    why = experts_or_reason(experts)
    if isinstance(why, Reason):
        raise NotServed(f"{name}: {why.text}")
    return "router_indices" in argument_names(forward)


def experts_of_called(blocks: Sequence[Any]) -> Dict[str, bool]:
    """The experts in blocks that are called whose products may be ours: by the name of the class, `router_indices` of a `Sparse`."""
    found: Dict[str, bool] = {}
    for experts in (block._modules.get("experts") for block in blocks):
        try:
            if experts is not None:
                found[type(experts).__name__] = _router_indices(experts)
        except NotServed:
            pass
    return found


def _block(reading: Reading, name: str, beside: str, no_experts: str) -> Facts:
    """The MLP and the experts of layers, which may be one or the other. beside: as of a row; no_experts: why a row of this layer has none,
    "" where it may."""
    row: Facts = {"mlp": False}
    modules: List[Any] = [layer._modules[name] for layer in reading.layers]
    dense = [i for i, module in enumerate(modules) if "experts" not in module._modules]
    if beside and dense:
        raise NotServed(f"{beside} is a second MLP beside it")
    sparse = [_sparse(reading, i, (name,), beside) for i in range(len(modules)) if i not in dense]
    made = [{"mlp_name": type(modules[i]).__name__, **_mlp(reading, i, (name,))} for i in dense]
    if sparse and no_experts:
        raise NotServed(no_experts)
    if sparse:
        row["sparse"] = same(sparse, "the experts")
    if made:
        row.update({key: same([each[key] for each in made], key) for key in made[0]}, mlp=True)
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
def row_of(layers: Sequence[nn.Module], hidden: int, angles: Optional[Angles], without_angles: bool = False) -> Row:
    """Reads the row of a family. layers: of its decoder, all of one class, with sizes that differ from each other where they may; hidden:
    the width of the residual stream; angles: of its model, None where they are not known; without_angles: whether the model says that it
    has none, and hands on None. Raises `NotServed` where the layer itself is not
    understood, or nothing of it would be fused."""
    reading = Reading(layers, hidden, angles, without_angles)
    of_layers = [layer_facts(reading, i) for i in range(len(layers))]
    row: Facts = {name: same([facts[name] for facts, _ in of_layers], name) for name in of_layers[0][0]}
    frame = same([frame for _, frame in of_layers], "what a layer does to the residual stream")
    called: Dict[str, str] = {}

    def read(names: Sequence[str], what: Callable[[], Facts]) -> None:
        before = dict(reading.absent), list(reading.norms)
        try:
            row.update(what())
        except NotServed as error:
            called.update(dict.fromkeys(names, str(error)))
            reading.absent, reading.norms = before

    attention, block, norms = row["attention"], row["block"], [name for name in dict.fromkeys(row["norms"]) if name]
    read([attention], lambda: _attention(reading, attention, frame))
    of_layer: List[Any] = [layer._modules[name] for layer in layers for name in norms]
    of_branches = bool(row["norms"].after or row["norms"].behind)
    read(norms, lambda: _norms(reading, of_layer, of_branches, row["parallel"] and (of_branches or row["multiplier"] is not None)))
    calls_norms = any(name in called for name in norms)
    if reading.norms:
        read([attention], lambda: _norms(reading, [*reading.norms, *([] if calls_norms else of_layer)], True))
    if calls_norms:
        called[block] = "the norm in front of it is called as the module that it is"
    else:
        no_experts = "a LayerNorm is in front of experts" if row.get("centred") else "experts stand beside attention" * row["parallel"]
        read([block], lambda: _block(reading, block, row["beside"], no_experts))
    row["mlp"] = row.get("mlp", False) and block not in called
    if {attention, block, *norms} <= called.keys():
        raise NotServed(f"nothing of it would be fused: {'; '.join(f'{name}: {why}' for name, why in called.items())}")
    for tests, layer in zip(reading.tests, layers):
        for at in [(name,) for name in norms if name not in called] + [(attention, name) for name in row.get("head_norms", ())]:
            tests.update({(*at, flag): value for flag, value in flags_of(follow(layer, at)).items()})
    arguments = argument_names(original_forward(layers[0]))
    row["absent"] = *row["absent"], *(".".join(path) for path in reading.absent if path[-1] not in row["absent"])
    family = Family("", reading.modeling, reading.prefix, **row, takes=tuple(map(former, arguments)), called=tuple(called))
    around = around_of([layer._modules[attention] for layer in layers], frame.handed.input) if attention in called else None  # type: ignore[misc]
    return Row(family, called, tuple(reading.tests), reading.arguments, frame, around)


def _norms(reading: Reading, norms: Sequence[nn.Module], others: bool, beside: bool = False) -> Facts:
    """The kind that all norms of a layer share. others: whether some are not in front of attention or the MLP, but of heads or of branches.
    beside: whether branches that read one stream have more than a norm in front of them. Raises `NotServed` then, where norms differ, and
    where others are LayerNorms."""
    if beside:
        raise NotServed("both branches read what the layer gets, and are normalised or multiplied")
    kinds: List[NormKind] = [norm_kind(norm) for norm in {(type(norm), repr(flags_of(norm))): norm for norm in norms}.values()]
    kind: Optional[NormKind] = same(kinds, "a norm") if kinds else None
    if kind is None:
        return {}
    found = {"offset": kind.offset, "rounds": kind.rounds, "norm_argument": kind.argument}
    if not kind.centred:
        return found
    if others:
        raise NotServed("a LayerNorm is of heads or of a branch")
    cls = type(norms[0])
    found["weightless"] = kind.weightless
    return {**found, "centred": True, "norm_name": "" if cls is nn.LayerNorm else cls.__name__.removeprefix(reading.prefix)}


def class_names(layers: Sequence[nn.Module], family: Family) -> Tuple[str, ...]:
    """The names of the classes whose forwards a fused layer takes apart, as these layers have them. Raises `NotServed` for one of another
    module than the layer's."""
    found: Dict[type, None] = {}
    for layer in layers:
        parts = [layer, *(layer._modules[name] for name in family.norms if name and name not in family.called)]
        for name in (family.attention, family.block, *([family.beside] if family.beside and family.block not in family.called else ())):
            if name not in family.called:
                parts += [module for module in layer._modules[name].modules() if kind_of(module) in ("part", "norm")]  # type: ignore[union-attr]
        found.update(dict.fromkeys(type(part) for part in parts if type(part) is not nn.LayerNorm))
    for cls in found:
        if cls.__module__ != family.modeling:
            raise NotServed(f"{cls.__name__} is of {cls.__module__}, and the layer of {family.modeling}")
    return tuple(cls.__name__ for cls in found)
