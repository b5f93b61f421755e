"""Imports what all measuring processes share and none of them changes, once, in the server that forks them; see processes.py.

Nothing here may start CUDA, which no process can do for the one that it forks, or choose between implementations for all providers:
Liger-Kernel reads its variables when it is imported and asks for the GPU, transformers' Qwen3.5 looks for fla, Unsloth replaces parts of
transformers. Each measuring process imports those itself.
"""

import contextlib
import importlib
import importlib.util

FAMILIES = ("qwen3", "qwen3_moe", "gpt_oss", "llama", "qwen2", "mistral", "phi3", "gemma3", "smollm3", "olmo2", "gemma4", "mixtral",
            "glm4_moe", "qwen3_vl")
MODULES = ("torch._dynamo", "triton", "kernels", *(f"transformers.models.{name}.modeling_{name}" for name in FAMILIES))

for _name in MODULES:
    with contextlib.suppress(Exception):  # who needs it hears so
        importlib.import_module(_name)
if importlib.util.find_spec("bitsandbytes") is None:  # PEFT imports it, and it asks for the GPU
    with contextlib.suppress(Exception):
        importlib.import_module("peft")
