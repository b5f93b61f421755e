"""Reads in the text of a causal LM's forward where its logits come from and what becomes of them, and so whether its loss can do without.

The forward itself runs in any case, with stand-ins for itself, for its head and for the logits (causal_lm.py, head.py): what it does to
hidden states, labels and router losses stays its own. So only what can hold logits is followed, on every path that a call with labels can
take; conditions on what the model holds (`self.config.final_logit_softcapping is not None`) are decided. Logits may be scaled and capped
by numbers, cast to float32, given to `self.loss_function`, and returned as `logits`. All else, and any statement that cannot be followed,
raises `NotServed` with the line. Were this to miss something, the stand-in for the logits would raise an error where it is used; no model
is compared with itself before its first step.
"""

import ast
import builtins
from typing import Any, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ..parts.facts import (
    CALL,
    COMPARED,
    COMPUTED,
    OTHER,
    Fact,
    Global,
    Module,
    NotServed,
    Path,
    arguments_of,
    computed,
    fact_of,
    forward_text,
    is_config,
    is_number,
    refused,
    truth_of,
)
from .flow_values import (
    CALLS,
    GIVEN,
    LOSS_FUNCTION,
    MIXED,
    Environment,
    Logits,
    LogitsMethod,
    Output,
    Step,
    has_logits,
    is_output,
    joined,
    merge,
)

__all__ = ["ComputedInside", "Flow", "flow_of"]

LOSS_ARGUMENTS = ("logits", "labels", "vocab_size")
# What is not followed, and may be there where it neither sees logits nor makes them.
OPAQUE = (
    *(ast.For, ast.While, ast.Try, ast.With, ast.Delete, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Dict, ast.Set),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


class ComputedInside(NotServed):
    """A forward gives its labels to a causal LM that it holds, which computes the loss."""


class Flow(NamedTuple):
    """head: the attributes that lead from a causal LM to the module that makes its logits. vocabulary: those that lead to the number of
    classes that its loss is told. output: the class of what it returns. takes_return_dict: whether its forward does. steps: what becomes
    of the logits before the loss."""

    head: Path
    vocabulary: Path
    output: type
    takes_return_dict: bool
    steps: Tuple[Step, ...]


def flow_of(model: nn.Module) -> Flow:
    """Reads the forward of a causal LM. Raises `NotServed`."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    path = next((tuple(name.split(".")) for name, module in model.named_modules() if module is head and name), None)
    if path is None:
        raise NotServed(f"{type(model).__name__} has no output embeddings among its modules")
    reader = _Reader(model, (), path)
    outputs = reader.run({})
    if len(set(map(type, outputs))) != 1 or not isinstance(outputs[0], Output) or any(output != outputs[0] for output in outputs):
        raise NotServed(f"{reader.name} does not always return its logits, in one class of output")
    return Flow(path, reader.vocabulary, outputs[0].cls, reader.takes_return_dict, reader.steps)


class _Reader:
    """Follows one forward: of the module at a path from the causal LM that leads to the head."""

    def __init__(self, module: nn.Module, path: Path, head: Path):
        self.module, self.path, self.head = module, path, head
        self.vocabulary: Path = ()
        self.steps: Tuple[Step, ...] = ()
        self.returned: List[Any] = []
        self.text = forward_text(module)
        self.function, self.name, self.node, names = self.text
        self.arguments = arguments_of(self.node, self.name)
        self.takes_return_dict = "can_return_tuple" in names or "return_dict" in self.arguments

    def run(self, given: Optional[Environment]) -> List[Any]:
        """The values that it may return. given: arguments by name, None for any of them. What is not given has its default; but the causal
        LM itself gets labels, returns an output, and may get any other argument."""
        first, *names = self.arguments
        env: Environment = {CALLS: (0,)}
        for name in names:
            default = self.arguments[name] if self.path and given is not None else None
            env[name] = (given or {}).get(name, Fact(default.value) if isinstance(default, ast.Constant) else OTHER)
        if self.node.args.kwarg is not None:
            env[self.node.args.kwarg.arg] = OTHER
        if not self.path:
            if "labels" not in env:
                raise NotServed(f"{self.name} takes no labels")
            env.update({"labels": GIVEN}, **({"return_dict": Fact(True)} if "return_dict" in env else {}))
        env[first] = Module(self.module, self.path)
        if self._block(self.node.body, env):
            self._end(Fact(None), env, self.node)
        return self.returned

    def _end(self, value, env, node) -> None:
        if env[CALLS] != ((0,) if self.path else (1,)):
            raise self._refused(node, "calls a loss" if self.path else "returns without one call of self.loss_function")
        self.returned.append(value)

    def _refused(self, node, why: str) -> NotServed:
        return refused(self.text, node, why)

    # ------------------------------------------------------------ statements
    def _block(self, body, env: Environment) -> bool:
        """Follows statements, and tells whether what comes after them is reached."""
        return all(self._statement(node, env) for node in body)

    def _statement(self, node, env: Environment) -> bool:
        if isinstance(node, ast.Return):
            self._end(Fact(None) if node.value is None else self._value(node.value, env), env, node)
            return False
        if isinstance(node, ast.Raise):
            return False
        if isinstance(node, ast.If):
            return self._branch(node, env)
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            value = OTHER if node.value is None else self._value(node.value, env)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target] if node.value is not None else []:
                self._bind(target, value, env)
        elif isinstance(node, ast.AugAssign):
            self._bind(node.target, self._binary(node, node.op, node.target, node.value, env), env)
        elif isinstance(node, ast.Expr):
            self._value(node.value, env)
        elif isinstance(node, OPAQUE):
            self._opaque(node, env)
        elif not isinstance(node, ast.Pass):
            raise self._refused(node, "has a statement that is not followed")
        return True

    def _branch(self, node, env: Environment) -> bool:
        truth = truth_of(self._value(node.test, env))
        if truth is not None:
            return self._block(node.body if truth else node.orelse, env)
        envs = [dict(env), dict(env)]
        reached = [one for one, body in zip(envs, (node.body, node.orelse)) if self._block(body, one)]
        if reached:
            merge(env, reached[0], reached[-1])
        return bool(reached)

    def _bind(self, target, value, env: Environment) -> None:
        if isinstance(target, ast.Name):
            env[target.id] = value
            return
        if has_logits(value) or self._leads_to_head(value):
            raise self._refused(target, "puts its logits, or itself, somewhere else,")
        if isinstance(target, (ast.Tuple, ast.List, ast.Starred)):
            for part in [target.value] if isinstance(target, ast.Starred) else target.elts:
                self._bind(part, OTHER, env)
            return
        owner = self._value(target.value, env)
        if has_logits(owner) or self._leads_to_head(owner):
            raise self._refused(target, "writes to its logits, or to itself,")

    def _opaque(self, node, env: Environment) -> Any:
        """What is not followed: it may neither see logits nor make them."""
        parts = list(ast.walk(node))
        harmless = {id(part.value) for part in parts if isinstance(part, ast.Attribute) and self._is_harmless(part, env)}
        for part in parts:
            if isinstance(part, (ast.Return, ast.Yield, ast.YieldFrom, ast.Await)):
                raise self._refused(node, "returns from within")
            if isinstance(part, ast.Name):
                value = env.get(part.id, OTHER)
                if has_logits(value) or (self._leads_to_head(value) and id(part) not in harmless):
                    raise self._refused(node, "uses its logits, or itself,")
        env.update({part.id: OTHER for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)})
        return OTHER

    def _is_harmless(self, node: ast.Attribute, env: Environment) -> bool:
        """Tells whether an attribute of a module is read that does not lead to its head or loss."""
        owner = env.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if not isinstance(owner, Module) or not isinstance(node.ctx, ast.Load):
            return False
        return node.attr not in ("loss_function", *self.head[len(owner.path) : len(owner.path) + 1])

    # ------------------------------------------------------------ expressions
    def _value(self, node, env: Environment) -> Any:
        if isinstance(node, ast.Constant):
            return Fact(node.value)
        if isinstance(node, ast.Name):
            return self._named(node.id, env)
        if isinstance(node, ast.Attribute):
            return self._attribute(self._value(node.value, env), node.attr, node)
        if isinstance(node, ast.Call):
            return self._call(node, env)
        if isinstance(node, ast.NamedExpr):
            self._bind(node.target, self._value(node.value, env), env)
            return env[node.target.id]
        if isinstance(node, ast.BinOp):
            return self._binary(node, node.op, node.left, node.right, env)
        if isinstance(node, ast.IfExp):
            truth, envs = truth_of(self._value(node.test, env)), (dict(env), dict(env))
            if truth is not None:
                return self._value(node.body if truth else node.orelse, env)
            value = joined(self._value(node.body, envs[0]), self._value(node.orelse, envs[1]))
            merge(env, *envs)
            return value
        if isinstance(node, ast.BoolOp):
            return self._either(node, env)
        if isinstance(node, ast.Compare):
            return self._compared(node, env)
        if isinstance(node, OPAQUE):
            return self._opaque(node, env)
        if isinstance(node, (ast.UnaryOp, ast.Subscript, ast.Tuple, ast.List, ast.Starred, ast.Slice)):
            parts = [self._value(part, env) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
            self._check_free(node, parts)
            truth = truth_of(parts[0]) if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else None
            return OTHER if truth is None else Fact(not truth)
        raise self._refused(node, "has an expression that is not followed")

    def _check_free(self, node, values) -> None:
        if any(has_logits(value) or self._leads_to_head(value) for value in values):
            raise self._refused(node, "uses its logits, or itself,")

    def _named(self, name: str, env: Environment) -> Any:
        if name in env:
            return env[name]
        if name == "super":
            raise NotServed(f"{self.name} calls super()")
        return Global(self.function.__globals__.get(name, getattr(builtins, name, None)))

    def _attribute(self, owner, name: str, node) -> Any:
        if owner is MIXED or isinstance(owner, LogitsMethod):
            raise self._refused(node, "uses what may be its logits")
        if isinstance(owner, Logits):
            return OTHER if name == "device" else LogitsMethod(owner, name)
        if isinstance(owner, Output):
            return Logits() if name == "logits" else OTHER
        if isinstance(owner, Module):
            return self._of_module(owner, name)
        if isinstance(owner, Global):
            return Global(getattr(owner.value, name, None))
        known = isinstance(owner, Fact) and is_config(owner.value)
        return fact_of(getattr(owner.value, name, OTHER), (*owner.path, name)) if known else OTHER

    def _of_module(self, owner: Module, name: str) -> Any:
        module, path = owner.module, (*owner.path, name)
        if name in module._modules:
            child = module._modules[name]
            return Fact(None) if child is None else Module(child, path)
        if name in vars(module) and name != "training":
            return fact_of(vars(module)[name], path)
        return LOSS_FUNCTION if name == "loss_function" and not owner.path else OTHER

    def _leads_to_head(self, value) -> bool:
        return isinstance(value, Module) and value.path == self.head[: len(value.path)]

    def _either(self, node: ast.BoolOp, env: Environment) -> Any:
        decides, known = isinstance(node.op, ast.Or), True
        value: Any = OTHER
        for part in node.values:
            calls, value = env[CALLS], self._value(part, env)
            self._check_free(node, [value])
            if env[CALLS] != calls and not known:
                raise self._refused(node, "may call its loss or not")
            truth = truth_of(value)
            known = known and truth is not None
            if known and truth is decides:
                break
        return value if known else OTHER

    def _compared(self, node: ast.Compare, env: Environment) -> Any:
        left, *others = (self._value(part, env) for part in (node.left, *node.comparators))
        right, kind = others[0], type(node.ops[0])
        if len(others) == 1 and kind in (ast.Is, ast.IsNot) and isinstance(right, Fact) and right.value is None:
            if left is OTHER or left is MIXED:
                return OTHER
            return Fact((isinstance(left, Fact) and left.value is None) == (kind is ast.Is))
        self._check_free(node, [left, *others])
        return computed(COMPARED.get(kind), left, right) if len(others) == 1 else OTHER

    def _binary(self, node, kind, left_node, right_node, env: Environment) -> Any:
        left, right = self._value(left_node, env), self._value(right_node, env)
        if not any(has_logits(value) or self._leads_to_head(value) for value in (left, right)):
            return computed(COMPUTED.get(type(kind)), left, right)
        logits, factor = (right, left) if isinstance(kind, ast.Mult) and isinstance(right, Logits) else (left, right)
        if not isinstance(logits, Logits) or not isinstance(kind, (ast.Mult, ast.Div)) or not is_number(factor):
            raise self._refused(node, "changes its logits")
        return logits.after(Step("times" if isinstance(kind, ast.Mult) else "over", factor.path))

    # ------------------------------------------------------------ calls
    def _call(self, node: ast.Call, env: Environment) -> Any:
        function = self._value(node.func, env)
        looks = isinstance(function, Global) and function.value in (getattr, hasattr) and len(node.args) > 1
        if looks and isinstance(node.args[1], ast.Constant):
            owner = self._value(node.args[0], env)
            found = OTHER if has_logits(owner) else self._attribute(owner, str(node.args[1].value), node)
            if found is not OTHER:
                return Fact(True) if function.value is hasattr else found
        args = [self._value(part, env) for part in node.args]
        kwargs = {part.arg: self._value(part.value, env) for part in node.keywords}
        values = [*args, *kwargs.values()]
        if any(map(self._leads_to_head, values[1:] if looks else values)):
            raise self._refused(node, "passes itself on")
        given = [value for value in values if has_logits(value)]
        if function is LOSS_FUNCTION:
            return self._loss(node, args, kwargs, env)
        if isinstance(function, LogitsMethod):
            to_float32 = function.name == "to" and len(args) == 1 and isinstance(args[0], Global) and args[0].value is torch.float32
            if not kwargs and (to_float32 or (function.name in ("float", "contiguous") and not args)):
                return function.logits
        elif self._leads_to_head(function) and not given:
            return self._made(node, function, args, kwargs)
        elif not given:
            return self._text_config(node, env) if isinstance(node.func, ast.Attribute) and not values else OTHER
        elif isinstance(function, Global) and isinstance(given[0], Logits) and len(given) == 1:
            if function.value in (torch.tanh, nn.functional.tanh) and len(values) == 1 and args and not given[0].capped:
                return given[0].after(Step("tanh"))
            if is_output(function.value) and not args and kwargs.get("logits") is given[0]:
                return Output(function.value)
        raise self._refused(node, "calls something else with its logits")

    def _text_config(self, node, env: Environment) -> Any:
        """What `get_text_config()` of a configuration returns; of any other method, no logits."""
        owner = self._value(node.func.value, env) if node.func.attr == "get_text_config" else OTHER
        known = isinstance(owner, Fact) and is_config(owner.value)
        return fact_of(owner.value.get_text_config(), (*owner.path, f"get_text_config{CALL}")) if known else OTHER

    def _loss(self, node, args, kwargs, env: Environment) -> Any:
        given = {**dict(zip(LOSS_ARGUMENTS, args)), **kwargs}
        others = [value for name, value in given.items() if name != "logits"]
        starred = any(isinstance(part, ast.Starred) for part in node.args)
        if not isinstance(given.get("logits"), Logits) or any(map(has_logits, others)) or starred:
            raise self._refused(node, "does not give its loss the logits of its output embeddings")
        classes = given.get("vocab_size")
        if not isinstance(classes, Fact) or not classes.path or self.vocabulary not in ((), classes.path):
            raise self._refused(node, "tells its loss a number of classes that it does not hold")
        steps = given["logits"].steps
        self.steps = steps if env[CALLS] == (0,) and self.steps in ((), steps) else (Step("either"),)
        self.vocabulary = classes.path
        env[CALLS] = tuple(calls + 1 for calls in env[CALLS])
        return GIVEN

    def _made(self, node, function: Module, args, kwargs) -> Any:
        """What the head returns, or a module that holds it."""
        if function.path == self.head:
            if len(args) != 1 or kwargs or isinstance(node.args[0], ast.Starred):
                raise self._refused(node, "gives its head more than hidden states")
            return Logits()
        if kwargs.get("labels") is GIVEN and hasattr(type(function.module), "loss_function"):
            raise ComputedInside(f"{self.name} gives its labels to {'.'.join(function.path)}, which computes the loss")
        inner = _Reader(function.module, function.path, self.head)
        _, *names = inner.arguments
        starred = None in kwargs or any(isinstance(part, ast.Starred) for part in node.args)
        value, *others = inner.run(None if starred else {**dict(zip(names, args)), **kwargs})
        for other in others:
            value = joined(value, other)
        return value
