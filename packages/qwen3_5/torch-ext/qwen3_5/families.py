"""Qwen3.5 as a row of the table of families: its layers have a delta net, or attention with a gate, in attention's place."""

from .shared.hf.decoder_layer import FusedLayer
from .shared.hf.families import Family

QWEN3_5 = FusedLayer(
    Family(
        "Qwen3.5",
        "transformers.models.qwen3_5.modeling_qwen3_5",
        "Qwen3_5",
        offset=1.0,
        rounds="last",
        partial=True,
        norm_argument="x",
        positions_first=True,
        decoder="Qwen3_5TextModel",
        mixers=("linear_attn", "self_attn"),
    )
)
