"""The functions that users call: apply the layers to Qwen3 and Qwen3-MoE, inspect them, and remove them."""

from .shared.hf import patching
from .shared.hf.interface import Interface
from .targets import FAMILIES


def apply(rms_norm=True, swiglu=True, rope=True, fused_linear_cross_entropy=True, decoder_layer=True, attention=True, unpad=True,
          experts=True, keep_attention=False, recompute_mlp=False, log_probs=True):
    """Puts the layers on transformers' Qwen3 and Qwen3-MoE classes: models that exist and models made later use them.

    After the call exactly the operations given as True are active. The last call wins, also over `kernelize`. Not thread-safe against a
    running forward pass.

    Args:
        rms_norm: the norms.
        swiglu: the MLP.
        rope: the rotary embedding.
        fused_linear_cross_entropy: the loss without logits: a model in training mode that gets labels returns it and no logits. True,
            False, or a mapping of options, which stands for True: `ignore_index`, `class_weight`, `reduction`, `label_smoothing`,
            `softcap`, `lse_square_scale`, `use_token_scaling`, `accum_dtype`, `return_z_loss`, `return_token_accuracy` and
            `return_predicted_tokens` of `linear_cross_entropy`, and `skip_logits`: whether a loss comes without logits, in training mode
            by default. They hold for every call with labels, in eval mode too, unless the call itself has an argument of that name:
            model(input_ids=..., labels=..., label_smoothing=0.1). What the return_ options ask for is in the model's output, under the
            names z_loss, token_accuracy and predicted_tokens.
        decoder_layer: the fused layer, which takes effect where `rms_norm`, `swiglu` and `rope` are all on.
        attention: on a GPU, attention of ours from the model's next step on, where it has the "sdpa" that transformers chooses by default.
            Packed and padded batches and sliding windows run in kernels of ours, at the cost of the tokens that are seen; one sequence a
            row without padding goes to SDPA as before, and so do batches whose padding may be read. An implementation that was asked for
            by name is kept, as far as that can be told (docs/options.md).
        unpad: skips a batch's padding in the whole decoder if no result shows it: with that attention, a loss without logits, no cache
            (use_cache=False, as Trainer has it), no label at a padded position, and no hooks on the decoder's parts.
        experts: Qwen3-MoE's experts in grouped GEMMs, which the fused decoder layer joins with the router and the norm in front of it. An
            implementation that the user chose (`set_experts_implementation`) runs in their place.
        keep_attention: with gradient checkpointing, each decoder layer's attention runs once, and the backward pass computes the rest of
            the layer again. Attention's output stays in memory, heads * head_dim numbers and a float32 a head for each token and layer.
            For attention of ours and PyTorch's ("sdpa") without dropout.
        recompute_mlp: without gradient checkpointing, the backward pass makes gate and up of the fused decoder layer's MLP, or those of
            the experts, again instead of keeping them, with the same bits. It saves 2 * intermediate_size numbers for each token and layer
            (of experts, for each token and expert that it goes to), half of what a layer of Qwen3-8B keeps, for half of the products of
            its forward pass: between nothing and gradient checkpointing, which does not add to it.
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
