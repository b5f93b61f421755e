"""Which layer stands in for what of transformers' GPT-OSS."""

from . import layers
from .families import GPT_OSS
from .shared.hf.families import Layers, targets_of

TARGETS = targets_of(
    GPT_OSS,
    Layers(layers.RMSNorm, layers.RotaryPosEmb, layers.DecoderLayer, layers.Model, layers.CausalLM, experts=layers.Experts),
)
FAMILIES = (TARGETS,)
