"""Which layer stands in for what of transformers: the families' rows with the layers that they make."""

from . import layers as own_layers
from .families import ROWS
from .shared.hf import layers
from .shared.hf.decoder_layer import FusedLayer
from .shared.hf.families import Layers, Targets, targets_of
from .shared.hf.known_texts import TEXTS


def _targets(own: FusedLayer) -> Targets:
    family = own.family
    norm = layers.rms_norm_of(family) if family.offset else own_layers.RMSNorm
    rotary = own_layers.RotaryPosEmb if family.has_common_rotary() else layers.rotary_layer_of(family)
    of_row = layers.decoder_layer_of(own), layers.model(family), layers.causal_lm_of(family), layers.mlp_of(family)
    towers = tuple(layers.with_vision_of(family, tower) for tower in family.towers)
    return targets_of(own, Layers(norm, rotary, *of_row, towers=towers))


# A model whose texts are not recorded gets more without a row, by the texts of its parts, than with one.
FAMILIES = tuple(_targets(own) for own in ROWS if own.family.modeling in TEXTS)
