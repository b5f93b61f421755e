"""The models whose steps are measured: their sizes, their weights, and which experts their tokens go to."""

import argparse
import importlib
import sys
import types

import peft
import pytest
import torch
import transformers

from benchmark import benchmark_fsdp, compiled_peer, families, models, providers, published, routing, step_results, stepping, steps
from tests.benchmark_support import GPU, one_thread, sources, step_of  # noqa: F401
from tests.models import tiny_model

BILLIONS = {
    "llama_3.1_8b": 8.0, "qwen2.5_7b": 7.6, "mistral_7b": 7.2, "phi_4": 14.7, "gemma_3_12b": 11.8, "smollm3_3b": 3.1, "olmo_2_7b": 7.3,
    "qwen3.5_9b": 9.0, "qwen3_8b": 8.2, "qwen3_moe_30b_a3b": 30.5, "qwen3_vl_8b": 8.77, "mixtral_8x7b": 46.7, "glm_4.5_air": 106.9,
    "gemma_4_e2b": 4.65,
}  # fmt: skip


@pytest.mark.parametrize("model", BILLIONS)
def test_published_models_have_their_dimensions(model):
    """transformers makes each of them, and its weights are as many as its name says."""
    assert BILLIONS.keys() >= models.DENSE.keys() | models.QWEN3_5.keys() | models.SPARSE.keys() | models.GEMMA_4.keys()
    made = published.new_model(model, None, "meta")
    assert sum(parameter.numel() for parameter in made.parameters()) / 1e9 == pytest.approx(BILLIONS[model], rel=0.02)


@pytest.fixture
def alone():
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", [name for name in models.TINY if families.family_of(name).fsdp_providers and name != "qwen3_vl_tiny"])
def test_a_model_that_is_filled_while_it_is_sharded_is_the_same(name, alone):
    args = step_of("huggingface", name, layers=2)
    family = families.family_of(name)
    sharded, whole = benchmark_fsdp.shard(family.new_model(args, "meta"), "cpu"), family.new_model(args, "cpu")
    families.fill(whole)
    parameters, buffers = dict(sharded.named_parameters()), dict(sharded.named_buffers())
    assert parameters.keys() == dict(whole.named_parameters()).keys() and buffers.keys() == dict(whole.named_buffers()).keys()
    assert all(torch.equal(parameters[n].full_tensor(), p) for n, p in whole.named_parameters())
    assert all(torch.equal(buffers[n], b) for n, b in whole.named_buffers())
    found, wanted = (
        stepping.Stepper(m, families.make_optimizer(m, "cpu", "huggingface"), "cpu", 512).run(16, 1, 1)["losses"] for m in (sharded, whole)
    )
    assert found == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("name", [name for name in models.TINY if not families.family_of(name).by_model])
def test_our_layers_are_measured_with_our_attention(name):
    """Which a model that was asked for another by name keeps out, on a GPU."""
    family = families.family_of(name)
    family.prepare("bastile")
    package = families.package(family.package)
    try:
        model = family.new_model(step_of("bastile", name, layers=4), "cpu")
        choice = importlib.import_module(f"{package.__name__}.shared.hf.attention.attention_choice")
        assert choice.name_that_is_kept(model.get_decoder()) == ""
        model.set_attn_implementation("eager")
        assert choice.name_that_is_kept(model.get_decoder()) == "eager"
    finally:
        package.reset()


def test_tokens_go_to_as_many_experts_as_the_results_say(loaded):
    """They are the same whatever computes them, and not a few."""
    found = {}
    for kind in (routing.UNIFORM, routing.SKEWED):
        for provider in ("huggingface", "bastile"):
            families.QWEN3_MOE.prepare(provider)
            try:
                stepper = steps.build(step_of(provider, "qwen3_moe_tiny", layers=4, routing=kind))
                found[kind, provider] = stepper.run(tokens=64, warmup=0, steps=1)["routing"]
            finally:
                loaded.reset()
    for (kind, _), each in found.items():
        assert each == pytest.approx(found[kind, "huggingface"], abs=0.05), "rounding may move a token"
        assert not routing.collapsed(kind, routing.Routing(**each))


@pytest.mark.parametrize("scaled", [True, False])
def test_a_deep_model_uses_all_experts(scaled, monkeypatch):
    """Twelve layers of it do, as wide as this; with branches that end as wide as they begin, they use a few."""
    if not scaled:
        monkeypatch.setattr(families, "BRANCH_ENDS", ())
    config = transformers.Qwen3MoeConfig(
        hidden_size=1024, num_hidden_layers=12, num_attention_heads=32, num_key_value_heads=2, head_dim=128, num_experts=64,
        num_experts_per_tok=4, moe_intermediate_size=16, vocab_size=512, norm_topk_prob=True,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    families.fill(model)
    found = routing.record(model, input_ids=torch.arange(512)[None])
    assert routing.collapsed(routing.UNIFORM, found) is not scaled


@pytest.mark.parametrize("kind", [routing.UNIFORM, routing.SKEWED])
def test_steps_whose_tokens_went_to_a_few_experts_are_not_whole(kind, capsys):
    results = step_results.Results("qwen3_moe_step", argparse.Namespace(tokens=[64], routing=kind), gpu="a GPU")
    report = {"kind": "result", "tokens": 64, "ms": [1.0], "first_ms": 1.0, "peak_gib": None, "losses": [1.0]}
    results.add("bastile", {**report, "routing": routing.Routing(32, 4, 32, 0.3).asdict()})
    assert results.whole
    results.routings.clear()
    results.add("bastile", {**report, "routing": routing.Routing(32, 4, 7, 0.91).asdict()})
    assert not results.whole and "collapsed" in "".join(capsys.readouterr())


def test_a_skewed_routing_is_one():
    config, found = argparse.Namespace(num_experts=128, num_experts_per_tok=8), {}
    for kind in (routing.UNIFORM, routing.SKEWED):
        weight = torch.empty(128, 256)
        families.fill_parameter("model.layers.0.mlp.gate.weight", weight, config, kind)
        found[kind] = routing.Routing.of([(torch.randn(4096, 256) @ weight.T).topk(8).indices], 128)
    assert found["uniform"].largest < 2 * found["uniform"].fair and 0.3 < found["skewed"].largest < 0.5
    assert found["uniform"].used == found["skewed"].used == 128


def test_weights_of_a_mixture_of_experts_keep_tokens_apart():
    """Biases of 1, or an embedding as small as all other weights, send the tokens of deeper layers to the same few experts."""
    model = families.new_gpt_oss(step_of("huggingface", "gpt_oss_tiny", layers=4), "cpu")
    families.fill(model)
    parameters = dict(model.named_parameters())
    assert all(not p.any() for n, p in parameters.items() if n.endswith(("bias", "sinks")))
    assert all((p == 1).all() for n, p in parameters.items() if n.endswith("norm.weight"))
    assert parameters["model.embed_tokens.weight"].std() > 0.9 and parameters["lm_head.weight"].std() < 0.03
    law = routing.shares(32, 4)
    assert law.sum() == pytest.approx(4) and (law.diff() <= 0).all() and law.max() <= routing.MOST
    wanted, lengths = law.flip(0), routing.row_lengths(32, 4).sort().values
    reached = [sum(torch.randn(20000).mul(length) > 1) / 20000 for length in lengths]
    assert torch.tensor(reached) == pytest.approx(wanted.float(), abs=0.02)


def test_a_collapsed_routing_is_known_as_one():
    chosen = [torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1]]), torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])]
    assert routing.Routing.of(chosen, 4) == routing.Routing(experts=4, top_k=2, used=4, largest=1.0)
    assert routing.Routing.of([chosen[0][:2]], 4).used == 3
    seven_of_32 = routing.Routing(experts=32, top_k=4, used=7, largest=0.91)
    assert routing.collapsed("uniform", seven_of_32) and routing.collapsed("skewed", seven_of_32)
    assert not routing.collapsed("uniform", routing.Routing(32, 4, 32, 0.43))


def test_torchaos_layers_take_the_place_of_the_projections_alone(monkeypatch):
    """Of a model with adapters: not of these, nor of the head."""
    asked = {}

    def convert(model, config, module_filter_fn):
        asked.update(config=config, names=[name for name, module in model.named_modules() if module_filter_fn(module, name)])
        return model

    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=2, target_modules="all-linear"))  # PEFT looks for torchao
    recipes = types.SimpleNamespace(from_recipe_name=lambda name: name)
    there = types.SimpleNamespace(Float8LinearConfig=recipes, convert_to_float8_training=convert)
    monkeypatch.setattr(compiled_peer, "require_modules", lambda *names: None)
    monkeypatch.setitem(sys.modules, "torchao", types.SimpleNamespace(float8=there))
    monkeypatch.setitem(sys.modules, "torchao.float8", there)
    assert compiled_peer.in_eight_bits(model, "tensorwise") is model and asked["config"] == "tensorwise"
    projections = {name.rpartition(".layers.")[2] for name in asked["names"] if ".layers." in name}
    assert len(asked["names"]) == len(projections) == 7 * model.config.num_hidden_layers
    assert all(name.endswith("_proj.base_layer") for name in asked["names"])


def test_providers_of_each_family_are_known():
    for family in families.FAMILIES.values():
        part = {*family.step_providers, *family.masked_providers, *family.fsdp_providers}
        assert part <= set(family.providers) <= set(providers.PROVIDERS)
