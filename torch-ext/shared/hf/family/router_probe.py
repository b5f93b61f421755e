"""Finds out how a router scores and chooses experts: by the results of a copy of it with other numbers of everything, on the CPU."""

import ast
import itertools
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

import torch
from torch import nn

from ...decoder.router import Scores, choose_experts, rounded
from ..parts.facts import NotServed, Path, follow, forward_text, refused
from ..parts.modules import original_forward
from .accounted import ROUTER
from .calls import argument_names
from .families import Scored
from .probes import CALLS, check_plain, copy_of, is_of_autocast

__all__ = ["router_kind"]

# What routers call their attributes: of the number of groups, of those that are chosen, of a factor, of the least sum.
GROUPS = ("num_group", "topk_group"), ("n_group", "topk_group")
FACTORS, LEAST = ("routed_scaling_factor", "router_scaling_factor", "route_scale"), ("norm_min",)
ROWS, EXPERTS, TOP_K, OF_COPY = 512, 16, 3, {"factor": 2.5, "least": 0.5}
SMALL = 1e-3  # what is added to a sum is smaller
LOWER = 0.0, 8.0  # by so much is a correction lowered: then all is below what stands for the experts of other groups, unless that is -inf
MAY_CALL = {*CALLS, "type", "sigmoid", "gather", "scatter_", "zeros_like", "masked_fill", "expand", "bool"}
BY_AXES = {"max": {"dim"}, "clamp": {"min"}}  # the keywords with which these choose, or hold a sum up, and do not cut off


class RouterKind(NamedTuple):
    """by_logits: of a `Sparse`. experts_last: whether the experts are the last of its three results, or the one before. scored: of a
    `Sparse`, with the attributes that lead to a correction in the router. flags: its attributes that decided branches."""

    by_logits: bool
    experts_last: bool
    scored: Scored
    flags: Dict[str, Any]


def _paths_of(module: nn.Module) -> List[Path]:
    """The paths to a router's own tensors beside its weight and bias."""
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    return [tuple(name.split(".")) for name in names if name not in ("weight", "bias")]


class _Copy:
    """A copy of a router with other numbers. correction: what it adds where experts are chosen, or None; handed: whether the block hands
    that to it."""

    def __init__(self, module: Any, hidden: int, dtype: torch.dtype, paths: List[Path], handed: bool):
        generator = torch.Generator().manual_seed(1)
        self.module = made = copy_of(module, torch.float32, generator)
        self._paths, self._lowered = paths, 0.0
        made._parameters["weight"] = nn.Parameter(torch.randn(EXPERTS, hidden, generator=generator) * 0.3)
        if made._parameters.get("bias") is not None:
            made._parameters["bias"] = nn.Parameter(torch.randn(EXPERTS, generator=generator))
        self.correction, self.handed = None, handed
        if paths or handed:
            self.correction = torch.randn(EXPERTS, generator=generator)
        for *parts, name in paths:
            owner = made.get_submodule(".".join(parts))
            held = owner._parameters if name in owner._parameters else owner._buffers
            value = self.correction.expand(*held[name].shape[:-1], -1).clone()  # type: ignore[union-attr]
            held[name] = nn.Parameter(value) if name in owner._parameters else value
        made.top_k = TOP_K
        if "num_experts" in vars(made):
            made.num_experts = EXPERTS
        # Rows of small and of larger logits, and some whose sigmoids are next to nothing.
        logits = torch.randn(ROWS, EXPERTS, generator=generator) * torch.logspace(-1, 0.4, ROWS)[:, None]
        logits[::8] -= torch.linspace(30, 60, ROWS // 8)[:, None]
        self.x = logits @ torch.linalg.pinv(made.weight.detach()).t()
        made.to(dtype)
        self.x = self.x.to(dtype)
        self.correction = None if self.correction is None else self.correction.to(dtype)

    def set(self, values: Dict[str, Any]) -> None:
        """Gives the copy's attributes other values."""
        vars(self.module).update(values)

    def lower(self, by: float) -> None:
        """Lowers the correction by so much, and no longer by what it was lowered by before."""
        for each in (self.correction, *(follow(self.module, path) for path in self._paths)):
            if each is not None:
                each.sub_(by - self._lowered)
        self._lowered = by

    def logits(self, wide: bool) -> torch.Tensor:
        weight, bias = self.module.weight, self.module._parameters.get("bias")
        tensors = (each if each is None or not wide else each.float() for each in (self.x, weight, bias))
        return nn.functional.linear(*tensors)  # type: ignore[arg-type]

    def run(self, name: str) -> Tuple[Tuple[torch.Tensor, ...], int]:
        """(results, the place of the experts among them). name: of the router's forward."""
        try:
            results = original_forward(self.module)(self.module, self.x, *([self.correction] if self.handed else []))
        except Exception as error:  # whatever a class's own code raises
            raise NotServed(f"{name} does not run alone: {type(error).__name__}: {error}") from None
        places = [i for i, each in enumerate(results) if not each.is_floating_point()] if isinstance(results, tuple) else []
        if len(results) != 3 or places not in ([1], [2]):
            raise NotServed(f"{name} does not return logits, scores and experts")
        return results, places[0]


def _table(scores, expert) -> Any:
    """(scores, which are chosen) [rows, experts] of scores and experts in any order; None of something else."""
    if expert.dtype != torch.long or expert.shape != (ROWS, TOP_K) or scores.shape != expert.shape:
        return None
    empty = torch.zeros(ROWS, EXPERTS)
    return empty.scatter(1, expert, scores.float()), empty.scatter(1, expert, 1.0)


def _agree(found, wanted, close: float) -> bool:
    same = found is not None and torch.equal(found[1], wanted[1])
    return same and torch.allclose(found[0], wanted[0], rtol=close, atol=1e-6 if close < 1e-3 else close)


def _kinds(text, groups: bool, normalised: Tuple[bool, ...], numbers: Dict[str, float]) -> Iterator[Tuple[bool, Scores]]:
    """The ways in which it may score, with the numbers that the copy's attributes have; `best` is 0 where no groups count."""
    constants = (node.value for node in ast.walk(text.node) if isinstance(node, ast.Constant) and type(node.value) is float)
    added = dict.fromkeys((0.0, *(value for value in constants if 0 < value < SMALL)))
    rest = {name: value for name, value in numbers.items() if name in ("factor", "least")}
    of_groups = {name: value for name, value in numbers.items() if name in ("groups", "chosen")}
    choices = [{"best": 0}, *({**of_groups, "best": best} for best in (1, 2) if groups)]
    for of, each, eps, choice in itertools.product(("softmax", "sigmoid"), normalised, added, choices):
        yield each, Scores(of=of, eps=eps, **rest, **choice)  # type: ignore[arg-type]


def _check_text(module: Any, text, names: Dict[str, str], flags: List[str], paths: List[Path], handed: bool) -> None:
    """Raises `NotServed` where a router's text does what the results for a few numbers would not show."""
    for node in ast.walk(text.node):
        keywords: Any = BY_AXES.get(getattr(getattr(node, "func", None), "attr", ""))
        of_torch = getattr(getattr(getattr(node, "func", None), "value", None), "id", "") == "torch"
        if keywords and ({each.arg for each in node.keywords} != keywords or len(node.args) > of_torch):  # type: ignore[attr-defined]
            raise refused(text, node, "cuts off")
        if keywords == {"min"} and getattr(node.keywords[0].value, "attr", "") != names.get("least"):  # type: ignore[attr-defined]
            raise refused(text, node, "cuts off")
    known = {*ROUTER, "bias", *names.values(), *flags, *(path[0] for path in paths)}
    check_plain(text.function, text.name, known, flags, type(module), {*MAY_CALL, *BY_AXES}, is_of_autocast)
    for name, part in module._modules.items():
        inner = forward_text(part)
        check_plain(inner.function, inner.name, [path[1] for path in paths if path[0] == name], (), type(part), {*CALLS, "squeeze"})
    plain = "weight" in module._parameters and len(paths) + handed <= 1 and type(getattr(module, "top_k", None)) is int
    if not plain or len(argument_names(original_forward(module))) != 1 + handed:
        raise NotServed(f"{type(module).__name__} is not a router with a weight, a bias, a correction and top_k alone")


def _is_by_logits(text) -> bool:
    """Both orders are one function where the scores are normalised: the text says which, for its rounding."""
    calls = [part for part in ast.walk(text.node) if isinstance(part, ast.Call) and getattr(part.func, "attr", "") in ("topk", "softmax")]
    names = [call.func.attr for call in sorted(calls, key=lambda part: (part.lineno, part.col_offset))]  # type: ignore[attr-defined]
    return "softmax" in names and names[0] == "topk"


def router_kind(module: Any, hidden: int, handed: bool = False) -> RouterKind:
    """Finds the kind of a router. handed: whether its block hands it a correction. Raises `NotServed` where no `Scores` say what it
    does."""
    text, own = forward_text(module), vars(module)
    read = {node.attr for node in ast.walk(text.node) if isinstance(node, ast.Attribute)}
    paths, asks = _paths_of(module), "norm_topk_prob" in own
    names = {field: name for field, known in (("factor", FACTORS), ("least", LEAST)) for name in known if name in own and name in read}
    pair: Tuple[str, ...] = next((pair for pair in GROUPS if {*pair} <= own.keys() & read), ())
    names.update(zip(("groups", "chosen"), pair))
    flags = [name for name, value in own.items() if type(value) in (bool, str) and name in read]
    _check_text(module, text, names, flags, paths, handed)
    other = NotServed(f"{text.name} is not the softmax of the highest logits, or the highest of the softmax or of sigmoids")
    by_logits, found, places = _is_by_logits(text), set(), set()  # type: ignore[var-annotated]
    with torch.no_grad():
        made = _Copy(module, hidden, torch.float32, paths, handed)
        lower = LOWER[: 1 if made.correction is None else 2]
        for by, groups, flag in itertools.product(lower, ((4, 2), (1, 1))[: 2 if pair else 1], (True, False) if asks else (None,)):
            made.lower(by)
            numbers = {field: {**OF_COPY, "groups": groups[0], "chosen": groups[1]}[field] for field in names}
            made.set({**{name: numbers[field] for field, name in names.items()}, **({"norm_topk_prob": flag} if asks else {})})
            results, place = made.run(text.name)
            logits = made.logits(True)
            if not torch.allclose(results[0].float(), logits, atol=1e-6):
                raise other
            agreed = set()
            for normalised, kind in _kinds(text, bool(pair), (True, False) if flag is None else (flag,), numbers):
                if by_logits and (kind.of != "softmax" or not normalised):
                    continue
                wanted = choose_experts(logits, TOP_K, normalised, by_logits, kind, made.correction)
                if _agree(_table(results[3 - place], results[place]), _table(*wanted), 1e-5):
                    agreed.add((not asks and normalised, kind._replace(groups=1, chosen=1, factor=1.0, least=0.0)))
            found = found & agreed if places else agreed
            places.add(place)
        if not found or len(places) != 1:
            raise other
        normalised, kind = min(found, key=lambda each: (each[1].eps, each[1].best))
        narrow = _Copy(module, hidden, torch.bfloat16, paths, handed)
        narrow.set({name: vars(made.module)[name] for name in (*names.values(), *(["norm_topk_prob"] if asks else []))})
        kind = _in_bf16(narrow, kind, lambda logits, kind: choose_experts(
            logits, TOP_K, normalised, by_logits, kind._replace(best=kind.best or 1, **numbers), narrow.correction  # type: ignore[arg-type]
        ), text.name)  # fmt: skip
    if by_logits and (kind._replace(best=1, rounds=True) != Scores() or names or paths or handed):
        raise other
    scored = Scored(kind._replace(best=kind.best or 1), pair if kind.best else (), names.get("factor", ""), names.get("least", ""))
    scored = scored._replace(correction=paths[0] if paths else (), normalised=None if asks or normalised else False)
    return RouterKind(by_logits, place == 2, scored, {name: own[name] for name in flags if name != "norm_topk_prob"})


def _in_bf16(made: _Copy, kind: Scores, choose: Callable[[torch.Tensor, Scores], Tuple[torch.Tensor, torch.Tensor]], name: str) -> Scores:
    """A kind with the precision that the router has: of its logits and of its scores. choose: of logits and a kind, in ours."""
    results, place = made.run(name)
    for wide in (True, False):
        logits = made.logits(wide)
        if torch.equal(results[0].float(), logits.float()):
            kind = kind._replace(wide=wide, rounds=results[3 - place].dtype == torch.bfloat16)
            scores, expert = choose(logits, kind)
            if _agree(_table(results[3 - place], results[place]), _table(rounded(scores, torch.bfloat16, kind), expert), 1e-2):
                return kind
    raise NotServed(f"{name} rounds its logits or its scores in another place")
