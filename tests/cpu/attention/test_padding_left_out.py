"""Padding is removed from the decoder where no result shows it, and only there."""

import importlib

import pytest
import torch

from tests.attention_batches import (
    DECODERS,
    FAMILIES,
    LENGTHS,
    assert_same,
    labels_of,
    loss_and_gradients,
    module_of,
    padded,
    tokens_of,
)
from tests.models import tiny_model


@pytest.mark.parametrize("family", (*FAMILIES, *DECODERS))
@pytest.mark.parametrize("side", ("left", "right"))
@pytest.mark.parametrize("reader", ("logits", "labels", "hidden states"))
def test_whoever_reads_padding_reads_what_transformers_computes(chosen, family, side, reader):
    """A loss of all positions, labels that are the tokens themselves, a head that looks at every hidden state."""
    package, make = chosen(family)
    batch, found = padded(side), []
    for how in ("plain", "apply"):
        model = make()
        if how == "apply":
            package.apply()
        model.zero_grad(set_to_none=True)
        if reader == "labels":
            output = model(**batch, labels=batch["input_ids"], use_cache=False).loss
        elif reader == "logits":
            output = model(**batch, use_cache=False).logits
        else:
            output = model.model(**batch, use_cache=False).last_hidden_state
        weights = torch.sin(torch.arange(output.numel(), dtype=torch.float32)).view(output.shape)
        (output * weights + output).sum().backward()
        assert model.model.config._attn_implementation == ("bastile" if how == "apply" else model.config._attn_implementation)
        found.append((output.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}))
    assert_same(found[1], found[0], bound=1e-4)


@pytest.mark.parametrize("family", (*FAMILIES, *DECODERS))
@pytest.mark.parametrize(("side", "checkpointing"), (("right", False), ("left", True)), ids=("right", "left, checkpointed"))
def test_where_nobody_reads_padding_it_is_left_out(chosen, family, side, checkpointing, monkeypatch):
    package, make = chosen(family)
    batch, model = padded(side), make()
    batch["labels"] = labels_of(batch)
    if side == "left":
        batch["labels"][batch["input_ids"].ne(0).cumsum(1) == 1] = -100  # which a padded position would predict
    if checkpointing:
        model.gradient_checkpointing_enable()
    expected = loss_and_gradients(model, **batch)
    tokens = tokens_of(package, monkeypatch)
    for unpad in (True, False):
        package.apply(unpad=unpad)
        tokens.clear()
        found = loss_and_gradients(model, **batch)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
        assert_same(found, expected, bound=2e-5)
        assert set(tokens) == {sum(LENGTHS) if unpad else batch["input_ids"].numel()}


def test_lengths_come_again(qwen3):
    """With at most a sixteenth more tokens, and 16 to 32 of them between a power of two and the next."""
    rounded = module_of(qwen3, "padding").rounded_length
    assert [rounded(n) for n in (1, 31, 32, 33, 63, 64, 65, 1787)] == [1, 31, 32, 34, 64, 64, 68, 1792]
    for power in range(5, 16):
        found = {rounded(n) for n in range(1 << power, 2 << power)}
        assert 16 <= len(found) <= 32 and all(n <= rounded(n) <= n * 17 / 16 for n in range(1 << power, 2 << power))


@pytest.mark.parametrize("family", (*FAMILIES, *DECODERS, "qwen2", "ministral3"))
@pytest.mark.parametrize("lengths", ((30, 35), (2, 33), (64, 80, 3), (3, 1) * 45), ids=lambda lengths: str(lengths[:3]))
def test_tokens_of_no_text_change_nothing(chosen, family, lengths, monkeypatch):
    package, make = chosen(family)
    batch = padded("right", lengths)
    batch["labels"] = labels_of(batch)
    results, more = [], module_of(package, "padding").rounded_length(sum(lengths))
    for ours in (False, True):
        model = make()
        if ours:
            package.apply()
            tokens = tokens_of(package, monkeypatch)
        results.append(loss_and_gradients(model, **batch))
    assert set(tokens) == {more} != {sum(lengths)}
    assert_same(results[1], results[0], bound=1e-4 if family == "gpt_oss" else 2e-5)


@pytest.mark.parametrize("who", ("cache", "hook", "hidden states", "label", "logits", "unreduced", "evaluation", "switch", "own forward"))
def test_padding_stays_where_someone_could_tell(qwen3, who, monkeypatch):
    tokens = tokens_of(qwen3, monkeypatch)
    qwen3.apply()
    batch = padded("right")
    model = tiny_model(attn_implementation="bastile")
    batch |= {"labels": labels_of(batch), "use_cache": who == "cache"}
    qwen3.apply(unpad=who != "switch")
    if who == "hook":
        model.model.layers[0].register_forward_hook(lambda *_: None)
    elif who == "hidden states":
        batch["output_hidden_states"] = True
    elif who == "label":
        batch["labels"][1, -2] = 5
    elif who == "logits":
        batch["skip_logits"] = False
    elif who == "unreduced":
        batch["reduction"] = "none"
    elif who == "evaluation":
        model.eval()
    elif who == "own forward":
        model.model.norm.forward = lambda x, forward=model.model.norm.forward: forward(x)
    model(**batch)
    assert set(tokens) == {batch["input_ids"].numel()}


@pytest.mark.parametrize("family", ("qwen3", "qwen3_moe"))
def test_padding_stays_where_attention_drops_out(qwen3, family, monkeypatch):
    """Which numbers are dropped depends on the shape that they have."""
    batch, shapes, losses = padded("right"), [], []
    batch |= {"labels": labels_of(batch), "use_cache": False}
    original = torch.nn.functional.scaled_dot_product_attention
    spy = lambda query, *args, **kwargs: shapes.append(tuple(query.shape)) or original(query, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    model = FAMILIES[family](attention_dropout=0.3)
    for implementation in ("sdpa", "bastile"):
        if implementation == "bastile":
            qwen3.apply()
        model.set_attn_implementation(implementation)
        torch.manual_seed(0)
        losses.append(model(**batch).loss.detach())
    assert {shape[:1] + shape[2:3] for shape in shapes} == {tuple(batch["input_ids"].shape)}
    torch.testing.assert_close(*losses)


def test_a_hook_on_the_embedding_sees_the_whole_batch(qwen3, hf):
    """NEFTune's, which scales its noise by the length."""
    batch, shapes = padded("right"), []
    model = tiny_model(attn_implementation="bastile")
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape[:2])))
    qwen3.apply()
    model(**batch, labels=labels_of(batch), use_cache=False).loss.backward()
    assert shapes == [tuple(batch["input_ids"].shape)]


def test_the_callers_arguments_are_left_alone(qwen3, hf):
    batch = padded("right")
    before = {name: value.clone() for name, value in batch.items()}
    qwen3.apply()
    model = tiny_model(attn_implementation="bastile")
    model(**batch, labels=labels_of(batch), use_cache=False).loss.backward()
    assert all(torch.equal(batch[name], value) for name, value in before.items())


WRITES = {
    "data": lambda mask, row, token: mask.data[row].index_fill_(0, torch.tensor(token), False),
    "numpy": lambda mask, row, token: mask.numpy()[row].__setitem__(token, False),
    "storage": lambda mask, row, token: mask.untyped_storage().__setitem__(row * mask.shape[1] + token, 0),
    "in place": lambda mask, row, token: mask[row].__setitem__(token, False),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("family", ("qwen3", "sliding", "phi3", "gpt_oss"))
def test_nothing_is_remembered_of_a_users_mask(chosen, family, write):
    """It is written into between two steps, so that padding lies between tokens, and most ways to write leave its version as it was."""
    package, make = chosen(family)
    batch, plain, model = padded("right"), make(), package.kernelize(make())
    batch["attention_mask"] = batch["attention_mask"].bool()
    labels, version = labels_of(batch), batch["attention_mask"]._version
    model(**batch, labels=labels, use_cache=False)
    WRITES[write](batch["attention_mask"], 2, 11)
    assert (batch["attention_mask"]._version == version) is (write != "in place")
    labels = labels_of(batch)
    labels[2, 12] = -100  # which the new padding would predict
    expected, found = (each(**batch, labels=labels, use_cache=False).loss for each in (plain, model))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


POSITIONS = {
    "one ahead": lambda mask: torch.arange(1, 1 + mask.shape[1])[None].expand_as(mask),
    "of the tokens": lambda mask: (mask.cumsum(1) - 1).clamp(min=0),
    "a gap": lambda mask: torch.arange(mask.shape[1])[None] + 7 * (torch.arange(mask.shape[1]) > 3),
    "others in each row": lambda mask: torch.arange(mask.shape[1])[None] * torch.arange(1, 1 + mask.shape[0])[:, None],
}


@pytest.mark.parametrize("side", ("left", "right"))
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("family", ("qwen3", "sliding", "gpt_oss", "ministral3"))
def test_position_ids_of_a_padded_batch_stay_those_of_its_tokens(chosen, monkeypatch, family, positions, side):
    """Ministral 3 scales queries by their positions; the others turn heads by them, where only a distance counts."""
    package, make = chosen(family)
    batch = padded(side)
    batch["position_ids"] = POSITIONS[positions](batch["attention_mask"])
    labels, tokens = labels_of(batch), tokens_of(package, monkeypatch)
    if side == "left":
        labels[batch["attention_mask"].cumsum(1) == 1] = -100  # which a padded position would predict
    found = [loss_and_gradients(model, **batch, labels=labels) for model in (make(), package.kernelize(make()))]
    assert_same(found[1], found[0], bound=1e-4)
    assert set(tokens) == {sum(LENGTHS)}


ANGLES = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "longrope": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.1] * 32, "long_factor": [3.0] * 32,
                 "original_max_position_embeddings": 48},
}  # fmt: skip


@pytest.mark.parametrize("angles", ANGLES)
@pytest.mark.parametrize("batch", ("right", "left", "alone"))
def test_angles_follow_the_length_of_the_batch(chosen, angles, batch, monkeypatch):
    """Padding counts towards that length: here it is longer than any text, and than the model's trained length."""
    package, make = chosen("qwen3")
    more, sizes = {"max_position_embeddings": 48, "rope_parameters": ANGLES[angles]}, []
    noted_lengths(package, monkeypatch, sizes)
    if batch == "alone":
        batches = [{"input_ids": torch.arange(n)[None] % 50} for n in (65, 66, 71, 77, 131)]
    else:
        short = padded(batch, (9, 23, 40, 41))
        wider = torch.zeros(4, 15, dtype=torch.long)
        batches = [{name: torch.cat((each, wider) if batch == "right" else (wider, each), 1) for name, each in short.items()}] * 2
    found = []
    for model in (make(**more), package.kernelize(make(**more))):
        for given in batches:
            mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))
            labels = given["input_ids"].masked_fill(mask.cumsum(1) <= 1, -100).masked_fill(mask == 0, -100)
            loss = model(**given, labels=labels, use_cache=False).loss
            loss.backward()
        found.append((loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    assert_same(found[1], found[0])
    assert sizes == ([65, 66, 71, 77, 131] if batch == "alone" else [116, 116])


def test_a_plan_is_remembered_for_its_positions(qwen3):
    """Takes two documents of two tokens, then one of four."""
    masks = importlib.import_module(f"{qwen3.__name__}.shared.hf.attention.masks")
    visible = masks.Visible({"batch_size": 1, "q_length": 4, "kv_length": 4}, masks.Rule(), None, positions=True)
    first, second = torch.tensor([[0, 1, 0, 1]]), torch.arange(4)[None]
    plan = visible.plan(torch.device("cpu"), position_ids=first)
    assert visible.plan(torch.device("cpu"), position_ids=first) is plan
    assert visible.plan(torch.device("cpu"), position_ids=second) is not plan


ROWS = {
    "alone": lambda ids: {"input_ids": ids},
    "with a mask": lambda ids: {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
    "packed": lambda ids: {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None] % 30},
    "embedded": lambda ids: {"inputs_embeds": torch.nn.functional.one_hot(ids, 64).float()},
}


# GPT-OSS's own forward looks for no documents in position_ids.
@pytest.mark.parametrize(("family", "row"), [(family, row) for family in ("qwen3", "gemma3_text", "gpt_oss", "qwen2") for row in ROWS
                                             if (family, row) != ("gpt_oss", "packed")])  # fmt: skip
def test_single_rows_of_many_lengths_get_lengths_that_come_again(chosen, family, row, monkeypatch):
    """And where all have one length, they keep it."""
    package, make = chosen(family)
    lengths = (65, 65, 66, 71, 77, 65, 131)
    batches = [ROWS[row](torch.randint(1, 50, (1, n), generator=torch.Generator().manual_seed(n))) for n in lengths]
    labels = [torch.randint(1, 50, (1, n), generator=torch.Generator().manual_seed(2 * n)) for n in lengths]
    outcomes, sizes = [], []
    for ours in (False, True):
        model, found = make(hidden_size=64), []
        if ours:
            package.apply()
            noted_lengths(package, monkeypatch, sizes)
        for batch, target in zip(batches, labels):
            found.append(loss_and_gradients(model, **batch, labels=target))
        outcomes.append(found)
    for found, expected in zip(*reversed(outcomes)):
        assert_same(found, expected, bound=1e-4 if family == "gpt_oss" else 2e-5)
    rounded = module_of(package, "padding").rounded_length
    assert sizes == [*lengths[:4], rounded(77), rounded(65), rounded(131)]


def noted_lengths(package, monkeypatch, sizes):
    """Has a list grow by the length of the rows that a decoder gets."""
    module = module_of(package, "decoder_model")
    original = module.original_forward

    def forward_of(model):
        def forward(self, **kwargs):
            sizes.append(module.given_tokens(kwargs).shape[1])
            return original(model)(self, **kwargs)

        return forward

    monkeypatch.setattr(module, "original_forward", forward_of)


@pytest.mark.parametrize("who", ("alike", "hook", "cache", "switch", "logits", "bounds"))
def test_single_rows_keep_their_length_where_someone_could_tell(qwen3, who, monkeypatch):
    tokens = tokens_of(qwen3, monkeypatch)
    qwen3.apply(unpad=who != "switch", fused_linear_cross_entropy=who != "logits")
    model = tiny_model(attn_implementation="bastile")
    if who == "hook":
        model.model.layers[0].register_forward_hook(lambda *_: None)
    for n in (65,) * 6 if who == "alike" else (65, 66, 71, 77, 131):
        ids = torch.ones(1, n, dtype=torch.long)
        bounds = {"cu_seq_lens_q": torch.tensor([0, 5, n], dtype=torch.int32)} if who == "bounds" else {}
        model(input_ids=ids, labels=ids, use_cache=who == "cache", **bounds).loss.backward()
    assert set(tokens) <= {65, 66, 71, 77, 131} and (tokens or who in ("hook", "cache", "switch", "logits", "alike"))
