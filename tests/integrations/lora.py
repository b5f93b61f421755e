"""What of PEFT is fused with the decoder layer, with every option that keeps an adapter linear, and what stays the module that it is."""

import copy
import functools
import importlib
import warnings

import pytest
import torch
from torch import nn

from benchmark.nf4 import in_nf4
from tests.integrations import adapters
from tests.integrations.adapters import PROJECTIONS
from tests.integrations.common import FACTOR, batch, install, layers_run, model_on  # noqa: F401
from tests.models import Step, packed_groups
from tests.tolerances import assert_close, relative_error

ATTENTION = PROJECTIONS[:3]


def lora(model, **options):
    """Calls `adapters.lora`, with adapters much smaller than the weights, as training makes them: large ones make two layers so steep
    that errors say nothing about the layers any more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a bias of an adapter without one of its layer cannot be merged
        model = adapters.lora(model, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.1)
    return model


@pytest.fixture
def fused(qwen3, monkeypatch):
    """What the decoder layer asked for: (a linear layer, whether it was taken apart)."""
    names = (f"{qwen3.__name__}.shared.hf.{name}" for name in ("layer.decoder_layer", "parts.adapters"))
    decoder, adapters = map(importlib.import_module, names)
    asked, original = [], decoder.projections

    def projections(layers, *args):
        found = [(layer, adapters.projection_or_reason(layer, *args)) for layer in layers]
        asked.extend((layer, one if hasattr(one, "weight") else None) for layer, one in found)
        return original(layers, *args)

    monkeypatch.setattr(decoder, "projections", projections)
    return asked


def assert_all_fused(fused, adapters):
    """All seven projections of both layers were taken apart. adapters: how many of them have one."""
    found = {id(layer): projection for layer, projection in fused}
    assert len(found) == 2 * len(PROJECTIONS) and None not in found.values()
    assert sum(projection.a is not None for projection in found.values()) == adapters


same_step = functools.partial(adapters.compare, factor=2)


def with_another(model, modules=ATTENTION):
    """The model with a second adapter, which is not active."""
    from peft import LoraConfig

    model.add_adapter("other", LoraConfig(r=3, init_lora_weights=False, target_modules=modules, task_type="CAUSAL_LM"))
    return model


def named(model, end):
    """The modules whose names end so."""
    return [module for name, module in model.named_modules() if name.endswith(end)]


def exact_of(model):
    return copy.deepcopy(model).double()


RANKS = {"rank_pattern": {"k_proj": 2, "up_proj": 7, "o_proj": 1}, "alpha_pattern": {"v_proj": 3, "down_proj": 1}}
OPTIONS = {
    "plain": {},
    "rank and alpha by layer": RANKS,
    "rsLoRA": {"use_rslora": True, **RANKS},
    "biases": {"lora_bias": True},
    "dropout": {"lora_dropout": 0.3},
    "dropout, biases, ranks": {"lora_dropout": 0.5, "lora_bias": True, **RANKS},
}


@pytest.mark.integration("PEFT: LoRA on the projections")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_options_of_lora_are_fused(qwen3, device, fused, options, packed):
    """Exactly as PEFT has it: in fp32, the dropout's masks included."""
    model = lora(model_on(device), target_modules=PROJECTIONS, **options)
    if packed:
        qwen3.pack(model)
    assert packed_groups(qwen3, model.base_model.model.model.layers[1]) == [packed, packed]
    same_step(qwen3, model, device, seed=2)
    assert_all_fused(fused, adapters=14)


@pytest.mark.integration("PEFT: LoRA on the projections")
@pytest.mark.parametrize("names", [["q_proj", "v_proj"], ["gate_proj"], ["o_proj", "down_proj"], ["k_proj", "up_proj"]])
def test_projections_without_an_adapter_are_fused_too(qwen3, device, fused, names):
    same_step(qwen3, lora(model_on(device), target_modules=names, lora_dropout=0.2), device, seed=2)
    assert_all_fused(fused, 2 * len(names))


@pytest.mark.integration("PEFT: LoRA on the projections")
def test_what_is_trained_beside_the_adapters(qwen3, device):
    """Base weights and norms that need gradients, and halves of adapters that do not."""
    model = lora(model_on(device), target_modules=PROJECTIONS)
    for name, parameter in model.named_parameters():
        trained = ("norm", "q_proj.base_layer", "up_proj.base_layer", "down_proj", "lora_B")
        parameter.requires_grad = any(part in name for part in trained) and "v_proj" not in name
    found = same_step(qwen3, model, device)
    assert any("base_layer" in name for name in found.gradients) and not any("q_proj.lora_A" in name for name in found.gradients)


@pytest.mark.integration("PEFT: several adapters, disable_adapter, merged")
def test_adapters_by_name(qwen3, device, fused):
    """One of several at a time; none; and after each of these the other again."""
    tokens = batch(device, 2, 17)["input_ids"]
    model = with_another(lora(model_on(device), target_modules=PROJECTIONS))
    plain = copy.deepcopy(model).eval()
    install(qwen3, model.eval())

    def assert_same(what, factor=1):
        fused.clear()
        with torch.no_grad():
            assert_close(model(tokens).logits, plain(tokens).logits, torch.float32, what, factor * FACTOR[device])

    for name, count in (("default", 14), ("other", 6), ("default", 14)):
        model.set_adapter(name)
        plain.set_adapter(name)
        assert_same(name)
        assert_all_fused(fused, count)
    with model.disable_adapter(), plain.disable_adapter():
        assert_same("disabled")
    assert_all_fused(fused, adapters=0)
    for each in (model, plain):
        each.merge_adapter(["default"])
    assert_same("merged")
    assert_all_fused(fused, adapters=0)
    with model.disable_adapter(), plain.disable_adapter():
        assert_same("unmerged by a call", 2)
    assert not model.base_model.model.model.layers[0].self_attn.q_proj.merged


@pytest.mark.integration("PEFT: several adapters, disable_adapter, merged")
def test_two_active_adapters_are_called(qwen3, device, fused):
    model = with_another(lora(model_on(device), target_modules=["q_proj", "down_proj"]), ["q_proj"])
    model.base_model.set_adapter(["default", "other"])
    found = same_step(qwen3, model, device)
    assert any("other" in name for name in found.gradients)
    assert {projection is None for layer, projection in fused if "other" in getattr(layer, "r", ())} == {True}
    assert {projection is None for layer, projection in fused if hasattr(layer, "r") and "other" not in layer.r} == {False}


def hook(module):
    module.register_forward_hook(lambda module, args, result: result * 1.5)


def patch(module):
    module.forward = lambda x, weight=module.weight: nn.functional.linear(x, 2 * weight)


def make_of_another_class(module):
    class Mine(type(module)):
        def forward(self, x):
            return 2 * super().forward(x)

    module.__class__ = Mine


def give_another_dropout(module):
    module.lora_dropout["default"] = nn.ReLU()


# By what is changed: the end of a module's name, and the change.
CHANGES = {"hooked": (".lora_A.default", hook), "patched": (".lora_B.default", patch), "of_another_class": ("", make_of_another_class),
           "with_another_dropout": ("", give_another_dropout), "parametrized": (".lora_A.default", nn.utils.parametrizations.weight_norm)}


@pytest.mark.integration("PEFT: LoRA whose modules are hooked, patched or replaced")
@pytest.mark.parametrize("name", CHANGES)
def test_what_somebody_changed_is_called(qwen3, device, fused, name):
    model, (end, change) = lora(model_on(device), target_modules=["q_proj", "o_proj", "up_proj"]), CHANGES[name]
    for module in named(model, f"q_proj{end}"):
        change(module)
    same_step(qwen3, model, device)
    assert {projection for layer, projection in fused if layer is model.base_model.model.model.layers[0].self_attn.q_proj} == {None}
    assert any(projection is not None and projection.a is not None for _, projection in fused)  # o_proj


@pytest.mark.integration("PEFT: LoRA whose modules are hooked, patched or replaced")
def test_a_class_that_somebody_patched_is_called(qwen3, device, fused, monkeypatch):
    """Other libraries that speed PEFT up patch the class so."""
    from peft.tuners.lora.layer import Linear

    model = lora(model_on(device), target_modules=PROJECTIONS)
    original, calls = Linear.forward, []
    monkeypatch.setattr(Linear, "forward", lambda self, x: calls.append(self) or original(self, x) * 1.25)
    same_step(qwen3, model, device)
    assert {projection for _, projection in fused} == {None} and len(calls) == 28


@pytest.mark.integration("PEFT: adapters of each sample (adapter_names)")
def test_adapters_of_each_sample(qwen3, device):
    tokens = batch(device, 2, 9)["input_ids"]
    model = with_another(lora(model_on(device), target_modules=PROJECTIONS)).eval()
    with torch.no_grad():
        expected = model(input_ids=tokens, adapter_names=["other", "__base__"]).logits
        found = install(qwen3, model)(input_ids=tokens, adapter_names=["other", "__base__"]).logits
    assert_close(found, expected, torch.float32, "logits", FACTOR[device])


@pytest.mark.integration("PEFT: DoRA, rsLoRA and dropout")
def test_dora_is_called(qwen3, device, fused):
    model = lora(model_on(device), target_modules=["q_proj", "o_proj", "up_proj", "down_proj"], use_dora=True)
    same_step(qwen3, model, device, factor=3)
    assert {projection for layer, projection in fused if hasattr(layer, "lora_A")} == {None}


def assert_as_exact(qwen3, model, exact_model, device, autocast, as_others=None, most=1.1, lengths=(15, 23, 31, 39), median=False):
    """The relative errors of all gradients, on average over batches or in the median one, are at most so many times as large with the
    layers as without. as_others: autocast of the plain model."""

    def gradients(model, dtype):
        model.zero_grad()
        with torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(**inputs).loss
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    errors = []
    for length in lengths:
        inputs = batch(device, 2, length)
        exact = gradients(exact_model, None)
        others = gradients(model, autocast or as_others)
        qwen3.apply()
        found = gradients(model, autocast)
        qwen3.reset()
        assert found.keys() == others.keys() == exact.keys()
        assert all(found[name].dtype == others[name].dtype for name in found)
        errors.append([[relative_error(each[name], gradient) for name, gradient in exact.items()] for each in (others, found)])
    of_batches = torch.tensor(errors).mean(2)
    others, mine = of_batches.median(0).values if median else of_batches.mean(0)
    assert mine <= most * others, f"relative error {mine:.2e}, without the layers {others:.2e}"


@pytest.mark.integration("PyTorch: autocast in bf16 and fp16 over fp32 weights, GradScaler")
@pytest.mark.parametrize("adapter", [None, {}, {"lora_bias": True, **RANKS}], ids=["full", "LoRA", "LoRA with biases and ranks"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize(
    "base, autocast",
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, None)],
    ids=["fp32 to bf16", "fp32 to fp16", "bf16 to bf16", "bf16 without"],
)
def test_autocast_and_adapters_are_fused_and_as_exact(qwen3, device, fused, base, autocast, adapter, packed):
    """Gradients are on average as near to float64's as PEFT's under autocast, whose products are in half precision as well."""
    model = model_on(device, base)
    if packed:
        qwen3.pack(model)
    if adapter is not None:
        model = lora(model, target_modules=PROJECTIONS, **adapter)
    assert_as_exact(qwen3, model, exact_of(model), device, autocast, as_others=torch.bfloat16)
    if adapter is not None or base != autocast and autocast is not None:
        assert_all_fused(fused, adapters=14 if adapter is not None else 0)


@pytest.mark.integration("PEFT: LoRA on the projections")
def test_adapters_in_half_precision(qwen3, device, fused):
    """PEFT makes adapters of half precision models fp32 unless it is told not to."""
    model = lora(model_on(device, torch.bfloat16), target_modules=PROJECTIONS)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.bfloat16()
    assert_as_exact(qwen3, model, exact_of(model), device, None, most=1.25)
    assert_all_fused(fused, adapters=14)


@pytest.mark.integration("transformers: gradient checkpointing, reentrant and not")
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_dropout_under_gradient_checkpointing(qwen3, device, reentrant):
    """The masks of the recomputed layer are those of the first pass, and the generator goes on as without the layers."""
    model = lora(model_on(device), target_modules=PROJECTIONS, lora_dropout=0.3)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    same_step(qwen3, model, device, seed=2)


@pytest.mark.integration("PyTorch: hooks on saved tensors (save_on_cpu)")
def test_saved_tensor_hooks_see_what_adapters_keep(qwen3, device):
    model = lora(model_on(device), target_modules=PROJECTIONS)
    expected = Step(model, **batch(device, 2, 33))
    install(qwen3, model)
    with torch.autograd.graph.save_on_cpu():
        found = Step(model, **batch(device, 2, 33))
    found.assert_same(expected, 2 * FACTOR[device])


@pytest.mark.integration("PyTorch: autocast in bf16 and fp16 over fp32 weights, GradScaler")
@pytest.mark.parametrize("of", [["q_proj"], ["o_proj"], ["q_proj", "o_proj", "up_proj"], ["up_proj"]], ids="-".join)
def test_under_autocast_a_module_that_is_called_is_called(qwen3, device, fused, of):
    """fp32 model, bf16 products, and a projection that has to be called in one half of a layer or in both."""
    model = lora(model_on(device), target_modules=of)
    for name in of:
        for module in named(model, f"{name}.lora_A.default"):
            hook(module)
    assert_as_exact(qwen3, model, exact_of(model), device, torch.bfloat16)
    assert None in {projection for _, projection in fused}


def four_bit(model, device):
    """The model with its projections in bitsandbytes' four bits, and the same in float64 with what these bits stand for."""
    pytest.importorskip("bitsandbytes")
    exact = exact_of(model)
    model = in_nf4(model, device)
    model.is_loaded_in_4bit = False  # for PEFT, these are layers like any other
    read_four_bits(exact, model)
    return model, exact


def read_four_bits(exact, model):
    """Gives an exact model the numbers that the four bits of another one stand for."""
    import bitsandbytes as bnb

    for name, layer in model.named_modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            exact.get_submodule(name).weight.data.copy_(bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state))


def with_the_same_adapters(model, exact):
    model, exact = (lora(each, target_modules=PROJECTIONS) for each in (model, exact))
    exact.load_state_dict({n: p for n, p in model.state_dict().items() if "lora" in n}, strict=False)
    return model, exact


@pytest.mark.integration("bitsandbytes: LoRA over 4-bit layers (QLoRA)", on="cpu")
@pytest.mark.parametrize("double", [False, True], ids=["", "constants quantised too"])
@pytest.mark.parametrize("prepared", [False, True], ids=["", "prepared for training"])
def test_a_model_loaded_in_four_bits(qwen3, device, fused, tmp_path, double, prepared):
    """As from_pretrained makes it and PEFT wraps it: with its own class for these layers, which casts otherwise than that for others."""
    pytest.importorskip("bitsandbytes")
    from peft import prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model_on(device, torch.bfloat16).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double, bnb_4bit_compute_dtype=torch.bfloat16
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=config, device_map=device)
    exact = model_on(device, torch.bfloat16).double()
    read_four_bits(exact, model)
    if prepared:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model, exact = with_the_same_adapters(model, exact)
    assert {type(module).__module__ for module in model.modules() if hasattr(module, "lora_A")} == {"peft.tuners.lora.bnb"}
    # Of few batches either one's error is several times that of the others.
    many = {"lengths": range(12, 57, 4), "median": True}
    assert_as_exact(qwen3, model, exact, device, torch.bfloat16 if prepared else None, torch.bfloat16, **many)
    assert_all_fused(fused, adapters=14)


@pytest.mark.integration("bitsandbytes: LoRA over 4-bit layers (QLoRA)", on="cpu")
@pytest.mark.parametrize("kind", ["bf16", "prepared for training", "no adapters"])
def test_bitsandbytes(qwen3, device, fused, kind):
    """As the model is loaded, and as peft.prepare_model_for_kbit_training leaves it: all that is not in four bits in fp32."""
    model, exact = four_bit(model_on(device, torch.bfloat16), device)
    if kind == "prepared for training":
        for parameter in model.parameters():
            if parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.float()
    if kind == "no adapters":
        for each in (model, exact):
            for name, parameter in each.named_parameters():
                parameter.requires_grad = "norm" in name
    else:
        model, exact = with_the_same_adapters(model, exact)
    autocast = torch.bfloat16 if kind == "prepared for training" else None
    assert_as_exact(qwen3, model, exact, device, autocast, as_others=torch.bfloat16)
    assert_all_fused(fused, 0 if kind == "no adapters" else 14)
