"""The dense decoders: Llama, Qwen, Mistral, Gemma, Phi and their kin."""

from ..hf.family.families import LOSS, LayerNorms, Vision
from ..hf.install.served import Served
from ..hf.install.warmup import Case, Sizes
from ..hf.layer.decoder_layer import FusedLayer
from .made import ANGLES_FIRST, BEHIND, OF_CONFIG, WINDOW, row
from .qwen3 import QWEN3
from .towers import (
    GEMMA3_VISION,
    IDEFICS3_VISION,
    INTERNVL_VISION,
    LLAVA_NEXT_VISION,
    LLAVA_ONEVISION_VISION,
    LLAVA_VISION,
    MISTRAL3_VISION,
    PALIGEMMA_VISION,
    QWEN2_VL,
    SMOLVLM_VISION,
)

__all__ = ["LLAMA", "ROWS", "SERVED"]

AROUND = LayerNorms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
GLM4 = LayerNorms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
PACKED = {"gate_up": ("gate_up_proj",), "act": "activation_fn", "mlp_argument": "hidden_states"}
CAPPED = ("softcap", "attn_logit_softcapping")
GEMMA = {
    "norms": AROUND,
    "offset": 1.0,
    "rounds": "last",
    "activation": "gelu_tanh",
    "norm_argument": "x",
    "takes": ANGLES_FIRST,
    "softcap": "final_logit_softcapping",
}
LAYER_NORM = {"centred": True, "norm_argument": "input"}
QWEN2_VL_TEXT = {"mlp_name": "Qwen2MLP", "options": WINDOW}

LLAMA = row("Llama", "Llama", "llama", towers=(LLAVA_VISION, LLAVA_NEXT_VISION, IDEFICS3_VISION, SMOLVLM_VISION))
QWEN2 = row("Qwen2", "Qwen2", "qwen2", options=WINDOW,
            towers=(LLAVA_VISION, LLAVA_NEXT_VISION, LLAVA_ONEVISION_VISION, INTERNVL_VISION))
ROWS = (
    LLAMA,
    QWEN2,
    FusedLayer(QWEN3.family._replace(towers=(INTERNVL_VISION,))),
    row("Qwen3-VL", "Qwen3VLText", "qwen3_vl", qk_norm="head", takes=(*ANGLES_FIRST, "use_cache"),
        whole=Vision("Qwen3VLForConditionalGeneration", deepstack=True)),
    row("Qwen2.5-VL", "Qwen2_5_VL", "qwen2_5_vl", **QWEN2_VL_TEXT, decoder="Qwen2_5_VLTextModel",
        whole=Vision("Qwen2_5_VLForConditionalGeneration", QWEN2_VL)),
    row("Qwen2-VL", "Qwen2VL", "qwen2_vl", **QWEN2_VL_TEXT, decoder="Qwen2VLTextModel",
        whole=Vision("Qwen2VLForConditionalGeneration", tuple(name for name in QWEN2_VL if name != "second_per_grid_ts"))),
    row("Mistral", "Mistral", "mistral", options=OF_CONFIG, towers=(MISTRAL3_VISION, LLAVA_VISION, LLAVA_NEXT_VISION)),
    row("Ministral", "Ministral", "ministral", options=WINDOW),
    row("Ministral 3", "Ministral3", "ministral3", options=OF_CONFIG, towers=(MISTRAL3_VISION,),
        position_scale=("get_llama_4_attn_scale", "llama_4_scaling_beta", "original_max_position_embeddings")),
    row("SmolLM3", "SmolLM3", "smollm3", options=WINDOW, turned="use_rope"),
    row("Granite", "Granite", "granite", multiplier="residual_multiplier", divisor="logits_scaling"),
    row("Granite 4", "GraniteMoeHybrid", "granitemoehybrid", multiplier="residual_multiplier", divisor="logits_scaling",
        gate_up=("input_linear",), down="output_linear", act="activation", mlp_argument="hidden_states", block="shared_mlp",
        absent=("mamba", "block_sparse_moe"), routed=True,
        takes=("hidden_states", "attention_mask", "past_key_values", "use_cache", "position_embeddings")),
    row("Phi-3", "Phi3", "phi3", qkv=("qkv_proj",), **PACKED, partial=True, options=OF_CONFIG,
        dropouts=("resid_attn_dropout", "resid_mlp_dropout")),
    row("OLMo 2", "Olmo2", "olmo2", norms=BEHIND, rounds="last", qk_norm="whole", narrow=True),
    row("OLMo 3", "Olmo3", "olmo3", norms=BEHIND, rounds="last", qk_norm="whole", narrow=True, options=WINDOW),
    row("Gemma", "Gemma", "gemma", offset=1.0, rounds="last", activation="gelu_tanh", norm_argument="x"),
    row("Gemma 2", "Gemma2", "gemma2", **GEMMA, options=(*WINDOW, CAPPED),
        towers=(PALIGEMMA_VISION,)),
    row("Gemma 3", "Gemma3", "gemma3", **GEMMA, qk_norm="head", options=WINDOW, decoder="Gemma3TextModel", towers=(GEMMA3_VISION,)),
    row("GLM", "Glm", "glm", **PACKED, rotary="pairs", partial=True),
    row("GLM-4", "Glm4", "glm4", **PACKED, norms=GLM4, rotary="pairs", partial=True),
    row("ERNIE 4.5", "Ernie4_5", "ernie4_5", rotary="pairs"),
    row("Helium", "Helium", "helium", rotary="pairs", rounds="last"),
    row("CWM", "Cwm", "cwm", options=WINDOW),
    row("VaultGemma", "VaultGemma", "vaultgemma",
        **{**GEMMA, "norms": LayerNorms(before="pre_feedforward_layernorm")}, options=(*WINDOW, CAPPED)),
    row("Granite-SWA", "GraniteSWA", "granite_swa", multiplier="residual_multiplier", divisor="logits_scaling",
        options=(*WINDOW, ("s_aux", "sinks"))),
    row("Apertus", "Apertus", "apertus", norms=LayerNorms("attention_layernorm", None, "feedforward_layernorm", None), qk_norm="head",
        mlp=False, called=("mlp",)),
    row("Arcee", "Arcee", "arcee", gate_up=("up_proj",), activation="relu2", gated=False),
    row("EXAONE 4", "Exaone4", "exaone4", norms=BEHIND, qk_norm="head", options=WINDOW, windowed="is_sliding"),
    row("Hunyuan", "HunYuanDenseV1", "hunyuan_v1_dense", qk_norm="head", head_norms=("query_layernorm", "key_layernorm"),
        turned_first=True),
    row("StarCoder 2", "Starcoder2", "starcoder2", **LAYER_NORM, norm_name="", gate_up=("c_fc",), down="c_proj", activation="gelu_tanh",
        act="act", gated=False, mlp_argument="hidden_states", options=OF_CONFIG,
        absent=("self_attn.residual_dropout", "mlp.residual_dropout")),
    row("Nemotron", "Nemotron", "nemotron", **LAYER_NORM, norm_name="LayerNorm1P", offset=1.0, gate_up=("up_proj",), activation="relu2",
        gated=False, partial=True),
)
SERVED = Served(
    rows=ROWS,
    options=("rms_norm", "swiglu", "rope", LOSS, "decoder_layer", "attention", "unpad"),
    cases=(  # Llama 3.1 8B and 3.2 3B, Qwen2.5 7B
        Case(LLAMA, Sizes(4096, 14336, 32, 8, 128, 128256)),
        Case(LLAMA, Sizes(3072, 8192, 24, 8, 128, 128256)),
        Case(QWEN2, Sizes(3584, 18944, 28, 4, 128, 152064, bias=True)),
    ),
    other=LLAMA,
    shapes=True,
)
