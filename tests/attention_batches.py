"""Packed and padded batches, and what a step on one gives with transformers' attention and with ours."""

import re
import sys

import torch

from tests.models import tiny_gpt_oss, tiny_model, tiny_qwen3_moe

LENGTHS = (9, 1, 23, 7)


def module_of(package, name):
    """A file of hf/, in whichever room it is."""
    return next(module for path, module in sys.modules.items() if re.fullmatch(rf"{package.__name__}\.shared\.hf\.\w+\.{name}", path))


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


def tokens_of(package, monkeypatch):
    """The tokens of each plan that attention was called with."""
    module, found = module_of(package, "attention"), []
    original = module.attention

    def attention(q, k, v, plan, **options):
        found.append(plan.tokens)
        return original(q, k, v, plan, **options)

    monkeypatch.setattr(module, "attention", attention)
    return found


def labels_of(batch):
    return batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)


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


def loss_and_gradients(model, **batch):
    """Of one step, whatever steps there were before."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def both(batch, make=tiny_model, seen=None, before="sdpa", **changes):
    """(found, expected) of a step with our attention and with transformers'."""
    torch.manual_seed(0)
    model = make(**changes)
    model.set_attn_implementation(before)
    expected = step(model, batch, seen)
    model.set_attn_implementation("bastile")
    return step(model, batch, seen), expected


SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3}


def gpt_oss_of(**changes):
    return tiny_gpt_oss(**{"num_hidden_layers": 4, **changes})


FAMILIES = {"qwen3": tiny_model, "sliding": lambda **changes: tiny_model(**SLIDING, **changes), "qwen3_moe": tiny_qwen3_moe,
            "gpt_oss": tiny_gpt_oss}
DECODERS = ("gemma2", "gemma3_text", "ernie4_5", "phi3", "olmo3")  # of the package for dense families, what is unlike Qwen3
