"""Functions that the forwards of several layers share: the Hub allows a layer class nothing but `forward`."""

import torch
from torch import nn

from .shared.hf.parts.weights import is_plain
from .shared.ops.autograd import autocasts
from .shared.ops.gated_activation import geglu, swiglu, swiglu_packed

GELU = {"gelu": "none", "gelu_python": "none", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu_pytorch_tanh": "tanh"}
TANH_CLASSES = ("GELUTanh", "NewGELUActivation", "FastGELUActivation", "PytorchGELUTanh")  # of transformers


def activation_of(module):
    """"silu", "tanh" or "none" (GELUs), or None for another activation of an MLP's `act_fn` or of its configuration."""
    function = getattr(module, "act_fn", None)
    if function is None:
        config = getattr(module, "config", None)
        name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
        return "silu" if name in ("silu", "swish") else GELU.get(name or "")
    if isinstance(function, nn.SiLU) or function is nn.functional.silu or type(function).__name__ == "SiLUActivation":
        return "silu"
    if isinstance(function, nn.GELU):
        return function.approximate
    name = type(function).__name__
    return "tanh" if name in TANH_CLASSES else "none" if name == "GELUActivation" else None


def gated(module, gate, up):
    """act(gate) * up with the activation of an MLP."""
    activation = activation_of(module)
    if activation is None or gate.dtype != up.dtype:
        return module.act_fn(gate) * up
    return swiglu(gate, up) if activation == "silu" else geglu(gate, up, activation)


def packed(module, gate_up):
    """act(gate) * up of one tensor whose first half is gate and whose second half is up."""
    if activation_of(module) == "silu":
        return swiglu_packed(gate_up)
    return gated(module, *gate_up.chunk(2, -1))


def eps_of(module) -> float:
    """The epsilon of an RMSNorm of transformers (`variance_epsilon`) or of PyTorch (`eps`, None for the smallest step of the dtype)."""
    eps = getattr(module, "variance_epsilon", None)
    eps = getattr(module, "eps", None) if eps is None else eps
    return torch.finfo(torch.float32).eps if eps is None else eps


def takes(x, *parameters) -> bool:
    """Tells whether a norm of torch.nn goes to the operations: where its parameters have x's dtype, as PyTorch asks, and autocast, which
    computes norms in float32, is off."""
    return is_plain(x) and not autocasts(x.device) and all(p is None or (is_plain(p) and p.dtype == x.dtype) for p in parameters)
