"""Steps of a tiny Qwen3-MoE, and which of our operations they use."""

import copy

from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.models import random_tokens
from tests.patched import called_operations, everything_of, step_without_small_gradients

TOKENS = random_tokens(2, 33)
LABELS = TOKENS.clone()
LABELS[0, :7] = -100
OPERATIONS = ["rms_norm", "swiglu", "rope", "fused_linear_cross_entropy", "decoder_layer", "attention", "experts"]
CLASSES = ["RMSNorm", "MLP", "Experts", "SparseMoeBlock", "TopKRouter", "ForCausalLM", "DecoderLayer", "Attention", "Model"]
FACTOR = 10  # as for GPT-OSS
FUSED = {"norm_attention_inputs", "norm_mlp", "norm_experts", "rms_norm", "linear_cross_entropy"}


def everything():
    """All that can be found of transformers' Qwen3-MoE."""
    return everything_of(modeling_qwen3_moe, [f"Qwen3Moe{name}" for name in CLASSES])


PLACES = (
    ("shared.hf.family.experts", ("experts",)),
    ("shared.hf.family.forwards", ("rotary", "rms_norm", "mlp")),
    ("shared.hf.model.causal_lm", ("linear_cross_entropy",)),
    ("shared.hf.layer.decoder_layer", ("norm_attention_inputs", "norm_mlp", "norm_experts", "add_rms_norm")),
)


def uses(qwen3, model, step=lambda model: model.train()(input_ids=TOKENS, labels=LABELS)):
    """The operations of ours that a step of the model calls."""
    return called_operations(qwen3, PLACES, lambda: step(model))


def exact_step(model, **inputs):
    """A step in float64, which transformers' grouped GEMMs do not take."""
    model = copy.deepcopy(model).double()
    (model.get_base_model() if hasattr(model, "peft_config") else model).set_experts_implementation("eager")
    return step_without_small_gradients(model, **inputs)


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
