"""The forward of a model with a vision tower in front of its decoder, with the arguments of transformers' own."""

import functools
from typing import Optional, Tuple

from ..family.arguments import forward_of
from ..family.families import Family, Vision, head_of
from ..family.versions import installed
from .causal_lm import causal_lm_forward

__all__ = ["causal_lm_with_vision"]

# The arguments where a family's row names no others. transformers 5.17 has neither the router's logits here
# nor the encoder's outputs, and only a model with experts has the former.
KNOWN_SINCE = (5, 18)
ARGUMENTS = (
    *("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels", "pixel_values", "pixel_values_videos"),
    *("image_grid_thw", "video_grid_thw", "mm_token_type_ids", "output_router_logits", "logits_to_keep", "mm_encoder_outputs"),
)


def causal_lm_with_vision(family: Family, vision: Vision):
    """Makes the forward of the model with tower, decoder and head: in training mode the loss without logits, as `causal_lm_of` has it.

    It has the arguments of the installed transformers, by name and in that order. Families behind the same tower get the same forward.
    """
    capped = vision.capped or (vision.capped_since and installed() >= vision.capped_since)
    of_head = (family.divisor, family.softcap) if capped else (None, None)
    return _with_tower(vision, of_head, family.sparse is not None)


@functools.lru_cache(maxsize=None)
def _with_tower(vision: Vision, of_head: Tuple[Optional[str], Optional[str]], sparse: bool):
    older = installed() < KNOWN_SINCE
    absent = set() if sparse else {"output_router_logits"}
    if older:
        absent |= {"output_router_logits", "" if vision.former else "mm_encoder_outputs"}
    names = [name for name in vision.arguments or ARGUMENTS if name not in absent]
    if older and vision.former:
        names[names.index("mm_encoder_outputs")] = vision.former

    def run(self, given):
        return causal_lm_forward(self, head_of(self.config.text_config, *of_head), **given)

    return forward_of(names, run, vision.rest if older else "kwargs")
