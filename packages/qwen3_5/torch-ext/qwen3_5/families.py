"""Qwen3.5, Qwen3.5-MoE and Qwen3-Next as rows of the table of families: their layers have a delta net, or attention with a gate, in
attention's place."""

from .shared.hf.delta_net import INPUTS, INPUTS_BY_KEY_HEAD, NET
from .shared.hf.families import Family, Mixer, Sparse, Vision
from .shared.hf.mixed_layer import MixedLayer

ATTENTION = Mixer("self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj")


def _row(model: str, module: str, prefix: str, decoder: str = "", vision: str = "", sparse: bool = True, inputs=INPUTS) -> MixedLayer:
    """decoder: as of `Family`. vision: the name of `Vision`, "" for none. sparse: whether there are layers with experts. inputs: the first
    projections of a delta net."""
    classes = f"{prefix}SparseMoeBlock", f"{prefix}TopKRouter", f"{prefix}Experts"
    return MixedLayer(
        Family(
            model,
            f"transformers.models.{module}.modeling_{module}",
            prefix,
            offset=1.0,
            rounds="last",
            partial=True,
            sparse=Sparse(classes, shared="shared_expert") if sparse else None,
            norm_argument="x",
            positions_first=True,
            decoder=decoder,
            towers=(Vision(vision),) if vision else (),
            mixers=(Mixer(NET, inputs, "out_proj"), ATTENTION),
        )
    )


QWEN3_5 = _row("Qwen3.5", "qwen3_5", "Qwen3_5", "Qwen3_5TextModel", "Qwen3_5ForConditionalGeneration", sparse=False)
QWEN3_5_MOE = _row("Qwen3.5-MoE", "qwen3_5_moe", "Qwen3_5Moe", "Qwen3_5MoeTextModel", "Qwen3_5MoeForConditionalGeneration")
QWEN3_NEXT = _row("Qwen3-Next", "qwen3_next", "Qwen3Next", inputs=INPUTS_BY_KEY_HEAD)
