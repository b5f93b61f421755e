"""The functions that users call: apply the layers to models of every family that the package serves, inspect them, and remove them."""

from .families import ROWS
from .shared.hf import patching
from .shared.hf.interface import Interface
from .shared.hf.shapes import Shapes
from .targets import FAMILIES

SHAPES = Shapes(ROWS)


def apply(rms_norm=True, swiglu=True, rope=True, fused_linear_cross_entropy=True, decoder_layer=True, attention=True, unpad=True,
          keep_attention=False, recompute_mlp=False, log_probs=True):
    """Puts the layers on transformers' classes of every family: models that exist and models made later use them.

    Args:
        rms_norm: the norms.
        swiglu: the MLP.
        rope: the rotary embedding.
        fused_linear_cross_entropy: the loss without logits, with the scale or the softcap of the family's head. True, False, or a mapping
            of options of the loss, which stands for True (docs/options.md).
        decoder_layer: the fused layer, which takes effect where `rms_norm`, `swiglu` and `rope` are all on.
        attention: on a GPU, attention of ours for packed and padded batches and for windows, where the model has the "sdpa" that
            transformers chooses by default and its heads are of 64, 96, 128 or 256.
        unpad: padding is removed from the whole decoder where the result is the same.
        keep_attention: with gradient checkpointing, attention runs once and its output is kept.
        recompute_mlp: the backward pass makes gate and up again instead of keeping them, with the same bits.
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
            "decoder_layer": decoder_layer and rms_norm and swiglu and rope,
            "attention": attention,
        },
        unpad,
        keep_attention,
        recompute_mlp,
        log_probs,
    )


_shared = Interface(FAMILIES, __package__, SHAPES)
kernelize = _shared.kernelize
explain = _shared.explain
report = _shared.report
capture = _shared.capture
mapping = _shared.mapping
get_patched_ops = _shared.get_patched_ops
reset = _shared.reset
