"""Gradient checkpointing of transformers that keeps attention, with the attention that PyTorch chooses on a GPU and with ours."""

import gc

import pytest
import torch

from tests.compile_checks import with_adapters
from tests.models import tiny_model, tiny_qwen3_moe
from tests.modes import Operators
from tests.tolerances import assert_close

SIZES = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
         "head_dim": 128}


def is_attention(operator, args):
    """Of PyTorch's kernels for attention, backward ones left out."""
    name = str(operator)
    return "_attention" in name and "scaled_dot_product" in name and "backward" not in name


@pytest.mark.parametrize("padded", (False, True), ids=("SDPA", "ours"))
@pytest.mark.parametrize("reentrant", (False, True), ids=("not reentrant", "reentrant"))
def test_attention_is_kept(ops, reentrant, padded):
    """Losses are the same bits, gradients what attention's backward pass leaves of that; nothing of it stays in memory. Ours takes padding
    that has no labels."""
    ids = torch.randint(1, 8192, (2, 200), device="cuda")
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 150:] = 0
    labels = ids.where(mask.bool(), -100)
    found, counts = [], []
    for keep in (False, True):
        model = ops.kernelize(tiny_model(torch.bfloat16, num_hidden_layers=2, **SIZES).to("cuda"), keep_attention=keep, unpad=False)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        with Operators(is_attention) as attentions:
            loss = model(input_ids=ids, labels=labels, attention_mask=mask, use_cache=False).loss
            loss.backward()
        counts.append(attentions.count)
        found.append((loss, {name: parameter.grad for name, parameter in model.named_parameters()}))
    (expected, wanted), (loss, gradients) = found
    assert torch.equal(loss, expected)
    for name, gradient in gradients.items():
        assert_close(gradient, wanted[name], torch.bfloat16, name)
    assert counts == ([0, 0] if padded else [4, 2])


@pytest.mark.parametrize("kind", ("plain", "LoRA", "experts"))
def test_the_mlp_is_made_again(ops, kind):
    """Losses and gradients are the same bits, and a forward pass keeps less: gate and up of each layer."""
    ids = torch.randint(1, 8192, (2, 256), device="cuda")
    found, kept = [], []
    for recompute in (False, True):
        make = tiny_qwen3_moe if kind == "experts" else tiny_model
        model = make(torch.bfloat16, **SIZES).to("cuda")
        model = ops.kernelize(with_adapters(model) if kind == "LoRA" else model, recompute_mlp=recompute)
        model.enable_input_require_grads()
        for _ in range(2):  # what a first step makes once is there in the second
            model.zero_grad()
            gc.collect()  # else what other tests left may be freed in between
            before = torch.cuda.memory_allocated()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            kept_now = torch.cuda.memory_allocated() - before
            loss.backward()
        kept.append(kept_now)
        found.append([loss, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    config = model.config
    widths = [config.num_experts_per_tok * config.moe_intermediate_size if hasattr(layer.mlp, "experts") else config.intermediate_size
              for layer in model.get_submodule("base_model.model.model" if kind == "LoRA" else "model").layers]
    assert kept[0] - kept[1] >= 0.95 * 2 * ids.numel() * sum(widths) * 2
