"""The model families that the package serves, a row each."""

from .shared.hf.decoder_layer import FusedLayer
from .shared.hf.families import Family, LayerNorms, Vision

WINDOW = (("sliding_window", "sliding_window"),)
OF_CONFIG = (("sliding_window", "config", "sliding_window"),)
BEHIND = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
AROUND = LayerNorms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
GLM4 = LayerNorms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
PACKED = {"gate_up": ("gate_up_proj",), "act": "activation_fn", "mlp_argument": "hidden_states"}
GEMMA = {
    "norms": AROUND,
    "offset": 1.0,
    "rounds": "last",
    "activation": "gelu_tanh",
    "norm_argument": "x",
    "positions_first": True,
    "softcap": "final_logit_softcapping",
}
GEMMA_VISION = (
    "input_ids", "pixel_values", "attention_mask", "position_ids", "past_key_values", "token_type_ids", "inputs_embeds", "labels",
    "use_cache", "logits_to_keep", "mm_encoder_outputs",
)  # fmt: skip
# Its forward leaves the logits as they are, whatever final_logit_softcapping says.
GEMMA3_VISION = Vision("Gemma3ForConditionalGeneration", GEMMA_VISION, capped=False, rest="lm_kwargs")
MISTRAL3 = (
    "input_ids", "pixel_values", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels", "use_cache",
    "logits_to_keep", "image_sizes", "mm_encoder_outputs",
)  # fmt: skip
LLAVA = (
    "input_ids", "pixel_values", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "vision_feature_layer",
    "vision_feature_select_strategy", "labels", "logits_to_keep", "image_sizes", "mm_encoder_outputs",
)  # fmt: skip
LLAVA_NEXT = (
    "input_ids", "pixel_values", "image_sizes", "attention_mask", "position_ids", "past_key_values", "inputs_embeds",
    "vision_feature_layer", "vision_feature_select_strategy", "labels", "use_cache", "logits_to_keep", "mm_encoder_outputs",
)  # fmt: skip
LLAVA_ONEVISION = (
    "input_ids", "pixel_values", "image_sizes", "pixel_values_videos", "image_sizes_videos", "attention_mask", "position_ids",
    "past_key_values", "inputs_embeds", "vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio",
    "batch_num_images", "labels", "use_cache", "logits_to_keep", "mm_encoder_outputs",
)  # fmt: skip
IDEFICS3 = (
    "input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "pixel_values", "pixel_attention_mask",
    "mm_encoder_outputs", "labels", "use_cache", "logits_to_keep",
)  # fmt: skip


def tower(prefix: str, folder: str, arguments: tuple, **options) -> Vision:
    """Makes a model with a vision tower that is in a module of its own, for any family. prefix, folder: as of `row`."""
    modeling = f"transformers.models.{folder}.modeling_{folder}"
    return Vision(f"{prefix}ForConditionalGeneration", arguments, capped=False, modeling=modeling, **options)


MISTRAL3_VISION = tower("Mistral3", "mistral3", MISTRAL3)
LLAVA_VISION = tower("Llava", "llava", LLAVA)
LLAVA_NEXT_VISION = tower("LlavaNext", "llava_next", LLAVA_NEXT)
LLAVA_ONEVISION_VISION = tower("LlavaOnevision", "llava_onevision", LLAVA_ONEVISION)
PALIGEMMA_VISION = tower("PaliGemma", "paligemma", GEMMA_VISION, capped_since=(5, 23))
INTERNVL_VISION = tower("InternVL", "internvl", LLAVA)
IDEFICS3_VISION = tower("Idefics3", "idefics3", IDEFICS3, former="image_hidden_states")
SMOLVLM_VISION = tower("SmolVLM", "smolvlm", IDEFICS3, former="image_hidden_states")
# The arguments of the forward of Qwen2.5-VL; Qwen2-VL has all but one.
QWEN2_VL = (
    "input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels", "use_cache", "pixel_values",
    "pixel_values_videos", "image_grid_thw", "video_grid_thw", "mm_token_type_ids", "second_per_grid_ts", "logits_to_keep",
    "mm_encoder_outputs",
)  # fmt: skip
QWEN2_VL_TEXT = {"mlp_name": "Qwen2MLP", "options": WINDOW}


def row(model: str, prefix: str, folder: str, **options) -> FusedLayer:
    """Makes a row. model: the family's name in messages; prefix: of transformers' classes; folder: of its module."""
    return FusedLayer(Family(model, f"transformers.models.{folder}.modeling_{folder}", prefix, **options))


LLAMA = row("Llama", "Llama", "llama", towers=(LLAVA_VISION, LLAVA_NEXT_VISION, IDEFICS3_VISION, SMOLVLM_VISION))
QWEN2 = row("Qwen2", "Qwen2", "qwen2", options=WINDOW,
            towers=(LLAVA_VISION, LLAVA_NEXT_VISION, LLAVA_ONEVISION_VISION, INTERNVL_VISION))
ROWS = (
    LLAMA,
    QWEN2,
    row("Qwen3", "Qwen3", "qwen3", qk_norm="head", options=WINDOW, towers=(INTERNVL_VISION,)),
    row("Qwen3-VL", "Qwen3VLText", "qwen3_vl", qk_norm="head", positions_first=True,
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
        absent=("mamba", "block_sparse_moe"), positions=False, routed=True),
    row("Phi-3", "Phi3", "phi3", qkv=("qkv_proj",), **PACKED, partial=True, options=OF_CONFIG,
        dropouts=("resid_attn_dropout", "resid_mlp_dropout")),
    row("OLMo 2", "Olmo2", "olmo2", norms=BEHIND, rounds="last", qk_norm="whole", narrow=True),
    row("OLMo 3", "Olmo3", "olmo3", norms=BEHIND, rounds="last", qk_norm="whole", narrow=True, options=WINDOW),
    row("Gemma 2", "Gemma2", "gemma2", **GEMMA, options=(*WINDOW, ("softcap", "attn_logit_softcapping")),
        towers=(PALIGEMMA_VISION,)),
    row("Gemma 3", "Gemma3", "gemma3", **GEMMA, qk_norm="head", options=WINDOW, decoder="Gemma3TextModel", towers=(GEMMA3_VISION,)),
    row("GLM", "Glm", "glm", **PACKED, rotary="pairs", partial=True),
    row("GLM-4", "Glm4", "glm4", **PACKED, norms=GLM4, rotary="pairs", partial=True),
    row("ERNIE 4.5", "Ernie4_5", "ernie4_5", rotary="pairs"),
)
