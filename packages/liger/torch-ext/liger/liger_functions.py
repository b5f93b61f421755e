"""Liger-Kernel's autograd functions, with the arguments, order and defaults of its version 0.8.5, over the operations of this package.

They have `.apply` and nothing else of an autograd function: that is the operation's own. `back_end` puts them in the place of Liger's,
so each takes every number of arguments that Liger's own code passes.
"""

import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .norms import add_rms_norm, rms_norm
from .shared.ops import cross_entropy_of_logits, divergence
from .shared.ops.common import checked_index, fail
from .shared.ops.cross_entropy import is_counted
from .shared.ops.dyt import dyt
from .shared.ops.gated_activation import geglu, swiglu, swiglu_packed
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
from .shared.runtime.device import is_ordinary

__all__ = [
    "LigerRMSNormFunction",
    "LigerFusedAddRMSNormFunction",
    "LigerLayerNormFunction",
    "LigerGroupNormFunction",
    "LigerPolyNormFunction",
    "LigerDyTFunction",
    "LigerSoftmaxFunction",
    "LigerSparsemaxFunction",
    "LigerSiLUMulFunction",
    "LigerFusedGateUpSiLUMulFunction",
    "LigerGELUMulFunction",
    "LigerRopeFunction",
    "LigerLlama4RopeFunction",
    "LigerQwen2VLMRopeFunction",
    "LigerCrossEntropyFunction",
    "LigerKLDivLossFunction",
    "LigerJSDFunction",
    "LigerTVDLossFunction",
    "LigerFusedLinearCrossEntropyFunction",
    "LigerFusedLinearJSDFunction",
    "LigerFusedNeighborhoodAttentionFunction",
    "LigerTiledMLPFunction",
    "apply_tiled_mlp",
]

CASTING = {0: "llama", 1: "gemma", -1: "none"}


def _four(found, dtype):
    """(loss, z_loss, token_accuracy, predicted_tokens), losses in Liger's dtype."""
    if isinstance(found, torch.Tensor):
        return found if found.dtype == dtype else found.to(dtype), None, None, None
    z_loss = None if found.z_loss is None else found.z_loss.to(dtype)
    return found.loss.to(dtype), z_loss, found.token_accuracy, found.predicted_tokens


def _class_weight(weight, target, ignore_index, reduction, lse_square_scale):
    """The class weights, for a mean with z-loss times what makes those of the counted tokens 1 on average: Liger divides the z-loss by
    the number of these tokens, and all else by the sum of their weights."""
    if weight is None or reduction != "mean" or not lse_square_scale:
        return weight
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    counted = is_counted(target, weight.shape[0], ignore_index)
    total = torch.where(counted, weight[torch.where(counted, target, 0)], 0.0).sum()
    return weight * torch.where(total == 0, 1.0, counted.sum() / total)


def _check_bounds(target, classes, ignore_index):
    """Raises AssertionError for a label outside [0, classes), as Liger does: the only look at a GPU here that waits for it. There is none
    while a graph is captured or compiled, where such a label counts like ignore_index."""
    ignore_index = checked_index(ignore_index)
    if torch.compiler.is_compiling() or not is_ordinary(target) or target.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if wrong.any():
        raise AssertionError(f"target {int(target[wrong][0])} is out of bounds, expected labels from 0 to {classes - 1} or {ignore_index}")


def _one_dtype(x, y):
    """Two distributions in the wider one's dtype."""
    if x.dtype == y.dtype:
        return x, y
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.to(dtype), y.to(dtype)


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
    return tuple(tensor if tensor.dtype == x.dtype else tensor.to(x.dtype) for tensor, x in zip(tensors, given))


class LigerRMSNormFunction:
    """X [..., n], W [n] or None -> [..., n]. casting_mode: "llama", "gemma", "none", or Liger's numbers for them."""

    @staticmethod
    def apply(X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        return rms_norm(X, W, eps, offset, CASTING.get(casting_mode, casting_mode))


class LigerFusedAddRMSNormFunction:
    """X, R [..., n], W [n] -> (the norm of X + R, X + R)."""

    @staticmethod
    def apply(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False):
        return add_rms_norm(X, R, W, eps, offset, CASTING.get(casting_mode, casting_mode))


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
    """q [batch, heads, tokens, head_dim], k the same with its heads, cos, sin [batch or 1, tokens, rotary_dim] -> new q, k.

    position_ids has no effect, as in Liger; unsqueeze_dim is the dimension of 1 in tables of four dimensions. rotary_dim is by default
    the tables' width, at most head_dim; the last column of an odd one stays as it is. The tables' left rotary_dim / 2 columns are read.
    """

    @staticmethod
    def apply(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
        if cos.dim() == 4:
            cos, sin = cos.squeeze(unsqueeze_dim), sin.squeeze(unsqueeze_dim)
        width = cos.shape[-1]
        if rotary_dim is None:
            rotary_dim = min(width, q.shape[-1]) // 2 * 2
        if width != rotary_dim and width != rotary_dim // 2:
            cos, sin = cos[..., : rotary_dim // 2], sin[..., : rotary_dim // 2]
        return _like(partial_rotary(q, k, cos, sin, rotary_dim), q, k)


class LigerLlama4RopeFunction:
    """q [batch, tokens, heads, head_dim], k the same with its heads, freqs_cis complex, or its parts interleaved -> new q, k.

    Every batch row has its own positions, where freqs_cis has them: Liger gives all rows those of the first.
    """

    @staticmethod
    def apply(q, k, freqs_cis, BLOCK_SIZE=None):
        if not freqs_cis.is_complex():
            freqs_cis = torch.complex(*freqs_cis.float().unflatten(-1, (-1, 2)).unbind(-1))
        return rotary_complex(q, k, freqs_cis)


class LigerQwen2VLMRopeFunction:
    """q [batch, heads, tokens, head_dim], k the same with its heads, cos, sin [3, batch, tokens, head_dim] -> new q, k.

    unsqueeze_dim has no effect, as in Liger.
    """

    @staticmethod
    def apply(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
        return _like(rotary_multimodal(q, k, cos, sin, mrope_section), q, k)


class LigerCrossEntropyFunction:
    """_input [tokens, classes], target [tokens] -> (loss, z_loss, token_accuracy, predicted_tokens), None for what is not asked for.

    The losses are in _input's dtype.
    """

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
        _check_bounds(target, _input.shape[-1], ignore_index)
        found = cross_entropy_of_logits.cross_entropy(
            _input,
            target,
            _class_weight(weight, target, ignore_index, reduction, lse_square_scale),
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
            class_weight=_class_weight(ce_weight, target, ignore_index, reduction, lse_square_scale),
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
        return divergence.kl_div(*_one_dtype(y_pred, y_true), reduction, log_target, eps=0.0 if log_target else eps)


class LigerJSDFunction:
    """_input, target log-probabilities [tokens, classes], shift_labels [tokens] or None -> the loss in _input's dtype."""

    @staticmethod
    def apply(_input, target, shift_labels=None, beta=0.5, ignore_index=-100, jsd_impl=None, jsd_mode=None):
        found = divergence.jsd(*_one_dtype(_input, target), _labels(shift_labels), beta=beta, ignore_index=ignore_index)
        return found.to(_input.dtype)


class LigerTVDLossFunction:
    """p, q probabilities [tokens, classes], shift_labels [tokens] or None -> the loss, fp32."""

    @staticmethod
    def apply(p, q, shift_labels=None, reduction="batchmean", ignore_index=-100):
        return divergence.tvd(*_one_dtype(p, q), _labels(shift_labels), reduction=reduction, ignore_index=ignore_index)


class LigerFusedLinearJSDFunction:
    """student_input [tokens, hidden], student_weight [classes, hidden], the teacher's with its own hidden size, shift_labels [tokens]
    or None -> the loss, fp32. The teacher gets no gradient."""

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
    """fn(mlp_module, x) over shards of x's tokens, each computed again in the backward pass.

    Weights get their gradients from autograd, once, whatever requires a gradient beside them: Liger's writes .grad itself, once a shard,
    and not at all where x requires none.
    """

    @staticmethod
    def apply(fn, mlp_module, x, shards, compute_params=None):
        parts = torch.chunk(x, max(1, shards), dim=-2)
        return torch.cat([checkpoint(fn, mlp_module, part, use_reentrant=False) for part in parts], dim=-2)


def apply_tiled_mlp(fn, mlp_module, x, num_shards=None, compute_params=None):
    """Calls `LigerTiledMLPFunction` with ceil(tokens / hidden) shards where none are given.

    The MLPs of Liger's own tiled modules go to the operation, where their projections are torch.nn.Linear and nobody listens to them.
    """
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
