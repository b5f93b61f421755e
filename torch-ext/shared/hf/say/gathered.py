"""Shows `explain` a model that FSDP2 shards as it is while its units run: with whole weights, of the dtype in which they are gathered.

Between two passes each parameter is a DTensor, which no layer of ours computes with. Nothing is gathered here, since the other processes
would have to take part: each weight is stood for by one of its shape without memory, FSDP2's own after a first pass. Before that each is
allocated and let go again. The attributes are FSDP2's, which no public function of PyTorch tells; where a release has others, `explain`
says what it sees.
"""

import contextlib
from typing import Any, Iterator, Optional, Tuple

import torch
from torch import nn

from ...runtime.device import PLAIN
from ..parts.modules import without_fsdp2

__all__ = ["as_in_a_pass"]


@contextlib.contextmanager
def as_in_a_pass(model: nn.Module) -> Iterator[None]:
    """Gives the modules of a model that FSDP2 shards parameters that stand for the whole ones, until the context ends."""
    try:
        found = list(_whole_parameters(model))
    except AttributeError:  # another release
        found = []
    before = [owner[name] for owner, name, _ in found]
    try:
        for owner, name, whole in found:
            owner[name] = whole
        yield
    finally:
        for (owner, name, _), parameter in zip(found, before):
            owner[name] = parameter


def _whole_parameters(model: nn.Module) -> Iterator[Tuple[dict, str, nn.Parameter]]:
    """Yields (the parameters of a module, a name among these, what stands for the whole one)."""
    units: Any = [each for each in model.modules() if without_fsdp2(type(each)) is not type(each)] if isinstance(model, nn.Module) else []
    for state in (unit._get_fsdp_state() for unit in units):
        groups = getattr(state, "_fsdp_param_groups", None) or filter(None, [getattr(state, "_fsdp_param_group", None)])
        for each, dtype in [(each, group.mp_policy.param_dtype) for group in groups for each in group.fsdp_params]:
            place, whole = each._module_info, _whole(each, dtype)
            if whole is not None:
                yield place.module._parameters, place.param_name, whole
                yield from ((module._parameters, name, whole) for module, name in zip(place.shared_modules, place.shared_param_names))


def _whole(each: Any, dtype: Optional[torch.dtype]) -> Optional[nn.Parameter]:
    """Returns a parameter with the shape, dtype and device that a sharded one has while FSDP2 gathers it. Returns None if it is not an
    ordinary tensor even then (tensor parallelism shards it too, or it is a subclass), or if it is gathered now. dtype: that FSDP2 gathers
    in; None for the parameter's own."""
    place, sharded, whole = each._module_info, each.sharded_param, getattr(each, "_unsharded_param", None)
    held = place.module._parameters.get(place.param_name)
    if each.is_dtensor or held is None or held is whole or type(sharded._local_tensor) not in PLAIN:
        return None
    if whole is None:
        device = sharded.device if sharded.is_meta else each.device
        whole = torch.empty(sharded.shape, dtype=dtype or sharded.dtype, device=device)
        if not sharded.is_meta:
            whole.untyped_storage().resize_(0)
    return nn.Parameter(whole.detach(), requires_grad=sharded.requires_grad)
