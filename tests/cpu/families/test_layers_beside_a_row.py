"""Layers of a model with a row that this row does not serve: `kernelize` reads them as it reads those of a model without a row."""

import pytest
import torch

from tests.any_model import shrink
from tests.capturing import stand_in
from tests.cpu.families.test_layers_of_all_types import check_same, step_of
from tests.patched import lora
from tools.family_loss import config_of

MAMBA, ATTENTION = "linear_attention", "full_attention"
KINDS = {  # of Granite 4: the types of its layers, how positions are told, how many experts, and which parts are fused
    "H, dense": ([MAMBA, ATTENTION], "nope", 0, {"norm, input_linear, output_linear", "norm, q_proj, k_proj, v_proj, rotary", "o_proj"}),
    "H, experts": ([MAMBA, ATTENTION], "nope", 4,
                   {"norm, router, experts, shared expert", "norm, q_proj, k_proj, v_proj, rotary", "o_proj"}),
    "experts": ([ATTENTION] * 2, "rope", 4, {"norm, router, experts, shared expert", "norm, q_proj, k_proj, v_proj, rotary", "o_proj"}),
    "mamba alone": ([MAMBA] * 2, "nope", 0, {"norm, input_linear, output_linear"}),
}  # fmt: skip
WAYS = "plain", "adapters", "checkpointed", "packed", "padded", "router losses", "evaluated"


def _model(kind):
    import transformers

    config = config_of("granitemoehybrid", transformers.GraniteMoeHybridForCausalLM)
    shrink(config)
    config.layer_types, config.position_embedding_type, config.num_local_experts, _ = KINDS[kind]
    config.shared_intermediate_size, config.residual_multiplier, config.mamba_d_state, config.mamba_chunk_size = 48, 0.7, 8, 8
    torch.manual_seed(0)
    return transformers.GraniteMoeHybridForCausalLM(config).train()


def _inputs(way, kind):
    if way == "packed":
        return {"position_ids": torch.cat((torch.arange(4), torch.arange(7)))[None].expand(2, -1)}
    if way == "padded":
        return {"attention_mask": torch.tensor([[1] * 11, [0] * 4 + [1] * 7])}
    return {"output_router_logits": True} if way == "router losses" and "experts" in kind else {}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_read(bastile, kind, way):
    model = _model(kind)
    if way == "adapters":
        model = lora(model, target_modules="all-linear")
    if way == "checkpointed":
        model.gradient_checkpointing_enable()
    if way == "evaluated":
        model.eval()
    inputs = _inputs(way, kind)
    expected = step_of(model, **inputs)
    bastile.kernelize(model)
    rows = bastile.explain(model).rows
    assert {row.part for row in rows if row.fused} >= KINDS[kind][-1], rows
    assert not any("which is called as it is" in row.reason for row in rows)
    check_same([step_of(model, **inputs)], [expected], 5e-5)  # of an adapter's first factor, whose terms cancel
    bastile.reset()
    check_same([step_of(model, **inputs)], [expected])


@pytest.mark.parametrize("kind", ("H, dense", "H, experts"))
def test_layers_in_a_graph(bastile, kind):
    model = _model(kind)
    expected = step_of(model)
    bastile.kernelize(model)
    check_same([step_of(model, torch.compile(model, backend="eager"))], [expected])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mamba alone"])  # for which transformers asks for attention's cache
def test_generation(bastile, kind):
    model, tokens = _model(kind).eval(), torch.arange(3, 10)[None]
    expected = model.generate(tokens, max_new_tokens=5, do_sample=False)
    bastile.kernelize(model)
    assert torch.equal(model.generate(tokens, max_new_tokens=5, do_sample=False), expected)


def test_a_package_without_kernels_of_experts_calls_them(decoders):
    model = _model("H, experts")
    expected = step_of(model)
    decoders.kernelize(model)
    rows = decoders.explain(model).rows
    assert "this package has no kernels of experts; bastile/moe has" in {row.reason for row in rows}
    check_same([step_of(model)], [expected])


@pytest.mark.parametrize("on", ("block_sparse_moe", "shared_mlp", "mamba"))
def test_hooks_are_called(bastile, on):
    model, heard = _model("H, experts"), []
    bastile.kernelize(model)
    model.model.layers[0]._modules[on].register_forward_hook(lambda module, args, result: heard.append(type(module)) or 2 * result)
    other = _model("H, experts")
    other.model.layers[0]._modules[on].register_forward_hook(lambda module, args, result: 2 * result)
    check_same([step_of(model)], [step_of(other)])
    assert heard == [type(model.model.layers[0]._modules[on])]


def test_layers_that_are_read_are_in_no_graph_that_capture_records(bastile, monkeypatch):
    """Those of the row are, as before."""
    monkeypatch.setattr(stand_in(bastile, monkeypatch), "memory_of", lambda device: 4)
    model = _model("H, dense")
    expected = step_of(model)
    bastile.kernelize(model)
    bastile.capture(model, 2, 11)
    for _ in range(3):
        check_same([step_of(model)], [expected])
    bastile.kernelize(model := _model("mamba alone"))
    with pytest.raises(TypeError, match="parts that are called as the modules that they are"):
        bastile.capture(model, 2, 11)
