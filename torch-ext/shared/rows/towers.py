"""Models with a vision tower before the decoder: what their forwards take. `whole` in a row, or one of its `towers`."""

from ..hf.family.families import Vision

__all__ = [
    "GEMMA3_VISION", "IDEFICS3_VISION", "INTERNVL_VISION", "LLAVA_NEXT_VISION", "LLAVA_ONEVISION_VISION", "LLAVA_VISION", "MISTRAL3_VISION",
    "PALIGEMMA_VISION", "QWEN2_VL", "SMOLVLM_VISION",
]  # fmt: skip

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
    """Makes a model with a vision tower that is in a module of its own, for any family. prefix: of its classes; folder: of
    transformers' module."""
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
