"""Any operation on any sizes, dtype, layout, storage offset and options gives what float64 gives, and touches nothing else.

hypothesis draws the calls: tests/cpu makes few of them through the interpreter, tests/gpu many with the real cubins.
"""

import functools
from typing import NamedTuple

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import op_cases as cases
from tests.ops.common import FLOATS, randn
from tests.ops.layouts import LAYOUTS
from tests.tolerances import RELATIVE_ERROR

FEW_TOKENS = st.sampled_from((0, 1, 2, 3, 5, 7, 17))
# Lengths with kernels of their own, lengths between them, and some that 8 does not divide.
LENGTHS = st.one_of(st.sampled_from((64, 128, 256, 1000, 1024, 1025, 2048, 2560)), st.integers(5, 300))
CLASSES = st.one_of(st.sampled_from((1, 2, 1000, 4096, 4099)), st.integers(3, 200))


def budget(examples: int) -> settings:
    """Draws the same examples on every run."""
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


class Call(NamedTuple):
    """shapes: of each argument; layouts: how each lies in memory; needed: which ones require a gradient."""

    operation: str
    dtype: torch.dtype
    shapes: dict
    layouts: dict
    needed: tuple
    options: dict
    seed: int


def plain(tensor):
    return tensor


SIZES = {
    "tokens": FEW_TOKENS,
    "length": LENGTHS,
    "classes": CLASSES,
    "features": st.sampled_from((1, 3, 16, 64, 77)),
    "inner": st.sampled_from((1, 3, 16, 64, 77)),
    "batch": st.integers(1, 3),
    "heads": st.sampled_from(((8, 8), (16, 8), (4, 4), (5, 1), (3, 2), (12, 4))),
    "width": st.sampled_from((2, 16, 64, 80, 128, 128, 128)),
    "expert_count": st.sampled_from((1, 2, 5, 8)),
    "expert_width": st.sampled_from((8, 33, 64)),
}


class Drawn:
    """Sizes by the names of `signature.Sizes`, each drawn when it is first asked for."""

    def __init__(self, draw):
        self.draw = draw

    def __getattr__(self, name):
        if name not in SIZES:
            raise AttributeError(name)
        value = self.draw(SIZES[name])
        setattr(self, name, value)
        return value

    @functools.cached_property
    def rows(self):
        return self.draw(st.sampled_from(((self.tokens,), (2, self.tokens), (self.tokens, 1, 3))))

    @functools.cached_property
    def tables(self):
        return self.draw(st.sampled_from((1, self.batch)))

    @functools.cached_property
    def table(self):
        return self.draw(st.sampled_from((self.width, max(self.width // 2, 1))))

    @functools.cached_property
    def top_k(self):
        return self.expert_count

    def optional(self, **shapes):
        return {name: shape for name, shape in shapes.items() if self.draw(st.booleans())}


@st.composite
def calls(draw, operation, dtypes=FLOATS):
    signature = cases.SIGNATURES[operation]
    found = signature.shapes(Drawn(draw))
    options = {name: draw(st.sampled_from(values)) for name, values in signature.options.items() if draw(st.booleans())}
    layouts = {name: draw(st.sampled_from((plain, plain, *LAYOUTS))) for name in found}
    needed = tuple(name for name in cases.differentiable(operation, found) if draw(st.sampled_from((True, True, False))))
    return Call(operation, draw(st.sampled_from(dtypes)), found, layouts, needed, options, draw(st.integers(0, 99)))


def tensors_of(call: Call, device) -> dict:
    """The arguments, of order 1, products of order 1."""
    found = {}
    for i, (name, shape) in enumerate(call.shapes.items()):
        scale = shape[1] ** -0.5 if len(shape) > 1 and "weight" in name else 1.0
        found[name] = randn(*shape, dtype=call.dtype, device=device, seed=100 * call.seed + i, scale=scale)
    if "target" in found:
        classes, generator = call.shapes["weight"][0], torch.Generator().manual_seed(call.seed)
        target = torch.randint(0, classes, call.shapes["target"], generator=generator)
        ignored = torch.rand(target.shape, generator=generator) < 0.2
        found["target"] = target.masked_fill(ignored, call.options.get("ignore_index", -100)).to(device)
    if "class_weight" in found:
        found["class_weight"] = found["class_weight"].float().abs() + 0.5
    if "expert" in found:  # some of them none
        count, generator = call.shapes["gate_up_weight"][0], torch.Generator().manual_seed(call.seed)
        found["expert"] = torch.argsort(torch.rand(found["expert"].shape, generator=generator), -1).to(device)
        found["expert"][:, :1] = torch.where(found["expert"][:, :1] % 3 == 1, count, found["expert"][:, :1])
    return {name: call.layouts[name](tensor) for name, tensor in found.items()}


def step(function, call: Call, found: dict, dtype=None, upstream=None):
    """(results, upstream gradients, gradients of what is needed)"""
    leaves = {name: t.detach().to(dtype) if dtype and t.is_floating_point() else t.detach() for name, t in found.items()}
    needed = [leaves[name].requires_grad_() for name in call.needed]
    results = function(call.operation, leaves, **call.options)
    if upstream is None:
        upstream = [randn(*r.shape, dtype=r.dtype, device=r.device, seed=call.seed + 7 + i, scale=loss_scale(call)) for i,
                    r in enumerate(results)]
    pairs = [(r, g.to(r.dtype)) for r, g in zip(results, upstream) if r.requires_grad]
    if not needed or not pairs:
        return results, upstream, {}
    differentiated, incoming = zip(*pairs)
    return results, upstream, dict(zip(call.needed, torch.autograd.grad(differentiated, needed, incoming, allow_unused=True)))


def in_its_dtype(operation, found, **options):
    return cases.plain(operation, found, **options, **({"rounded": True} if "target" in found else {}))


def loss_scale(call: Call) -> float:
    """fp16 is trained with one, or its gradients are below its smallest normal number."""
    return 64.0 if "target" in call.shapes and call.dtype == torch.float16 else 1.0


def check_call(ops, call: Call, device) -> None:
    """ops: of `op_cases.operations`."""
    found = tensors_of(call, device)
    before = {name: tensor.clone() for name, tensor in found.items()}
    results, upstream, gradients = step(lambda *a, **o: cases.run(ops, *a, **o), call, found)
    given = [gradient.clone() for gradient in upstream]
    exact, _, exact_gradients = step(cases.plain, call, found, torch.float64, upstream)
    rough, _, rough_gradients = step(in_its_dtype, call, found, upstream=upstream)
    again, _, gradients_again = step(lambda *a, **o: cases.run(ops, *a, **o), call, found, upstream=upstream)

    assert all(map(torch.equal, results, again)) and all(torch.equal(gradients[n], gradients_again[n]) for n in gradients)
    assert all(torch.equal(found[name], before[name]) for name in found), "an input was written to"
    assert all(map(torch.equal, upstream, given)), "an incoming gradient was written to"
    for i, result in enumerate(results):
        assert_as_exact(result, exact[i], rough[i], call.dtype, f"result {i}")
    for name, gradient in gradients.items():
        if exact_gradients[name] is None:
            assert gradient is None or not gradient.count_nonzero(), name
            continue
        assert gradient.dtype == found[name].dtype and gradient.shape == found[name].shape, name
        assert_as_exact(gradient, exact_gradients[name], rough_gradients[name], call.dtype, f"gradient of {name}")


def assert_as_exact(found, exact, rough, dtype, what) -> None:
    """Within the table's tolerance, or where numbers cancel and that cannot be, about as near as the plain formula.

    Three roundings: as many as the longest of the operations has one after another.
    """
    assert found.shape == exact.shape, f"{what} has shape {list(found.shape)}, expected {list(exact.shape)}"
    found, exact, rough = (t.detach().double() for t in (found, exact, rough))
    error, allowed = (found - exact).norm(), 3 * RELATIVE_ERROR[dtype] * exact.norm()
    allowed = torch.maximum(allowed, 4 * (rough - exact).norm()) + 1e-6 * exact.numel() ** 0.5
    assert error <= allowed, f"{what}: error {error:.2e}, allowed {allowed:.2e}, exact {exact.norm():.2e}"


def check_any_call(ops, operation: str, examples: int, device) -> None:
    """`check_call` of so many calls that are drawn."""

    @budget(examples)
    @given(st.data())
    def each(data):
        check_call(ops, data.draw(calls(operation)), device)

    each()
