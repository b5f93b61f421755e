"""Model families of transformers as rows of the table, for the tests of the decoder layer, and a stand-in for a package of some of them."""

import importlib
import types

import torch

from tests.models import VOCABULARY

WINDOW = (("sliding_window", "sliding_window"),)
AROUND = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
BOTH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
GLM4 = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
PACKED = {"gate_up": ("gate_up_proj",), "act": "activation_fn", "mlp_argument": "hidden_states"}
GEMMA = {"norms": BOTH, "offset": 1.0, "rounds": "last", "activation": "gelu_tanh", "norm_argument": "x", "positions_first": True,
         "softcap": "final_logit_softcapping"}
# By transformers' name of the model: (the name of its classes, what of the row is not Llama's).
ROWS: dict = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"options": WINDOW}),
    "qwen3": ("Qwen3", {"options": WINDOW, "qk_norm": "head"}),
    "mistral": ("Mistral", {"options": (("sliding_window", "config", "sliding_window"),)}),
    "ministral": ("Ministral", {"options": WINDOW}),
    "smollm3": ("SmolLM3", {"options": WINDOW, "turned": "use_rope"}),
    "granite": ("Granite", {"multiplier": "residual_multiplier", "divisor": "logits_scaling"}),
    "phi3": ("Phi3", {"qkv": ("qkv_proj",), **PACKED, "partial": True, "options": (("sliding_window", "config", "sliding_window"),),
                      "dropouts": ("resid_attn_dropout", "resid_mlp_dropout")}),
    "olmo2": ("Olmo2", {"norms": AROUND, "rounds": "last", "qk_norm": "whole"}),
    "olmo3": ("Olmo3", {"norms": AROUND, "rounds": "last", "qk_norm": "whole", "options": WINDOW}),
    "gemma2": ("Gemma2", {**GEMMA, "options": (*WINDOW, ("softcap", "attn_logit_softcapping"))}),
    "gemma3_text": ("Gemma3", {**GEMMA, "qk_norm": "head", "options": WINDOW, "decoder": "Gemma3TextModel"}),
    "glm": ("Glm", {**PACKED, "rotary": "pairs", "partial": True}),
    "glm4": ("Glm4", {**PACKED, "norms": GLM4, "rotary": "pairs", "partial": True}),
    "ernie4_5": ("Ernie4_5", {"rotary": "pairs"}),
}
# What a small model of a family needs beside the sizes that all have.
CHANGES: dict = {
    "olmo2": {"num_key_value_heads": 4},
    "granite": {"residual_multiplier": 0.22, "logits_scaling": 3.0},
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "phi3": {"partial_rotary_factor": 0.5},
    "gemma2": {"query_pre_attn_scalar": 12},
    "gemma3_text": {"query_pre_attn_scalar": 12},
}


def modeling_of(name: str) -> str:
    """transformers' module of a family."""
    folder = "gemma3" if name == "gemma3_text" else name
    return f"transformers.models.{folder}.modeling_{folder}"


def family_of(package, name: str):
    """The row of a family, in a loaded package's terms."""
    families = importlib.import_module(f"{package.__name__}.shared.hf.families")
    prefix, options = ROWS[name]
    if "norms" in options:
        options = {**options, "norms": families.LayerNorms(*options["norms"])}
    return families.Family(prefix, modeling_of(name), prefix, **options)


def package_of(package, *names: str):
    """The layers of families on the shared part of a loaded package, as a package of their own: `apply`, `kernelize`, and what `Interface`
    has."""
    part = lambda name: importlib.import_module(f"{package.__name__}.shared.hf.{name}")  # noqa: E731
    layers, families, patching = part("layers"), part("families"), part("patching")

    def targets(name):
        row = part("decoder_layer").FusedLayer(family_of(package, name))
        family = row.family
        made = families.Layers(layers.rms_norm_of(family), layers.rotary_layer_of(family), layers.decoder_layer_of(row), layers.model(),
                               layers.causal_lm_of(family), layers.mlp_of(family))
        return families.targets_of(row, made)

    table = tuple(targets(name) for name in names)
    found = types.SimpleNamespace(__name__=package.__name__, pack=package.pack, targets=table)
    interface = part("interface").Interface(table, package.__name__)
    for name in ("explain", "capture", "mapping", "get_patched_ops", "reset"):
        setattr(found, name, getattr(interface, name))

    def apply(unpad=True, keep_attention=False, recompute_mlp=False, **off):
        wanted = {operation: off.get(operation, True) for operation in families.operations_of(table)}
        patching.patch_classes(table, wanted, unpad, keep_attention, recompute_mlp)

    found.apply = apply
    found.kernelize = lambda model, *args, **options: patching.kernelize(table, model, *args, **options)
    return found


def tiny(name: str, dtype=torch.float32, attn_implementation="sdpa", **changes):
    """A small model of a family in training mode, always with the same weights, with norms that are not all ones and biases that are not
    zero."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "eos_token_id": None,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**sizes, **CHANGES.get(name, {}), **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model.to(dtype).train()
