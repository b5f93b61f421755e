"""`cu_seq_lens_q` of one row and of several: attention of ours parts the documents that they say, or says what is wrong with them."""

import pytest
import torch

from tests.attention_batches import assert_same, module_of, packed, step
from tests.models import random_tokens

FAMILIES = ("qwen3", "sliding", "gpt_oss", "phi3")
LENGTHS = ((9, 3, 8), (20,), (1, 19))  # of the documents in each row
TOKENS = random_tokens(3, 20)
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
ENDS = torch.tensor([n for row in LENGTHS for n in row]).cumsum(0)
BOUNDS = torch.cat((torch.tensor([0]), ENDS)).int()
ROWS = torch.tensor([0, 20, 40, 60]).int()
ALL = torch.ones_like(TOKENS)
HEEDED = {
    "int32": {"cu_seq_lens_q": BOUNDS},
    "int64": {"cu_seq_lens_q": BOUNDS.long(), "cu_seq_lens_k": BOUNDS.long()},
    "FlashAttention's": {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS.clone(), "max_length_q": 20, "max_length_k": 20},
    "the last one again": {"cu_seq_lens_q": torch.cat((BOUNDS, BOUNDS[-1:], BOUNDS[-1:]))},
    "positions": {"cu_seq_lens_q": BOUNDS, "position_ids": POSITIONS},
    "positions that go on": {"cu_seq_lens_q": BOUNDS, "position_ids": torch.arange(20)[None]},
    "mask of ones": {"cu_seq_lens_q": BOUNDS, "attention_mask": ALL},
}
REFUSED = {
    "too few tokens": ({"cu_seq_lens_q": BOUNDS[:-1]}, "expected rising bounds from 0 to 60"),
    "too many tokens": ({"cu_seq_lens_q": torch.cat((BOUNDS, torch.tensor([61]).int()))}, "expected rising bounds from 0 to 60"),
    "not from 0": ({"cu_seq_lens_q": BOUNDS[1:]}, "expected rising bounds from 0 to 60"),
    "falling": ({"cu_seq_lens_q": BOUNDS[[0, 2, 1, 3, 4, 5, 6]]}, "expected rising bounds"),
    "over a row's end": ({"cu_seq_lens_q": BOUNDS[[0, 1, 2, 4, 5, 6]]}, "among them those of the 3 rows of 20 tokens"),
    "of the first row": ({"cu_seq_lens_q": BOUNDS[:4]}, "expected rising bounds from 0 to 60"),
    "none": ({"cu_seq_lens_q": BOUNDS[:0]}, "expected rising bounds"),
    "of each row": ({"cu_seq_lens_q": BOUNDS[None]}, r"expected a tensor \[documents \+ 1\]"),
    "a list": ({"cu_seq_lens_q": BOUNDS.tolist()}, r"expected a tensor \[documents \+ 1\]"),
    "others for keys": ({"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": ROWS}, "have different bounds"),
    "of keys alone": ({"cu_seq_lens_k": BOUNDS}, "given without cu_seq_lens_q"),
    "other positions": ({"cu_seq_lens_q": BOUNDS[[0, 1, 3, 4, 5, 6]], "position_ids": POSITIONS}, "start documents at different tokens"),
    "rows, and positions": ({"cu_seq_lens_q": ROWS, "position_ids": POSITIONS}, "one document a row, and position_ids start others"),
    "padding": ({"cu_seq_lens_q": BOUNDS, "attention_mask": ALL.index_fill(1, torch.tensor([19]), 0)}, "attention_mask has padding"),
    "a cache": ({"cu_seq_lens_q": BOUNDS, "use_cache": True}, "there is a cache, expected no cache"),
}


def kernelized(chosen, monkeypatch, family):
    """A model with our attention, and a list that gets an entry whenever bounds are read."""
    package, make = chosen(family)
    reads, original = [], module_of(package, "row_documents").given_bounds
    monkeypatch.setattr(module_of(package, "row_documents"), "given_bounds", lambda *args: reads.append(args) or original(*args))
    return package.kernelize(make()), reads


def alone(model, tokens=TOKENS, lengths=LENGTHS):
    """The logits of each document alone, side by side as in the rows."""
    rows = [torch.cat([model(part[None], use_cache=False).logits for part in row.split(n)], 1) for row, n in zip(tokens, lengths)]
    return torch.cat(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_documents_of_all_rows_are_parted(chosen, monkeypatch, family):
    model, reads = kernelized(chosen, monkeypatch, family)
    expected = alone(model)
    for name, said in HEEDED.items():
        reads.clear()
        found = model(input_ids=TOKENS, **said)
        assert model.model.config._attn_implementation == "bastile" and found.past_key_values is None, name
        torch.testing.assert_close(found.logits, expected, rtol=1e-4, atol=1e-4, msg=lambda text: f"{name}: {text}")  # noqa: B023
        assert len(reads) == 1, f"{name}: once a pass, whatever the layers"


@pytest.mark.parametrize("family", ("qwen3", "sliding", "gpt_oss"))
def test_what_are_no_bounds_of_documents_is_refused(chosen, monkeypatch, family):
    model, _ = kernelized(chosen, monkeypatch, family)
    for name, (said, text) in REFUSED.items():
        with pytest.raises(ValueError, match=text):
            pytest.fail(f"{name}: {model(input_ids=TOKENS, **{'use_cache': False, **said})}")


@pytest.mark.parametrize(("kind", "text"), (
    ("PromptTuning", "rising bounds from 0 to 69, .* prompt tuning puts tokens in front of each row: with it, give each document a row"),
    ("PrefixTuning", "there is a cache, .* prefix tuning, whose prefix is a cache, give each document a row"),
))  # fmt: skip
def test_tokens_in_front_of_packed_rows_are_refused_with_what_to_do(chosen, monkeypatch, kind, text):
    """PEFT leaves the bounds of documents as they are, and transformers would let each document see the ones before it."""
    peft = pytest.importorskip("peft")
    model, _ = kernelized(chosen, monkeypatch, "qwen3")
    tuned = peft.get_peft_model(model, getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", num_virtual_tokens=3))
    for given in ({}, {"use_cache": False}):
        with pytest.raises(ValueError, match=text):
            tuned(input_ids=TOKENS, cu_seq_lens_q=BOUNDS, **given)


@pytest.mark.parametrize("family", ("qwen3", "sliding", "gpt_oss"))
def test_bounds_of_whole_rows_say_nothing(chosen, monkeypatch, family):
    model, _ = kernelized(chosen, monkeypatch, family)
    expected = step(model, {"input_ids": TOKENS})
    assert_same(step(model, {"input_ids": TOKENS, "cu_seq_lens_q": ROWS, "cu_seq_lens_k": ROWS}), expected, bound=1e-7)
    assert model(input_ids=TOKENS, cu_seq_lens_q=ROWS).past_key_values is not None


@pytest.mark.parametrize("rows", (1, 3))
def test_in_a_graph_no_bounds_are_read(chosen, monkeypatch, rows):
    (model, reads), tokens = kernelized(chosen, monkeypatch, "qwen3"), TOKENS[:rows]
    expected = alone(model, tokens, LENGTHS[:rows])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found = compiled(input_ids=tokens, cu_seq_lens_q=BOUNDS[: sum(map(len, LENGTHS[:rows])) + 1], use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not reads


def test_a_model_that_no_package_knows_has_its_bounds_read_where_its_attention_is_ours(hf):
    """By name alone, with transformers' own decoder."""
    import transformers

    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 512, **heads}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attn_implementation="bastile")).eval()
    with torch.no_grad():
        found = model(input_ids=TOKENS, cu_seq_lens_q=BOUNDS, use_cache=False).logits
        torch.testing.assert_close(found, alone(model), rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match="expected rising bounds from 0 to 60"):
            model(input_ids=TOKENS, cu_seq_lens_q=BOUNDS[:-1], use_cache=False)
        positions = model(input_ids=TOKENS, position_ids=POSITIONS, cu_seq_lens_q=BOUNDS, use_cache=False).logits
        torch.testing.assert_close(positions, found, rtol=1e-4, atol=1e-4)


def test_one_row_of_a_collator(chosen, monkeypatch):
    model, _ = kernelized(chosen, monkeypatch, "sliding")
    batch = packed()
    bounds = torch.cat((torch.tensor([0]), (batch["position_ids"][0] == 0).nonzero()[1:, 0], torch.tensor([40]))).int()
    expected = step(model, batch)
    assert_same(step(model, {**batch, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}), expected, bound=1e-6)
