"""Evaluates the calls in a forward: of submodules, functions and methods of tensors."""

import ast
import inspect
from types import FunctionType, MethodType
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ..parts.facts import Fact, ForwardText, Global, NotServed, Path, arguments_of, refused
from ..parts.facts import Module as Part
from ..parts.modules import original_forward
from ..parts.texts import text_that_runs
from ..parts.weights import held
from .arguments import CACHE as CACHE_NAME
from .expressions import INPUT, Op, Tensor, method_of

__all__ = [
    "ANGLES", "ARGUMENT", "CACHE", "COS", "IMPLEMENTATION", "IMPLEMENTATIONS", "INTERFACE", "NAMES", "REST", "RESULT", "SIN", "Calls",
    "GivenArgument", "Handed", "Method", "argument_names", "is_table", "kind_of",
]  # fmt: skip

ELEMENTWISE = {
    torch.sigmoid: "sigmoid", nn.functional.sigmoid: "sigmoid", torch.tanh: "tanh", nn.functional.tanh: "tanh", nn.functional.silu: "silu",
}  # fmt: skip
IMPLEMENTATION = "config", "_attn_implementation"
IMPLEMENTATIONS = "sdpa", "flash_attention_2", "flex_attention", "another"  # beside "eager"


class GivenArgument(NamedTuple):
    """An argument that has no shape of its own: the mask, the cache, the other arguments."""

    name: str


class Method(NamedTuple):
    owner: Any
    name: str


MASK, CACHE, ANGLES, REST = map(GivenArgument, ("attention_mask", "cache", "position_embeddings", "kwargs"))
INTERFACE, NOTHING = GivenArgument("attention's implementation"), GivenArgument("nothing that is used")
COS, SIN, POSITIONS = (Tensor(Op(name), ("B", "S")) for name in ("cos", "sin", "position_ids"))
NAMES: Mapping[str, Any] = {"attention_mask": MASK, "position_embeddings": ANGLES, "position_ids": POSITIONS, CACHE_NAME: CACHE}
RESULT = "result "  # and its number: of what mixes tokens, beside the first
ARGUMENT = "argument"  # at the beginning of the path to an argument of a forward that has no name of these


class Handed(NamedTuple):
    """How a layer calls what mixes its tokens. input: what the module calls the stream; names: of its other arguments, each with the
    layer's own argument that it gets, and the value without that: (name, argument or "", value). rest: whether it gets the other keywords
    of the layer. results: how many it returns, 0 for one that is no tuple. unlike: what is not handed on by its name, "" where all is, as
    a fused layer does."""

    input: str
    names: Tuple[Tuple[str, str, Any], ...]
    rest: bool
    results: int
    unlike: str

    def arguments(self) -> Tuple[str, ...]:
        """The layer's own arguments that are handed on."""
        return tuple(argument for _, argument, _ in self.names if argument)


class Attended(NamedTuple):
    """How attention was called. options: beside dropout and scaling. dropout: in training."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: Dict[str, Any]
    dropout: Any


class Calls:
    """Evaluates the calls in one module's forward; `Evaluator` has the rest of it.

    roles: of those of its submodules that are called and not looked into, by name; any other with parts of its own is attention, if it is
    called with the angles, or a block. attended: how attention's implementation was called; rotary: the function that turned q and k.
    handed: how what mixes tokens was called, by its name. factors: arguments that the stream was multiplied by, with their shapes.
    """

    module: nn.Module
    roles: Mapping[str, str]
    training: bool
    text: ForwardText
    globals: Mapping[str, Any]
    tests: Dict[Path, Any]
    skipped: Dict[Path, Any]
    attended: Optional["Attended"] = None
    handed: Dict[str, "Handed"]
    factors: Dict[str, Any]
    rotary: Any = None
    _value: Callable[..., Any]
    _several: Callable[..., List[Any]]
    _read: Callable[..., Any]
    _fact: Callable[..., Fact]
    _body: Callable[..., Any]

    def _refused(self, node, why: str) -> NotServed:
        return refused(self.text, node, why)

    def _call(self, node, env) -> Any:
        function = self._value(node.func, env)
        args = self._several(node.args, env)
        kwargs = {part.arg: self._value(part.value, env) for part in node.keywords if part.arg}
        rest = [self._value(part.value, env) for part in node.keywords if part.arg is None]
        if any(each is not REST for each in rest):
            raise self._refused(node, "unpacks something else")
        if function is INTERFACE or self._is_eager(function):
            return self._attend(node, args, kwargs, bool(rest))
        if isinstance(function, Part):
            return self._module(node, function, args, kwargs, bool(rest))
        if isinstance(function, Method):
            found = self._method(function.owner, function.name, args, kwargs, node)
        else:
            found = self._function(node, getattr(function, "value", None), args, kwargs)
        if found is None:
            raise self._refused(node, "calls something else")
        return found

    def _function(self, node, function, args, kwargs) -> Any:
        if isinstance(function, MethodType) and is_table(function.__self__) and function.__name__ == "get_interface":
            return INTERFACE if len(args) == 2 and getattr(args[0], "path", ()) == IMPLEMENTATION and self._is_eager(args[1]) else None
        if isinstance(function, nn.Module) or (isinstance(function, FunctionType) and any(each in (COS, SIN) for each in args)):
            return self._turn(node, function, args, kwargs)
        if function in (getattr, hasattr) and len(args) > 1 and isinstance(args[1], Fact) and isinstance(args[0], (Fact, Part)):
            owner = args[0].value if isinstance(args[0], Fact) else args[0].module
            found, path = hasattr(owner, args[1].value), (*args[0].path, args[1].value)
            if function is hasattr:
                return Fact(found, path)
            return self._read(args[0], args[1].value, node) if found else self._fact(args[2].value, path) if len(args) > 2 else None
        if function is len and type(args[0]) is tuple:
            return Fact(len(args[0]))
        if function in (torch.chunk, torch.split) and isinstance(args[0], Tensor):
            return self._of_tensor(node, args[0], function.__name__, args[1:], kwargs)
        if function is torch.cat and len(args) == 1 and kwargs == {"dim": Fact(-1)}:
            return self._beside(args[0])
        if function in ELEMENTWISE and len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            return Tensor(Op(ELEMENTWISE[function], None, (args[0].op,)), args[0].shape)
        if function in (nn.functional.dropout, torch.dropout) and isinstance(args[0], Tensor):
            return self._drop(node, args[0], kwargs.get("p", args[1] if len(args) > 1 else None), kwargs.get("training", Fact(True)))
        if isinstance(function, FunctionType) and args and args[0] is POSITIONS and not kwargs:
            return Tensor(Op("of positions", (function, *args[1:])), ("S",))
        return None

    def _drop(self, node, x: Tensor, p, training) -> Optional[Tensor]:
        """A dropout, which has to drop nothing; its probability is remembered."""
        if not isinstance(p, Fact) or not p.path or not isinstance(training, Fact):
            return None
        self.tests[p.path] = p.value
        self.skipped[p.path] = ()
        if p.value and training.value:
            raise self._refused(node, "drops some of its elements")
        return x

    def _turn(self, node, function, args, kwargs) -> Any:
        """The rotary embedding of q and k, of the same kind of axes each."""
        if [*args[2:4]] != [COS, SIN] or len(args) > 5 or kwargs.keys() - {"unsqueeze_dim"}:
            raise self._refused(node, "turns by other angles")
        dim = kwargs.get("unsqueeze_dim", args[4] if len(args) > 4 else Fact(1))
        if not all(isinstance(x, Tensor) and len(x.shape) == 4 and dim.value in (1, 2) and x.shape[3 - dim.value] == "S" for x in args[:2]):
            raise self._refused(node, "turns other axes")
        self.rotary = function
        return tuple(Tensor(Op("turned", None, (x.op,)), x.shape) for x in args[:2])

    def _beside(self, parts) -> Optional[Tensor]:
        """A head whose first elements were turned, and the rest of it as it was."""
        known = type(parts) is tuple and len(parts) == 2 and all(isinstance(each, Tensor) for each in parts)
        turned, rest = (each.op for each in parts) if known else (INPUT, INPUT)
        first = turned.of[0] if turned.kind == "turned" and turned.name is None else INPUT
        if first.kind != "columns" or rest.kind != "columns" or rest.of != first.of or first.name[0] or first.name[1] != rest.name[0]:
            return None
        shape = (*parts[0].shape[:-1], parts[0].shape[-1] + parts[1].shape[-1])
        return Tensor(Op("turned", first.name[1], first.of), shape) if rest.name[1] == shape[-1] else None

    def _is_eager(self, value) -> bool:
        return isinstance(value, Global) and value.value is not None and value.value is self.globals.get("eager_attention_forward")

    def _attend(self, node, args, kwargs, rest: bool) -> Any:
        """A call of attention's implementation: with the module, q, k, v and the mask."""
        me, q, k, v, *mask = args
        mask = [kwargs.pop("attention_mask")] if "attention_mask" in kwargs else mask
        if me != Part(self.module, ()) or mask != [MASK] or not rest:
            raise self._refused(node, "calls attention without the mask, or without the other arguments")
        heads = all(isinstance(x, Tensor) and len(x.shape) == 4 and x.shape[0] == "B" and x.shape[2] == "S" for x in (q, k, v))
        if not heads or kwargs.pop("scaling", None) != Fact(getattr(self.module, "scaling", None), ("scaling",)):
            raise self._refused(node, "calls attention with a scaling of its own, or other axes")
        dropout = kwargs.pop("dropout", Fact(0.0))
        held = isinstance(dropout, Fact) and len(dropout.path) == 1 and type(vars(self.module).get(dropout.path[0])) in (int, float)
        if dropout != Fact(0.0) and not (held and self.training):
            raise self._refused(node, "calls attention with a dropout of its own")
        if [x.op.kind for x in (k, v)] != ["cached", "cached"] or (k.op.name, v.op.name) != ("k", "v"):
            raise self._refused(node, "calls attention with keys and values that are not those of the cache")
        k, v = (Tensor(x.op.of[0], x.shape) for x in (k, v))
        self.attended = Attended(q, k, v, kwargs, dropout)
        return Tensor(Op("attended"), (q.shape[0], "S", q.shape[1], v.shape[3])), NOTHING

    def _module(self, node, part: Part, args, kwargs, rest: bool) -> Any:
        module, name = part.module, part.path[-1] if part.path else ""
        role = self.roles.get(name, "")
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if not tensors or len(part.path) != 1:
            raise self._refused(node, "calls a module with something else")
        x = tensors[0]
        if role and (len(tensors) != len(args) + len(kwargs) or rest):
            raise self._refused(node, "calls a module with something more")
        if role == "router":
            of = tuple(each.op for each in tensors)
            return tuple(Tensor(Op(each, name, of), (x.shape[0], "k")) for each in ("logits", "first", "last"))
        if role:
            return Tensor(Op(role, name, tuple(each.op for each in tensors)), x.shape)
        kind = kind_of(module)
        if kind == "part":
            return self._called(node, name, module, x, args, kwargs, rest)
        if len(args) + len(kwargs) != 1 or rest:
            raise self._refused(node, "calls a module with something more")
        if kind == "linear":
            return Tensor(Op(kind, name, (x.op,)), (*x.shape[:-1], module.out_features))  # type: ignore[arg-type]
        kind = "norm of heads" if kind == "norm" and len(x.shape) == 4 else kind
        return Tensor(Op(kind, name, (x.op,)), x.shape)

    def _called(self, node, name: str, module, x: Tensor, args, kwargs, rest: bool) -> Any:
        """A part with parts of its own: what mixes tokens, which gets more than x, such as the mask or the rest; or a block."""
        names = argument_names(original_forward(module))
        named = {**dict(zip(names, args)), **kwargs}
        number = _number_of_results(module)
        if [*named.values()] == [x] and not rest:
            made = Tensor(Op("block", name, (x.op,)), x.shape)
        else:
            self.handed[name] = self._handed(node, {**named}, x, rest, number)
            made = Tensor(Op("attention", name, (x.op,)), x.shape)
        return (made, *(GivenArgument(f"{RESULT}{i}") for i in range(1, number))) if number else made

    def _handed(self, node, named: Dict[str, Any], x: Tensor, rest: bool, results: int) -> Handed:
        inputs = [key for key, value in named.items() if value == x]
        if len(inputs) != 1 or self.handed:
            raise self._refused(node, "calls a module with something more")
        of_layer = [*arguments_of(self.text.node, self.text.name)][1:]
        names = []
        for key, value in named.items():
            known = [each for each, held in NAMES.items() if value is held or (isinstance(value, tuple) and value == held)]
            path = getattr(value, "path", None)
            if key == inputs[0]:
                continue
            if known:
                names.append((key, known[0], None))
            elif path is not None and (not path or path[0] == ARGUMENT):
                names.append((key, path[1] if path else "", value.value))
            else:
                raise self._refused(node, "calls a module with something that it computes")
        wanted = {"attention_mask", CACHE_NAME, *({"position_ids", "position_embeddings"} & {*of_layer})}
        plain = all(key == argument for key, argument, _ in names) and wanted <= {key for key, *_ in names} and results == 2
        why = "does not hand the mask, the angles, the cache or the other arguments on, each by its name"
        return Handed(inputs[0], tuple(names), rest, results, "" if plain else str(self._refused(node, why)))

    def _method(self, owner, name: str, args, kwargs, node) -> Any:
        if owner is CACHE and name == "update" and len(args) == 3 and not kwargs.keys() - {"kwargs"}:
            if getattr(args[2], "path", ()) != ("layer_idx",):
                raise self._refused(node, "keeps its keys and values in another place")
            return tuple(Tensor(Op("cached", each, (x.op,)), x.shape) for each, x in zip("kv", args))
        if owner is REST:
            return POSITIONS if name == "get" and args[0] == Fact("position_ids") else None
        if isinstance(owner, Fact) and name == "get" and isinstance(owner.value, dict) and isinstance(args[0], Fact):
            return Fact(owner.value.get(args[0].value), (*owner.path, f"[{args[0].value}]"))
        if isinstance(owner, Part):
            function = inspect.getattr_static(type(owner.module), name)
            text = text_that_runs(function, name)
            names = [*arguments_of(text.node, self.text.name)][1:] if text else []
            return self._body(text.node, function, {**dict(zip(names, args)), **kwargs}) if text else None
        return self._of_tensor(node, owner, name, args, kwargs) if isinstance(owner, Tensor) else None

    def _of_tensor(self, node, x: Tensor, name: str, args, kwargs) -> Any:
        try:
            return method_of(x, name, args, kwargs)
        except NotServed as error:
            raise self._refused(node, str(error)) from None


def _number_of_results(module: nn.Module) -> int:
    """How many results a module's forward returns, whatever is around it, 0 where that is no tuple. Raises `NotServed` where they are now
    these, now those."""
    name, text = f"{type(module).__name__}.forward", text_that_runs(inspect.unwrap(original_forward(module)), "forward")
    if text is None:
        raise NotServed(f"{name} is not what its file says, or has no file")
    values = [each.value for each in ast.walk(text.node) if isinstance(each, ast.Return)]
    numbers = {len(value.elts) if isinstance(value, ast.Tuple) else 0 for value in values}
    if len(numbers) > 1:
        raise NotServed(f"{name} returns {' or '.join(map(str, sorted(numbers)))} results")
    return numbers.pop() if numbers else 0


def is_table(value) -> bool:
    """Tells transformers' table of attention's implementations."""
    return type(value).__name__ == "AttentionInterface" and type(value).__module__ == "transformers.modeling_utils"


def argument_names(function) -> Tuple[str, ...]:
    """The names of a forward's arguments after its module, without other keywords."""
    named = inspect.signature(function).parameters.values()
    return tuple(each.name for each in named if each.kind is not inspect.Parameter.VAR_KEYWORD)[1:]


def kind_of(module: nn.Module) -> str:
    """Returns the kind of a submodule: "linear", "norm", "dropout", "activation", or "part", which has a forward to be read."""
    if isinstance(module, nn.Linear):
        return "linear"
    if type(module) is nn.Dropout:
        return "dropout"
    weight = held(module, "weight")
    if not list(module.children()) and set(module._parameters) <= {"weight", "bias"} and weight is not None and weight.dim() == 1:
        return "norm"
    if type(module).__module__ in ("transformers.activations", "torch.nn.modules.activation"):
        return "activation"
    return "part"
