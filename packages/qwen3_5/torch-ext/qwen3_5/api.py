"""The functions that users call: apply the layers to Qwen3.5, Qwen3.5-MoE and Qwen3-Next, inspect them, and remove them."""

from .shared.hf import patching
from .shared.hf.interface import Interface
from .targets import FAMILIES


def apply(rms_norm=True, swiglu=True, rope=True, fused_linear_cross_entropy=True, decoder_layer=True, attention=True, gated_rms_norm=True,
          delta_net=True, experts=True, unpad=True, keep_attention=False, recompute_mlp=False, log_probs=True):
    """Puts the layers on transformers' Qwen3.5 and Qwen3.5-MoE classes (of Qwen3.6 and 3.8 too) and on those of Qwen3-Next: models that
    exist and models made later use them.

    Args:
        rms_norm: the norms, whose weight is added to 1.
        swiglu: the MLP, and the expert that every token goes to.
        rope: the rotary embedding of a part of each head.
        fused_linear_cross_entropy: the loss without logits. True, False, or a mapping of options of the loss (docs/options.md).
        decoder_layer: norm, MLP (or router and experts) and both residual connections in one node, where `rms_norm` and `swiglu` are on.
        attention: the model's forward, which finds documents in position_ids where the caller gave no more, and lets attention of packed
            and padded batches run in kernels of ours, where the model did not ask for an implementation by name.
        gated_rms_norm: the norm that follows the delta net, with its gate.
        delta_net: convolution and gated delta rule; documents packed into a row do not see each other.
        experts: of Qwen3.5-MoE and Qwen3-Next, in grouped GEMMs.
        unpad, keep_attention: as in the other packages; padding stays in a model with delta nets.
        recompute_mlp: the backward pass makes gate and up again instead of keeping them, with the same bits; those of experts too.
        log_probs: TRL's trainers compute their log-probabilities without logits; {"recompute": False} keeps those of a trained head, for
            speed.

    After the call exactly the operations given as True are active. Not thread-safe against a running forward pass.

    Raises:
        TypeError: for an option that does not exist.
        ImportError: when transformers is absent or its version does not fit.
    """
    patching.patch_classes(
        FAMILIES,
        {
            "rms_norm": rms_norm,
            "swiglu": swiglu,
            "rope": rope,
            "fused_linear_cross_entropy": fused_linear_cross_entropy,
            "decoder_layer": decoder_layer and rms_norm and swiglu,
            "attention": attention,
            "gated_rms_norm": gated_rms_norm,
            "delta_net": delta_net,
            "experts": experts,
        },
        unpad,
        keep_attention,
        recompute_mlp,
        log_probs,
    )


_shared = Interface(FAMILIES, __package__)
kernelize = _shared.kernelize
explain = _shared.explain
report = _shared.report
capture = _shared.capture
mapping = _shared.mapping
get_patched_ops = _shared.get_patched_ops
reset = _shared.reset
