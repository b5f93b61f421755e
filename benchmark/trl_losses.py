"""Losses of TRL's trainers, as a training step computes them: DPO's, with its reference pass, and GRPO's.

    python -m benchmark.steps --loss dpo --lora 16 --layers 12

The trainer is TRL's own, and so is its loss; the batch is made here, so that nothing of tokenizers or of generation is measured.
"""

import math
import tempfile
import warnings

import torch

from .providers import require_modules

LOSSES = ("dpo", "grpo")
ROWS = 8  # of a batch: 4 pairs, or a group of 8 completions
PROMPT = 0.25  # the share of a row that is its prompt
WORDS = ("0", "1", "2", "3")  # of the tokenizer that a trainer wants; 0 pads, 1 ends


def tokenizer():
    """Return one that knows a few words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word: int(word) for word in WORDS}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0")


def reward(completions, **_):
    """Rate completions, which are never generated here."""
    return [0.0] * len(completions)


class TrainerLoss:
    """The loss of a trainer of TRL over batches of drawn tokens. trainer.model is what is trained.

    Args:
        kind: one of LOSSES.
        model: a causal LM without adapters, on its device.
        peft_config: of the adapters, which the trainer puts into the model; None trains all weights, and DPO's reference is a second model.
        device: of the model.
    """

    def __init__(self, kind: str, model, peft_config, device: str):
        require_modules("trl", "datasets")
        import trl
        from datasets import Dataset

        self.kind, self.folder = kind, tempfile.TemporaryDirectory()
        given = {"output_dir": self.folder.name, "report_to": [], "save_strategy": "no", "use_cpu": device == "cpu", "bf16": False}
        given |= {"per_device_train_batch_size": ROWS, "gradient_checkpointing": False, "disable_tqdm": True}
        data, more = [{"prompt": "2", "chosen": "3", "rejected": "2"}] * ROWS, {"processing_class": tokenizer()}
        if kind == "grpo":
            given["num_generations"] = ROWS
            more["reward_funcs"] = reward
        config = getattr(trl, f"{kind.upper()}Config")(**given)
        config._n_gpu = min(config.n_gpu, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            create = getattr(trl, f"{kind.upper()}Trainer")
            self.trainer = create(model=model, args=config, train_dataset=Dataset.from_list(data), peft_config=peft_config, **more)
        self.trainer.current_gradient_accumulation_steps = 1  # which its loop would say

    def batch(self, ids: torch.Tensor) -> dict:
        """Return the arguments of the loss. ids: [1, tokens], of all rows."""
        length = ids.shape[1] // ROWS
        rows, prompt = ids[:, : ROWS * length].reshape(ROWS, length), max(1, int(PROMPT * length))
        if self.kind == "dpo":
            rows[ROWS // 2 :, :prompt] = rows[: ROWS // 2, :prompt]  # the second half is rejected
            mask = torch.ones_like(rows)
            completion = mask.clone()
            completion[:, :prompt] = 0
            return {"input_ids": rows, "attention_mask": mask, "completion_mask": completion}
        rows[:, :prompt] = rows[:1, :prompt]
        found = {"prompt_ids": rows[:, :prompt], "completion_ids": rows[:, prompt:]}
        masks = {name.replace("_ids", "_mask"): torch.ones_like(part) for name, part in found.items()}
        advantages = torch.linspace(-1.0, 1.0, ROWS, device=ids.device)
        count = torch.tensor(found["completion_ids"].numel(), device=ids.device)
        # Other log-probabilities than the policy's own, which would make the loss one number whatever the policy is.
        old = torch.full(found["completion_ids"].shape, -math.log(self.trainer.model.config.vocab_size), device=ids.device)
        return found | masks | {"advantages": advantages, "num_items_in_batch": count, "old_per_token_logps": old}

    def __call__(self, batch: dict) -> torch.Tensor:
        return self.trainer.compute_loss(self.trainer.model, batch)
