"""Gemma 4, whose layers are read and whose attention is called, with the kernels that it runs on: heads of 256 and 512, windows, keys that
layers share."""

import copy
import importlib

import pytest
import torch

from tests.cpu.attention.test_read_attention import gemma4
from tests.gpu.ways import exact_and_before
from tests.models import Step, random_tokens
from tests.ops.attention import Case, packed
from tests.ops.attention_products import Rows, check_products
from tests.tolerances import relative_error

TOKENS = random_tokens(2, 300)
DEVICE, BF16 = "cuda", torch.bfloat16


def batches() -> dict:
    mask = torch.ones_like(TOKENS)
    mask[0, :70] = 0
    positions = torch.cat((torch.arange(130), torch.arange(170)))[None]
    found = {
        "whole": {"input_ids": TOKENS, "labels": TOKENS},
        "padded": {"input_ids": TOKENS, "attention_mask": mask, "labels": TOKENS.where(mask > 0, -100)},
        "packed": {"input_ids": TOKENS[:1], "labels": TOKENS[:1], "position_ids": positions},
    }
    return {name: {key: value.to(DEVICE) for key, value in batch.items()} for name, batch in found.items()}


@pytest.mark.parametrize("batch", ("whole", "padded", "packed"))
@pytest.mark.parametrize("checkpointed", (False, True))
def test_a_step_is_as_exact_as_transformers(decoders, batch, checkpointed):
    model = gemma4(BF16, heads=256, wide=512, window=64).to(DEVICE)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    given = batches()[batch]
    exact, before = exact_and_before(model, lambda each: Step(each, **given, use_cache=False))
    ours = decoders.kernelize(copy.deepcopy(model))
    found = Step(ours, **given, use_cache=False)
    assert ours.model.config._attn_implementation == "bastile"
    assert not [row for row in decoders.explain(ours).rows if row.part == "attention"]
    # In bf16 each gradient of this model is wrong by a tenth to a quarter, and those of norms of 16 numbers by more or less as it comes.
    found.assert_as_exact_as(before, exact, most=1.6)
    steps, names = (found, before), exact.gradients
    mine, others = (sum(relative_error(step.gradients[name], exact.gradients[name]) for name in names) for step in steps)
    assert mine <= 1.1 * others
    decoders.reset()


@pytest.mark.parametrize("dtype", (BF16, torch.float16))
@pytest.mark.parametrize("given", ("plain", "window", "documents"))
def test_products(decoders, given, dtype):
    """On tensor cores, whose sums are kept in fp32."""
    documents = {"plain": packed(700, 700), "window": packed(700, 700), "documents": ((40, 300), (300, 700), (700, 1350))}[given]
    case = Case(1400, documents, heads=8, kv_heads=1, head_dim=512, dtype=dtype, window=100 if given == "window" else None)
    check_products(decoders, Rows(case, 2, given == "plain"), 256, DEVICE)
    module = importlib.import_module(f"{decoders.__name__}.shared.ops.attention_products")
    assert module.wants_products(torch.empty(1, 512, device=DEVICE)) and not module.wants_products(torch.empty(1, 256, device=DEVICE))
