"""Liger-Kernel's names, with the arguments, order and defaults of its version 0.8.5, over the operations of this package.

`from liger_kernel.transformers import LigerRMSNorm` becomes an import from here, and Liger need not be installed. Three kinds of names:
`LigerXFunction` with `.apply` (Liger's autograd functions), `liger_x` (its functions), and `LigerX` (its modules).

What Liger's arguments `in_place`, `row_mode`, `BLOCK_SIZE`, `impl`, `mode`, `backend` and `compute_params` choose does not exist here:
nothing of
the caller's is ever overwritten, and there is one implementation. They are accepted and have no effect.
"""

import math
from typing import NamedTuple, Optional, Tuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .shared.ops import cross_entropy_of_logits, divergence
from .shared.ops.common import fail
from .shared.ops.dyt import dyt
from .shared.ops.gated_activation import geglu, swiglu, swiglu_packed
from .shared.ops.general_rms_norm import general_add_rms_norm, general_rms_norm
from .shared.ops.group_norm import group_norm
from .shared.ops.layer_norm import layer_norm
from .shared.ops.linear_cross_entropy import linear_cross_entropy
from .shared.ops.linear_jsd import linear_jsd
from .shared.ops.llama4_rope import rotary_complex
from .shared.ops.mrope import partial_rotary, rotary_multimodal
from .shared.ops.neighborhood_attention import neighborhood_attention
from .shared.ops.poly_norm import poly_norm
from .shared.ops.softmax import softmax
from .shared.ops.sparsemax import sparsemax
from .shared.ops.tiled_mlp import tiled_mlp

CASTING = {0: "llama", 1: "gemma", -1: "none"}
SILU = ("silu", "swish")
GELU = ("gelu", "gelu_new", "gelu_pytorch_tanh")


class CrossEntropyOutput(NamedTuple):
    """What the cross entropies return where more than the loss is asked for."""

    loss: torch.Tensor
    z_loss: Optional[torch.Tensor] = None
    token_accuracy: Optional[torch.Tensor] = None
    predicted_tokens: Optional[torch.Tensor] = None


def _four(found, dtype):
    """(loss, z_loss, token_accuracy, predicted_tokens), losses in Liger's dtype."""
    if isinstance(found, torch.Tensor):
        return found.to(dtype), None, None, None
    z_loss = None if found.z_loss is None else found.z_loss.to(dtype)
    return found.loss.to(dtype), z_loss, found.token_accuracy, found.predicted_tokens


def _output(four):
    return four[0] if four[1:] == (None, None, None) else CrossEntropyOutput(*four)


def _labels(labels):
    return None if labels is None else labels.to(torch.int64)


def _autocast(*tensors):
    """The tensors in the dtype of autocast, where it is on: Liger's linear losses do so, and its other operations do not."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    return tuple(None if tensor is None else tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


def _like(tensors, *given):
    """Rotated heads in the dtype that they came in: tables of a wider one promote them."""
    return tuple(tensor.to(x.dtype) for tensor, x in zip(tensors, given))


# ---------------------------------------------------------------- Functions
class LigerRMSNormFunction:
    """X [..., n], W [n] or None -> [..., n]. casting_mode: "llama", "gemma", "none", or Liger's numbers for them."""

    @staticmethod
    def apply(X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        return general_rms_norm(X, W, eps, offset, CASTING.get(casting_mode, casting_mode))


class LigerFusedAddRMSNormFunction:
    """X, R [..., n], W [n] -> (the norm of X + R, X + R)."""

    @staticmethod
    def apply(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False):
        return general_add_rms_norm(X, R, W, eps, offset, CASTING.get(casting_mode, casting_mode))


class LigerLayerNormFunction:
    """X [..., n], W, B [n] -> [..., n]."""

    @staticmethod
    def apply(X, W, B, eps):
        return layer_norm(X, W, B, eps)


class LigerGroupNormFunction:
    """X [batch, num_channels, ...], weights [num_channels] -> a tensor like X."""

    @staticmethod
    def apply(X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps):
        if X.dim() < 2 or X.shape[1] != num_channels:
            fail("X", list(X.shape), f"[batch, {num_channels}, ...]")
        return group_norm(X, num_groups, affine_scaling_weight, affine_shifting_bias, eps)


class LigerPolyNormFunction:
    """X [..., n], W [3], B one element -> [..., n]."""

    @staticmethod
    def apply(X, W, B, eps=1e-06, in_place=True):
        return poly_norm(X, W, B, eps)


class LigerDyTFunction:
    """x [..., n], alpha [1], gamma, beta [n] (beta or None) -> [..., n]."""

    @staticmethod
    def apply(x, alpha, gamma, beta):
        return dyt(x, alpha, gamma, beta)


class LigerSoftmaxFunction:
    """Over the last dimension."""

    @staticmethod
    def apply(input_):
        return softmax(input_)


class LigerSparsemaxFunction:
    """Over dimension dim."""

    @staticmethod
    def apply(x, dim):
        return sparsemax(x, dim)


class LigerSiLUMulFunction:
    """down_multiplier * silu(gate_multiplier * a) * b."""

    @staticmethod
    def apply(a, b, gate_multiplier=1.0, down_multiplier=1.0):
        return swiglu(a, b, gate_multiplier, down_multiplier)


class LigerFusedGateUpSiLUMulFunction:
    """silu of y's first half, times its second half."""

    @staticmethod
    def apply(y, in_place=False):
        return swiglu_packed(y)


class LigerGELUMulFunction:
    """gelu(a) * b, with tanh."""

    @staticmethod
    def apply(a, b):
        return geglu(a, b)


class LigerRopeFunction:
    """q [batch, heads, tokens, head_dim], k the same with its heads, cos, sin [batch or 1, tokens, rotary_dim] -> new q, k. position_ids
    has
    no effect, as in Liger; unsqueeze_dim is the dimension of 1 in tables of four dimensions."""

    @staticmethod
    def apply(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
        cos, sin = (t.squeeze(unsqueeze_dim) if t.dim() == 4 else t for t in (cos, sin))
        return _like(partial_rotary(q, k, cos, sin, rotary_dim), q, k)


class LigerLlama4RopeFunction:
    """q [batch, tokens, heads, head_dim], k the same with its heads, freqs_cis complex, or its parts interleaved -> new q, k. Every batch
    row
    has its own positions, where freqs_cis has them: Liger gives all rows those of the first."""

    @staticmethod
    def apply(q, k, freqs_cis, BLOCK_SIZE=None):
        if not freqs_cis.is_complex():
            freqs_cis = torch.view_as_complex(freqs_cis.float().unflatten(-1, (-1, 2)).contiguous())
        return rotary_complex(q, k, freqs_cis)


class LigerQwen2VLMRopeFunction:
    """q [batch, heads, tokens, head_dim], k the same with its heads, cos, sin [3, batch, tokens, head_dim] -> new q, k. unsqueeze_dim has
    no
    effect, as in Liger."""

    @staticmethod
    def apply(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
        return _like(rotary_multimodal(q, k, cos, sin, mrope_section), q, k)


class LigerCrossEntropyFunction:
    """_input [tokens, classes], target [tokens] -> (loss, z_loss, token_accuracy, predicted_tokens), None for what is not asked for;
    losses in
    _input's dtype."""

    @staticmethod
    def apply(
        _input,
        target,
        weight,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
        return_z_loss=False,
        return_token_accuracy=False,
        return_predicted_tokens=False,
    ):
        found = cross_entropy_of_logits.cross_entropy(
            _input,
            target,
            weight,
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
            return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )
        return _four(found, _input.dtype)


class LigerFusedLinearCrossEntropyFunction:
    """_input [tokens, hidden], weight [classes, hidden], target [tokens] -> as LigerCrossEntropyFunction, losses in fp32."""

    supports_inner_impl_dispatch = True  # Liger then hands chunk_mem_const over

    @staticmethod
    def apply(
        _input,
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
        ce_impl=None,
        ce_mode=None,
        chunk_mem_const=1,
    ):
        _input, weight, bias = _autocast(_input, weight, bias)
        found = linear_cross_entropy(
            _input,
            weight,
            target,
            bias,
            class_weight=ce_weight,
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
            accum_dtype=accum_dtype,
            use_token_scaling=use_token_scaling,
            return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )
        return _four(found, torch.float64 if _input.dtype == torch.float64 else torch.float32)


class LigerKLDivLossFunction:
    """y_pred log-probabilities, y_true probabilities (log_target: their logarithms) [tokens, classes] -> the loss, fp32."""

    @staticmethod
    def apply(y_pred, y_true, reduction="batchmean", log_target=False, eps=1e-10):
        return divergence.kl_div(y_pred, y_true, reduction, log_target, eps=0.0 if log_target else eps)


class LigerJSDFunction:
    """_input, target log-probabilities [tokens, classes], shift_labels [tokens] or None -> the loss in _input's dtype."""

    @staticmethod
    def apply(_input, target, shift_labels=None, beta=0.5, ignore_index=-100, jsd_impl=None, jsd_mode=None):
        return divergence.jsd(_input, target, _labels(shift_labels), beta=beta, ignore_index=ignore_index).to(_input.dtype)


class LigerTVDLossFunction:
    """p, q probabilities [tokens, classes], shift_labels [tokens] or None -> the loss, fp32."""

    @staticmethod
    def apply(p, q, shift_labels=None, reduction="batchmean", ignore_index=-100):
        return divergence.tvd(p, q, _labels(shift_labels), reduction=reduction, ignore_index=ignore_index)


class LigerFusedLinearJSDFunction:
    """student_input [tokens, hidden], student_weight [classes, hidden], the teacher's with its own hidden size, shift_labels [tokens] or
    None ->
    the loss, fp32. The teacher gets no gradient."""

    @staticmethod
    def apply(
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        shift_labels=None,
        jsd_beta=0.5,
        ignore_index=-100,
        temperature=1.0,
        accum_dtype=None,
        jsd_impl=None,
        jsd_mode=None,
    ):
        tensors = _autocast(student_input, student_weight, teacher_input, teacher_weight)
        options = {"beta": jsd_beta, "ignore_index": ignore_index, "temperature": temperature, "accum_dtype": accum_dtype}
        return linear_jsd(*tensors, _labels(shift_labels), **options)


class LigerFusedNeighborhoodAttentionFunction:
    """query, key, value [batch, heads, tokens, head_dim] -> a tensor like query."""

    @staticmethod
    def apply(query, key, value, kernel_size=7, dilation=1, scale=None):
        return neighborhood_attention(query, key, value, kernel_size, dilation, scale)


class LigerTiledMLPFunction:
    """fn(mlp_module, x) over shards of x's tokens, each computed again in the backward pass. Weights get their gradients from autograd,
    once,
    whatever requires a gradient beside them: Liger's writes .grad itself, once a shard, and not at all where x requires none."""

    @staticmethod
    def apply(fn, mlp_module, x, shards, compute_params=None):
        parts = torch.chunk(x, max(1, shards), dim=-2)
        return torch.cat([checkpoint(fn, mlp_module, part, use_reentrant=False) for part in parts], dim=-2)


def apply_tiled_mlp(fn, mlp_module, x, num_shards=None, compute_params=None):
    """`LigerTiledMLPFunction` with ceil(tokens / hidden) shards where none are given. The MLPs of Liger's own tiled modules go to the
    operation,
    where their projections are torch.nn.Linear and nobody listens to them."""
    shards = max(1, math.ceil(x.shape[-2] / x.shape[-1]) if num_shards is None else num_shards)
    activation = TILED.get(type(mlp_module).__name__) if getattr(fn, "__name__", "") == "_mlp_forward" else None
    weights = _plain_weights(mlp_module) if activation else None
    if weights is None or any(weight.dtype != x.dtype for weight in weights) or torch.is_autocast_enabled(x.device.type):
        return LigerTiledMLPFunction.apply(fn, mlp_module, x, shards, compute_params)
    return tiled_mlp(x, *weights, activation, shards)


TILED = {"LigerTiledSwiGLUMLP": "silu", "LigerTiledGEGLUMLP": "gelu_tanh"}


def _plain_weights(module):
    """The weights of gate_proj, up_proj and down_proj, or None where a call of one does more than multiply by it."""
    projections = [module.gate_proj, module.up_proj, module.down_proj]
    for p in projections:
        if type(p) is not nn.Linear or p.bias is not None or "forward" in vars(p) or type(p.weight) not in (torch.Tensor, nn.Parameter):
            return None
        if p._forward_hooks or p._forward_pre_hooks or p._backward_hooks or p._backward_pre_hooks:
            return None
    return [p.weight for p in projections]


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


def liger_llama4_text_rotary_pos_emb(xq, xk, freqs_cis):
    return LigerLlama4RopeFunction.apply(xq, xk, freqs_cis)


def liger_llama4_vision_rotary_pos_emb(query, key, freqs_ci):
    """freqs_ci: complex [tokens, head_dim / 2], with dimensions of 1 before and behind the tokens; or real, for a complex buffer that a
    cast
    has taken the imaginary part of: then it multiplies."""
    freqs = freqs_ci.to(query.device)
    freqs = freqs.reshape(-1, query.shape[-1] // 2)
    return rotary_complex(query, key, freqs if freqs.is_complex() else torch.complex(freqs.float(), torch.zeros_like(freqs,
                                                                                                                     dtype=torch.float32)))


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
        self.eps = eps

    def forward(self, y_pred, y_true):
        return LigerKLDivLossFunction.apply(y_pred, y_true, self.reduction, self.log_target, self.eps)


class LigerJSD(nn.Module):
    def __init__(self, beta=0.5, ignore_index=-100):
        super().__init__()
        self.beta, self.ignore_index = beta, ignore_index

    def forward(self, log_q, log_p, shift_labels=None):
        return LigerJSDFunction.apply(log_q, log_p, shift_labels, self.beta, self.ignore_index)


class LigerTVDLoss(nn.Module):
    def __init__(self, reduction="batchmean", ignore_index=-100):
        super().__init__()
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(self, p, q, shift_labels=None):
        return LigerTVDLossFunction.apply(p, q, shift_labels, self.reduction, self.ignore_index)


class LigerFusedLinearJSD(nn.Module):
    def __init__(self, jsd_beta=0.5, ignore_index=-100, temperature=1.0, accum_dtype=None):
        super().__init__()
        self.jsd_beta, self.ignore_index, self.temperature, self.accum_dtype = jsd_beta, ignore_index, temperature, accum_dtype

    def forward(self, student_input, student_weight, teacher_input, teacher_weight, shift_labels):
        tensors = student_input, student_weight, teacher_input, teacher_weight, shift_labels
        return LigerFusedLinearJSDFunction.apply(*tensors, self.jsd_beta, self.ignore_index, self.temperature, self.accum_dtype)


class _GatedMLP(nn.Module):
    """gate_proj, up_proj and down_proj without biases, of a configuration's sizes."""

    activations: Tuple[Optional[str], ...] = SILU

    def __init__(self, config, intermediate_size=None):
        super().__init__()
        self.config, self.hidden_size = config, config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)
        activation = getattr(config, "hidden_act", None)
        if activation not in self.activations:
            fail("config.hidden_act", repr(activation), f"one of {', '.join(filter(None, self.activations))}")


class LigerSwiGLUMLP(_GatedMLP):
    def __init__(self, config, intermediate_size=None):
        super().__init__(config, intermediate_size)

    def forward(self, x):
        return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    pass


class LigerPhi3SwiGLUMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.hidden_size, self.intermediate_size = config, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)
        if config.hidden_act not in SILU:
            fail("config.hidden_act", repr(config.hidden_act), f"one of {', '.join(SILU)}")

    def forward(self, x):
        return self.down_proj(LigerFusedGateUpSiLUMulFunction.apply(self.gate_up_proj(x)))


class LigerBlockSparseTop2MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        if config.hidden_act not in SILU:
            fail("config.hidden_act", repr(config.hidden_act), f"one of {', '.join(SILU)}")

    def forward(self, x):
        return self.w2(LigerSiLUMulFunction.apply(self.w1(x), self.w3(x)))


class LigerGEGLUMLP(_GatedMLP):
    """With GELU by tanh, whatever GELU the configuration names, as Liger's."""

    activations = (*GELU, None)

    def __init__(self, config):
        super().__init__(config)

    def forward(self, x):
        return self.down_proj(LigerGELUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


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


class LigerRMSNormForOlmo2(LigerRMSNorm):
    def __init__(self, hidden_size, eps=1e-06, offset=0.0, casting_mode="llama", init_fn="ones", in_place=False, row_mode=None):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGlm4(LigerRMSNorm):
    def __init__(self, hidden_size, eps=1e-06, offset=0.0, casting_mode="llama", init_fn="ones", in_place=False, row_mode=None):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForQwen3Next(LigerRMSNorm):
    def __init__(self, hidden_size, eps=1e-06, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=False, row_mode=None):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)
