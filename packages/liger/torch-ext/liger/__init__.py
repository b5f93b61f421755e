"""The 22 operations of Liger-Kernel in cuTile, compiled ahead of time; and, in `use_in_liger`, a back end inside Liger itself."""

from . import back_end, chunked_loss, layers, liger_names
from .api import explain, kernelize, mapping, report, reset
from .back_end import restore_liger, use_in_liger
from .norms import add_rms_norm, rms_norm
from .shared.ops.cross_entropy_of_logits import cross_entropy
from .shared.ops.distillation_losses import linear_cosine, linear_distillation_loss
from .shared.ops.divergence import jsd, kl_div, tvd
from .shared.ops.dyt import dyt
from .shared.ops.gated_activation import geglu, geglu_packed, swiglu, swiglu_packed
from .shared.ops.group_norm import group_norm
from .shared.ops.layer_norm import layer_norm
from .shared.ops.linear_cross_entropy import linear_cross_entropy
from .shared.ops.linear_jsd import linear_jsd
from .shared.ops.linear_log_probs import linear_log_probs
from .shared.ops.llama4_rope import rotary_complex
from .shared.ops.mrope import partial_rotary as rotary
from .shared.ops.mrope import rotary_multimodal
from .shared.ops.neighborhood_attention import neighborhood_attention
from .shared.ops.policy_losses import linear_grpo_loss
from .shared.ops.poly_norm import poly_norm
from .shared.ops.preference_losses import linear_kto_loss, linear_preference_loss
from .shared.ops.softmax import softmax
from .shared.ops.sparsemax import sparsemax
from .shared.ops.tiled_mlp import tiled_geglu, tiled_mlp, tiled_swiglu
from .warmup import clear_autotune_cache, warmup_all_kernels

__all__ = [
    "add_rms_norm", "chunked_loss", "clear_autotune_cache", "cross_entropy", "dyt", "explain", "geglu", "geglu_packed", "group_norm", "jsd",
    "kernelize", "kl_div", "layer_norm", "layers", "liger_names", "linear_cosine", "linear_cross_entropy", "linear_distillation_loss",
    "linear_grpo_loss", "linear_jsd", "linear_kto_loss", "linear_log_probs", "linear_preference_loss", "mapping", "neighborhood_attention",
    "poly_norm", "report", "reset", "restore_liger", "rms_norm", "rotary", "rotary_complex", "rotary_multimodal", "softmax", "sparsemax",
    "swiglu", "swiglu_packed", "tiled_geglu", "tiled_mlp", "tiled_swiglu", "tvd", "use_in_liger", "warmup_all_kernels",
]

back_end.announce()
