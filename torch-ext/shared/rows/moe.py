"""Decoders with plain attention and experts: Mixtral, Qwen2-MoE, OLMoE and their kin."""

from ..decoder.router import Scores
from ..hf.family.families import LOSS, Scored, Sparse
from ..hf.install.served import Served
from ..hf.install.warmup import Case, Sizes
from .made import ANGLES_FIRST, BEHIND, OF_CONFIG, WINDOW, row

__all__ = ["MIXTRAL", "QWEN2_MOE", "ROWS", "SERVED"]


def sparse(prefix: str, block: str = "SparseMoeBlock", **options) -> Sparse:
    """Makes a router and its experts whose classes have the names that most families give them."""
    return Sparse((f"{prefix}{block}", f"{prefix}TopKRouter", f"{prefix}Experts"), **options)


MIXTRAL = row("Mixtral", "Mixtral", "mixtral", options=OF_CONFIG, takes=ANGLES_FIRST, mlp=False,
              sparse=sparse("Mixtral", scored=Scored(Scores(rounds=False))), absent=("mlp.jitter_noise",))  # fmt: skip
QWEN2_MOE = row("Qwen2-MoE", "Qwen2Moe", "qwen2_moe", sparse=sparse("Qwen2Moe", shared="shared_expert"))
OLMOE = row("OLMoE", "Olmoe", "olmoe", qk_norm="whole", options=OF_CONFIG, mlp=False, sparse=sparse("Olmoe"),
            absent=("self_attn.config.clip_qkv",))  # fmt: skip
ROWS = (
    MIXTRAL,
    QWEN2_MOE,
    OLMOE,
    row("FlexOlmo", "FlexOlmo", "flex_olmo", norms=BEHIND, rounds="last", qk_norm="whole", narrow=True, mlp=False,
        takes=("hidden_states", "attention_mask", "position_ids", "past_key_values", "position_embeddings"),
        sparse=sparse("FlexOlmo")),
    row("Granite-MoE", "GraniteMoe", "granitemoe", multiplier="residual_multiplier", divisor="logits_scaling", block="block_sparse_moe",
        mlp=False, sparse=sparse("GraniteMoe", "MoE", router="router", by_logits=True),
        takes=("hidden_states", "attention_mask", "past_key_values", "position_embeddings"), routed=True),
    row("Mellum", "Mellum", "mellum", qk_norm="head", options=WINDOW, sparse=sparse("Mellum")),
)  # fmt: skip
SERVED = Served(
    rows=ROWS,
    options=("rms_norm", "swiglu", "rope", LOSS, "decoder_layer", "attention", "unpad", "experts"),
    cases=(  # Mixtral 8x7B, Qwen1.5-MoE-A2.7B, OLMoE-1B-7B
        Case(MIXTRAL, Sizes(4096, 0, 32, 8, 128, 32000, expert=14336, top_k=2)),
        Case(QWEN2_MOE, Sizes(2048, 5632, 16, 16, 128, 151936, expert=1408, top_k=4, shared=5632, bias=True)),
        Case(OLMOE, Sizes(2048, 0, 16, 16, 128, 50304, expert=1024, top_k=8)),
    ),
    shapes=True,
)
