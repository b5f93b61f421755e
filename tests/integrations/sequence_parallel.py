"""A row's tokens spread over two processes: DeepSpeed's Ulysses and torch's context parallelism. Attention is theirs, and all else ours."""

import contextlib
import importlib
import os
import sys
import warnings

import pytest
import torch

from tests.integrations.common import FACTOR, model_on
from tests.integrations.ranks import WORLD
from tests.integrations.zero import config_of, deepspeed_is_here, deepspeed_of  # noqa: F401
from tests.models import random_tokens
from tests.tolerances import assert_close

LENGTHS = (9, 5, 10)  # of the documents in the row, of which each process has one half
CLASSIC = "classic"  # transformers' SDPA, by which documents see each other once DeepSpeed has dropped the mask
BY_POSITIONS = "by positions"


def by_positions(module, query, key, value, attention_mask, scaling=None, position_ids=None, **kwargs):
    """An attention function that parts documents by position_ids, as FlashAttention's does on a GPU."""
    number = (position_ids == 0).cumsum(1)
    seen = (number[:, :, None] == number[:, None]).tril()[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def whole_row(device):
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {"input_ids": random_tokens(1, sum(LENGTHS)).to(device), "position_ids": positions.to(device)}


def step(model, batch, part, backward=True):
    """(logits, gradients) of one pass of a part of the row. part: a slice of its tokens."""
    logits = model(**{name: value[:, part] for name, value in batch.items()}, use_cache=False).logits
    weights = torch.sin(torch.arange(sum(LENGTHS) * logits.shape[-1], device=logits.device)).view(1, -1, logits.shape[-1])
    if backward:
        (logits * weights[:, part]).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if backward}


@contextlib.contextmanager
def as_on_a_gpu(package):
    """The package chooses its attention."""
    choice = sys.modules[f"{package.__name__}.shared.hf.attention.attention_choice"]
    before = choice.kernels_run_on, choice.takes_heads
    choice._spread.clear()
    choice.kernels_run_on = choice.takes_heads = lambda *tensors, **options: True
    try:
        yield
    finally:
        choice.kernels_run_on, choice.takes_heads = before


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


def register(model):
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", sequence_parallel_size=WORLD, micro_batch_size=1)
    return model


def prepare(here, model):
    """accelerate's `sp_size`, which registers the same and wraps the model."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    before = set(os.environ)
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    parallelism = ParallelismConfig(sp_backend="deepspeed", sp_size=WORLD, sp_handler=handler)
    plugin = DeepSpeedPlugin(hf_ds_config=config_of(0, train_micro_batch_size_per_gpu=1))
    try:
        accelerator = Accelerator(deepspeed_plugin=plugin, parallelism_config=parallelism)
        return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))[0]
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        for name in os.environ.keys() - before:
            del os.environ[name]


def check_ulysses(here, core, when, way):
    """core: the attention function that Ulysses is put around; when: whether a step with attention of ours runs before; way: who registers
    it."""
    deepspeed_of(here)
    device, batch = here.own_device, whole_row(here.own_device)
    half = sum(LENGTHS) // WORLD
    part = slice(here.rank * half, (here.rank + 1) * half)
    everything = torch.ones(sum(LENGTHS), sum(LENGTHS), dtype=torch.bool, device=device).tril()[None, None]
    alone = batch if core == BY_POSITIONS else {**batch, "attention_mask": everything}
    expected = step(model_on(device), alone, slice(None))
    with table_put_back() as table, as_on_a_gpu(here.qwen3):
        model = here.qwen3.kernelize(model_on(device))
        if when == "after a step":
            with torch.no_grad():
                model(**batch, use_cache=False)
            assert model.model.config._attn_implementation == "bastile"
        if core == BY_POSITIONS:
            table["sdpa"] = by_positions
        around = register(model) if way == "DeepSpeed" else prepare(here, model)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            logits, gradients = step(around, batch, part, way == "DeepSpeed")  # whose engine has a backward pass of its own
        assert [str(each.message) for each in said if "Ulysses spreads attention" in str(each.message)]
        assert model.model.config._attn_implementation == "sdpa"
        rows = {row.part: row for row in here.qwen3.explain(model).rows}
        assert "Ulysses spreads attention" in rows["attention"].reason and rows["o_proj"].fused
    assert_close(logits, expected[0][:, part], torch.float32, "logits", 2 * FACTOR[here.device])
    for name, gradient in gradients.items():
        torch.distributed.all_reduce(gradient)
        assert_close(gradient, expected[1][name], torch.float32, name, 4 * FACTOR[here.device])


def check_context_parallel(here):
    """Its zig-zag positions are no documents. torch puts its own function in SDPA's place for as long as the context lasts."""
    from torch.distributed.tensor.experimental import context_parallel

    device = here.own_device
    choice = sys.modules[f"{here.qwen3.__name__}.shared.hf.attention.attention_choice"]
    with as_on_a_gpu(here.qwen3):
        model = here.qwen3.kernelize(model_on(device))
        for name in ("sdpa", "bastile"):  # by default, and by name
            if name == "bastile":
                model.set_attn_implementation(name)
            choice.choose_attention(model.model)
            assert model.model.config._attn_implementation == "bastile"
            shards = {"buffers": [torch.arange(8, device=device)], "buffer_seq_dims": [0]}
            with warnings.catch_warnings(record=True) as said, context_parallel(here.mesh, **shards):
                warnings.simplefilter("always")
                choice.choose_attention(model.model)
                assert model.model.config._attn_implementation == "sdpa"
                rows = {row.part: row.reason for row in here.qwen3.explain(model).rows}
            assert len([each for each in said if "context_parallel spreads attention" in str(each.message)]) == 1
            assert "context_parallel spreads attention" in rows["attention"]
            choice.choose_attention(model.model)
            assert model.model.config._attn_implementation == "bastile"


@pytest.mark.parametrize("when", ("before a step", "after a step"))
@pytest.mark.parametrize("core", (CLASSIC, BY_POSITIONS))
def test_ulysses(ranks, core, when):
    ranks.run(check_ulysses, core, when, "DeepSpeed")


def test_ulysses_by_accelerate(ranks):
    ranks.run(check_ulysses, CLASSIC, "after a step", "accelerate")


def test_context_parallel(ranks):
    ranks.run(check_context_parallel)
