"""Steps of a tiny Qwen3-MoE, and which of our operations they use."""

import copy
import sys

import kernels
import pytest
import torch
from kernels import Mode
from transformers.integrations import moe
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.models import Step, random_tokens
from tests.versions import forward_of

TOKENS = random_tokens(2, 33)
LABELS = TOKENS.clone()
LABELS[0, :7] = -100
OPERATIONS = ["rms_norm", "swiglu", "rope", "fused_linear_cross_entropy", "decoder_layer", "attention", "experts"]
CLASSES = ["RMSNorm", "MLP", "Experts", "SparseMoeBlock", "TopKRouter", "ForCausalLM", "DecoderLayer", "Attention", "Model"]
FACTOR = 10  # as for GPT-OSS
FUSED = {"norm_attention_inputs", "norm_mlp", "norm_experts", "rms_norm", "linear_cross_entropy"}
PROJECTED = {"norm_attention_inputs", "norm_experts", "linear_cross_entropy"}


def everything():
    """All that can be found of transformers' Qwen3-MoE."""
    rotary = modeling_qwen3_moe.apply_rotary_pos_emb
    found = [dict(vars(modeling_qwen3_moe)), dict(vars(type(rotary))), dict(moe.ExpertsInterface._global_mapping)]
    classes = [getattr(modeling_qwen3_moe, f"Qwen3Moe{name}") for name in CLASSES]
    return found + [dict(vars(cls)) for cls in classes] + [{cls: forward_of(cls) for cls in classes}]


def install(qwen3, model, how):
    if how == "apply":
        qwen3.apply()
    elif how in ("kernelize", "pack"):
        assert qwen3.kernelize(model) is model
        if how == "pack":
            qwen3.pack(model)
    elif how == "mapping":
        with kernels.use_kernel_mapping(qwen3.mapping()):
            kernels.kernelize(model, mode=Mode.TRAINING)


PLACES = (
    ("shared.hf.experts", ("experts",)),
    ("shared.hf.forwards", ("rotary", "rms_norm", "mlp")),
    ("shared.hf.causal_lm", ("linear_cross_entropy",)),
    ("shared.hf.decoder_layer", ("norm_attention_inputs", "norm_mlp", "norm_experts", "add_rms_norm")),
)


def uses(qwen3, model, step=lambda model: model.train()(input_ids=TOKENS, labels=LABELS)):
    """The operations of ours that a step of the model calls."""
    called = set()
    with pytest.MonkeyPatch.context() as patch:
        for where, names in PLACES:
            module = sys.modules[f"{qwen3.__name__}.{where}"]
            for name in names:
                original = getattr(module, name)

                def spy(*args, name=name, original=original, **kwargs):
                    called.add(name)
                    return original(*args, **kwargs)

                patch.setattr(module, name, spy)
        step(model)
    return called


def exact_step(model, **inputs):
    """A step in float64, which transformers' grouped GEMMs do not take. Without the gradients of a handful of numbers, whose errors in
    half precision are a matter of luck."""
    model = copy.deepcopy(model).double()
    (model.get_base_model() if hasattr(model, "peft_config") else model).set_experts_implementation("eager")
    step = Step(model, **inputs)
    step.gradients = {name: gradient for name, gradient in step.gradients.items() if gradient.numel() > 16}
    return step


def lora(model, **options):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **options)).train()


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
