"""Qwen3 and Qwen3-MoE as rows of the table of families."""

from .shared.hf.decoder_layer import FusedLayer
from .shared.hf.families import Family, Sparse

WINDOW = (("sliding_window", "sliding_window"),)
QWEN3 = FusedLayer(Family("Qwen3", "transformers.models.qwen3.modeling_qwen3", "Qwen3", qk_norm="head", options=WINDOW))
QWEN3_MOE = FusedLayer(
    Family(
        "Qwen3-MoE",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "Qwen3Moe",
        qk_norm="head",
        options=WINDOW,
        sparse=Sparse(("Qwen3MoeSparseMoeBlock", "Qwen3MoeTopKRouter", "Qwen3MoeExperts")),
    )
)
