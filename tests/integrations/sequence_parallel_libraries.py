"""A row's tokens spread over processes by accelerate's `sp_size`, alone and under trainers, and by torch's context parallelism, under which
attention is its own and all else ours."""

import contextlib
import importlib
import os
import sys
import warnings

import pytest
import torch

from tests.integrations.common import FACTOR, model_on
from tests.integrations.ranks import in_each_process
from tests.integrations.sequence_parallel import TOKENS, begin, by_positions, packed, part_of, spread, table_put_back
from tests.integrations.sharding import as_on_a_gpu
from tests.integrations.trainers import make_trainer
from tests.integrations.zero import config_of, deepspeed_is_here, deepspeed_of  # noqa: F401
from tests.models import random_tokens
from tests.tolerances import assert_close


@contextlib.contextmanager
def new_accelerator():
    """accelerate keeps what the first Accelerator of a process was given."""
    from accelerate.state import AcceleratorState, PartialState

    def forget():
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()

    forget()
    try:
        yield
    finally:
        forget()


@new_accelerator()
def prepare(here, model, name):
    """accelerate's `sp_size`, which registers the same and wraps the model."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    before = set(os.environ)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    handler.sp_attn_implementation = name  # of which its check knows nothing
    parallelism = ParallelismConfig(sp_backend="deepspeed", sp_size=here.world, sp_handler=handler)
    plugin = DeepSpeedPlugin(hf_ds_config=config_of(0, train_micro_batch_size_per_gpu=1))
    try:
        accelerator = Accelerator(deepspeed_plugin=plugin, parallelism_config=parallelism)
        return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))[0]
    finally:
        for name in os.environ.keys() - before:
            del os.environ[name]


class Collated:
    """Packed rows as the batches of a DataLoader, each with the labels of its tokens."""

    def __call__(self, rows):
        batch = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "position_ids")}
        return {**batch, "labels": batch["input_ids"].masked_fill(batch["position_ids"] == 0, -100)}


@pytest.mark.integration("accelerate: a row over several processes (sp_size)")
@pytest.mark.parametrize("name", ("sdpa", "bastile"))
@in_each_process
def test_ulysses_by_accelerate(here, name):
    """accelerate's `sp_size`: its engine, with the loss of each process's labels, which are shifted in whole rows."""
    device, batch = begin(here, packed())
    labels = torch.nn.functional.pad(batch["input_ids"], (0, 1), value=-100)[:, 1:].clone()
    labels[:, : TOKENS // here.world] = -100  # the first process has a prompt and nothing to learn
    whole = model_on(device)
    total = int((labels != -100).sum())
    whole(**batch, labels=labels, shift_labels=labels, use_cache=False).loss.backward()
    with spread(here):
        model = here.qwen3.kernelize(model_on(device))
        model.set_attn_implementation(name) if name == "bastile" else None
        engine, part = prepare(here, model, name), part_of(here)
        given = {name: value[:, part] for name, value in {**batch, "labels": labels, "shift_labels": labels}.items()}
        loss = engine(**given, use_cache=False, num_items_in_batch=total).loss
        assert model.model.config._attn_implementation == "bastile"
        engine.backward(loss)  # whose gradients are sums over the processes of a row
        full = importlib.import_module("deepspeed.utils").safe_get_full_grad
        for name, parameter in model.named_parameters():
            assert_close(full(parameter), whole.get_parameter(name).grad, torch.float32, name, 4 * FACTOR[here.device])


@pytest.mark.parametrize(
    "kind",
    (
        pytest.param("hf", marks=pytest.mark.integration("Trainer: a packed row over several processes (sp_size)")),
        pytest.param("trl", marks=pytest.mark.integration("SFTTrainer: padded rows over several processes (sp_size)")),
    ),
)
@in_each_process
def test_ulysses_by_a_trainer(here, tmp_path, kind):
    """Steps of Trainer ("hf") with packed rows or SFTTrainer ("trl") with padded ones under `sp_size`, beside those without us, with an
    attention function that parts documents."""
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    deepspeed_of(here)
    if kind == "hf":
        batch = packed(2)
        rows = [{name: value[row] for name, value in batch.items()} for row in range(2)]
        options = {"data_collator": Collated(), "remove_unused_columns": False}
    else:
        rows = [{"input_ids": random_tokens(1, length)[0].tolist()} for length in (9, 14, 11, 16)]
        options = {"pad_to_multiple_of": 16}  # gloo gathers batches of one length alone

    @new_accelerator()
    def trained(model):
        handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
        size = 1 if kind == "hf" else 2
        parallelism = ParallelismConfig(sp_backend="deepspeed", sp_size=here.world, sp_handler=handler)
        trainer = make_trainer(
            kind, model, tmp_path, here.device, rows, per_device_train_batch_size=size, optim="sgd", learning_rate=0.1,
            deepspeed=config_of(0, train_micro_batch_size_per_gpu=size), parallelism_config=parallelism, **options,
        )  # fmt: skip
        trainer.train()
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    before = {name: parameter.detach().clone() for name, parameter in model_on(here.own_device).named_parameters()}
    with table_put_back() as table:
        table["sdpa"] = by_positions
        expected = trained(model_on(here.own_device))
    with spread(here):
        model = here.qwen3.kernelize(model_on(here.own_device))
        found = trained(model)
        assert model.model.config._attn_implementation == "bastile"
    for name, parameter in found.items():
        assert_close(parameter - before[name], expected[name] - before[name], torch.float32, name, 40 * FACTOR[here.device])


@in_each_process
def test_context_parallel(here):
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
            assert "context_parallel spreads attention" in rows["attention"] and "sp_size" in rows["attention"]
            choice.choose_attention(model.model)
            assert model.model.config._attn_implementation == "bastile"
