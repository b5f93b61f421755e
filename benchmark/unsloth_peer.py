"""Unsloth, a peer of training with adapters. It replaces parts of transformers when it is imported, and loads models from a folder alone:
so the model is written to one first."""

import os
import tempfile
from pathlib import Path

import torch

from .providers import require_modules

LONGEST = 32768  # tokens that a model is loaded for
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def prepare() -> None:
    """Import Unsloth, which needs no network and sends nothing. Raise NotInstalled where it is not there."""
    require_modules("unsloth", "unsloth_zoo", "bitsandbytes", "triton")
    folder = Path(tempfile.gettempdir()) / "unsloth_compiled"
    os.environ.update(UNSLOTH_DISABLE_STATISTICS="1", HF_HUB_OFFLINE="1", UNSLOTH_COMPILE_LOCATION=str(folder))
    import unsloth  # noqa: F401


def _write(model, folder: Path) -> None:
    """Write a model and a tokenizer, without which Unsloth loads none."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<|endoftext|>": 1, "<|im_end|>": 2, **{f"w{i}": i for i in range(3, model.config.vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    model.save_pretrained(folder)


def adapted(model, rank: int):
    """Return Unsloth's form of a model with adapters of a rank on all projections. The model itself is of no use afterwards."""
    from unsloth import FastLanguageModel

    with tempfile.TemporaryDirectory() as folder:
        _write(model, Path(folder))
        model.to("meta")  # so that its memory is free
        loaded, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=LONGEST, dtype=torch.bfloat16, load_in_4bit=False, local_files_only=True
        )
    options = {"lora_dropout": 0, "bias": "none", "use_gradient_checkpointing": False, "random_state": 1}
    return FastLanguageModel.get_peft_model(loaded, r=rank, target_modules=PROJECTIONS, lora_alpha=2 * rank, **options).train()
