"""Models whose experts are kept in four bits: saved and loaded, cast, reset, captured, sharded, in DDP and compiled."""
# ruff: noqa: F811 - `kind` and `package` are fixtures

import copy
import importlib
import json

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from tests.capturing import check_replayed, stand_in
from tests.cpu.test_four_bits import BESIDE, BF16, NAMES, experts_of, fused, in_sixteen, kind, package, sparse, step_of  # noqa: F401
from tests.models import Step, are_equal, mesh_of_one, sharded, whole
from tests.patched import lora
from tests.qwen3_moe_steps import LABELS, TOKENS


def test_state_dicts(package, kind, tmp_path):
    plain = sparse(kind)
    model = package.four_bits(copy.deepcopy(plain))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    for state, options in ((saved, {}), (saved, {"assign": True}), (plain.state_dict(), {})):
        other = sparse(kind)
        for each in experts_of(other).values():
            each.gate_up_proj.data.normal_()
            each.down_proj.data.normal_()
        package.four_bits(other).load_state_dict(state, **options)
        for name, experts in experts_of(other).items():
            assert all(torch.equal(getattr(experts, each), getattr(experts_of(model)[name], each)) for each in NAMES)
    with pytest.raises(RuntimeError, match=r"proj(_blocks|\.absmax)"):
        plain.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({name: tensor for name, tensor in saved.items() if "down_proj" not in name})


def test_state_dicts_of_torchs_checkpoints(package, kind):
    """accelerate and Trainer ask for them under FSDP2; each key is looked for among the attributes."""
    model = package.four_bits(sparse(kind))
    expected = model.state_dict()
    other = sparse(kind)
    for each in experts_of(other).values():
        each.gate_up_proj.data.normal_()
    package.four_bits(other)
    for options in ({}, {"full_state_dict": True}):
        found = get_model_state_dict(model, options=StateDictOptions(**options))
        assert found.keys() == expected.keys() and all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        set_model_state_dict(other, found, options=StateDictOptions(**options))
    for name, experts in experts_of(other).items():
        assert all(torch.equal(getattr(experts, each), getattr(experts_of(model)[name], each)) for each in NAMES)
    package.sixteen_bits(other)
    assert get_model_state_dict(other).keys() == other.state_dict().keys() == sparse(kind).state_dict().keys()


def test_transformers_loads_what_it_saved(gpt_oss, tmp_path):
    """In GPT-OSS's released layout, which transformers takes apart where it cannot keep it; again from a model that was loaded so."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    model = gpt_oss.four_bits(sparse("mxfp4"))
    expected = in_sixteen(gpt_oss, model).state_dict()
    for turn in range(3):
        folder = tmp_path / str(turn)
        model.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        assert ("quantization_config" in config) == (turn < 2)
        if turn < 2:
            assert config["quantization_config"]["quant_method"] == "mxfp4"
        options = {"quantization_config": Mxfp4Config(dequantize=True)} if turn < 2 else {}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=BF16, **options)
        found = model.state_dict()
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
        gpt_oss.four_bits(model.requires_grad_(False))
        if turn == 1:
            gpt_oss.sixteen_bits(model)


def test_save_pretrained_refuses_what_transformers_cannot_load(qwen3, tmp_path):
    with pytest.raises(ValueError):
        qwen3.four_bits(sparse("nf4")).save_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, BF16))
def test_casts_leave_the_codes_as_they_are(package, kind, dtype):
    model = package.four_bits(sparse(kind))
    cast = copy.deepcopy(model).to(dtype)
    for name, experts in experts_of(cast).items():
        before = experts_of(model)[name]
        assert experts.down_proj.dtype == dtype and experts.down_proj.shape == before.down_proj.shape
        exact = kind == "mxfp4" or dtype == BF16  # else it was rounded to bf16 before
        torch.testing.assert_close(experts.down_proj + 0, before.down_proj.to(dtype) + 0, rtol=0 if exact else 1e-2, atol=0)
        assert torch.equal(experts.parametrizations.down_proj.original, before.parametrizations.down_proj.original)
    package.kernelize(cast)
    assert fused(package, cast) == 2
    expected = package.kernelize(in_sixteen(package, cast))(input_ids=TOKENS).logits
    torch.testing.assert_close(cast(input_ids=TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
    assert next(iter(experts_of(copy.deepcopy(model).to("meta")).values())).down_proj.device.type == "meta"


def test_reset_and_no_layers_of_ours(package, kind):
    model = package.four_bits(sparse(kind))
    expected = in_sixteen(package, model)(input_ids=TOKENS).logits
    assert torch.equal(model(input_ids=TOKENS).logits, expected)
    package.kernelize(model)
    package.reset()
    assert torch.equal(model(input_ids=TOKENS).logits, expected)


def test_padding_is_left_out(package, kind, monkeypatch):
    """As with weights in 16 bits."""
    padding = importlib.import_module(f"{package.__name__}.shared.hf.model.padding")
    model = package.kernelize(package.four_bits(lora(sparse(kind), **BESIDE)))
    decoder = model.get_base_model().model
    assert not padding._may_see_padding(decoder, decoder.embed_tokens)


def test_captured(package, kind, monkeypatch):
    stand_in(package, monkeypatch)
    model = package.kernelize(package.four_bits(lora(sparse(kind), **BESIDE)))
    plain = package.kernelize(copy.deepcopy(model))
    package.capture(model, *TOKENS.shape)
    check_replayed(model, plain, [step_of] * 4)
    assert all(row.fused for row in package.explain(model).rows if "captured" in row.part)


def test_sharded_parameters(package, kind):
    """FSDP2 shards codes as other parameters; scales of bitsandbytes stay whole."""
    model = package.kernelize(package.four_bits(lora(sparse(kind), **BESIDE)))
    expected, said = step_of(model), fused(package, model)
    with sharded(model.get_base_model()):
        assert are_equal(whole(step_of(model)), expected)
        assert fused(package, model) == said > 0, "explain says what runs in a pass"


def test_ddp(package, kind):
    model = package.kernelize(package.four_bits(lora(sparse(kind), **BESIDE)))
    expected = step_of(model)
    with mesh_of_one():
        outer = nn.parallel.DistributedDataParallel(model)
        assert are_equal(Step(model, outer, input_ids=TOKENS, labels=LABELS, use_cache=False), expected)


def test_a_compiled_model_calls_the_experts(package, kind):
    model = package.kernelize(package.four_bits(lora(sparse(kind), target_modules=["q_proj"])))
    expected = step_of(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    Step(model, compiled, input_ids=TOKENS, labels=LABELS, use_cache=False).assert_same(expected, 1e6)
