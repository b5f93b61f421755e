"""Liger-Kernel's names, with the arguments, order and defaults of its version 0.8.5, over the operations of this package.

`from liger_kernel.transformers import LigerRMSNorm` becomes an import from here, and Liger need not be installed. Three kinds of names:
`LigerXFunction` with `.apply` (Liger's autograd functions, in `liger_functions`), `liger_x` (its functions), and `LigerX` (its modules).

What Liger's arguments `in_place`, `row_mode`, `BLOCK_SIZE`, `impl`, `mode`, `backend` and `compute_params` choose does not exist here:
nothing of the caller's is ever overwritten, and there is one implementation. They are accepted and have no effect. What Liger has beyond
the 22 operations (LigerExperts, its fused mixture of experts, among it) is not here.
"""

import warnings
from typing import NamedTuple, Optional, Tuple

import torch
from torch import nn

from .liger_functions import (
    LigerCrossEntropyFunction,
    LigerDyTFunction,
    LigerFusedAddRMSNormFunction,
    LigerFusedGateUpSiLUMulFunction,
    LigerFusedLinearCrossEntropyFunction,
    LigerFusedLinearJSDFunction,
    LigerFusedNeighborhoodAttentionFunction,
    LigerGELUMulFunction,
    LigerGroupNormFunction,
    LigerJSDFunction,
    LigerKLDivLossFunction,
    LigerLayerNormFunction,
    LigerLlama4RopeFunction,
    LigerPolyNormFunction,
    LigerQwen2VLMRopeFunction,
    LigerRMSNormFunction,
    LigerRopeFunction,
    LigerSiLUMulFunction,
    LigerSoftmaxFunction,
    LigerSparsemaxFunction,
    LigerTiledMLPFunction,  # noqa: F401
    LigerTVDLossFunction,
    apply_tiled_mlp,
)
from .shared.ops import divergence
from .shared.ops.common import fail
from .shared.ops.cross_entropy import check_numbers, check_reduction
from .shared.ops.llama4_rope import rotary_complex

SILU = ("silu", "swish")
GELU = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python", "gelu_python_tanh", "gelu_accurate")


class CrossEntropyOutput(NamedTuple):
    """What the cross entropies return where more than the loss is asked for."""

    loss: torch.Tensor
    z_loss: Optional[torch.Tensor] = None
    token_accuracy: Optional[torch.Tensor] = None
    predicted_tokens: Optional[torch.Tensor] = None


def _output(four):
    return four[0] if four[1:] == (None, None, None) else CrossEntropyOutput(*four)


# ---------------------------------------------------------------- functions
def liger_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    return LigerRMSNormFunction.apply(X, W, eps, offset, casting_mode)


def liger_fused_add_rms_norm(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    return LigerFusedAddRMSNormFunction.apply(X, R, W, eps, offset, casting_mode)


def liger_layer_norm(X, W, B, eps):
    return LigerLayerNormFunction.apply(X, W, B, eps)


def liger_group_norm(X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps):
    return LigerGroupNormFunction.apply(X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps)


def liger_poly_norm(X, W, B, eps=1e-06, in_place=True):
    return LigerPolyNormFunction.apply(X, W, B, eps)


def liger_dyt(x, alpha, gamma, beta):
    return LigerDyTFunction.apply(x, alpha, gamma, beta)


def liger_softmax(x):
    return LigerSoftmaxFunction.apply(x)


def liger_sparsemax(input, dim=-1):
    return LigerSparsemaxFunction.apply(input, dim)


def liger_swiglu(a, b):
    return LigerSiLUMulFunction.apply(a, b)


def liger_geglu(a, b):
    return LigerGELUMulFunction.apply(a, b)


def liger_rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    return LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim)


def liger_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    return LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim)


def liger_rotary_pos_emb_gpt_oss(q, k, cos, sin):
    """cos, sin: [batch or 1, tokens, head_dim / 2], for whole heads."""
    return LigerRopeFunction.apply(q, k, cos, sin, None, 1, q.shape[-1])


def liger_rotary_pos_emb_vision(q, k, cos, sin):
    """q, k: [tokens, heads, head_dim]; cos, sin: [tokens, head_dim]."""
    q, k = (x.unsqueeze(0).transpose(1, 2) for x in (q, k))
    turned = LigerRopeFunction.apply(q, k, cos, sin)
    return tuple(x.transpose(1, 2).squeeze(0) for x in turned)


def apply_liger_llama4_rope_full(modeling_module):
    """Puts the two functions below into a module that has transformers' names for them."""
    modeling_module.apply_rotary_emb = liger_llama4_text_rotary_pos_emb
    modeling_module.vision_apply_rotary_emb = liger_llama4_vision_rotary_pos_emb


def liger_llama4_text_rotary_pos_emb(xq, xk, freqs_cis):
    return LigerLlama4RopeFunction.apply(xq, xk, freqs_cis)


def liger_llama4_vision_rotary_pos_emb(query, key, freqs_ci):
    """freqs_ci: complex [tokens, head_dim / 2], with dimensions of 1 before and behind the tokens; or real, for a complex buffer that a
    cast has taken the imaginary part of: then it multiplies."""
    freqs = freqs_ci.to(query.device).reshape(-1, query.shape[-1] // 2)
    if not freqs.is_complex():
        freqs = torch.complex(freqs.float(), torch.zeros_like(freqs, dtype=torch.float32))
    return rotary_complex(query, key, freqs)


def liger_qwen2vl_mrope(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    return LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, mrope_section, unsqueeze_dim)


def liger_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    return LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, mrope_section, unsqueeze_dim)


def liger_cross_entropy(
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
    lse_square_scale=0.0,
    softcap=None,
    return_z_loss=False,
    return_token_accuracy=False,
    return_predicted_tokens=False,
):
    """Raises ValueError for size_average or reduce, which Liger ignores: say it with `reduction`."""
    _refuse_legacy(size_average, reduce, None)
    options = ignore_index, lse_square_scale, label_smoothing, reduction, softcap
    results = return_z_loss, return_token_accuracy, return_predicted_tokens
    return _output(LigerCrossEntropyFunction.apply(input, target, weight, *options, *results))


def _refuse_legacy(size_average, reduce, default):
    for name, value in (("size_average", size_average), ("reduce", reduce)):
        if value is not default:
            fail(name, value, f"{default}, which stands for nothing: say it with reduction")


def liger_fused_linear_cross_entropy(
    input,
    weight,
    target,
    bias=None,
    ce_weight=None,
    ignore_index=-100,
    lse_square_scale=0.0,
    label_smoothing=0.0,
    reduction="mean",
    softcap=None,
    return_z_loss=False,
    accum_dtype=None,
    use_token_scaling=False,
    return_token_accuracy=False,
    return_predicted_tokens=False,
    chunk_mem_const=1,
):
    options = ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss, accum_dtype, use_token_scaling
    more = return_token_accuracy, return_predicted_tokens
    return _output(LigerFusedLinearCrossEntropyFunction.apply(input, weight, target, bias, ce_weight, *options, *more))


def liger_kl_div(input, target, size_average=True, reduce=True, reduction="mean", log_target=False, eps=1e-10):
    """Raises ValueError for size_average or reduce, which Liger ignores: say it with `reduction`."""
    _refuse_legacy(size_average, reduce, True)
    return LigerKLDivLossFunction.apply(input, target, reduction, log_target, eps)


def liger_jsd(input, target, shift_labels=None, beta=0.5, ignore_index=-100):
    return LigerJSDFunction.apply(input, target, shift_labels, beta, ignore_index)


def liger_tvd(input, target, shift_labels=None, reduction="mean", ignore_index=-100):
    return LigerTVDLossFunction.apply(input, target, shift_labels, reduction, ignore_index)


def liger_fused_linear_jsd(
    student_input,
    student_weight,
    teacher_input,
    teacher_weight,
    shift_labels=None,
    jsd_beta=0.5,
    ignore_index=-100,
    temperature=1.0,
    accum_dtype=None,
):
    tensors = student_input, student_weight, teacher_input, teacher_weight, shift_labels
    return LigerFusedLinearJSDFunction.apply(*tensors, jsd_beta, ignore_index, temperature, accum_dtype)


def liger_fused_neighborhood_attention(query, key, value, kernel_size=7, dilation=1, scale=None):
    return LigerFusedNeighborhoodAttentionFunction.apply(query, key, value, kernel_size, dilation, scale)


# ---------------------------------------------------------------- modules
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
        return LigerRMSNormFunction.apply(hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode)

    def extra_repr(self):
        return f"eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class LigerFusedAddRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-06, offset=0.0, casting_mode="llama", init_fn="ones", in_place=False):
        super().__init__()
        self.weight = _initial(hidden_size, init_fn)
        self.variance_epsilon, self.offset, self.casting_mode, self.in_place = eps, offset, casting_mode, in_place

    def forward(self, hidden_states, residual):
        return LigerFusedAddRMSNormFunction.apply(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerLayerNorm(nn.Module):
    """As Liger's: `bias=True` starts it with normal random numbers, and without it there is one all the same, trainable, of zeros."""

    def __init__(self, hidden_size, eps=1e-06, bias=False, init_fn="ones", impl=None, mode=None, backend=None):
        super().__init__()
        self.weight = _initial(hidden_size, init_fn)
        self.bias = nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps

    def forward(self, hidden_states):
        return LigerLayerNormFunction.apply(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self):
        return f"{self.hidden_size}, eps={self.eps}"


class LigerGroupNorm(nn.Module):
    """As Liger's: its bias is as LigerLayerNorm's, and the channels come before the groups."""

    def __init__(self, num_channels, num_groups, eps=1e-06, bias=False, init_fn="ones"):
        super().__init__()
        if num_channels % num_groups:
            fail("num_channels", num_channels, f"a multiple of num_groups, {num_groups}")
        self.num_channels, self.num_groups, self.eps, self.variance_epsilon = num_channels, num_groups, eps, eps
        self.weight = _initial(num_channels, init_fn)
        self.bias = nn.Parameter(torch.randn(num_channels) if bias else torch.zeros(num_channels))

    def forward(self, hidden_states):
        return LigerGroupNormFunction.apply(hidden_states, self.weight, self.bias, self.num_channels, self.num_groups,
                                            self.variance_epsilon)

    def extra_repr(self):
        return f"num_channels={self.num_channels}, num_groups={self.num_groups}, eps={self.eps}"


class LigerPolyNorm(nn.Module):
    def __init__(self, eps=1e-06, in_place=True):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.full((3,), 1 / 3)), nn.Parameter(torch.tensor(1.0))
        self.variance_epsilon, self.in_place = eps, in_place

    def forward(self, hidden_states):
        return LigerPolyNormFunction.apply(hidden_states, self.weight, self.bias, self.variance_epsilon)


class LigerDyT(nn.Module):
    def __init__(self, hidden_size, beta=True, init_alpha=0.5):
        super().__init__()
        self.hidden_size, self.init_alpha = hidden_size, init_alpha
        self.alpha, self.gamma = nn.Parameter(torch.full((1,), float(init_alpha))), nn.Parameter(torch.ones(hidden_size))
        self.beta = nn.Parameter(torch.zeros(hidden_size)) if beta else None

    def forward(self, x):
        return LigerDyTFunction.apply(x, self.alpha, self.gamma, self.beta)


class LigerSoftmax(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return LigerSoftmaxFunction.apply(x)


class LigerSparsemax(nn.Module):
    def __init__(self, dim=-1):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return LigerSparsemaxFunction.apply(x, self.dim)


class LigerCrossEntropyLoss(nn.Module):
    def __init__(
        self,
        weight=None,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
        return_z_loss=False,
        return_token_accuracy=False,
        return_predicted_tokens=False,
    ):
        super().__init__()
        check_numbers(label_smoothing, softcap)
        check_reduction(reduction)
        self.weight, self.ignore_index = weight, ignore_index
        self.lse_square_scale, self.label_smoothing = lse_square_scale, label_smoothing
        self.reduction, self.softcap, self.return_z_loss = reduction, softcap, return_z_loss
        self.return_token_accuracy, self.return_predicted_tokens = return_token_accuracy, return_predicted_tokens

    def forward(self, _input, target):
        options = self.ignore_index, self.lse_square_scale, self.label_smoothing, self.reduction, self.softcap, self.return_z_loss
        more = self.return_token_accuracy, self.return_predicted_tokens
        return _output(LigerCrossEntropyFunction.apply(_input, target, self.weight, *options, *more))


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    def __init__(
        self,
        ce_weight=None,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
        return_z_loss=False,
        accum_dtype=None,
        use_token_scaling=False,
        return_token_accuracy=False,
        return_predicted_tokens=False,
    ):
        super().__init__()
        check_numbers(label_smoothing, softcap)
        check_reduction(reduction)
        self.ce_weight, self.ignore_index, self.lse_square_scale = ce_weight, ignore_index, lse_square_scale
        self.label_smoothing, self.reduction, self.softcap, self.return_z_loss = label_smoothing, reduction, softcap, return_z_loss
        self.accum_dtype, self.use_token_scaling = accum_dtype, use_token_scaling
        self.return_token_accuracy, self.return_predicted_tokens = return_token_accuracy, return_predicted_tokens

    def forward(self, lin_weight, _input, target, bias=None):
        options = self.ignore_index, self.lse_square_scale, self.label_smoothing, self.reduction, self.softcap, self.return_z_loss
        more = self.accum_dtype, self.use_token_scaling, self.return_token_accuracy, self.return_predicted_tokens
        return _output(LigerFusedLinearCrossEntropyFunction.apply(_input, lin_weight, target, bias, self.ce_weight, *options, *more))


class LigerKLDIVLoss(nn.KLDivLoss):
    def __init__(self, eps=1e-10, *args, **kwargs):
        super().__init__(*args, **kwargs)
        divergence.check_reduction(self.reduction)
        divergence.check_numbers(eps=eps)
        self.eps = eps

    def forward(self, y_pred, y_true):
        return LigerKLDivLossFunction.apply(y_pred, y_true, self.reduction, self.log_target, self.eps)


class LigerJSD(nn.Module):
    def __init__(self, beta=0.5, ignore_index=-100):
        super().__init__()
        divergence.check_numbers(beta=beta)
        self.beta, self.ignore_index = beta, ignore_index

    def forward(self, log_q, log_p, shift_labels=None):
        return LigerJSDFunction.apply(log_q, log_p, shift_labels, self.beta, self.ignore_index)


class LigerTVDLoss(nn.Module):
    def __init__(self, reduction="batchmean", ignore_index=-100):
        super().__init__()
        divergence.check_reduction(reduction)
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(self, p, q, shift_labels=None):
        return LigerTVDLossFunction.apply(p, q, shift_labels, self.reduction, self.ignore_index)


class LigerFusedLinearJSD(nn.Module):
    def __init__(self, jsd_beta=0.5, ignore_index=-100, temperature=1.0, accum_dtype=None):
        super().__init__()
        divergence.check_numbers(beta=jsd_beta, temperature=temperature)
        self.jsd_beta, self.ignore_index, self.temperature, self.accum_dtype = jsd_beta, ignore_index, temperature, accum_dtype

    def forward(self, student_input, student_weight, teacher_input, teacher_weight, shift_labels):
        tensors = student_input, student_weight, teacher_input, teacher_weight, shift_labels
        return LigerFusedLinearJSDFunction.apply(*tensors, self.jsd_beta, self.ignore_index, self.temperature, self.accum_dtype)


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
        return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


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
    """With the configuration's `mlp_multipliers`, of the gate before its activation and of the activation's product."""

    def __init__(self, config):
        super().__init__(config, bias=getattr(config, "mlp_bias", False))
        self.gate_multiplier, self.down_multiplier = map(float, config.mlp_multipliers)

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(LigerSiLUMulFunction.apply(gate, up, self.gate_multiplier, self.down_multiplier))


class LigerPhi3SwiGLUMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.hidden_size, self.intermediate_size = config, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)
        _check_activation(config, SILU)

    def forward(self, x):
        return self.down_proj(LigerFusedGateUpSiLUMulFunction.apply(self.gate_up_proj(x)))


class LigerBlockSparseTop2MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        _check_activation(config, SILU)

    def forward(self, x):
        return self.w2(LigerSiLUMulFunction.apply(self.w1(x), self.w3(x)))


class LigerGEGLUMLP(_GatedMLP):
    """With GELU by tanh, whatever activation the configuration names, as Liger's; one that is no GELU gets a warning."""

    def __init__(self, config):
        super().__init__(config)

    def _check_config(self, config):
        activation = getattr(config, "hidden_act", None)
        if activation not in (*GELU, None):
            message = f"config.hidden_act is {activation!r}, and {type(self).__name__} computes GELU by tanh all the same, as Liger's does"
            warnings.warn(message, UserWarning, stacklevel=4)

    def forward(self, x):
        return self.down_proj(LigerGELUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """Twice as wide in the layers that share keys and values, where the configuration says use_double_wide_mlp."""

    def __init__(self, config, layer_idx=None):
        shared = getattr(config, "num_kv_shared_layers", 0)
        first = getattr(config, "num_hidden_layers", 0) - shared
        doubles = getattr(config, "use_double_wide_mlp", False) and shared > 0 and layer_idx is not None and layer_idx >= first
        _GatedMLP.__init__(self, config, config.intermediate_size * (2 if doubles else 1))


class LigerTiledSwiGLUMLP(_GatedMLP):
    activations = (*SILU, None)

    def __init__(self, config, num_shards=None):
        super().__init__(config)
        self.num_shards = num_shards

    def _mlp_forward(self, module, x):
        return module.down_proj(LigerSiLUMulFunction.apply(module.gate_proj(x), module.up_proj(x)))

    def forward(self, x):
        return apply_tiled_mlp(self._mlp_forward, self, x, self.num_shards)


class LigerTiledGEGLUMLP(_GatedMLP):
    activations = (*GELU, None)

    def __init__(self, config, num_shards=None):
        super().__init__(config)
        self.num_shards = num_shards

    def _mlp_forward(self, module, x):
        return module.down_proj(LigerGELUMulFunction.apply(module.gate_proj(x), module.up_proj(x)))

    def forward(self, x):
        return apply_tiled_mlp(self._mlp_forward, self, x, self.num_shards)


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
        found = LigerFusedNeighborhoodAttentionFunction.apply(q, k, v, self.kernel_size, self.dilation, self.scale)
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
        found = self.attention(LigerLayerNormFunction.apply(hidden_states, norm.weight, norm.bias, norm.eps), attention_mask)
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


class LigerRMSNormForGemma(LigerRMSNorm):
    def __init__(self, hidden_size, eps=1e-06, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=True, row_mode=None):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma2(LigerRMSNorm):
    def __init__(self, hidden_size, eps=1e-06, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=False, row_mode=None):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma3(LigerRMSNorm):
    def __init__(self, dim, eps=1e-06, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=False):
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForGemma4(LigerRMSNorm):
    def __init__(self, dim, eps=1e-06, offset=0.0, casting_mode="gemma", init_fn="ones", in_place=False, with_scale=True):
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForMuseGlimmer(LigerRMSNorm):
    def __init__(self, dim=None, eps=1e-06, offset=0.0, casting_mode="gemma", init_fn="ones", in_place=False, with_scale=True):
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNorm):
    def __init__(self, hidden_size, eps=1e-06, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=False, row_mode=None):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForOlmo2(LigerRMSNorm):
    def __init__(self, hidden_size, eps=1e-06, offset=0.0, casting_mode="llama", init_fn="ones", in_place=False, row_mode=None):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGlm4(LigerRMSNorm):
    def __init__(self, hidden_size, eps=1e-06, offset=0.0, casting_mode="llama", init_fn="ones", in_place=False, row_mode=None):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForQwen3Next(LigerRMSNorm):
    def __init__(self, hidden_size, eps=1e-06, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=False, row_mode=None):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)
