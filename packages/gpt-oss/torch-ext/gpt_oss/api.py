"""The functions that users call: apply the layers to GPT-OSS, inspect them, and remove them."""

from .shared.hf import patching
from .shared.hf.interface import Interface
from .targets import FAMILIES


def apply(rms_norm=True, experts=True, rope=True, fused_linear_cross_entropy=True, decoder_layer=True, attention=True, unpad=True,
          keep_attention=False, recompute_mlp=False, log_probs=True):
    """Puts the layers on transformers' GPT-OSS classes: models that exist and models made later use them.

    After the call exactly the operations given as True are active. Not thread-safe against a running forward pass.

    Args:
        rms_norm: the norms.
        experts: the experts in grouped GEMMs, which the fused decoder layer joins with the router and the norm in front of it.
        rope: the rotary embedding.
        fused_linear_cross_entropy: the loss without logits: a model in training mode that gets labels returns it and no logits. True,
            False, or a mapping of options of the loss, which stands for True (docs/options.md).
        decoder_layer: the fused layer, which takes effect where `rms_norm` and `rope` are on.
        attention: on a GPU, attention of ours from the model's next step on, where it has the "eager" that transformers chooses by
            default: sinks and windows run in kernels of ours, at the cost of the tokens that are seen, nothing is compiled, and documents
            packed into a row (`position_ids` that start again, or cu_seq_lens_q) do not see each other, which they do in transformers'
            eager attention. An implementation that was asked for by name is kept.
        unpad: skips a batch's padding in the whole decoder if no result shows it: with that attention, a loss without logits, no cache
            (use_cache=False, as Trainer has it), no label at a padded position, and no hooks on the decoder's parts.
        keep_attention: with gradient checkpointing, each decoder layer's attention runs once, and the backward pass computes the rest of
            the layer again.
        recompute_mlp: without gradient checkpointing, the backward pass makes what the experts' first products give again instead of
            keeping it, with the same bits.
        log_probs: TRL's trainers (1.16) compute their log-probabilities without logits, with every model of the process; what ours does
            not serve (a sharded or quantised head) goes to TRL's own. {"recompute": False} keeps the logits of a trained head for the
            backward pass, for speed.

    Raises:
        TypeError: for an option that does not exist.
        ImportError: when transformers is absent or its version does not fit.
    """
    patching.patch_classes(
        FAMILIES,
        {
            "rms_norm": rms_norm,
            "experts": experts,
            "rope": rope,
            "fused_linear_cross_entropy": fused_linear_cross_entropy,
            "decoder_layer": decoder_layer and rms_norm and rope,
            "attention": attention,
        },
        unpad,
        keep_attention,
        recompute_mlp,
        log_probs=log_probs,
    )


_shared = Interface(FAMILIES, __package__)
kernelize = _shared.kernelize
explain = _shared.explain
report = _shared.report
capture = _shared.capture
mapping = _shared.mapping
get_patched_ops = _shared.get_patched_ops
reset = _shared.reset
