"""Steps of a tiny Qwen3, and which of our operations they use."""

from transformers.models.qwen3 import modeling_qwen3

from tests.models import random_tokens
from tests.patched import called_operations
from tests.versions import DECORATORS, forward_of

TOKENS = random_tokens(2, 17)
OPERATIONS = ["rms_norm", "swiglu", "rope", "fused_linear_cross_entropy"]
CLASSES = {
    "rms_norm": modeling_qwen3.Qwen3RMSNorm,
    "swiglu": modeling_qwen3.Qwen3MLP,
    **({"rope": type(modeling_qwen3.apply_rotary_pos_emb)} if DECORATORS else {}),
    "fused_linear_cross_entropy": modeling_qwen3.Qwen3ForCausalLM,
}


def everything():
    """All that can be found of transformers' Qwen3: the attributes of its module, of its classes and of its rotary embedding."""
    rotary = modeling_qwen3.apply_rotary_pos_emb
    classes = [*CLASSES.values(), modeling_qwen3.Qwen3DecoderLayer, modeling_qwen3.Qwen3Attention, modeling_qwen3.Qwen3Model]
    forwards = {cls: forward_of(cls) for cls in classes}
    return [dict(vars(modeling_qwen3)), dict(vars(rotary)), *(dict(vars(cls)) for cls in classes), forwards]


def own_forwards(model):
    return {name for name, module in model.named_modules() if "forward" in vars(module)}


# By the module of the package and the function of it that is called: the operations that it computes.
FUNCTIONS = {
    "shared.hf.family.forwards": {"rms_norm": {"rms_norm"}, "mlp": {"swiglu"}, "swiglu": {"swiglu"}, "rotary": {"rope"}},
    "shared.hf.model.causal_lm": {"linear_cross_entropy": {"fused_linear_cross_entropy"}},
    "shared.hf.layer.decoder_layer": {
        "norm_attention_inputs": {"rms_norm", "rope"}, "norm_mlp": {"rms_norm", "swiglu"}, "qk_norm_rotary": {"rms_norm", "rope"},
    },
}  # fmt: skip


def uses_layers(qwen3, model):
    """Which operations of ours a step of the model runs, seen where they are called."""
    called = called_operations(qwen3, FUNCTIONS.items(), lambda: model.train()(input_ids=TOKENS, labels=TOKENS))
    return {operation for names in FUNCTIONS.values() for name in called & names.keys() for operation in names[name]}
