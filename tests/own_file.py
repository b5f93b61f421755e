"""Llama in a file of the user's own, for tests of what is known by its text."""

import importlib.util
import inspect
import re
import sys
import tempfile
from pathlib import Path

import torch

from tests.models import VOCABULARY
from tools.transformers_texts import installed_source

FROM_A_FILE = "from_a_file"


def source_of_mine(prefix="Llama", folder="") -> str:
    """Llama's file, or another family's, as a user has it: under other names, with absolute imports. folder: of transformers, by default
    the prefix."""
    folder = folder or prefix.lower()
    text = installed_source(f"transformers.models.{folder}.modeling_{folder}").replace(prefix, "Mine")
    config = f"from transformers import {prefix}Config as MineConfig"
    text = re.sub(rf"^from .configuration_{folder} import .*", config, text, flags=re.MULTILINE)
    text = re.sub(r"^from \.\.\. import", "from transformers import", text, flags=re.MULTILINE)
    return re.sub(r"^from \.\.\.", "from transformers.", text, flags=re.MULTILINE)


def source_of_other() -> str:
    """The file of tests/other_decoder.py, with the name that the installed transformers has for a cache."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    text = (Path(__file__).parent / "other_decoder.py").read_text(encoding="utf-8")
    if "cache" not in inspect.signature(LlamaAttention.forward).parameters:
        return text
    before, layers, after = re.split("(?=class OtterAttention|class OtterModel)", text)
    after = after.replace("=mask, past_key_values=", "=mask, cache=")
    return before + layers.replace("past_key_values", "cache") + after


def load_mine(tmp_path, monkeypatch):
    """A function that loads a small model of a file under a module's name, with pieces of the text replaced. source: the file's text, by
    default Llama's; sizes: of the configuration, beside the usual ones."""

    def load(*changes, name=FROM_A_FILE, source=None, **sizes):
        text = source_of_mine() if source is None else source
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        # Elsewhere each time: compiled code is kept by a file's path, length and the second in which it was written.
        path = Path(tempfile.mkdtemp(dir=tmp_path)) / f"{name.rpartition('.')[2]}.py"
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        defined = [cls for cls in vars(module).values() if getattr(cls, "__module__", "") == name]
        [causal_lm] = [cls for cls in defined if cls.__name__.endswith("ForCausalLM")]
        usual = dict(vocab_size=VOCABULARY, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4)
        torch.manual_seed(0)
        usual.update(num_key_value_heads=2, head_dim=12, pad_token_id=0, eos_token_id=None, bos_token_id=None)
        config = causal_lm.config_class(**{**usual, **sizes})
        model = causal_lm._from_config(config, attn_implementation="eager").train()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        return model

    return load
