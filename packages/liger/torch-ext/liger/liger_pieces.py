"""What Liger's dispatcher calls `*_loss_and_grad`: the loss and its gradient for one chunk of a fused linear loss.

Our linear losses take the place of Liger's as a whole and need none of these. They are registered for whoever asks for this back end by
name, in a loss of Liger's own or for every operation (LIGER_KERNEL_IMPL), where a name without an implementation is an error.
"""

from typing import Any, Optional, Tuple

import torch

from .shared.ops.cross_entropy_of_logits import cross_entropy
from .shared.ops.divergence import divergence_forward


def jsd_loss_and_grad(
    student_prob, teacher_prob, shift_labels, beta, ignore_index, n_non_ignore, *, mode=None
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Computes the JSD of log-probabilities [rows, classes], divided by n_non_ignore: (its sum, fp32, []; the gradient by the student)."""
    labels = None if shift_labels is None else shift_labels.to(torch.int64)
    scale = 1.0 / max(1.0, n_non_ignore)
    return divergence_forward(student_prob, teacher_prob, labels, "js", scale, False, float(beta), ignore_index, True)


def kl_loss_and_grad(*args, mode=None) -> Tuple[torch.Tensor, torch.Tensor]:
    """Calls Liger's: this package has no KL divergence of logits and probabilities."""
    from liger_kernel.backends import dispatch

    return dispatch("kl_loss_and_grad", *args, impl="nvidia-triton", mode=mode)


def cross_entropy_loss_and_grad(
    logits_chunk,
    target_chunk,
    ce_weight,
    ignore_index,
    lse_square_scale,
    label_smoothing,
    reduction,
    softcap,
    n_non_ignore,
    sum_non_ignore_weight,
    weight_sum,
    return_z_loss,
    return_token_accuracy,
    return_predicted_tokens,
    has_gradients,
    *,
    mode=None,
) -> Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor], torch.Tensor]:
    """Computes (losses, z-losses, hits, predictions, gradient) of logits [rows, classes], one of the first four a row, None for those
    not asked for; the gradient is a new tensor, and the logits themselves without has_gradients.

    n_non_ignore, sum_non_ignore_weight: counted tokens of all chunks and the sum of their class weights, which "mean" divides by.
    weight_sum: not needed.
    """
    averages = reduction == "mean"
    tokens = max(1, n_non_ignore) if averages else 1
    divisor = (sum_non_ignore_weight if ce_weight is not None else tokens) if averages else 1
    logits = logits_chunk.detach().requires_grad_(bool(has_gradients))
    with torch.enable_grad():
        found: Any = cross_entropy(
            logits,
            target_chunk,
            ce_weight,
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
            softcap=softcap,
            lse_square_scale=lse_square_scale * divisor / tokens,  # the z-loss is an average over tokens, whatever the classes weigh
            return_z_loss=True,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )
    gradient = logits_chunk
    if has_gradients:
        (gradient,) = torch.autograd.grad(found.loss, logits, torch.full_like(found.loss, 1 / divisor))
    z_loss = (found.z_loss / divisor).to(logits.dtype) if return_z_loss else None
    return found.loss.detach() / divisor, z_loss, found.token_accuracy, found.predicted_tokens, gradient
