"""What of a Qwen3-MoE is trained, and how: adapters, frozen parts, autocast, torch.compile, FSDP2."""

import sys

import pytest
import torch

from tests.models import Step, tiny_qwen3_moe
from tests.patched import lora
from tests.qwen3_moe_steps import EXPERTS, FACTOR, LABELS, TOKENS, exact_step, uses
from tests.tolerances import assert_close, relative_error


def test_the_life_of_an_adapter_on_the_experts(qwen3, tmp_path):
    from peft import PeftModel

    options = {"target_modules": ["q_proj"], "target_parameters": EXPERTS}
    plain = lora(tiny_qwen3_moe(), **options).eval()
    with torch.no_grad():
        expected = plain(input_ids=TOKENS).logits
    model = qwen3.kernelize(lora(tiny_qwen3_moe(), **options)).eval()
    with torch.no_grad():
        assert_close(model(input_ids=TOKENS).logits, expected, torch.float32, "adapter", FACTOR)
        model.save_pretrained(tmp_path)
        loaded = PeftModel.from_pretrained(qwen3.kernelize(tiny_qwen3_moe()), tmp_path).eval()
        assert_close(loaded(input_ids=TOKENS).logits, expected, torch.float32, "loaded adapter", FACTOR)
        merged = model.merge_and_unload()
        assert "norm_experts" in uses(qwen3, merged, lambda model: model(input_ids=TOKENS))
        assert_close(merged(input_ids=TOKENS).logits, expected, torch.float32, "merged adapter", FACTOR)


def test_frozen_experts_cost_no_gradients(qwen3, monkeypatch):
    """Two of a layer's six grouped GEMMs make its weights' gradients: without these there are four."""
    model = tiny_qwen3_moe()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "experts" not in name
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    qwen3.apply()
    calls = []
    for file, name in (("expert_adapters", "coded_mm"), ("experts", "grouped_outer")):
        module = sys.modules[f"{qwen3.__name__}.shared.ops.{file}"]
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, name=name, original=original: calls.append(name) or original(*args))
    Step(model, input_ids=TOKENS, labels=LABELS).assert_same(expected, FACTOR)
    assert calls == ["coded_mm"] * 8


@pytest.mark.parametrize("trained", ["mlp.gate.", "experts.gate_up", "experts.down", "layers.2.mlp", "layers.0.self_attn.o_proj",
                                     "layers.2.post_attention_layernorm", "embed_tokens", "layers.1.mlp"])
def test_frozen_parts(qwen3, trained):
    model = tiny_qwen3_moe()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = trained in name
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    qwen3.apply()
    found = Step(model, input_ids=TOKENS, labels=LABELS)
    found.assert_same(expected, FACTOR)
    assert found.gradients and all(trained in name for name in found.gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "LoRA"])
def test_autocast(qwen3, dtype, adapter):
    """Over fp32 weights experts are called, over those of the products' dtype they are fused. Gradients are on average as near to those of
    float64 as before."""
    model = tiny_qwen3_moe(dtype, num_experts_per_tok=6)
    if adapter:
        model = lora(model, target_modules=["q_proj", "o_proj"])
    errors = []
    for tokens in (TOKENS, TOKENS.flip(1), TOKENS.roll(5, 1)[:, :21]):
        exact = exact_step(model, input_ids=tokens, labels=tokens)
        with torch.autocast("cpu", torch.bfloat16):
            before = Step(model, input_ids=tokens, labels=tokens)
            qwen3.apply()
            assert ("norm_experts" in uses(qwen3, model)) == (dtype == torch.bfloat16)
            found = Step(model, input_ids=tokens, labels=tokens)
            qwen3.reset()
        assert {n: g.dtype for n, g in found.gradients.items()} == {n: g.dtype for n, g in before.gradients.items()}
        errors.append([[relative_error(step.gradients[name], g) for name, g in exact.gradients.items()] for step in (before, found)])
    others, mine = torch.tensor(errors).mean((0, 2)).tolist()
    assert mine <= 1.25 * others, f"relative error {mine:.2e}, without the layers {others:.2e}"


def test_what_a_layer_of_experts_saves(qwen3):
    """The gathered rows, the gated rows and the normalised input are computed again in the backward pass."""
    model = tiny_qwen3_moe(mlp_only_layers=[], num_hidden_layers=1)
    qwen3.apply()
    shapes = []
    layer, rows, width = model.model.layers[0], 66 * 3, 40
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        model(input_ids=TOKENS, labels=LABELS)
    wide = [shape for shape in shapes if shape[:1] == (rows,) and len(shape) == 2]
    assert wide == [(rows, 2 * width)]
    assert layer.mlp.experts.gate_up_proj.shape in shapes
