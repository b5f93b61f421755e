"""Two packages are applied, each with models of its own: the attention that transformers finds by name is the last one's, and hands a mask
that the other has made to the other's attention."""

import pytest
import torch

from tests.attention_batches import assert_same, labels_of, packed, padded, step

BATCHES = {"packed": packed, "padded": lambda: padded("left")}


@pytest.mark.parametrize("first", ("phi3", "gemma2", "qwen3"))
@pytest.mark.parametrize("second", ("phi3", "qwen3"))
@pytest.mark.parametrize("batch", BATCHES)
def test_models_of_both_packages_attend_as_before(chosen, first, second, batch):
    makers, batch = [chosen(first), chosen(second)], BATCHES[batch]()
    seen = batch["attention_mask"].bool() if "attention_mask" in batch else None
    models = []
    for _, make in makers:
        torch.manual_seed(0)
        models.append(make())
    expected = [step(model, batch, seen) for model in models]
    for package, _ in makers:
        package.apply()
    for model, wanted in zip(models, expected, strict=True):
        assert_same(step(model, batch, seen), wanted, bound=1e-4)
        assert model.model.config._attn_implementation == "bastile"
    for package, _ in makers:
        package.reset()


def test_a_loss_without_padding_too(chosen):
    package, make = chosen("phi3")
    model, batch = make(), padded("right")
    expected = model(**batch, labels=labels_of(batch), use_cache=False).loss
    package.apply()
    chosen("qwen3")[0].apply()
    torch.testing.assert_close(model(**batch, labels=labels_of(batch), use_cache=False).loss, expected, rtol=1e-5, atol=1e-5)
