"""Experts' frozen weights that are kept in four bits: MXFP4 and NF4, which numbers they are, adapters over them, and what is refused."""

import contextlib
import copy
import importlib
import json
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.models import Step, are_equal, random_tokens, tiny_gpt_oss, tiny_model, tiny_qwen3_moe
from tests.patched import lora
from tests.qwen3_moe_steps import EXPERTS, LABELS, TOKENS, exact_step

BF16 = torch.bfloat16
BESIDE = {"target_modules": ["q_proj"], "target_parameters": EXPERTS}
NAMES = "gate_up_proj", "down_proj"
REFUSED = re.escape("Call sixteen_bits(model) first")
KINDS = ("mxfp4", "nf4")


def sparse(kind, dtype=BF16, **changes):
    """A model whose experts may be in four bits of a kind: GPT-OSS for MXFP4, with lengths of whole blocks, or Qwen3-MoE."""
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
        return tiny_qwen3_moe(dtype, moe_intermediate_size=32, **changes).requires_grad_(False)
    return tiny_gpt_oss(dtype, intermediate_size=32, **changes).requires_grad_(False)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def package(request, kind):
    return request.getfixturevalue("gpt_oss" if kind == "mxfp4" else "qwen3")


def experts_of(model) -> dict[str, nn.Module]:
    """The modules of experts by name, without what PEFT has around them."""
    found = {name: module for name, module in model.named_modules() if name.endswith("mlp.experts")}
    return {name: getattr(module, "get_base_layer", lambda module=module: module)() for name, module in found.items()}


def in_sixteen(package, model):
    """A copy in 16 bits, with the numbers that the codes stand for."""
    return package.sixteen_bits(copy.deepcopy(model))


def step_of(model, **inputs):
    return Step(model, **{"input_ids": TOKENS, "labels": LABELS, "use_cache": False, **inputs})


def fused(package, model) -> int:
    """How many layers have experts, with or without adapters, in their node."""
    return sum(row.count for row in package.explain(model).rows if row.part.startswith("norm, router, experts") and row.fused)


# ---------------------------------------------------------------- numbers
def test_which_weights_and_which_numbers(package, kind):
    before = sparse(kind)
    model = copy.deepcopy(before)
    assert package.four_bits(model) is model
    changed = {name for name, _ in before.named_parameters()} - {name for name, _ in model.named_parameters()}
    assert changed == {f"{name}.{each}" for name in experts_of(before) for each in NAMES} and len(changed) == 4
    for name, experts in experts_of(model).items():
        for each in NAMES:
            weight, found = getattr(experts_of(before)[name], each).double(), getattr(experts, each)
            assert found.dtype == BF16 and found.shape == weight.shape and not found.requires_grad
            assert (found.double() - weight).norm() <= 10 ** (-(18.5 if kind == "mxfp4" else 10) / 20) * weight.norm()
            codes, made = experts.parametrizations[each].original, experts.parametrizations[each][0]
            assert 2 * codes.numel() == weight.numel() and (kind == "nf4" or 32 * made.nbytes() == weight.numel())
    again = copy.deepcopy(model)
    state, other = model.state_dict(), package.four_bits(again).state_dict()
    assert state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def test_mxfp4_is_as_transformers_reads_it(gpt_oss):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = gpt_oss.four_bits(sparse("mxfp4"))
    state = model.state_dict()
    for name, experts in experts_of(model).items():
        for each in NAMES:
            blocks, scales = state[f"{name}.{each}_blocks"], state[f"{name}.{each}_scales"]
            assert blocks.dtype == scales.dtype == torch.uint8 and blocks.shape == (*scales.shape, 16)
            assert torch.equal(convert_moe_packed_tensors(blocks, scales), getattr(experts, each))
    twice = gpt_oss.four_bits(in_sixteen(gpt_oss, model))
    for name, experts in experts_of(twice).items():
        assert all(torch.equal(getattr(experts, each), getattr(experts_of(model)[name], each)) for each in NAMES), "rounded once more"


def test_nf4_is_as_bitsandbytes_has_it(qwen3):
    """The same codes and state, and parameters that it has in four bits already are taken as they are."""
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    model, theirs = qwen3.four_bits(sparse("nf4")), sparse("nf4")
    for experts in experts_of(theirs).values():
        for each in NAMES:
            parametrize.replace_parameter_4bit(experts, each, compress_statistics=True, quant_type="nf4")
    state, expected = model.state_dict(), theirs.state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
    before = {name: experts.gate_up_proj.clone() for name, experts in experts_of(theirs).items()}
    qwen3.kernelize(theirs)
    assert fused(qwen3, theirs) == 0
    taken = qwen3.four_bits(theirs)
    assert fused(qwen3, taken) == 2 and taken.state_dict().keys() == expected.keys()
    assert all(torch.equal(experts.gate_up_proj, before[name]) for name, experts in experts_of(taken).items())
    assert torch.equal(taken(input_ids=TOKENS).logits, qwen3.kernelize(model)(input_ids=TOKENS).logits)
    with pytest.raises(ValueError, match="kind is 'mxfp4', expected 'nf4'"):
        qwen3.four_bits(taken, "mxfp4")


# ---------------------------------------------------------------- adapters
@pytest.mark.parametrize("how", ("kept", "checkpointed", "reentrant", "recompute_mlp", "keep_attention", "apply"))
def test_adapters_over_them_get_the_bits_that_the_numbers_give(package, kind, how):
    model = package.four_bits(lora(sparse(kind), **BESIDE))
    plain = in_sixteen(package, model)
    assert {type(experts).__name__.startswith("Parametrized") for experts in experts_of(plain).values()} == {False}
    options = {how: True} if how in ("recompute_mlp", "keep_attention") else {}
    if how == "apply":
        package.apply()
    found = []
    for each in (model, plain):
        if how in ("checkpointed", "reentrant"):
            each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": how == "reentrant"})
            each.enable_input_require_grads()
        found.append(step_of(each if how == "apply" else package.kernelize(each, **options)))
        assert fused(package, each) == 2
    assert are_equal(*found) and any("experts" in name for name in found[0].gradients)


@pytest.mark.parametrize("wide", (True, False), ids=("fp32 adapters", "bf16 adapters"))
def test_beside_peft_on_the_numbers(package, kind, wide):
    """What PEFT computes over weights of these numbers, whose W + scaling * B @ A it rounds: our node errs no more."""
    torch.manual_seed(0)
    changes = {"num_experts_per_tok": 6}  # where all experts are chosen rounding chooses no others
    config = LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **BESIDE)
    model = package.four_bits(get_peft_model(sparse(kind, **changes), config, autocast_adapter_dtype=wide).train())
    plain = in_sixteen(package, model)
    inputs = {"input_ids": TOKENS, "labels": LABELS}
    exact = exact_step(plain, **inputs) if kind == "nf4" else Step(copy.deepcopy(plain).float(), **inputs)
    before = Step(plain, **inputs)
    package.kernelize(model)
    assert fused(package, model) == 2
    Step(model, **inputs).assert_as_exact_as(before, exact, 5e-3)


def test_peft_alone_computes_with_the_numbers(package, kind):
    """In its own forward, where no layers of ours are, pass after pass."""
    model = package.four_bits(lora(sparse(kind), **BESIDE))
    plain = in_sixteen(package, model)
    for _ in range(2):
        assert are_equal(step_of(model), step_of(plain))
    for each in (model, plain):
        package.kernelize(each)
        for experts in experts_of(each).values():
            experts.register_forward_hook(lambda *_: None)
        assert fused(package, each) == 0
    assert are_equal(step_of(model), step_of(plain))


def test_adapters_that_come_later(package, kind):
    """PEFT finds weights in four bits by their full names."""
    model = package.four_bits(sparse(kind))
    targets = [f"{name}.{each}" for name in experts_of(model) for each in NAMES]
    model = lora(model, target_modules=["q_proj"], target_parameters=targets)
    plain = in_sixteen(package, model)
    found, expected = (step_of(package.kernelize(each)) for each in (model, plain))
    assert are_equal(found, expected) and fused(package, model) == 2 and len(found.gradients) == 4 + 8 + (kind == "nf4") * 2


def test_one_projection_alone(package, kind):
    model = package.four_bits(lora(sparse(kind), target_modules=["o_proj"], target_parameters=EXPERTS[1:]))
    plain = in_sixteen(package, model)
    assert are_equal(step_of(package.kernelize(model)), step_of(package.kernelize(plain)))


def test_merging_is_refused_until_the_weights_are_in_sixteen_bits(package, kind):
    changes = {"num_experts_per_tok": 6}  # where all experts are chosen rounding chooses no others
    model = package.kernelize(package.four_bits(lora(sparse(kind, **changes), **BESIDE))).eval()
    before = model(input_ids=TOKENS).logits
    with pytest.raises(RuntimeError, match=REFUSED):
        copy.deepcopy(model).merge_adapter()
    for safe in (False, True):
        with contextlib.suppress(RuntimeError) if safe else pytest.raises(RuntimeError, match=REFUSED):
            copy.deepcopy(model).merge_and_unload(safe_merge=safe)
            pytest.fail("merged, and lost")
    merged = package.sixteen_bits(model).merge_and_unload()
    torch.testing.assert_close(merged(input_ids=TOKENS).logits, before, atol=0.15, rtol=5e-2)


def test_parts_of_a_weight(package, kind):
    """What grouped GEMMs make at once, of rows and of columns, are the weight's."""
    parts = importlib.import_module(f"{package.__name__}.shared.hf.parts.four_bit_experts")
    experts = next(iter(experts_of(package.four_bits(sparse(kind))).values()))
    for name in NAMES:
        weight, coded = getattr(experts, name), parts.weight_or_codes(experts, name)
        assert coded.in_parts == (kind == "mxfp4") and coded.shape == weight.shape and torch.equal(coded.make(2, slice(None)), weight)
        for dim in (1, 2):
            last = slice(weight.shape[dim] - 32, weight.shape[dim])
            found, expected = coded.make(dim, last), weight.narrow(dim, last.start, 32)
            assert torch.equal(found, expected) and torch.equal(coded.transpose(1, 2).make(3 - dim, last), expected.transpose(1, 2))


WRITES = (
    lambda experts: experts.down_proj.data.copy_(experts.down_proj),
    lambda experts: experts.down_proj[:2].zero_(),
    lambda experts: experts.down_proj.data.__iadd__(1),
    lambda experts: torch._foreach_copy_([experts.down_proj], [experts.gate_up_proj]),
)


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_refused_instead_of_lost(package, kind, write):
    experts = next(iter(experts_of(package.four_bits(sparse(kind))).values()))
    with pytest.raises(RuntimeError, match=REFUSED):
        write(experts)


@pytest.mark.parametrize("first", ("eight_bits", "four_bits"))
@pytest.mark.parametrize("checkpoints", (False, True))
def test_beside_attention_in_eight_bits(package, kind, first, checkpoints, tmp_path):
    """In either order: the bits that the numbers give, and a checkpoint as without it."""
    order = ("eight_bits", "four_bits") if first == "eight_bits" else ("four_bits", "eight_bits")
    model = lora(sparse(kind), target_modules=["q_proj", "o_proj"], target_parameters=EXPERTS)
    for function in order:
        getattr(package, function)(model)
    plain = in_sixteen(package, model)
    for each in (model, plain):
        package.kernelize(each)
        if checkpoints:
            each.gradient_checkpointing_enable()
    assert are_equal(step_of(model), step_of(plain)) and fused(package, model) == 2
    said = [row for row in package.explain(model).rows if "MiB saved" in row.part]
    assert {row.part.partition(",")[0] for row in said} >= {"gate_up_proj", "weights of q_proj"} and all(row.fused for row in said)
    inner = model.get_base_model()
    kept = [tensor for name, tensor in inner.state_dict().items() if "self_attn" in name and name.endswith("_proj.base_layer.weight")]
    assert {tensor.dtype for tensor in kept} == {BF16}
    if kind == "mxfp4":
        package.four_bits(package.eight_bits(other := sparse(kind)))
        other.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
        from transformers import AutoModelForCausalLM, Mxfp4Config

        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16, quantization_config=Mxfp4Config(dequantize=True))
        expected = in_sixteen(package, other).state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


# ---------------------------------------------------------------- memory
@pytest.mark.parametrize("checkpoints", (False, True))
def test_no_more_than_one_weight_is_dense_at_a_time(package, kind, checkpoints, monkeypatch):
    """The allocations of a step, in the order in which they come and go."""
    monkeypatch.setattr(importlib.import_module(f"{package.__name__}.shared.ops.four_bits"), "SLAB", 100)
    sizes = {"num_local_experts": 32} if kind == "mxfp4" else {"num_experts": 32}
    model = lora(sparse(kind, num_hidden_layers=4, **sizes), **BESIDE)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    package.kernelize(package.four_bits(model))
    if checkpoints:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    few = random_tokens(1, 5)
    model(input_ids=few, labels=few).loss.backward()
    experts = next(iter(experts_of(model).values()))
    sizes = {getattr(experts, each).nbytes for each in NAMES}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model(input_ids=few, labels=few).loss.backward()
    changes = [event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    dense = [change for change in changes if abs(change) in sizes]
    assert sum(dense) == 0 and len(dense) >= 4 * len(experts_of(model)) * 2
    held, most = 0, 0
    for change in dense:
        held += change
        most = max(most, held)
    assert most <= max(sizes), "two dense weights at once"
    assert not [change for change in changes if change > max(sizes)]


# ---------------------------------------------------------------- what is refused, and what explain says
def _trained(model):
    model.model.layers[0].mlp.experts.down_proj.requires_grad_(True)


def _infinite(model):
    model.model.layers[0].mlp.experts.down_proj.data[1, 2, 3] = torch.inf


def _quantised(model):
    model.config.quantization_config = type("Config", (), {"quant_method": "gptq"})()


@pytest.mark.parametrize(
    ("change", "expected"),
    (
        (_trained, "model.layers.0.mlp.experts.down_proj is to be trained (requires_grad), expected frozen weights"),
        (_infinite, "model.layers.0.mlp.experts.down_proj is not finite"),
        (lambda model: model.to("meta"), "model.layers.0.mlp.experts.gate_up_proj is on the meta device, expected numbers"),
        (_quantised, "quantised by gptq"),
    ),
)
def test_what_is_refused_by_name(package, kind, change, expected):
    model = sparse(kind)
    change(model)
    with pytest.raises(ValueError, match=re.escape(expected)):
        package.four_bits(model)
    assert not any("Parametrized" in type(module).__name__ for module in model.modules()), "nothing is changed then"


def test_kinds_that_are_refused(gpt_oss, qwen3):
    with pytest.raises(ValueError, match="kind is 'fp4', expected 'nf4'"):
        gpt_oss.four_bits(sparse("mxfp4"), "fp4")
    with pytest.raises(ValueError, match="kind is 'mxfp4', expected 'nf4'"):
        qwen3.four_bits(sparse("nf4"), "mxfp4")
    with pytest.raises(ValueError, match="one of 48 numbers a sum, expected a multiple of 32"):
        gpt_oss.four_bits(tiny_gpt_oss(BF16).requires_grad_(False))
    with pytest.raises(ValueError, match="which the model's experts are in: call sixteen_bits"):
        gpt_oss.four_bits(gpt_oss.four_bits(sparse("mxfp4")), "nf4")
    with pytest.raises(TypeError, match="a Qwen3ForCausalLM, expected a model with decoder layers of experts"):
        qwen3.four_bits(tiny_model(BF16).requires_grad_(False))


def test_a_configuration_of_another_kind_is_left_alone(gpt_oss):
    """Weights in eight bits beside experts that transformers keeps in MXFP4."""
    from transformers import Mxfp4Config

    model = gpt_oss.eight_bits(tiny_gpt_oss(BF16).requires_grad_(False))
    model.config.quantization_config = given = Mxfp4Config()
    assert gpt_oss.sixteen_bits(model).config.quantization_config is given


def test_gpt_oss_in_nf4(gpt_oss):
    pytest.importorskip("bitsandbytes")
    model = gpt_oss.four_bits(lora(tiny_gpt_oss(BF16), **BESIDE), "nf4")
    plain = in_sixteen(gpt_oss, model)
    assert are_equal(step_of(gpt_oss.kernelize(model)), step_of(gpt_oss.kernelize(plain)))


def test_without_bitsandbytes(qwen3, monkeypatch):
    model = sparse("nf4")
    monkeypatch.setitem(importlib.import_module("sys").modules, "bitsandbytes", None)
    with pytest.raises(ImportError):
        qwen3.four_bits(model)
    assert not any("Parametrized" in type(module).__name__ for module in model.modules())


def test_explain_says_what_is_kept_so_and_what_it_saves(package, kind):
    model = sparse(kind, hidden_size=256)
    package.kernelize(package.four_bits(model))
    (row,) = [row for row in package.explain(model).rows if "of experts in" in row.part]
    saved = float(re.search(r"([\d.]+) MiB saved", row.part)[1])
    dense = sum(getattr(next(iter(experts_of(model).values())), each).nbytes for each in NAMES) / 2**20
    assert row.part.startswith(f"gate_up_proj, down_proj of experts in {kind.upper()}, ") and row.fused and row.count == 2
    assert 0.6 * dense <= saved <= 0.75 * dense
    assert not [row for row in package.explain(package.sixteen_bits(model)).rows if "of experts in" in row.part]
