"""Training steps under gradient checkpointing: their gradients."""

import importlib

import pytest
import torch

from tests.models import random_tokens
from tests.modes import Operators

IDS = random_tokens(2, 17)
INPUTS = {"input_ids": IDS, "labels": IDS}
REENTRANT = pytest.mark.parametrize("reentrant", (False, True), ids=("not reentrant", "reentrant"))
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def with_one_operator():
    """Changes of a model's config with which PyTorch's attention on a CPU is `FLASH`: with torch 2.6 only of heads that are not grouped."""
    q, k = torch.ones(1, 2, 2, 8), torch.ones(1, 1, 2, 8)
    with Operators(FLASH) as runs:
        torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    return {} if runs.count else {"num_key_value_heads": 4}


def gradients(model, **inputs):
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


class OnTheHost(torch.autograd.Function):
    """Checkpoints as Unsloth and axolotl do: the input is held on the CPU."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x.detach().clone())
        return function(x)

    @staticmethod
    def backward(ctx, dout):
        x = ctx.saved_tensors[0].clone().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(x)
        torch.autograd.backward(out, dout)
        return None, x.grad


def forget_warnings(package):
    """The package warns again of what it warns of once a process."""
    importlib.import_module(f"{package.__name__}.shared.hf.parts.explanation")._warned.clear()
