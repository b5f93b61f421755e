"""What a user calls to put the layers on Qwen3, to see them there, and to take them off again."""

from .shared.hf import patching
from .targets import TARGETS


def apply(rms_norm=True, swiglu=True, rope=True, fused_linear_cross_entropy=True, decoder_layer=True):
    """Puts the layers on transformers' Qwen3 classes: models that exist and models made later use them.

    After the call exactly the operations given as True are active. With `fused_linear_cross_entropy` a model in training mode
    that gets labels returns the loss and no logits. `decoder_layer` fuses across the others, so it takes effect where `rms_norm`,
    `swiglu` and `rope` are all on. Not thread-safe against a running forward pass.

    fused_linear_cross_entropy: True, False, or a mapping of options of the loss, which stands for True: `ignore_index`,
    `class_weight`, `reduction`, `label_smoothing`, `softcap`, `lse_square_scale`, `use_token_scaling`, `accum_dtype`,
    `return_z_loss`, `return_token_accuracy` and `return_predicted_tokens` of `linear_cross_entropy`, and `skip_logits`: whether a
    loss comes without logits, in training mode by default. They hold for every call with labels, in eval mode too, unless the
    call itself has an argument of that name: model(input_ids=..., labels=..., label_smoothing=0.1). What the return_ options
    ask for is in the model's output, under the names z_loss, token_accuracy and predicted_tokens.

    Raises TypeError for an option that does not exist, ImportError when transformers is absent or its version does not fit.
    """
    patching.patch_classes(
        TARGETS,
        {
            "rms_norm": rms_norm,
            "swiglu": swiglu,
            "rope": rope,
            "fused_linear_cross_entropy": fused_linear_cross_entropy,
            "decoder_layer": decoder_layer and rms_norm and swiglu and rope,
        },
    )


def kernelize(model, mode=None):
    """Puts the layers on one model, in place, and returns it. Other models, also later ones, are left alone.

    model: one of transformers, with or without a head, alone or inside another module (PEFT). mode: a `kernels.Mode`;
    the layers serve all of them, so it changes nothing. For torch.nn.DataParallel use `apply`: its replicas would call the
    forwards of the model that they were copied from.

    A part whose forward someone else replaced (tensor parallelism does it with q_norm and k_norm) keeps that, with a warning.

    Raises TypeError when the model has none of the layers that this package stands in for, RuntimeError when not all operations
    could be put on it, and
    ImportError when transformers is absent or its version does not fit.
    """
    return patching.kernelize(TARGETS, model, mode)


def mapping(mode=None):
    """The layers for `kernels.use_kernel_mapping` or `kernels.register_kernel_mapping`, for CPUs and for GPUs of compute
    capability 8.0 to 12.1. mode: the only `kernels.Mode` that they are for; by default they are for all.

    Also gives the Hub's names to those of transformers' classes that have none, so `kernels.kernelize` finds them.
    Warns when it cannot find all: where transformers and `kernels` do not fit, it passes the rotary embedding by.

    Raises ImportError when transformers or `kernels` is absent or its version does not fit.
    """
    return patching.mapping(TARGETS, mode)


def get_patched_ops():
    """Lists the operations that `apply` has put on transformers' classes, by the names of its arguments."""
    return patching.get_patched_ops(TARGETS)


def reset():
    """Puts everything back: transformers' classes and functions, and every module that has a forward of ours.

    Also undoes what `kernelize`, `mapping` and `kernels.kernelize` with our mapping did. Does nothing where nobody imported them.
    """
    patching.reset(TARGETS)
