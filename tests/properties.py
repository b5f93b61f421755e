"""Any operation on any sizes, dtype, layout, storage offset and options gives what float64 gives, and touches nothing else.

hypothesis draws the calls: tests/cpu makes few of them through the interpreter, tests/gpu many with the real cubins.
"""

from typing import NamedTuple

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests import op_cases as cases
from tests.ops.common import FLOATS, randn
from tests.tolerances import RELATIVE_ERROR

FEW_TOKENS = st.sampled_from((0, 1, 2, 3, 5, 7, 17))
# Lengths with kernels of their own, lengths between them, and some that 8 does not divide.
LENGTHS = st.one_of(st.sampled_from((64, 128, 256, 1000, 1024, 1025, 2048, 2560)), st.integers(5, 300))
CLASSES = st.one_of(st.sampled_from((1, 2, 1000, 4096, 4099)), st.integers(3, 200))


def budget(examples: int) -> settings:
    """The same examples on every run."""
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


@st.composite
def shapes(draw, operation):
    """(shapes of the arguments, options) of one operation."""
    tokens, length = draw(FEW_TOKENS), draw(LENGTHS)
    rows = draw(st.sampled_from(((tokens,), (2, tokens), (tokens, 1, 3))))
    if operation in ("rms_norm", "round_last_rms_norm"):
        return {"x": (*rows, length), "weight": (length,)}, {}
    if operation in ("add_rms_norm", "round_last_add_rms_norm"):
        return {"x": (*rows, length), "residual": (*rows, length), "weight": (length,)}, {}
    if operation in ("norm_add", "norm_add_norm"):
        found = {"branch": (*rows, length), "residual": (*rows, length), "weight": (length,)}
        return {**found, **({"next_weight": (length,)} if operation == "norm_add_norm" else {})}, {}
    if operation == "gated_rms_norm":
        return {"x": (*rows, length), "gate": (*rows, length), "weight": (length,)}, {}
    if operation == "gated_output":
        return {"out": (*rows, length), "gate": (*rows, length)}, {}
    if operation == "swiglu":
        return {"gate": (*rows, length), "up": (*rows, length)}, {}
    if operation in ("rotary", "qk_norm_rotary"):
        return draw(heads(operation, tokens))
    inner = draw(st.sampled_from((1, 3, 16, 64, 77)))
    if operation == "linear_cross_entropy":
        classes = draw(CLASSES)
        found = {"hidden": (*rows, inner), "weight": (classes, inner), "target": rows}
        found |= draw(st.sampled_from(({}, {"bias": (classes,)}))) | draw(st.sampled_from(({}, {"class_weight": (classes,)})))
        options = {name: draw(values) for name, values in LOSS_OPTIONS.items() if draw(st.booleans())}
        return found, options
    if operation == "linear_log_probs":
        classes = draw(CLASSES)
        found = {"hidden": (*rows, inner), "weight": (classes, inner), "target": rows} | draw(st.sampled_from(({}, {"bias": (classes,)})))
        return found, {name: draw(values) for name, values in SCORE_OPTIONS.items() if draw(st.booleans())}
    if operation == "experts":
        count, width = draw(st.sampled_from((1, 2, 5, 8))), draw(st.sampled_from((8, 33, 64)))
        found = {"hidden": (tokens, inner), "expert": (tokens, count), "scores": (tokens, count)}
        found |= {"gate_up_weight": (count, inner, 2 * width), "down_weight": (count, width, inner)}
        return {**found, "gate_up_bias": (count, 2 * width), "down_bias": (count, inner)}, {}
    if operation == "norm_attention_inputs":
        width, heads_of = draw(st.sampled_from((2, 16, 128, 128))), draw(st.sampled_from(((8, 4, 4), (4, 4, 4), (3, 1, 1))))
        weights = {f"weights[{i}]": (count * width, length) for i, count in enumerate(heads_of)}
        table = (1, tokens, draw(st.sampled_from((width, width // 2))))
        rest = {"q_norm": (width,), "k_norm": (width,), "cos": table, "sin": table}
        return {"x": (tokens, length), "norm_weight": (length,), **weights, **rest}, {}
    mlp = {"gate_weight": (inner, length), "up_weight": (inner, length), "down_weight": (length, inner)}
    return {"x": (*rows, length), **({"norm_weight": (length,)} if operation == "norm_mlp" else {}), **mlp}, {}


HEADS = ("linear_cross_entropy", "linear_log_probs")
SCORE_OPTIONS = {
    "temperature": st.sampled_from((0.5, 2.0)),
    "softcap": st.sampled_from((2.0, 30.0)),
    "scale": st.sampled_from((0.25, 3.0)),
    "skip_ignored": st.booleans(),
}
LOSS_OPTIONS = {
    "reduction": st.sampled_from(("mean", "sum", "none")),
    "ignore_index": st.sampled_from((-100, 0, 2)),
    "label_smoothing": st.sampled_from((0.1, 0.5)),
    "softcap": st.sampled_from((2.0, 30.0)),
    "lse_square_scale": st.sampled_from((1e-4, 0.1)),
    "num_items": st.sampled_from((1, 5, 37)),
}


@st.composite
def heads(draw, operation, tokens):
    batch, (q, k) = draw(st.integers(1, 3)), draw(st.sampled_from(((8, 8), (16, 8), (4, 4), (5, 1), (3, 2), (12, 4))))
    width = draw(st.sampled_from((2, 16, 64, 80, 128, 128, 128)))
    table = (draw(st.sampled_from((1, batch))), tokens, draw(st.sampled_from((width, max(width // 2, 1)))))
    if operation == "qk_norm_rotary":
        found = {"q": (batch, tokens, q, width), "k": (batch, tokens, k, width), "q_weight": (width,), "k_weight": (width,)}
    else:
        found = {"q": (batch, q, tokens, width), "k": (batch, k, tokens, width)}
    return {**found, "cos": table, "sin": table}, {}


@st.composite
def calls(draw, operation, dtypes=FLOATS):
    found, options = draw(shapes(operation))
    layouts = {name: draw(st.sampled_from((plain, plain, *cases.LAYOUTS))) for name in found}
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
    return cases.plain(operation, found, **options, **({"rounded": True} if operation in HEADS else {}))


def loss_scale(call: Call) -> float:
    """fp16 is trained with one, or its gradients are below its smallest normal number."""
    return 64.0 if call.operation in HEADS and call.dtype == torch.float16 else 1.0


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
