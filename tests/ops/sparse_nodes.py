"""The decoder layer's node of a mixture of experts: projection, RMSNorm, router and experts with both residual connections."""

import functools
import importlib

import torch

from tests.ops.common import BF16, CPU, FP32, errors_in, exact, leaf, randn
from tests.ops.experts import experts_exact
from tests.ops.projected_nodes import projected, projections_of
from tests.ops.rms_norm import rms_norm_exact
from tests.tolerances import assert_close

EXPERTS, WIDTH, HIDDEN, FEATURES = 6, 20, 1024, 64
NAMES = ("x", "norm_weight", "router", "gate_up", "down")


def _inputs(dtype, tokens, device):
    """The node's tensors by name; the router's logits are far enough apart that rounding decides no choice of experts."""
    made = {
        "x": randn(tokens, HIDDEN, dtype=dtype, device=device),
        "norm_weight": randn(HIDDEN, dtype=dtype, device=device, seed=1) + 1,
        "router": randn(EXPERTS, HIDDEN, dtype=dtype, device=device, seed=2, scale=HIDDEN**-0.5),
        "gate_up": randn(EXPERTS, 2 * WIDTH, HIDDEN, dtype=dtype, device=device, seed=3, scale=HIDDEN**-0.5),
        "down": randn(EXPERTS, HIDDEN, WIDTH, dtype=dtype, device=device, seed=4, scale=WIDTH**-0.5),
    }
    return {name: leaf(tensor) for name, tensor in made.items()}


def norm_experts_exact(x, norm_weight, router, gate_up, down, top_k, normalised, eps):
    """In float64, one expert after the other."""
    y = rms_norm_exact(x, norm_weight, eps)
    scores, expert = torch.softmax(y @ router.t(), -1).topk(top_k, -1)
    scores = scores / scores.sum(-1, keepdim=True) if normalised else scores
    return x + experts_exact(y, expert, scores, gate_up, down)


def check_norm_experts(ops, dtype=FP32, top_k=2, normalised=True, attended=False, dropout=0.0, frozen=(), tokens=7, again=False):
    """attended: with attention's output and its projection, which has an adapter, in front. frozen: names that need no gradient. again: a
    second backward pass."""
    nodes = importlib.import_module(f"{ops.__name__}.shared.ops.sparse_nodes")
    leaves = _inputs(dtype, tokens, CPU)
    exacts = {name: exact(tensor) for name, tensor in leaves.items()}
    before, o = (None, None), (None, None)
    if attended:
        before = [leaf(randn(tokens, FEATURES, dtype=dtype, device=CPU, seed=7))]
        before.append(exact(before[0]))
        (o, *_), (o64, *_) = projections_of(ops, [(HIDDEN, FEATURES)], dtype == FP32, dropout)
        o = o, o64
    for name in frozen:
        leaves[name].requires_grad_(False)
    x, norm_weight, router, *weights = leaves.values()
    torch.manual_seed(3)
    y = nodes.norm_experts(x, norm_weight, nodes.Router(router, top_k, normalised), *weights, 0.5, before[0], o[0])
    dy = randn(*y.shape, dtype=dtype, device=CPU, seed=9)
    if again:
        y.backward(dy, retain_graph=True)
        for tensor in leaves.values():
            tensor.grad = None
    y.backward(dy)
    torch.manual_seed(3)
    x64, *rest = exacts.values()
    total = x64 + projected(before[1], o[1]) if attended else x64
    y64 = norm_experts_exact(total, *rest, top_k, normalised, 0.5)
    y64.backward(dy.double())
    assert_close(y, y64, dtype, "norm and experts", 2)
    for name, tensor in leaves.items():
        if name in frozen:
            assert tensor.grad is None
            continue
        assert tensor.grad.dtype == tensor.dtype
        assert_close(tensor.grad, exacts[name].grad, dtype, f"gradient of norm and experts: {name}", 3)
    for found, wanted in zip((before[0], *(o[0] or ())[:4]), (before[1], *(o[1] or ())[:4]), strict=True):
        if found is not None:
            assert_close(found.grad, wanted.grad, dtype, "gradient of attention's output or its projection", 3)


def check_that_frozen_layers_compute_nothing(ops):
    """Only the router is trained: neither the input nor the experts get a gradient."""
    check_norm_experts(ops, frozen=("x", "norm_weight", "gate_up", "down"))
    check_norm_experts(ops, frozen=("x", "norm_weight", "router", "gate_up"))


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "norm_experts": check_norm_experts,
    "norm_experts_half": functools.partial(check_norm_experts, dtype=BF16),
    "norm_experts_plain": functools.partial(check_norm_experts, top_k=3, normalised=False),
    "norm_experts_attended": functools.partial(check_norm_experts, dtype=BF16, attended=True),
    "norm_experts_dropout": functools.partial(check_norm_experts, dtype=BF16, attended=True, dropout=0.25),
    "norm_experts_frozen": check_that_frozen_layers_compute_nothing,
    "norm_experts_again": functools.partial(check_norm_experts, again=True, frozen=("gate_up", "router")),
}
MUTANTS = [
    *errors_in("shared/ops/sparse_nodes.py", "norm_experts", "choose_experts",
         ("scores = scores / scores.sum(-1, keepdim=True)", "pass"),
         ("if normalised:", "if True:", "norm_experts_plain")),
    *errors_in("shared/ops/sparse_nodes.py", "norm_experts", "router_backward",
         ("of_scores - scores * total", "of_scores"),
         ("mul_(-total)", "mul_(0 * total)", "norm_experts_plain"),
         ("scatter_add_(1, expert, of_scores)", "scatter_add_(1, expert, dscores)", "norm_experts_plain")),
    *errors_in("shared/ops/sparse_nodes.py", "norm_experts", "_NormExperts.forward",
         ("(x, attended, norm_weight, rstd, router_weight", "(x, attended, norm_weight, 2 * rstd, router_weight"),
         ("torch.add(x, found", "torch.add(0 * x, found"),
         ("onto=x)", "onto=0 * x)", "norm_experts_attended"),
         ("(x, attended, norm", "(x, 2 * attended, norm", "norm_experts_attended")),
    *errors_in("shared/ops/sparse_nodes.py", "norm_experts", "_NormExperts.backward",
         ("need_gate_up or need_router or ctx.written_over", "need_gate_up or ctx.written_over", "norm_experts_frozen"),
         ("need_gate_up or need_router or ctx.written_over", "need_gate_up or need_router", "norm_experts_again"),
         ("ctx.written_over = True", "pass", "norm_experts_again"),
         ("dy.addmm_(dlogits, router_weight)", "pass"),
         ("torch.mm(dlogits.t(), y)", "torch.mm(dlogits.t(), x)"),
         ("add_rms_norm_backward(dy, dout", "add_rms_norm_backward(dy, torch.zeros_like(dout)"),
         ("o.input_gradient((dx,), dlow)", "o.input_gradient((dx,), None)", "norm_experts_attended"),
         ("o.gradients((dx,)", "o.gradients((dout,)", "norm_experts_attended")),
]  # fmt: skip
