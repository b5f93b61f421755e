"""Liger-Kernel's names, with the arguments, order and defaults of its version 0.8.5, over the operations of this package.

`from liger_kernel.transformers import LigerRMSNorm` becomes an import from here, and Liger need not be installed. Three kinds of names:
`LigerXFunction` with `.apply` (Liger's autograd functions), `liger_x` (its functions), and `LigerX` (its modules). A new operation is a
row of `OPERATIONS`, and its module one of `LOSSES`, or a class in `liger_modules` where it has parameters.

What Liger's arguments `in_place`, `row_mode`, `BLOCK_SIZE`, `impl`, `mode`, `backend` and `compute_params` choose does not exist here:
nothing of the caller's is ever overwritten, and there is one implementation. They are accepted and have no effect. What Liger has beyond
the 22 operations (LigerExperts, its fused mixture of experts, among it) is not here.
"""

from typing import Any, Callable, Dict, NamedTuple, Optional

from . import liger_calls as calls
from . import liger_modules as modules
from .liger_calls import CrossEntropyOutput, apply_tiled_mlp  # noqa: F401
from .liger_table import autograd_function, function, module_variant, options_module
from .shared.ops import divergence
from .shared.ops.cross_entropy import check_numbers, check_reduction
from .shared.ops.dyt import dyt
from .shared.ops.gated_activation import swiglu, swiglu_packed
from .shared.ops.layer_norm import layer_norm
from .shared.ops.neighborhood_attention import neighborhood_attention
from .shared.ops.poly_norm import poly_norm
from .shared.ops.softmax import softmax
from .shared.ops.sparsemax import sparsemax


class Operation(NamedTuple):
    """computes: what is called; name, arguments: of Liger's autograd function and its `apply`, where it has one; functions: the arguments
    of its functions, by their names; returns: called with the result, returns what the functions return instead."""

    computes: Callable
    name: str = ""
    arguments: str = ""
    functions: Dict[str, str] = {}
    returns: Optional[Callable] = None


CROSS_ENTROPY = "ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction='mean', softcap=None, return_z_loss=False"
RESULTS = "return_token_accuracy=False, return_predicted_tokens=False"
LINEAR = f"{CROSS_ENTROPY}, accum_dtype=None, use_token_scaling=False, {RESULTS}"
MROPE = "q, k, cos, sin, mrope_section, unsqueeze_dim=1"
ROPE = "q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None"
NORM = "eps, offset=0.0, casting_mode='llama'"
JSD = "jsd_beta=0.5, ignore_index=-100, temperature=1.0, accum_dtype=None"
STUDENT = "student_input, student_weight, teacher_input, teacher_weight"

OPERATIONS = (
    Operation(
        calls.rms_norm, "LigerRMSNormFunction", f"X, W, {NORM}, in_place=True, row_mode=None",
        {"liger_rms_norm": f"X, W, {NORM}, in_place=True"},
    ),
    Operation(
        calls.fused_add_rms_norm, "LigerFusedAddRMSNormFunction", f"X, R, W, {NORM}, in_place=False",
        {"liger_fused_add_rms_norm": f"X, R, W, {NORM}, in_place=True"},
    ),
    Operation(layer_norm, "LigerLayerNormFunction", "X, W, B, eps", {"liger_layer_norm": "X, W, B, eps"}),
    Operation(
        calls.group_norm, "LigerGroupNormFunction", "X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps",
        {"liger_group_norm": "X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps"},
    ),
    Operation(
        poly_norm, "LigerPolyNormFunction", "X, W, B, eps=1e-06, in_place=True", {"liger_poly_norm": "X, W, B, eps=1e-06, in_place=True"}
    ),
    Operation(dyt, "LigerDyTFunction", "x, alpha, gamma, beta", {"liger_dyt": "x, alpha, gamma, beta"}),
    Operation(softmax, "LigerSoftmaxFunction", "input_", {"liger_softmax": "x"}),
    Operation(sparsemax, "LigerSparsemaxFunction", "x, dim", {"liger_sparsemax": "input, dim=-1"}),
    Operation(
        swiglu, "LigerSiLUMulFunction", "a, b, gate_multiplier=1.0, down_multiplier=1.0", {"liger_swiglu": "a, b"}
    ),
    Operation(swiglu_packed, "LigerFusedGateUpSiLUMulFunction", "y, in_place=False"),
    Operation(calls.gelu_mul, "LigerGELUMulFunction", "a, b", {"liger_geglu": "a, b"}),
    Operation(calls.rope, "LigerRopeFunction", ROPE, {"liger_rope": ROPE, "liger_rotary_pos_emb": ROPE}),
    Operation(calls.rope_of_whole_heads, functions={"liger_rotary_pos_emb_gpt_oss": "q, k, cos, sin"}),
    Operation(calls.rope_of_vision, functions={"liger_rotary_pos_emb_vision": "q, k, cos, sin"}),
    Operation(
        calls.llama4_rope, "LigerLlama4RopeFunction", "q, k, freqs_cis, BLOCK_SIZE=None",
        {"liger_llama4_text_rotary_pos_emb": "xq, xk, freqs_cis"},
    ),
    Operation(calls.llama4_rope_of_vision, functions={"liger_llama4_vision_rotary_pos_emb": "query, key, freqs_ci"}),
    Operation(
        calls.qwen2vl_mrope, "LigerQwen2VLMRopeFunction", MROPE, {"liger_qwen2vl_mrope": MROPE, "liger_multimodal_rotary_pos_emb": MROPE}
    ),
    Operation(
        calls.cross_entropy, "LigerCrossEntropyFunction", f"_input, target, weight, {CROSS_ENTROPY}, {RESULTS}",
        {"liger_cross_entropy": "input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean', "
                                f"label_smoothing=0.0, lse_square_scale=0.0, softcap=None, return_z_loss=False, {RESULTS}"},
        calls.output_of,
    ),
    Operation(
        calls.fused_linear_cross_entropy, "LigerFusedLinearCrossEntropyFunction",
        f"_input, weight, target, bias=None, ce_weight=None, {LINEAR}, ce_impl=None, ce_mode=None, chunk_mem_const=1",
        {"liger_fused_linear_cross_entropy": f"input, weight, target, bias=None, ce_weight=None, {LINEAR}, chunk_mem_const=1"},
        calls.output_of,
    ),
    Operation(
        calls.kl_div, "LigerKLDivLossFunction", "y_pred, y_true, reduction='batchmean', log_target=False, eps=1e-10",
        {"liger_kl_div": "input, target, size_average=True, reduce=True, reduction='mean', log_target=False, eps=1e-10"},
    ),
    Operation(
        calls.jsd, "LigerJSDFunction", "_input, target, shift_labels=None, beta=0.5, ignore_index=-100, jsd_impl=None, jsd_mode=None",
        {"liger_jsd": "input, target, shift_labels=None, beta=0.5, ignore_index=-100"},
    ),
    Operation(
        calls.tvd, "LigerTVDLossFunction", "p, q, shift_labels=None, reduction='batchmean', ignore_index=-100",
        {"liger_tvd": "input, target, shift_labels=None, reduction='mean', ignore_index=-100"},
    ),
    Operation(
        calls.fused_linear_jsd, "LigerFusedLinearJSDFunction", f"{STUDENT}, shift_labels=None, {JSD}, jsd_impl=None, jsd_mode=None",
        {"liger_fused_linear_jsd": f"{STUDENT}, shift_labels=None, {JSD}"},
    ),
    Operation(
        neighborhood_attention, "LigerFusedNeighborhoodAttentionFunction", "query, key, value, kernel_size=7, dilation=1, scale=None",
        {"liger_fused_neighborhood_attention": "query, key, value, kernel_size=7, dilation=1, scale=None"},
    ),
    Operation(calls.tiled_mlp, "LigerTiledMLPFunction", "fn, mlp_module, x, shards, compute_params=None"),
)  # fmt: skip


class Loss(NamedTuple):
    """A module without parameters: the arguments of its constructor and of its forward; for the others see `options_module`."""

    computes: Callable
    options: str
    arguments: str
    check: Callable = lambda self: None
    returns: Optional[Callable] = None
    given: str = ""


def _check_cross_entropy(self) -> None:
    check_numbers(self.label_smoothing, self.softcap)
    check_reduction(self.reduction)


LOSSES = {
    "LigerSoftmax": Loss(softmax, "", "x"),
    "LigerSparsemax": Loss(sparsemax, "dim=-1", "x"),
    "LigerCrossEntropyLoss": Loss(
        calls.cross_entropy, f"weight=None, {CROSS_ENTROPY}, {RESULTS}", "_input, target", _check_cross_entropy, calls.output_of
    ),
    "LigerFusedLinearCrossEntropyLoss": Loss(
        calls.fused_linear_cross_entropy, f"ce_weight=None, {LINEAR}", "lin_weight, _input, target, bias=None", _check_cross_entropy,
        calls.output_of, given="_input, lin_weight, target, bias",
    ),
    "LigerJSD": Loss(
        calls.jsd, "beta=0.5, ignore_index=-100", "log_q, log_p, shift_labels=None", lambda self: divergence.check_numbers(beta=self.beta)
    ),
    "LigerTVDLoss": Loss(
        calls.tvd, "reduction='batchmean', ignore_index=-100", "p, q, shift_labels=None",
        lambda self: divergence.check_reduction(self.reduction),
    ),
    "LigerFusedLinearJSD": Loss(
        calls.fused_linear_jsd, JSD, f"{STUDENT}, shift_labels",
        lambda self: divergence.check_numbers(beta=self.jsd_beta, temperature=self.temperature),
    ),
}  # fmt: skip

# LigerRMSNorm with other defaults.
GEMMA = "hidden_size, eps=1e-06, offset=1.0, casting_mode='gemma', init_fn='zeros'"
LLAMA = "hidden_size, eps=1e-06, offset=0.0, casting_mode='llama', init_fn='ones'"
SCALED = "eps=1e-06, offset=0.0, casting_mode='gemma', init_fn='ones', in_place=False, with_scale=True"
RMS_NORMS = {
    "LigerRMSNormForGemma": f"{GEMMA}, in_place=True, row_mode=None",
    "LigerRMSNormForGemma2": f"{GEMMA}, in_place=False, row_mode=None",
    "LigerRMSNormForGemma3": "dim, eps=1e-06, offset=1.0, casting_mode='gemma', init_fn='zeros', in_place=False",
    "LigerRMSNormForGemma4": f"dim, {SCALED}",
    "LigerRMSNormForMuseGlimmer": f"dim=None, {SCALED}",
    "LigerRMSNormForMuseGlimmerTextCentered": f"{GEMMA}, in_place=False, row_mode=None",
    "LigerRMSNormForOlmo2": f"{LLAMA}, in_place=False, row_mode=None",
    "LigerRMSNormForGlm4": f"{LLAMA}, in_place=False, row_mode=None",
    "LigerRMSNormForQwen3Next": f"{GEMMA}, in_place=False, row_mode=None",
}

# Liger's autograd functions by their names, and the functions by which `back_end` replaces Liger's.
FUNCTIONS: Dict[str, Any] = {row.name: autograd_function(row.name, row.arguments, row.computes, __name__) for row in OPERATIONS if row.name}
FUNCTIONS["LigerFusedLinearCrossEntropyFunction"].supports_inner_impl_dispatch = True  # Liger then passes chunk_mem_const
FUNCTIONS["apply_tiled_mlp"] = apply_tiled_mlp
MODULES = {name: value for name, value in vars(modules).items() if name.startswith("Liger")}
MODULES.update(
    (name, options_module(name, row.options, row.arguments, row.computes, __name__, row.check, row.returns, row.given))
    for name, row in LOSSES.items()
)
MODULES.update(
    (name, module_variant(name, modules.LigerRMSNorm, options, __name__, with_scale="elementwise_affine"))
    for name, options in RMS_NORMS.items()
)
globals().update(FUNCTIONS)
globals().update(MODULES)
globals().update(
    (name, function(name, given, row.computes, __name__, row.returns)) for row in OPERATIONS for name, given in row.functions.items()
)


def apply_liger_llama4_rope_full(modeling_module):
    """Puts the functions for text and vision into a module that has transformers' names for them."""
    modeling_module.apply_rotary_emb = globals()["liger_llama4_text_rotary_pos_emb"]
    modeling_module.vision_apply_rotary_emb = globals()["liger_llama4_vision_rotary_pos_emb"]
