"""What holds of every model with experts, of Qwen3-MoE in Qwen3's package and of GPT-OSS in its own, on tiny ones: the loss and the
gradients of the same model without the package, and everything put back."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import kernels
import pytest
import torch
from torch import nn
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests import gpt_oss_steps, qwen3_moe_steps
from tests.compile_checks import operators_of
from tests.models import Step, are_equal, check_compiled, check_same_bits, own_attributes, sharded, tiny_gpt_oss, tiny_qwen3_moe, whole
from tests.patched import calls_of, install, lora
from tests.qwen3_moe_steps import EXPERTS, FACTOR, LABELS, TOKENS
from tests.tolerances import assert_close


class Moe(NamedTuple):
    """package: its fixture, and folder: that of its build. steps: what a step of the model uses. sizes: the width of an expert and top-k,
    as the warm-up reads them."""

    package: str
    folder: str
    modeling: ModuleType
    norm: str
    steps: ModuleType
    tiny: Callable
    sizes: tuple


FAMILIES = {
    "Qwen3-MoE": Moe("qwen3", "package_folder", modeling_qwen3_moe, "Qwen3MoeRMSNorm", qwen3_moe_steps, tiny_qwen3_moe, (40, 3)),
    "GPT-OSS": Moe("gpt_oss", "gpt_oss_folder", modeling_gpt_oss, "GptOssRMSNorm", gpt_oss_steps, tiny_gpt_oss, (48, 3)),
}


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES)
def moe(request):
    return request.param


@pytest.fixture
def package(request, moe):
    return request.getfixturevalue(moe.package)


WAYS = [(moe, how) for moe in FAMILIES for how in ("apply", "kernelize", "pack", "mapping") if (moe, how) != ("GPT-OSS", "pack")]


@pytest.mark.parametrize("moe, how", [pytest.param(FAMILIES[moe], how, id=f"{moe}-{how}") for moe, how in WAYS])
def test_training_step(package, moe, how):
    model = moe.tiny()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    install(package, model, how)
    assert moe.steps.uses(package, model) == moe.steps.FUSED
    found = Step(model, input_ids=TOKENS, labels=LABELS)
    assert found.output.logits is None and type(found.output) is type(expected.output)
    found.assert_same(expected, FACTOR)
    assert found.gradients.keys() == dict(model.named_parameters()).keys()


NO_CHOICE = {"num_experts": 8, "num_experts_per_tok": 8}  # that rounding decides


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "moe, changes",
    [
        (FAMILIES["Qwen3-MoE"], {**NO_CHOICE, "norm_topk_prob": True}),
        (FAMILIES["Qwen3-MoE"], {**NO_CHOICE, "norm_topk_prob": False}),
        (FAMILIES["GPT-OSS"], {}),
    ],
    ids=["Qwen3-MoE, normalised", "Qwen3-MoE", "GPT-OSS"],
)
def test_half_precision_is_as_exact_as_before(package, moe, changes, dtype):
    model = moe.tiny(dtype, **changes)
    exact = moe.steps.exact_step(model, input_ids=TOKENS, labels=LABELS)
    before = Step(model, input_ids=TOKENS, labels=LABELS)
    package.apply()
    Step(model, input_ids=TOKENS, labels=LABELS).assert_as_exact_as(before, exact)


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
def test_arguments(package, moe, inputs, how):
    model = moe.tiny(router_aux_loss_coef=0.3)
    labels = LABELS.where(LABELS >= 0, inputs.get("ignore_index", -100))
    expected = Step(model, input_ids=TOKENS, labels=labels, **inputs)
    install(package, model, how)
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


def test_logits_and_generation_in_eval_mode(package, moe):
    model = moe.tiny().eval()
    expected, options = model(input_ids=TOKENS, labels=LABELS), {"max_new_tokens": 12, "do_sample": False}
    tokens = model.generate(TOKENS[:, :9], **options)
    package.apply()
    found = model(input_ids=TOKENS, labels=LABELS)
    assert_close(found.logits, expected.logits, torch.float32, "logits", FACTOR)
    assert torch.equal(model.generate(TOKENS[:, :9], **options), tokens)
    with torch.no_grad():
        assert_close(model(input_ids=TOKENS).logits, expected.logits, torch.float32, "logits", FACTOR)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("router_logits", [False, True])
@pytest.mark.parametrize("keep_attention", [False, True])
def test_gradient_checkpointing(package, moe, reentrant, router_logits, keep_attention):
    model = moe.tiny(router_aux_loss_coef=0.3)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    expected = Step(model, input_ids=TOKENS, labels=LABELS, output_router_logits=router_logits)
    package.apply(keep_attention=keep_attention)
    Step(model, input_ids=TOKENS, labels=LABELS, output_router_logits=router_logits).assert_same(expected, FACTOR)


# ---------------------------------------------------------------- what is trained, and how
@pytest.mark.parametrize(
    "moe, options",
    [
        (FAMILIES["Qwen3-MoE"], {"target_modules": ["q_proj", "v_proj", "o_proj"]}),
        (FAMILIES["Qwen3-MoE"], {"target_modules": ["q_proj", "o_proj"], "lora_dropout": 0.3}),
        # gate_proj, up_proj and down_proj are the experts' parameters by now
        (FAMILIES["Qwen3-MoE"], {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}),
        (FAMILIES["Qwen3-MoE"], {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
        (FAMILIES["Qwen3-MoE"], {"target_modules": ["o_proj"], "target_parameters": ["mlp.gate.weight"]}),
        (FAMILIES["Qwen3-MoE"], {"target_modules": "all-linear"}),  # experts and router among them
        (FAMILIES["Qwen3-MoE"], {"target_modules": ["lm_head"]}),
        (FAMILIES["GPT-OSS"], {"target_modules": ["q_proj", "v_proj", "o_proj"]}),
        (FAMILIES["GPT-OSS"], {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
        (FAMILIES["GPT-OSS"], {"target_modules": ["lm_head"]}),
    ],
    ids=["attention", "dropout", "all projections", "experts", "router", "all", "lm_head",
         "GPT-OSS around the experts", "GPT-OSS on the experts", "GPT-OSS lm_head"],
)  # fmt: skip
@pytest.mark.parametrize("how", ["apply", "kernelize"])
def test_lora(package, moe, options, how):
    model = lora(moe.tiny(), **options)
    torch.manual_seed(2)
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    install(package, model, how)
    called = moe.steps.uses(package, model)
    assert "norm_experts" in called and "experts" not in called
    torch.manual_seed(2)
    found = Step(model, input_ids=TOKENS, labels=LABELS)
    found.assert_same(expected, FACTOR)
    assert all("lora" in name for name in found.gradients)


@pytest.mark.parametrize("how", ["apply", "kernelize"])
def test_torch_compile(package, moe, how):
    model = moe.tiny()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    install(package, model, how)
    called, compiled = operators_of(package, model)
    check_compiled(model, expected, FACTOR, compiled, input_ids=TOKENS, labels=LABELS)
    assert called.count("norm_experts") == called.count("norm_experts_backward") == 2 and "experts_forward" not in called


@pytest.mark.parametrize("parts", ["layers", "experts"])
def test_sharded_parameters(package, moe, parts):
    model = moe.tiny()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    with sharded(model, lambda layer: [layer.mlp.experts] if parts == "experts" and hasattr(layer.mlp, "experts") else []):
        for how in ("apply", "kernelize"):
            install(package, model, how)
            steps = []
            called = moe.steps.uses(package, model, lambda model: steps.append(Step(model, input_ids=TOKENS, labels=LABELS)))  # noqa: B023
            assert called >= ({"norm_experts"} if parts == "layers" else {"experts", "add_rms_norm"}) | {"norm_attention_inputs"}
            whole(steps[0]).assert_same(expected, FACTOR)
            package.reset()


def test_experts_that_all_keep_the_forward_of_another_library(package, moe):
    """As expert parallelism gives them one: they are called, and all else is ours."""
    model = moe.tiny()
    for name, module in model.named_modules():
        if name.endswith("experts"):
            module.forward = lambda *args, forward=module.forward: forward(*args) * 2
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    with pytest.warns(RuntimeWarning, match="keeps the forward"):
        package.kernelize(model)
    Step(model, input_ids=TOKENS, labels=LABELS).assert_same(expected, FACTOR)
    parts = {row.part: row for row in package.explain(model).rows}
    assert parts["norm, q_proj, k_proj, v_proj, rotary"].fused and not any(row.fused for part, row in parts.items() if "router" in part)


def test_two_runs_give_the_same_bits(package, moe):
    model = moe.tiny(torch.bfloat16)
    package.apply()
    check_same_bits(model, input_ids=TOKENS, labels=LABELS)


# ---------------------------------------------------------------- where the layers go
@pytest.mark.parametrize("sequence", [["apply"], ["kernelize"], ["mapping"], ["apply", "mapping", "kernelize"]], ids="-".join)
def test_reset_leaves_no_trace(package, moe, sequence):
    model = moe.tiny()
    before = moe.steps.everything()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    for how in sequence:
        install(package, model, how)
    assert moe.steps.uses(package, model) == moe.steps.FUSED
    package.reset()
    package.reset()
    for old, new in zip(before, moe.steps.everything(), strict=True):
        assert old.keys() == new.keys()
        assert all(new[name] is old[name] for name in old)
    assert moe.steps.uses(package, model) == set() and package.get_patched_ops() == []
    again = Step(model, input_ids=TOKENS, labels=LABELS)
    assert are_equal(again, expected)


def test_layers_load_from_a_folder(request, package, moe, monkeypatch):
    from kernels.layer.layer import _validate_layer

    monkeypatch.setattr("kernels.layer.layer.get_local_kernel", functools.partial(kernels.get_local_kernel, backend="cpu"))
    folder = request.getfixturevalue(moe.folder)
    for name, devices in package.mapping().items():
        repository = devices["cpu"]
        layer = repository.load()
        assert kernels.LocalLayerRepository(folder, layer_name=layer.__name__).load() is layer
        check = getattr(moe.modeling, {"RMSNorm": moe.norm}.get(name, name), layer)
        _validate_layer(check_cls=check, cls=layer, repo=repository)
        assert own_attributes(layer) == {"forward", "can_torch_compile"}


def test_warm_up(package, moe):
    model, warmup = moe.tiny(), calls_of(package)
    state = torch.random.get_rng_state()
    assert package.warmup_all_kernels() is None and package.warmup_all_kernels(model) is None
    assert warmup.case_of(model).sizes[7:9] == moe.sizes
    warmup.warm_up("cpu", torch.float32, warmup.case_of(model))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(TypeError, match=r"Linear without a decoder layer and a configuration of (Qwen3|GPT-OSS)"):
        package.warmup_all_kernels(nn.Linear(1, 1))
