"""The package for GPT-OSS on tiny models: the loss and the gradients of the same model without it, and everything put back."""

import copy
import functools
import importlib
import sys

import kernels
import pytest
import torch
from torch import nn
from transformers.models.gpt_oss import modeling_gpt_oss

from tests.compile_checks import operators_of
from tests.cpu.conftest import kernels_of
from tests.models import (
    Step,
    check_compiled,
    check_same_bits,
    own_attributes,
    random_tokens,
    sharded,
    tiny_gpt_oss,
    tiny_model,
    tiny_qwen3_moe,
    whole,
)
from tests.ops import experts as experts_checks
from tests.ops import four_bits, rms_norm, round_last_rms_norm
from tests.ops.common import FLOATS
from tests.patched import called_operations, calls_of, everything_of, install, step_without_small_gradients
from tests.tolerances import assert_close
from tests.versions import DECORATORS

TOKENS = random_tokens(2, 33)
LABELS = TOKENS.clone()
LABELS[0, :7] = -100
OPERATIONS = ["rms_norm", "experts", "rope", "fused_linear_cross_entropy", "decoder_layer", "attention"]
CLASSES = ["GptOssRMSNorm", "GptOssExperts", "GptOssForCausalLM", "GptOssDecoderLayer", "GptOssAttention", "GptOssModel"]
# Two fp32 runs of a model differ by more than an operation from float64 where a gradient is a small difference: those of q and k.
FACTOR = 10


PLACES = (
    ("shared.hf.family.experts", ("experts",)),
    ("shared.hf.family.forwards", ("rotary",)),
    ("shared.hf.model.causal_lm", ("linear_cross_entropy",)),
    ("shared.hf.layer.decoder_layer", ("norm_attention_inputs", "norm_experts", "add_rms_norm")),
)


def everything():
    """All that can be found of transformers' GPT-OSS."""
    return everything_of(modeling_gpt_oss, CLASSES)


def exact_step(model, **inputs):
    """A step in float32, which takes the place of an exact one: GPT-OSS computes its norms in no wider dtype."""
    return step_without_small_gradients(copy.deepcopy(model).float(), **inputs)


def uses(gpt_oss, model, step=lambda model: model.train()(input_ids=TOKENS, labels=LABELS)):
    """The operations of ours that a step of the model calls."""
    return called_operations(gpt_oss, PLACES, lambda: step(model))


ALL = {"linear_cross_entropy", "norm_attention_inputs", "norm_experts"}


@pytest.mark.parametrize("how", ["apply", "kernelize", "mapping"])
def test_training_step(gpt_oss, how):
    model = tiny_gpt_oss()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    install(gpt_oss, model, how)
    assert uses(gpt_oss, model) == (ALL if DECORATORS or how != "mapping" else ALL - {"rotary"})
    found = Step(model, input_ids=TOKENS, labels=LABELS)
    assert found.output.logits is None and type(found.output) is type(expected.output)
    found.assert_same(expected, FACTOR)
    assert found.gradients.keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_exact_as_before(gpt_oss, dtype):
    model = tiny_gpt_oss(dtype)
    exact = exact_step(model, input_ids=TOKENS, labels=LABELS)
    before = Step(model, input_ids=TOKENS, labels=LABELS)
    gpt_oss.apply()
    found = Step(model, input_ids=TOKENS, labels=LABELS)
    found.assert_as_exact_as(before, exact)


@pytest.mark.parametrize(
    "inputs",
    [
        {"output_router_logits": True},
        {"output_router_logits": True, "attention_mask": (torch.arange(33) >= torch.tensor([[0], [9]])).long()},
        {"num_items_in_batch": 17},
        {"num_items_in_batch": torch.tensor(17), "output_router_logits": True},
        {"ignore_index": 5},
        {"shift_labels": LABELS.roll(-1, 1)},
        {"use_cache": False},
        {"return_dict": False},
    ],
    ids=lambda inputs: "-".join(inputs),
)
def test_arguments(gpt_oss, inputs):
    model = tiny_gpt_oss()
    expected = Step(model, input_ids=TOKENS, labels=LABELS.where(LABELS >= 0, inputs.get("ignore_index", -100)), **inputs)
    gpt_oss.apply()
    found = Step(model, input_ids=TOKENS, labels=LABELS.where(LABELS >= 0, inputs.get("ignore_index", -100)), **inputs)
    found.assert_same(expected, FACTOR)
    if inputs.get("output_router_logits"):
        assert_close(found.output.aux_loss, expected.output.aux_loss, torch.float32)
        assert len(found.output.router_logits) == 2


@pytest.mark.parametrize("experts", [{"num_local_experts": count, "num_experts_per_tok": top_k} for count, top_k in ((40, 1), (8, 8))])
@pytest.mark.parametrize("odd", [{"hidden_size": 72, "intermediate_size": 41}, {"swiglu_limit": 3.0, "swiglu_alpha": 1.1}])
def test_sizes(gpt_oss, experts, odd):
    """transformers' grouped GEMMs do not take odd sizes on a CPU."""
    model = tiny_gpt_oss(**experts, **odd)
    model.set_experts_implementation("eager")
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    gpt_oss.apply()
    model.set_experts_implementation("bastile")
    Step(model, input_ids=TOKENS, labels=LABELS).assert_same(expected, FACTOR)


def test_logits_and_generation_in_eval_mode(gpt_oss):
    model = tiny_gpt_oss().eval()
    expected, options = model(input_ids=TOKENS, labels=LABELS), {"max_new_tokens": 12, "do_sample": False}
    tokens = model.generate(TOKENS[:, :9], **options)
    gpt_oss.apply()
    found = model(input_ids=TOKENS, labels=LABELS)
    assert_close(found.logits, expected.logits, torch.float32, "logits", FACTOR)
    assert torch.equal(model.generate(TOKENS[:, :9], **options), tokens)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(gpt_oss, reentrant):
    model = tiny_gpt_oss()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    gpt_oss.apply()
    Step(model, input_ids=TOKENS, labels=LABELS).assert_same(expected, FACTOR)


def test_autocast(gpt_oss):
    model = tiny_gpt_oss()
    exact = exact_step(model, input_ids=TOKENS, labels=LABELS)
    with torch.autocast("cpu", torch.bfloat16):
        before = Step(model, input_ids=TOKENS, labels=LABELS)
        gpt_oss.apply()
        found = Step(model, input_ids=TOKENS, labels=LABELS)
    assert {n: g.dtype for n, g in found.gradients.items()} == {n: g.dtype for n, g in before.gradients.items()}
    found.assert_as_exact_as(before, exact)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj", "o_proj"]},
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        {"target_modules": ["lm_head"]},
    ],
    ids=["around the experts", "on the experts", "lm_head"],
)
@pytest.mark.parametrize("how", ["apply", "kernelize"])
def test_lora(gpt_oss, options, how):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(tiny_gpt_oss(), LoraConfig(r=4, init_lora_weights=False, **options)).train()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    install(gpt_oss, model, how)
    assert "norm_experts" in uses(gpt_oss, model)
    Step(model, input_ids=TOKENS, labels=LABELS).assert_same(expected, FACTOR)


@pytest.mark.parametrize("how", ["apply", "kernelize"])
def test_torch_compile(gpt_oss, how):
    model = tiny_gpt_oss()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    install(gpt_oss, model, how)
    called, compiled = operators_of(gpt_oss, model)
    check_compiled(model, expected, FACTOR, compiled, input_ids=TOKENS, labels=LABELS)
    assert called.count("norm_experts") == called.count("norm_experts_backward") == 2 and "experts_forward" not in called


def test_sharded_parameters(gpt_oss):
    model = tiny_gpt_oss()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    with sharded(model):
        for how in ("apply", "kernelize"):
            install(gpt_oss, model, how)
            steps = []
            assert uses(gpt_oss, model, lambda model: steps.append(Step(model, input_ids=TOKENS, labels=LABELS))) == ALL  # noqa: B023
            whole(steps[0]).assert_same(expected, FACTOR)
            gpt_oss.reset()


def test_two_runs_give_the_same_bits(gpt_oss):
    model = tiny_gpt_oss(torch.bfloat16)
    gpt_oss.apply()
    check_same_bits(model, input_ids=TOKENS, labels=LABELS)


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


@pytest.mark.parametrize("sequence", [["apply"], ["kernelize"], ["mapping"], ["apply", "mapping", "kernelize"]], ids="-".join)
def test_reset_leaves_no_trace(gpt_oss, sequence):
    model = tiny_gpt_oss()
    before = everything()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    for how in sequence:
        install(gpt_oss, model, how)
    assert uses(gpt_oss, model) == (ALL if DECORATORS or sequence != ["mapping"] else ALL - {"rotary"})
    gpt_oss.reset()
    gpt_oss.reset()
    for old, new in zip(before, everything(), strict=True):
        assert old.keys() == new.keys()
        assert all(new[name] is old[name] for name in old)
    assert uses(gpt_oss, model) == set() and gpt_oss.get_patched_ops() == []
    again = Step(model, input_ids=TOKENS, labels=LABELS)
    assert torch.equal(again.loss, expected.loss)
    assert all(torch.equal(again.gradients[name], expected.gradients[name]) for name in expected.gradients)


def test_both_packages_in_one_process(gpt_oss, qwen3):
    model, other = tiny_gpt_oss(), tiny_model()
    expected, others = Step(model, input_ids=TOKENS, labels=LABELS), Step(other, input_ids=TOKENS, labels=LABELS)
    gpt_oss.apply()
    qwen3.apply()
    Step(model, input_ids=TOKENS, labels=LABELS).assert_same(expected, FACTOR)
    Step(other, input_ids=TOKENS, labels=LABELS).assert_same(others)
    qwen3.reset()
    assert gpt_oss.get_patched_ops() == OPERATIONS and uses(gpt_oss, model) == ALL
    with pytest.raises(TypeError, match="expected a Qwen3 or Qwen3-MoE model"):
        qwen3.kernelize(model)
    with pytest.raises(TypeError, match="expected a GPT-OSS model"):
        gpt_oss.kernelize(other)


def test_layers_load_from_a_folder(gpt_oss, gpt_oss_folder, monkeypatch):
    from kernels.layer.layer import _validate_layer

    monkeypatch.setattr("kernels.layer.layer.get_local_kernel", functools.partial(kernels.get_local_kernel, backend="cpu"))
    for name, devices in gpt_oss.mapping().items():
        repository = devices["cpu"]
        layer = repository.load()
        assert kernels.LocalLayerRepository(gpt_oss_folder, layer_name=layer.__name__).load() is layer
        check = getattr(modeling_gpt_oss, {"RMSNorm": "GptOssRMSNorm"}.get(name, name), layer)
        _validate_layer(check_cls=check, cls=layer, repo=repository)
        assert own_attributes(layer) == {"forward", "can_torch_compile"}


# ---------------------------------------------------------------- warm-up
def test_warm_up(gpt_oss):
    model, warmup = tiny_gpt_oss(), calls_of(gpt_oss)
    state = torch.random.get_rng_state()
    assert gpt_oss.warmup_all_kernels() is None and gpt_oss.warmup_all_kernels(model) is None
    warmup.warm_up("cpu", torch.float32, warmup.case_of(model))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(TypeError, match="Linear without a decoder layer and a configuration of GPT-OSS"):
        gpt_oss.warmup_all_kernels(nn.Linear(1, 1))


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
