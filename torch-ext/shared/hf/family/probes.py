"""Finds out what small parts of a layer compute by running copies of them on the CPU: a norm on random rows, a rotary embedding with the
angles of the model's own module. Routers are in `router_probe`."""

import ast
import copy
import inspect
import re
from types import FunctionType
from typing import Any, Callable, Collection, Dict, Iterator, NamedTuple, Optional, Sequence

import torch
from torch import nn

from ...decoder.norms import norm_reference
from ...decoder.spec import Norm
from ..parts.facts import ForwardText, NotServed, attribute_of, forward_text, refused
from ..parts.lookups import ROTARY, function_in
from ..parts.modules import original_forward, runs_torchs
from ..parts.texts import text_that_runs
from .accounted import LAYER_NORM
from .calls import argument_names
from .families import Family
from .forwards import rotary_of

__all__ = [
    "CALLS", "Angles", "NormKind", "angles_of", "check_plain", "copy_of", "flags_of", "is_of_autocast", "norm_kind", "rotary_kind",
]  # fmt: skip

ROWS = 64
EPSILON = 3e-3  # that no text has
# What the forwards of norms and routers and rotary embeddings may call: what they compute of some numbers, they compute of all.
CALLS: Collection[str] = {
    "to", "float", "type_as", "pow", "mean", "rsqrt", "square", "sqrt", "view", "reshape", "size", "unsqueeze", "flatten", "chunk", "cat",
    "stack", "repeat_interleave", "linear", "softmax", "topk", "sum", "cos", "sin",
}  # fmt: skip
OF_NORMS: Collection[str] = {*CALLS, "layer_norm", "is_autocast_enabled", "get_autocast_dtype", "_cast"}
DEVICE = r"\w+ = (\w+)\.device\.type if isinstance\(\1\.device\.type, str\)( and \1\.device\.type != 'mps')? else 'cpu'"
BRANCHES = (
    *(ast.If, ast.IfExp, ast.BoolOp, ast.Compare, ast.For, ast.While, ast.Try, ast.With, ast.Lambda, ast.ListComp, ast.GeneratorExp),
    *(ast.DictComp, ast.SetComp, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom, ast.Assert, ast.Raise, ast.NamedExpr),
)


def check_plain(
    function, name: str, reads: Collection[str] = (), flags: Collection[str] = (), cls: Any = None, calls: Collection[str] = CALLS,
    skips: Callable[[Any], bool] = lambda node: False,
) -> ForwardText:  # fmt: skip
    """The text of a function whose results for a few numbers say what it computes of all. Raises `NotServed` with the line where it has
    branches, calls what is not in `calls`, or reads more of its module. reads: attributes of the module that it may read; flags: of them
    those that branches may follow, or comparisons with constants; cls: of the module, None for a plain function; skips: tells parts of
    the text that need no look."""
    text = text_that_runs(function, function.__name__) if isinstance(function, FunctionType) else None
    if text is None:
        raise NotServed(f"{name} is not what its file says, or has no file")
    found = ForwardText(function, name, text.node, ())
    me = text.node.args.args[0].arg if cls else None
    decided: list = []
    for node in _parts_of(text.node.body, skips):
        test: Any = getattr(node, "test", None)
        if isinstance(test, ast.Compare) and all(isinstance(each, ast.Constant) for each in test.comparators):
            test = test.left
        followed = isinstance(node, ast.If) and attribute_of(test, me) in flags
        if followed and test is not node.test:
            decided.append(node.test)
        around = isinstance(node, ast.With) and all(map(skips, node.items))
        of_autocast = isinstance(node, ast.If) and ast.unparse(node.test).removeprefix("not ") == "torch.is_autocast_enabled()"
        if isinstance(node, BRANCHES) and not (followed or around or node in decided or (of_autocast and calls is OF_NORMS)):
            raise refused(found, node, "branches")
        if attribute_of(node, me) and node.attr not in reads:
            own = inspect.getattr_static(cls, node.attr, None)
            if not isinstance(own, FunctionType):
                raise refused(found, node, "reads more of its module")
            check_plain(own, f"{name}, {node.attr}", reads, flags, cls, calls, skips)
        elif isinstance(node, ast.Call) and not attribute_of(node.func, me):
            called = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
            other = function.__globals__.get(called) if isinstance(node.func, ast.Name) else None
            if isinstance(other, FunctionType) and other.__globals__ is function.__globals__ and other is not function:
                check_plain(other, f"{name}, {called}", calls=calls, skips=skips)
            elif called not in calls or other is not None:
                raise refused(found, node, "calls something else")
    return found


def _parts_of(nodes: Sequence[Any], skips: Callable[[Any], bool]) -> Iterator[Any]:
    """All nodes of a text, outer ones before inner ones, without those to skip."""
    for node in nodes:
        if not skips(node):
            yield node
            yield from _parts_of([*ast.iter_child_nodes(node)], skips)


def is_of_autocast(node) -> bool:
    """Whether a part of a text only keeps autocast away, as our nodes do."""
    if isinstance(node, ast.Assign):
        return re.fullmatch(DEVICE, ast.unparse(node)) is not None
    call = node.context_expr if isinstance(node, ast.withitem) else None
    if getattr(getattr(call, "func", None), "id", "") != "maybe_autocast" or call.args:  # type: ignore[union-attr]
        return False
    return any(each.arg == "enabled" and getattr(each.value, "value", None) is False for each in call.keywords)  # type: ignore[union-attr]


def copy_of(module: nn.Module, dtype: torch.dtype, generator: torch.Generator) -> Any:
    """A copy of a small module on the CPU with random weights."""
    made = copy.deepcopy(module).to_empty(device="cpu").to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made


class NormKind(NamedTuple):
    """Describes the norms of a family: `offset`, `rounds` and `centred` as in `Norm`; `argument`, the name of their forward's input;
    `weightless` as in `Family`."""

    offset: float
    rounds: str
    argument: str
    centred: bool = False
    weightless: Optional[float] = None


def flags_of(module: nn.Module) -> Dict[str, bool]:
    """Returns the attributes of a norm that decide which branch it takes."""
    return {name: value for name, value in vars(module).items() if type(value) is bool and name != "training"}


def norm_kind(module: nn.Module) -> NormKind:
    """Finds the kind of a norm by its results in bf16, of an RMSNorm bit for bit, over six orders of magnitude."""
    name = type(module).__name__
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if type(module) is nn.LayerNorm and runs_torchs(module, nn.LayerNorm) and weight is not None and weight.dim() == 1:
        return NormKind(0.0, "first", "input", True)
    text = forward_text(module)  # raises for what is not what its file says
    reads, flags = {*LAYER_NORM, *flags_of(module)}, tuple(flags_of(module))
    check_plain(text.function, text.name, reads, flags, type(module), OF_NORMS, is_of_autocast)
    if not module._parameters and not module._modules and not module._buffers:
        return _weightless(module, text)
    eps = [each for each in ("variance_epsilon", "eps") if type(vars(module).get(each)) is float]
    if len(eps) != 1 or weight is None or weight.dim() != 1 or module._buffers or module._modules:
        raise NotServed(f"{name} is not a norm with a weight and an epsilon alone")
    generator = torch.Generator().manual_seed(0)
    made = copy_of(module, torch.bfloat16, generator)
    setattr(made, eps[0], EPSILON)
    x = torch.randn(ROWS, weight.numel(), generator=generator) * torch.logspace(-3, 3, ROWS)[:, None]
    x = x.to(torch.bfloat16)
    with torch.no_grad():
        wanted = original_forward(module)(made, x)
        kinds = [(offset, rounds) for offset in (0.0, 1.0) for rounds in ("first", "last") if bias is None]
        found = [(*kind, False) for kind in kinds if _same_bits(norm_reference(Norm(EPSILON, *kind), x, made.weight), wanted)]
        scales = ((offset, made.weight + offset) for offset in (0.0, 1.0))
        found += [(offset, "first", True) for offset, scale in scales if _is_layer_norm(module, made, x, wanted, EPSILON, scale)]
    if len(found) != 1:
        raise NotServed(f"{text.name} computes another norm than a row can say")
    offset, rounds, centred = found[0]
    return NormKind(offset, rounds, argument_names(original_forward(module))[0], centred)


def _weightless(module: nn.Module, text: ForwardText) -> NormKind:
    """The kind of a norm without a weight, whose epsilon is a number in its text. Raises `NotServed` for any other than a LayerNorm."""
    constants = (node.value for node in ast.walk(text.node) if isinstance(node, ast.Constant))
    shape, numbers = vars(module).get("normalized_shape"), [each for each in constants if isinstance(each, float)]
    if type(shape) is not tuple or len(shape) != 1 or len(numbers) != 1:
        raise NotServed(f"{type(module).__name__} is not a norm with a weight and an epsilon alone")
    x = torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, ROWS)[:, None]
    x, made = x.to(torch.bfloat16), copy.deepcopy(module)
    with torch.no_grad():
        if not _is_layer_norm(module, made, x, original_forward(module)(made, x), numbers[0], None):
            raise NotServed(f"{text.name} computes another norm than a row can say")
    return NormKind(0.0, "first", argument_names(original_forward(module))[0], True, numbers[0])


def _is_layer_norm(module: nn.Module, made: Any, x: torch.Tensor, wanted, eps: float, weight: Optional[torch.Tensor]) -> bool:
    """Whether the results of a copy in bf16 are a LayerNorm's, rounded once, and are those of one under autocast."""
    if not isinstance(wanted, torch.Tensor) or wanted.dtype != x.dtype or wanted.shape != x.shape:
        return False
    parameters = [None if each is None else each.double() for each in (weight, made._parameters.get("bias"))]
    exact = norm_reference(Norm(eps, centred=True), x.double(), *parameters)
    with torch.autocast("cpu", torch.bfloat16):
        before = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", True)  # what torch.is_autocast_enabled() tells, and without a GPU changes nothing else
        try:
            under_autocast = original_forward(module)(copy.deepcopy(made).float(), x.float())
        finally:
            torch.set_autocast_enabled("cuda", before)
    once = ((wanted - exact).abs() <= (exact.to(x.dtype) - exact).abs() + 1e-5).all()
    return bool(once) and torch.allclose(under_autocast.double(), exact, rtol=0.05, atol=0.05)


def _same_bits(found: torch.Tensor, wanted) -> bool:
    return isinstance(wanted, torch.Tensor) and found.dtype == wanted.dtype and torch.equal(found, wanted)


class Angles(NamedTuple):
    """Of a model's own module of angles: cos and sin [1, tokens, width], and the size of the heads that are turned by them."""

    cos: torch.Tensor
    sin: torch.Tensor
    head_dim: int

    def of_heads(self, head_dim: int) -> "Angles":
        """Angles for heads of another size, of which the same part is turned and the same elements have one angle."""
        if head_dim == self.head_dim:
            return self
        width = self.cos.shape[-1] * head_dim // self.head_dim
        theta = torch.randn(1, self.cos.shape[1], width, generator=torch.Generator().manual_seed(2))
        half = self.cos.shape[-1] // 2
        if torch.equal(self.cos[..., :half], self.cos[..., half:]):
            theta = theta[..., : width // 2].repeat(1, 1, 2)
        elif torch.equal(self.cos[..., ::2], self.cos[..., 1::2]):
            theta = theta[..., : width // 2].repeat_interleave(2, -1)
        return Angles(theta.cos(), theta.sin(), head_dim)


def angles_of(rotary: nn.Module, tokens: int) -> Any:
    """What a model's module of angles gives its layers for a few positions: (cos, sin) in float32, as a rule."""
    more: Dict[str, Any] = {}
    if "layer_type" in argument_names(original_forward(rotary)):
        kinds = [name[: -len("_inv_freq")] for name in rotary._buffers if name.endswith("_inv_freq") and "original" not in name]
        first = (getattr(rotary.config, "layer_types", None) or kinds)[0]
        more["layer_type"] = first if first in kinds else kinds[0]
    positions = torch.arange(tokens)[None] * 3 + 1
    if "mrope_section" in (getattr(getattr(rotary, "config", None), "rope_parameters", None) or {}):
        positions = positions[None].expand(3, -1, -1)
    with torch.no_grad():
        return rotary(torch.zeros(1), positions, **more)


class RotaryKind(NamedTuple):
    """rotary, partial, narrow, half_angles, spread: of a `Family`."""

    rotary: str
    partial: bool
    narrow: bool
    half_angles: bool
    spread: bool


def rotary_kind(function, angles: Angles) -> RotaryKind:
    """Finds the kind of a rotary embedding."""
    cos, sin, head_dim = angles
    check_plain(function_in(function), ROTARY)
    name, tokens = getattr(function, "__name__", type(function).__name__), cos.shape[1]
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, tokens, head_dim, generator=generator) for heads in (3, 1))
    with torch.no_grad():
        try:
            wanted = function(q, k, cos, sin)
        except Exception as error:
            raise NotServed(f"{name} does not run with the model's angles: {type(error).__name__}: {error}") from None
        twice = all(torch.equal(each[..., ::2], each[..., 1::2]) for each in (cos, sin))
        for style, spread in (("halves", False), ("pairs", False), *((("pairs", True),) if twice else ())):
            for partial in (False, True):
                if not partial and cos.shape[-1] not in (head_dim, head_dim // 2):
                    continue
                try:
                    found = rotary_of(Family("", "", "", rotary=style, partial=partial, spread=spread))(q, k, cos, sin)
                except Exception:  # angles of another width than this style has
                    continue
                if all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(found, wanted)):
                    part = _takes_part(function, head_dim)
                    keeps = function(q.bfloat16(), k.bfloat16(), cos, sin)[0].dtype == torch.bfloat16
                    halves, half = style == "halves", not part and cos.shape[-1] * 2 == head_dim
                    return RotaryKind(style, part, keeps and not part and not half and halves, half and halves, spread)
    raise NotServed(f"{name} turns neither the halves of a head nor neighbours")


def _takes_part(function, head_dim: int) -> bool:
    """Whether a function leaves the rest of a head as it is where the angles are those of a part."""
    q, none = torch.ones(1, 2, 3, head_dim), torch.zeros(1, 3, head_dim // 2)
    try:
        found = function(q, q, none, none)[0]
    except Exception:
        return False
    left, turned = found[..., head_dim // 2 :], found[..., : head_dim // 2]
    return found.shape == q.shape and torch.equal(left, q[..., head_dim // 2 :]) and not turned.any()
