"""Qwen3-MoE in Qwen3's package, on tiny models: the loss and the gradients of the same model without it, and everything put back."""

import copy
import functools
import sys

import kernels
import pytest
import torch
from kernels import Mode
from torch import nn
from transformers.integrations import moe
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.models import Step, check_compiled, check_same_bits, random_tokens, sharded, tiny_model, tiny_qwen3_moe, whole
from tests.mutants import ROOT
from tests.tolerances import assert_close, relative_error
from tests.versions import forward_of
from tools.kernel_package import read_package
from tools.targets import operations

TOKENS = random_tokens(2, 33)
LABELS = TOKENS.clone()
LABELS[0, :7] = -100
OPERATIONS = ["rms_norm", "swiglu", "rope", "fused_linear_cross_entropy", "decoder_layer", "attention", "experts"]
CLASSES = ["RMSNorm", "MLP", "Experts", "SparseMoeBlock", "TopKRouter", "ForCausalLM", "DecoderLayer", "Attention", "Model"]
FACTOR = 10  # as for GPT-OSS
FUSED = {"norm_attention_inputs", "norm_mlp", "norm_experts", "rms_norm", "linear_cross_entropy"}
PROJECTED = {"norm_attention_inputs", "norm_experts", "linear_cross_entropy"}


def everything():
    """All that can be found of transformers' Qwen3-MoE."""
    rotary = modeling_qwen3_moe.apply_rotary_pos_emb
    found = [dict(vars(modeling_qwen3_moe)), dict(vars(type(rotary))), dict(moe.ExpertsInterface._global_mapping)]
    classes = [getattr(modeling_qwen3_moe, f"Qwen3Moe{name}") for name in CLASSES]
    return found + [dict(vars(cls)) for cls in classes] + [{cls: forward_of(cls) for cls in classes}]


def install(qwen3, model, how):
    if how == "apply":
        qwen3.apply()
    elif how in ("kernelize", "pack"):
        assert qwen3.kernelize(model) is model
        if how == "pack":
            qwen3.pack(model)
    elif how == "mapping":
        with kernels.use_kernel_mapping(qwen3.mapping()):
            kernels.kernelize(model, mode=Mode.TRAINING)


PLACES = (
    ("shared.hf.experts", ("experts",)),
    ("shared.hf.forwards", ("rotary", "rms_norm", "mlp")),
    ("shared.hf.causal_lm", ("linear_cross_entropy",)),
    ("shared.hf.decoder_layer", ("norm_attention_inputs", "norm_mlp", "norm_experts", "add_rms_norm")),
)


def uses(qwen3, model, step=lambda model: model.train()(input_ids=TOKENS, labels=LABELS)):
    """The operations of ours that a step of the model calls."""
    called = set()
    with pytest.MonkeyPatch.context() as patch:
        for where, names in PLACES:
            module = sys.modules[f"{qwen3.__name__}.{where}"]
            for name in names:
                original = getattr(module, name)

                def spy(*args, name=name, original=original, **kwargs):
                    called.add(name)
                    return original(*args, **kwargs)

                patch.setattr(module, name, spy)
        step(model)
    return called


def exact_step(model, **inputs):
    """A step in float64, which transformers' grouped GEMMs do not take. Without the gradients of a handful of numbers, whose errors in
    half precision are a matter of luck."""
    model = copy.deepcopy(model).double()
    (model.get_base_model() if hasattr(model, "peft_config") else model).set_experts_implementation("eager")
    step = Step(model, **inputs)
    step.gradients = {name: gradient for name, gradient in step.gradients.items() if gradient.numel() > 16}
    return step


# ---------------------------------------------------------------- steps
@pytest.mark.parametrize("how", ["apply", "kernelize", "pack", "mapping"])
def test_training_step(qwen3, how):
    model = tiny_qwen3_moe()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    install(qwen3, model, how)
    assert uses(qwen3, model) == FUSED
    found = Step(model, input_ids=TOKENS, labels=LABELS)
    assert found.output.logits is None and type(found.output) is type(expected.output)
    found.assert_same(expected, FACTOR)
    assert found.gradients.keys() == dict(model.named_parameters()).keys()


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("normalised", [True, False])
def test_half_precision_is_as_exact_as_before(qwen3, dtype, normalised):
    model = tiny_qwen3_moe(dtype, norm_topk_prob=normalised, num_experts=8, num_experts_per_tok=8)  # no choice that rounding decides
    exact = exact_step(model, input_ids=TOKENS, labels=LABELS)
    before = Step(model, input_ids=TOKENS, labels=LABELS)
    qwen3.apply()
    Step(model, input_ids=TOKENS, labels=LABELS).assert_as_exact_as(before, exact)


@pytest.mark.parametrize("trained", ["all", "LoRA"])
def test_twenty_steps(qwen3, trained):
    def losses(model):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        found = []
        for step in range(20):
            tokens = random_tokens(2, 20 + step)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return torch.tensor(found)

    def made():
        return tiny_qwen3_moe() if trained == "all" else lora(tiny_qwen3_moe(), target_modules=["q_proj", "o_proj"])

    expected = losses(made())
    qwen3.apply()
    found = losses(made())
    assert (found / expected - 1).abs().max() < 5e-3 and found[-1] < found[0]


# ---------------------------------------------------------------- the loss
MASK = (torch.arange(33) >= torch.tensor([[0], [9]])).long()


@pytest.mark.parametrize(
    "inputs",
    [
        {"output_router_logits": True},
        {"output_router_logits": True, "attention_mask": MASK},
        {"num_items_in_batch": 17, "output_router_logits": True},
        {"num_items_in_batch": torch.tensor(17), "output_router_logits": True},
        {"num_items_in_batch": torch.tensor([17]), "output_router_logits": True},
        {"ignore_index": 5},
        {"shift_labels": LABELS.roll(-1, 1)},
        {"use_cache": False, "attention_mask": MASK},
        {"return_dict": False, "output_router_logits": True},
        {"output_hidden_states": True, "output_attentions": True},
    ],
    ids=lambda inputs: "-".join(inputs),
)
@pytest.mark.parametrize("how", ["apply", "kernelize"])
def test_arguments(qwen3, inputs, how):
    model = tiny_qwen3_moe(router_aux_loss_coef=0.3)
    labels = LABELS.where(LABELS >= 0, inputs.get("ignore_index", -100))
    expected = Step(model, input_ids=TOKENS, labels=labels, **inputs)
    install(qwen3, model, how)
    found = Step(model, input_ids=TOKENS, labels=labels, **inputs)
    found.assert_same(expected, FACTOR)
    if isinstance(found.output, tuple):
        return
    assert found.output.logits is None
    if inputs.get("output_router_logits"):
        assert_close(found.output.aux_loss, expected.output.aux_loss, torch.float32)
        for mine, theirs in zip(found.output.router_logits, expected.output.router_logits, strict=True):
            assert_close(mine, theirs, torch.float32, "router logits", FACTOR)
    else:
        assert found.output.aux_loss is None and found.output.router_logits is None


def test_the_auxiliary_loss_that_the_configuration_asks_for(qwen3):
    model = tiny_qwen3_moe(output_router_logits=True, router_aux_loss_coef=0.3)
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    plain = Step(model, input_ids=TOKENS, labels=LABELS, output_router_logits=False)
    assert relative_error(plain.loss, expected.loss) > 1e-3
    qwen3.apply()
    found = Step(model, input_ids=TOKENS, labels=LABELS)
    assert found.output.logits is None
    found.assert_same(expected, FACTOR)
    # The hooks that transformers has put on the routers stay there, and do nothing where nobody asks.
    assert uses(qwen3, model, lambda model: model(input_ids=TOKENS, labels=LABELS, output_router_logits=False)) == FUSED
    Step(model, input_ids=TOKENS, labels=LABELS, output_router_logits=False).assert_same(plain, FACTOR)


def test_metrics_beside_the_auxiliary_loss(qwen3):
    model = tiny_qwen3_moe(router_aux_loss_coef=0.3)
    expected = Step(model, input_ids=TOKENS, labels=LABELS, output_router_logits=True)
    qwen3.apply(fused_linear_cross_entropy={"return_token_accuracy": True, "return_z_loss": True, "lse_square_scale": 0.0})
    found = Step(model, input_ids=TOKENS, labels=LABELS, output_router_logits=True)
    found.assert_same(expected, FACTOR)
    assert found.output.token_accuracy is not None and found.output.aux_loss is not None


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("router_logits", [False, True])
@pytest.mark.parametrize("keep_attention", [False, True])
def test_gradient_checkpointing(qwen3, reentrant, router_logits, keep_attention):
    model = tiny_qwen3_moe(router_aux_loss_coef=0.3)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    expected = Step(model, input_ids=TOKENS, labels=LABELS, output_router_logits=router_logits)
    qwen3.apply(keep_attention=keep_attention)
    Step(model, input_ids=TOKENS, labels=LABELS, output_router_logits=router_logits).assert_same(expected, FACTOR)


def test_logits_and_generation_in_eval_mode(qwen3):
    model = tiny_qwen3_moe().eval()
    expected, options = model(input_ids=TOKENS, labels=LABELS), {"max_new_tokens": 12, "do_sample": False}
    tokens = model.generate(TOKENS[:, :9], **options)
    qwen3.apply()
    found = model(input_ids=TOKENS, labels=LABELS)
    assert_close(found.logits, expected.logits, torch.float32, "logits", FACTOR)
    assert torch.equal(model.generate(TOKENS[:, :9], **options), tokens)
    with torch.no_grad():
        assert_close(model(input_ids=TOKENS).logits, expected.logits, torch.float32, "logits", FACTOR)


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
    decoder, rows = sys.modules[f"{qwen3.__name__}.shared.hf.decoder_layer"], []
    with pytest.MonkeyPatch.context() as patch:
        original = decoder.norm_attention_inputs
        patch.setattr(decoder, "norm_attention_inputs", lambda x, *args: rows.append(x.shape[:-1].numel()) or original(x, *args))
        Step(model, **inputs).assert_same(expected, FACTOR)
    assert set(rows) == ({66} if router_logits else {53})


def watched(rows, forward, module, x):
    """A forward of somebody's on a part of the model: the padding stays."""
    rows.append(x.shape)
    return forward(module, x)


# ---------------------------------------------------------------- what is trained, and how
def lora(model, **options):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **options)).train()


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    "options, fused",
    [
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, True),
        ({"target_modules": ["q_proj", "o_proj"], "lora_dropout": 0.3}, True),
        ({"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}, False),  # which are the experts' parameters by now
        ({"target_modules": ["q_proj"], "target_parameters": EXPERTS}, False),
        ({"target_modules": ["o_proj"], "target_parameters": ["mlp.gate.weight"]}, False),
        ({"target_modules": ["lm_head"]}, True),
    ],
    ids=["attention", "dropout", "all projections", "experts", "router", "lm_head"],
)
@pytest.mark.parametrize("how", ["apply", "kernelize"])
def test_lora(qwen3, options, fused, how):
    model = lora(tiny_qwen3_moe(), **options)
    torch.manual_seed(2)
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    install(qwen3, model, how)
    called = uses(qwen3, model)
    assert ("norm_experts" in called) == fused and ("experts" in called) != fused
    torch.manual_seed(2)
    found = Step(model, input_ids=TOKENS, labels=LABELS)
    found.assert_same(expected, FACTOR)
    assert all("lora" in name for name in found.gradients)


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
    """Of the six grouped GEMMs of a layer two are its weights' gradients: without these there are four."""
    model = tiny_qwen3_moe()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "experts" not in name
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    qwen3.apply()
    experts, calls = sys.modules[f"{qwen3.__name__}.shared.ops.experts"], []
    for name in ("grouped_mm", "grouped_outer"):
        original = getattr(experts, name)
        monkeypatch.setattr(experts, name, lambda *args, name=name, original=original: calls.append(name) or original(*args))
    Step(model, input_ids=TOKENS, labels=LABELS).assert_same(expected, FACTOR)
    assert calls == ["grouped_mm"] * 8


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


@pytest.mark.parametrize("how", ["apply", "kernelize"])
def test_torch_compile(qwen3, how):
    model = tiny_qwen3_moe()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    install(qwen3, model, how)
    check_compiled(model, expected, FACTOR, input_ids=TOKENS, labels=LABELS)


@pytest.mark.parametrize("parts", ["layers", "experts"])
def test_sharded_parameters(qwen3, parts):
    model = tiny_qwen3_moe()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    with sharded(model, lambda layer: [layer.mlp.experts] if parts == "experts" and hasattr(layer.mlp, "experts") else []):
        for how in ("apply", "kernelize"):
            install(qwen3, model, how)
            steps = []
            called = uses(qwen3, model, lambda model: steps.append(Step(model, input_ids=TOKENS, labels=LABELS)))  # noqa: B023
            assert called >= ({"norm_experts"} if parts == "layers" else {"experts", "add_rms_norm"}) | {"norm_attention_inputs"}
            whole(steps[0]).assert_same(expected, FACTOR)
            qwen3.reset()


def test_two_runs_give_the_same_bits(qwen3):
    model = tiny_qwen3_moe(torch.bfloat16)
    qwen3.apply()
    check_same_bits(model, input_ids=TOKENS, labels=LABELS)


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


# ---------------------------------------------------------------- hooks, checkpoints, other implementations
def test_hooks_are_called(qwen3):
    model, seen = tiny_qwen3_moe(), []
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    qwen3.apply()
    block = model.model.layers[0].mlp
    for module in (block, block.gate, block.experts, model.model.layers[2].self_attn.o_proj):
        handle = module.register_forward_hook(lambda module, args, output: seen.append(type(module).__name__))
        Step(model, input_ids=TOKENS, labels=LABELS).assert_same(expected, FACTOR)
        handle.remove()
    assert seen == ["Qwen3MoeSparseMoeBlock", "Qwen3MoeTopKRouter", "Qwen3MoeExperts", "Linear"]


@pytest.mark.parametrize("how", ["apply", "kernelize"])
def test_the_users_choice_of_experts_wins(qwen3, how, monkeypatch):
    model, calls = tiny_qwen3_moe(), []
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    install(qwen3, model, how)
    original = moe.batched_mm_experts_forward
    moe.ALL_EXPERTS_FUNCTIONS.register("counted", lambda *args: calls.append(1) or original(*args))
    try:
        model.set_experts_implementation("counted")
        assert not uses(qwen3, model) & {"norm_experts", "experts"} and len(calls) == 2
        Step(model, input_ids=TOKENS, labels=LABELS).assert_same(expected, FACTOR)
        model.set_experts_implementation("bastile")
        assert "norm_experts" in uses(qwen3, model)
    finally:
        moe.ExpertsInterface._global_mapping.pop("counted")


def test_saving_and_loading(qwen3, tmp_path):
    model = tiny_qwen3_moe()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    names = {name: tensor.shape for name, tensor in model.state_dict().items()}
    qwen3.kernelize(model)
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == names
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).train()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    qwen3.apply()
    assert uses(qwen3, loaded) == FUSED
    Step(loaded, input_ids=TOKENS, labels=LABELS).assert_same(expected, FACTOR)


# ---------------------------------------------------------------- where the layers go
@pytest.mark.parametrize("off", [*OPERATIONS, None])
def test_subsets(qwen3, off):
    model = tiny_qwen3_moe()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    qwen3.apply(**{} if off is None else {off: False})
    left_out = {off, "decoder_layer"} if off in ("rms_norm", "swiglu", "rope") else {off}
    assert qwen3.get_patched_ops() == [name for name in OPERATIONS if name not in left_out]
    called = uses(qwen3, model)
    assert ("norm_experts" in called) == (not left_out & {"decoder_layer", "experts"})
    assert ("experts" in called) == ("decoder_layer" in left_out)
    Step(model, input_ids=TOKENS, labels=LABELS).assert_same(expected, FACTOR)


@pytest.mark.parametrize("sequence", [["apply"], ["kernelize"], ["mapping"], ["apply", "mapping", "kernelize"]], ids="-".join)
def test_reset_leaves_no_trace(qwen3, sequence):
    model = tiny_qwen3_moe()
    before = everything()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    for how in sequence:
        install(qwen3, model, how)
    assert uses(qwen3, model) == FUSED
    qwen3.reset()
    qwen3.reset()
    for old, new in zip(before, everything(), strict=True):
        assert old.keys() == new.keys()
        assert all(new[name] is old[name] for name in old)
    assert uses(qwen3, model) == set() and qwen3.get_patched_ops() == []
    again = Step(model, input_ids=TOKENS, labels=LABELS)
    assert torch.equal(again.loss, expected.loss)
    assert all(torch.equal(again.gradients[name], expected.gradients[name]) for name in expected.gradients)


def test_kernelize_leaves_the_other_family_and_other_models_alone(qwen3):
    others, before = (tiny_qwen3_moe(), tiny_model()), everything()
    model = qwen3.kernelize(tiny_qwen3_moe())
    assert all(new[name] is old[name] for old, new in zip(before[:2], everything()[:2], strict=True) for name in old)
    assert uses(qwen3, model) == FUSED
    for other in others:
        assert uses(qwen3, other) == set()


def test_both_families_at_once(qwen3):
    dense, sparse = tiny_model(), tiny_qwen3_moe()
    expected = [Step(model, input_ids=TOKENS, labels=LABELS) for model in (dense, sparse)]
    assert qwen3.kernelize(nn.ModuleList([dense, sparse]))
    for model, step in zip((dense, sparse), expected, strict=True):
        assert uses(qwen3, model) >= {"norm_attention_inputs", "norm_mlp"}
        Step(model, input_ids=TOKENS, labels=LABELS).assert_same(step, FACTOR)


def test_a_stranger_in_one_family_is_kept(qwen3, monkeypatch):
    forward = modeling_qwen3_moe.Qwen3MoeMLP.forward
    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeMLP, "forward", lambda self, x: 2 * forward(self, x))
    with pytest.warns(RuntimeWarning, match="Qwen3MoeMLP.forward is .*swiglu leaves it alone"):
        qwen3.apply()
    assert qwen3.get_patched_ops() == [name for name in OPERATIONS if name != "swiglu"]
    assert vars(modeling_qwen3.Qwen3MLP)["forward"] is qwen3.layers.MLP.forward
    qwen3.reset()


def test_kernelize_says_what_it_cannot_do(qwen3):
    class OtherExperts(modeling_qwen3_moe.Qwen3MoeExperts):
        def forward(self, *args):
            return super().forward(*args)

    model = tiny_qwen3_moe()
    for layer in (model.model.layers[0], model.model.layers[2]):
        layer.mlp.experts.__class__ = OtherExperts
    with pytest.raises(RuntimeError, match="experts cannot be put on this Qwen3MoeForCausalLM"):
        qwen3.kernelize(model)


def test_layers_load_from_a_folder(qwen3, package_folder, monkeypatch):
    from kernels.layer.layer import _validate_layer

    monkeypatch.setattr("kernels.layer.layer.get_local_kernel", functools.partial(kernels.get_local_kernel, backend="cpu"))
    for name, devices in qwen3.mapping().items():
        if not name.startswith("Qwen3Moe"):
            continue
        repository = devices["cpu"]
        layer = repository.load()
        assert kernels.LocalLayerRepository(package_folder, layer_name=layer.__name__).load() is layer
        _validate_layer(check_cls=getattr(modeling_qwen3_moe, name), cls=layer, repo=repository)


def test_explain(qwen3):
    model = tiny_qwen3_moe()
    assert {row.part: row.fused for row in qwen3.explain(model).rows}["decoder layer"] is False
    qwen3.apply()
    rows = {row.part: row for row in qwen3.explain(model).rows}
    assert rows["norm, router, experts"].count == 2 and rows["norm, router, experts"].fused
    assert rows["norm, gate_proj, up_proj, down_proj"].count == 1 and rows["loss without logits"].fused
    model.model.layers[0].mlp.gate.register_forward_hook(lambda *args: None)
    lora_model = lora(tiny_qwen3_moe(), target_modules=["q_proj"], target_parameters=EXPERTS)
    for each, reason in ((model, "the router has hooks"), (lora_model, "target_parameters")):
        found = [row for row in qwen3.explain(each).rows if row.part == "norm, router, experts" and not row.fused]
        assert found and reason in found[0].reason


def test_pack(qwen3):
    from tests.models import packed_groups

    model = qwen3.pack(tiny_qwen3_moe())
    assert packed_groups(qwen3, model.model.layers[1]) == [True, True]
    attention = model.model.layers[0].self_attn
    side_by_side = sys.modules[f"{qwen3.__name__}.shared.ops.common"].side_by_side
    assert side_by_side([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) is not None


# ---------------------------------------------------------------- warm-up, and with the kernels
def test_warm_up(qwen3):
    model, warmup = tiny_qwen3_moe(), sys.modules[qwen3.__name__ + ".warmup"]
    state = torch.random.get_rng_state()
    assert qwen3.warmup_all_kernels(model) is None
    assert warmup.case_of(model).sizes[7:9] == (40, 3)
    warmup.warm_up("cpu", torch.float32, warmup.case_of(model))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_runs_the_kernels_that_the_warm_up_loads(qwen3, interpret, dtype):
    model = tiny_qwen3_moe(dtype, moe_intermediate_size=64, num_experts_per_tok=6)
    exact = exact_step(model, input_ids=TOKENS, labels=LABELS)
    before = Step(model, input_ids=TOKENS, labels=LABELS)
    warmup = sys.modules[f"{qwen3.__name__}.warmup"]
    backend = interpret(qwen3, operations(read_package(ROOT)))
    qwen3.kernelize(model)
    warmup.warm_up("cpu", dtype, warmup.case_of(model), tokens=TOKENS.numel())
    loaded = set(backend.launched)
    backend.launched.clear()
    found = Step(model, input_ids=TOKENS, labels=LABELS)
    if dtype == torch.float32:
        found.assert_same(before, FACTOR)
    else:
        found.assert_as_exact_as(before, exact)
    kernels_run = {name.partition("-")[0] for name in backend.launched}
    assert kernels_run >= {"swiglu_rows_forward", "swiglu_rows_backward", "token_sum", "cross_entropy_gradient"}
    assert set(backend.launched) <= loaded
