"""The layers on a model: the loss, the gradients and the logits of the same model without them."""

import copy
import sys

import pytest
import torch
from torch import nn

from tests.layer_steps import LABELS, TOKENS, bound, compare
from tests.models import Step, check_compiled, own_attributes, sharded, tiny_model, whole
from tests.patched import install, lora
from tests.tolerances import assert_close
from tests.versions import TORCH, needs_compiler


@pytest.mark.parametrize("how", ["apply", "kernelize", "mapping"])
@pytest.mark.parametrize("tied", [False, True])
def test_training_step(qwen3, how, tied):
    model = tiny_model(tie_word_embeddings=tied)
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    install(qwen3, model, how)
    found = Step(model, input_ids=TOKENS, labels=LABELS)
    assert found.output.logits is None and expected.output.logits is not None
    assert type(found.output) is type(expected.output)
    found.assert_same(expected)


@pytest.mark.parametrize("how", ["apply", "kernelize", "mapping"])
def test_a_decoder_layer_is_fused(qwen3, how, monkeypatch):
    """Both halves of each of the two layers, whoever put the layers there."""
    calls, decoder = [], sys.modules[f"{qwen3.__name__}.shared.hf.layer.decoder_layer"]
    for half in (decoder.norm_attention_inputs, decoder.norm_mlp):
        monkeypatch.setattr(decoder, half.__name__, lambda *a, f=half: calls.append(f.__name__) or f(*a))
    model = tiny_model()
    install(qwen3, model, how)
    Step(model, input_ids=TOKENS, labels=LABELS)
    assert calls == ["norm_attention_inputs", "norm_mlp"] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_exact_as_before(qwen3, dtype):
    model = tiny_model(dtype)
    exact = Step(copy.deepcopy(model).float(), input_ids=TOKENS, labels=LABELS)
    before = Step(model, input_ids=TOKENS, labels=LABELS)
    qwen3.apply()
    found = Step(model, input_ids=TOKENS, labels=LABELS)
    assert found.loss.dtype == before.loss.dtype == torch.float32
    found.assert_as_exact_as(before, exact)


@pytest.mark.parametrize(
    "inputs",
    [
        {},
        {"num_items_in_batch": 17},
        {"num_items_in_batch": torch.tensor(17)},
        {"num_items_in_batch": torch.tensor([17.0])},
        {"ignore_index": 5},
        {"shift_labels": LABELS.roll(-1, 1)},
        {"shift_labels": LABELS.roll(-1, 1), "num_items_in_batch": 40},
        {"logits_to_keep": 8, "shift_labels": LABELS[:, -8:].contiguous()},
        {"logits_to_keep": torch.tensor([3, 5, 30]), "shift_labels": LABELS[:, [4, 6, 31]]},
        {"attention_mask": (torch.arange(33) >= torch.tensor([[0], [9]])).long()},
        {"position_ids": torch.arange(33).flip(0)[None].expand(2, -1)},
        {"use_cache": False},
        {"a_name_of_the_users": 0.3},  # of which transformers' loss takes no notice
    ],
    ids=lambda inputs: "-".join(inputs) or "plain",
)
def test_arguments_of_the_loss(qwen3, inputs):
    labels = LABELS.clone()
    if inputs.get("ignore_index"):
        labels[labels == -100] = inputs["ignore_index"]
    _, found = compare(qwen3, tiny_model(), input_ids=TOKENS, labels=labels, **inputs)
    assert found.logits is None


def test_inputs_embeds(qwen3):
    embeds = torch.randn(2, 33, 64, generator=torch.Generator().manual_seed(2))
    compare(qwen3, tiny_model(), inputs_embeds=embeds, labels=LABELS)


@pytest.mark.parametrize("options", ({}, {"label_smoothing": 0.1}, {"skip_logits": False}, {"return_token_accuracy": True}), ids=str)
@pytest.mark.parametrize("argument", (None, True, False))
@pytest.mark.parametrize("config", (None, True))
def test_return_dict_of_the_configuration(qwen3, config, argument, options):
    """None stands for False there, in transformers; an argument stands before it."""
    model = tiny_model()
    model.config.return_dict = config
    given = {} if argument is None else {"return_dict": argument}
    expected = model(input_ids=TOKENS, labels=LABELS, **given)
    qwen3.apply()
    found = model(input_ids=TOKENS, labels=LABELS, **given, **options)
    assert isinstance(found, tuple) == isinstance(expected, tuple) == (not (config if argument is None else argument))
    if not options.keys() - {"skip_logits"}:
        assert_close(found[0], expected[0], torch.float32, "loss")


def test_return_dict(qwen3):
    expected, found = compare(qwen3, tiny_model(), input_ids=TOKENS, labels=LABELS, return_dict=False)
    assert isinstance(found, tuple) and len(found) == len(expected) and found[1] is None  # the logits


def test_hidden_states_and_attentions(qwen3):
    model = tiny_model(attn_implementation="eager")
    expected, found = compare(qwen3, model, input_ids=TOKENS, labels=LABELS, output_hidden_states=True, output_attentions=True)
    for name in ("hidden_states", "attentions"):
        assert len(found[name]) == len(expected[name])
        for ours, theirs in zip(found[name], expected[name], strict=True):
            assert_close(ours, theirs, torch.float32, name)


@pytest.mark.parametrize(("training", "labels"), [(False, LABELS), (False, None), (True, None)])
def test_logits_are_there_unless_it_trains_with_labels(qwen3, training, labels):
    model = tiny_model().train(training)
    expected = model(input_ids=TOKENS, labels=labels)
    qwen3.apply()
    found = model(input_ids=TOKENS, labels=labels)
    assert_close(found.logits, expected.logits, torch.float32, "logits")
    assert (found.loss is None) == (expected.loss is None)
    if labels is not None:
        assert_close(found.loss, expected.loss, torch.float32, "loss")


@pytest.mark.parametrize("cache", [None, "static"])
def test_generate(qwen3, cache):
    model = tiny_model().eval()
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    expected = model.generate(TOKENS[:, :9], **options)
    qwen3.apply()
    assert torch.equal(model.generate(TOKENS[:, :9], **options), expected)


def test_a_subclass_that_overrides_forward(qwen3):
    from transformers import Qwen3ForCausalLM

    class Doubled(Qwen3ForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.loss = output.loss * 2
            return output

    _, found = compare(qwen3, tiny_model(cls=Doubled), input_ids=TOKENS, labels=LABELS)
    assert found.logits is None


@pytest.mark.parametrize("where", ["lm_head", "model.layers.0.mlp.gate_proj", "model.layers.1.mlp.down_proj", "model.layers.1.mlp.act_fn"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_are_called(qwen3, where, kind):
    model, calls = tiny_model(), []
    qwen3.apply()
    getattr(model.get_submodule(where), kind)(lambda *args: calls.append(1))
    Step(model, input_ids=TOKENS, labels=LABELS)
    assert calls == [1]


def test_backward_hooks_are_called(qwen3):
    model, calls = tiny_model(), []
    qwen3.apply()
    for where in ("lm_head", "model.layers.0.mlp.up_proj"):
        model.get_submodule(where).register_full_backward_hook(lambda *args: calls.append(1))
    Step(model, input_ids=TOKENS, labels=LABELS)
    assert calls == [1, 1]


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("where", ["lm_head", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj"])
def test_linears_that_are_not_plain(qwen3, where):
    def scaled():
        found = Scaled(old.in_features, old.out_features, bias=False)
        found.weight = old.weight
        return found

    def biased():
        return nn.Linear(old.in_features, old.out_features, bias=True)

    def parametrized():
        return nn.utils.parametrizations.weight_norm(copy.deepcopy(old))

    for replacement in (scaled, biased, parametrized):
        model = tiny_model()
        old = model.get_submodule(where)
        model.set_submodule(where, replacement())
        compare(qwen3, model, input_ids=TOKENS, labels=LABELS)


@pytest.mark.parametrize("activation", ["gelu", "swish", "silu"])
def test_activations(qwen3, activation):
    compare(qwen3, tiny_model(hidden_act=activation), input_ids=TOKENS, labels=LABELS)


@pytest.mark.parametrize("keep_norms_in_fp32", [False, True])
def test_autocast(qwen3, keep_norms_in_fp32):
    """The Trainer does so with bf16=True: parameters in fp32, or in bf16 with norms in fp32."""
    model = tiny_model(torch.bfloat16 if keep_norms_in_fp32 else torch.float32)
    if keep_norms_in_fp32:
        for module in model.modules():
            if type(module).__name__ == "Qwen3RMSNorm":
                module.float()
    exact = Step(copy.deepcopy(model).float(), input_ids=TOKENS, labels=LABELS)
    with torch.autocast("cpu", torch.bfloat16):
        before = Step(model, input_ids=TOKENS, labels=LABELS)
        qwen3.apply()
        found = Step(model, input_ids=TOKENS, labels=LABELS)
    assert found.output.logits is None and found.loss.dtype == before.loss.dtype
    assert {n: g.dtype for n, g in found.gradients.items()} == {n: g.dtype for n, g in before.gradients.items()}
    found.assert_as_exact_as(before, exact)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(qwen3, reentrant):
    model = tiny_model()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    qwen3.apply()
    Step(model, input_ids=TOKENS, labels=LABELS).assert_same(expected)


def test_frozen_parameters(qwen3):
    model = tiny_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "q_proj" in name
    compare(qwen3, model, input_ids=TOKENS, labels=LABELS)


def test_accumulated_gradients(qwen3):
    """Two passes before one step: the second adds to the gradients of the first."""
    model = tiny_model()

    def twice():
        model.zero_grad()
        for rows in (TOKENS[:1], TOKENS[1:]):
            model(input_ids=rows, labels=rows, num_items_in_batch=64).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = twice()
    qwen3.apply()
    for name, gradient in twice().items():
        assert_close(gradient, expected[name], torch.float32, name)


def test_no_grad_in_training_mode(qwen3):
    model = tiny_model()
    with torch.no_grad():
        expected = model(input_ids=TOKENS, labels=LABELS).loss
        qwen3.apply()
        assert_close(model(input_ids=TOKENS, labels=LABELS).loss, expected, torch.float32)


@needs_compiler
@pytest.mark.parametrize("how", ["apply", "kernelize"])
def test_torch_compile(qwen3, how):
    model = tiny_model()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    install(qwen3, model, how)
    check_compiled(model, expected, input_ids=TOKENS, labels=LABELS)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]},
        {"target_modules": ["down_proj"]},
        {"target_modules": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["projections", "down_proj", "lm_head", "saved lm_head"],
)
@pytest.mark.parametrize("how", ["apply", "kernelize"])
def test_lora(qwen3, options, how):
    model = lora(tiny_model(), **options)
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    install(qwen3, model, how)
    found = Step(model, input_ids=TOKENS, labels=LABELS)
    found.assert_same(expected)
    assert (found.output.logits is None) == ("lm_head" not in str(options))


def test_swiglu_mlp(qwen3):
    mlp = tiny_model().model.layers[0].mlp
    x = torch.randn(2, 5, 64)
    parts = {name: getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")}
    for name in ("SwiGLUMLP", "MLP"):
        assert_close(bound(qwen3, name, **parts)(x), mlp(x), torch.float32)


def test_rotary_with_tables_of_another_dtype(qwen3):
    """The wider dtype is the result's, as in transformers."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    q, k = torch.randn(2, 4, 7, 16).bfloat16(), torch.randn(2, 2, 7, 16).bfloat16()
    cos, sin = torch.randn(1, 7, 16), torch.randn(1, 7, 16)
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    for found, reference in zip(bound(qwen3, "RotaryPosEmb")(q, k, cos, sin), expected, strict=True):
        assert found.dtype == reference.dtype
        assert_close(found, reference, torch.float32)


@pytest.mark.skipif(TORCH < (2, 7), reason="FSDP2 of torch 2.6 runs on GPUs only: a stream of the CPU records no event")
def test_sharded_parameters(qwen3):
    model = tiny_model()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    with sharded(model):
        for how in ("apply", "kernelize"):
            install(qwen3, model, how)
            found = Step(model, input_ids=TOKENS, labels=LABELS)
            assert found.output.logits is None
            whole(found).assert_same(expected)
            qwen3.reset()


def test_layers_have_no_state(qwen3):
    """The Hub's rule, read off the classes."""
    for name in ("RMSNorm", "RotaryPosEmb", "MLP", "SwiGLUMLP", "CausalLM", "ForCausalLMLoss"):
        layer = getattr(qwen3.layers, name)
        assert own_attributes(layer) == {"forward", "can_torch_compile"} and layer.can_torch_compile
        assert layer.__module__ == f"{qwen3.__name__}.layers" in sys.modules
