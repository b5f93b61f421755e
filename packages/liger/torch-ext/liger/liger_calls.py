"""What is computed under Liger-Kernel's names: its conventions over the operations of this package.

Each function has the names of Liger's arguments. `liger_names` has the table of what Liger calls them.
"""

import math
from typing import NamedTuple, Optional

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from . import norms
from .shared.ops import cross_entropy_of_logits, divergence, gated_activation
from .shared.ops import linear_cross_entropy as linear_ce
from .shared.ops import linear_jsd as linear_divergence
from .shared.ops.arguments import checked_index, fail
from .shared.ops.cross_entropy import is_counted
from .shared.ops.group_norm import group_norm as group_norm_of
from .shared.ops.llama4_rope import rotary_complex
from .shared.ops.mrope import partial_rotary, rotary_multimodal
from .shared.ops.tiled_mlp import tiled_mlp as tiled_mlp_of
from .shared.runtime.device import is_ordinary

CASTING = {0: "llama", 1: "gemma", -1: "none"}


def _four(found, dtype):
    """(loss, z_loss, token_accuracy, predicted_tokens), losses in Liger's dtype."""
    if isinstance(found, torch.Tensor):
        return found if found.dtype == dtype else found.to(dtype), None, None, None
    z_loss = None if found.z_loss is None else found.z_loss.to(dtype)
    return found.loss.to(dtype), z_loss, found.token_accuracy, found.predicted_tokens


def _class_weight(weight, target, ignore_index, reduction, lse_square_scale):
    """The class weights. For a mean with z-loss they are scaled so that those of the counted tokens are 1 on average.

    Liger divides the z-loss by the number of these tokens, and everything else by the sum of their weights.
    """
    if weight is None or reduction != "mean" or not lse_square_scale:
        return weight
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    counted = is_counted(target, weight.shape[0], ignore_index)
    total = torch.where(counted, weight[torch.where(counted, target, 0)], 0.0).sum()
    return weight * torch.where(total == 0, 1.0, counted.sum() / total)


def _check_bounds(target, classes, ignore_index):
    """Raises AssertionError for a label outside [0, classes), as Liger does. Nothing else here waits for the GPU.

    While a graph is captured or compiled nothing is checked, and such a label counts like ignore_index.
    """
    ignore_index = checked_index(ignore_index)
    if torch.compiler.is_compiling() or not is_ordinary(target) or target.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if wrong.any():
        raise AssertionError(f"target {int(target[wrong][0])} is out of bounds, expected labels from 0 to {classes - 1} or {ignore_index}")


def _one_dtype(x, y):
    """Two distributions, both in the wider dtype."""
    if x.dtype == y.dtype:
        return x, y
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.to(dtype), y.to(dtype)


def _labels(labels):
    return None if labels is None else labels.to(torch.int64)


def autocast(*tensors):
    """The tensors in the dtype of autocast, where it is on, as Liger's linear losses have them. Its other operations ignore autocast."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    return tuple(None if tensor is None else tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


def _like(tensors, *given):
    """Rotated heads in their original dtype: tables of a wider one promote them."""
    return tuple(tensor if tensor.dtype == x.dtype else tensor.to(x.dtype) for tensor, x in zip(tensors, given))


class CrossEntropyOutput(NamedTuple):
    """What the cross entropies return where more than the loss is asked for."""

    loss: torch.Tensor
    z_loss: Optional[torch.Tensor] = None
    token_accuracy: Optional[torch.Tensor] = None
    predicted_tokens: Optional[torch.Tensor] = None


def output_of(four):
    """The loss alone, or a `CrossEntropyOutput`."""
    return four[0] if four[1:] == (None, None, None) else CrossEntropyOutput(*four)


def rms_norm(X, W, eps, offset=0.0, casting_mode="llama"):
    """X [..., n], W [n] or None -> [..., n]. casting_mode: "llama", "gemma", "none", or Liger's numbers for them."""
    return norms.rms_norm(X, W, eps, offset, CASTING.get(casting_mode, casting_mode))


def fused_add_rms_norm(X, R, W, eps, offset=0.0, casting_mode="llama"):
    """X, R [..., n], W [n] -> (the norm of X + R, X + R)."""
    return norms.add_rms_norm(X, R, W, eps, offset, CASTING.get(casting_mode, casting_mode))


def group_norm(X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps):
    """X [batch, num_channels, ...], weights [num_channels] -> a tensor like X."""
    if X.dim() < 2 or X.shape[1] != num_channels:
        fail("X", list(X.shape), f"[batch, {num_channels}, ...]")
    return group_norm_of(X, num_groups, affine_scaling_weight, affine_shifting_bias, eps)


def gelu_mul(a, b):
    """gelu(a) * b, with tanh."""
    return gated_activation.geglu(a, b)


def rope(q, k, cos, sin, unsqueeze_dim=1, rotary_dim=None):
    """q [batch, heads, tokens, head_dim], k the same with its heads, cos, sin [batch or 1, tokens, rotary_dim] -> new q, k.

    unsqueeze_dim is the dimension of 1 in tables of four dimensions. rotary_dim is by default the tables' width, at most head_dim; the last
    column of an odd one stays as it is. The tables' left rotary_dim / 2 columns are read.
    """
    if cos.dim() == 4:
        cos, sin = cos.squeeze(unsqueeze_dim), sin.squeeze(unsqueeze_dim)
    width = cos.shape[-1]
    if rotary_dim is None:
        rotary_dim = min(width, q.shape[-1]) // 2 * 2
    if width != rotary_dim and width != rotary_dim // 2:
        cos, sin = cos[..., : rotary_dim // 2], sin[..., : rotary_dim // 2]
    return _like(partial_rotary(q, k, cos, sin, rotary_dim), q, k)


def rope_of_whole_heads(q, k, cos, sin):
    """cos, sin: [batch or 1, tokens, head_dim / 2]."""
    return rope(q, k, cos, sin, rotary_dim=q.shape[-1])


def rope_of_vision(q, k, cos, sin):
    """q, k: [tokens, heads, head_dim]; cos, sin: [tokens, head_dim]."""
    q, k = (x.unsqueeze(0).transpose(1, 2) for x in (q, k))
    return tuple(x.transpose(1, 2).squeeze(0) for x in rope(q, k, cos, sin))


def llama4_rope(q, k, freqs_cis):
    """q [batch, tokens, heads, head_dim], k the same with its heads, freqs_cis complex, or its parts interleaved -> new q, k.

    Every batch row has its own positions, where freqs_cis has them: Liger gives all rows those of the first.
    """
    if not freqs_cis.is_complex():
        freqs_cis = torch.complex(*freqs_cis.float().unflatten(-1, (-1, 2)).unbind(-1))
    return rotary_complex(q, k, freqs_cis)


def llama4_rope_of_vision(query, key, freqs_ci):
    """freqs_ci: complex [tokens, head_dim / 2], with dimensions of 1 before and after the tokens; or real, after a cast: it multiplies."""
    freqs = freqs_ci.to(query.device).reshape(-1, query.shape[-1] // 2)
    if not freqs.is_complex():
        freqs = torch.complex(freqs.float(), torch.zeros_like(freqs, dtype=torch.float32))
    return rotary_complex(query, key, freqs)


def qwen2vl_mrope(q, k, cos, sin, mrope_section):
    """q [batch, heads, tokens, head_dim], k the same with its heads, cos, sin [3, batch, tokens, head_dim] -> new q, k."""
    return _like(rotary_multimodal(q, k, cos, sin, mrope_section), q, k)


def _refuse_legacy(size_average, reduce, default):
    for name, value in (("size_average", size_average), ("reduce", reduce)):
        if value is not default:
            fail(name, value, f"{default}, which Liger ignores: use reduction instead")


def cross_entropy(_input, target, weight=None, ignore_index=-100, reduction="mean", lse_square_scale=0.0, size_average=None, reduce=None,
                  **options):
    """_input [tokens, classes], target [tokens] -> (loss, z_loss, token_accuracy, predicted_tokens), None for what is not asked for.

    The losses are in _input's dtype. options: of this package's `cross_entropy`. Raises ValueError for size_average and reduce.
    """
    _refuse_legacy(size_average, reduce, None)
    _check_bounds(target, _input.shape[-1], ignore_index)
    weight = _class_weight(weight, target, ignore_index, reduction, lse_square_scale)
    options = {"ignore_index": ignore_index, "reduction": reduction, "lse_square_scale": lse_square_scale, **options}
    return _four(cross_entropy_of_logits.cross_entropy(_input, target, weight, **options), _input.dtype)


def fused_linear_cross_entropy(_input, weight, target, bias=None, ce_weight=None, ignore_index=-100, reduction="mean",
                               lse_square_scale=0.0, **options):
    """_input [tokens, hidden], weight [classes, hidden], target [tokens] -> as `cross_entropy`, losses in fp32.

    options: of this package's `linear_cross_entropy`.
    """
    _input, weight, bias = autocast(_input, weight, bias)
    class_weight = _class_weight(ce_weight, target, ignore_index, reduction, lse_square_scale)
    options = {"ignore_index": ignore_index, "reduction": reduction, "lse_square_scale": lse_square_scale, **options}
    found = linear_ce.linear_cross_entropy(_input, weight, target, bias, class_weight=class_weight, **options)
    return _four(found, torch.float64 if _input.dtype == torch.float64 else torch.float32)


def kl_div(y_pred, y_true, reduction="batchmean", log_target=False, eps=1e-10, size_average=True, reduce=True):
    """y_pred log-probabilities, y_true probabilities (log_target: their logarithms) [tokens, classes] -> the loss, fp32.

    Raises ValueError for size_average and reduce.
    """
    _refuse_legacy(size_average, reduce, True)
    y_pred, y_true = _one_dtype(y_pred, y_true)
    return divergence.kl_div(y_pred, y_true, reduction, log_target, eps=0.0 if log_target else eps)


def jsd(_input, target, shift_labels=None, beta=0.5, ignore_index=-100):
    """_input, target log-probabilities [tokens, classes], shift_labels [tokens] or None -> the loss in _input's dtype."""
    log_q, log_p = _one_dtype(_input, target)
    return divergence.jsd(log_q, log_p, _labels(shift_labels), beta=beta, ignore_index=ignore_index).to(_input.dtype)


def tvd(p, q, shift_labels=None, reduction="batchmean", ignore_index=-100):
    """p, q probabilities [tokens, classes], shift_labels [tokens] or None -> the loss, fp32."""
    p, q = _one_dtype(p, q)
    return divergence.tvd(p, q, _labels(shift_labels), reduction=reduction, ignore_index=ignore_index)


def fused_linear_jsd(student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5, ignore_index=-100,
                     temperature=1.0, accum_dtype=None):
    """student_input [tokens, hidden], student_weight [classes, hidden], the teacher's with its own hidden size, shift_labels [tokens]
    or None -> the loss, fp32. The teacher gets no gradient."""
    student_input, student_weight, teacher_input, teacher_weight = autocast(student_input, student_weight, teacher_input, teacher_weight)
    options = {"beta": jsd_beta, "ignore_index": ignore_index, "temperature": temperature, "accum_dtype": accum_dtype}
    return linear_divergence.linear_jsd(student_input, student_weight, teacher_input, teacher_weight, _labels(shift_labels), **options)


def tiled_mlp(fn, mlp_module, x, shards):
    """fn(mlp_module, x) over shards of x's tokens, each computed again in the backward pass.

    Weights get their gradients from autograd, once, whatever else requires a gradient: Liger's writes .grad itself, once a shard, and not
    at all where x requires none.
    """
    parts = torch.chunk(x, max(1, shards), dim=-2)
    return torch.cat([checkpoint(fn, mlp_module, part, use_reentrant=False) for part in parts], dim=-2)


def apply_tiled_mlp(fn, mlp_module, x, num_shards=None, compute_params=None):
    """Calls `tiled_mlp` with ceil(tokens / hidden) shards where none are given.

    The MLPs of Liger's own tiled modules go to the operation where their projections are torch.nn.Linear without hooks.
    """
    shards = max(1, math.ceil(x.shape[-2] / x.shape[-1]) if num_shards is None else num_shards)
    activation = TILED.get(type(mlp_module).__name__) if getattr(fn, "__name__", "") == "_mlp_forward" else None
    weights = _plain_weights(mlp_module) if activation else None
    if activation is None or weights is None or torch.is_autocast_enabled(x.device.type) or any(w.dtype != x.dtype for w in weights):
        return tiled_mlp(fn, mlp_module, x, shards)
    gate, up, down = weights
    return tiled_mlp_of(x, gate, up, down, activation, shards)


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
