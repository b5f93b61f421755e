"""Qwen3 and Qwen3-MoE."""

from ..hf.family.families import LOSS, Family, Sparse
from ..hf.install.served import Served
from ..hf.install.warmup import Case, Sizes
from ..hf.layer.decoder_layer import FusedLayer
from .made import WINDOW

__all__ = ["QWEN3", "QWEN3_MOE", "SERVED"]

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
SERVED = Served(
    rows=(QWEN3, QWEN3_MOE),
    options=("rms_norm", "swiglu", "rope", LOSS, "decoder_layer", "attention", "unpad", "experts"),
    cases=(  # Qwen3 0.6B, 1.7B, 4B, 8B, 14B, 32B; 30B-A3B, 235B-A22B
        Case(QWEN3, Sizes(1024, 3072, 16, 8, 128, 151936)),
        Case(QWEN3, Sizes(2048, 6144, 16, 8, 128, 151936)),
        Case(QWEN3, Sizes(2560, 9728, 32, 8, 128, 151936)),
        Case(QWEN3, Sizes(4096, 12288, 32, 8, 128, 151936)),
        Case(QWEN3, Sizes(5120, 17408, 40, 8, 128, 151936)),
        Case(QWEN3, Sizes(5120, 25600, 64, 8, 128, 151936)),
        Case(QWEN3_MOE, Sizes(2048, 6144, 32, 4, 128, 151936, expert=768, top_k=8)),
        Case(QWEN3_MOE, Sizes(4096, 12288, 64, 4, 128, 151936, expert=1536, top_k=8)),
    ),
)
