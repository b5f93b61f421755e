"""Checkpoints in the host's memory, copied on a stream of their own, and MLPs in tiles of tokens."""

import warnings

import pytest
import torch

from tests.compile_checks import with_adapters
from tests.gpu.test_checkpointing import SIZES
from tests.models import tiny_model
from tests.tolerances import assert_close

LAYERS = 6


def steps_of(ops, lora=False, reentrant=False, count=4, **options):
    """(losses and gradients of several steps, the most memory of the last beyond what was there before it)."""
    model = tiny_model(torch.bfloat16, num_hidden_layers=LAYERS, **SIZES).to("cuda")
    model = ops.kernelize(with_adapters(model, lora_dropout=0.1) if lora else model, **options).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = []
    for seed in range(count):
        ids = torch.randint(1, 8192, (1, 8192), generator=torch.Generator().manual_seed(seed)).to("cuda")
        torch.manual_seed(seed)
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]
    return found, peak


@pytest.mark.parametrize("reentrant", (False, True), ids=("not reentrant", "reentrant"))
@pytest.mark.parametrize("lora", (False, True), ids=("plain", "LoRA with dropout"))
def test_the_bits_of_plain_checkpoints_in_less_memory(ops, lora, reentrant):
    torch.use_deterministic_algorithms(True, warn_only=True)  # of SDPA's backward pass
    try:
        expected, more = steps_of(ops, lora, reentrant)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            found, less = steps_of(ops, lora, reentrant, offload=True)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert more - less > (LAYERS - 3) * 8192 * SIZES["hidden_size"] * 2


def test_the_rest_goes_along_and_to_pageable_memory(ops):
    expected, _ = steps_of(ops, keep_attention=True)
    with pytest.warns(RuntimeWarning, match="goes to pageable memory"):
        found, _ = steps_of(ops, keep_attention=True, offload=1e-6)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, torch.bfloat16, "with attention kept in pageable memory")


def test_tiles(ops):
    (expected, more), (found, less) = steps_of(ops), steps_of(ops, recompute_mlp=1024)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, torch.bfloat16, "gradient of a model whose MLPs are in tiles", 2)
    assert more - less > 8192 * SIZES["intermediate_size"] * 2
