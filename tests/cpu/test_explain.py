"""`explain`: what it says is what runs."""

import copy
import importlib
import re
from pathlib import Path

import pytest
import torch

from tests.models import random_tokens, tiny_gpt_oss, tiny_model, tiny_qwen3_moe

FUSED = {"norm, q_proj, k_proj, v_proj, rotary", "o_proj", "norm, gate_proj, up_proj, down_proj", "loss without logits"}


def reasons(package, model) -> dict:
    """part -> why it is not fused."""
    found = package.explain(model)
    assert all(bool(row.reason) != row.fused for row in found.rows)
    return {row.part: row.reason for row in found.rows}


def test_a_kernelized_model_is_fused(qwen3):
    found = reasons(qwen3, qwen3.kernelize(tiny_model()))
    assert FUSED <= {part for part, reason in found.items() if not reason}
    assert "no GPU" in found["kernels on cpu"]


def test_the_page_on_troubles_has_a_line_for_every_reason(qwen3):
    advice = importlib.import_module(f"{qwen3.__name__}.shared.hf.parts.explanation").ADVICE
    page = (Path(__file__).resolve().parents[2] / "docs/troubleshooting.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(advice)
    rows = qwen3.explain(qwen3.kernelize(tiny_model())).rows
    assert {row.code for row in rows if not row.fused} == {"apart", "device"} and not any(row.code for row in rows if row.fused)


def test_a_model_without_layers_of_ours(qwen3):
    rows = qwen3.explain(tiny_model()).rows
    assert {(row.part, row.count, row.advice) for row in rows[:2]} == {
        ("loss without logits", 1, "call apply(), or kernelize(model)"),
        ("decoder layer", 2, "call apply(), or kernelize(model)"),
    }


def test_packed_weights(qwen3):
    model = qwen3.kernelize(tiny_model())
    assert reasons(qwen3, model)["gate_proj, up_proj as one GEMM"] == "the weights are separate in memory"
    assert reasons(qwen3, qwen3.pack(model))["gate_proj, up_proj as one GEMM"] == ""


def test_weights_in_a_flat_buffer_that_pack_leaves_where_they_are(qwen3):
    model = qwen3.kernelize(tiny_model())
    for name in ("gate_proj", "up_proj"):
        weight = getattr(model.model.layers[0].mlp, name).weight
        weight.data = torch.cat((weight.detach().flatten(), torch.zeros(1)))[:-1].view_as(weight)
    found = [row for row in qwen3.explain(qwen3.pack(model)).rows if row.part == "gate_proj, up_proj as one GEMM"]
    assert sorted((row.fused, row.count, row.advice) for row in found) == [
        (False, 1, "nothing: FSDP or DeepSpeed lays the weights of a unit out"),
        (True, 1, ""),
    ]


def test_attention_that_was_asked_for_by_name(qwen3):
    model = tiny_model()
    qwen3.apply()
    assert "attention" not in reasons(qwen3, model)
    for name in ("sdpa", "eager", "bastile"):
        model.set_attn_implementation(name)
        expected = "" if name == "bastile" else f"attn_implementation={name!r} was asked for by name"
        assert reasons(qwen3, model).get("attention", "") == expected


@pytest.mark.parametrize("skip_logits", (False, True, None, 0))
def test_logits_that_were_asked_for(qwen3, skip_logits):
    model, ids = tiny_model(), random_tokens(1, 5)
    qwen3.apply(fused_linear_cross_entropy={"skip_logits": skip_logits})
    reason = reasons(qwen3, model)["loss without logits"]
    assert reason == ("" if skip_logits in (True, None) else f"apply() was given skip_logits={skip_logits}")
    assert (model(input_ids=ids, labels=ids).logits is None) == (not reason)


def with_head_of_trl(model):
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model)
    return model


def under_autocast(model):
    from accelerate import Accelerator

    return Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)


@pytest.mark.parametrize(
    "wraps", ((with_head_of_trl,), (under_autocast,), (with_head_of_trl, under_autocast)), ids=("head", "autocast", "both")
)
@pytest.mark.parametrize("when", ("kernelize first", "apply first", "apply last"))
def test_what_others_put_around_the_models_forward(qwen3, when, wraps):
    """A loss comes without logits where ours lies within, and not where transformers' own does."""
    model, ids = tiny_model(), random_tokens(1, 5)
    if when != "apply last":
        qwen3.kernelize(model) if when == "kernelize first" else qwen3.apply()
    for wrap in wraps:
        model = wrap(model)
    if when == "apply last":
        with pytest.warns(RuntimeWarning, match="Qwen3ForCausalLM keeps the forward that"):
            qwen3.apply()
    fused, [row] = when != "apply last", [row for row in qwen3.explain(model).rows if row.part == LOSS]
    assert row.fused == fused == (model(input_ids=ids, labels=ids).logits is None)
    of_trl = "TRL's head is around transformers' own forward", "nothing for its trainers, which make no logits"
    of_accelerate = "accelerate (mixed precision) gave Qwen3ForCausalLM a forward", "call apply() or kernelize() before accelerate"
    reason, advice = ("", "") if fused else of_trl if wraps == (with_head_of_trl,) else of_accelerate
    assert row.reason == reason and row.advice.startswith(advice)
    if fused:
        qwen3.reset()
        qwen3.apply(fused_linear_cross_entropy=False)
        assert reasons(qwen3, model)[LOSS] == "it was taken off after another library had wrapped the model's forward"
        assert model(input_ids=ids, labels=ids).logits is not None
    for name in ("_original_forward", "forward"):  # or the next apply() warns of it, too
        vars(model).pop(name, None)


def lora(**options):
    from peft import LoraConfig, get_peft_model

    return lambda model: get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **options))


def test_an_adapter_whose_input_peft_does_not_cast(qwen3):
    """Adapters in fp32 over weights in bf16: PEFT casts what they get, unless it was told not to."""
    from peft.helpers import disable_input_dtype_casting

    model, ids = lora(target_modules=["q_proj", "down_proj"], init_lora_weights=False)(tiny_model(torch.bfloat16)), random_tokens(1, 5)
    for apply in (False, True):
        if apply:
            qwen3.apply()
            assert not any("cast" in reason for reason in reasons(qwen3, model).values())
        model(input_ids=ids, labels=ids)
        with disable_input_dtype_casting(model):
            with pytest.raises(RuntimeError, match="dtype"):
                model(input_ids=ids, labels=ids)
            if apply:
                assert reasons(qwen3, model)[Q] == "q_proj: PEFT was told not to cast the adapter's input"
                assert reasons(qwen3, model)[MLP] == "down_proj: PEFT was told not to cast the adapter's input"


def with_hook(name):
    def change(model):
        model.get_submodule(name).register_forward_hook(lambda *args: None)
        return model

    return change


def changed(function):
    def change(model):
        function(model)
        return model

    return change


def with_wide_bias(columns, rows):
    linear = torch.nn.Linear(columns, rows)
    linear.bias.data = linear.bias.data.double()
    return linear


Q, MLP, LAYER, LOSS = "norm, q_proj, k_proj, v_proj, rotary", "norm, gate_proj, up_proj, down_proj", "decoder layer", "loss without logits"
CASES = {
    "LoRA": (lora(target_modules=["q_proj"]), None, None),
    "DoRA": (lora(target_modules=["q_proj"], use_dora=True), Q, "q_proj: the adapter is a variant of LoRA"),
    "a hook on a linear layer": (with_hook("model.layers.0.mlp.up_proj"), MLP, "up_proj: hooks"),
    "a hook on the MLP": (with_hook("model.layers.1.mlp"), LAYER, "mlp has hooks"),
    "a hook on a norm": (with_hook("model.layers.1.input_layernorm"), LAYER, "a norm has hooks"),
    "a hook on the head": (with_hook("lm_head"), LOSS, "lm_head: hooks"),
    "a loss of the user's": (changed(lambda m: setattr(m, "loss_function", lambda *a, **k: None)), LOSS, "loss_function"),
    "a bias": (changed(lambda m: setattr(m.model.layers[0].self_attn, "v_proj", torch.nn.Linear(64, 32))), None, None),
    "a bias of another dtype": (changed(lambda m: setattr(m.model.layers[0].self_attn, "v_proj", with_wide_bias(64, 32))), Q,
                                "v_proj: its bias is torch.float64"),
    "another dtype": (changed(lambda m: m.model.layers[0].mlp.down_proj.to(torch.bfloat16)), MLP,
                      "down_proj: its weight is torch.bfloat16"),
    "another activation": (changed(lambda m: setattr(m.model.layers[0].mlp, "act_fn", torch.nn.GELU())), LAYER, "not SiLU"),
}


@pytest.mark.parametrize("name", CASES)
def test_reasons(qwen3, name):
    change, part, reason = CASES[name]
    model = change(qwen3.kernelize(tiny_model()))
    found = qwen3.explain(model)
    if part is None:
        assert FUSED <= {row.part for row in found.rows if row.fused}
        return
    row = next(row for row in found.rows if not row.fused and row.part == part)
    assert reason in row.reason and row.advice, row
    assert reason in str(found) and row.advice in str(found)


def test_what_is_said_is_what_runs(qwen3, monkeypatch):
    """The nodes of a layer are called exactly where `explain` says that it is fused."""
    package = importlib.import_module(f"{qwen3.__name__}.shared.hf.layer.decoder_layer")
    called = []

    def counted(name, run):
        return lambda *args: called.append(name) or run(*args)

    for name in ("norm_attention_inputs", "norm_mlp"):
        monkeypatch.setattr(package, name, counted(name, getattr(package, name)))
    for change, part, _ in CASES.values():
        if part not in (Q, MLP, LAYER):
            continue
        plain = qwen3.kernelize(tiny_model(num_hidden_layers=2))
        model = change(copy.deepcopy(plain))
        called.clear()
        try:
            model(input_ids=random_tokens(1, 5), use_cache=False)
        except RuntimeError:  # of two dtypes: transformers cannot run it either
            continue
        missing = {"norm_attention_inputs": 2 - called.count("norm_attention_inputs"), "norm_mlp": 2 - called.count("norm_mlp")}
        rows = {row.part: row.count for row in qwen3.explain(model).rows if not row.fused and row.part in (Q, MLP, LAYER)}
        whole = rows.get(LAYER, 0)
        if "peft" not in type(model).__module__:
            assert missing == {"norm_attention_inputs": rows.get(Q, 0) + whole, "norm_mlp": rows.get(MLP, 0) + whole}


def other_experts(model):
    model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize(
    ("change", "make"), ((CASES["a hook on a linear layer"][0], tiny_model), (other_experts, tiny_qwen3_moe)), ids=("MLP", "experts")
)
def test_an_output_projection_is_called_with_what_follows_it(qwen3, monkeypatch, change, make):
    """It is in the node of the MLP or the experts, which are called as modules here, in the first layer or in all."""
    package = importlib.import_module(f"{qwen3.__name__}.shared.hf.layer.decoder_layer")
    fused, real = [], package.projections
    monkeypatch.setattr(package, "projections", lambda linears, *rest: fused.extend(found := list(linears)) or real(found, *rest))
    model = change(qwen3.kernelize(make()))
    model(input_ids=random_tokens(1, 5), use_cache=False)
    outputs = [layer.self_attn.o_proj for layer in model.model.layers]
    rows = [row for row in qwen3.explain(model).rows if row.part == "o_proj"]
    said, in_a_node = {row.fused: row.count for row in rows}, [each for each in outputs if any(each is one for one in fused)]
    assert said.get(True, 0) == len(in_a_node) and sum(said.values()) == len(outputs) and said[False]
    assert all("the node that it would be in is also that of norm, " in row.reason and row.advice for row in rows if not row.fused)


def test_gpt_oss(gpt_oss):
    model = gpt_oss.kernelize(tiny_gpt_oss())
    parts = reasons(gpt_oss, model)
    assert all(parts[part] == "" for part in ("norm, q_proj, k_proj, v_proj, rotary", "o_proj", "norm, router, experts"))
    model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda *args: None)
    found = gpt_oss.explain(model).rows
    assert [(row.part, row.count) for row in found if not row.fused][:1] == [("decoder layer", 1)]
    assert [row.count for row in found if row.part == "norm, router, experts"] == [1]


def test_a_model_of_another_kind(qwen3):
    with pytest.raises(TypeError, match="Qwen3DecoderLayer"):
        qwen3.explain(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("package", ("shared", "liger"))
def test_every_reason_has_a_known_code_and_every_code_a_reason(package, request):
    """By the sources: a misspelt code would only raise where a model has that very reason."""
    root = Path(__file__).resolve().parents[2]
    folder = root / "torch-ext/shared/hf" if package == "shared" else root / "packages/liger/torch-ext/liger"
    texts = [path.read_text() for path in folder.rglob("*.py")]
    codes = {code for text in texts for code in re.findall(r"Reason\(\"(\w+)\"", text)}
    loaded = request.getfixturevalue("qwen3" if package == "shared" else "liger")
    made_in_explanation = {"device", "kernels"}
    advice = importlib.import_module(f"{loaded.__name__}.{'shared.hf.parts.explanation' if package == 'shared' else 'api'}").ADVICE
    assert codes | made_in_explanation == advice.keys()
