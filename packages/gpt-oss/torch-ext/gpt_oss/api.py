"""What a user calls to put the layers on GPT-OSS, to see them there, and to take them off again."""

from .decoder_layer import FLEX
from .shared.hf import patching
from .targets import TARGETS


def apply(rms_norm=True, experts=True, rope=True, fused_linear_cross_entropy=True, decoder_layer=True, attention=False):
    """Puts the layers on transformers' GPT-OSS classes: models that exist and models made later use them.

    After the call exactly the operations given as True are active. With `fused_linear_cross_entropy` a model in training mode
    that gets labels returns the loss and no logits. `decoder_layer` joins the first residual addition with the norm behind it, so
    it takes effect where `rms_norm` is on. `attention`: models that train on a GPU with eager attention change to flex_attention, at
    their next step; it needs `fused_linear_cross_entropy`. Not thread-safe against a running forward pass.

    Raises ImportError when transformers is absent or its version does not fit, ValueError for `attention` without
    `fused_linear_cross_entropy`.
    """
    if attention and not fused_linear_cross_entropy:
        raise ValueError("attention is True and fused_linear_cross_entropy is False, expected both: the layer of the causal LM changes it")
    patching.patch_classes(
        TARGETS,
        {
            "rms_norm": rms_norm,
            "experts": experts,
            "rope": rope,
            "fused_linear_cross_entropy": fused_linear_cross_entropy,
            "decoder_layer": decoder_layer and rms_norm,
        },
    )
    setattr(patching.modeling_of_transformers(TARGETS).GptOssForCausalLM, FLEX, bool(attention))


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
