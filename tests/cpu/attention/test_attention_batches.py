"""attn_implementation="bastile" on batches of every kind, against transformers' own attention."""

import pytest
import torch
from transformers import DataCollatorWithFlattening, DynamicCache, StaticCache

from tests.attention_batches import LENGTHS, SLIDING, assert_same, both, documents, gpt_oss_of, loss_and_gradients, packed, padded, step
from tests.models import tiny_model

# What makes a model, the attention that transformers gives it, how many kinds of layers it has, and how near ours is.
FAMILIES = {"qwen3": (tiny_model, "sdpa", 1, 1e-5), "gpt_oss": (gpt_oss_of, "eager", 2, 1e-4)}
each_family = pytest.mark.parametrize("family", FAMILIES)


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


@each_family
def test_packed_equals_the_documents_one_by_one(plans, family):
    """Which transformers' eager attention lets see each other."""
    make, _, kinds, bound = FAMILIES[family]
    model = make(attn_implementation="bastile")
    together = model(**packed(), use_cache=False).logits[0].split(LENGTHS)
    assert len({id(plan) for plan in plans}) == kinds
    for logits, tokens in zip(together, documents(), strict=True):
        torch.testing.assert_close(logits, model(tokens[None]).logits[0], rtol=bound, atol=bound)


def test_the_collators_batches(plans):
    flat = DataCollatorWithFlattening(return_flash_attn_kwargs=True)([{"input_ids": tokens.tolist()} for tokens in documents()])
    flat.pop("labels")
    wanted = packed()
    assert torch.equal(flat["input_ids"], wanted["input_ids"])
    torch.manual_seed(0)
    model = tiny_model(attn_implementation="sdpa")
    expected = step(model, wanted)
    model.set_attn_implementation("bastile")
    assert_same(step(model, flat), expected)
    assert len({id(plan) for plan in plans}) == 1


def test_batches_of_trl(plans):
    """Padding-free ones, and packed ones, whose rows tell where their documents end."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    rows = [{"input_ids": torch.cat(documents()).tolist(), "seq_lengths": list(LENGTHS)}]
    torch.manual_seed(0)
    model = tiny_model(attn_implementation="sdpa")
    expected = step(model, packed())
    model.set_attn_implementation("bastile")
    for examples in ([{"input_ids": tokens.tolist()} for tokens in documents()], rows):
        batch = collate(examples)
        batch.pop("labels")
        plans.clear()
        assert_same(step(model, batch), expected)
        assert len({id(plan) for plan in plans}) == 1


@pytest.mark.parametrize("batch", (packed(), padded("right")), ids=("packed", "padded"))
def test_under_lora(qwen3, plans, batch):
    from peft import LoraConfig, get_peft_model

    labels, losses = batch["input_ids"].masked_fill(batch["input_ids"] == 0, -100), []
    for implementation in ("sdpa", "bastile"):
        model = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj", "v_proj", "up_proj"], r=4, init_lora_weights=False))
        model.get_base_model().set_attn_implementation(implementation)
        torch.manual_seed(3)
        for name, parameter in model.named_parameters():
            if "lora" in name:
                torch.nn.init.normal_(parameter, 0.0, 0.1)
        qwen3.apply()
        losses.append(loss_and_gradients(model, **batch, labels=labels))
    assert_same(losses[1], losses[0])
    assert plans


def test_cu_seqlens_alone_part_the_documents(plans):
    """Which SDPA's function ignores."""
    model = tiny_model(attn_implementation="bastile")
    cu_seqlens = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    ids = packed()["input_ids"]
    together = model(ids, use_cache=False, cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens).logits[0].split(LENGTHS)
    positions = packed()["position_ids"]
    wanted = model(ids, position_ids=positions, use_cache=False).logits[0].split(LENGTHS)
    # Rotary embeddings are relative, so where a document starts changes nothing but roundings.
    for found, expected in zip(together, wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_rows_without_padding_go_to_sdpa(plans):
    ids = torch.stack(documents(lengths=(11, 11)))
    for batch in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}):
        assert_same(*both(batch), bound=1e-7)
    assert not plans


@pytest.mark.parametrize("of_transformers", (True, False), ids=("transformers' masks", "ours"))
@pytest.mark.parametrize("window", (2, 10, 11, 12))
@pytest.mark.parametrize("batch", ("rows", "packed", "padded"))
def test_a_window_at_the_edges_of_what_a_row_has(plans, qwen3, batch, window, of_transformers):
    """A row has 11 tokens, and so has one document of the packed row. transformers' window is of that many keys, the query's own among
    them: one of 10 hides the first token from the last one, one of 11 hides nothing."""
    rows = {"input_ids": torch.stack(documents(lengths=(11, 11)))}
    inputs = {"rows": rows, "packed": packed((3, 11, 1)), "padded": padded("right", (11, 4))}[batch]
    if not of_transformers:
        qwen3.apply()  # which makes the masks itself
    seen = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    assert_same(*both(inputs, seen=seen, **{**SLIDING, "sliding_window": window}))
    assert bool(plans) is (batch != "rows" or window < 11)


@each_family
@pytest.mark.parametrize("why", ("holes", "dropout", "4d", "output_attentions"))
def test_what_no_plan_says_goes_to_transformers(plans, family, why):
    (make, before, _, bound), batch, changes = FAMILIES[family], padded("right"), {}
    if why == "holes":
        batch["attention_mask"][2, 4] = 0
    elif why == "dropout":
        changes = {"attention_dropout": 0.5}
    elif why == "4d":
        seen = (torch.rand(4, 1, 23, 23) < 0.5) | torch.eye(23, dtype=torch.bool)
        batch["attention_mask"] = seen if before == "sdpa" else torch.zeros(seen.shape).masked_fill(~seen, -1e9)
    elif why == "output_attentions":
        batch["output_attentions"] = True
    results = []
    for implementation in (before, "bastile"):
        model = make(attn_implementation=implementation, **changes)
        torch.manual_seed(1)
        results.append(step(model, batch))
    assert_same(results[1], results[0], bound=bound / 10)
    assert not plans


@pytest.mark.parametrize(("family", "changes"), (("qwen3", {}), ("qwen3", SLIDING), ("gpt_oss", {})), ids=("full", "sliding", "gpt_oss"))
@pytest.mark.parametrize("cache", (None, "static"))
def test_generate(plans, family, changes, cache):
    (make, before, *_), batch, texts = FAMILIES[family], padded("left", (4, 12, 9)), []
    for implementation in (before, "bastile"):
        model = make(attn_implementation=implementation, **changes).eval()
        texts.append(model.generate(**batch, max_new_tokens=8, do_sample=False, cache_implementation=cache))
    assert torch.equal(*texts) and plans


@pytest.mark.parametrize("cache", (DynamicCache, StaticCache))
def test_prefill_in_two_parts(plans, cache):
    ids = torch.stack(documents(lengths=(20, 20)))
    found = []
    for implementation in ("sdpa", "bastile"):
        model = tiny_model(attn_implementation=implementation, **SLIDING).eval()
        kept = cache(config=model.config, **({"max_cache_len": 32} if cache is StaticCache else {}))
        with torch.no_grad():
            parts = [model(ids[:, a:b], past_key_values=kept, use_cache=True).logits for a, b in ((0, 12), (12, 19), (19, 20))]
        found.append(torch.cat(parts, 1))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert plans, "the windows of the first part"


@pytest.mark.parametrize("reentrant", (True, False))
def test_gradient_checkpointing(plans, reentrant):
    model = tiny_model(attn_implementation="bastile")
    expected = step(model, packed())
    plans.clear()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_hook(lambda module, args, out: out.requires_grad_())
    assert_same(step(model, packed()), expected, bound=1e-7)
    assert len(plans) == 4 and len({id(plan) for plan in plans}) == 1


@pytest.mark.parametrize("batch", (packed(), padded("left")), ids=("packed", "padded"))
def test_autocast(plans, batch):
    seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    model, found = tiny_model(), []
    for implementation in ("sdpa", "bastile"):
        model.set_attn_implementation(implementation)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(model(**batch, use_cache=False).logits[seen].float())
    assert (found[0] - found[1]).norm() < 0.02 * found[0].norm() and plans


@pytest.mark.parametrize("batch", (packed(), padded("left")), ids=("packed", "padded"))
def test_compile(hf, batch):
    seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    model = tiny_model(attn_implementation="bastile")
    expected = step(model, batch, seen)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    logits = compiled(**batch, use_cache=False).logits[seen]
    torch.testing.assert_close(logits, expected[0], rtol=1e-5, atol=1e-5)
