"""attn_implementation="bastile" on whole models, against transformers' own attention."""

import sys

import pytest
import torch
import transformers.modeling_utils  # noqa: F401 (its table is what register_attention looks for)
from transformers import DataCollatorWithFlattening, DynamicCache, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from tests.interpreter.backend import runtime_of
from tests.models import tiny_gpt_oss, tiny_model

LENGTHS = (9, 1, 23, 7)


@pytest.fixture
def hf(loaded):
    """The module under test, registered with transformers."""
    module = sys.modules[f"{loaded.__name__}.shared.hf.attention"]
    module.register_attention()
    yield module
    module.unregister_attention()


@pytest.fixture
def plans(hf, monkeypatch):
    """What the operation `attention` was called with: one entry a call."""
    calls = []

    def attention(q, k, v, plan, **options):
        calls.append(plan)
        return original(q, k, v, plan, **options)

    original = hf.attention
    monkeypatch.setattr(hf, "attention", attention)
    return calls


def documents(vocabulary=90, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, vocabulary, (n,), generator=generator) for n in lengths]


def packed(lengths=LENGTHS):
    return {
        "input_ids": torch.cat(documents(lengths=lengths))[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
    }


def padded(side, lengths=LENGTHS, pad=0):
    width = max(lengths)
    ids, mask = torch.full((len(lengths), width), pad), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, tokens in enumerate(documents(lengths=lengths)):
        place = slice(width - len(tokens), None) if side == "left" else slice(0, len(tokens))
        ids[row, place], mask[row, place] = tokens, 1
    return {"input_ids": ids, "attention_mask": mask}


def step(model, batch, seen=None, **kwargs):
    """(logits where `seen`, gradients) of one pass; the loss is of the tokens that are seen."""
    model.zero_grad(set_to_none=True)
    logits = model(**batch, use_cache=False, **kwargs).logits
    logits = logits if seen is None else logits[seen]
    weights = torch.sin(torch.arange(logits.numel(), dtype=torch.float32)).view(logits.shape)
    (logits * weights).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected, bound=2e-5):
    logits, gradients = found
    torch.testing.assert_close(logits, expected[0], rtol=bound, atol=bound)
    assert gradients.keys() == expected[1].keys()
    for name, gradient in gradients.items():
        error = (gradient - expected[1][name]).norm() / expected[1][name].norm().clamp(min=1e-6)
        assert error < 10 * bound, f"{name}: {error:.1e}"


def both(batch, make=tiny_model, seen=None, before="sdpa", **changes):
    """(found, expected) of a step with our attention and with transformers'."""
    torch.manual_seed(0)
    model = make(**changes)
    model.set_attn_implementation(before)
    expected = step(model, batch, seen)
    model.set_attn_implementation("bastile")
    return step(model, batch, seen), expected


SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3}


@pytest.mark.parametrize("changes", ({}, SLIDING), ids=("full", "sliding"))
def test_packed(plans, changes):
    assert_same(*both(packed(), **changes))
    kinds = 2 if changes else 1
    assert len({id(plan) for plan in plans}) == kinds, "one plan for all layers of a kind"


@pytest.mark.parametrize("changes", ({}, SLIDING), ids=("full", "sliding"))
@pytest.mark.parametrize("side", ("left", "right"))
def test_padded(plans, side, changes):
    batch = padded(side)
    assert_same(*both(batch, seen=batch["attention_mask"].bool(), **changes))
    assert plans and len({id(plan) for plan in plans}) == (2 if changes else 1)


def test_packed_equals_the_documents_one_by_one(plans):
    model = tiny_model(attn_implementation="bastile")
    together = model(**packed(), use_cache=False).logits[0].split(LENGTHS)
    for logits, tokens in zip(together, documents(), strict=True):
        torch.testing.assert_close(logits, model(tokens[None]).logits[0], rtol=1e-5, atol=1e-5)
