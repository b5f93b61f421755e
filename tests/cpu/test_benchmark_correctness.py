"""The benchmark's references, and its check of every provider against them."""

import dataclasses
import sys
import types

import pytest
import torch

from benchmark import (
    correctness,
    eager,
    models,
    operations_delta_nets,
    operations_experts,
    operations_log_probs,
    operations_losses,
    operations_rows,
    published,
)
from benchmark.correctness import relative_error
from benchmark.operation import Random


def test_the_formulas_are_those_of_transformers():
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 64).bfloat16(), torch.randn(64).bfloat16()
    norm = qwen3.Qwen3RMSNorm(64, eager.EPS)
    norm.weight = torch.nn.Parameter(weight)
    assert torch.equal(norm(x), eager.rms_norm(x, weight))

    config = published.new_model("tiny", None, "meta").config
    size, tokens = models.size("tiny"), 7
    cos, sin = qwen3.Qwen3RotaryEmbedding(config)(x, torch.arange(tokens)[None])
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip((cos, sin), eager.angles(tokens, size.head_dim), strict=True))
    q, k = (torch.randn(1, heads, tokens, size.head_dim).bfloat16() for heads in (size.heads, size.kv_heads))
    wanted = qwen3.apply_rotary_pos_emb(q, k, cos, sin)
    assert all(torch.equal(a, b) for a, b in zip(wanted, eager.rotary(q, k, cos, sin), strict=True))

    mlp = qwen3.Qwen3MLP(config).bfloat16()
    assert torch.equal(mlp(x), mlp.down_proj(eager.swiglu(mlp.gate_proj(x), mlp.up_proj(x))))


def test_the_chunked_reference_is_the_formula_differentiated(monkeypatch):
    operation = operations_losses.LINEAR_CROSS_ENTROPY
    inputs = operation.inputs(models.size("tiny"), 13, Random("cpu", torch.float32, 1))
    monkeypatch.setattr(operations_log_probs, "CHUNK", 4)
    chunked, whole = operation.reference(inputs), correctness.reference(dataclasses.replace(operation, reference=None), inputs)
    for a, b in zip(chunked.outputs + chunked.gradients, whole.outputs + whole.gradients, strict=True):
        assert relative_error(a, b) < 1e-12
    assert 0 < chunked.rounding["dweight"] < 1e-5


def test_the_gate_of_the_benchmark_is_transformers():
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    experts = types.SimpleNamespace(alpha=operations_experts.ALPHA, limit=operations_experts.LIMIT)
    gate_up = 10 * torch.randn(9, 16)
    assert torch.equal(operations_experts.gate_of_gpt_oss(gate_up), GptOssExperts._apply_gate(experts, gate_up))


def test_the_gated_norm_of_the_benchmark_is_transformers():
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

    x, gate, weight = torch.randn(9, 16).bfloat16(), torch.randn(9, 16).bfloat16(), torch.randn(16).bfloat16()
    norm = Qwen3_5RMSNormGated(16, eager.EPS)
    norm.weight = torch.nn.Parameter(weight)
    assert torch.equal(norm(x, gate), operations_delta_nets.gated_rms_norm(x, gate, weight))


def test_the_pytorch_code_of_a_delta_net_is_had_without_loading_anything_twice():
    loaded, libraries = sys.modules["torch"], set(operations_delta_nets.LIBRARIES)
    before = libraries & set(sys.modules)  # a test of steps may have said that one is not there
    function = operations_delta_nets.in_pytorch("causal_conv1d_fn")
    x, weight = torch.randn(1, 6, 9), torch.randn(6, 4)
    wanted = torch.nn.functional.silu(torch.nn.functional.conv1d(x, weight[:, None], padding=3, groups=6)[..., :9])
    assert torch.equal(function(x, weight, None, activation="silu"), wanted)
    assert sys.modules["torch"] is loaded and libraries & set(sys.modules) == before


def test_relative_errors():
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, float("nan")]), exact) == relative_error(torch.ones(3), exact) == float("inf")
    assert relative_error(torch.full((2,), 0.5), torch.zeros(2, dtype=torch.float64)) == pytest.approx(0.5**0.5)


def test_the_check_names_the_result_that_is_furthest_beyond_its_bound():
    correctness.check({"y": 0.02, "dx": 0.029}, torch.bfloat16)
    with pytest.raises(ArithmeticError, match=r"dx is off by 3.1e-02, expected at most 3e-02"):
        correctness.check({"y": 0.02, "dx": 0.031}, torch.bfloat16)
    correctness.check({"y": 0.02, "dx": 0.031}, torch.bfloat16, {"dx": 0.04})
    with pytest.raises(ArithmeticError, match="y is off by"):
        correctness.check({"y": 2e-4, "dx": 0.031}, torch.float32, {"dx": 0.04})
    for unordered in ({"y": 0.001, "dx": float("nan")}, {"dx": float("nan"), "y": 0.001}):
        with pytest.raises(ArithmeticError, match="dx is off by nan"):
            correctness.check(unordered, torch.bfloat16)


@pytest.mark.parametrize("wrong", range(3))
def test_each_result_and_gradient_is_looked_at(wrong):
    operation = operations_rows.SWIGLU
    inputs = operation.inputs(models.size("tiny"), 4, Random("cpu", torch.float32, 0)).copy()

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            ctx.save_for_backward(gate, up)
            return eager.swiglu(gate, up) * (1.1 if wrong == 0 else 1.0)

        @staticmethod
        def backward(ctx, dy):
            with torch.enable_grad():
                gate, up = (t.detach().requires_grad_() for t in ctx.saved_tensors)
                dgate, dup = torch.autograd.grad(eager.swiglu(gate, up), (gate, up), dy)
            return dgate * (1.1 if wrong == 1 else 1.0), dup * (1.1 if wrong == 2 else 1.0)

    found = correctness.errors(operation, Wrong.apply, inputs, correctness.reference(operation, inputs))
    assert [name for name, error in found.items() if error > 1e-3] == [("y", "dgate", "dup")[wrong]]
