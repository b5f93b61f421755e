"""Steps of a tiny GPT-OSS, and which of our operations they use."""

import copy

from transformers.models.gpt_oss import modeling_gpt_oss

from tests.patched import called_operations, everything_of, step_without_small_gradients
from tests.qwen3_moe_steps import LABELS, TOKENS

OPERATIONS = ["rms_norm", "experts", "rope", "fused_linear_cross_entropy", "decoder_layer", "attention"]
CLASSES = ["GptOssRMSNorm", "GptOssExperts", "GptOssForCausalLM", "GptOssDecoderLayer", "GptOssAttention", "GptOssModel"]
FUSED = {"linear_cross_entropy", "norm_attention_inputs", "norm_experts"}
PLACES = (
    ("shared.hf.family.experts", ("experts",)),
    ("shared.hf.family.forwards", ("rotary",)),
    ("shared.hf.model.causal_lm", ("linear_cross_entropy",)),
    ("shared.hf.layer.decoder_layer", ("norm_attention_inputs", "norm_experts", "add_rms_norm")),
)


def everything():
    """All that can be found of transformers' GPT-OSS."""
    return everything_of(modeling_gpt_oss, CLASSES)


def exact_step(model, **inputs):
    """A step in float32, which takes the place of an exact one: GPT-OSS computes its norms in no wider dtype."""
    return step_without_small_gradients(copy.deepcopy(model).float(), **inputs)


def uses(gpt_oss, model, step=lambda model: model.train()(input_ids=TOKENS, labels=LABELS)):
    """The operations of ours that a step of the model calls."""
    return called_operations(gpt_oss, PLACES, lambda: step(model))
