"""Frozen weights that are kept in eight bits: which numbers they are, how they are multiplied by, saved and turned back."""

import copy
import re

import pytest
import torch
from torch import nn

from interpreter.backend import interpreting
from tests.compile_checks import with_adapters
from tests.cpu.test_eight_bits import ROOT, are_equal, few, gradients, one_minus_cosine, part_of  # noqa: F401
from tests.decoder_families import tiny
from tests.models import random_tokens, tiny_model, tiny_qwen3_5, tiny_qwen3_moe
from tests.ops.common import runtime_of
from tests.versions import needs_compiler
from tools.targets import operations

BF16 = torch.bfloat16
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
REFUSED = re.escape("Call sixteen_bits(model) first")


def frozen(make=tiny_model, dtype=BF16, **sizes):
    torch.manual_seed(0)
    return make(dtype, **sizes).requires_grad_(False)


def in_sixteen(package, model):
    """A copy in 16 bits, with the numbers that the codes stand for."""
    return package.sixteen_bits(copy.deepcopy(model))


def adapted(model, dropout=0.0, checkpointed=True):
    torch.manual_seed(0)
    model = with_adapters(model, lora_dropout=dropout)
    if checkpointed:
        model.enable_input_require_grads()
    return model.train()


def layers_of(model):
    return {name: module for name, module in model.named_modules() if type(module).__name__ == "EightBitLinear"}


# ---------------------------------------------------------------- numbers
def test_which_weights_and_which_numbers(qwen3):
    before = frozen()
    model = copy.deepcopy(before)
    assert qwen3.eight_bits(model) is model
    assert {name.rpartition(".")[2] for name in layers_of(model)} == set(NAMES) and len(layers_of(model)) == 14
    saved = before.get_memory_footprint() - model.get_memory_footprint()
    numbers = sum(layer.in_features * layer.out_features for layer in layers_of(model).values())
    assert saved == numbers - 4 * 14, "a byte for each number, and back four for each scale"
    for name, layer in layers_of(model).items():
        exact, weight = before.get_submodule(name).weight.double(), layer.weight.double()
        scale = float(layer.scale_bits.view(torch.float32))
        assert ((weight - exact).abs() <= (exact.abs() * 2.0**-4).clamp(min=scale * 2.0**-10)).all()
        assert (weight - exact).norm() <= 10 ** (-31 / 20) * exact.norm()
    for inner in (model.model.layers[0].self_attn, model.model.layers[0].mlp):
        together = [layer.scale_bits for layer in inner.children() if hasattr(layer, "scale_bits")]
        assert torch.equal(*together[:2]), "the weights of one input have one scale"
    again = copy.deepcopy(model)
    assert are_equal(qwen3.eight_bits(again).state_dict().values(), model.state_dict().values())
    twice = qwen3.eight_bits(in_sixteen(qwen3, model))
    assert all(torch.equal(layer.weight, layers_of(model)[name].weight) for name, layer in layers_of(twice).items())


@pytest.mark.parametrize("dropout", (0.0, 0.1), ids=("", "with dropout"))
@pytest.mark.parametrize("products", ("bf16", "fp8"))
def test_adapters_over_them_get_the_bits_that_the_numbers_give(few, qwen3, products, dropout):  # noqa: F811
    """Before and after the adapters, before and after kernelize, and in every way to run a layer."""
    few(qwen3)
    base = qwen3.eight_bits(frozen())
    expected = gradients(qwen3.kernelize(adapted(in_sixteen(qwen3, base), dropout), products=products))
    for first in ("adapters", "layers", "codes"):
        model = frozen()
        if first == "codes":
            qwen3.eight_bits(model)
        if first == "layers":
            qwen3.kernelize(model, products=products)
        model = adapted(model, dropout)
        if first != "codes":
            qwen3.eight_bits(model)
        assert are_equal(gradients(qwen3.kernelize(model, products=products)), expected), first
    ways = ({"recompute_mlp": True}, None), ({}, False), ({}, True), ({"keep_attention": True}, False)
    for options, reentrant in ways:
        model = qwen3.kernelize(adapted(copy.deepcopy(base), dropout), products=products, **options)
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        assert are_equal(gradients(qwen3.pack(model)), expected), (options, reentrant)
    if products == "fp8":
        assert not are_equal(gradients(qwen3.kernelize(adapted(copy.deepcopy(base), dropout))), expected)


@pytest.mark.parametrize("name", ("llama", "qwen2", "phi3", "gemma3_text", "olmo2"))
def test_other_families(few, decoders, name):  # noqa: F811
    few(decoders)

    def make(dtype):
        return tiny(name, dtype, hidden_size=64, head_dim=16, intermediate_size=96)

    model = adapted(decoders.eight_bits(frozen(make)))
    plain = decoders.sixteen_bits(copy.deepcopy(model))
    for products in ("bf16", "fp8"):
        assert are_equal(*(gradients(decoders.kernelize(each, products=products)) for each in (model, plain)))
    rows = decoders.explain(model).rows
    assert all(row.fused for row in rows if "_proj" in row.part), rows


def test_mixers_of_other_kinds_keep_theirs(qwen3_5):
    model = qwen3_5.eight_bits(frozen(tiny_qwen3_5))
    found = {name.rpartition(".")[2] for name in layers_of(model)}
    assert found == {"o_proj", "out_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("autocast", (False, True))
def test_called_by_themselves(qwen3, autocast):
    """Without our layers: the bits of torch.nn.Linear, and nothing as large as a weight is kept for the backward pass."""
    model = qwen3.eight_bits(frozen(intermediate_size=80))
    if autocast:
        model = model.float()
    models = [adapted(each) for each in (model, in_sixteen(qwen3, model))]
    kept = []
    with torch.autocast("cpu", dtype=BF16, enabled=autocast):
        found, expected = (gradients(each) for each in models)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
            models[0](input_ids=random_tokens(2, 8))
    assert are_equal(found, expected)
    assert not [tensor for tensor in kept if tensor.itemsize > 1 and tuple(tensor.shape) in ((80, 64), (64, 80))]


@needs_compiler
def test_in_a_graph(few, qwen3):  # noqa: F811
    """The products are of 16 bits there."""
    few(qwen3)
    torch._dynamo.reset()
    ids = random_tokens(2, 40)
    model = adapted(qwen3.eight_bits(frozen()), checkpointed=False)
    exact = gradients(qwen3.sixteen_bits(copy.deepcopy(model)).double(), ids)
    expected = gradients(qwen3.kernelize(copy.deepcopy(model)), ids)
    qwen3.kernelize(model, products="fp8").compile(backend="aot_eager", fullgraph=True)
    errors = [one_minus_cosine(found[1:], exact[1:]) for found in (gradients(model, ids), expected)]
    assert errors[0] <= 2 * errors[1]


def test_the_kernels_get_the_codes(few, qwen3):  # noqa: F811
    few(qwen3)
    base = qwen3.eight_bits(frozen())
    models = [qwen3.kernelize(adapted(each), products="fp8") for each in (base, in_sixteen(qwen3, base))]
    with interpreting(runtime_of(qwen3), operations(ROOT)) as backend:
        found = gradients(models[0])
        assert {"quantise_rows", "recode_transposed"} < {name.partition("-")[0] for name in backend.launched}
        assert are_equal(found, gradients(models[1]))


# ---------------------------------------------------------------- what is refused
def with_hook(model):
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)


def with_nan(model):
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.nan


def trained(model):
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "expected"),
    (
        (trained, "model.layers.1.mlp.up_proj.weight is to be trained (requires_grad), expected frozen weights: call"),
        (with_nan, "model.layers.1.mlp.up_proj.weight is not finite"),
        (with_hook, "model.layers.1.mlp.up_proj is no plain torch.nn.Linear (hooks listen to it)"),
        (lambda model: model.to("meta"), "model.layers.0.self_attn.q_proj.weight is on the meta device, expected numbers"),
        (lambda model: setattr(model.config, "quantization_config", type("Config", (), {"quant_method": "gptq"})()), "quantised by gptq"),
    ),
    ids=("trained", "NaN", "hooks", "meta", "another library's"),
)
def test_what_is_no_frozen_linear_layer_is_refused_by_name(qwen3, change, expected):
    model = frozen()
    change(model)
    with pytest.raises(ValueError, match=re.escape(expected)):
        qwen3.eight_bits(model)
    assert not layers_of(model), "nothing is changed then"


def test_layers_of_experts_have_their_attention_in_eight_bits(qwen3, tmp_path):
    """Adapters over them get the bits that the numbers give. Saved are the numbers, which transformers reads."""
    model = qwen3.eight_bits(frozen(tiny_qwen3_moe))
    found = {name.partition("layers.")[2] for name in layers_of(model)}
    attention = {f"{layer}.self_attn.{name}" for layer in range(3) for name in NAMES[:4]}
    assert found == {*attention, *(f"1.mlp.{name}" for name in NAMES[4:])}
    plain = in_sixteen(qwen3, model)
    assert are_equal(*(gradients(qwen3.kernelize(adapted(copy.deepcopy(each)))) for each in (model, plain)))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=BF16)
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    again = qwen3.eight_bits(frozen(tiny_qwen3_moe))
    for layer in layers_of(again).values():
        layer.codes.zero_()
    again.load_state_dict(model.state_dict())
    assert all(torch.equal(layer.weight, layers_of(model)[name].weight) for name, layer in layers_of(again).items())


WRITES = (
    lambda layer: layer.weight.data.copy_(layer.weight),
    lambda layer: layer.weight[:2].zero_(),
    lambda layer: layer.weight.detach().add_(1),
    lambda layer: layer.weight.__setitem__(0, 1.0),
    lambda layer: torch.add(layer.weight, 1, out=layer.weight),
    lambda layer: setattr(layer.weight, "data", torch.zeros(1)),
    lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(1))),
    lambda layer: setattr(layer, "weight", torch.zeros(1)),
    lambda layer: torch._foreach_mul_([layer.weight], 2.0),
    lambda layer: layer.reset_parameters(),
)


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_refused_instead_of_lost(qwen3, write):
    layer = qwen3.eight_bits(frozen()).model.layers[0].mlp.up_proj
    before = layer.codes.clone()
    with pytest.raises(RuntimeError, match=REFUSED):
        write(layer)
    with pytest.raises(RuntimeError):
        layer.requires_grad_(True)
    assert torch.equal(layer.codes, before)


@pytest.mark.parametrize("safe", (False, True))
def test_adapters_are_merged_once_the_weights_are_in_sixteen_bits(qwen3, safe):
    model = qwen3.kernelize(adapted(qwen3.eight_bits(frozen()))).eval()
    before = model(input_ids=random_tokens(2, 20)).logits
    for merge in (model.merge_adapter, lambda: model.merge_and_unload(safe_merge=safe)):
        with pytest.raises(RuntimeError, match=REFUSED):
            merge()
    merged = qwen3.sixteen_bits(model).merge_and_unload(safe_merge=safe)
    assert {type(module) for name, module in merged.named_modules() if name.endswith("_proj")} == {nn.Linear}
    torch.testing.assert_close(merged(input_ids=random_tokens(2, 20)).logits, before, atol=2e-2, rtol=2e-2)


TUNERS = {
    "DoRA": ("LoraConfig", {"r": 4, "use_dora": True}),
    "IA3": ("IA3Config", {"feedforward_modules": ["down_proj"]}),
    "OFT": ("OFTConfig", {"oft_block_size": 32}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 8}),
    "LoHa": ("LoHaConfig", {"r": 4}),
    "VeRA": ("VeraConfig", {"r": 4}),
}


@pytest.mark.parametrize("name", TUNERS)
def test_other_adapters_read_the_numbers(qwen3, name):
    peft = pytest.importorskip("peft")
    config, options = TUNERS[name]
    targets = NAMES if name != "VeRA" else ["q_proj"]
    base, found = qwen3.eight_bits(frozen()), []
    for each in (base, in_sixteen(qwen3, base)):
        torch.manual_seed(0)
        model = peft.get_peft_model(each, getattr(peft, config)(target_modules=targets, **options))
        found.append(gradients(qwen3.kernelize(model).train()))
    assert are_equal(*found)
    with pytest.raises((RuntimeError, TypeError)):
        peft.get_peft_model(qwen3.eight_bits(frozen()), getattr(peft, config)(target_modules=targets, **options)).merge_and_unload()


def test_an_initialisation_that_writes_to_the_weight_is_refused(qwen3):
    peft = pytest.importorskip("peft")
    with pytest.raises(RuntimeError, match=REFUSED):
        peft.get_peft_model(qwen3.eight_bits(frozen()), peft.LoraConfig(r=4, target_modules=NAMES, init_lora_weights="pissa"))


# ---------------------------------------------------------------- casts and state dicts
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, BF16))
def test_casts_leave_the_codes_as_they_are(qwen3, dtype):
    model = qwen3.eight_bits(frozen())
    cast = copy.deepcopy(model).to(dtype)
    for name, layer in layers_of(cast).items():
        before = layers_of(model)[name]
        assert layer.weight.dtype == dtype and torch.equal(layer.weight, before.weight.to(dtype))
        assert torch.equal(layer.codes, before.codes) and torch.equal(layer.scale_bits, before.scale_bits)
    ids = random_tokens(2, 8)
    assert torch.equal(cast(input_ids=ids).logits, in_sixteen(qwen3, cast)(input_ids=ids).logits)
    with pytest.raises(RuntimeError, match="expected a cast that leaves integers alone"):
        copy.deepcopy(model).type(dtype)
    assert layers_of(copy.deepcopy(model).to("meta"))["model.layers.0.mlp.up_proj"].weight.device.type == "meta"


def test_state_dicts(qwen3, tmp_path):
    plain = frozen()
    model = qwen3.eight_bits(copy.deepcopy(plain))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert saved.keys() == plain.state_dict().keys() | {f"{name}.weight_scale_inv" for name in layers_of(model)}
    other = qwen3.eight_bits(frozen(lambda dtype: tiny_model(dtype).apply(lambda part: getattr(part, "reset_parameters", int)())))
    for state, options in ((saved, {}), (saved, {"assign": True}), (plain.state_dict(), {})):
        for layer in layers_of(other).values():
            layer.codes.zero_()
        other.load_state_dict(state, **options)
        found = {name: layer.weight for name, layer in layers_of(other).items()}
        close = 0.0 if state is saved else 1e-6  # alone, a weight may have a smaller scale, and more of its smallest numbers
        for name, layer in layers_of(model).items():
            torch.testing.assert_close(found[name], layer.weight, atol=close, rtol=0.07 if close else 0.0)
    with pytest.raises(RuntimeError, match="weight_scale_inv"):
        plain.load_state_dict(saved)
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    other.load_state_dict({**saved, name: saved[name] * 1.5})  # no power of two
    error = other.model.layers[0].mlp.up_proj.weight.double() / 1.5 - model.model.layers[0].mlp.up_proj.weight.double()
    assert error.norm() <= 10 ** (-30 / 20) * model.model.layers[0].mlp.up_proj.weight.double().norm()
    del saved[name]
    with pytest.raises(RuntimeError, match="in eight bits without"):
        other.load_state_dict(saved)


@pytest.mark.parametrize("inner", (256, 320))
def test_transformers_loads_what_it_saved(qwen3, tmp_path, inner):
    """Its FineGrainedFP8, which gives the same numbers in bf16 without a GPU; again from a model that was loaded so; and in 16 bits."""
    from transformers import AutoModelForCausalLM

    model = qwen3.eight_bits(frozen(hidden_size=128, intermediate_size=inner))
    expected = in_sixteen(qwen3, model).state_dict()
    for turn in range(3):
        folder = tmp_path / str(turn)
        model.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=BF16)
        assert model.state_dict().keys() == expected.keys()
        assert are_equal(model.state_dict().values(), expected.values())
        assert ("quantization_config" in (folder / "config.json").read_text()) == (turn < 2)
        qwen3.eight_bits(model.requires_grad_(False))
        if turn == 1:
            qwen3.sixteen_bits(model)


def fine_grained(model, **options):
    """The model with transformers' FP8Linear, in blocks with scales of their own, and one in float32 with the numbers of these."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    exact = copy.deepcopy(model).float()
    for name, linear in list(model.model.layers.named_modules()):
        if isinstance(linear, nn.Linear):
            made = FP8Linear(linear.in_features, linear.out_features, **{"block_size": (128, 128), **options})
            blocks = linear.weight.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
            scales = blocks.abs().amax((1, 3)) / 448
            codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            made.weight.data = codes.flatten(2).flatten(0, 1)
            made.weight_scale_inv.data = scales
            parent, _, leaf = name.rpartition(".")
            setattr(model.model.layers.get_submodule(parent), leaf, made)
            numbers = codes.float() * scales[:, None, :, None]
            exact.model.layers.get_submodule(name).weight.data.copy_(numbers.flatten(2).flatten(0, 1))
    return model.requires_grad_(False), exact


def test_layers_of_transformers_in_eight_bits(qwen3):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    model, exact = fine_grained(frozen(**sizes))
    rows = [row for row in qwen3.explain(qwen3.kernelize(model)).rows if "FP8Linear" in row.reason]
    assert rows and not any(row.fused for row in rows)
    with pytest.raises(ValueError, match="scales of its input, expected blocks of 128"):
        qwen3.eight_bits(fine_grained(frozen(**sizes), activation_scheme="static")[0])
    qwen3.eight_bits(model)
    assert len(layers_of(model)) == 14
    for name, layer in layers_of(model).items():
        wanted = exact.get_submodule(name).weight.double()
        assert (layer.weight.double() - wanted).norm() <= 10 ** (-30 / 20) * wanted.norm(), name
    assert all(row.fused for row in qwen3.explain(model).rows if "_proj" in row.part)
    assert are_equal(*(gradients(qwen3.kernelize(adapted(each))) for each in (model, in_sixteen(qwen3, model))))


def test_what_the_configuration_says_of_layers_of_transformers(qwen3):
    """Those that are not turned stay in it, so that a model that is saved loads with their scales."""
    from transformers import FineGrainedFP8Config

    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    model, _ = fine_grained(frozen(**sizes))
    model.config.quantization_config = given = FineGrainedFP8Config()
    assert qwen3.sixteen_bits(model).config.quantization_config is given
    model.model.another = copy.deepcopy(model.model.layers[0].mlp.up_proj)
    for turn in (qwen3.eight_bits, qwen3.sixteen_bits):
        plain = turn(model).config.quantization_config.modules_to_not_convert
        assert "lm_head" in plain and "model.another" not in plain
    assert "model.layers.0.mlp.up_proj" in plain
    del model.model.another
    assert not hasattr(qwen3.sixteen_bits(qwen3.eight_bits(model)).config, "quantization_config")


# ---------------------------------------------------------------- what explain says
def test_explain_says_what_is_kept_so_and_what_it_saves(qwen3):
    model = frozen(intermediate_size=4096, hidden_size=256)
    numbers = sum(linear.weight.numel() for name, linear in model.model.layers[0].named_modules() if isinstance(linear, nn.Linear))
    assert not [row for row in qwen3.explain(qwen3.kernelize(model)).rows if "weights of" in row.part]
    for each in (model, adapted(qwen3.eight_bits(model))):
        row, = [row for row in qwen3.explain(qwen3.eight_bits(each)).rows if "weights of" in row.part]
        assert row.part == f"weights of {', '.join(NAMES)} in eight bits, {(numbers - 28) / 2**20:.1f} MiB saved"
        assert (row.count, row.fused) == (2, True)
