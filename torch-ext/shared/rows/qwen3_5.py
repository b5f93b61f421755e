"""Qwen3.5, Qwen3.5-MoE and Qwen3-Next: their layers have a delta net, or attention with a gate, in attention's place."""

from functools import partial

import torch

from ..hf.attention.row_documents import documents_for
from ..hf.family.arguments import forward_of
from ..hf.family.families import LOSS, Family, Mixer, Sparse, Targets, Vision
from ..hf.install import layers, served
from ..hf.install.warmup import EPS, Case, Maker, Sizes, attend, warm_up
from ..hf.layer.decoder_layer import FusedLayer
from ..hf.layer.delta_net import INPUTS, INPUTS_BY_KEY_HEAD, NET, delta_net_forward, gated_norm_forward
from ..hf.layer.mixed_layer import MixedLayer
from ..hf.parts.modules import Layer
from ..ops.gated_delta_rule import gated_delta_rule
from ..ops.gated_output import gated_output
from ..ops.gated_rms_norm import gated_rms_norm
from ..ops.rotary import qk_norm_rotary
from ..ops.short_conv import TAPS, short_conv
from ..runtime.tuning import run_backward
from .made import ANGLES_FIRST

__all__ = ["QWEN3_5", "QWEN3_5_MOE", "QWEN3_NEXT", "SERVED", "GatedDeltaNet", "Model", "RMSNormGated"]

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
            takes=ANGLES_FIRST,
            decoder=decoder,
            towers=(Vision(vision),) if vision else (),
            mixers=(Mixer(NET, inputs, "out_proj"), ATTENTION),
        )
    )


QWEN3_5 = _row("Qwen3.5", "qwen3_5", "Qwen3_5", "Qwen3_5TextModel", "Qwen3_5ForConditionalGeneration", sparse=False)
QWEN3_5_MOE = _row("Qwen3.5-MoE", "qwen3_5_moe", "Qwen3_5Moe", "Qwen3_5MoeTextModel", "Qwen3_5MoeForConditionalGeneration")
QWEN3_NEXT = _row("Qwen3-Next", "qwen3_next", "Qwen3Next", inputs=INPUTS_BY_KEY_HEAD)


class RMSNormGated(Layer):
    """For the norm that follows a delta net: hidden_states and gate [..., n] -> [..., n]."""

    def forward(self, hidden_states, gate):
        return gated_norm_forward(self, hidden_states, gate)


class GatedDeltaNet(Layer):
    """For the delta nets of all three: hidden_states [batch, tokens, hidden] -> the same, with documents that do not see each other."""

    forward = forward_of(("hidden_states", "cache_params", "attention_mask"), lambda self, given: delta_net_forward(self, given))


Model = layers.model(arguments_for=documents_for)


def targets(own: FusedLayer) -> Targets:
    """Makes the layers of a row, its delta net and the norm that follows that among them, and says what they stand in for."""
    found, prefix = served.targets(own), own.family.prefix
    decoder = found.classes["attention"][0]
    net = {"gated_rms_norm": (f"{prefix}RMSNormGated", RMSNormGated), "delta_net": (f"{prefix}GatedDeltaNet", GatedDeltaNet)}
    return found._replace(
        classes={**found.classes, "attention": (decoder, Model), **net},
        operations=(*found.operations, *net),
        hub_names={
            **found.hub_names,
            "RMSNormGated": RMSNormGated,
            "Qwen3_5GatedDeltaNet": GatedDeltaNet,
            net["delta_net"][0]: GatedDeltaNet,
            decoder: Model,
        },
        optional=(*found.optional, *net),  # a model's configuration may ask for attention alone
    )


DOCUMENTS = 1, 4, 32  # the kernels of the gated delta rule differ by their number


def mix(make: Maker, own: FusedLayer, sizes: Sizes) -> None:
    """Runs gated attention and a delta net, the two ways in which these layers mix tokens."""
    family, head_dim = own.family, sizes.head_dim
    cos = torch.ones(1, make.tokens, sizes.angles or head_dim, dtype=make.dtype, device=make.device)
    q, k, gate = (make.ones(1, make.tokens, heads, head_dim) for heads in (sizes.heads, sizes.kv_heads, sizes.heads))
    turned = sizes.angles if sizes.angles < head_dim else 0
    norms = make.ones(head_dim), make.ones(head_dim)
    run_backward(*qk_norm_rotary(q, k, *norms, cos, cos, EPS, family.offset, family.rounds, turned))
    attend(make, sizes)
    gated_output(make.ones(*gate.shape), gate).sum().backward()
    key_heads, heads, length, width = sizes.delta
    channels = 2 * key_heads * length + heads * width
    short_conv(make.ones(1, make.tokens, channels), make.ones(channels, TAPS)).sum().backward()
    q, k, v = (make.ones(1, make.tokens, n, size) for n, size in ((key_heads, length), (key_heads, length), (heads, width)))
    g, beta = make.ones(1, make.tokens, heads), make.ones(1, make.tokens, heads)
    for count in DOCUMENTS:
        bounds = torch.arange(count + 1, device=make.device, dtype=torch.int32) * (make.tokens // count)
        bounds[-1] = make.tokens
        gated_delta_rule(q, k, v, -g, beta, cu_seqlens=bounds, l2_norm=True)[0].sum().backward()
    rows = make.ones(make.tokens * heads, width), make.ones(make.tokens * heads, width)
    gated_rms_norm(*rows, make.ones(width)).sum().backward()


SERVED = served.Served(
    rows=(QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT),
    options=("rms_norm", "swiglu", "rope", LOSS, "decoder_layer", "attention", "gated_rms_norm", "delta_net", "experts", "unpad"),
    cases=(  # Qwen3.5 9B, 35B-A3B
        Case(QWEN3_5, Sizes(4096, 12288, 16, 4, 256, 248320, angles=64, delta=(16, 32, 128, 128))),
        Case(QWEN3_5_MOE, Sizes(2048, 0, 16, 2, 256, 248320, angles=64, expert=512, top_k=8, shared=512, delta=(16, 32, 128, 128))),
    ),
    targets_of=targets,
    warm_up=partial(warm_up, mix=mix),
)
