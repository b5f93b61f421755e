"""A row's tokens spread over processes by DeepSpeed's Ulysses: attention of ours runs between its exchanges, right for whole rows."""

import contextlib
import importlib
import warnings
from typing import NamedTuple

import pytest
import torch

from tests.integrations.common import FACTOR, family_on, model_on
from tests.integrations.parallel import other_on
from tests.integrations.ranks import Ranks, in_each_process
from tests.integrations.sharding import as_on_a_gpu, gradients_of, package_of, shard
from tests.integrations.zero import config_of, deepspeed_is_here, deepspeed_of  # noqa: F401
from tests.models import random_tokens
from tests.tolerances import assert_close
from tests.versions import set_checkpointing

LENGTHS = (9, 5, 10)  # of the documents in a row: no process of two or four has whole ones
TOKENS = sum(LENGTHS)
PART = "attention, between the exchanges of DeepSpeed's Ulysses"


def by_positions(module, query, key, value, attention_mask, scaling=None, position_ids=None, **kwargs):
    """An attention function of a user's own, which parts documents by position_ids, as FlashAttention's does on a GPU."""
    number = (position_ids == 0).cumsum(1)
    seen = (number[:, :, None] == number[:, None]).tril()[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def packed(rows=1):
    """Rows of documents; the second one has them in the other order."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in LENGTHS[:: 1 - 2 * row]]) for row in range(rows)])
    return {"input_ids": random_tokens(rows, TOKENS), "position_ids": positions}


def plain():
    """Rows that are a document each."""
    return {**packed(2), "position_ids": torch.arange(TOKENS).expand(2, -1)}


def padded():
    """Two rows with padding, one in front of its tokens and one behind them, of which the last process has nothing else."""
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :7], mask[1, 11:] = 0, 0
    return {**packed(2), "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


class Case(NamedTuple):
    """A family, the fixture of its package's folder, changes of its small model, the name of what DeepSpeed is registered around, and what
    makes the batch."""

    family: str
    folder: str = "decoders_folder"
    changes: dict = {}
    name: str = "sdpa"
    rows: object = packed


CASES = {
    "llama": Case("llama"),
    "llama, rows that are a document each": Case("llama", rows=plain),
    "llama, a key's head for all": Case("llama", changes={"num_key_value_heads": 1}),
    "qwen3, by name": Case("qwen3", "package_folder", name="bastile"),
    "gemma3_text, windows": Case("gemma3_text", changes={"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    "mistral, a window, padding": Case("mistral", changes={"sliding_window": 5}, rows=padded),
    "qwen3, padding, by name": Case("qwen3", "package_folder", name="bastile", rows=padded),
    "gpt_oss, sinks": Case("gpt_oss", "gpt_oss_folder", name="bastile"),
    "gemma2, capped": Case("gemma2", name="bastile"),
}


def make(case, device):
    """A small model of a case's family, as transformers makes it."""
    if case.family in ("qwen3", "gpt_oss"):
        return (model_on(device, **case.changes) if case.family == "qwen3" else other_on("gpt_oss", device))
    return family_on(case.family, device, **case.changes)


def begin(here, batch):
    """Starts DeepSpeed. Returns the process's device, and a batch on it."""
    deepspeed_of(here)
    return here.own_device, {name: value.to(here.own_device) for name, value in batch.items()}


def step(model, batch, part, backward=True, **more):
    """(logits, gradients) of one pass of a part of the rows. part: a slice of their tokens; more: other arguments of the model. Padding
    counts nothing."""
    given = {name: value[:, part] if value.dim() == 2 else value for name, value in batch.items()}
    logits = model(**given, **more, use_cache=False).logits
    kept = given.get("attention_mask", torch.ones_like(given["input_ids"]))[..., None]
    logits = torch.where(kept > 0, logits, 0)
    rows, tokens = batch["input_ids"].shape
    weights = torch.sin(torch.arange(rows * tokens * logits.shape[-1], device=logits.device)).view(rows, tokens, -1)
    if backward:
        (logits * weights[:, part]).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if backward}


@contextlib.contextmanager
def table_put_back():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    parallel = importlib.import_module("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    before, state = dict(ALL_ATTENTION_FUNCTIONS._local_mapping), dict(vars(parallel))
    try:
        yield ALL_ATTENTION_FUNCTIONS
    finally:
        vars(parallel).update(state)  # groups, which are made once a process
        ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
        ALL_ATTENTION_FUNCTIONS._local_mapping.update(before)


@contextlib.contextmanager
def spread(here):
    """Ours, as on a GPU, with what DeepSpeed is registered around; gives transformers' table of attention functions."""
    with table_put_back() as table, as_on_a_gpu(here.qwen3):
        yield table


def register(here, model, name="sdpa", rows=1, **options):
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    UlyssesSPAttentionHF.register_with_transformers(model, name, sequence_parallel_size=here.world, micro_batch_size=rows, **options)
    return model


def part_of(here, tokens=TOKENS):
    """The tokens of a row that this process has."""
    share = tokens // here.world
    return slice(here.rank * share, (here.rank + 1) * share)


def assert_step(here, found, expected, reduce=True):
    """The logits of this process's tokens, and the sums of the processes' gradients, are those of one process."""
    assert_close(found[0], expected[0][:, part_of(here)], torch.float32, "logits", 2 * FACTOR[here.device])
    assert not reduce or found[1].keys() == expected[1].keys()
    for name, gradient in found[1].items():
        torch.distributed.all_reduce(gradient)
        assert_close(gradient, expected[1][name], torch.float32, name, 4 * FACTOR[here.device])


def expected_of(model, batch):
    """What `step` finds in one process: where rows are packed, of one document after the other (transformers' GPT-OSS would let each see
    those before it)."""
    if batch["input_ids"].shape[0] > 1:
        return step(model, batch, slice(None))
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    found = [step(model, batch, slice(end - length, end)) for end, length in zip(ends, LENGTHS)]
    return torch.cat([logits for logits, _ in found], 1), found[-1][1]


def check_ulysses(here, folder, case, order, checkpointing=None, keep_attention=False):
    """order: whether DeepSpeed is registered before the model is kernelized, after it, or after a step."""
    device, batch = begin(here, case.rows())
    here = package_of(here, folder)
    rows = batch["input_ids"].shape[0]
    expected = expected_of(make(case, device), batch)
    model = make(case, device)
    if case.name == "bastile":
        here.qwen3.apply(attention=False)  # which makes that a choice
        model.set_attn_implementation("bastile")
    with spread(here) as table:
        if order == "before":
            register(here, model, case.name, rows)
        here.qwen3.kernelize(model, keep_attention=keep_attention)
        if order == "after a step":
            with torch.no_grad():
                model(**batch, use_cache=False)
        if order != "before":
            register(here, model, case.name, rows)
        if checkpointing is not None:
            set_checkpointing(model, use_reentrant=checkpointing)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = step(model, batch, part_of(here))
        assert model.model.config._attn_implementation == "bastile"
        explained = {row.part: row for row in here.qwen3.explain(model).rows}
        assert explained[PART].fused and "attention" not in explained
        assert any(row.fused for part, row in explained.items() if part in ("o_proj", "decoder layer")), explained
        groups = model.config.num_attention_heads // model.config.num_key_value_heads
        assert model.model.layers[0].self_attn.num_key_value_groups == groups  # not those of a process's share of the heads
        here.qwen3.reset()
        assert table._local_mapping[case.name].__module__.startswith("deepspeed.")
    assert_step(here, found, expected)


@pytest.fixture(scope="module")
def four_ranks(device_type, package_folder):
    if device_type == "cuda" and torch.cuda.device_count() < 4:
        pytest.skip("fewer than 4 GPUs")
    found = Ranks(device_type, package_folder, 4)
    yield found
    found.close()


def run(request, ranks, case, *arguments):
    ranks.run(check_ulysses, request.getfixturevalue(CASES[case].folder), CASES[case], *arguments)


@pytest.mark.integration("DeepSpeed: a row over several processes (Ulysses), packed and padded, with windows, sinks and capped scores")
@pytest.mark.parametrize("case", CASES)
def test_ulysses(request, ranks, case):
    run(request, ranks, case, "after")


@pytest.mark.parametrize("order", ("before", "after a step"))
@pytest.mark.parametrize("case", ("llama", "qwen3, by name"))
def test_ulysses_in_any_order(request, ranks, case, order):
    run(request, ranks, case, order)


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("case", ("gemma3_text, windows", "gpt_oss, sinks"))
def test_ulysses_with_checkpoints(request, ranks, case, reentrant):
    run(request, ranks, case, "after", reentrant)


def test_ulysses_keeps_attention_of_checkpoints(request, ranks):
    run(request, ranks, "llama", "after", False, True)


@pytest.mark.integration("DeepSpeed: a row over four processes", on="cpu")
@pytest.mark.parametrize("case", ("llama, a key's head for all", "mistral, a window, padding", "gpt_oss, sinks"))
def test_ulysses_over_four(request, four_ranks, case):
    """Of GPT-OSS and Mistral, each head of keys is in two processes."""
    run(request, four_ranks, case, "after")


@in_each_process
def test_ulysses_in_bf16(here):
    """bf16, which the kernels take on a GPU: beside attention of ours in one process, no farther from it than rounding."""
    lengths = [40 * n for n in LENGTHS]
    batch = {"input_ids": random_tokens(1, sum(lengths)), "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    (device, batch), part = begin(here, batch), part_of(here, sum(lengths))
    with spread(here):
        expected = step(here.qwen3.kernelize(model_on(device, torch.bfloat16)), batch, slice(None))
        found = step(register(here, here.qwen3.kernelize(model_on(device, torch.bfloat16))), batch, part)
    assert_close(found[0], expected[0][:, part], torch.bfloat16, "logits", 2)
    for name, gradient in found[1].items():
        summed = gradient.float()
        torch.distributed.all_reduce(summed)
        assert_close(summed.to(gradient.dtype), expected[1][name], torch.bfloat16, name, 4)


@in_each_process
def test_ulysses_with_bounds(here):
    """cu_seq_lens_q are those of whole rows; what contradicts them is refused."""
    device, batch = begin(here, packed())
    expected = expected_of(model_on(device), batch)
    bounds = torch.tensor([0, *LENGTHS], device=device).cumsum(0).to(torch.int32)
    with spread(here):
        model = register(here, here.qwen3.kernelize(model_on(device)))
        assert_step(here, step(model, {**batch, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}, part_of(here)), expected)
        with pytest.raises(ValueError, match="start documents at different tokens"):
            step(model, {**batch, "cu_seq_lens_q": bounds[[0, 2, 3]]}, part_of(here))
        with pytest.raises(ValueError, match="position_ids are missing"):
            step(model, {"input_ids": batch["input_ids"]}, part_of(here))
        mask = torch.ones_like(batch["input_ids"])
        mask[:, 4] = 0  # within the first document
        with pytest.raises(ValueError, match="padding within a document"):
            step(model, {**batch, "attention_mask": mask}, part_of(here))


@pytest.mark.integration("DeepSpeed: a row over several processes (Ulysses), sharded by FSDP2")
@pytest.mark.parametrize("units", ["layers", "attention and mlp"])
@in_each_process
def test_ulysses_with_fsdp2(here, units):
    device, batch = begin(here, packed())
    logits, gradients = expected_of(model_on(device), batch)
    with spread(here):
        model = register(here, shard(here, here.qwen3.kernelize(model_on(device)), units))
        found = step(model, batch, part_of(here))[0]
        assert {row.part: row.fused for row in here.qwen3.explain(model).rows}.get(PART)
    assert_close(found, logits[:, part_of(here)], torch.float32, "logits", 2 * FACTOR[here.device])
    for name, mean in gradients_of(model).items():
        assert_close(mean * here.world, gradients[name], torch.float32, name, 4 * FACTOR[here.device])


@in_each_process
def test_ulysses_while_evaluating(here):
    """With disable_in_eval, which is how accelerate registers it, each process evaluates rows of its own."""
    device, batch = begin(here, padded())
    expected = step(model_on(device).eval(), batch, slice(None), False)[0]
    with spread(here):
        model = register(here, here.qwen3.kernelize(model_on(device).eval()), rows=2, disable_in_eval=True)
        assert_close(step(model, batch, slice(None), False)[0], expected, torch.float32, "logits", 2 * FACTOR[here.device])


@in_each_process
def test_ulysses_in_both_directions(here):
    """is_causal=False of a call goes to the function that DeepSpeed was registered around; ours, asked for by name, refuses it."""
    device, batch = begin(here, plain())
    expected = step(model_on(device), batch, slice(None), is_causal=False)
    with spread(here), pytest.warns(RuntimeWarning, match="with a mask that is not causal"):
        model = register(here, here.qwen3.kernelize(model_on(device)), rows=2)
        assert_step(here, step(model, batch, part_of(here), is_causal=False), expected)
    with spread(here):
        model = here.qwen3.kernelize(model_on(device))
        model.set_attn_implementation("bastile")
        with pytest.raises(ValueError, match="cannot run under DeepSpeed's Ulysses with a mask that is not causal"):
            step(register(here, model, "bastile", rows=2), batch, part_of(here), is_causal=False)


@in_each_process
def test_ulysses_around_what_is_not_ours(here, qwen3_5_folder):
    """A function of the user's own under Ulysses is called; delta nets and dropout keep attention from being ours, and that is said."""
    device, batch = begin(here, packed())
    expected = expected_of(model_on(device), batch)
    with spread(here) as table:
        table["sdpa"] = by_positions
        model = register(here, here.qwen3.kernelize(model_on(device)))
        assert_step(here, step(model, batch, part_of(here)), expected)
        assert model.model.config._attn_implementation == "sdpa"
        reasons = {row.part: row.reason for row in here.qwen3.explain(model).rows}
        assert "by_positions" in reasons["attention"] and PART not in reasons
    with spread(here), pytest.warns(RuntimeWarning, match="with dropout"):
        model = here.qwen3.kernelize(model_on(device, attention_dropout=0.5))
        step(register(here, model), batch, part_of(here))
    here = package_of(here, qwen3_5_folder)
    with spread(here):
        model = register(here, here.qwen3.kernelize(other_on("qwen3_5", device)))
        with pytest.warns(RuntimeWarning, match="layers of kind linear_attention"):
            step(model, batch, part_of(here), False)
        assert model.model.config._attn_implementation == "sdpa"
        assert "linear_attention" in {row.part: row.reason for row in here.qwen3.explain(model).rows}["attention"]
        model.set_attn_implementation("bastile")
    with spread(here):
        register(here, model, "bastile")
        with pytest.raises(ValueError, match="around attn_implementation='bastile', which this model cannot have"):
            step(model, batch, part_of(here), False)


@in_each_process
def test_ulysses_compiled(here):
    """A graph has DeepSpeed's own attention, and says so; around ours, which was asked for by name, it raises."""
    device, batch = begin(here, packed())
    for name in ("sdpa", "bastile"):
        with spread(here):
            torch._dynamo.reset()
            model = here.qwen3.kernelize(model_on(device))
            if name == "bastile":
                model.set_attn_implementation(name)
            compiled = torch.compile(register(here, model, name), backend="eager")
            if name == "bastile":
                with pytest.raises(ValueError, match="DeepSpeed"):
                    step(compiled, batch, part_of(here), False)
            else:
                with pytest.warns(RuntimeWarning, match="Leave torch.compile out"):
                    step(compiled, batch, part_of(here), False)
