"""PEFT, replaced linear layers, gradient checkpointing, and what PyTorch lets anyone do to a module."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.integrations.common import FACTOR, WAYS, batch, install, layers_run, model_on  # noqa: F401
from tests.models import Step
from tests.patched import lora
from tests.tolerances import assert_close

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
HOWS = pytest.mark.parametrize("how", WAYS)


def compare(qwen3, model, device, how="kernelize", seed=None, factor=1, **inputs):
    """The step of a model without and then with the layers: the same loss and gradients. Returns the second. seed: of dropout's masks."""
    inputs, steps = inputs or batch(device, 2, 33), []
    for put_on in (lambda: None, lambda: install(qwen3, model, how)):
        put_on()
        if seed is not None:
            torch.manual_seed(seed)
        steps.append(Step(model, **inputs))
    steps[1].assert_same(steps[0], factor * FACTOR[device])
    return steps[1]


@pytest.mark.integration("PEFT: LoRA on the projections")
@HOWS
@pytest.mark.parametrize("target_modules", [PROJECTIONS, *([name] for name in PROJECTIONS)], ids="-".join)
def test_lora_on_projections(qwen3, device, how, target_modules):
    found = compare(qwen3, lora(model_on(device), target_modules=target_modules), device, how)
    assert found.output.logits is None and all("lora" in name for name in found.gradients)


@pytest.mark.integration("PEFT: IA3, prompt tuning, prefix tuning")
@pytest.mark.parametrize("kind", ["IA3Config", "PromptTuningConfig", "PrefixTuningConfig"])
def test_other_adapters(qwen3, device, kind):
    """Factors on layers' inputs and outputs, embeddings in front of the text, keys and values in front of it."""
    import peft

    options = {"num_virtual_tokens": 3, "num_layers": 2} if "Tuning" in kind else {"target_modules": ["k_proj", "v_proj", "down_proj"]}
    options |= {"feedforward_modules": ["down_proj"]} if kind == "IA3Config" else {}
    torch.manual_seed(0)
    model = peft.get_peft_model(model_on(device), getattr(peft, kind)(task_type="CAUSAL_LM", **options)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    assert compare(qwen3, model, device).gradients


@pytest.mark.integration("PEFT: IA3, prompt tuning, prefix tuning")
def test_context_aware_prompt_tuning(qwen3, device):
    """PEFT's CPT computes its loss from the logits of a call with labels, so it needs the loss that makes them."""
    import peft

    torch.manual_seed(0)
    config = peft.CPTConfig(task_type="CAUSAL_LM", cpt_token_ids=[3, 4, 5, 6], cpt_mask=[1] * 4, cpt_tokens_type_mask=[1, 2, 3, 4])
    model = peft.get_peft_model(model_on(device), config).train()
    expected = Step(model, **batch(device, 2, 33))
    qwen3.apply(fused_linear_cross_entropy=False)
    found = Step(model, **batch(device, 2, 33))
    found.assert_same(expected, FACTOR[device])
    assert found.gradients and found.output.logits is not None


@pytest.mark.integration("PEFT: LoRA on the head")
@HOWS
@pytest.mark.parametrize("tied", [False, True])
def test_lora_on_the_head(qwen3, device, how, tied):
    model = lora(model_on(device, tie_word_embeddings=tied), target_modules=["q_proj", "lm_head"])
    assert compare(qwen3, model, device, how).output.logits is not None


@pytest.mark.integration("PEFT: a trained head and embeddings (modules_to_save)")
@HOWS
def test_modules_to_save(qwen3, device, how):
    model = lora(model_on(device), target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"])
    assert any("lm_head" in name for name in compare(qwen3, model, device, how).gradients)


@pytest.mark.integration("PEFT: frozen head, frozen layers")
@pytest.mark.parametrize("trained", ["model.layers.0.mlp", "model.layers.1.self_attn.q_proj", "norm", "lm_head", "embed_tokens"])
def test_frozen_parts(qwen3, device, trained):
    """No gradient is computed or left for what is frozen; the head is, in all cases but its own."""
    model = model_on(device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = trained in name
    found = compare(qwen3, model, device)
    assert found.gradients and all(trained in name for name in found.gradients)


@pytest.mark.integration("transformers: tied embeddings")
@HOWS
@pytest.mark.parametrize("frozen", [False, True])
def test_tied_embeddings(qwen3, device, how, frozen):
    model = model_on(device, tie_word_embeddings=True)
    model.model.embed_tokens.weight.requires_grad = not frozen
    found = compare(qwen3, model, device, how)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert ("model.embed_tokens.weight" in found.gradients) == (not frozen)


@pytest.mark.integration("PEFT: merge_and_unload, disable_adapter, save and load")
def test_the_life_of_an_adapter(qwen3, device, tmp_path):
    from peft import PeftModel

    tokens = batch(device, 2, 17)["input_ids"]
    model = install(qwen3, lora(model_on(device), target_modules=PROJECTIONS)).eval()
    plain = lora(model_on(device), target_modules=PROJECTIONS).eval()

    def same(ours, theirs, what):
        assert_close(ours(input_ids=tokens).logits, theirs(input_ids=tokens).logits, torch.float32, what, FACTOR[device])

    same(model, plain, "adapter")
    with model.disable_adapter(), plain.disable_adapter():
        same(model, plain, "disabled adapter")
    model.save_pretrained(tmp_path)
    same(install(qwen3, PeftModel.from_pretrained(model_on(device), tmp_path).eval()), plain, "loaded adapter")
    model.merge_adapter()
    same(model, plain, "merged adapter")
    model.unmerge_adapter()
    merged, expected = (each.merge_and_unload().requires_grad_(True) for each in (model, plain))
    same(merged, expected, "merged model")
    Step(merged.train(), **batch(device, 2, 17)).assert_same(Step(expected.train(), **batch(device, 2, 17)), 3 * FACTOR[device])


class Quantised(nn.Module):
    """A linear layer that keeps its weight in 8 bits and dequantises it in each call, as QLoRA's base layers do."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


class QuantisedLinear(nn.Linear):
    """A subclass of nn.Linear that does this, as bitsandbytes has it; `weight` is not what is multiplied by."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.scale = Quantised(linear).weight, Quantised(linear).scale

    forward = Quantised.forward


class Adapted(nn.Module):
    """LoRA around a layer that is not nn.Linear, as PEFT puts it around a quantised one."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.Parameter(torch.randn(4, base.in_features, device=base.weight.device) * 0.1)
        self.lora_b = nn.Parameter(torch.randn(base.out_features, 4, device=base.weight.device) * 0.1)

    def forward(self, x):
        return self.base_layer(x) + (x @ self.lora_a.T.to(x.dtype)) @ self.lora_b.T.to(x.dtype)


@pytest.mark.integration("transformers: linear layers replaced by quantised ones, with LoRA around them")
@HOWS
@pytest.mark.parametrize("kind", [Quantised, QuantisedLinear])
@pytest.mark.parametrize("names", [PROJECTIONS, ["o_proj"], ["down_proj", "k_proj"]], ids="-".join)
def test_replaced_linears(qwen3, device, how, kind, names):
    torch.manual_seed(0)
    model = model_on(device)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if name in names:
                    setattr(part, name, Adapted(kind(child)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "lora" in name
    found = compare(qwen3, model, device, how)
    assert found.gradients and all("lora" in name for name in found.gradients)


@pytest.mark.integration("transformers: linear layers replaced by quantised ones, with LoRA around them")
def test_a_replaced_head(qwen3, device):
    model = model_on(device)
    model.lm_head = QuantisedLinear(model.lm_head)
    assert compare(qwen3, model, device).output.logits is not None


@pytest.mark.integration("transformers: gradient checkpointing, reentrant and not")
@HOWS
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "LoRA"])
def test_gradient_checkpointing_of_a_model(qwen3, device, how, reentrant, adapter):
    def build():
        return lora(model_on(device), target_modules=PROJECTIONS) if adapter else model_on(device)

    inputs = batch(device, 2, 33)
    expected = Step(build(), **inputs)
    model = build()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    Step(install(qwen3, model, how), **inputs).assert_same(expected, FACTOR[device])


@pytest.mark.integration("PyTorch: torch.utils.checkpoint around one layer")
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("where", ["", "self_attn", "self_attn.q_norm", "mlp", "mlp.up_proj", "input_layernorm"])
def test_checkpoint_around_one_layer(qwen3, device, reentrant, where):
    inputs = {**batch(device, 2, 33), "use_cache": False}  # of which a layer that runs again would see its own keys twice
    model = model_on(device)
    expected = Step(model, **inputs)
    module = install(qwen3, model).model.layers[1].get_submodule(where)
    inner = module.forward

    def forward(*args, hidden_states=None, **kwargs):
        (x,) = args or (hidden_states,)  # a reentrant checkpoint takes positional arguments alone
        return checkpoint(lambda x: inner(x, **kwargs), x, use_reentrant=reentrant)

    module.forward = forward
    Step(model, **inputs).assert_same(expected, FACTOR[device])
    module.forward = inner  # or the apply() of the next test warns of it


@pytest.mark.integration("transformers: gradient checkpointing, reentrant and not")
def test_checkpointed_copies_run_in_any_order(qwen3, device):
    """Two backward passes over checkpointed layers, the later one first: what is recomputed belongs to its own pass."""
    inputs = [batch(device, 2, length) for length in (17, 33)]
    model = model_on(device)

    def gradients(model):
        model.zero_grad()
        first, second = (model(**each).loss for each in inputs)
        second.backward()
        first.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = gradients(copy.deepcopy(model))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for name, gradient in gradients(install(qwen3, model)).items():
        assert_close(gradient, expected[name], torch.float32, name, FACTOR[device])


def modules_of_a_layer():
    names = {name for name, _ in model_on("cpu", num_hidden_layers=1).named_modules()} - {"", "model", "model.layers"}
    return sorted(name for name in names if "rotary" not in name and "Func" not in name)


@pytest.mark.integration("PyTorch: hooks on any module, and on all")
@HOWS
@pytest.mark.parametrize("where", [*modules_of_a_layer(), "all"])
def test_hooks_hear_what_they_would_hear(qwen3, device, how, where):
    """Forward and backward hooks get the same tensors, each as often as without the layers."""
    inputs = batch(device, 2, 9)

    def hear(model):
        heard = []

        def listen(what):
            def hook(module, *args):
                tensors = args[-1] if isinstance(args[-1], tuple) else (args[-1],)
                found = [t for t in tensors if isinstance(t, torch.Tensor)] if "backward" in what else [args[-1]]
                heard.append((what, type(module).__name__, [t.detach().clone() for t in found if isinstance(t, torch.Tensor)]))

            return hook

        kinds = ("forward_hook", "full_backward_hook")
        if where == "all":
            handles = [getattr(nn.modules.module, f"register_module_{kind}")(listen(kind)) for kind in kinds]
        else:
            handles = [getattr(model.get_submodule(where), f"register_{kind}")(listen(kind)) for kind in kinds]
        try:
            Step(model, **inputs)
        finally:
            for handle in handles:
                handle.remove()
        return heard

    model = model_on(device, num_hidden_layers=1)
    expected = hear(model)
    found = [each for each in hear(install(qwen3, model, how)) if each[1] != "Func"]
    expected = [each for each in expected if each[1] != "Func"]  # the rotary embedding, which is no part of the model
    assert expected and [each[:2] for each in found] == [each[:2] for each in expected]
    for (what, module, ours), (_, _, theirs) in zip(found, expected):
        for mine, other in zip(ours, theirs, strict=True):
            assert_close(mine, other, torch.float32, f"{what} of {module}", 10 * FACTOR[device])


@pytest.mark.integration("PyTorch: hooks on saved tensors (save_on_cpu)")
def test_saved_tensor_hooks(qwen3, device):
    inputs = batch(device, 2, 33)
    expected = Step(model_on(device), **inputs)
    model = install(qwen3, model_on(device))
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.cpu(), lambda t: t.to(device)):
        found = Step(model, **inputs)
    assert packed
    found.assert_same(expected, FACTOR[device])


@pytest.mark.integration("PyTorch: torch.func.functional_call with other parameters")
def test_functional_call(qwen3, device):
    inputs = batch(device, 2, 17)
    plain, model = model_on(device), install(qwen3, model_on(device))
    parameters = {name: (p * 1.1).detach().requires_grad_() for name, p in plain.named_parameters()}

    def gradients(module):
        loss = torch.func.functional_call(module, parameters, kwargs=inputs).loss
        return torch.autograd.grad(loss, list(parameters.values()))

    for name, ours, theirs in zip(parameters, gradients(model), gradients(plain)):
        assert_close(ours, theirs, torch.float32, name, FACTOR[device])
