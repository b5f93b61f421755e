"""Modules under Liger-Kernel's names that have parameters or code of their own. The others are rows of `liger_names`."""

import warnings
from typing import Callable, Optional, Tuple

import torch
from torch import nn

from . import liger_calls as calls
from .shared.ops import divergence
from .shared.ops.arguments import fail
from .shared.ops.dyt import dyt
from .shared.ops.gated_activation import swiglu, swiglu_packed
from .shared.ops.layer_norm import layer_norm
from .shared.ops.neighborhood_attention import neighborhood_attention
from .shared.ops.poly_norm import poly_norm

SILU = ("silu", "swish")
GELU = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python", "gelu_python_tanh", "gelu_accurate")


def _initial(size, init_fn):
    if init_fn not in ("ones", "zeros"):
        fail("init_fn", repr(init_fn), "'ones' or 'zeros'")
    return nn.Parameter(getattr(torch, init_fn)(size))


class LigerRMSNorm(nn.Module):
    def __init__(
        self, hidden_size, eps=1e-06, offset=0.0, casting_mode="llama", init_fn="ones", in_place=True, row_mode=None,
        elementwise_affine=True
    ):
        super().__init__()
        self.weight = _initial(hidden_size, init_fn) if elementwise_affine else None
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.row_mode, self.elementwise_affine = in_place, row_mode, elementwise_affine

    def forward(self, hidden_states):
        return calls.rms_norm(hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode)

    def extra_repr(self):
        return f"eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class LigerFusedAddRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-06, offset=0.0, casting_mode="llama", init_fn="ones", in_place=False):
        super().__init__()
        self.weight = _initial(hidden_size, init_fn)
        self.variance_epsilon, self.offset, self.casting_mode, self.in_place = eps, offset, casting_mode, in_place

    def forward(self, hidden_states, residual):
        return calls.fused_add_rms_norm(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerLayerNorm(nn.Module):
    """Starts as Liger's: `bias=True` fills it with normal random numbers, and without it there is one all the same, trainable, of zeros."""

    def __init__(self, hidden_size, eps=1e-06, bias=False, init_fn="ones", impl=None, mode=None, backend=None):
        super().__init__()
        self.weight = _initial(hidden_size, init_fn)
        self.bias = nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps

    def forward(self, hidden_states):
        return layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self):
        return f"{self.hidden_size}, eps={self.eps}"


class LigerGroupNorm(nn.Module):
    """Takes what Liger's takes: its bias is as LigerLayerNorm's, and the channels come before the groups."""

    def __init__(self, num_channels, num_groups, eps=1e-06, bias=False, init_fn="ones"):
        super().__init__()
        if num_channels % num_groups:
            fail("num_channels", num_channels, f"a multiple of num_groups, {num_groups}")
        self.num_channels, self.num_groups, self.eps, self.variance_epsilon = num_channels, num_groups, eps, eps
        self.weight = _initial(num_channels, init_fn)
        self.bias = nn.Parameter(torch.randn(num_channels) if bias else torch.zeros(num_channels))

    def forward(self, hidden_states):
        return calls.group_norm(hidden_states, self.weight, self.bias, self.num_channels, self.num_groups,
                                            self.variance_epsilon)

    def extra_repr(self):
        return f"num_channels={self.num_channels}, num_groups={self.num_groups}, eps={self.eps}"


class LigerPolyNorm(nn.Module):
    def __init__(self, eps=1e-06, in_place=True):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.full((3,), 1 / 3)), nn.Parameter(torch.tensor(1.0))
        self.variance_epsilon, self.in_place = eps, in_place

    def forward(self, hidden_states):
        return poly_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)


class LigerDyT(nn.Module):
    def __init__(self, hidden_size, beta=True, init_alpha=0.5):
        super().__init__()
        self.hidden_size, self.init_alpha = hidden_size, init_alpha
        self.alpha, self.gamma = nn.Parameter(torch.full((1,), float(init_alpha))), nn.Parameter(torch.ones(hidden_size))
        self.beta = nn.Parameter(torch.zeros(hidden_size)) if beta else None

    def forward(self, x):
        return dyt(x, self.alpha, self.gamma, self.beta)


class LigerKLDIVLoss(nn.KLDivLoss):
    def __init__(self, eps=1e-10, *args, **kwargs):
        super().__init__(*args, **kwargs)
        divergence.check_reduction(self.reduction)
        divergence.check_numbers(eps=eps)
        self.eps = eps

    def forward(self, y_pred, y_true):
        return calls.kl_div(y_pred, y_true, self.reduction, self.log_target, self.eps)


def _check_activation(config, activations, name="hidden_act"):
    activation = getattr(config, name, None)
    if activation not in activations:
        fail(f"config.{name}", repr(activation), f"one of {', '.join(filter(None, activations))}")


class _GatedMLP(nn.Module):
    """gate_proj, up_proj and down_proj, of a configuration's sizes."""

    activations: Tuple[Optional[str], ...] = SILU

    def __init__(self, config, intermediate_size=None, bias=False):
        super().__init__()
        self.config, self.hidden_size = config, config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)
        self._check_config(config)

    def _check_config(self, config):
        _check_activation(config, self.activations)


class LigerSwiGLUMLP(_GatedMLP):
    def __init__(self, config, intermediate_size=None):
        super().__init__(config, intermediate_size)

    def forward(self, x):
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    pass


class LigerSwiGLUMLPForMuseGlimmer(LigerSwiGLUMLP):
    """For configurations that say hidden_activation."""

    def __init__(self, config):
        super().__init__(config)

    def _check_config(self, config):
        _check_activation(config, SILU, "hidden_activation" if getattr(config, "hidden_activation", None) else "hidden_act")


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    def __init__(self, config, layer_idx=None, is_shared_mlp=False):
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerFalconH1SwiGLUMLP(_GatedMLP):
    """Multiplies by the configuration's `mlp_multipliers`, of the gate before its activation and of the activation's product."""

    def __init__(self, config):
        super().__init__(config, bias=getattr(config, "mlp_bias", False))
        self.gate_multiplier, self.down_multiplier = map(float, config.mlp_multipliers)

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(swiglu(gate, up, self.gate_multiplier, self.down_multiplier))


class LigerPhi3SwiGLUMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.hidden_size, self.intermediate_size = config, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)
        _check_activation(config, SILU)

    def forward(self, x):
        return self.down_proj(swiglu_packed(self.gate_up_proj(x)))


class LigerBlockSparseTop2MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        _check_activation(config, SILU)

    def forward(self, x):
        return self.w2(swiglu(self.w1(x), self.w3(x)))


class LigerGEGLUMLP(_GatedMLP):
    """Computes GELU by tanh, whatever activation the configuration names, as Liger's; one that is no GELU gets a warning."""

    def __init__(self, config):
        super().__init__(config)

    def _check_config(self, config):
        activation = getattr(config, "hidden_act", None)
        if activation not in (*GELU, None):
            message = f"config.hidden_act is {activation!r}, and {type(self).__name__} computes GELU by tanh all the same, as Liger's does"
            warnings.warn(message, UserWarning, stacklevel=4)

    def forward(self, x):
        return self.down_proj(calls.gelu_mul(self.gate_proj(x), self.up_proj(x)))


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """Twice as wide in the layers that share keys and values, where the configuration says use_double_wide_mlp."""

    def __init__(self, config, layer_idx=None):
        shared = getattr(config, "num_kv_shared_layers", 0)
        first = getattr(config, "num_hidden_layers", 0) - shared
        doubles = getattr(config, "use_double_wide_mlp", False) and shared > 0 and layer_idx is not None and layer_idx >= first
        _GatedMLP.__init__(self, config, config.intermediate_size * (2 if doubles else 1))


class _TiledMLP(_GatedMLP):
    """An MLP that runs on a part of the tokens at a time. product: of gate and up."""

    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def __init__(self, config, num_shards=None):
        super().__init__(config)
        self.num_shards = num_shards

    def _mlp_forward(self, module, x):
        return module.down_proj(self.product(module.gate_proj(x), module.up_proj(x)))

    def forward(self, x):
        return calls.apply_tiled_mlp(self._mlp_forward, self, x, self.num_shards)


class LigerTiledSwiGLUMLP(_TiledMLP):
    activations = (*SILU, None)
    product = staticmethod(swiglu)


class LigerTiledGEGLUMLP(_TiledMLP):
    activations = (*GELU, None)
    product = staticmethod(calls.gelu_mul)

class LigerFusedNeighborhoodAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, kernel_size=7, dilation=1, bias=True, dropout=0.0, scale=None):
        super().__init__()
        if hidden_size % num_heads:
            fail("hidden_size", hidden_size, f"a multiple of num_heads, {num_heads}")
        if kernel_size < 1 or kernel_size % 2 == 0:
            fail("kernel_size", kernel_size, "an odd number")
        if dilation < 1:
            fail("dilation", dilation, "1 or more")
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, hidden_size // num_heads
        self.kernel_size, self.dilation, self.dropout_p = kernel_size, dilation, dropout
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(4))
        self.dropout = nn.Dropout(dropout) if dropout > 0 else None

    def forward(self, hidden_states, attention_mask=None):
        if attention_mask is not None:
            raise NotImplementedError("attention_mask is given, expected None: a token sees its neighbours")
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (p(hidden_states).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for p in projections)
        found = neighborhood_attention(q, k, v, self.kernel_size, self.dilation, self.scale)
        found = found.transpose(1, 2).flatten(2)
        return self.out_proj(found if self.dropout is None else self.dropout(found))


class LigerFusedNeighborhoodAttentionLayer(nn.Module):
    """LigerFusedNeighborhoodAttention of a LayerNorm's output, added to the input."""

    def __init__(self, hidden_size, num_heads, kernel_size=7, dilation=1, bias=True, dropout=0.0, layer_norm_eps=1e-5, scale=None):
        super().__init__()
        self.attention = LigerFusedNeighborhoodAttention(hidden_size, num_heads, kernel_size, dilation, bias, dropout, scale)
        self.layer_norm = nn.LayerNorm(hidden_size, eps=layer_norm_eps)
        self.dropout = nn.Dropout(dropout) if dropout > 0 else None

    def forward(self, hidden_states, attention_mask=None):
        norm = self.layer_norm
        found = self.attention(layer_norm(hidden_states, norm.weight, norm.bias, norm.eps), attention_mask)
        return hidden_states + (found if self.dropout is None else self.dropout(found))


class LigerFusedNeighborhoodAttentionConfig:
    """The arguments of LigerFusedNeighborhoodAttentionLayer."""

    def __init__(
        self, hidden_size=768, num_heads=12, kernel_size=7, dilation=1, bias=True, dropout=0.0, layer_norm_eps=1e-05, scale=None
    ):
        self.hidden_size, self.num_heads, self.kernel_size, self.dilation = hidden_size, num_heads, kernel_size, dilation
        self.bias, self.dropout, self.layer_norm_eps, self.scale = bias, dropout, layer_norm_eps, scale

    def to_dict(self):
        return dict(vars(self))
