"""A layer of experts: routing, the gate, and the sum over a token's experts."""

import torch

from tests.ops.common import BF16, CPU, FP16, FP32, errors_in, exact, leaf, on_cpu, randn
from tests.ops.generated import generated
from tests.ops.signature import Signature
from tests.tolerances import assert_close


def experts_exact(hidden, expert, scores, gate_up, down, gate_up_bias=None, down_bias=None, *, transposed=False, interleaved=False,
                  alpha=0.0, limit=float("inf")):
    """A loop over the experts, as transformers' eager implementation."""
    if not transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    out = torch.zeros_like(hidden)
    for e in range(gate_up.shape[0]):
        token, k = torch.where(expert == e)
        x = hidden[token] @ gate_up[e]
        x = x if gate_up_bias is None else x + gate_up_bias[e]
        gate, up = (x[:, ::2], x[:, 1::2]) if interleaved else x.chunk(2, -1)
        if alpha:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            gated = (up + 1) * (gate * torch.sigmoid(alpha * gate))
        else:
            gated = torch.nn.functional.silu(gate) * up
        y = gated @ down[e]
        y = y if down_bias is None else y + down_bias[e]
        out = out.index_add(0, token, scores[token, k, None] * y)
    return out


def routing(tokens, experts, top_k, skew=0.0, absent=0.0, seed=0):
    """Different experts for each token; skew: how much the first ones are preferred; absent: the share of ids that are no expert."""
    generator = torch.Generator().manual_seed(seed)
    preference = torch.randn(tokens, experts, generator=generator) - skew * torch.arange(experts)
    expert = preference.topk(top_k, -1).indices
    expert[torch.rand(expert.shape, generator=generator) < absent] = experts
    return expert


def check_experts(ops, device, dtype, tokens, hidden, width, experts, top_k, *, gpt_oss=True, skew=0.0, absent=0.0, frozen=(),
                  scores_dtype=None, limit=7.0):
    """frozen: what requires no gradient."""
    expert, made, options = experts_inputs(device, dtype, tokens, hidden, width, experts, top_k, gpt_oss, skew, absent, scores_dtype, limit)
    leaves = {name: tensor if name in frozen else leaf(tensor) for name, tensor in made.items()}
    exacts = {name: exact(tensor) for name, tensor in made.items()}

    def run(function, tensors, expert):
        hidden, scores, *weights = tensors.values()
        return function(hidden, expert, scores, *weights, **options)

    out = run(ops.experts, leaves, expert)
    out64 = run(experts_exact, exacts, expert.cpu())
    assert out.dtype == dtype
    # The output of the first GEMM, the gated rows and those of the second GEMM are rounded, as in the model.
    assert_close(out, out64, dtype, "experts", 1.25)
    dout = randn(tokens, hidden, dtype=dtype, device=device, seed=6)
    out.backward(dout)
    out64.backward(dout.double().cpu())
    for name in made:
        if name in frozen:
            assert leaves[name].grad is None
            continue
        assert leaves[name].grad.dtype == leaves[name].dtype
        assert_close(leaves[name].grad, exacts[name].grad, dtype, f"experts d{name}", 1.25)


def experts_inputs(device, dtype, tokens, hidden, width, experts, top_k, gpt_oss=True, skew=0.0, absent=0.0, scores_dtype=None, limit=7.0):
    """(expert, the tensors that are differentiated by name, options). The biases put gate and up on both sides of each clamp, far
    from where rounding decides."""
    expert = routing(tokens, experts, top_k, skew, absent).to(device)
    made = {
        "hidden": randn(tokens, hidden, dtype=dtype, device=device),
        "scores": randn(tokens, top_k, dtype=torch.float32, device=device, seed=1).softmax(-1).to(scores_dtype or dtype),
        "gate_up": randn(experts, 2 * width, hidden, dtype=dtype, device=device, seed=2, scale=hidden**-0.5),
        "down": randn(experts, hidden, width, dtype=dtype, device=device, seed=3, scale=width**-0.5),
    }
    options = {}
    if gpt_oss:
        made["gate_up"], made["down"] = (made[name].transpose(1, 2).contiguous() for name in ("gate_up", "down"))
        made["gate_up_bias"] = (randn(experts, 2 * width, dtype=torch.float32, device=device, seed=4).round().clamp(-1, 1) * 12).to(dtype)
        made["down_bias"] = randn(experts, hidden, dtype=dtype, device=device, seed=5)
        options = {"transposed": True, "interleaved": True, "alpha": 1.702, "limit": limit}
    return expert, made, options


def experts_run(ops, device, dtype, *sizes, **options):
    """(leaves by name, a call of the operation on them)"""
    expert, made, options = experts_inputs(device, dtype, *sizes, **options)
    leaves = {name: leaf(tensor) for name, tensor in made.items()}
    hidden, scores, *weights = leaves.values()
    return leaves, lambda: ops.experts(hidden, expert, scores, *weights, **options)


def check_second_backward_of_experts(ops, device):
    """The first one writes over what the forward pass saved."""
    leaves, run = experts_run(ops, device, torch.bfloat16, 19, 24, 64, 4, 2)
    out = run()
    first = torch.autograd.grad(out, leaves.values(), leaves["hidden"].detach(), retain_graph=True)
    second = torch.autograd.grad(out, leaves.values(), leaves["hidden"].detach())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def check_nan_in_experts(ops, device, gpt_oss):
    """In one expert's gate, which a clamp must not turn into a number."""
    leaves, run = experts_run(ops, device, torch.float32, 9, 8, 64, 4, 2, gpt_oss=gpt_oss)
    gate = leaves["gate_up_bias"][1, 0] if gpt_oss else leaves["gate_up"][1, 0]
    gate.data.fill_(float("nan"))
    assert torch.equal(run().isnan().all(1).cpu(), (routing(9, 4, 2) == 1).any(1))


EXPERTS_CASES = (
    dict(tokens=37, hidden=24, width=64, experts=4, top_k=2),
    dict(tokens=70, hidden=16, width=128, experts=5, top_k=3, skew=0.6),
    dict(tokens=9, hidden=24, width=20, experts=8, top_k=4, absent=0.3),
    dict(tokens=25, hidden=10, width=7, experts=16, top_k=1),
    dict(tokens=3, hidden=24, width=33, experts=8, top_k=8),
    dict(tokens=33, hidden=1032, width=64, experts=3, top_k=2, skew=3.0),
    dict(tokens=37, hidden=24, width=64, experts=4, top_k=2, gpt_oss=False),
    dict(tokens=9, hidden=10, width=31, experts=8, top_k=5, gpt_oss=False, absent=0.3),
    dict(tokens=6, hidden=16, width=128, experts=12, top_k=8, gpt_oss=False, scores_dtype=torch.float32),
    dict(tokens=11, hidden=24, width=256, experts=12, top_k=10, gpt_oss=False, absent=0.2),
)


EXPERTS_FROZEN = (
    ("gate_up", "down", "gate_up_bias", "down_bias"),
    ("gate_up", "gate_up_bias"),
    ("down", "down_bias"),
    ("hidden", "scores"),
    ("hidden", "scores", "gate_up", "down", "gate_up_bias"),
    ("scores", "gate_up_bias"),
)


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "experts": on_cpu(check_experts, FP32, 70, 24, 20, 4, 2, skew=0.6),
    "experts_packed": on_cpu(check_experts, BF16, 70, 24, 128, 4, 2, skew=0.6),
    "experts_many": on_cpu(check_experts, FP32, 1100, 8, 4, 2, 1, skew=9.0),
    "experts_wide": on_cpu(check_experts, FP32, 9, 1032, 20, 8, 4, absent=0.3),
    "experts_silu": on_cpu(check_experts, FP32, 41, 24, 20, 4, 2, gpt_oss=False),
    "experts_silu_pieces": on_cpu(check_experts, FP32, 41, 24, 100, 4, 2, gpt_oss=False),
    "experts_silu_exact": on_cpu(check_experts, FP16, 41, 24, 128, 4, 2, gpt_oss=False),
    "experts_top_10": on_cpu(check_experts, FP32, 5, 24, 20, 12, 10, gpt_oss=False),
    "experts_again": lambda ops: check_second_backward_of_experts(ops, CPU),
    "experts_nan": lambda ops: check_nan_in_experts(ops, CPU, True),
}
MUTANTS = [
    *generated("kernel_src/clamped_gate.py", "experts",
               "clamped_backward_tile clamped_forward_tile clamped_gate_backward clamped_gate_forward read_interleaved write_interleaved",
               same={"dgate = ct.where(gate >= limit, 0.0, d * (u + 1.0) * (s + alpha * silu * (1.0 - s)))": "no gate is at the limit"}),
    *generated("kernel_src/clamped_gate.py", "experts or experts_many", "expert_bias_sum"),
    *generated("kernel_src/clamped_gate.py", "experts_wide", "token_sum_bias"),
    *generated("kernel_src/experts.py", "experts_silu or experts_silu_exact", "swiglu_rows_backward swiglu_rows_forward"),
    *generated("kernel_src/experts.py", "experts_wide", "token_rows"),
    *generated("kernel_src/experts.py", "experts_wide or experts_top_10", "token_sum"),
    *generated("shared/ops/expert_gate.py", "experts", "dense"),
    *generated("shared/ops/expert_gate.py", "experts_wide", "token_sum_reference", kernels=False),
    *generated("shared/ops/experts.py", "experts_again", "_Experts.backward"),
    *generated("kernel_src/clamped_gate.py", "experts_packed", "join split"),
    *errors_in("kernel_src/experts.py", "experts_silu", "read", ("padding_value=0", "padding_value=1")),
    *errors_in("kernel_src/experts.py", "experts_silu_pieces", "write", ("mask=inside, check_bounds=False", "check_bounds=True")),
    *errors_in("kernel_src/clamped_gate.py", "experts_packed", "split", ("w >> 16", "w")),
    *errors_in("kernel_src/experts.py", "experts", "read_scores", ("padding_value=0", "padding_value=0) * 2 + (0", "experts_silu")),
    *errors_in("kernel_src/clamped_gate.py", "experts", "clamped",
         ("ct.where(gate > limit, limit, gate)", "gate"),
         ("ct.where(up < -limit, -limit, up)", "up"),
         ("ct.where(gate > limit, limit, gate)", "ct.minimum(gate, limit)", "experts_nan")),
    *errors_in("kernel_src/clamped_gate.py", "experts", "clamped_gate_forward",
         ("first + ROWS <= last", "first + ROWS <= last + ROWS", "experts_packed")),
    *errors_in("kernel_src/clamped_gate.py", "experts", "clamped_backward_tile",
         ("ct.where(gate > limit, 0.0, d * (u + 1.0) * (s + alpha * silu * (1.0 - s)))", "d * (u + 1.0) * (s + alpha * silu * (1.0 - s))"),
         ("d = d * score", "pass"),
         ("ct.sum(d * h, axis=1", "ct.sum(d * silu, axis=1"),
         ("(flat, piece), partial, mask=flat < last", "(flat, 0), partial, mask=flat < last", "experts_packed"),
         ("write(dbias, block, 2 * cols + 1, columns, dup", "write(dbias, block, 2 * cols + 1, columns, dgate")),
    *errors_in("kernel_src/clamped_gate.py", "experts", "clamped_gate_backward",
         ("first + ROWS <= last", "first + ROWS <= last + ROWS", "experts_packed")),
    *errors_in("kernel_src/experts.py", "experts_silu", "swiglu_rows_forward",
         ("ct.minimum(rows, out.shape[0] - 1)", "rows", "experts_silu_exact")),
    *errors_in("kernel_src/experts.py", "experts_wide", "token_rows",
         ("(row, cols), tile, check_bounds=True", "(row, cols), tile, check_bounds=False"),
         ("(position, (token, k)", "(position, (token, 0)")),
    *errors_in("kernel_src/experts.py", "experts_wide", "token_sum",
         ("padding_value=LAST", "padding_value=0"),
         ("cols[None, :]), check_bounds=True", "cols[None, :]), check_bounds=False")),
    *errors_in("kernel_src/clamped_gate.py", "experts_wide", "token_sum_bias",
         ("ct.gather(bias, (e, cols), check_bounds=True", "ct.gather(bias, (e, cols), check_bounds=False")),
    *errors_in("shared/ops/expert_gate.py", "experts", "gate_backward_reference",
         ("torch.where(keep_gate, dg, 0.0)", "dg"),
         ("u.abs() <= gate.limit", "u <= gate.limit"),
         ("1 + gate.alpha * g * (1 - s)", "1 + g * (1 - s)"), kernels=False),
    *errors_in("shared/ops/expert_gate.py", "experts_silu", "gate_backward_reference", ("d * u * (s + g * s * (1 - s))", "d * u * s"),
               kernels=False),
    *errors_in("shared/ops/expert_gate.py", "experts", "gate_backward", ("d * scores[:, None], gate_up", "d, gate_up"), kernels=False),
    *errors_in("shared/ops/experts.py", "experts_wide", "experts_backward",
         ("dscores = torch.where(position < order.shape[0], dscores, 0.0)", "dscores = dscores"),
         ("dscores = dscores + of_bias", "of_bias = of_bias"),
         ("token_sum(dx, position)", "token_sum(dx, position, expert, scores, down_bias)"),
         ("dense(expert, scores", "dense(expert, scores.abs() + 1")),
    *errors_in("shared/ops/experts.py", "experts", "_Experts.forward",
               ("save_for_backward(*inputs, *saved)",
                "save_for_backward(*inputs[:2], *inputs[2:3], *inputs[3:], *saved[:1], saved[1].flip(0), *saved[2:])")),
    *errors_in("shared/ops/experts.py", "experts_again", "_Experts.backward", ("ctx.written_over = True", "pass")),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
GPT_OSS = {"transposed": True, "interleaved": True, "alpha": 1.702, "limit": 7.0}


def _every_expert(hidden, expert, scores, gate_up_weight, down_weight, gate_up_bias, down_bias):
    """GPT-OSS's, every expert on every token, which works under every transform."""
    alpha, limit, out = GPT_OSS["alpha"], GPT_OSS["limit"], 0
    for e in range(gate_up_weight.shape[0]):
        gate, up = (hidden @ gate_up_weight[e] + gate_up_bias[e]).unflatten(-1, (-1, 2)).unbind(-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        y = ((up + 1) * gate * torch.sigmoid(alpha * gate)) @ down_weight[e] + down_bias[e]
        out = out + (scores * (expert == e)).sum(-1, keepdim=True) * y
    return out.to(hidden.dtype)


SIGNATURES = {
    "experts": Signature(
        lambda s: {
            **{"hidden": (s.tokens, s.inner), "expert": (s.tokens, s.top_k), "scores": (s.tokens, s.top_k)},
            **{"gate_up_weight": (s.expert_count, s.inner, 2 * s.expert_width), "down_weight": (s.expert_count, s.expert_width, s.inner)},
            **{"gate_up_bias": (s.expert_count, 2 * s.expert_width), "down_bias": (s.expert_count, s.inner)},
        },
        _every_expert,
        constant=("expert",),
        call=lambda function, found, **options: function(**found, **GPT_OSS, **options),
    )
}


def _routed(new):
    """The arguments of Qwen3's experts: five tokens, two of four experts each."""
    expert = new.integers([[0, 1], [3, 0], [1, 3], [2, 0], [0, 3]])
    return new(5, 64, seed=8), expert, new(5, 2, seed=9), new(4, 256, 64, seed=10), new(4, 64, 128, seed=11), None, None


def _gradient(new, need):
    """order: the rows by expert; position: where each of them went; ends: where each expert's end."""
    order = new.integers([0, 3, 7, 8, 1, 4, 6, 2, 5, 9])
    position = new.integers([[0, 4], [7, 1], [5, 8], [6, 2], [3, 9]], torch.int32)
    ends = new.integers([4, 6, 7, 10], torch.int32)
    needs = [need] * 4 + [False] * 2
    return new(5, 64, seed=12), *_routed(new), new(10, 256, seed=13), order, position, ends, *SILU, needs


SILU = False, False, 1.0, float("inf")
OPERATORS = {
    "experts_forward": lambda new: [(*_routed(new), *SILU)],
    "experts_backward": lambda new: [_gradient(new, need) for need in (True, False)],
}
GPU_TESTS = {
    "experts": ("test_experts_of_qwen3_moe", "test_gpt_oss.py::test_experts", "test_qwen3_moe.py"),
    "clamped_gate": ("test_gpt_oss.py::test_experts",),
}
