"""Small models of the families that `bastile/decoders` and `bastile/moe` serve, for the tests of the decoder layer."""

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch

from tests.models import VOCABULARY, Step, random_tokens, tiny_model

# By transformers' name of the model, in the order of each package's rows: dense, and with experts.
NAMES = (
    "llama", "qwen2", "qwen3", "qwen3_vl", "qwen2_5_vl", "qwen2_vl", "mistral", "ministral", "ministral3", "smollm3", "granite",
    "granitemoehybrid", "phi3", "olmo2", "olmo3", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "ernie4_5", "helium",
    "cwm", "vaultgemma", "granite_swa", "apertus", "arcee", "exaone4", "hunyuan_v1_dense", "starcoder2", "nemotron",
)  # fmt: skip
SPARSE = ("mixtral", "qwen2_moe", "olmoe", "flex_olmo", "granitemoe", "mellum")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
# What a small model of a family needs beside the sizes that all have.
CHANGES: dict = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True}},
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl"), {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "ministral3": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8,
                                       "max_position_embeddings": 64, "llama_4_scaling_beta": 0.7, "beta_fast": 32.0, "beta_slow": 1.0,
                                       "mscale": 1.0, "mscale_all_dim": 1.0}},
    "olmo2": {"num_key_value_heads": 4},
    "granite": {"residual_multiplier": 0.22, "logits_scaling": 3.0},
    "granitemoehybrid": {"residual_multiplier": 0.22, "logits_scaling": 3.0, "position_embedding_type": "rope", "num_local_experts": 0,
                         "layer_types": ["full_attention"] * 2, "shared_intermediate_size": 80, "mamba_n_heads": 8},
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "phi3": {"partial_rotary_factor": 0.5},
    "cwm": {"bos_token_id": 1},
    **dict.fromkeys(("gemma2", "vaultgemma"), {"query_pre_attn_scalar": 12}),
    "granite_swa": {"residual_multiplier": 0.22, "logits_scaling": 3.0},
    "mellum": {**EXPERTS, "moe_intermediate_size": 24},
    "gemma3_text": {"query_pre_attn_scalar": 12},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    **dict.fromkeys(("olmoe", "flex_olmo"), EXPERTS),
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "residual_multiplier": 0.22, "logits_scaling": 3.0},
    "starcoder2": {"initializer_range": 0.1},  # beside the biases, scores hardly differ with smaller weights
    "nemotron": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
}
VIDEO, IMAGE, IMAGE_START, IMAGE_END = 189, 190, 191, 192  # tokens
TOKENS_OF_IMAGES = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": IMAGE_START,
                    "vision_end_token_id": IMAGE_END}
# What stands beside the text's configuration in that of a model with a vision tower.
VISION: dict = {
    "qwen3_vl": {
        "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
                          "temporal_patch_size": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **TOKENS_OF_IMAGES,
    },
    "qwen2_5_vl": {
        "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
                          "temporal_patch_size": 2, "window_size": 16, "fullatt_block_indexes": [1]},
        **TOKENS_OF_IMAGES,
    },
    "qwen2_vl": {
        "vision_config": {"depth": 2, "embed_dim": 32, "mlp_ratio": 2, "num_heads": 2, "patch_size": 4,
                          "spatial_merge_size": 2, "temporal_patch_size": 2},
        **TOKENS_OF_IMAGES,
    },
}  # fmt: skip
ROUTERS = ("gate.weight", "router.weight")
OF_OUTPUT = {"qwen2_vl": "hidden_size"}  # what a tower's configuration calls the width of what it returns

WINDOW = {"sliding_window": 5}  # which every sequence of the tests is longer than
IN_TURNS = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": {**YARN, "rope_type": "linear"}}
AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
TIED = {"tie_word_embeddings": True}
WHOLE = {"rope_type": "default", "rope_theta": 1e4}  # of a head
BIASES = {"attention_bias": True, "mlp_bias": True}
LONGROPE = {**YARN, "rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0], "partial_rotary_factor": 0.5}
# What else a family's configuration may change in its decoder layers and its head, by what it is. What many have is tested with some.
VARIANTS: dict = {
    "llama": {"biases": BIASES, "tied": TIED, "scaled rope": {"rope_parameters": LLAMA3}, "dropout": {"attention_dropout": 0.3},
              "one head of keys": {"num_key_value_heads": 1}, "another activation": {"hidden_act": "gelu"}},
    "qwen2": {"windows": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}, "untied": {"tie_word_embeddings": False}},
    "qwen3": {"windows": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}, "biases": {"attention_bias": True},
              "scaled rope": {"rope_parameters": YARN}},
    "qwen3_vl": {"biases": {"attention_bias": True}},
    "qwen2_5_vl": {"windows": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}, "tied": TIED},
    "qwen2_vl": {"windows": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}, "tied": TIED},
    "mistral": {"windows": WINDOW, "no windows": {"sliding_window": None}, "both directions": {**WINDOW, "is_causal": False}},
    "ministral": {"windows": WINDOW, "windows in turns": IN_TURNS},
    "ministral3": {"windows": WINDOW, "tied": TIED},
    "smollm3": {"no rope": {"no_rope_layer_interval": 2}, "no rope by layer": {"no_rope_layers": [0, 1]}, "tied": TIED, "biases": BIASES,
                "windows": {**WINDOW, "use_sliding_window": True, "no_rope_layer_interval": 2}},
    "granite": {"multipliers": {"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 1.4},
                "no multipliers": {"residual_multiplier": 1.0, "logits_scaling": 1.0}, "biases": BIASES, "tied": TIED},
    "granitemoehybrid": {"multipliers": {"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 1.4},
                         "no rope": {"position_embedding_type": None}, "biases": {"attention_bias": True}, "tied": TIED},
    "phi3": {"windows": WINDOW, "whole rotary": {"partial_rotary_factor": 1.0}, "tied": TIED,
             "scaled rope": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}},
    "olmo2": {"grouped keys": {"num_key_value_heads": 2}, "biases": {"attention_bias": True}, "scaled rope": {"rope_parameters": YARN}},
    "olmo3": {"windows": WINDOW, "windows in turns": IN_TURNS, "biases": {"attention_bias": True},
              "scaled rope": {**IN_TURNS, "rope_parameters": dict.fromkeys(IN_TURNS["layer_types"], YARN)}},
    "gemma": {"biases": {"attention_bias": True}},
    "gemma2": {"no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
               "low caps": {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.7}, "windows": IN_TURNS,
               "biases": {"attention_bias": True}, "tied": TIED},
    "gemma3_text": {"windows": IN_TURNS, "capped logits": {"final_logit_softcapping": 0.7}, "biases": {"attention_bias": True},
                    "both directions": {**IN_TURNS, "use_bidirectional_attention": True}, "tied": TIED,
                    "scaled rope": {"layer_types": IN_TURNS["layer_types"], "rope_parameters": SCALED}},
    "glm": {"no biases": {"attention_bias": False}, "whole rotary": {"partial_rotary_factor": 1.0}, "tied": TIED},
    "glm4": {"no biases": {"attention_bias": False}, "whole rotary": {"partial_rotary_factor": 1.0}},
    "ernie4_5": {"biases": {"use_bias": True}, "tied": TIED},
    "helium": {"tied": TIED, "biases": BIASES},
    "cwm": {"windows in turns": IN_TURNS, "tied": TIED, "biases": {"mlp_bias": True}},
    "vaultgemma": {"no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None}, "windows": IN_TURNS,
                   "low caps": {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.7}, "biases": {"attention_bias": True}},
    "granite_swa": {"windows": IN_TURNS, "biases": BIASES, "tied": TIED, "a theta each": {"layer_rope_theta": [1e4, 1e2]},
                    "multipliers": {"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 1.4}},
    "mellum": {"windows": IN_TURNS, "normalised": {"norm_topk_prob": False}, "tied": TIED, "auxiliary loss": AUXILIARY,
               "a dense layer": {"mlp_layer_types": ["dense", "sparse"]}, "biases": {"attention_bias": True}},
    "apertus": {"biases": {"attention_bias": True}, "tied": TIED},
    "arcee": {"biases": BIASES, "tied": TIED},
    "exaone4": {"windows in turns": IN_TURNS, "no windows": {"sliding_window": None, "layer_types": ["full_attention"] * 2}, "tied": TIED},
    "hunyuan_v1_dense": {"biases": {"attention_bias": True}, "tied": TIED},
    "starcoder2": {"no biases": {"use_bias": False}, "windows": WINDOW, "tied": TIED},
    "nemotron": {"biases": BIASES, "tied": TIED, "whole rotary": {"rope_parameters": {**WHOLE, "partial_rotary_factor": 1.0}}},
    "mixtral": {"windows": WINDOW, "tied": TIED, "jitter": {"router_jitter_noise": 0.3}, "auxiliary loss": AUXILIARY},
    "qwen2_moe": {"windows": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}, "tied": TIED, "auxiliary loss": AUXILIARY,
                  "no biases": {"qkv_bias": False}, "normalised": {"norm_topk_prob": True}, "a dense layer": {"mlp_only_layers": [0]},
                  "every second layer": {"decoder_sparse_step": 2}},
    "olmoe": {"clipped": {"clip_qkv": 0.4}, "normalised": {"norm_topk_prob": True}, "tied": TIED, "auxiliary loss": AUXILIARY,
              "biases": {"attention_bias": True}},
    "flex_olmo": {"normalised": {"norm_topk_prob": True}, "tied": TIED, "auxiliary loss": AUXILIARY, "biases": {"attention_bias": True}},
    "granitemoe": {"multipliers": {"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 1.4}, "tied": TIED,
                   "auxiliary loss": AUXILIARY, "biases": {"attention_bias": True}},
}  # fmt: skip
# Options that every family has and some are tested with, the sizes that `tiny` gives, and those that a training step does not know.
EVERYWHERE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "hidden_act", "hidden_activation",
    "attention_dropout", "rope_parameters", "tie_word_embeddings", "initializer_range", "rms_norm_eps", "norm_eps", "norm_epsilon",
    "use_cache", "keys_to_ignore_at_inference", "pretraining_tp", "model_type", "base_config_key", "attribute_map", "default_theta",
    "ignore_keys_at_rope_validation",
)  # fmt: skip
# Options that transformers reads nowhere, or that have a test of their own.
UNCHANGING: dict = {
    "qwen2": {"layer_types"},  # made of max_window_layers
    "qwen3": {"layer_types"},
    "qwen2_5_vl": {"layer_types"},
    "qwen2_vl": {"layer_types"},
    "smollm3": {"layer_types"},
    "granitemoehybrid": {
        *(f"mamba_{name}" for name in ("n_groups", "d_state", "d_head", "d_conv", "expand", "chunk_size", "conv_bias", "proj_bias")),
        *("time_step_limit", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"),
    },
    "phi3": {"embd_pdrop", "resid_pdrop"},
    "starcoder2": {"embedding_dropout", "residual_dropout"},
    **dict.fromkeys(("gemma", "gemma2"), {"use_bidirectional_attention"}),
    "exaone4": {"sliding_window_pattern"},  # of which layer_types is made
    "hunyuan_v1_dense": {"eod_token_id"},
    "gemma3_text": {"attn_logit_softcapping"},
    "qwen2_moe": {"layer_types"},
    "mellum": {"num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"},
}


def tiny(name: str, dtype=torch.float32, attn_implementation="sdpa", **changes):
    """A small model of a family in training mode, always with the same weights, with norms that are not all ones and biases that are not
    zero."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

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
    options = of_text = {**sizes, **CHANGES.get(name, {}), **changes}
    if name in VISION:  # a third of the rotated pairs each for time, height and width, time with the rest
        third, rest = divmod(of_text["head_dim"] // 2, 3)
        of_text["rope_parameters"] = {**of_text["rope_parameters"], "mrope_section": [third + rest, third, third]}
        tower = {**VISION[name]["vision_config"], OF_OUTPUT.get(name, "out_hidden_size"): of_text["hidden_size"]}
        options = {**VISION[name], "vision_config": tower, "text_config": of_text}
    config = AutoConfig.for_model(name, **options)
    of_task = AutoModelForImageTextToText if name in VISION else AutoModelForCausalLM
    model = of_task.from_config(config, attn_implementation=attn_implementation)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.dim() == 1 or "experts" in parameter_name or parameter_name.endswith(ROUTERS):
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model.to(dtype).train()


# Of models whose loss needs no logits behind a vision tower either: the text, and the prefix of the classes with the tower.
TOWERS = {
    "gemma3_text": ("gemma3_text", "Gemma3"), "mistral": ("mistral", "Mistral3"), "ministral3": ("ministral3", "Mistral3"),
    "llava": ("llama", "Llava"), "llava of mistral": ("mistral", "Llava"), "internvl": ("qwen2", "InternVL"),
    "internvl of qwen3": ("qwen3", "InternVL"), "idefics3": ("llama", "Idefics3"), "smolvlm": ("llama", "SmolVLM"),
    "llava_next": ("llama", "LlavaNext"), "llava_next of mistral": ("mistral", "LlavaNext"),
    "llava_onevision": ("qwen2", "LlavaOnevision"), "paligemma": ("gemma2", "PaliGemma"),
}  # fmt: skip
IDEFICS3 = ("Idefics3", "SmolVLM")
OF_TILES = ("LlavaNext", "LlavaOnevision")  # which see an image whole, and cut into tiles with a token after each row of the whole grid


def tiny_behind_a_tower(text, wrapper=None, **changes):
    """A text of two layers, with windows, behind a vision tower that is no part of the text's family. wrapper: the prefix of its classes,
    by default text is one of `TOWERS`; changes: of the text."""
    import transformers

    text, wrapper = (text, wrapper) if wrapper else TOWERS[text]
    windows = IN_TURNS if text in ("gemma2", "gemma3_text") else {} if text == "gemma" else WINDOW
    of_text = tiny(text, attn_implementation="eager", **windows, **changes).config.to_dict()
    gemma = wrapper in ("Gemma3", "PaliGemma")
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    siglip = ("Gemma3", "PaliGemma", *OF_TILES)
    kind = "siglip_vision_model" if wrapper in siglip else {"VipLlava": "clip_vision_model"}.get(wrapper, "pixtral")
    tower = {**size, "model_type": kind}
    image = "image_token_id" if wrapper in (*IDEFICS3, "InternVL") else "image_token_index"
    options = {image: IMAGE, **({} if gemma or wrapper in IDEFICS3 else {"vision_feature_layer": -1})}
    options |= {
        "Gemma3": {"mm_tokens_per_image": 4}, "PaliGemma": {"projection_dim": of_text["hidden_size"]},
        "Mistral3": {"spatial_merge_size": 1},
        "Llava": {"vision_feature_select_strategy": "full"}, "VipLlava": {"vision_feature_layers": [-1, -1]},
        **dict.fromkeys(IDEFICS3, {"scale_factor": 1, "pad_token_id": 0}),
        "InternVL": {"downsample_ratio": 1.0},
        **dict.fromkeys(OF_TILES, {"vision_feature_select_strategy": "full", "image_grid_pinpoints": [[8, 16], [16, 8]],
                                  "video_token_index": VIDEO}),
    }.get(wrapper, {})  # fmt: skip
    if wrapper in IDEFICS3:
        tower.pop("model_type")
    if wrapper == "InternVL":
        tower |= {"model_type": "internvl_vision", "image_size": [8, 8], "patch_size": [4, 4]}
    config = getattr(transformers, f"{wrapper}Config")(text_config=of_text, vision_config=tower, **options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{wrapper}ForConditionalGeneration")(config).train()
    for name, parameter in model.named_parameters():
        if "vision" in name and name.endswith("k_proj.bias"):
            parameter.requires_grad_(False)  # the softmax takes it away: its gradient is nothing but rounding
    return model


def of_words_and_image(padded=True, merged=4):
    """Inputs of Qwen's models with vision towers. merged: an image's tokens."""
    tokens = random_tokens(2, 17).clamp(max=180)
    tokens[:, 3 : 5 + merged] = torch.tensor([IMAGE_START, *[IMAGE] * merged, IMAGE_END])
    mask = (torch.arange(17) < torch.tensor([[17], [14]])).long() if padded else torch.ones(2, 17, dtype=torch.long)
    return {
        "input_ids": tokens,
        "labels": tokens.where(mask > 0, -100),
        "attention_mask": mask,
        "pixel_values": torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(3)),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": (tokens == IMAGE).long(),
    }


def inputs_with_images(model, padded=False):
    """An image of four tokens in each row; where it is cut into tiles, of four for the whole, and of each row of two tiles or one with a
    token after it."""
    tokens, of_tiles = random_tokens(2, 21).clamp(max=180), type(model).__name__.startswith(OF_TILES)
    sizes = torch.tensor([[8, 16], [8, 8]] if of_tiles else [[8, 8]] * 2)
    for row, count in zip(tokens, (4 + 2 * 5, 4 + 2 * 3) if of_tiles else (4, 4)):
        row[3 : 3 + count] = IMAGE
    parts = (3,) if of_tiles else (1,) if type(model).__name__.startswith(IDEFICS3) else ()
    pixels = torch.randn(2, *parts, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    found = {"input_ids": tokens, "labels": tokens, "pixel_values": pixels}
    prefix = type(model).__name__.startswith("PaliGemma")  # of words and the image, whose tokens see each other and have type 0
    types = (torch.arange(21) >= 12).expand(2, -1) if prefix else tokens == IMAGE
    told = {"token_type_ids": types.long(), "image_sizes": sizes}
    found |= {name: value for name, value in told.items() if name in inspect.signature(model.forward).parameters}
    if padded:
        mask = (torch.arange(21) < torch.tensor([[21], [18]])).long()
        found |= {"attention_mask": mask, "labels": tokens.where(mask > 0, -100)}
    return found


TOKENS = random_tokens(2, 21)
FACTOR = 3  # two fp32 runs of a model differ by more than an operation from float64
NODES = ["norm_attention_inputs", "norm_mlp"]  # what a decoder layer is
# Which experts a token goes to is a matter of rounding: in half precision it goes to all.
TO_ALL: dict = {name: {"num_experts_per_tok": 4} for name in SPARSE}
CALLED = {"apertus": "norm_mlp"}


def nodes_of(name: str) -> list[str]:
    """What a decoder layer of a family is: without the node of a part that is called as the module that it is."""
    nodes = ["norm_attention_inputs", "norm_experts"] if name in SPARSE else NODES
    return [node for node in nodes if node != CALLED.get(name)]


def step_of(model, **inputs):
    """A step whose dropouts draw the same numbers each time."""
    torch.manual_seed(0)
    return Step(model, **{"input_ids": TOKENS, "labels": TOKENS, "use_cache": False, **inputs})


def packed_and_padded():
    """Inputs of a plain batch, of packed documents by their positions, and of batches with padding on the left and on the right."""
    left, right = ((torch.arange(21) >= torch.tensor([[0], [9]])).long().flip(dims) for dims in ((), (1,)))
    padded = [{"attention_mask": mask, "labels": TOKENS.where(mask > 0, -100)} for mask in (left, right)]
    return {}, {"position_ids": torch.cat((torch.arange(8), torch.arange(13)))[None].expand(2, -1)}, *padded


class Trained(NamedTuple):
    """A family whose training the tests of a feature repeat: the fixture of its package, the folder of that package's build.toml, and
    the function that makes a small model."""

    package: str
    folder: str
    tiny: Callable


# One family with norms of q and k, one without, and one with biases and a head tied to the embedding.
TRAINED = {
    "qwen3": Trained("qwen3", ".", tiny_model),
    "llama": Trained("decoders", "packages/decoders", functools.partial(tiny, "llama")),
    "qwen2": Trained("decoders", "packages/decoders", functools.partial(tiny, "qwen2")),
}
