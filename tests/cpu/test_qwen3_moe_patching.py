"""Where the layers of Qwen3-MoE go, beside hooks, checkpoints and other implementations, and everything put back."""

import sys

import pytest
import torch
from torch import nn
from transformers.integrations import moe
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.models import Step, tiny_model, tiny_qwen3_moe
from tests.mutants import ROOT
from tests.patched import calls_of, install, lora
from tests.qwen3_moe_steps import EXPERTS, FACTOR, FUSED, LABELS, OPERATIONS, TOKENS, everything, exact_step, uses
from tools.targets import operations


def test_hooks_are_called(qwen3):
    model, seen = tiny_qwen3_moe(), []
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    qwen3.apply()
    block = model.model.layers[0].mlp
    for module in (block, block.gate, block.experts, model.model.layers[2].self_attn.o_proj):
        handle = module.register_forward_hook(lambda module, args, output: seen.append(type(module).__name__))
        Step(model, input_ids=TOKENS, labels=LABELS).assert_same(expected, FACTOR)
        handle.remove()
    assert seen == ["Qwen3MoeSparseMoeBlock", "Qwen3MoeTopKRouter", "Qwen3MoeExperts", "Linear"]


@pytest.mark.parametrize("how", ["apply", "kernelize"])
def test_the_users_choice_of_experts_wins(qwen3, how, monkeypatch):
    model, calls = tiny_qwen3_moe(), []
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    install(qwen3, model, how)
    original = moe.batched_mm_experts_forward
    moe.ALL_EXPERTS_FUNCTIONS.register("counted", lambda *args: calls.append(1) or original(*args))
    try:
        model.set_experts_implementation("counted")
        assert not uses(qwen3, model) & {"norm_experts", "experts"} and len(calls) == 2
        Step(model, input_ids=TOKENS, labels=LABELS).assert_same(expected, FACTOR)
        model.set_experts_implementation("bastile")
        assert "norm_experts" in uses(qwen3, model)
    finally:
        moe.ExpertsInterface._global_mapping.pop("counted")


def test_saving_and_loading(qwen3, tmp_path):
    model = tiny_qwen3_moe()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    names = {name: tensor.shape for name, tensor in model.state_dict().items()}
    qwen3.kernelize(model)
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == names
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).train()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    qwen3.apply()
    assert uses(qwen3, loaded) == FUSED
    Step(loaded, input_ids=TOKENS, labels=LABELS).assert_same(expected, FACTOR)


# ---------------------------------------------------------------- where the layers go
@pytest.mark.parametrize("off", [*OPERATIONS, None])
def test_subsets(qwen3, off):
    model = tiny_qwen3_moe()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    qwen3.apply(**{} if off is None else {off: False})
    left_out = {off, "decoder_layer"} if off in ("rms_norm", "swiglu", "rope") else {off}
    assert qwen3.get_patched_ops() == [name for name in OPERATIONS if name not in left_out]
    called = uses(qwen3, model)
    assert ("norm_experts" in called) == (not left_out & {"decoder_layer", "experts"})
    assert ("experts" in called) == ("decoder_layer" in left_out)
    Step(model, input_ids=TOKENS, labels=LABELS).assert_same(expected, FACTOR)


def test_kernelize_leaves_the_other_family_and_other_models_alone(qwen3):
    others, before = (tiny_qwen3_moe(), tiny_model()), everything()
    model = qwen3.kernelize(tiny_qwen3_moe())
    assert all(new[name] is old[name] for old, new in zip(before[:2], everything()[:2], strict=True) for name in old)
    assert uses(qwen3, model) == FUSED
    for other in others:
        assert uses(qwen3, other) == set()


def test_both_families_at_once(qwen3):
    dense, sparse = tiny_model(), tiny_qwen3_moe()
    expected = [Step(model, input_ids=TOKENS, labels=LABELS) for model in (dense, sparse)]
    assert qwen3.kernelize(nn.ModuleList([dense, sparse]))
    for model, step in zip((dense, sparse), expected, strict=True):
        assert uses(qwen3, model) >= {"norm_attention_inputs", "norm_mlp"}
        Step(model, input_ids=TOKENS, labels=LABELS).assert_same(step, FACTOR)


def test_a_stranger_in_one_family_is_kept(qwen3, monkeypatch):
    forward = modeling_qwen3_moe.Qwen3MoeMLP.forward
    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeMLP, "forward", lambda self, x: 2 * forward(self, x))
    with pytest.warns(RuntimeWarning, match="Qwen3MoeMLP.forward is .*swiglu leaves it alone"):
        qwen3.apply()
    assert qwen3.get_patched_ops() == [name for name in OPERATIONS if name != "swiglu"]
    assert vars(modeling_qwen3.Qwen3MLP)["forward"] is qwen3.layers.MLP.forward
    qwen3.reset()


def test_kernelize_says_what_it_cannot_do(qwen3):
    class OtherExperts(modeling_qwen3_moe.Qwen3MoeExperts):
        def forward(self, *args):
            return super().forward(*args)

    model = tiny_qwen3_moe()
    for layer in (model.model.layers[0], model.model.layers[2]):
        layer.mlp.experts.__class__ = OtherExperts
    with pytest.raises(RuntimeError, match="experts cannot be put on this Qwen3MoeForCausalLM"):
        qwen3.kernelize(model)


def test_explain(qwen3):
    model = tiny_qwen3_moe()
    assert {row.part: row.fused for row in qwen3.explain(model).rows}["decoder layer"] is False
    qwen3.apply()
    rows = {row.part: row for row in qwen3.explain(model).rows}
    assert rows["norm, router, experts"].count == 2 and rows["norm, router, experts"].fused
    assert rows["norm, gate_proj, up_proj, down_proj"].count == 1 and rows["loss without logits"].fused
    model.model.layers[0].mlp.gate.register_forward_hook(lambda *args: None)
    found = [row for row in qwen3.explain(model).rows if row.part == "norm, router, experts" and not row.fused]
    assert found and "the router has hooks" in found[0].reason
    lora_model = lora(tiny_qwen3_moe(), target_modules=["q_proj"], target_parameters=EXPERTS)
    assert [row.count for row in qwen3.explain(lora_model).rows if row.part == "norm, router, experts with adapters" and row.fused] == [2]


def test_pack(qwen3):
    from tests.models import packed_groups

    model = qwen3.pack(tiny_qwen3_moe())
    assert packed_groups(qwen3, model.model.layers[1]) == [True, True]
    attention = model.model.layers[0].self_attn
    side_by_side = sys.modules[f"{qwen3.__name__}.shared.ops.neighbours"].side_by_side
    assert side_by_side([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) is not None


# ---------------------------------------------------------------- warm-up, and with the kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_runs_the_kernels_that_the_warm_up_loads(qwen3, interpret, dtype):
    model = tiny_qwen3_moe(dtype, moe_intermediate_size=64, num_experts_per_tok=6)
    exact = exact_step(model, input_ids=TOKENS, labels=LABELS)
    before = Step(model, input_ids=TOKENS, labels=LABELS)
    warmup = calls_of(qwen3)
    backend = interpret(qwen3, operations(ROOT))
    qwen3.kernelize(model)
    warmup.warm_up("cpu", dtype, warmup.case_of(model), tokens=TOKENS.numel())
    loaded = set(backend.launched)
    backend.launched.clear()
    found = Step(model, input_ids=TOKENS, labels=LABELS)
    if dtype == torch.float32:
        found.assert_same(before, FACTOR)
    else:
        found.assert_as_exact_as(before, exact)
    kernels_run = {name.partition("-")[0] for name in backend.launched}
    assert kernels_run >= {"swiglu_rows_forward", "swiglu_rows_backward", "token_sum", "cross_entropy_gradient"}
    assert set(backend.launched) <= loaded
