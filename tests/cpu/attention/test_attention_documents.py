"""Documents are found without a wait for the GPU, and GPT-OSS has the same attention with sinks."""

import pytest
import torch

from tests.attention_batches import LENGTHS, SLIDING, assert_same, both, documents, gpt_oss_of, module_of, packed, padded, step
from tests.models import tiny_model, tiny_qwen3_moe


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
    bounds = module_of(loaded, "document_bounds")
    for lengths, expected in (((3, 4), 2), ((1,) * 7, 8), ((2,) * 8, 8), ((1,) * 9, 16)):
        found = bounds.documents_in(packed(lengths)["position_ids"])
        starts = torch.tensor((0, *lengths)).cumsum(0)
        assert found.shape == (2, expected) and found.dtype == torch.int32
        assert torch.equal(found[:, : len(lengths)], torch.stack((starts[:-1], starts[1:])).int())
        assert (found[:, len(lengths) :] == sum(lengths)).all()
    assert bounds.documents_in(torch.arange(5, 9).expand(3, -1)) is None


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


@pytest.mark.parametrize("side", ("left", "right", "none"))
def test_gpt_oss(plans, side):
    """Against eager attention: sinks, and windows of 8 tokens in every second layer."""
    batch = padded("left" if side == "none" else side)
    if side == "none":
        batch = {"input_ids": torch.stack(documents(lengths=(23, 23)))}
    seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    assert_same(*both(batch, make=gpt_oss_of, seen=seen, before="eager"), bound=1e-4)
    assert len(plans) == 4 and len({id(plan) for plan in plans}) == 2


@pytest.mark.parametrize("family", ("qwen3", "gemma3_text", "gemma2"))
def test_sinks_given_to_a_call_are_ignored_as_by_transformers(chosen, family):
    """The model has none. Bastile's attention stands in for SDPA or, in Gemma 2, for eager attention."""
    package, make = chosen(family)
    model = make()
    expected = step(model, packed())
    package.kernelize(model)
    found = step(model, packed(), s_aux=torch.linspace(-1, 1, model.config.num_attention_heads))
    assert model.model.config._attn_implementation == "bastile"
    assert_same(found, expected)


def test_a_mask_longer_than_its_rows_is_refused_as_by_transformers(chosen):
    package, make = chosen("qwen3")
    batch = {"input_ids": documents()[0][None], "attention_mask": torch.ones(1, LENGTHS[0] + 2, dtype=torch.long)}
    for model in (make(), package.kernelize(make())):
        with pytest.raises(RuntimeError, match="must match the size of tensor"):
            step(model, batch)


@pytest.mark.parametrize(("family", "changes"), (("gemma2", {}), ("gemma2", {"attn_logit_softcapping": None}), ("gpt_oss", {})), ids=str)
def test_what_padding_in_front_returns_is_that_of_eager_attention(chosen, family, changes):
    """The mean of all values, which the padding before a row's first token predicts that token with; with sinks it is zero."""
    package, make = chosen(family)
    model, batch = make(**changes), padded("left")
    expected = step(model, batch)
    package.kernelize(model)
    assert_same(step(model, batch), expected)
    assert model.model.config._attn_implementation == "bastile"
