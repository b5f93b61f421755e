"""attn_implementation="bastile" on whole models, against transformers' own attention."""

import copy
import functools
import importlib
import pickle
import sys

import pytest
import torch
import transformers
import transformers.modeling_utils  # its table is what register_attention looks for
from transformers import DataCollatorWithFlattening, DynamicCache, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from tests.decoder_families import tiny
from tests.models import tiny_gpt_oss, tiny_model, tiny_qwen3_moe
from tests.ops.common import runtime_of

LENGTHS = (9, 1, 23, 7)


def module_of(package, name):
    return sys.modules[f"{package.__name__}.shared.hf.{name}"]


@pytest.fixture
def hf(loaded):
    """The module under test, registered with transformers."""
    choice = module_of(loaded, "attention_choice")
    choice.register_attention(transformers.Qwen3Model, transformers.GptOssModel)
    yield module_of(loaded, "attention")
    choice.unregister_attention()


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
        loss = model(**batch, labels=labels, use_cache=False).loss
        loss.backward()
        losses.append((loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
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


@pytest.mark.parametrize("why", ("holes", "dropout", "4d", "output_attentions"))
def test_what_no_plan_says_goes_to_transformers(plans, why):
    batch, changes = padded("right"), {}
    if why == "holes":
        batch["attention_mask"][2, 4] = 0
    elif why == "dropout":
        changes = {"attention_dropout": 0.5}
    elif why == "4d":
        batch["attention_mask"] = (torch.rand(4, 1, 23, 23) < 0.5) | torch.eye(23, dtype=torch.bool)
    elif why == "output_attentions":
        batch["output_attentions"] = True
    results = []
    for implementation in ("sdpa", "bastile"):
        model = tiny_model(attn_implementation=implementation, **changes)
        torch.manual_seed(1)
        results.append(step(model, batch))
    assert_same(results[1], results[0], bound=1e-6)
    assert not plans


@pytest.mark.parametrize("changes", ({}, SLIDING), ids=("full", "sliding"))
@pytest.mark.parametrize("cache", (None, "static"))
def test_generate(plans, changes, cache):
    batch = padded("left", (4, 9, 7))
    texts = []
    for implementation in ("sdpa", "bastile"):
        model = tiny_model(attn_implementation=implementation, **changes).eval()
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


# ---------------------------------------------------------------- GPT-OSS
@pytest.fixture
def looks(monkeypatch):
    """How often transformers looked for documents in position_ids: on a GPU it waits for the answer."""
    calls = []

    def find(position_ids):
        calls.append(position_ids)
        return original(position_ids)

    original = transformers.masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", find)
    return calls


@pytest.mark.parametrize("family", ("qwen3", "sliding", "qwen3_moe", "gpt_oss"))
@pytest.mark.parametrize("given", ("input_ids", "inputs_embeds"))
def test_nobody_looks_for_documents_in_position_ids_that_were_not_given(request, family, given, looks):
    make = {"gpt_oss": gpt_oss_of, "qwen3_moe": tiny_qwen3_moe}.get(family, tiny_model)
    package = request.getfixturevalue("gpt_oss" if family == "gpt_oss" else "qwen3")
    model, ids = make(**(SLIDING if family == "sliding" else {})), torch.stack(documents(lengths=(17, 17)))
    batch = {"input_ids": ids} if given == "input_ids" else {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
    expected = step(model, batch)
    assert looks or family == "gpt_oss"  # whose plan reads them on the device
    package.kernelize(model)
    model.set_attn_implementation("bastile")
    looks.clear()
    found = step(model, batch)
    assert not looks
    assert_same(found, expected)
    parted = {**batch, "position_ids": torch.cat((torch.arange(9), torch.arange(8)))[None]}
    assert not torch.allclose(step(model, parted)[0], found[0])
    assert looks or family == "gpt_oss"


ROWS = {
    "packed": packed()["position_ids"],
    "two rows": torch.stack((torch.cat((torch.arange(9), torch.arange(31))), torch.cat((torch.arange(5, 38), torch.arange(7))))),
    "one of two rows": torch.stack((torch.arange(40), torch.cat((torch.arange(3), torch.arange(37))))),
    "rows": torch.stack((torch.arange(40), torch.arange(3, 43))),
}


@pytest.mark.parametrize("family", ("qwen3", "sliding", "qwen3_moe", "gpt_oss"))
@pytest.mark.parametrize("positions", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("kernels", (True, False), ids=("operation", "mask"))
def test_documents_of_position_ids_are_found_without_transformers(request, family, positions, kernels, looks, monkeypatch):
    """kernels: the operation of ours takes them; it is transformers' attention with a mask otherwise."""
    make = {"gpt_oss": gpt_oss_of, "qwen3_moe": tiny_qwen3_moe}.get(family, tiny_model)
    package = request.getfixturevalue("gpt_oss" if family == "gpt_oss" else "qwen3")
    model = make(**(SLIDING if family == "sliding" else {}))
    generator = torch.Generator().manual_seed(0)
    batch = {"input_ids": torch.randint(1, 90, positions.shape, generator=generator), "position_ids": positions}
    expected, taken = step(model, batch), []
    package.kernelize(model)
    model.set_attn_implementation("bastile")
    module = module_of(package, "attention")
    if family == "gpt_oss":  # whose own masks do not part documents
        with monkeypatch.context() as as_before:
            as_before.setattr(module_of(package, "decoder_model"), "_says_documents", lambda *_: False)
            expected = step(model, batch)
    monkeypatch.setattr(module, "_takes", lambda *args: taken.append(args) or kernels)
    looks.clear()
    assert_same(step(model, batch), expected)
    assert taken and not looks


def test_a_launch_serves_many_numbers_of_documents(loaded):
    masks = module_of(loaded, "masks")
    for lengths, expected in (((3, 4), 2), ((1,) * 7, 8), ((2,) * 8, 8), ((1,) * 9, 16)):
        found = masks.documents_in(packed(lengths)["position_ids"])
        starts = torch.tensor((0, *lengths)).cumsum(0)
        assert found.shape == (2, expected) and found.dtype == torch.int32
        assert torch.equal(found[:, : len(lengths)], torch.stack((starts[:-1], starts[1:])).int())
        assert (found[:, len(lengths) :] == sum(lengths)).all()
    assert masks.documents_in(torch.arange(5, 9).expand(3, -1)) is None


def test_rows_without_position_ids_go_to_sdpa_in_a_graph(qwen3):
    """Where documents might be, a graph has the operator of ours."""
    model, called = qwen3.kernelize(tiny_model()), []
    model.set_attn_implementation("bastile")

    def backend(graph, inputs):
        parts = (part for part in graph.modules() if isinstance(part, torch.fx.GraphModule))
        for node in (node for part in parts for node in part.graph.nodes):
            called.append(str(node.target))
            if "scaled_dot_product_attention" in called[-1]:
                assert node.kwargs["attn_mask"] is None and node.kwargs["is_causal"]
        return graph

    for batch, ours in (({"input_ids": packed()["input_ids"]}, False), (packed(), True)):
        torch._dynamo.reset()
        called.clear()
        torch.compile(model, backend=backend, fullgraph=True)(**batch, use_cache=False)
        names = " ".join(called)
        assert ("scaled_dot_product_attention" in names) is not ours
        assert (".attention_forward" in names) is ours


def gpt_oss_of(**changes):
    return tiny_gpt_oss(**{"num_hidden_layers": 4, **changes})


@pytest.mark.parametrize("side", ("left", "right", "none"))
def test_gpt_oss(plans, side):
    """Against eager attention: sinks, and windows of 8 tokens in every second layer."""
    batch = padded("left" if side == "none" else side)
    if side == "none":
        batch = {"input_ids": torch.stack(documents(lengths=(23, 23)))}
    seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    assert_same(*both(batch, make=gpt_oss_of, seen=seen, before="eager"), bound=1e-4)
    assert len(plans) == 4 and len({id(plan) for plan in plans}) == 2


def test_packed_gpt_oss_equals_the_documents_one_by_one(plans):
    """Which transformers' eager attention lets see each other."""
    model = gpt_oss_of(attn_implementation="bastile")
    together = model(**packed(), use_cache=False).logits[0].split(LENGTHS)
    assert len({id(plan) for plan in plans}) == 2
    for logits, tokens in zip(together, documents(), strict=True):
        torch.testing.assert_close(logits, model(tokens[None]).logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", (None, "static"))
def test_gpt_oss_generates(plans, cache):
    batch, texts = padded("left", (4, 12, 9)), []
    for implementation in ("eager", "bastile"):
        model = gpt_oss_of(attn_implementation=implementation).eval()
        texts.append(model.generate(**batch, max_new_tokens=8, do_sample=False, cache_implementation=cache))
    assert torch.equal(*texts) and plans


@pytest.mark.parametrize("why", ("holes", "dropout", "4d"))
def test_what_no_plan_says_goes_to_eager_attention_where_there_are_sinks(plans, why):
    batch, changes = padded("right"), {}
    if why == "holes":
        batch["attention_mask"][2, 4] = 0
    elif why == "dropout":
        changes = {"attention_dropout": 0.5}
    else:
        batch["attention_mask"] = torch.zeros(4, 1, 23, 23).masked_fill(torch.ones(23, 23).triu(1).bool(), -1e9)
    results = []
    for implementation in ("eager", "bastile"):
        model = gpt_oss_of(attn_implementation=implementation, **changes)
        torch.manual_seed(1)
        results.append(step(model, batch))
    assert_same(results[1], results[0], bound=1e-5)
    assert not plans


# ---------------------------------------------------------------- choosing it
@pytest.fixture
def kernels(interpreted_qwen3):
    """The package whose kernels the interpreter runs, and `launched`: the names of those that ran."""
    interpreted_qwen3.launched = runtime_of(interpreted_qwen3).launch.backend.launched
    interpreted_qwen3.launched.clear()
    return interpreted_qwen3


def half(**changes):
    return tiny_model(torch.bfloat16, head_dim=64, num_attention_heads=2, num_key_value_heads=1, **changes)


@pytest.mark.parametrize("how", ("apply", "kernelize"))
def test_a_model_whose_kernels_run_gets_it(kernels, how):
    model, plain = half(), half()
    expected = step(plain.float(), packed())
    kernels.apply() if how == "apply" else kernels.kernelize(model)
    for _ in range(2):
        found = step(model, packed())
    assert "attention_forward" in " ".join(kernels.launched) and "attention_backward_dkv" in " ".join(kernels.launched)
    assert sum("attention_plan" in name for name in kernels.launched) == 2, "one plan a batch"
    assert model.model.config._attn_implementation == "bastile" and model.config._attn_implementation == "sdpa"
    for name, gradient in found[1].items():
        error = (gradient.float() - expected[1][name]).norm() / expected[1][name].norm()
        assert error < 0.05, f"{name}: {error:.1e}"
    kernels.reset()
    assert model.model.config is model.config and "bastile" not in ALL_MASK_ATTENTION_FUNCTIONS


@pytest.mark.parametrize("kept", ("eager", "off", "off for one", "head_dim"))
def test_a_model_that_keeps_its_attention(kernels, kept):
    model = tiny_model(torch.bfloat16) if kept == "head_dim" else half()
    if kept == "eager":
        model.set_attn_implementation("eager")
    if kept == "off for one":
        kernels.kernelize(model, attention=False)
    else:
        kernels.apply(attention=kept != "off")
    before = model.config._attn_implementation
    step(model, packed())
    assert model.model.config._attn_implementation == before
    assert not any("attention" in name for name in kernels.launched)


def test_switching_it_off_gives_models_their_attention_back(kernels):
    model = half()
    kernels.apply()
    step(model, packed())
    assert model.model.config._attn_implementation == "bastile"
    kernels.apply(attention=False)
    assert model.model.config._attn_implementation == "sdpa"


FAMILIES = {"qwen3": tiny_model, "sliding": lambda **changes: tiny_model(**SLIDING, **changes), "qwen3_moe": tiny_qwen3_moe,
            "gpt_oss": tiny_gpt_oss}
DECODERS = ("gemma2", "gemma3_text", "ernie4_5", "phi3", "olmo3")  # of the package for dense families, what is unlike Qwen3


@pytest.fixture
def chosen(request, monkeypatch):
    """A function of a family's name: its package, whose kernels serve every device, and what makes a model that they fit."""

    def of(family):
        package = request.getfixturevalue("gpt_oss" if family == "gpt_oss" else "decoders" if family in DECODERS else "qwen3")
        for name in ("kernels_run_on", "takes_heads"):
            monkeypatch.setattr(module_of(package, "attention_choice"), name, lambda *tensors, **options: True)
        if family in DECODERS:
            return package, functools.partial(tiny, family, attn_implementation=None)
        return package, functools.partial(FAMILIES[family], head_dim=64)

    return of


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
def test_where_nobody_reads_padding_it_is_left_out(chosen, family, monkeypatch):
    package, make = chosen(family)
    batch = padded("right")
    batch["labels"] = labels_of(batch)
    model = make()
    expected = model(**batch, use_cache=False).loss
    tokens = tokens_of(package, monkeypatch)
    for unpad in (True, False):
        package.apply(unpad=unpad)
        tokens.clear()
        torch.testing.assert_close(model(**batch, use_cache=False).loss, expected, rtol=1e-5, atol=1e-5)
        assert set(tokens) == {sum(LENGTHS) if unpad else batch["input_ids"].numel()}


@pytest.mark.parametrize("batch", (packed(), padded("right"), padded("left")), ids=("packed", "right", "left"))
def test_a_model_that_caps_its_scores_keeps_them_where_ours_was_asked_for_by_name(chosen, batch):
    package, make = chosen("gemma2")
    model = make()
    seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    expected = step(model, batch, seen)
    package.apply()
    model.set_attn_implementation("bastile")
    assert_same(step(model, batch, seen), expected)
    labels = {"labels": batch["input_ids"].masked_fill(~seen, -100)}
    loss = model(**batch, **labels, use_cache=False).loss
    package.reset()
    torch.testing.assert_close(loss, model(**batch, **labels, use_cache=False).loss)


def test_the_choice_leaves_the_users_configuration_alone(chosen):
    package, make = chosen("qwen3")
    package.apply()
    model, ids = make(), torch.stack(documents(lengths=(5, 5)))
    model(ids)
    ours = model.model.config
    assert ours._attn_implementation == model.model.layers[0].self_attn.config._attn_implementation == "bastile"
    assert model.config._attn_implementation == "sdpa" and isinstance(ours, type(model.config)) and ours == model.config
    model.config.use_cache = False
    assert ours.use_cache is False and ours.to_dict() == model.config.to_dict() and repr(ours) == repr(model.config)
    for copied in (copy.copy(ours), copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), type(ours).from_dict(ours.to_dict())):
        assert copied._attn_implementation in ("sdpa", None) and copied.to_dict() == model.config.to_dict()
        assert type(copy.deepcopy(copied)) is type(model.config)
    twin = copy.deepcopy(model)
    assert twin.config is twin.model.config is twin.model.layers[0].self_attn.config
    later, made = copy.deepcopy(ours), type(model)(ours)
    package.reset()
    for each in (model, twin, made, type(model)(later)):
        each(ids)
        assert each.config._attn_implementation == "sdpa" and type(each.model.config) is type(model.config)


def test_a_model_that_asks_for_it_by_name_survives_reset(qwen3):
    model, batch = tiny_model(), packed()
    qwen3.apply()
    model.set_attn_implementation("bastile")
    expected = step(model, batch)
    qwen3.reset()
    assert_same(step(model, batch), expected, bound=1e-5)
    model.set_attn_implementation("sdpa")
    qwen3.apply()
    qwen3.reset()
    assert "bastile" not in ALL_MASK_ATTENTION_FUNCTIONS


@pytest.mark.parametrize("name", ("sdpa", "eager"))
@pytest.mark.parametrize("when", ("loading", "after apply", "made before apply", "after kernelize", "after a step"))
@pytest.mark.parametrize("family", ("qwen3", "gpt_oss"))
def test_an_implementation_that_was_asked_for_by_name_is_kept(chosen, family, when, name, tmp_path):
    if (family, name) == ("gpt_oss", "sdpa"):
        pytest.skip("GPT-OSS has no SDPA in transformers")
    package, make = chosen(family)
    make().save_pretrained(tmp_path)
    cls, ids = type(make()), torch.stack(documents(lengths=(5, 5)))
    package.apply() if when not in ("made before apply", "after kernelize") else None
    model = cls.from_pretrained(tmp_path, **({"attn_implementation": name} if when == "loading" else {}))
    package.apply() if when == "made before apply" else None
    if when == "after kernelize":
        package.kernelize(model)
    if when == "after a step":
        model(ids)
    if when != "loading":
        model.set_attn_implementation(name)
    for _ in range(2):
        model(ids)
        assert model.model.config._attn_implementation == name
    package.kernelize(model)
    model(ids)
    assert model.model.config._attn_implementation == name
    other = cls.from_pretrained(tmp_path)
    package.apply()
    other(ids)
    assert other.model.config._attn_implementation == "bastile"


@pytest.mark.parametrize("changed", ("query", "key", "value"))
def test_an_attention_function_that_changes_its_inputs_is_right_or_refused(qwen3, changed, monkeypatch):
    """q, k and v of a fused layer are views of what it has made, and PyTorch refuses to change these in place."""
    def custom(module, query, key, value, mask, **kwargs):
        {"query": query, "key": key, "value": value}[changed].mul_(1.5)
        return transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)

    for interface, function in ((transformers.AttentionInterface, custom), (AttentionMaskInterface, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])):
        monkeypatch.setitem(interface._global_mapping, "custom", function)
    model, ids = tiny_model(attn_implementation="custom"), torch.stack(documents(lengths=(9, 9)))
    expected = step(model, {"input_ids": ids})
    qwen3.apply()
    try:
        found = step(model, {"input_ids": ids})
    except RuntimeError as error:
        assert "modified inplace" in str(error)
    else:
        assert_same(found, expected)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected[0], rtol=1e-5, atol=1e-5)


def test_a_model_that_was_given_it_compiles(chosen):
    package, make = chosen("qwen3")
    package.apply()
    model = make()
    expected = step(model, packed())
    assert model.model.config._attn_implementation == "bastile"
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    assert_same(step(model, packed()), expected)


def test_older_transformers_may_note_that_they_set_it(chosen):
    """Up to 5.20 they leave an attribute on a configuration that they have set, and set it no second time."""
    package, make = chosen("qwen3")
    package.apply()
    model = make()
    model.model.config._attn_was_changed = True
    assert not hasattr(model.model.config, "_attn_was_changed") and "_attn_was_changed" not in model.config.to_dict()


def test_a_layer_that_was_copied_or_exchanged_is_told(chosen):
    package, make = chosen("qwen3")
    package.apply()
    model = make()
    step(model, packed())
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.model.layers[1] = copy.deepcopy(model.model.layers[0])
    model.config.num_hidden_layers += 1
    model.config.layer_types.append("full_attention")
    step(model, packed())
    assert all(layer.self_attn.config is model.model.config for layer in model.model.layers)
    model.model.layers[1].self_attn.config = type(model.config)(**{**model.config.to_dict(), "attn_implementation": "eager"})
    step(model, packed())
    assert model.model.config._attn_implementation == "sdpa"


# ---------------------------------------------------------------- padding left out of the decoder
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


@pytest.mark.parametrize("family", ("qwen3", "sliding", "gpt_oss"))
@pytest.mark.parametrize("side", ("left", "right"))
@pytest.mark.parametrize("checkpointing", (False, True))
def test_padding_is_left_out(request, family, side, checkpointing, monkeypatch):
    package = request.getfixturevalue("gpt_oss" if family == "gpt_oss" else "qwen3")
    tokens = tokens_of(package, monkeypatch)
    package.apply()
    batch = padded(side)
    batch["labels"] = labels_of(batch)
    if side == "left":
        batch["labels"][batch["input_ids"].ne(0).cumsum(1) == 1] = -100  # which a padded position would predict
    make = {"qwen3": tiny_model, "sliding": lambda **c: tiny_model(**SLIDING, **c), "gpt_oss": gpt_oss_of}[family]
    results = []
    for unpad in (False, True):
        model = make(attn_implementation="bastile")
        if checkpointing:
            model.gradient_checkpointing_enable()
        package.apply(unpad=unpad)
        tokens.clear()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
        assert set(tokens) == {sum(LENGTHS) if unpad else batch["input_ids"].numel()}
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


def test_what_is_remembered_of_a_mask_is_for_its_numbers_of_now(qwen3):
    masks = importlib.import_module(f"{qwen3.__name__}.shared.hf.masks")
    mask = torch.ones(2, 5, dtype=torch.bool)
    assert masks.padding_of(mask) == masks.padding_of(mask) == masks.WHOLE
    mask[0, 3:] = False
    assert masks.padding_of(mask) == masks.BESIDE


def test_a_plan_is_remembered_for_its_positions(qwen3):
    """Of two documents of two tokens, then of one of four."""
    masks = importlib.import_module(f"{qwen3.__name__}.shared.hf.masks")
    visible = masks.Visible({"batch_size": 1, "q_length": 4, "kv_length": 4}, masks.Rule(), None, positions=True)
    first, second = torch.tensor([[0, 1, 0, 1]]), torch.arange(4)[None]
    plan = visible.plan(torch.device("cpu"), position_ids=first)
    assert visible.plan(torch.device("cpu"), position_ids=first) is plan
    assert visible.plan(torch.device("cpu"), position_ids=second) is not plan
