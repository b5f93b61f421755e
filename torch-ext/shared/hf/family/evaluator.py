"""Evaluates what the forward of one module computes, from its text and from what the module holds: names, layout and the order of
statements do not count, every operation does. Which way a branch goes is decided by facts of the module, which are remembered; whatever is
not known to change nothing raises `NotServed` with the line."""

import ast
import builtins
import inspect
from types import FunctionType
from typing import Any, Dict, List, Mapping, Optional, Tuple

from torch import nn

from ..parts.facts import COMPARED, COMPUTED, Fact, ForwardText, Global, Path, arguments_of, forward_text, held_at, is_config, truth_of
from ..parts.facts import Module as Part
from .calls import ANGLES, ARGUMENT, CACHE, COS, IMPLEMENTATION, INTERFACE, NAMES, REST, SIN, Calls, Method, is_table
from .expressions import INPUT, Op, Tensor, columns_of, commutes, sizes_of

__all__ = ["Evaluator"]

SCALARS = (bool, int, float, str, type(None))
COMPUTED_NUMBER = Fact(None, ("number that is computed",))


class Evaluator(Calls):
    """Evaluates one module.

    tests: what decided a branch, by the path to it. skipped: those of them that are nothing, zero or false, with the attributes that the
    branch which was not taken reads. turning: the paths of those that decide whether the rotary embedding is called. arguments: of the
    forward, those that decided a branch, which was evaluated for their defaults.
    """

    def __init__(self, module: nn.Module, roles: Mapping[str, str] = {}, training=True, implementation="eager"):
        self.module, self.roles, self.training, self.implementation = module, roles, training, implementation
        self.tests: Dict[Path, Any] = {}
        self.arguments: Dict[str, Any] = {}
        self.skipped: Dict[Path, Tuple[str, ...]] = {}
        self.turning: List[Path] = []
        self.handed, self.factors = {}, {}
        self._reading: Optional[List[Fact]] = None  # inside of a test
        self._asks_for_cache = self.asks_for_angles = self.asks_for_implementation = False
        self.text: ForwardText = forward_text(module)
        self.globals: Mapping[str, Any] = {}

    def run(self, hidden: int, angles: Any = ANGLES) -> Any:
        """Evaluates the forward for hidden states [rows, tokens, hidden]."""
        _, first, *_ = arguments_of(self.text.node, self.text.name)
        given = {**NAMES, "position_embeddings": angles, first: Tensor(INPUT, ("B", "S", hidden))}
        return self._body(self.text.node, self.text.function, given, of_call=True)

    def _body(self, node, function: FunctionType, given: Dict[str, Any], of_call: bool = False) -> Any:
        """What a function of the module returns. given: arguments by name; of_call: whether a call of the module may give the others."""
        (me, _), *arguments = arguments_of(node, self.text.name).items()
        env: Dict[str, Any] = {me: Part(self.module, ())}
        for name, default in arguments:
            default = ast.Constant(None) if default is None else default
            if name not in given and not isinstance(default, ast.Constant):
                raise self._refused(default, f"computes the default of {name}")
            env[name] = given[name] if name in given else Fact(default.value, (ARGUMENT, name) if of_call else ())
        if node.args.kwarg is not None:
            env[node.args.kwarg.arg] = REST
        before, self.globals = self.globals, function.__globals__
        found = self._block(node.body, env)
        self.globals = before
        return found

    # ------------------------------------------------------------ statements
    def _block(self, body, env) -> Any:
        for node in body:
            found = self._statement(node, env)
            if found is not None:
                return found
        return None

    def _statement(self, node, env) -> Any:
        if isinstance(node, ast.Return):
            return Fact(None) if node.value is None else self._value(node.value, env)
        if isinstance(node, ast.Assign):
            value = self._value(node.value, env)
            for target in node.targets:
                self._bind(target, value, env)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._bind(node.target, self._value(node.value, env), env)
        elif isinstance(node, ast.AugAssign):
            before = self._value(node.target, env)
            if isinstance(before, Tensor) and not self._is_made_here(before, env):
                raise self._refused(node, "writes into a tensor")
            value = self._binary(node, node.op, before, self._value(node.value, env))
            if isinstance(before, Tensor) and isinstance(value, Tensor):
                value = Tensor(Op("written", None, (before.op, value.op)), before.shape)  # in the dtype that it had
            self._bind(node.target, value, env)
        elif isinstance(node, ast.If):
            body = node.body if self._decides(node.test, env, node) else node.orelse
            return self._block(body, env)
        elif not (isinstance(node, (ast.Pass, ast.AnnAssign)) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))):
            raise self._refused(node, "has a statement that is not followed")
        return None

    def _is_made_here(self, x: Tensor, env) -> bool:
        """Whether a tensor is a new one that no other name is for: writing into it changes nothing else."""
        others = [part for value in env.values() for part in (value if type(value) is tuple else (value,)) if isinstance(part, Tensor)]
        return x.op.kind in ("add", "multiply", "times") and [each.op for each in others].count(x.op) == 1

    def _decides(self, test, env, node) -> bool:
        """Which way a branch goes, by facts that are remembered."""
        value, paths = self._read_in(test, env, isinstance(node, ast.If) and not node.orelse)
        truth = truth_of(value)
        if truth is None:
            raise self._refused(test, "branches on what only a call knows")
        other = [node.orelse if truth else node.body] if isinstance(node, ast.IfExp) else node.orelse if truth else node.body
        names = tuple(dict.fromkeys(part.attr for each in other for part in ast.walk(each) if isinstance(part, ast.Attribute)))
        self.skipped.update({path: names for path in paths if other and not self.tests[path]})
        if any(isinstance(part, ast.Call) and "rotary" in ast.unparse(part.func) for part in ast.walk(node)):
            self.turning += paths
        return truth

    def _read_in(self, test, env, of_cache: bool = False) -> Tuple[Any, List[Path]]:
        """(value, paths of what it follows from) of an expression that decides something, which are remembered. of_cache: whether it may be
        a cache: without one, nothing else is computed."""
        outer, self._reading, self._asks_for_cache = (self._reading, self._asks_for_cache), [], False
        value = self._value(test, env)
        read, asks = self._reading, self._asks_for_cache
        self._reading, self._asks_for_cache = outer
        if asks and not of_cache:
            raise self._refused(test, "computes something else without a cache")
        if any(fact is COMPUTED_NUMBER or fact.path == COMPUTED_NUMBER.path for fact in read):
            raise self._refused(test, "branches on a number that it computes")
        self.arguments.update({fact.path[1]: fact.value for fact in read if fact.path[0] == ARGUMENT})
        self.asks_for_implementation |= any(fact.path == IMPLEMENTATION for fact in read)
        decisive = [fact.path for fact in read if fact.path[0] != ARGUMENT and "training" not in fact.path and fact.path != IMPLEMENTATION]
        self.tests.update({path: held_at(self.module, path) for path in decisive})
        return value, decisive

    def _bind(self, target, value, env) -> None:
        if isinstance(target, ast.Name):
            env[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            values = (COS, SIN) if value is ANGLES else value
            if type(values) is not tuple or len(values) != len(target.elts):
                raise self._refused(target, "unpacks something else")
            for each, part in zip(target.elts, values):
                self._bind(each, part, env)
        else:
            raise self._refused(target, "writes to something")

    # ------------------------------------------------------------ expressions
    def _value(self, node, env) -> Any:
        if self._reading is None and isinstance(node, (ast.Compare, ast.BoolOp)):
            return self._read_in(node, env)[0]
        evaluate = getattr(self, f"_{type(node).__name__.lower()}", None)
        if evaluate is None:
            raise self._refused(node, "has an expression that is not followed")
        value = evaluate(node, env)
        if self._reading is not None and isinstance(value, Fact) and value.path and not is_config(value.value):
            self._reading.append(value)
        return value

    def _constant(self, node, env) -> Any:
        return Fact(node.value)

    def _name(self, node, env) -> Any:
        if node.id in env:
            return env[node.id]
        if node.id in self.globals:
            return Global(self.globals[node.id])
        return Global(getattr(builtins, node.id, None))

    def _tuple(self, node, env) -> Any:
        return tuple(self._several(node.elts, env))

    _list = _tuple

    def _several(self, nodes, env) -> List[Any]:
        """The values of expressions, of which those with a star are several."""
        found: List[Any] = []
        for node in nodes:
            value = self._value(node.value if isinstance(node, ast.Starred) else node, env)
            if not isinstance(node, ast.Starred):
                found.append(value)
            elif type(value) is tuple:
                found += value
            else:
                raise self._refused(node, "unpacks something else")
        return found

    def _unaryop(self, node, env) -> Any:
        value = self._value(node.operand, env)
        if not isinstance(value, (Fact, Part)) and not isinstance(node.op, ast.Not):
            raise self._refused(node, "computes something else")
        if isinstance(node.op, ast.Not):
            truth = truth_of(value)
            if truth is None or self._reading is None:
                raise self._refused(node, "branches on what only a call knows")
            return Fact(not truth)
        if isinstance(node.op, ast.USub) and isinstance(value, Fact):
            return Fact(-value.value, value.path and COMPUTED_NUMBER.path)
        raise self._refused(node, "computes something else")

    def _binop(self, node, env) -> Any:
        return self._binary(node, node.op, self._value(node.left, env), self._value(node.right, env))

    def _ifexp(self, node, env) -> Any:
        return self._value(node.body if self._decides(node.test, env, node) else node.orelse, env)

    def _boolop(self, node, env) -> Any:
        for part in node.values:
            value = self._value(part, env)
            truth = truth_of(value)
            if truth is None:
                raise self._refused(part, "branches on what only a call knows")
            if truth is isinstance(node.op, ast.Or):
                break
        return value

    def _compare(self, node, env) -> Any:
        left, right = self._value(node.left, env), self._value(node.comparators[0], env)
        kind = type(node.ops[0])
        if len(node.ops) == 1 and kind in (ast.Is, ast.IsNot) and isinstance(right, Fact) and right.value is None:
            self._asks_for_cache |= left is CACHE
            self.asks_for_angles |= left == (COS, SIN)
            of_call = not isinstance(left, (Fact, Part)) and getattr(left, "op", INPUT).kind != "parameter"
            if of_call and left is not CACHE and left != (COS, SIN):
                raise self._refused(node, "branches on what only a call knows")
            return Fact((isinstance(left, Fact) and left.value is None) == (kind is ast.Is))
        known = right if not isinstance(right, tuple) or isinstance(right, Tensor) else Fact(tuple(getattr(x, "value", x) for x in right))
        if len(node.ops) > 1 or kind not in COMPARED or not isinstance(left, Fact) or not isinstance(known, Fact):
            raise self._refused(node, "compares what only a call knows")
        return Fact(COMPARED[kind](left.value, known.value))

    def _attribute(self, node, env) -> Any:
        return self._read(self._value(node.value, env), node.attr, node)

    def _read(self, owner, name: str, node) -> Any:
        if isinstance(owner, Tensor):
            if name == "shape":
                return sizes_of(owner)
            return Op(name) if name in ("dtype", "device") else Method(owner, name)
        if isinstance(owner, Part):
            return self._of_module(owner, name, node)
        if isinstance(owner, Fact) and owner.value is not None:
            return self._fact(getattr(owner.value, name), (*owner.path, name)) if not callable(getattr(owner.value, name, None)) \
                else Method(owner, name)  # fmt: skip
        if isinstance(owner, Global):
            return Global(getattr(owner.value, name, None))
        if owner in (CACHE, REST):
            return Method(owner, name)
        raise self._refused(node, "reads something else")

    def _of_module(self, owner: Part, name: str, node) -> Any:
        module, state = owner.module, vars(owner.module)
        path = (*owner.path, name)
        if name == "training":
            return self._fact(self.training, path)
        if name in state["_modules"]:
            child = state["_modules"][name]
            return self._fact(None, path) if child is None else Part(child, path)
        for kind, held in (("parameter", state["_parameters"]), ("buffer", state["_buffers"])):
            if name in held:
                return self._fact(None, path) if held[name] is None else Tensor(Op(kind, path), tuple(held[name].shape))
        if name in state:
            return self._fact(state[name], path)
        found = inspect.getattr_static(type(module), name, None)
        if type(found) is FunctionType and not owner.path:
            return Method(owner, name)
        if type(found) in SCALARS and found is not None:
            return self._fact(found, path)
        raise self._refused(node, "reads what its class computes")

    def _fact(self, value, path: Path) -> Fact:
        return Fact(self.implementation if path == IMPLEMENTATION else value, path)

    def _subscript(self, node, env) -> Any:
        owner, index = self._value(node.value, env), node.slice
        if owner is ANGLES:
            owner = (COS, SIN)
        if type(owner) is tuple:
            if not isinstance(index, ast.Slice):
                return owner[self._number(index, env)]
            return owner[slice(*(None if each is None else self._number(each, env) for each in (index.lower, index.upper)))]
        last = index.elts[1] if isinstance(index, ast.Tuple) and len(index.elts) == 2 else None
        if isinstance(owner, Tensor) and isinstance(last, ast.Slice) and ast.unparse(index.elts[0]) == "..." and last.step is None:  # type: ignore[attr-defined]
            ends = (None if each is None else self._number(each, env) for each in (last.lower, last.upper))
            return columns_of(owner, *slice(*ends).indices(owner.shape[-1])[:2])  # type: ignore[arg-type]
        if isinstance(owner, Global) and is_table(owner.value) and getattr(self._value(index, env), "path", ()) == IMPLEMENTATION:
            return INTERFACE
        if isinstance(owner, Fact) and not isinstance(index, ast.Slice):
            key = self._value(index, env)
            if isinstance(key, Fact):
                return self._fact(owner.value[key.value], (*owner.path, f"[{key.value}]"))
        raise self._refused(node, "takes a part of something")

    def _number(self, node, env) -> int:
        value = self._value(node, env)
        if not isinstance(value, Fact):
            raise self._refused(node, "takes a part that only a call knows")
        return value.value

    def _binary(self, node, kind, left, right) -> Any:
        if isinstance(left, Fact) and isinstance(right, Fact) and type(kind) in COMPUTED:
            return Fact(COMPUTED[type(kind)](left.value, right.value), (left.path or right.path) and COMPUTED_NUMBER.path)
        if type(left) is tuple and type(right) is tuple and isinstance(kind, ast.Add):
            return left + right
        name = {ast.Add: "add", ast.Mult: "multiply", ast.Div: "over"}.get(type(kind))
        if isinstance(left, Tensor) and isinstance(right, Tensor) and name in ("add", "multiply"):
            return Tensor(commutes(name, left.op, right.op), max(left.shape, right.shape, key=len))
        if isinstance(right, Tensor) and name == "multiply":
            left, right = right, left
        if isinstance(left, Tensor) and isinstance(right, Fact) and name in ("multiply", "over"):
            number = right.path or right.value
            if right.path[:1] == (ARGUMENT,):
                self.factors[right.path[1]] = left.shape
            return left if number == 1 else Tensor(Op("times" if name == "multiply" else "over", number, (left.op,)), left.shape)
        raise self._refused(node, "computes something else")
