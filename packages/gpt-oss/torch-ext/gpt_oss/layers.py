"""The layers that take the place of GPT-OSS's, by the names under which the Hub finds them. They have no state: `self` is the module whose
forward they become. What makes one of a row says what goes in and what comes out."""

from .shared.hf.install import layers
from .shared.rows.gpt_oss import GPT_OSS

RMSNorm = layers.rms_norm_of(GPT_OSS.family)
RotaryPosEmb = layers.rotary_layer_of(GPT_OSS.family)
Experts = layers.experts_of(GPT_OSS.family)
DecoderLayer = layers.decoder_layer_of(GPT_OSS)
Model = layers.model(GPT_OSS.family)
CausalLM = layers.causal_lm_of(GPT_OSS.family)
