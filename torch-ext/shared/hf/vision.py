"""The forwards of a text decoder that follows a vision tower, with the arguments of transformers' own: the Hub replaces a class by a layer
only where both name the same ones, and a trainer drops the columns that a forward does not name."""

from .causal_lm import causal_lm_forward
from .checkpointing import checkpointed
from .decoder_layer import FusedLayer, decoder_layer_forward
from .decoder_model import model_forward
from .families import Family


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


def causal_lm_with_vision(family: Family):
    """Makes the forward of the model with tower, decoder and head: in training mode the loss without logits, as `causal_lm_of` has it."""

    def run(model, labels, newer, **kwargs):
        """newer: arguments that transformers 5.17 does not know."""
        kwargs.update((name, value) for name, value in newer.items() if value is not None)
        return causal_lm_forward(model, labels, family.head(model.config.text_config), **kwargs)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        pixel_values=None,
        pixel_values_videos=None,
        image_grid_thw=None,
        video_grid_thw=None,
        mm_token_type_ids=None,
        logits_to_keep=0,
        mm_encoder_outputs=None,
        **kwargs,
    ):
        return run(
            self, labels, {"mm_encoder_outputs": mm_encoder_outputs}, input_ids=input_ids,
            attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values, inputs_embeds=inputs_embeds,
            pixel_values=pixel_values, pixel_values_videos=pixel_values_videos, image_grid_thw=image_grid_thw,
            video_grid_thw=video_grid_thw, mm_token_type_ids=mm_token_type_ids, logits_to_keep=logits_to_keep, **kwargs,
        )  # fmt: skip

    def forward_with_experts(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        pixel_values=None,
        pixel_values_videos=None,
        image_grid_thw=None,
        video_grid_thw=None,
        mm_token_type_ids=None,
        output_router_logits=None,
        logits_to_keep=0,
        mm_encoder_outputs=None,
        **kwargs,
    ):
        return run(
            self, labels, {"mm_encoder_outputs": mm_encoder_outputs, "output_router_logits": output_router_logits}, input_ids=input_ids,
            attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values, inputs_embeds=inputs_embeds,
            pixel_values=pixel_values, pixel_values_videos=pixel_values_videos, image_grid_thw=image_grid_thw,
            video_grid_thw=video_grid_thw, mm_token_type_ids=mm_token_type_ids, logits_to_keep=logits_to_keep, **kwargs,
        )  # fmt: skip

    return forward if family.sparse is None else forward_with_experts
