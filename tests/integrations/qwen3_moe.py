"""Qwen3-MoE under the libraries that people train it with: what differs from the dense models, which the files beside this one have."""

import pytest
import torch

from tests.integrations.adapters import lora
from tests.integrations.common import FACTOR, WAYS, batch, clear_choices, install, layers_run  # noqa: F401
from tests.integrations.inference import generated
from tests.integrations.preference import train
from tests.integrations.trainers import run
from tests.models import Step, tiny_qwen3_moe

HOWS = pytest.mark.parametrize("how", WAYS)
GPU_SIZES = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_attention_heads": 8, "head_dim": 128}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def moe_on(device, dtype=torch.float32, **changes):
    """A small Qwen3-MoE in training mode, on a GPU of a size that the kernels take."""
    return tiny_qwen3_moe(dtype, **{**({} if device == "cpu" else GPU_SIZES), **changes}).to(device)


@pytest.mark.integration("Trainer: Qwen3-MoE with its auxiliary loss, accumulated and checkpointed")
@HOWS
@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 3}, {"gradient_checkpointing": True}], ids=lambda o: next(iter(o)))
def test_trainer_of_moe(qwen3, device, tmp_path, how, options):
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    options = {"per_device_train_batch_size": 2, **options}
    expected = run("hf", moe_on(device, **changes), tmp_path, device, **options)
    found = run("hf", install(qwen3, moe_on(device, **changes), how), tmp_path, device, **options)
    found.assert_same(expected, device, 10)


@pytest.mark.integration("SFTTrainer: Qwen3-MoE, LoRA on its attention")
@pytest.mark.parametrize("experts", (None, EXPERTS), ids=("attention", "experts"))
def test_sft_trainer_of_moe(qwen3, device, tmp_path, experts):
    pytest.importorskip("trl")
    options = {"per_device_train_batch_size": 2, "max_length": None}

    def model():
        return lora(moe_on(device), target_modules=["q_proj", "v_proj", "o_proj"], target_parameters=experts)

    expected = run("trl", model(), tmp_path, device, **options)
    run("trl", install(qwen3, model()), tmp_path, device, **options).assert_same(expected, device, 10)


@pytest.mark.integration(*(f"{kind}Trainer: Qwen3-MoE, LoRA on its attention, checkpointed" for kind in ("DPO", "KTO")))
@pytest.mark.parametrize("experts", (None, EXPERTS), ids=("attention", "experts"))
@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_preferences_of_moe(qwen3, device, tmp_path, kind, experts):
    """The pass of the reference, the same model without its adapters, is between the other's two, and leaves out the router's logits."""
    peft = pytest.importorskip("peft")

    def outcome(model):
        targets = {"target_modules": ["q_proj", "v_proj"], "target_parameters": experts}
        config = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **targets)
        return train(kind, model, tmp_path, device, gradient_checkpointing=True, peft_config=config)

    expected = outcome(moe_on(device, router_aux_loss_coef=0.1))
    assert "aux_loss" in expected.logs[0]
    outcome(install(qwen3, moe_on(device, router_aux_loss_coef=0.1))).assert_same(expected, device, 10)


@pytest.mark.integration("PEFT: Qwen3-MoE, LoRA on its attention and on its experts (target_parameters)")
@HOWS
@pytest.mark.parametrize(
    "options", [{"target_modules": ["q_proj", "o_proj"]}, {"target_modules": ["v_proj"], "target_parameters": EXPERTS}],
    ids=["attention", "experts"],
)  # fmt: skip
def test_lora_on_moe(qwen3, device, how, options):
    model = lora(moe_on(device), **options)
    expected = Step(model, **batch(device, 2, 33))
    found = Step(install(qwen3, model, how), **batch(device, 2, 33))
    found.assert_same(expected, 10 * FACTOR[device])
    assert found.output.logits is None and all("lora" in name for name in found.gradients)


@pytest.mark.integration("generate: Qwen3-MoE")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_of_moe(qwen3, device, cache):
    model = clear_choices(moe_on(device))
    expected, _ = generated(model, device, cache_implementation=cache)
    tokens, _ = generated(install(qwen3, model), device, cache_implementation=cache)
    assert torch.equal(tokens, expected)
