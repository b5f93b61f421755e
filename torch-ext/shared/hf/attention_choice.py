"""Who computes a model's attention: our name among transformers' implementations, and which models get it without asking."""

import sys
from typing import Optional

import torch

from ..ops.attention import HEAD_DIMS
from ..runtime.device import kernels_run_on
from .attention import attention_forward
from .masks import MASKING, TRACEABLE, visible_mask
from .modules import SAVED

ATTENTION = "bastile"  # the name of our implementation among transformers'
KEPT = SAVED + "attention"  # on a model: the implementation that it had before `choose_attention`
_before: dict = {}  # by its class, what an interface of transformers had under our name: the implementation of another package of ours


def _interfaces():
    """(interface of transformers, our function) of those that are imported."""
    found = ("AttentionInterface", "transformers.modeling_utils", attention_forward), ("AttentionMaskInterface", MASKING, visible_mask)
    return [(getattr(sys.modules[module], name), ours) for name, module, ours in found if module in sys.modules]


def register_attention(*configurations: type) -> None:
    """Makes attn_implementation="bastile" a choice for every model of transformers. configurations: the classes of those whose masks
    are known to be causal, so that torch.compile needs not look into them."""
    TRACEABLE.update(configurations)
    for interface, ours in _interfaces():
        before = interface._global_mapping.get(ATTENTION)
        if before is not ours:
            _before[interface] = before
            interface.register(ATTENTION, ours)


def unregister_attention() -> None:
    """Puts back what `register_attention` replaced, unless another package has taken its place since."""
    for interface, ours in _interfaces():
        if interface._global_mapping.get(ATTENTION) is ours:
            before = _before.pop(interface, None)
            if before is None:
                del interface._global_mapping[ATTENTION]
            else:
                interface.register(ATTENTION, before)


def give_attention_back(module) -> None:
    """Gives a model the implementation that it had before `choose_attention`."""
    kept = vars(module).pop(KEPT, None)
    if kept is not None and module.config._attn_implementation == ATTENTION:
        module.set_attn_implementation(kept)


def head_dim_of(config) -> Optional[int]:
    """The size of a head by a model's configuration, None where it says nothing of heads."""
    found, heads = getattr(config, "head_dim", None), getattr(config, "num_attention_heads", 0)
    return config.hidden_size // heads if found is None and heads else found


def choose_attention(model) -> None:
    """Gives a model on a GPU whose kernels run our implementation in the place of the one that transformers chooses by default; any other
    that it has, it keeps."""
    config, replaces = model.config, "sdpa" if model._supports_sdpa else "eager"
    if config._attn_implementation != replaces or head_dim_of(config) not in HEAD_DIMS:
        return
    weight = next(model.parameters(), None)
    if weight is None or weight.is_meta or not kernels_run_on(torch.empty(0, device=weight.device)):
        return
    vars(model)[KEPT] = replaces
    model.set_attn_implementation(ATTENTION)
