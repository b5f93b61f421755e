"""What the layers do: the Hub allows a layer class nothing but `forward`."""

import torch
from torch import nn
from torch.nn import functional

from .norms import rms_norm
from .shared.hf.parts.weights import is_plain
from .shared.ops.common import autocasts
from .shared.ops.gated_activation import geglu, swiglu, swiglu_packed
from .shared.ops.group_norm import group_norm
from .shared.ops.layer_norm import layer_norm

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


def rms_norm_forward(module, x, offset=0.0, casting="llama"):
    return rms_norm(x, module.weight, eps_of(module), offset, casting)


def gated_mlp_forward(module, x):
    return module.down_proj(gated(module, module.gate_proj(x), module.up_proj(x)))


def packed_mlp_forward(module, x):
    return module.down_proj(packed(module, module.gate_up_proj(x)))


def _takes(x, *parameters) -> bool:
    """Tells whether a norm of torch.nn goes to the operations: where its parameters have x's dtype, as PyTorch asks, and autocast, which
    computes norms in float32, is off."""
    return is_plain(x) and not autocasts(x.device) and all(p is None or (is_plain(p) and p.dtype == x.dtype) for p in parameters)


def torch_rms_norm_forward(module, x):
    if len(module.normalized_shape) != 1 or module.eps is None or not _takes(x, module.weight):
        return functional.rms_norm(x, module.normalized_shape, module.weight, module.eps)
    return rms_norm(x, module.weight, module.eps, 0.0, "gemma")


def layer_norm_forward(module, x):
    if not _takes(x, module.weight, module.bias):
        return functional.layer_norm(x, module.normalized_shape, module.weight, module.bias, module.eps)
    return layer_norm(x, module.weight, module.bias, module.eps, module.normalized_shape)


def group_norm_forward(module, x):
    if not _takes(x, module.weight, module.bias):
        return functional.group_norm(x, module.num_groups, module.weight, module.bias, module.eps)
    return group_norm(x, module.num_groups, module.weight, module.bias, module.eps)
