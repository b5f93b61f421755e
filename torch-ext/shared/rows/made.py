"""What the rows of several packages are made of."""

from ..hf.family.families import Family, LayerNorms
from ..hf.layer.decoder_layer import FusedLayer

__all__ = ["ANGLES_FIRST", "BEHIND", "OF_CONFIG", "WINDOW", "row"]

WINDOW = (("sliding_window", "sliding_window"),)
OF_CONFIG = (("sliding_window", "config", "sliding_window"),)
# The arguments of some decoder layers.
ANGLES_FIRST = "hidden_states", "position_embeddings", "attention_mask", "position_ids", "past_key_values"
BEHIND = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def row(model: str, prefix: str, folder: str, **options) -> FusedLayer:
    """Makes a row. model: the family's name in messages; prefix: of transformers' classes; folder: of its module."""
    return FusedLayer(Family(model, f"transformers.models.{folder}.modeling_{folder}", prefix, **options))
