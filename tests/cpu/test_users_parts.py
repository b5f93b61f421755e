"""Parts of a model that a user made: a class that is called in its own way, a function for a module, a trained number, a subclass."""

import functools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from tests.compile_checks import with_adapters
from tests.decoder_families import tiny
from tests.models import Step, random_tokens, tiny_gpt_oss, tiny_model, tiny_qwen3_5, tiny_qwen3_5_sparse, tiny_qwen3_moe
from tests.ops.second_runs import saves_products
from tests.versions import needs_compiler

TOKENS = random_tokens(2, 13)


def step(model, **inputs):
    torch.manual_seed(0)
    return Step(model, input_ids=TOKENS, labels=TOKENS, use_cache=False, **inputs)


def install(package, how, model):
    package.apply() if how == "apply" else package.kernelize(model)


@pytest.mark.parametrize("how", ("apply", "kernelize"))
@pytest.mark.parametrize("part", ("mlp", "self_attn", "input_layernorm", "post_attention_layernorm", "self_attn.q_norm"))
def test_a_class_that_is_called_in_its_own_way(qwen3, how, part):
    model = tiny_model()
    module = model.model.layers[0].get_submodule(part)
    cls, calls = type(module), []

    def call(self, *args, **kwargs):
        calls.append(part)
        found = super(cls, self).__call__(*args, **kwargs)
        return (3 * found[0], *found[1:]) if isinstance(found, tuple) else 3 * found

    module.__class__ = type("Mine", (cls,), {"__call__": call})
    expected = step(model)
    install(qwen3, how, model)
    calls.clear()
    step(model).assert_same(expected)
    assert calls


# Norms in place of a layer's, of a width: PyTorch's, and those of other families.
NORMS = {
    "LayerNorm": lambda width: nn.LayerNorm(width, eps=0.1),
    "LayerNorm without a bias": lambda width: nn.LayerNorm(width, bias=False),
    "LayerNorm of whole rows": lambda width: nn.LayerNorm((TOKENS.shape[1], width)),
    "1 + weight": GemmaRMSNorm,
    "weight": LlamaRMSNorm,
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ("llama", "gemma", "starcoder2", "nemotron", "cohere"))
def test_a_norm_of_another_family(decoders, name, norm):
    """`apply` gives the norms of all families a forward of ours, so that it is ours tells nothing of what a norm computes."""
    model = tiny(name)
    decoders.apply()
    decoders.kernelize(model)  # which reads Cohere
    layer = model.model.layers[0]
    layer.input_layernorm = NORMS[norm](layer.input_layernorm.weight.shape[0])
    for weight in layer.input_layernorm.parameters():
        nn.init.uniform_(weight, 0.5, 1.5)
    found = step(model)
    decoders.reset()
    found.assert_same(step(model), 30)  # some gradients of these are little but rounding


class Larger(nn.Module):
    def forward(self, weight):
        return 1.1 * weight + 0.3


@pytest.mark.parametrize("after", (False, True), ids=("before", "after"))
@pytest.mark.parametrize("name", ("nemotron", "starcoder2", "exaone4"))
def test_a_weight_that_is_parametrized(decoders, name, after):
    """It is made at each look by a property of a class of its own, and no parameter of its module."""
    for path in [path for path, _ in tiny(name).model.layers[0].named_parameters()]:
        part, _, weight = path.rpartition(".")
        model, plain = tiny(name), tiny(name)
        if after:
            step(decoders.kernelize(model))
        for each in (model, plain):
            register_parametrization(each.model.layers[0].get_submodule(part), weight, Larger())
        found = step(model if after else decoders.kernelize(model))
        assert any(f"{part}.parametrizations.{weight}" in gradient for gradient in found.gradients)
        found.assert_same(step(plain), 30)


def test_a_call_that_is_another_for_all_modules(qwen3, monkeypatch):
    """A profiler may replace `nn.Module.__call__`. It sees every module that transformers would call, even if it has PyTorch's name."""
    model, own, called = tiny_model(), torch.nn.Module.__call__, []

    @functools.wraps(own)
    def call(self, *args, **kwargs):
        called.append(type(self).__name__)
        return own(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "__call__", call)
        expected, all_of_them = step(model), list(called)
        qwen3.kernelize(model)
        called.clear()
        step(model).assert_same(expected)
        missing = Counter(all_of_them) - Counter(called)
        assert missing.keys() <= {"Func"}, missing  # which the library `kernels` makes of the function that rotates
    called.clear()
    step(model).assert_same(expected)
    assert not called


@needs_compiler
def test_a_forward_that_is_put_on_a_module_after_compiling(qwen3):
    model = qwen3.kernelize(tiny_model(num_hidden_layers=1))
    model.compile(backend="eager")
    step(model)
    for part in ("model.layers.0.mlp.act_fn", "model.layers.0.mlp.down_proj", "lm_head"):
        module = model.get_submodule(part)
        module.forward = functools.partial(lambda own, x: 1.3 * own(x), module.forward)
        found = step(model)
        with torch.compiler.set_stance("force_eager"):
            found.assert_same(step(model), 3)


@pytest.mark.parametrize("name", ("phi3", "glm", "gemma3_text", "llama"))
def test_an_activation_that_is_a_function(decoders, name):
    model = tiny(name)
    for layer in model.model.layers:
        attribute = "activation_fn" if hasattr(layer.mlp, "activation_fn") else "act_fn"
        delattr(layer.mlp, attribute)
        setattr(layer.mlp, attribute, nn.functional.relu)
    expected = step(model)
    step(decoders.kernelize(model)).assert_same(expected)


def test_a_multiplier_that_is_trained(decoders):
    model = tiny("granite")
    for layer in model.model.layers:
        value = layer.residual_multiplier
        del layer.residual_multiplier
        layer.residual_multiplier = nn.Parameter(torch.tensor(value))
    expected = step(model)
    assert expected.gradients["model.layers.0.residual_multiplier"].abs() > 0
    step(decoders.kernelize(model)).assert_same(expected)
    reasons = {row.reason for row in decoders.explain(model).rows if not row.fused}
    assert any("residual_multiplier is not a number" in reason for reason in reasons)


class MyNet(Qwen3_5GatedDeltaNet):
    """Adds nothing, in a file that knows none of transformers' functions."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class MyAttention(GptOssAttention):
    """Adds nothing, either."""


def test_a_delta_net_of_a_user_s_own_class(qwen3_5):
    model = tiny_qwen3_5()
    net = next(layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn"))
    net.__class__ = MyNet
    expected, told = step(model), model.eval().generate(TOKENS, max_new_tokens=4, do_sample=False)
    qwen3_5.apply()
    step(model.train()).assert_same(expected, 10)
    assert torch.equal(model.eval().generate(TOKENS, max_new_tokens=4, do_sample=False), told)


def test_eager_attention_of_a_user_s_own_class(gpt_oss):
    model, between = tiny_gpt_oss(), torch.ones_like(TOKENS)
    between[:, 5] = 0
    model.model.layers[0].self_attn.__class__ = MyAttention
    expected = step(model, attention_mask=between)
    gpt_oss.kernelize(model).set_attn_implementation("bastile")
    step(model, attention_mask=between).assert_same(expected)


def save_products(ctx, operation, *args, **kwargs):
    products = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if operation in products else CheckpointPolicy.PREFER_RECOMPUTE


MODELS = {
    "plain": ("qwen3", tiny_model),
    "LoRA": ("qwen3", lambda: with_adapters(tiny_model())),
    "LoRA with dropout": ("qwen3", lambda: with_adapters(tiny_model(), lora_dropout=0.1)),
    "experts": ("qwen3", tiny_qwen3_moe),
    "decoders": ("decoders", lambda: tiny("phi3")),
    "experts with biases": ("gpt_oss", tiny_gpt_oss),
    "shared expert": ("qwen3_5", lambda: tiny_qwen3_5_sparse("qwen3_5_moe")),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("policy", "options"),
    [(saves_products, {}), (save_products, {"recompute_mlp": True}), (saves_products, {"keep_attention": True})],
    ids=("", "recompute_mlp", "keep_attention"),
)
def test_a_selective_checkpoint(request, kind, policy, options):
    """What it saves of the first run it looks up by the operations of the second; around a whole model the second run is read."""
    package, made = MODELS[kind]
    model = request.getfixturevalue(package).kernelize(made().train(), **options)
    expected, contexts = step(model), functools.partial(create_selective_checkpoint_contexts, policy)
    step(model, call=functools.partial(checkpoint, model, use_reentrant=False, context_fn=contexts)).assert_same(expected)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    model.enable_input_require_grads()
    step(model).assert_same(expected)
