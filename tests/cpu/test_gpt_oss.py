"""What is GPT-OSS's own, on tiny models; tests/cpu/test_moe_models.py has what holds of every model with experts."""

import importlib
import sys

import pytest
import torch
from torch import nn
from transformers.models.gpt_oss import modeling_gpt_oss

from tests.cpu.conftest import kernels_of
from tests.gpt_oss_steps import FUSED, OPERATIONS, exact_step, uses
from tests.models import (
    Step,
    tiny_gpt_oss,
    tiny_model,
    tiny_qwen3_moe,
)
from tests.ops import experts as experts_checks
from tests.ops import four_bits, rms_norm, round_last_rms_norm
from tests.ops.common import FLOATS
from tests.qwen3_moe_steps import FACTOR, LABELS, TOKENS
from tests.tolerances import assert_close


def test_autocast(gpt_oss):
    model = tiny_gpt_oss()
    exact = exact_step(model, input_ids=TOKENS, labels=LABELS)
    with torch.autocast("cpu", torch.bfloat16):
        before = Step(model, input_ids=TOKENS, labels=LABELS)
        gpt_oss.apply()
        found = Step(model, input_ids=TOKENS, labels=LABELS)
    assert {n: g.dtype for n, g in found.gradients.items()} == {n: g.dtype for n, g in before.gradients.items()}
    found.assert_as_exact_as(before, exact)


# ---------------------------------------------------------------- the experts' ways in
def test_the_sentinel_of_expert_parallelism(gpt_oss):
    """A process that holds the first four of six experts gets the id four for the others, with a score of zero."""
    experts = tiny_gpt_oss().model.layers[0].mlp.experts
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
        setattr(experts, name, nn.Parameter(getattr(experts, name)[:4].detach().clone()))
    experts.num_experts, experts._is_expert_parallel = 4, True
    hidden = torch.randn(7, 64, requires_grad=True)
    index = experts_checks.routing(7, 6, 3).clamp(max=4)
    scores = torch.rand(7, 3).masked_fill(index == 4, 0.0).requires_grad_()
    inputs = hidden, scores, *experts.parameters()
    expected = experts(hidden, index, scores)
    wanted = torch.autograd.grad(expected, inputs, torch.ones_like(expected))
    gpt_oss.apply()
    found = experts(hidden, index, scores)
    assert_close(found, expected, torch.float32, "experts", FACTOR)
    for a, b in zip(torch.autograd.grad(found, inputs, torch.ones_like(found)), wanted, strict=True):
        assert_close(a, b, torch.float32, "gradient", FACTOR)


@pytest.mark.parametrize("family", ["GPT-OSS", "Qwen3-MoE"])
def test_an_implementation_of_experts_that_a_model_can_ask_for(gpt_oss, family):
    if family == "GPT-OSS":
        model = tiny_gpt_oss()
    else:
        model = tiny_qwen3_moe()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    gpt_oss.apply(**dict.fromkeys(OPERATIONS, False))
    assert gpt_oss.get_patched_ops() == []
    model.set_experts_implementation("bastile")
    assert {"experts", "norm_experts"} & uses(gpt_oss, model)
    Step(model, input_ids=TOKENS, labels=LABELS).assert_same(expected, FACTOR)
    gpt_oss.reset()
    Step(model, input_ids=TOKENS, labels=LABELS).assert_same(expected, FACTOR)  # it goes on asking for them
    model.set_experts_implementation("grouped_mm")
    gpt_oss.apply(**dict.fromkeys(OPERATIONS, False))
    gpt_oss.reset()
    with pytest.raises(ValueError, match="bastile"):
        model.set_experts_implementation("bastile")


def test_other_gates_stay_transformers_own(gpt_oss):
    """A subclass with a gate of its own, and another activation."""

    class Own(modeling_gpt_oss.GptOssExperts):
        def _apply_gate(self, gate_up):
            return gate_up[..., ::2] * gate_up[..., 1::2]

    model = tiny_gpt_oss()
    hidden, index, scores = torch.randn(9, 64), experts_checks.routing(9, 6, 3), torch.rand(9, 3)
    own = model.model.layers[0].mlp.experts
    own.__class__ = Own
    expected = own(hidden, index, scores)
    gpt_oss.apply()
    assert torch.equal(own(hidden, index, scores), expected)
    moe_experts = tiny_qwen3_moe().model.layers[0].mlp.experts
    moe_experts.act_fn = nn.GELU()
    function = sys.modules[f"{gpt_oss.__name__}.shared.hf.family.experts"].experts_implementation
    assert torch.equal(function(moe_experts, hidden, index, scores), moe_experts(hidden, index, scores))


# ---------------------------------------------------------------- patching
@pytest.mark.parametrize("chosen", [[], *[[name] for name in OPERATIONS[:4]], OPERATIONS[:2], OPERATIONS], ids="-".join)
def test_subsets(gpt_oss, chosen):
    model = tiny_gpt_oss()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    gpt_oss.apply(**{name: name in chosen for name in OPERATIONS})
    assert gpt_oss.get_patched_ops() == chosen
    Step(model, input_ids=TOKENS, labels=LABELS).assert_same(expected, FACTOR)


def test_both_packages_in_one_process(gpt_oss, qwen3):
    model, other = tiny_gpt_oss(), tiny_model()
    expected, others = Step(model, input_ids=TOKENS, labels=LABELS), Step(other, input_ids=TOKENS, labels=LABELS)
    gpt_oss.apply()
    qwen3.apply()
    Step(model, input_ids=TOKENS, labels=LABELS).assert_same(expected, FACTOR)
    Step(other, input_ids=TOKENS, labels=LABELS).assert_same(others)
    qwen3.reset()
    assert gpt_oss.get_patched_ops() == OPERATIONS and uses(gpt_oss, model) == FUSED
    with pytest.raises(TypeError, match="expected a Qwen3 or Qwen3-MoE model"):
        qwen3.kernelize(model)
    with pytest.raises(TypeError, match="expected a GPT-OSS model"):
        gpt_oss.kernelize(other)


# ---------------------------------------------------------------- with the kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_runs_the_kernels_of_this_package_and_no_others(gpt_oss, interpret, dtype):
    """kernels.toml names all that a model needs."""
    model = tiny_gpt_oss(dtype, intermediate_size=64)
    exact = exact_step(model, input_ids=TOKENS, labels=LABELS)
    before = Step(model, input_ids=TOKENS, labels=LABELS)
    backend = interpret(gpt_oss, kernels_of("packages/gpt-oss"))
    gpt_oss.apply()
    found = Step(model, input_ids=TOKENS, labels=LABELS)
    if dtype == torch.float32:
        found.assert_same(before, FACTOR)
    else:
        found.assert_as_exact_as(before, exact)
    kernels_run = {name.partition("-")[0] for name in backend.launched}
    assert kernels_run >= {"round_last_rms_norm_forward", "round_last_add_rms_norm_backward", "clamped_gate_forward",
                           "clamped_gate_backward", "token_rows", "token_sum", "expert_order", "expert_blocks"}
    assert any(name.startswith("rotary") for name in kernels_run) and "cross_entropy_gradient" in kernels_run


def test_a_package_without_the_kernels_of_this_gate(qwen3, interpret):
    """Qwen3's computes it in PyTorch, between its grouped GEMMs and in its own sums."""
    backend = interpret(qwen3, kernels_of("."))
    experts_checks.check_experts(qwen3, "cpu", torch.float32, 37, 24, 64, 4, 2)
    rows = {"expert_counts", "expert_sums", "expert_order", "token_rows"}
    assert {name.partition("-")[0] for name in backend.launched} == {*rows, "token_sum"}


def test_numbers_of_four_bits(gpt_oss, qwen3, interpret):
    """bf16 by the kernel where a package ships it, and everything else by PyTorch's operations."""
    kernels, none = interpret(gpt_oss, kernels_of("packages/gpt-oss")), interpret(qwen3, kernels_of("."))
    for package in (gpt_oss, qwen3):
        four_bits.check_numbers(package, "cpu")
        four_bits.check_slabs(package, "cpu")
        four_bits.check_tiles(package, "cpu")
        four_bits.check_offsets(package, "cpu")
    assert {name.partition("-")[0] for name in kernels.launched} == {"decode_mxfp4"} and not none.launched


@pytest.mark.parametrize("interpreted", [False, True], ids=["pytorch", "kernels"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", round_last_rms_norm.ROUND_LAST_RMS_NORM_SHAPES, ids=str)
def test_norms(gpt_oss, interpret, interpreted, dtype, shape):
    if interpreted:
        interpret(gpt_oss, ["round_last_rms_norm", "column_sum"])
    rms_norm.check_rms_norm(gpt_oss, "cpu", dtype, shape, eps=1e-5)
    rms_norm.check_add_rms_norm(gpt_oss, "cpu", dtype, shape, eps=1e-5)
    if dtype != torch.float32:
        round_last_rms_norm.check_round_last_rms_norm_weight(gpt_oss, "cpu", dtype, shape)
        round_last_rms_norm.check_that_round_last_rms_norm_rounds_once(gpt_oss, "cpu", dtype, shape)


def test_the_norm_rounds_once(gpt_oss):
    """GPT-OSS's order: bit for bit transformers' result, which the other order is not."""
    norm = modeling_gpt_oss.GptOssRMSNorm(64, 1e-5).bfloat16()
    nn.init.normal_(norm.weight, 1.0, 0.3)
    x = torch.randn(50, 64, dtype=torch.bfloat16)
    assert torch.equal(gpt_oss.rms_norm(x, norm.weight, 1e-5), norm(x))


def test_which_strides_torchs_grouped_gemm_takes(loaded):
    gemms = importlib.import_module(f"{loaded.__name__}.shared.ops.grouped_gemm")
    taken = ((64, 1), (1, 64), (2048, 64, 1), (2048, 1, 64))
    refused = ((1, 1), (8, 8), (12, 1), (1, 12), (2044, 64, 1), (8, 1, 1), (1, 8, 8))
    assert all(map(gemms._begins_at_16_bytes, taken)) and not any(map(gemms._begins_at_16_bytes, refused))
