"""Small models of the families that Liger-Kernel patches: trained as transformers has them, and with Liger's patch on our kernels."""

import contextlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# What Liger calls a family: transformers' module, how its classes begin, and what the configuration needs beside sizes. Mixtures of experts
# and Nemotron are left out, because Liger's kernels for those are not among the 22 and cannot run on a CPU.
FAMILIES = {
    "llama": ("llama", "Llama", {}),
    "llama4": ("llama4", "Llama4Text", {"num_local_experts": 2, "intermediate_size_mlp": 48}),
    "mistral": ("mistral", "Mistral", {}),
    "ministral": ("ministral", "Ministral", {}),
    "gemma": ("gemma", "Gemma", {}),
    "gemma2": ("gemma2", "Gemma2", {}),
    "gemma3_text": ("gemma3", "Gemma3Text", {}),
    "qwen2": ("qwen2", "Qwen2", {}),
    "qwen3": ("qwen3", "Qwen3", {}),
    "phi3": ("phi3", "Phi3", {}),
    "granite": ("granite", "Granite", {}),
    "olmo2": ("olmo2", "Olmo2", {}),
    "olmo3": ("olmo3", "Olmo3", {}),
    "glm4": ("glm4", "Glm4", {}),
    "smollm3": ("smollm3", "SmolLM3", {}),
    "exaone4": ("exaone4", "Exaone4", {}),
    "gpt_oss": ("gpt_oss", "GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "falcon_h1": ("falcon_h1", "FalconH1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", "HunYuanDenseV1", {}),
}


@contextlib.contextmanager
def kept(module):
    """A module of transformers is afterwards what it was before; so is torch's cross entropy, which Liger sets for some families."""
    names, cross_entropy = dict(vars(module)), torch.nn.functional.cross_entropy
    forwards = [(cls, cls.forward) for cls in names.values() if isinstance(cls, type) and "forward" in vars(cls)]
    try:
        yield
    finally:
        vars(module).update(names)
        torch.nn.functional.cross_entropy = cross_entropy
        for cls, forward in forwards:
            cls.forward = forward


def train(cls, config, device):
    """(losses, the model) after a few steps of AdamW."""
    torch.manual_seed(0)
    model = cls(config).train().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    losses = []
    for tokens in torch.randint(3, SIZES["vocab_size"], (3, 2, 12), generator=torch.Generator().manual_seed(1)).to(device):
        losses.append(model(input_ids=tokens, labels=tokens).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).detach(), model


def check_family(liger, family: str, device: str, tolerance: float = 1e-4):
    """The losses and weights of transformers in float32, whatever Liger's patch puts into the model. Leaves Liger on our kernels."""
    import transformers

    folder, name, extra = FAMILIES[family]
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **extra}, attn_implementation="eager")
    cls = getattr(modeling, f"{name.replace('Text', '')}ForCausalLM")
    losses, plain = train(cls, config, device)
    liger.use_in_liger()
    with kept(modeling):
        getattr(importlib.import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{family}")()
        found, model = train(cls, config, device)
    assert any("Liger" in type(module).__name__ for module in model.modules())
    torch.testing.assert_close(found, losses, rtol=tolerance, atol=tolerance)
    for (key, weight), (_, wanted) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(weight, wanted, rtol=tolerance, atol=tolerance / 10, msg=lambda text, key=key: f"{key}: {text}")


def compared(folder, device: str) -> dict:
    """What tests/liger_reference.py finds of each case: ours is right in all, Liger's where both are. In a process of its own, which sees
    no GPU where the device is the CPU. folder: of our package."""
    command = [sys.executable, "-m", "tests.liger_reference", str(folder), device]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(results["ours"] is True for results in found.values()), found
    of_liger = {name for name, results in found.items() if results["liger"] is True}
    assert of_liger == {name for name in found if name.startswith("both_")}, found
    return found
