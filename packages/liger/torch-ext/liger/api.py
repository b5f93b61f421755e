"""Puts the layers for torch.nn's norms on a model, and takes them off again."""

from types import MethodType

from torch import nn

from . import layers

NORMS = {nn.LayerNorm: layers.LayerNorm, nn.GroupNorm: layers.GroupNorm, nn.RMSNorm: layers.TorchRMSNorm}


def kernelize(model: nn.Module) -> nn.Module:
    """Puts the layers on the torch.nn.LayerNorm, GroupNorm and RMSNorm of a model, in place, and returns it.

    Subclasses of these, and modules that have a forward of their own, are left alone. Vision and diffusion models are made of them. Raises
    TypeError when the model has none.
    """
    found = [m for m in model.modules() if type(m) in NORMS and ("forward" not in vars(m) or _is_ours(m))]
    if not found:
        names = ", ".join(cls.__name__ for cls in NORMS)
        raise TypeError(f"model is a {type(model).__name__} without any of torch.nn's {names}, expected a model that has them")
    for module in found:
        vars(module)["forward"] = MethodType(NORMS[type(module)].forward, module)
    return model


def reset(model: nn.Module) -> nn.Module:
    """Takes off what `kernelize` put on a model, and returns it."""
    for module in model.modules():
        if type(module) in NORMS and _is_ours(module):
            del vars(module)["forward"]
    return model


def _is_ours(module) -> bool:
    forward = getattr(vars(module).get("forward"), "__func__", None)
    return forward is NORMS[type(module)].forward
