"""Qwen3-MoE in Qwen3's package, on tiny models: the loss and the gradients of the same model without it."""

import functools
import sys

import pytest
import torch
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.models import Step, losses_of, random_tokens, tiny_model, tiny_qwen3_moe
from tests.patched import install, lora
from tests.qwen3_moe_steps import FACTOR, FUSED, LABELS, TOKENS, exact_step, uses
from tests.tolerances import relative_error


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_topk_prob": False},
        {"num_experts": 12, "num_experts_per_tok": 1, "norm_topk_prob": False},
        {"num_experts": 5, "num_experts_per_tok": 5, "norm_topk_prob": False},
        {"decoder_sparse_step": 2, "mlp_only_layers": []},
        {"mlp_only_layers": []},
        {"mlp_only_layers": [0, 1, 2]},
        {"hidden_size": 72, "moe_intermediate_size": 41},
        {"attention_bias": True},
        {"use_sliding_window": True, "sliding_window": 8},
        {"hidden_act": "gelu"},
    ],
    ids=lambda changes: "-".join(f"{name}={value}" for name, value in changes.items()),
)
@pytest.mark.parametrize("how", ["apply", "kernelize"])
def test_configurations(qwen3, changes, how):
    model = tiny_qwen3_moe(**changes)
    if "moe_intermediate_size" in changes:  # transformers' grouped GEMMs do not take odd sizes on a CPU
        model.set_experts_implementation("eager")
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    if "moe_intermediate_size" in changes:
        model.set_experts_implementation("grouped_mm")
    install(qwen3, model, how)
    called = uses(qwen3, model)
    dense = changes.get("mlp_only_layers") == [0, 1, 2]
    assert ("norm_experts" in called) == (not dense and "hidden_act" not in changes)
    Step(model, input_ids=TOKENS, labels=LABELS).assert_same(expected, FACTOR)


def test_float64_is_the_same_but_for_the_last_digits(qwen3):
    """In a wide dtype nothing but the order of additions differs, of which fp32 would hide an error that is small. transformers' router
    computes its softmax in fp32 whatever the model's dtype is."""
    model = tiny_qwen3_moe(torch.float64)
    expected = exact_step(model, input_ids=TOKENS, labels=LABELS)
    qwen3.apply()
    found = Step(model, input_ids=TOKENS, labels=LABELS)
    assert relative_error(found.loss.double(), expected.loss.double()) < 1e-6
    for name, gradient in expected.gradients.items():
        assert relative_error(found.gradients[name], gradient) < 2e-6, name


@pytest.mark.parametrize("trained", ["all", "LoRA"])
def test_twenty_steps(qwen3, trained):
    def losses(model):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        return torch.tensor(losses_of(model, optimizer, (random_tokens(2, 20 + step) for step in range(20))))

    def made():
        return tiny_qwen3_moe() if trained == "all" else lora(tiny_qwen3_moe(), target_modules=["q_proj", "o_proj"])

    expected = losses(made())
    qwen3.apply()
    found = losses(made())
    assert (found / expected - 1).abs().max() < 5e-3 and found[-1] < found[0]


# ---------------------------------------------------------------- the loss
MASK = (torch.arange(33) >= torch.tensor([[0], [9]])).long()


def test_the_auxiliary_loss_that_the_configuration_asks_for(qwen3):
    model = tiny_qwen3_moe(output_router_logits=True, router_aux_loss_coef=0.3)
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    plain = Step(model, input_ids=TOKENS, labels=LABELS, output_router_logits=False)
    assert relative_error(plain.loss, expected.loss) > 1e-3
    qwen3.apply()
    found = Step(model, input_ids=TOKENS, labels=LABELS)
    assert found.output.logits is None
    found.assert_same(expected, FACTOR)
    # The hooks that transformers has put on the routers stay there, and do nothing where the router's logits are not asked for.
    assert uses(qwen3, model, lambda model: model(input_ids=TOKENS, labels=LABELS, output_router_logits=False)) == FUSED
    Step(model, input_ids=TOKENS, labels=LABELS, output_router_logits=False).assert_same(plain, FACTOR)


def test_metrics_beside_the_auxiliary_loss(qwen3):
    model = tiny_qwen3_moe(router_aux_loss_coef=0.3)
    expected = Step(model, input_ids=TOKENS, labels=LABELS, output_router_logits=True)
    qwen3.apply(fused_linear_cross_entropy={"return_token_accuracy": True, "return_z_loss": True, "lse_square_scale": 0.0})
    found = Step(model, input_ids=TOKENS, labels=LABELS, output_router_logits=True)
    found.assert_same(expected, FACTOR)
    assert found.output.token_accuracy is not None and found.output.aux_loss is not None


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"])
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
@pytest.mark.parametrize("how", ["apply", "kernelize"])
def test_other_heads(qwen3, family, head, how):
    """They keep the decoder's layers, and their own losses."""
    modeling, tiny = (modeling_qwen3, tiny_model) if family == "Qwen3" else (modeling_qwen3_moe, tiny_qwen3_moe)
    model = tiny(cls=getattr(modeling, family + head))
    inputs = {
        "ForSequenceClassification": {"labels": torch.tensor([0, 1])},
        "ForTokenClassification": {"labels": TOKENS % 2},
        "ForQuestionAnswering": {"start_positions": torch.tensor([3, 5]), "end_positions": torch.tensor([7, 9])},
    }[head]
    padded = TOKENS.clone()
    padded[1, 20:] = 0
    inputs |= {"input_ids": padded, "attention_mask": (padded != 0).long()}
    torch.manual_seed(2)  # of the dropout in front of the token's head
    expected = Step(model, **inputs)
    install(qwen3, model, how)
    called = uses(qwen3, model, lambda model: model(**inputs))
    assert called >= {"norm_attention_inputs", "norm_mlp" if family == "Qwen3" else "norm_experts"}
    torch.manual_seed(2)
    found = Step(model, **inputs)
    for step in (expected, found):
        step.gradients.pop("qa_outputs.bias", None)  # zero but for rounding: a softmax does not see it
    found.assert_same(expected, FACTOR)


# ---------------------------------------------------------------- batches
def test_packed_documents(qwen3):
    model = tiny_qwen3_moe()
    tokens = TOKENS.reshape(1, -1)
    inputs = {"input_ids": tokens, "labels": tokens, "position_ids": torch.cat([torch.arange(n) for n in (20, 31, 15)])[None]}
    expected = Step(model, **inputs, use_cache=False)
    qwen3.apply()
    for implementation in ("sdpa", "bastile"):
        model.set_attn_implementation(implementation)
        Step(model, **inputs, use_cache=False).assert_same(expected, FACTOR)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("router_logits", [False, True])
def test_padding_is_left_out(qwen3, side, window, router_logits):
    model = tiny_qwen3_moe(use_sliding_window=window is not None, sliding_window=window, router_aux_loss_coef=0.3)
    lengths = torch.tensor([[33], [20]])
    mask = torch.arange(33) < lengths if side == "right" else torch.arange(33) >= 33 - lengths
    labels = LABELS.where(mask & mask.roll(1, 1), -100)  # nor has the padding in front of a row the label of its first token
    inputs = {"input_ids": TOKENS, "labels": labels, "attention_mask": mask.long(), "use_cache": False}
    inputs["output_router_logits"] = router_logits
    expected = Step(model, **inputs)
    qwen3.apply()
    model.set_attn_implementation("bastile")
    rows = []
    for layer in model.model.layers:
        layer.input_layernorm.forward = functools.partial(watched, rows, type(layer.input_layernorm).forward, layer.input_layernorm)
    found = Step(model, **inputs)
    found.assert_same(expected, FACTOR)
    for layer in model.model.layers:
        del layer.input_layernorm.forward
    decoder, rows = sys.modules[f"{qwen3.__name__}.shared.hf.layer.decoder_layer"], []
    with pytest.MonkeyPatch.context() as patch:
        original = decoder.norm_attention_inputs
        patch.setattr(decoder, "norm_attention_inputs", lambda x, *args: rows.append(x.shape[:-1].numel()) or original(x, *args))
        Step(model, **inputs).assert_same(expected, FACTOR)
    assert set(rows) == ({66} if router_logits else {54})  # 33 + 20, rounded to a length that comes again


def watched(rows, forward, module, x):
    """With a forward of the caller's on a part of the model, the padding stays."""
    rows.append(x.shape)
    return forward(module, x)
