"""Products in eight bits: how near they come, what they leave as it is, and where they are not made."""

import copy
import functools
import importlib
from pathlib import Path

import pytest
import torch

from interpreter.backend import interpreting
from tests.compile_checks import with_adapters
from tests.decoder_families import tiny
from tests.models import random_tokens, tiny_model, tiny_qwen3_moe
from tests.ops import eight_bits
from tests.ops.common import runtime_of
from tests.replaying import CALLS
from tests.versions import needs_compiler
from tools.targets import operations

ROOT = Path(__file__).resolve().parents[2]
BF16 = torch.bfloat16


def part_of(package, name):
    return importlib.import_module(f"{package.__name__}.shared.{name}")


@pytest.fixture
def few(monkeypatch):
    """A function that has products in eight bits pay from 16 tokens on in a package, which it returns."""

    def from_16(package):
        monkeypatch.setattr(part_of(package, "decoder.eight_bits"), "FEWEST", 16)
        return package

    return from_16


def one_minus_cosine(a, b):
    a, b = (torch.cat([part.double().flatten() for part in parts]) for parts in (a, b))
    return 1 - float(a @ b / (a.norm() * b.norm()))


@pytest.mark.parametrize("tokens", (64, 52), ids=("whole steps", "a rest"))
@pytest.mark.parametrize("which", range(3), ids=("norm to gate", "activation to down", "attention to o"))
def test_each_product_is_near_enough(qwen3, which, tokens):
    eight_bits.check_products(qwen3, "cpu", tokens, which)


@pytest.mark.parametrize("check", eight_bits.CHECKS)
def test_what_is_odd_in_a_product(qwen3, check):
    eight_bits.CHECKS[check](qwen3)


# ---------------------------------------------------------------- whole models
def trained(package, products="fp8", make=tiny_model, lora=None, checkpointing=None, **options):
    """A model in training mode. lora: the dropout of adapters; checkpointing: whether it is reentrant, None without."""
    model = make(dtype=BF16)
    model = package.kernelize(model if lora is None else with_adapters(model, lora_dropout=lora), products=products, **options)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    if checkpointing is not None or lora is not None:
        model.enable_input_require_grads()
    return model.train()


def gradients(model, ids=None, **inputs):
    ids = random_tokens(2, 40) if ids is None else ids
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(input_ids=ids, **{"labels": ids, "use_cache": False, **inputs}).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


def are_equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_trained_models_gradients_are_near_those_in_bf16(few, qwen3):
    """Of a model that has learned something: random weights have gradients that nearly cancel."""
    few(qwen3)
    model = qwen3.kernelize(tiny_model(hidden_size=128, intermediate_size=256, num_hidden_layers=3, head_dim=32))
    with open(torch.nn.functional.__file__, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long() % 199
    rows = text[: len(text) // 64 * 64].view(-1, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(80):
        batch = rows[4 * step :][:4]
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    batch, found = rows[-2:], {}
    for products in ("bf16", "fp8"):
        found[products] = gradients(qwen3.kernelize(copy.deepcopy(model).to(BF16), products=products), batch)
    assert one_minus_cosine(found["bf16"][1:], found["fp8"][1:]) <= 5e-4
    assert abs(float(found["bf16"][0] - found["fp8"][0])) <= 2e-3
    assert not are_equal(*found.values())


@pytest.mark.parametrize("lora", (None, 0.0, 0.1), ids=("plain", "LoRA", "LoRA with dropout"))
def test_every_way_to_run_a_layer_gives_the_same_bits(few, qwen3, lora):
    few(qwen3)
    expected = gradients(trained(qwen3, lora=lora))
    ways = {
        "again": {},
        "packed": {},
        "recomputed MLP": {"recompute_mlp": True},
        "checkpointed": {"checkpointing": False},
        "checkpointed, reentrant": {"checkpointing": True},
        "attention kept": {"checkpointing": False, "keep_attention": True},
    }
    for name, options in ways.items():
        model = trained(qwen3, lora=lora, **options)
        found = gradients(qwen3.pack(model) if name == "packed" else model)
        assert are_equal(found, expected), name
    assert not are_equal(gradients(trained(qwen3, "bf16", lora=lora)), expected)


@pytest.mark.parametrize(
    "name", ("llama", "llama, biased", "qwen2", "phi3", "gemma3_text", "olmo2", "arcee", "hunyuan_v1_dense", "nemotron")
)
def test_other_families(few, decoders, name):
    """Without norms of heads, with biases, packed projections, norms behind the branches, no gate, norms of heads after
    the rotary embedding, and LayerNorms."""
    few(decoders)
    name, _, biased = name.partition(", ")

    def make(dtype):
        return tiny(name, dtype, hidden_size=64, head_dim=16, intermediate_size=96, **({"mlp_bias": True} if biased else {}))

    model = trained(decoders, make=make)
    rows = [row for row in decoders.explain(model).rows if "eight bits" in row.part]
    assert rows and all(row.fused for row in rows), [row.reason for row in rows]
    exact = gradients(trained(decoders, "bf16", lambda dtype: make(dtype).float()))
    ours, theirs = gradients(model), gradients(trained(decoders, "bf16", make))
    error, of_bf16 = (one_minus_cosine(found[1:], exact[1:]) for found in (ours, theirs))
    least = 2 if biased else 10  # the gradients of biases are sums, in 16 bits
    assert least * of_bf16 < error < 22**2 * of_bf16, "a product's error is 22 times that in bf16"
    assert are_equal(gradients(trained(decoders, make=make, checkpointing=False)), ours)


def test_padded_rows(few, qwen3):
    """What is padded gets no gradient, and the others what they get without it."""
    few(qwen3)
    ids = random_tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[1, 24:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    kept, left_out = (gradients(trained(qwen3, unpad=unpad), ids, labels=labels, attention_mask=mask) for unpad in (False, True))
    assert abs(float(kept[0] - left_out[0])) <= 2e-2 and one_minus_cosine(kept[1:], left_out[1:]) <= 1e-3


def test_bf16_changes_nothing(few, qwen3):
    few(qwen3)
    plain, asked = qwen3.kernelize(tiny_model(dtype=BF16)), qwen3.kernelize(tiny_model(dtype=BF16), products="bf16")
    assert are_equal(gradients(plain), gradients(asked))
    projection = part_of(qwen3, "decoder.projection")
    groups = [[projection.Projection(torch.ones(16, 16, dtype=BF16))]]
    layouts = [projection.layout_of((), groups, BF16, *more) for more in ((), ((),), ((0,),), ((0,),))]
    assert layouts[0] is layouts[1] and layouts[2] is layouts[3] and layouts[0] is not layouts[2]
    assert [layout.groups[0].eight for layout in layouts[1:3]] == [False, True]


def test_few_tokens_are_multiplied_in_bf16(qwen3):
    ids = random_tokens(2, 40)
    assert part_of(qwen3, "decoder.eight_bits").FEWEST > ids.numel()
    assert are_equal(gradients(trained(qwen3), ids), gradients(trained(qwen3, "bf16"), ids))


def test_apply_and_kernelize_take_the_same_kinds(few, qwen3):
    few(qwen3)
    expected = gradients(trained(qwen3))
    qwen3.apply(products="fp8")
    model = tiny_model(dtype=BF16)
    assert are_equal(gradients(model), expected)
    qwen3.apply()
    assert not are_equal(gradients(model), expected)


@pytest.mark.parametrize("wrong", ("fp16", "FP8", None, True))
def test_other_kinds_are_refused(qwen3, wrong):
    for call in (qwen3.apply, lambda **options: qwen3.kernelize(tiny_model(), **options)):
        with pytest.raises(ValueError, match=r"products is .*, expected 'bf16' or 'fp8'"):
            call(products=wrong)


@pytest.mark.parametrize("off", ("decoder_layer", "rms_norm", "swiglu"))
def test_they_are_refused_without_the_layer_that_makes_them(qwen3, off):
    with pytest.raises(ValueError, match=f"products is 'fp8', expected 'bf16' without {off}"):
        qwen3.apply(products="fp8", **{off: False})


def test_a_model_without_such_layers_is_told(decoders):
    with pytest.warns(RuntimeWarning, match="products='fp8': this GPT2LMHeadModel has no fused decoder layer"):
        decoders.kernelize(without_layers_of_ours(), products="fp8")


def without_layers_of_ours():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=199, n_embd=32, n_layer=1, n_head=2)).train()


# ---------------------------------------------------------------- what explain says
def reasons_of(package, model):
    return {row.part: row.reason for row in package.explain(model).rows if "eight bits" in row.part and not row.fused}


def with_hooks(model):
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: output)
    return model


@pytest.mark.parametrize(
    ("make", "expected"),
    (
        (lambda: tiny_model(), "a weight is torch.float32 and the products are torch.float32, expected torch.bfloat16"),
        (lambda: tiny_model(torch.float16), "a weight is torch.float16 and the products are torch.float16, expected torch.bfloat16"),
        (lambda: tiny_model(BF16, intermediate_size=104), "a weight is [104, 64], expected multiples of 16"),
        (lambda: tiny_qwen3_moe(BF16), "the layer has no dense projections in a fused node"),
        (lambda: with_hooks(tiny_model(BF16)), "the layer has no dense projections in a fused node"),
    ),
    ids=("float32", "float16", "odd", "experts", "hooks"),
)
def test_explain_says_why_not(few, qwen3, make, expected):
    few(qwen3)
    model = qwen3.kernelize(make(), products="fp8")
    found = reasons_of(qwen3, model)
    assert expected in found.values()
    assert {row.code for row in qwen3.explain(model).rows if row.reason == expected} == {"eight_bits"}


def test_explain_says_what_is(few, qwen3):
    few(qwen3)
    rows = [row for row in qwen3.explain(qwen3.kernelize(tiny_model(BF16), products="fp8")).rows if "eight bits" in row.part]
    assert [(row.part.partition(" in eight")[0], row.fused) for row in rows] == [
        ("q_proj, k_proj, v_proj", True), ("o_proj", True), ("gate_proj, up_proj", True), ("down_proj", True)
    ]  # fmt: skip
    assert not [row for row in qwen3.explain(qwen3.kernelize(tiny_model(BF16))).rows if "eight bits" in row.part]


@pytest.mark.parametrize(
    ("torch_version", "cuda", "capability", "expected"),
    (
        ("2.8.0", "12.9", (9, 0), "torch is 2.8.0, and they need 2.9"),
        ("2.11.0+cu126", "12.6", (9, 0), "torch is built for CUDA 12.6, and they need 12.9"),
        ("2.11.0+cu130", "13.0", (8, 9), "this one has 8.9"),
        ("2.11.0+cu130", "13.0", (12, 0), "this one has 12.0"),
        ("2.11.0+cu130", "13.0", (9, 0), ""),
    ),
)
def test_where_a_gpu_has_them(qwen3, monkeypatch, torch_version, cuda, capability, expected):
    module = part_of(qwen3, "decoder.eight_bits")
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(module, "ships", lambda operation: True)
    monkeypatch.setattr(module, "why_no_kernels", lambda device: "")
    found = module.why_not_on("cuda", 0)
    assert expected in found and bool(found) == bool(expected)


def test_more_numbers_than_a_kernel_counts(qwen3):
    module, projection = part_of(qwen3, "decoder.eight_bits"), part_of(qwen3, "decoder.projection")
    group = [projection.Projection(torch.empty(24576, 4096, dtype=BF16, device="meta"))]
    assert not module.why_not_eight(group, BF16, 87381)
    assert "more numbers than their kernels count" in module.why_not_eight(group, BF16, 87382)


def test_frozen_weights_want_more_tokens_unless_they_are_kept_in_codes(qwen3):
    module, projection = part_of(qwen3, "decoder.eight_bits"), part_of(qwen3, "decoder.projection")
    frozen, trained = (projection.Projection(torch.ones(16, 16, dtype=BF16).requires_grad_(way)) for way in (False, True))
    codes = projection.Projection(projection.EightBitWeight(torch.zeros(16, 16, dtype=torch.uint8), torch.ones(1)))
    for group, fewest in (([frozen], 2 * module.FEWEST), ([frozen, trained], module.FEWEST), ([codes], module.FEWEST)):
        assert not module.why_not_eight(group, BF16, fewest)
        assert f"they pay from {fewest} on" in module.why_not_eight(group, BF16, fewest - 1)


# ---------------------------------------------------------------- with the kernels, and in a graph
@pytest.mark.parametrize("in_codes", (False, True), ids=("trained", "LoRA over weights in codes"))
def test_the_kernels_give_the_same_bits_and_are_replayed(few, qwen3, in_codes):
    few(qwen3)
    make, ids = functools.partial(tiny_model, num_hidden_layers=1), random_tokens(2, 16)

    def new():
        model = trained(qwen3, make=make, lora=0.0 if in_codes else None)
        return qwen3.eight_bits(model) if in_codes else model

    expected = gradients(new(), ids)
    replay = part_of(qwen3, "runtime.replay")
    with interpreting(runtime_of(qwen3), operations(ROOT)) as backend:
        model = new()
        found = [gradients(model, ids) for _ in range(CALLS)]
        launched = {name.partition("-")[0] for name in backend.launched}
        assert {"quantise_rows", "recode_transposed"} < launched and ("quantise_transposed" in launched) != in_codes
        assert all(are_equal(found[0], each) for each in found[1:])
        assert one_minus_cosine(found[0][1:], expected[1:]) <= 1e-3, "kernels round elsewhere than PyTorch"
        of_nodes = [part for part in replay.operators if part.function.__module__.endswith("decoder.nodes")]
        planned = [part.function.__name__ for part in of_nodes if any("_scaled_mm" in str(found) for found in part.signatures.values())]
        assert {"_mlp", "_mlp_gradients"} <= set(planned)


def test_swiglu_in_codes_changes_no_bit(few, qwen3, monkeypatch):
    few(qwen3)
    kernels = part_of(qwen3, "ops.quantised")
    monkeypatch.setattr(kernels._rows, "takes", lambda *arguments: False)  # PyTorch gives the same codes of thousands of rows of weights

    def run():
        model = tiny_model(BF16, intermediate_size=3072, num_hidden_layers=1)
        return gradients(qwen3.kernelize(model, products="fp8").train(), random_tokens(1, 16))

    with interpreting(runtime_of(qwen3), operations(ROOT)) as backend:
        found = run()
        assert {"swiglu_quantised", "swiglu_backward_quantised"} <= {name.partition("-")[0] for name in backend.launched}
        backend.launched.clear()
        for kernel in (kernels._swiglu, kernels._swiglu_backward):
            monkeypatch.setattr(kernel, "takes", lambda *arguments: False)
        assert are_equal(run(), found)
        assert not any("swiglu" in name and "quantised" in name for name in backend.launched)


@needs_compiler
@pytest.mark.parametrize("lora", (None, 0.0), ids=("plain", "LoRA"))
def test_a_compiled_model_has_them(few, qwen3, lora):
    few(qwen3)
    torch._dynamo.reset()
    ids = random_tokens(2, 40)
    expected = gradients(trained(qwen3, lora=lora), ids)
    model = qwen3.kernelize(tiny_model(BF16) if lora is None else with_adapters(tiny_model(BF16), lora_dropout=lora), products="fp8")
    model.compile(backend="aot_eager", fullgraph=True)
    found = gradients(model, ids)
    assert one_minus_cosine(found[1:], expected[1:]) <= 1e-4
    assert one_minus_cosine(gradients(trained(qwen3, "bf16", lora=lora), ids)[1:], expected[1:]) > 1e-3
