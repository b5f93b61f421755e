"""Llama in a file of the user's own, for tests of what is known by its text."""

import importlib.util
import re
import sys
from pathlib import Path

import torch

from tests.models import VOCABULARY

FROM_A_FILE = "from_a_file"


def source_of_mine() -> str:
    """Llama's file as a user has it: under other names, with absolute imports."""
    import transformers.models.llama.modeling_llama as llama

    text = Path(llama.__file__).read_text(encoding="utf-8").replace("Llama", "Mine")
    text = re.sub(r"^from .configuration_llama import .*", "from transformers import LlamaConfig as MineConfig", text, flags=re.MULTILINE)
    return re.sub(r"^from \.\.\.", "from transformers.", text, flags=re.MULTILINE)


def load_mine(tmp_path, monkeypatch):
    """A function that loads a small model of a file under a module's name, with pieces of the text replaced."""

    def load(*changes, name=FROM_A_FILE):
        text = source_of_mine()
        for old, new in changes:
            assert text.count(old) == 1
            text = text.replace(old, new)
        path = tmp_path / f"{name.rpartition('.')[2]}.py"
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        from transformers import LlamaConfig

        sizes = dict(vocab_size=VOCABULARY, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4)
        torch.manual_seed(0)
        config = LlamaConfig(**sizes, num_key_value_heads=2, head_dim=12, pad_token_id=0, eos_token_id=None, bos_token_id=None)
        model = module.MineForCausalLM._from_config(config, attn_implementation="eager").train()
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        return model

    return load
