"""A decoder of nobody's: other names and other spelling than transformers', for tests of what is read off forwards. Norms of heads, packed
gate and up, norms behind both branches, a window in every second layer."""

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, eager_attention_forward


class OtterConfig(LlamaConfig):
    model_type = "otter"


class OtterScale(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, stream):
        wide = stream.float()
        inverse = (wide.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        return ((1.0 + self.weight.float()) * (wide * inverse)).type_as(stream)


def quarter_turn(x):
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return quarter_turn(q) * sin + cos * q, k * cos + sin * quarter_turn(k)


class OtterFeed(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.both = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.back = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.squash = nn.SiLU()

    def forward(self, stream):
        opened, passed = self.both(stream).chunk(2, dim=-1)
        return self.back(passed * self.squash(opened))


class OtterAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling, self.attention_dropout = self.head_dim**-0.5, config.attention_dropout
        self.is_causal = True
        self.reach = 5 if layer_idx % 2 else None
        width, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.to_q = nn.Linear(config.hidden_size, width, bias=True)
        self.to_k = nn.Linear(config.hidden_size, keys, bias=True)
        self.to_v = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = OtterScale(self.head_dim, config.rms_norm_eps), OtterScale(self.head_dim, config.rms_norm_eps)

    def in_heads(self, x):
        rows, tokens = x.shape[:2]
        return x.view(rows, tokens, -1, self.head_dim)

    def forward(self, stream, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        rows, tokens, _ = stream.shape
        v = self.in_heads(self.to_v(stream)).transpose(1, 2)
        k = self.k_norm(self.in_heads(self.to_k(stream))).transpose(1, 2)
        q = self.q_norm(self.in_heads(self.to_q(stream))).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        attended, weights = attend(
            self, q, k, v, attention_mask, sliding_window=self.reach, scaling=self.scaling, dropout=dropout, **kwargs
        )
        return self.o_proj(attended.reshape(rows, tokens, -1)), weights


class OtterDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = OtterAttention(config, layer_idx)
        self.feed = OtterFeed(config)
        self.first, self.second, self.third, self.fourth = (OtterScale(config.hidden_size, config.rms_norm_eps) for _ in range(4))

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, position_embeddings=None, **kwargs):
        branch, _ = self.self_attn(
            self.first(hidden_states),
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        between = self.second(branch) + hidden_states
        return self.fourth(self.feed(self.third(between))) + between


class OtterModel(PreTrainedModel):
    config_class = OtterConfig
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([OtterDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.last = OtterScale(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None, **kwargs):
        from transformers import DynamicCache

        stream = self.embed_tokens(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        if position_ids is None:
            position_ids = torch.arange(seen, seen + stream.shape[1], device=stream.device)[None]
        places = {"past_key_values": past_key_values, "position_ids": position_ids}
        mask = create_causal_mask(config=self.config, inputs_embeds=stream, attention_mask=attention_mask, **places)
        angles = self.rotary_emb(stream, position_ids)
        for layer in self.layers:
            given = {"position_embeddings": angles, "position_ids": position_ids, **kwargs}
            stream = layer(stream, attention_mask=mask, past_key_values=past_key_values, **given)
        return BaseModelOutputWithPast(last_hidden_state=self.last(stream), past_key_values=past_key_values)


class OtterForCausalLM(PreTrainedModel):
    config_class = OtterConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.model = OtterModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, labels=None, use_cache=None, **kwargs):
        given = {"attention_mask": attention_mask, "position_ids": position_ids, "past_key_values": past_key_values, **kwargs}
        found = self.model(input_ids, use_cache=use_cache, **given)
        logits = self.lm_head(found.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=found.past_key_values)
