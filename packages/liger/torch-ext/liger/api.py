"""The functions that users call: apply the layers to a model, see what runs on the kernels, and remove them."""

import sys
from collections import Counter
from typing import Optional

from torch import nn

from . import layers
from .back_end import TAKEN
from .shared.hf.parts.binding import BoundForward
from .shared.hf.parts.explanation import Explanation, Reason, explanation_of, no_kernels
from .shared.hf.parts.hub import mapping_of
from .shared.hf.parts.modules import is_marked
from .shared.hf.say import doctor
from .shared.ops.autograd import autocasts

NORMS = {nn.LayerNorm: layers.LayerNorm, nn.GroupNorm: layers.GroupNorm, nn.RMSNorm: layers.TorchRMSNorm}
# Names that transformers gives to classes and functions of its models, beside the layers' own.
HUB_NAMES = {
    "RMSNorm": layers.RMSNorm,
    "RMSNormZeroCentered": layers.GemmaRMSNorm,
    "rotary_pos_emb": layers.RotaryPosEmb,
}
OWN_NAMES = (layers.GatedMLP, layers.PackedMLP, layers.GemmaRMSNorm, layers.ComplexRotaryEmb, layers.MultimodalRotaryPosEmb)
LIBRARIES = (doctor.TORCH, *((name, None, "") for name in ("liger-kernel", "kernels", "transformers", "accelerate", "peft", "trl")))
ADVICE = {
    "device": "move the model to a CUDA device",
    "kernels": "",
    "unpatched": "call kernelize(model)",
    "liger": "call use_in_liger()",
    "replaced": "call kernelize(model) before others replace forwards",
    "autocast": "nothing: PyTorch computes norms in float32 there",
    "subclass": "nothing: it may do something else",
    "dimensions": "",
    "eps": "give it an eps: PyTorch's default depends on the dtype",
}


def kernelize(model: nn.Module) -> nn.Module:
    """Puts the layers on the torch.nn.LayerNorm, GroupNorm and RMSNorm of a model, in place, and returns it.

    Vision and diffusion models are made of them. Subclasses, and modules whose forward was replaced, are left alone. Parameters,
    hooks, state dicts, copies and pickles stay as they were. Raises TypeError when the model has none of these modules.
    """
    found = [module for module in model.modules() if type(module) in NORMS and ("forward" not in vars(module) or _runs_ours(module))]
    if not found:
        names = ", ".join(cls.__name__ for cls in NORMS)
        raise TypeError(f"model is a {type(model).__name__} without any of torch.nn's {names}, expected a model that has them")
    for module in found:
        vars(module)["forward"] = BoundForward(NORMS[type(module)].forward, module)
    return model


def reset(model: nn.Module) -> nn.Module:
    """Takes off what `kernelize` put on a model, and returns it."""
    for module in model.modules():
        if type(module) in NORMS and _runs_ours(module):
            del vars(module)["forward"]
    return model


def explain(model: nn.Module) -> Explanation:
    """Says which norms of a model run on the kernels, and of the rest why they do not and what to do about it; also of Liger, where it is
    loaded.

    Returns an `Explanation`: printed, a table; its `rows` have the fields `part`, `count`, `fused`, `reason` and `advice`. The answer holds
    for the state in which the model is now (its device, its forwards, autocast), so ask where the training step would be. Raises TypeError
    when the model has none of torch.nn's norms and Liger is not loaded.
    """
    found: Counter = Counter()
    devices = set()
    for module in model.modules():
        if isinstance(module, tuple(NORMS)):
            found[type(module).__name__, _why_not(module)] += 1
            devices |= {parameter.device for parameter in module.parameters()}
    ops = sys.modules.get("liger_kernel.ops")
    if ops is not None:
        found["Liger's operations", None if TAKEN in vars(ops) else Reason("liger", "Liger's own")] += 1
        devices |= {parameter.device for parameter in model.parameters()}
    if not found:
        names = ", ".join(cls.__name__ for cls in NORMS)
        raise TypeError(f"model is a {type(model).__name__} without any of torch.nn's {names}, expected a model that has them")
    for device in sorted(devices, key=str):
        found[f"kernels on {device}", no_kernels(device)] += 1
    return explanation_of(found, ADVICE)


def report(check=False) -> doctor.Report:
    """Looks at this machine: the GPUs and which kernels serve them, the driver, and versions, with a line of advice.

    check: compares every operation on the current GPU, forward and backward and in each dtype, with float64 on the CPU, too; in about a
    minute. Returns a `Report`: printed, what belongs in a bug report; its `findings` have the fields `name`, `found`, `fits` and
    `advice`. `python -m` with this package's name prints it too, with `--check` for `check`.
    """
    return doctor.report(__package__, LIBRARIES, check)


def mapping(mode=None) -> dict:
    """Makes the mapping of the layers for `kernels.use_kernel_mapping` or `kernels.register_kernel_mapping`, for CPUs and for GPUs of
    compute capability 8.0 to 12.1.

    "RMSNorm", "RMSNormZeroCentered" and "rotary_pos_emb" are what transformers calls its own; classes of yours get one of the other layers
    by `kernels.use_kernel_forward_from_hub("GatedMLP")`. The norms of torch.nn are not in it: `kernels` would give their subclasses the
    same forward, whatever those do; `kernelize` does not. mode: the only `kernels.Mode` that they are for; by default they are for all.

    Raises ImportError when `kernels` is absent or its version does not fit.
    """
    return mapping_of({**HUB_NAMES, **{layer.__name__: layer for layer in OWN_NAMES}}, mode)


def _runs_ours(module) -> bool:
    return is_marked(getattr(vars(module).get("forward"), "__func__", None))


def _why_not(module) -> Optional[Reason]:
    """Why a norm does not run on the kernels; None where it does."""
    if type(module) not in NORMS:
        return Reason("subclass", "it is a subclass of torch.nn's")
    if not _runs_ours(module):
        if "forward" in vars(module):
            return Reason("replaced", "its forward was replaced")
        return Reason("unpatched", "torch's own forward")
    if isinstance(module, nn.RMSNorm) and len(module.normalized_shape) != 1:
        return Reason("dimensions", "it normalizes over several dimensions: torch's own operation")
    if isinstance(module, nn.RMSNorm) and module.eps is None:
        return Reason("eps", "its eps is None: torch's own operation")
    parameter = next(module.parameters(), None)
    if parameter is not None and autocasts(parameter.device):
        return Reason("autocast", "autocast is on: torch's own operation")
    return None
