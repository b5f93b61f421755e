"""The names of `liger_kernel.chunked_loss`, with the arguments, order, defaults and results of Liger 0.8.5, over this package's losses.

Of each loss there are a module (`LigerFusedLinearDPOLoss`), an autograd function (`LigerFusedLinearDPOFunction`, with `.apply`) and a
function (`liger_fused_linear_dpo`). A loss is a row of `LOSSES`. `compiled` and `chunk_size` have no effect: nothing is compiled, and the
memory of the logits is bounded whatever an answer's length.
"""

from typing import Any, Callable, Dict, NamedTuple

from . import liger_calls as calls
from .liger_table import autograd_function, options_module
from .shared.ops import distillation_losses, policy_losses, preference_losses
from .shared.ops.divergence import check_numbers

DPO = "sigmoid hinge exo_pair nca_pair robust bco_pair sppo_hard apo_zero apo_down discopop".split()


# ---------------------------------------------------------------- what is computed
def _paired(_input, weight, target, bias, ignore_index, alpha, compute_nll_loss, **options):
    """(loss, (log-probabilities of the chosen and the rejected answers, means of their logits, NLL, rewards of both))."""
    found = preference_losses.linear_preference_loss(
        _input, weight, target, bias, ignore_index=ignore_index, nll_weight=alpha, compute_nll_loss=compute_nll_loss, **options
    )
    return found.loss, tuple(value for value in found[1:] if value is not None)


def dpo(
    _input, weight, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None, ignore_index=-100, beta=0.1, compute_nll_loss=False,
    use_ref_model=True, average_log_prob=False, loss_type="sigmoid", label_smoothing=0.0, discopop_tau=0.05, alpha=1.0,
):  # fmt: skip
    """_input [2 * pairs, tokens, hidden], weight [classes, hidden], target [2 * pairs, tokens] -> (loss, metrics)."""
    preference_losses.check_paired(loss_type, label_smoothing, beta, DPO)
    return _paired(
        _input, weight, target, bias, ignore_index, alpha, compute_nll_loss, loss=loss_type, ref_hidden=ref_input, ref_weight=ref_weight,
        ref_bias=ref_bias, use_reference=use_ref_model, beta=beta, label_smoothing=label_smoothing, discopop_tau=discopop_tau,
        average_log_prob=average_log_prob,
    )  # fmt: skip


def cpo(
    _input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0, compute_nll_loss=True,
    average_log_prob=False, gamma=0.0,
):  # fmt: skip
    """Computes it without a reference model, and with a margin for SimPO."""
    return _paired(
        _input, weight, target, bias, ignore_index, alpha, compute_nll_loss, use_reference=False, beta=beta,
        label_smoothing=label_smoothing, average_log_prob=average_log_prob, gamma=gamma,
    )  # fmt: skip


def simpo(
    _input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0, compute_nll_loss=False, gamma=0.5
):
    """`cpo` of means over the tokens, with a margin."""
    return cpo(_input, weight, target, bias, ignore_index, beta, alpha, label_smoothing, compute_nll_loss, True, gamma)


def orpo(_input, weight, target, bias=None, ignore_index=-100, beta=0.1, compute_nll_loss=True, nll_target=None):
    """nll_target: labels of the negative log-likelihood, where they are not target -> (loss, metrics, with the log odds ratios)."""
    return _paired(
        _input, weight, target, bias, ignore_index, 1.0, compute_nll_loss, loss="orpo", use_reference=False, beta=beta,
        average_log_prob=True, nll_target=nll_target,
    )  # fmt: skip


def kto(
    _input, weight, target, preference_labels, bias=None, ref_input=None, ref_weight=None, ref_bias=None, kl=None, ignore_index=-100,
    beta=0.1, use_ref_model=True, average_log_prob=False,
):  # fmt: skip
    """_input [answers, tokens, hidden], target [answers, tokens], preference_labels [answers] bool -> (loss, sums over both kinds)."""
    if preference_labels is None:
        preference_losses.fail("preference_labels", None, "[answers] bool, whether each is desirable")
    found = preference_losses.linear_kto_loss(
        _input, weight, target, preference_labels, bias, kl=kl, ref_hidden=ref_input, ref_weight=ref_weight, ref_bias=ref_bias,
        use_reference=use_ref_model, beta=beta, average_log_prob=average_log_prob, ignore_index=ignore_index,
    )  # fmt: skip
    return found.loss, tuple(found[1:])


def grpo(
    _input, weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None, old_per_token_logps=None,
    ref_input=None, ref_weight=None, ref_bias=None, loss_type="dapo", use_ref_model=True, vllm_is_ratio=None, **options,
):  # fmt: skip
    """_input [answers, tokens, hidden], selected_token_ids and attention_mask [answers, tokens], advantages [answers] -> (loss, metrics:
    the KL divergence where beta is not 0, and the part of the tokens that was clipped)."""
    variant = "luspo_of_all" if loss_type == "luspo" else loss_type
    found = policy_losses.linear_grpo_loss(
        _input, weight, selected_token_ids, attention_mask, advantages, bias, loss=variant, ref_log_probs=ref_per_token_logps,
        old_log_probs=old_per_token_logps, ref_hidden=ref_input, ref_weight=ref_weight, ref_bias=ref_bias, use_reference=use_ref_model,
        correction=vllm_is_ratio, **options,
    )  # fmt: skip
    return found.loss, tuple(value for value in found[1:] if value is not None)


def _distilled(distance: str) -> Callable:
    def distilled(
        student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias, weight_hard_loss=0.5,
        weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, return_soft_hard_loss=False,
    ):  # fmt: skip
        """student_input [tokens, hidden], student_weight [classes, hidden], the teacher's with its own hidden size, true_labels [tokens] ->
        the loss, or (loss, soft loss, hard loss)."""
        student_input, student_weight, teacher_input, teacher_weight, student_bias, teacher_bias = calls.autocast(
            student_input, student_weight, teacher_input, teacher_weight, student_bias, teacher_bias
        )
        found = distillation_losses.linear_distillation_loss(
            student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias, distance=distance,
            hard_weight=weight_hard_loss, soft_weight=weight_soft_loss, beta=beta, temperature=temperature, ignore_index=ignore_index,
            compute_hard_loss=weight_hard_loss != 0 or return_soft_hard_loss,
        )  # fmt: skip
        return tuple(found) if return_soft_hard_loss else found.loss

    return distilled


# ---------------------------------------------------------------- what Liger calls them
class Loss(NamedTuple):
    """computes: what is called; file: Liger's module; arguments: of its autograd function; options, forward: of its module's constructor
    and of its forward; given: the arguments that the forward passes on, in the function's order; check: as of `options_module`."""

    computes: Callable
    file: str
    arguments: str
    options: str
    forward: str
    given: str
    check: Callable[[Any], None] = lambda self: None


PAIRS = "_input, weight, target, bias=None"
IGNORE = "ignore_index=-100, beta=0.1"
REFERENCE = "ref_input=None, ref_weight=None, ref_bias=None"
RATIOS = "epsilon_low=0.2, epsilon_high=0.2, loss_type='dapo', max_completion_length=None, importance_sampling_level='token'"
SAPO = "sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, temperature=1.0"
VESPO = "vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0"
POLICY = (
    "_input, {}, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None, old_per_token_logps=None, "
    + REFERENCE
)
STUDENT = "student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias{0}, teacher_bias{0}"
DISTILLED = (
    "weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, compiled=True, chunk_size=1024, "
    "return_soft_hard_loss=False"
)
DPO_TYPE = "chunk_size=1, loss_type='sigmoid', label_smoothing=0.0, discopop_tau=0.05"
FORWARD, GIVEN = "lin_weight, _input, target, bias=None", "_input, lin_weight, target, bias"
KTO_OPTIONS = "average_log_prob=False, chunk_size=1"
GRPO_NAMES = "_input, lin_weight, selected_token_ids, attention_mask, advantages, bias=bias, ref_per_token_logps=ref_per_token_logps, "


def _check_grpo(self) -> None:
    names = policy_losses.PolicyOptions._fields
    policy_losses.check_numbers(policy_losses.PolicyOptions(**{name: getattr(self, name) for name in names if hasattr(self, name)}))


def _distillation(distance: str, file: str) -> Loss:
    return Loss(
        _distilled(distance), file, f"{STUDENT.format('')}, {DISTILLED}", DISTILLED, STUDENT.format("=None"),
        STUDENT.format(""), lambda self: check_numbers(temperature=self.temperature),
    )  # fmt: skip


LOSSES = {
    "DPO": Loss(
        dpo, "dpo_loss",
        f"{PAIRS}, {REFERENCE}, {IGNORE}, compute_nll_loss=False, compiled=True, use_ref_model=True, average_log_prob=False, {DPO_TYPE}, "
        "alpha=1.0",
        f"{IGNORE}, alpha=1.0, compute_nll_loss=False, compiled=True, use_ref_model=True, average_log_prob=False, {DPO_TYPE}",
        f"{FORWARD}, {REFERENCE}", f"{GIVEN}, ref_input, ref_weight, ref_bias",
        lambda self: preference_losses.check_paired(self.loss_type, self.label_smoothing, self.beta, DPO),
    ),
    "ORPO": Loss(
        orpo, "orpo_loss", f"{PAIRS}, {IGNORE}, compute_nll_loss=True, nll_target=None, compiled=True, chunk_size=1",
        f"{IGNORE}, compute_nll_loss=True, compiled=True, chunk_size=1", f"{FORWARD}, nll_target=None", f"{GIVEN}, nll_target=nll_target",
    ),
    "CPO": Loss(
        cpo, "cpo_loss",
        f"{PAIRS}, {IGNORE}, alpha=1.0, label_smoothing=0.0, compute_nll_loss=True, compiled=True, average_log_prob=False, chunk_size=1",
        f"{IGNORE}, alpha=1.0, label_smoothing=0.0, compute_nll_loss=True, compiled=True, average_log_prob=False, chunk_size=1",
        FORWARD, GIVEN,
    ),
    "SimPO": Loss(
        simpo, "simpo_loss",
        f"{PAIRS}, {IGNORE}, alpha=1.0, label_smoothing=0.0, compute_nll_loss=False, compiled=True, gamma=0.5, chunk_size=1",
        f"{IGNORE}, alpha=1.0, label_smoothing=0.0, compute_nll_loss=True, compiled=True, gamma=0.5, chunk_size=1", FORWARD, GIVEN,
    ),
    "KTO": Loss(
        kto, "kto_loss",
        f"_input, weight, target, preference_labels, bias=None, {REFERENCE}, kl=None, {IGNORE}, compiled=True, use_ref_model=True, "
        f"{KTO_OPTIONS}",
        f"{IGNORE}, compiled=True, use_ref_model=False, {KTO_OPTIONS}",
        f"_input, lin_weight, target, bias=None, preference_labels=None, {REFERENCE}, kl=None",
        "_input, lin_weight, target, preference_labels, bias, ref_input, ref_weight, ref_bias, kl",
    ),
    "GRPO": Loss(
        grpo, "grpo_loss",
        f"{POLICY.format('weight')}, beta=0.04, {RATIOS}, {SAPO}, compiled=True, use_ref_model=True, chunk_size=1, vllm_is_ratio=None, "
        f"delta=None, use_bias_correction_kl=False, {VESPO}, num_items_in_batch=None",
        "beta=0.04, compiled=True, use_ref_model=True, chunk_size=1, "
        f"{RATIOS}, {SAPO}, delta=None, use_bias_correction_kl=False, {VESPO}",
        f"{POLICY.format('lin_weight')}, vllm_is_ratio=None, num_items_in_batch=None",
        f"{GRPO_NAMES}old_per_token_logps=old_per_token_logps, ref_input=ref_input, ref_weight=ref_weight, ref_bias=ref_bias, "
        "vllm_is_ratio=vllm_is_ratio, num_items_in_batch=num_items_in_batch",
        _check_grpo,
    ),
    "JSD": _distillation("jsd", "jsd_loss"),
    "CosineSimilarity": _distillation("cosine", "cosine_similarity_loss"),
}  # fmt: skip


# By Liger's module: its autograd function, which `back_end` sets there.
FUNCTIONS: Dict[str, Any] = {}
for _name, _loss in LOSSES.items():
    _function: Any = autograd_function(f"LigerFusedLinear{_name}Function", _loss.arguments, _loss.computes, __name__)
    FUNCTIONS[_loss.file] = globals()[_function.__name__] = _function
    globals()[f"liger_fused_linear_{'cosine' if _name == 'CosineSimilarity' else _name.lower()}"] = _function.apply
    globals()[f"LigerFusedLinear{_name}Loss"] = options_module(
        f"LigerFusedLinear{_name}Loss", _loss.options, _loss.forward, _loss.computes, __name__, _loss.check, given=_loss.given
    )
