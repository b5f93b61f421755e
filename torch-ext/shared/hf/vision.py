"""The forwards of a text decoder that follows a vision tower, with the arguments of transformers' own: the Hub replaces a class by a layer
only where both name the same ones, and a trainer drops the columns that a forward does not name."""

import functools
import inspect
from typing import Optional, Tuple

from .causal_lm import causal_lm_forward
from .checkpointing import checkpointed
from .decoder_layer import FusedLayer, decoder_layer_forward
from .decoder_model import model_forward
from .families import Family, Vision, head_of
from .versions import installed

# Of the forward with tower, decoder and head, where a family's row names no others. transformers 5.17 has neither the router's logits here
# nor the encoder's outputs, and only a model with experts has the former.
KNOWN_SINCE = (5, 18)
ARGUMENTS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "inputs_embeds",
    "labels",
    "pixel_values",
    "pixel_values_videos",
    "image_grid_thw",
    "video_grid_thw",
    "mm_token_type_ids",
    "output_router_logits",
    "logits_to_keep",
    "mm_encoder_outputs",
)


def decoder_layer_with_vision(own: FusedLayer):
    """Makes the forward of a family's decoder layer."""

    @checkpointed
    def forward(
        self,
        hidden_states,
        position_embeddings,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=False,
        **kwargs,
    ):
        kwargs.update(position_ids=position_ids, use_cache=use_cache)
        return decoder_layer_forward(own, self, hidden_states, attention_mask, past_key_values, position_embeddings, kwargs)

    return forward


def decoder_with_vision(
    self,
    input_ids=None,
    attention_mask=None,
    position_ids=None,
    past_key_values=None,
    inputs_embeds=None,
    use_cache=None,
    visual_pos_masks=None,
    deepstack_visual_embeds=None,
    **kwargs,
):
    """Serves as the forward of the decoder, which adds visual features to the residual stream between layers."""
    return model_forward(
        self, input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values,
        inputs_embeds=inputs_embeds, use_cache=use_cache, visual_pos_masks=visual_pos_masks,
        deepstack_visual_embeds=deepstack_visual_embeds, **kwargs,
    )  # fmt: skip


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

    def forward(self, *args, **kwargs):
        twice = [name for name in names[: len(args)] if name in kwargs]
        if twice or len(args) > len(names):
            found = f"{', '.join(twice)} by position and by name" if twice else f"{len(args)} by position"
            raise TypeError(f"{type(self).__name__}.forward got arguments {found}, expected each of {', '.join(names)} at most once")
        kwargs.update(zip(names, args))
        return causal_lm_forward(self, kwargs.pop("labels", None), head_of(self.config.text_config, *of_head), **kwargs)

    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = [inspect.Parameter(name, either, default=0 if name == "logits_to_keep" else None) for name in names]
    rest = inspect.Parameter(vision.rest if older else "kwargs", inspect.Parameter.VAR_KEYWORD)
    forward.__signature__ = inspect.Signature([inspect.Parameter("self", either), *given, rest])  # type: ignore[attr-defined]
    return forward
