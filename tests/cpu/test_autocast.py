"""Operations under autocast: forward and backward on either side of it, beside what PyTorch's own operations do there."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import cross_entropy, linear, silu

from tests.ops.suite import suite
from tests.tolerances import relative_error

TOKENS, HIDDEN, WIDE, HEADS, HEAD_DIM = 24, 32, 48, 2, 16


def norm(x, weight):
    return weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos[:, None] + torch.cat((-x[..., half:], x[..., :half]), -1) * sin[:, None]


def gated(x, gate, up, down):
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def attention_inputs(x, weight, q, k, v, q_norm, k_norm, cos, sin):
    y = norm(x, weight)
    q, k, v = (linear(y, w).view(1, TOKENS, -1, HEAD_DIM) for w in (q, k, v))
    return (*(rotate(norm(t, w).transpose(1, 2), cos, sin) for t, w in ((q, q_norm), (k, k_norm))), v.transpose(1, 2), x)


def of_experts(hidden, scores, gate_up, down):
    index = torch.arange(TOKENS)[:, None] % 3
    rows = [(silu((g := gate_up[i] @ h)[:WIDE]) * g[WIDE:] * s) @ down[i].t() for i, h, s in zip(index[:, 0], hidden, scores)]
    return torch.stack(rows)


# operation -> shapes of its arguments, how it is called, what it computes. "1" of a shape: rotary tables, without gradients.
TABLE = ("1", 1, TOKENS, HEAD_DIM)
MLP = ((WIDE, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE))
OPERATIONS = {
    "rms_norm": ([(TOKENS, HIDDEN), (HIDDEN,)], lambda f, *a: f(*a), norm),
    "swiglu": ([(TOKENS, WIDE), (TOKENS, WIDE)], lambda f, *a: f(*a), lambda gate, up: silu(gate) * up),
    "mlp": ([(TOKENS, HIDDEN), *MLP], lambda f, *a: f(*a), gated),
    "tiled_mlp": ([(TOKENS, HIDDEN), *MLP], lambda f, *a: f(*a, shards=2), gated),
    "norm_mlp": ([(TOKENS, HIDDEN), (HIDDEN,), *MLP], lambda f, *a: f(*a), lambda x, w, *mlp: x + gated(norm(x, w), *mlp)),
    "norm_attention_inputs": (
        [(TOKENS, HIDDEN), (HIDDEN,), *[(HEADS * HEAD_DIM, HIDDEN)] * 3, (HEAD_DIM,), (HEAD_DIM,), TABLE, TABLE],
        lambda f, x, w, q, k, v, *rest: f(x, w, (q, k, v), *rest, (1, TOKENS)),
        attention_inputs,
    ),
    "experts": (
        [(TOKENS, HIDDEN), (TOKENS, 1), (3, 2 * WIDE, HIDDEN), (3, HIDDEN, WIDE)],
        lambda f, hidden, *rest: f(hidden, torch.arange(TOKENS)[:, None] % 3, *rest),
        of_experts,
    ),
    "linear_cross_entropy": (
        [(TOKENS, HIDDEN), (50, HIDDEN)],
        lambda f, hidden, weight: f(hidden, weight, torch.arange(TOKENS)),
        lambda hidden, weight: cross_entropy(linear(hidden, weight).float(), torch.arange(TOKENS)),
    ),
}


def inputs_of(shapes, dtype):
    torch.manual_seed(0)
    made = []
    for shape in shapes:
        table = shape[0] == "1"
        tensor = torch.randn(shape[1:] if table else shape).mul_(0.3 if len(shape) > 1 else 1.0).to(dtype)
        made.append(tensor if table else tensor.requires_grad_())
    return made


def run(call, inputs, forward, backward):
    """The results and the gradients; forward, backward: whether they are under autocast."""

    def context(on):
        return torch.autocast("cpu", torch.bfloat16) if on else nullcontext()

    with context(forward):
        results = call(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    with context(backward):
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        torch.manual_seed(1)
        grads = torch.autograd.grad(results, wanted, [torch.randn(result.shape).to(result.dtype) for result in results])
    return results, grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_forward_and_backward_on_either_side_of_autocast(ops, name, dtype):
    shapes, call, formula = OPERATIONS[name]
    operation = getattr(ops, name)

    def ours(*args):
        return call(operation, *args)

    outside = run(ours, inputs_of(shapes, dtype), False, False)
    exact = run(formula, inputs_of(shapes, torch.float64), False, False)
    for forward, backward in ((False, True), (True, False), (True, True)):
        found, grads = run(ours, inputs_of(shapes, dtype), forward, backward)
        if not forward:  # the backward pass is that of the forward pass, wherever it is called
            for a, b in zip((*found, *grads), (*outside[0], *outside[1]), strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b)
            continue
        assert all(gradient.dtype == dtype for gradient in grads)
        if name != "experts":  # torch's grouped GEMMs do not know autocast either
            expected = run(formula, inputs_of(shapes, dtype), True, True)
            dtypes = [result.dtype for result in expected[0]]
            if name == "norm_attention_inputs":  # q and k come as attention takes them, in the dtype of the products
                dtypes[:2] = dtypes[2:3] * 2
            assert [result.dtype for result in found] == dtypes
        reference = run(formula, inputs_of(shapes, dtype), True, False)
        for a, b, c in zip((*found, *grads), (*exact[0], *exact[1]), (*reference[0], *reference[1]), strict=True):
            assert relative_error(a, b) <= 1.5 * relative_error(c, b) + 1e-3


@pytest.mark.parametrize("name", ["mlp", "tiled_mlp"])
def test_autocast_casts_what_is_of_different_dtypes(ops, name):
    """An input in half precision beside weights in float32, as a layer before it gives one under autocast."""
    shapes, call, formula = OPERATIONS[name]

    def inputs():
        return [inputs_of(shapes, torch.bfloat16)[0], *inputs_of(shapes, torch.float32)[1:]]

    found, grads = run(lambda *args: call(getattr(ops, name), *args), inputs(), True, False)
    wanted, expected = run(formula, inputs(), True, False)
    for a, b in zip((*found, *grads), (*wanted, *expected), strict=True):
        assert a.dtype == b.dtype and relative_error(a, b) <= 2e-2


@pytest.mark.parametrize("name", ["norm_mlp", "norm_attention_inputs"])
def test_autocast_to_the_weights_dtype_changes_nothing(ops, name):
    """The fused nodes take part: same bits, and nothing but the node made its results."""
    shapes, call, _ = OPERATIONS[name]
    operation = getattr(ops, name)
    outside = run(lambda *args: call(operation, *args), inputs_of(shapes, torch.bfloat16), False, False)
    found, grads = run(lambda *args: call(operation, *args), inputs_of(shapes, torch.bfloat16), True, False)
    for a, b in zip((*found, *grads), (*outside[0], *outside[1]), strict=True):
        assert torch.equal(a, b)
    assert [type(result.grad_fn) for result in found] == [type(result.grad_fn) for result in outside[0]]
    assert type(found[0].grad_fn).__name__.startswith("_Norm")


def of_heads(f, hidden, weight, teacher_hidden, teacher_weight):
    return f(hidden, weight, teacher_hidden, teacher_weight, beta=0.3)


PREFERENCE = torch.arange(TOKENS).view(4, TOKENS // 4)  # labels: two pairs of answers
HEADS_OF = {
    "linear_divergence": of_heads,
    "linear_cross_entropy": lambda f, hidden, weight, *_: f(hidden, weight, torch.arange(TOKENS), label_smoothing=0.3),
    "linear_log_probs": lambda f, hidden, weight, *_: f(hidden, weight, torch.arange(TOKENS), outputs=("entropy",), entropy_gradient=True),
    "linear_preference_loss": lambda f, hidden, weight, *teacher: f(
        hidden.view(4, -1, HIDDEN), weight, PREFERENCE, ref_hidden=teacher[0].view(4, -1, HIDDEN), ref_weight=teacher[1]
    ),
}


@pytest.mark.parametrize("name", HEADS_OF)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_autocast_to_the_dtype_of_a_head_changes_nothing(liger, all_operations, name, dtype, frozen):
    """What is float32 outside stays so, in the forward pass too: logits that are not rounded, sums, means."""
    operation = liger.linear_preference_loss if "preference" in name else getattr(suite(all_operations), name)

    def results(autocast):
        tensors = inputs_of([(TOKENS, HIDDEN), (50, HIDDEN)] * 2, dtype)
        tensors[1].requires_grad_(not frozen)
        with torch.autocast("cpu", dtype) if autocast else nullcontext():
            found = HEADS_OF[name](operation, *tensors)
        found = [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]
        loss = sum((t.float() * torch.linspace(-1, 1, t.numel()).view(t.shape)).sum() for t in found if t.requires_grad)
        return [*found, *torch.autograd.grad(loss, [t for t in tensors[:2] if t.requires_grad])]

    for a, b in zip(results(True), results(False), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
