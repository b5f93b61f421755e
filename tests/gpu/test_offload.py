"""Checkpoints in the host's memory, copied on a stream of their own, and MLPs in tiles of tokens."""

import warnings

import pytest
import torch

from tests.compile_checks import with_adapters
from tests.gpu.test_checkpointing import SIZES
from tests.models import tiny_model
from tests.tolerances import relative_error

LAYERS = 6


def steps_of(ops, lora=False, reentrant=False, count=4, width=SIZES["intermediate_size"], exact=False, **options):
    """(losses and gradients of several steps, the most memory of the last beyond what was there before it). exact: in float32."""
    model = tiny_model(torch.bfloat16, num_hidden_layers=LAYERS, **{**SIZES, "intermediate_size": width}).to("cuda")
    model = model.float() if exact else model
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


def assert_as_close(found, expected, again):
    """Two runs of the same steps differ, since backward passes of attention and of the embedding add in any order; others no more than
    twice as much. What a copy brought back too early, or from where the next one lies, is another number altogether."""
    most = max(relative_error(a, b) for a, b in zip(again, expected, strict=True))
    assert most < 0.03
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) <= 2 * most + 1e-3


@pytest.mark.parametrize("reentrant", (False, True), ids=("not reentrant", "reentrant"))
@pytest.mark.parametrize("lora", (False, True), ids=("plain", "LoRA with dropout"))
def test_the_numbers_of_plain_checkpoints_in_less_memory(ops, lora, reentrant):
    (expected, more), (again, _) = steps_of(ops, lora, reentrant), steps_of(ops, lora, reentrant)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found, less = steps_of(ops, lora, reentrant, offload=True)
    assert_as_close(found, expected, again)
    # With all gradients the peak is where the layers' inputs are gone already.
    assert more - less > (LAYERS - 4) * 8192 * SIZES["hidden_size"] * 2 or not lora and more >= less


def test_the_rest_goes_along_and_to_pageable_memory(ops):
    (expected, _), (again, _) = (steps_of(ops, keep_attention=True) for _ in range(2))
    with pytest.warns(RuntimeWarning, match="goes to pageable memory"):
        found, _ = steps_of(ops, keep_attention=True, offload=1e-6)
    assert_as_close(found, expected, again)


def test_tiles(ops):
    """Of MLPs that are so wide that the peak is in one of them. Gradients of weights are sums over other parts, no less exact."""
    wide = {"width": 4 * SIZES["intermediate_size"], "count": 2}
    (expected, more), (found, less) = (steps_of(ops, **wide, **told) for told in ({}, {"recompute_mlp": 1024}))
    exact, _ = steps_of(ops, **wide, exact=True)
    for tiled, plain, reference in zip(found, expected, exact, strict=True):
        assert relative_error(tiled, reference) <= 1.5 * relative_error(plain, reference) + 1e-3
    assert more - less > 8192 * SIZES["intermediate_size"] * 2
