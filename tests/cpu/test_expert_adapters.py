"""PEFT's LoRA on the parameters of experts (`target_parameters`), inside the decoder layer's node: beside what PEFT itself computes, which
makes each expert's weight anew."""

import contextlib
import copy
import functools

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.profiler import ProfilerActivity, profile

from tests.capturing import check_replayed, stand_in
from tests.compile_checks import operators_of
from tests.models import Step, random_tokens, sharded, tiny_gpt_oss, tiny_qwen3_5_sparse, tiny_qwen3_moe, whole
from tests.patched import lora
from tests.qwen3_moe_steps import EXPERTS, LABELS, TOKENS, exact_step, uses

FEW = random_tokens(1, 5)
PARTS = ("norm, router, experts with adapters", "norm, router, experts with adapters, shared expert")
ALL = [*EXPERTS, "mlp.gate.weight"]
BESIDE = {"target_modules": ["q_proj"], "target_parameters": EXPERTS}
OPTIONS = {
    "both": BESIDE,
    "gate_up": {"target_modules": [], "target_parameters": EXPERTS[:1]},
    "down": {"target_modules": ["o_proj"], "target_parameters": EXPERTS[1:]},
    "rsLoRA": {**BESIDE, "use_rslora": True, "lora_alpha": 5},
    "router": {"target_modules": ["o_proj"], "target_parameters": ALL},
    "patterns": {**BESIDE, "rank_pattern": {"layers.0.mlp.experts.gate_up_proj": 8, "down_proj": 3}, "alpha_pattern": {"down_proj": 7}},
}


def step_of(model, **inputs):
    return Step(model, **{"input_ids": TOKENS, "labels": LABELS, **inputs})


def reasons(package, model) -> list[str]:
    """Why the node of experts does not run, of each layer where it does not."""
    return [f"{row.code}: {row.reason}" for row in package.explain(model).rows if "experts" in row.part and not row.fused]


def fused(package, model) -> int:
    """How many layers have adapters of experts in their node."""
    return sum(row.count for row in package.explain(model).rows if row.part in PARTS and row.fused)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("checkpoints", (None, False, True), ids=("kept", "checkpointed", "reentrant"))
def test_the_gradients_of_peft(qwen3, options, checkpoints):
    model = lora(tiny_qwen3_moe(), **options)
    expected = step_of(model)
    if checkpoints is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpoints})
        model.enable_input_require_grads()
    qwen3.kernelize(model)
    assert fused(qwen3, model) == 2 and not reasons(qwen3, model)
    assert "norm_experts" in uses(qwen3, model)
    step_of(model).assert_same(expected)
    step_of(qwen3.kernelize(model, recompute_mlp=True)).assert_same(expected)


@pytest.mark.parametrize(
    ("name", "targets"), (("qwen3_5_moe", ["q_proj", "shared_expert.gate_proj", "shared_expert.down_proj"]), ("qwen3_next", ["q_proj"]))
)
def test_beside_a_shared_expert(qwen3_5, name, targets):
    model = lora(tiny_qwen3_5_sparse(name), target_modules=targets, target_parameters=EXPERTS)
    expected = step_of(model, use_cache=False)
    qwen3_5.kernelize(model)
    assert fused(qwen3_5, model) == 4
    step_of(model, use_cache=False).assert_same(expected, 5)


def test_biases_are_trained_beside_adapters(gpt_oss):
    model = lora(tiny_gpt_oss(), **BESIDE)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name.endswith(("proj_bias", "router.weight")))
    expected = step_of(model)
    gpt_oss.kernelize(model)
    assert fused(gpt_oss, model) == 2
    step_of(model).assert_same(expected, 3)


def test_a_weight_that_is_trained_beside_its_adapter(qwen3):
    model = lora(tiny_qwen3_moe(), **BESIDE)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name.endswith("down_proj"))
    expected = step_of(model)
    step_of(qwen3.kernelize(model)).assert_same(expected)
    assert fused(qwen3, model) == 2


@pytest.mark.parametrize("autocast", (False, True))
@pytest.mark.parametrize("wide", (True, False), ids=("fp32 adapters", "bf16 adapters"))
def test_half_precision_is_as_exact_as_before(qwen3, autocast, wide):
    """PEFT rounds W + scaling * B @ A to bf16, where our node keeps what is less than half a step of W: it errs no more."""
    model = tiny_qwen3_moe(torch.bfloat16, num_experts_per_tok=6)  # where all experts are chosen rounding chooses no others
    torch.manual_seed(0)
    config = LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **BESIDE)
    model = get_peft_model(model, config, autocast_adapter_dtype=wide).train()
    exact = exact_step(model, input_ids=TOKENS, labels=LABELS)
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        before = step_of(model)
        qwen3.kernelize(model)
        assert fused(qwen3, model) == 2
        found = step_of(model)
    assert {name: gradient.dtype for name, gradient in found.gradients.items()} == {n: g.dtype for n, g in before.gradients.items()}
    assert {gradient.dtype for gradient in found.gradients.values()} == {torch.float32 if wide else torch.bfloat16}
    found.assert_as_exact_as(before, exact, 3e-3)


# ---------------------------------------------------------------- states of an adapter
def test_no_adapter_in_force(qwen3):
    """Disabled or merged: the node computes with the weights as they are."""
    model = lora(tiny_qwen3_moe(), **BESIDE).eval()
    theirs, inputs = copy.deepcopy(model), {"input_ids": TOKENS}
    qwen3.kernelize(model)
    with torch.no_grad():
        with theirs.disable_adapter(), model.disable_adapter():
            expected = theirs(**inputs).logits
            assert not reasons(qwen3, model) and fused(qwen3, model) == 0
            torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
        assert fused(qwen3, model) == 2
        for each in (theirs, model):
            each.merge_adapter()
        torch.testing.assert_close(model(**inputs).logits, theirs(**inputs).logits, rtol=1e-5, atol=1e-5)
        assert not reasons(qwen3, model) and fused(qwen3, model) == 0 and "norm_experts" in uses(qwen3, model, lambda m: m(**inputs))
        for each in (theirs, model):
            each.unmerge_adapter()
        torch.testing.assert_close(model(**inputs).logits, theirs(**inputs).logits, rtol=1e-5, atol=1e-5)
        for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, other)


def test_one_of_two_adapters(qwen3):
    model = lora(tiny_qwen3_moe(), **BESIDE)
    model.add_adapter("other", LoraConfig(r=6, lora_alpha=3, init_lora_weights=False, task_type="CAUSAL_LM", **BESIDE))
    model.set_adapter("other")
    expected = step_of(model)
    step_of(qwen3.kernelize(model)).assert_same(expected)
    assert fused(qwen3, model) == 2 and all("other" in name for name in expected.gradients)


def _two(model):
    model.add_adapter("other", LoraConfig(r=6, init_lora_weights=False, task_type="CAUSAL_LM", **BESIDE))
    model.base_model.set_adapter(["default", "other"])


def _hooked(model):
    model.get_base_model().model.layers[0].mlp.experts.register_forward_hook(lambda module, args, result: 2 * result)


def _hooked_within(model):
    experts = model.get_base_model().model.layers[0].mlp.experts.get_base_layer()
    experts.register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))


def _replaced(model):
    experts = model.get_base_model().model.layers[0].mlp.experts
    original = experts.forward
    experts.forward = lambda *args: 2 * original(*args)


@pytest.mark.parametrize(
    ("change", "reason"),
    (
        (_two, "2 adapters are active at once"),
        (_hooked, "hooks listen"),
        (_hooked_within, "experts have hooks"),
        (_replaced, "its forward was replaced"),
    ),
)
def test_what_is_called_as_peft_has_it(qwen3, change, reason):
    model = lora(tiny_qwen3_moe(), **BESIDE)
    change(model)
    expected = step_of(model)
    qwen3.kernelize(model)
    assert any(reason in text for text in reasons(qwen3, model))
    step_of(model).assert_same(expected)
    assert "experts" in uses(qwen3, model)


def test_merged_adapters_that_are_disabled_are_taken_out_by_peft(qwen3):
    model = lora(tiny_qwen3_moe(), **BESIDE).eval()
    with model.disable_adapter(), torch.no_grad():
        expected = model(input_ids=TOKENS).logits
    qwen3.kernelize(model).merge_adapter()
    with model.disable_adapter(), torch.no_grad():
        assert any("merged adapters are disabled" in text for text in reasons(qwen3, model))
        torch.testing.assert_close(model(input_ids=TOKENS).logits, expected, rtol=1e-5, atol=1e-5)


def test_adapters_of_each_sample_are_refused_as_by_peft(qwen3):
    model = lora(tiny_qwen3_moe(), **BESIDE).eval()
    for each in (model, qwen3.kernelize(copy.deepcopy(model))):
        with pytest.raises(ValueError, match="mixed"):
            each(input_ids=TOKENS, adapter_names=["default", "__base__"])


def test_an_adapter_of_another_dtype_is_called(qwen3):
    model = lora(tiny_qwen3_moe(), **BESIDE)
    for name, parameter in model.named_parameters():
        if "experts" in name and "lora" in name:
            parameter.data = parameter.data.double()
    expected = step_of(model)
    qwen3.kernelize(model)
    assert any("dtype: the adapter of down_proj: the adapter is torch.float64" in text for text in reasons(qwen3, model))
    step_of(model).assert_same(expected)


def test_another_layout_of_factors_is_called(qwen3):
    """As older releases of PEFT have it, whose a multiplies what a row of the weight makes."""
    model = lora(tiny_qwen3_moe(), **BESIDE)
    expected = step_of(model)
    qwen3.kernelize(model)
    for layer in model.get_base_model().model.layers[::2]:
        layer.mlp.experts._did_swap_in_out_features = False
    assert reasons(qwen3, model) == ["adapter: this version of PEFT keeps its adapters otherwise"]
    for layer in model.get_base_model().model.layers[::2]:
        layer.mlp.experts._did_swap_in_out_features = True
    step_of(model).assert_same(expected)


def test_trained_saved_merged_and_loaded(qwen3, tmp_path):
    """A training, and what is saved and merged of it, are PEFT's own."""
    models = []
    for ours in (False, True):
        model = lora(tiny_qwen3_moe(), **BESIDE)
        if ours:
            qwen3.kernelize(model)
        optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], 1e-3, eps=1e-4)
        for _ in range(3):
            model(input_ids=TOKENS, labels=LABELS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval().save_pretrained(tmp_path / str(ours))
        models.append(model)
    with torch.no_grad():
        expected, found = (model(input_ids=TOKENS).logits for model in models)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        loaded = PeftModel.from_pretrained(tiny_qwen3_moe().eval(), tmp_path / "True")
        torch.testing.assert_close(loaded(input_ids=TOKENS).logits, found, rtol=1e-5, atol=1e-5)
        merged = [model.merge_and_unload() for model in models]
        for (name, mine), other in zip(merged[1].named_parameters(), merged[0].parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=name)
        torch.testing.assert_close(merged[1](input_ids=TOKENS).logits, found, rtol=1e-4, atol=1e-5)


def test_sharded_parameters(qwen3):
    model = lora(tiny_qwen3_moe(), **BESIDE)
    expected = step_of(model)
    qwen3.kernelize(model)
    with sharded(model.get_base_model()):
        assert "norm_experts" in uses(qwen3, model, lambda model: model(input_ids=TOKENS, labels=LABELS))
        whole(step_of(model)).assert_same(expected)


# ---------------------------------------------------------------- memory
def largest_allocation(step) -> int:
    """Bytes of the largest piece of memory that a step asks for."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    return max(event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]")


@pytest.mark.parametrize("checkpoints", (False, True))
def test_nothing_as_large_as_a_weight_is_made(qwen3, checkpoints):
    model = lora(tiny_qwen3_moe(num_experts=16, moe_intermediate_size=64), **BESIDE)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    if checkpoints:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    weight = model.get_base_model().model.layers[0].mlp.experts.get_base_layer().down_proj
    smaller = weight.numel() * weight.element_size()

    def step():
        model(input_ids=FEW, labels=FEW).loss.backward()

    assert largest_allocation(step) >= smaller  # as PEFT has it
    qwen3.kernelize(model)
    assert fused(qwen3, model) == 2
    assert largest_allocation(step) < smaller


# ---------------------------------------------------------------- in graphs
@pytest.mark.parametrize("how", ("apply", "kernelize"))
def test_torch_compile(qwen3, how):
    model = lora(tiny_qwen3_moe(), target_modules=["q_proj"], target_parameters=ALL)
    expected = step_of(model)
    qwen3.apply() if how == "apply" else qwen3.kernelize(model)
    called, compiled = operators_of(qwen3, model)
    Step(model, compiled, input_ids=TOKENS, labels=LABELS).assert_same(expected, 10)
    assert called.count("norm_experts") == called.count("norm_experts_backward") == 2 and "experts_forward" not in called


def test_captured(qwen3, monkeypatch):
    """Graphs have the adapters inside, and are recorded anew when another one is active."""
    stand_in(qwen3, monkeypatch)
    options = {"target_modules": ["q_proj"], "target_parameters": ALL}
    model = lora(tiny_qwen3_moe(), **options)
    model.add_adapter("other", LoraConfig(r=6, init_lora_weights=False, task_type="CAUSAL_LM", **options))
    plain = qwen3.kernelize(copy.deepcopy(model))
    qwen3.capture(qwen3.kernelize(model), *TOKENS.shape)
    for adapter in ("default", "other"):
        for each in (model, plain):
            each.set_adapter(adapter)
        check_replayed(model, plain, [functools.partial(step_of, use_cache=False)] * 4)
    assert all(row.fused for row in qwen3.explain(model).rows if "captured" in row.part)
