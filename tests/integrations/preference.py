"""TRL's trainers of preference and reinforcement learning, with our function in the place of TRL's own: the same losses, metrics, gradients
and parameters after some steps."""

import contextlib
import warnings

import pytest
import torch

from tests.integrations.common import FACTOR, PAGES, install, layers_run, model_on  # noqa: F401
from tests.integrations.trainers import Gradients, on_one_device, tokenizer
from tests.models import VOCABULARY
from tests.tolerances import assert_close

STEPS = 3
# What a trainer measures of time, and what is the difference of two nearly equal numbers at the first step.
NOT_COMPARED = {"epoch", "train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "step_time"}
TEXTS = tuple(" ".join(str(2 + (7 * i + 3 * j * j) % (VOCABULARY - 2)) for j in range(4 + i % 5)) for i in range(16))


def pairs():
    """Prompts with an answer that is preferred and one that is not."""
    return [{"prompt": a, "chosen": b, "rejected": c} for a, b, c in zip(TEXTS, TEXTS[3:], TEXTS[7:])]


def reward(completions, **_):
    """A number that depends on every character of a text."""
    return [(sum(map(ord, text)) % 17) / 17 for text in completions]


# Numbers are words of the tokenizer, and so is 1, the end of an answer. The words between the markers are the assistant's.
CHAT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} 1 {% endgeneration %}"
    "{% else %}{{ m['content'] }} {% endif %}{% endfor %}"
)


def conversation(row):
    return {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}]}


def tokenizer_of_chats():
    found = tokenizer()
    found.chat_template = CHAT
    return found


def lora():
    from peft import LoraConfig

    return LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")


def make(kind, model, folder, device, callbacks, **options):
    """A trainer of TRL, by the first part of its name."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    arguments = {
        "output_dir": str(folder), "max_steps": STEPS, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "seed": 0, "use_cpu": device == "cpu", "bf16": False, "gradient_checkpointing": False,
        "per_device_train_batch_size": 4, "optim": "sgd",
    }  # fmt: skip
    extra = {"peft_config": options.pop("peft_config")} if "peft_config" in options else {}
    data = [{"prompt": text} for text in TEXTS]
    if kind == "KTO":
        data = [{"prompt": row["prompt"], "completion": row["chosen"], "label": i % 2 == 0} for i, row in enumerate(pairs())]
    elif kind == "DPO":
        data = pairs()
    elif kind == "SFT":
        data = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs()]
        if options.get("assistant_only_loss"):
            data = [conversation(row) for row in pairs()]
    elif kind in ("GRPO", "RLOO"):
        arguments |= {"num_generations": 4, "max_completion_length": 6}
        extra["reward_funcs"] = reward
    else:
        arguments |= {"max_completion_length": 6}
        extra["teacher_model"] = model_on(device, hidden_size=96)
    config = on_one_device(getattr(trl, f"{kind}Config")(**{**arguments, **options}))
    words = tokenizer_of_chats() if options.get("assistant_only_loss") else tokenizer()
    extra |= {"args": config, "processing_class": words, "train_dataset": datasets.Dataset.from_list(data), "callbacks": callbacks}
    return getattr(trl, f"{kind}Trainer")(model=model, **extra)


class Outcome:
    """What a run gave: what it logged at every step, the gradients of each, the parameters at its end."""

    def __init__(self, logs, gradients, parameters):
        self.logs, self.gradients, self.parameters = logs, gradients, parameters

    def assert_same(self, expected, device, tolerance=1.0):
        assert len(self.logs) == len(expected.logs) > 0
        for mine, theirs in zip(self.logs, expected.logs):
            assert mine.keys() == theirs.keys()
            # A margin between a model and itself is a rounding error, and how many of these are positive is chance.
            margins = [abs(log.get("rewards/margins", 1.0)) for log in (mine, theirs)]
            by_chance = {"rewards/accuracies"} if max(margins) < 2e-4 * tolerance else set()
            for name in mine.keys() - NOT_COMPARED - by_chance:
                assert mine[name] == pytest.approx(theirs[name], rel=2e-4 * tolerance, abs=2e-4 * tolerance), name
        ours, others = self.gradients[0], expected.gradients[0]
        assert ours.keys() == others.keys()
        for name, gradient in others.items():
            assert_close(ours[name], gradient, torch.float32, f"gradient of {name}", 10 * tolerance * FACTOR[device])
        for name, value in expected.parameters.items():
            assert_close(self.parameters[name], value, torch.float32, name, 10 * tolerance * FACTOR[device])


def train(kind, model, folder, device, **options) -> Outcome:
    gradients = Gradients()
    torch.manual_seed(1)  # LoRA draws its weights, and completions are sampled
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer = make(kind, model, folder, device, [gradients], **options)
        trainer.train()
    logs = [{k: v for k, v in entry.items() if isinstance(v, (int, float))} for entry in trainer.state.log_history[:STEPS]]
    parameters = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    for module in trainer.model.modules():
        for name in ("_original_forward", "forward"):
            vars(module).pop(name, None)
    return Outcome(logs, gradients.steps, parameters)


@contextlib.contextmanager
def counted(qwen3):
    """A list of the calls of our functions in TRL's place."""
    import sys

    module, calls = sys.modules[f"{qwen3.__name__}.shared.hf.model.trl"], []
    originals = {name: getattr(module, name) for name in ("linear_log_probs", "linear_divergence")}
    for name, original in originals.items():
        setattr(module, name, lambda *args, name=name, original=original, **options: calls.append(name) or original(*args, **options))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


CONTINUOUS_BATCHING = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": PAGES}
CASES = {
    "SFT": ("SFT", {}),
    "SFT of completions alone": ("SFT", {"completion_only_loss": True}),
    "SFT, packed": ("SFT", {"packing": True, "max_length": 24}),
    "SFT, DFT": ("SFT", {"loss_type": "dft"}),
    "SFT, LoRA": ("SFT", {"lora": True}),
    **{f"DPO, {kind}": ("DPO", {"loss_type": [kind]}) for kind in ("sigmoid", "hinge", "ipo", "robust", "sppo_hard", "apo_zero", "sft")},
    "DPO, weighted": ("DPO", {"use_weighting": True}),
    "DPO, LoRA": ("DPO", {"lora": True}),
    "KTO": ("KTO", {}),
    "KTO, LoRA": ("KTO", {"lora": True}),
    "GRPO": ("GRPO", {"beta": 0.04}),
    "GRPO, entropy in the loss": ("GRPO", {"entropy_coef": 0.1, "num_iterations": 2, "temperature": 0.7}),
    "GRPO, entropy in the loss, LoRA": ("GRPO", {"entropy_coef": 0.1, "lora": True}),
    "GRPO, entropy's quantile": ("GRPO", {"top_entropy_quantile": 0.5, "lora": True, "loss_type": "grpo"}),
    "RLOO": ("RLOO", {}),
    **{f"distillation, beta {beta}": ("Distillation", {"beta": beta}) for beta in (0.0, 0.5, 1.0)},
    "distillation, LoRA": ("Distillation", {"lora": True, "beta": 0.5}),
    # What a trainer's options change in what the head is called with, and heads of other kinds.
    "SFT, packed without padding, LoRA": ("SFT", {"padding_free": True, "max_length": None, "completion_only_loss": True, "lora": True}),
    "DPO, a reference that follows": ("DPO", {"sync_ref_model": True, "ref_model_sync_steps": 1, "f_divergence_type": "js_divergence"}),
    "KTO, reference computed in advance, capped": ("KTO", {"precompute_ref_log_probs": True, "family": "gemma2", "lora": True}),
    "GRPO, a reference that follows": ("GRPO", {"sync_ref_model": True, "ref_model_sync_steps": 1, "beta": 0.05, "loss_type": "dr_grpo"}),
    "GRPO, entropies decide": (
        "GRPO", {"use_adaptive_entropy": True, "entropy_target": 2.0, "off_policy_mask_threshold": 0.5, "beta": 0.1, "num_iterations": 2}
    ),
    "SFT, of the assistant alone": ("SFT", {"assistant_only_loss": True}),
    "DPO, reference computed in advance": ("DPO", {"precompute_ref_log_probs": True, "lora": True}),
    "DPO, several kinds": ("DPO", {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.1, 0.3]}),
    "KTO, unpaired": ("KTO", {"loss_type": "apo_zero_unpaired"}),
    "GRPO, continuous batching": ("GRPO", {**CONTINUOUS_BATCHING, "beta": 0.04}),
    "GRPO, continuous batching, LoRA": ("GRPO", {**CONTINUOUS_BATCHING, "lora": True, "num_iterations": 2}),
    "GRPO, nothing counts": ("GRPO", {"mask_truncated_completions": True}),
    "GRPO, a head in fp32": ("GRPO", {"cast_lm_head_to_fp32": True, "model": {"dtype": torch.bfloat16}, "tolerance": 300.0}),
    **{f"GRPO, {kind}": ("GRPO", {"loss_type": kind, "temperature": 0.6, "beta": 0.1}) for kind in ("cispo", "sapo", "vespo")},
    "GRPO, of whole answers": ("GRPO", {"loss_type": "luspo", "importance_sampling_level": "sequence", "num_iterations": 2}),
    "DPO, tied": ("DPO", {"model": {"tie_word_embeddings": True}}),
    "SFT, capped logits": ("SFT", {"family": "gemma2"}),
    "GRPO, capped logits": ("GRPO", {"family": "gemma2", "temperature": 0.8, "entropy_coef": 0.1, "beta": 0.04}),
    "KTO, a head with a bias": ("KTO", {"family": "phi"}),
    "RLOO, scaled logits": ("RLOO", {"family": "granite"}),
    "distillation, capped logits, LoRA": ("Distillation", {"family": "gemma2", "lora": True, "beta": 0.5, "temperature": 0.7}),
}


def other_family(name, device):
    """A small model that is no Qwen3: a head with a softcap, with a bias, with a multiplier."""
    import transformers

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
    }  # fmt: skip
    kind, changes = {
        "gemma2": ("Gemma2", {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}),
        "phi": ("Phi", {}),
        "granite": ("Granite", {"logits_scaling": 4.0}),
    }[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes, **changes)).to(device).train()
    if name == "phi":
        torch.nn.init.normal_(model.lm_head.bias)
    return model


KINDS = ("SFT", "DPO", "KTO", "GRPO", "RLOO", "Distillation")


@pytest.mark.integration(*(f"{kind}Trainer: log-probabilities without logits" for kind in KINDS))
@pytest.mark.parametrize("case", CASES)
def test_trainers_of_trl(qwen3, device, case, tmp_path):
    kind, options = CASES[case]
    outcomes = []
    for ours in (False, True):
        given = {**options, "peft_config": lora()} if options.get("lora") else dict(options)
        given.pop("lora", None)
        family, changes, tolerance = given.pop("family", None), given.pop("model", {}), given.pop("tolerance", 1.0)
        model = other_family(family, device) if family else model_on(device, **changes)
        model.save_pretrained(tmp_path / "model")  # TRL loads the reference model by its name
        model.config._name_or_path = str(tmp_path / "model")
        if ours and family:
            qwen3.apply()
        elif ours:
            install(qwen3, model)
        with counted(qwen3) as calls:
            outcomes.append(train(kind, model, tmp_path, device, **given))
        assert set(calls) == ({"linear_divergence" if kind == "Distillation" else "linear_log_probs"} if ours else set())
    outcomes[1].assert_same(outcomes[0], device, tolerance)
