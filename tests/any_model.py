"""Tiny models of any type of transformers: where the default configuration can be made small by the usual names of sizes."""

import torch

from tools.family_loss import config_of

VOCABULARY, LAYERS = 211, 2
# What configurations call their sizes. Of those with several meanings, such as a number of layers by stage, only plain numbers are changed.
SIZES = {
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "embedding_size", "word_embed_proj_dim", "lru_width"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 56),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "encoder_layers", "depth"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "num_experts_per_token", "top_k", "moe_k"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"), 4), "mamba_n_heads": 8, "mamba_d_head": 16,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "rotary_dim"), 4),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "attn_layer_offset"), 1), "attn_layer_period": 2,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
    **dict.fromkeys(("hidden_size_per_layer_input", "num_kv_shared_layers", "pad_token_id"), 0),
    "bos_token_id": 1, "eos_token_id": 2, "image_size": 16, "patch_size": 8, "state_size": 16,
    **dict.fromkeys(("out_hidden_size", "output_dim", "projection_dim"), 64),
}  # fmt: skip
BY_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers")


def shrink(config) -> None:
    """Makes a configuration small, and those in it."""
    import transformers

    groups = getattr(config, "num_key_value_heads", None) != getattr(config, "num_attention_heads", 0)
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            shrink(value)
        elif name in SIZES and type(value) is int:
            setattr(config, name, SIZES[name])
        elif name in BY_LAYER and isinstance(value, (list, tuple)):
            setattr(config, name, (list(dict.fromkeys(value)) * LAYERS)[:LAYERS])
    if not groups and isinstance(getattr(config, "num_key_value_heads", None), int):  # of what has none, some know of none
        config.num_key_value_heads = config.num_attention_heads
    if isinstance(getattr(config, "qk_rope_head_dim", None), int):  # by which the angles are made
        config.head_dim = config.qk_rope_head_dim
    rope = getattr(config, "rope_parameters", None)
    if rope and "mrope_section" in rope:
        angles = int(config.head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
        config.rope_parameters = {**rope, "mrope_section": [angles - 2 * (angles // 4), angles // 4, angles // 4]}
    if getattr(config, "mlp_only_layers", None):
        config.mlp_only_layers = [0]
    if hasattr(config, "attn_layer_indices"):
        config.attn_layer_indices = [1]


def tiny_of(kind: str, name: str):
    """A tiny model in training mode, in float32, without dropout. kind: the type; name: of the class."""
    import transformers

    cls = getattr(transformers, name)
    config = config_of(kind, cls)
    shrink(config)
    torch.manual_seed(0)
    model = cls(config).float().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model
