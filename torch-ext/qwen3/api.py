"""The functions that users call: apply the layers to Qwen3 and Qwen3-MoE, inspect them, and remove them."""

from .shared.hf import patching
from .shared.hf.interface import Interface
from .targets import FAMILIES


def apply(rms_norm=True, swiglu=True, rope=True, fused_linear_cross_entropy=True, decoder_layer=True, attention=True, unpad=True,
          experts=True, keep_attention=False, recompute_mlp=False, log_probs=True):
    """Puts the layers on transformers' Qwen3 and Qwen3-MoE classes: models that exist and models made later use them.

    After the call exactly the operations given as True are active. With `fused_linear_cross_entropy` a model in training mode that gets
    labels returns the loss and no logits. `decoder_layer` fuses across the others, so it takes effect where `rms_norm`, `swiglu` and
    `rope` are all on. `experts` is for Qwen3-MoE: experts in grouped GEMMs, which the fused decoder layer joins with the router and the
    norm in front of it; an implementation that the user chose (`set_experts_implementation`) runs in their place. `attention` gives a
    model on a GPU attention of ours at its next step where it has the "sdpa" that transformers chooses by default: packed and padded
    batches and sliding windows run in kernels of ours, at the cost of the tokens that are seen; one sequence a row without padding goes to
    SDPA as before, and so do batches whose padding may be read. One that was asked for by name is kept, as far as that can be told
    (docs/options.md). The last call wins, also over `kernelize`. `unpad` leaves the padding of a batch out of the whole decoder where
    nobody can tell: with that attention, a loss without logits, no cache (use_cache=False, as Trainer has it), no label at a padded
    position, and no hooks on the decoder's parts. `keep_attention` is for gradient checkpointing: each decoder layer's attention runs
    once, and the backward pass computes the rest of the layer again. It takes the memory of attention's output, for each token and layer
    heads * head_dim numbers and a float32 a head, and serves the attention of ours and PyTorch's ("sdpa") without dropout. `recompute_mlp`
    is for layers that are not checkpointed: the backward pass makes gate and up of the fused decoder layer's MLP again, or those of the
    experts, instead of keeping them, with the same bits. It saves 2 * intermediate_size numbers for each token and layer (of experts, for
    each token and expert that it goes to), half of what a layer of Qwen3-8B keeps, for half of the products of its forward pass: between
    nothing and gradient checkpointing, which does not add to it.
    `log_probs` puts `linear_log_probs` where TRL's trainers (1.16) compute log-probabilities, for every model of the process; what it does
    not serve (a sharded or quantised head) goes to TRL's own. {"recompute": False} keeps the logits of a trained head for the backward
    pass, for speed.
    Not thread-safe against a running forward pass.

    fused_linear_cross_entropy: True, False, or a mapping of options of the loss, which stands for True: `ignore_index`,
    `class_weight`, `reduction`, `label_smoothing`, `softcap`, `lse_square_scale`, `use_token_scaling`, `accum_dtype`,
    `return_z_loss`, `return_token_accuracy` and `return_predicted_tokens` of `linear_cross_entropy`, and `skip_logits`: whether a
    loss comes without logits, in training mode by default. They hold for every call with labels, in eval mode too, unless the
    call itself has an argument of that name: model(input_ids=..., labels=..., label_smoothing=0.1). What the return_ options
    ask for is in the model's output, under the names z_loss, token_accuracy and predicted_tokens.

    Raises TypeError for an option that does not exist, ImportError when transformers is absent or its version does not fit.
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
