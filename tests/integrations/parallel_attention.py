"""Models that a parallel engine has wrapped: attention is Bastile's there too, and keeps documents apart; and `explain` says what runs in a
pass, not what lies in memory between two."""

import functools
import sys

import pytest
import torch

from tests.decoder_families import tiny
from tests.integrations.common import FACTOR, batch, model_on
from tests.integrations.parallel import fsdp1
from tests.integrations.ranks import in_each_process
from tests.integrations.sharding import LENGTH, OUTER, ROWS, as_on_a_gpu, assert_gradients, ddp, gradients_of, package_of, rows_of, shard
from tests.models import Step, tiny_gpt_oss, tiny_qwen3_moe
from tests.tolerances import assert_close

DOCUMENT = 9  # tokens
STEPS = 3  # what is known of a model after a step decides in the next one


def replicated(here, model):
    """DDP by FSDP2's means."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    for unit in (*model.model.layers, model):
        replicate(unit, mesh=here.mesh)
    return model


SHARDED = "root alone", "layers", "attention and mlp", "linears", "norms", *OUTER
ENGINES = {
    "DDP": ddp,
    "FSDP1": fsdp1,
    "FSDP1 flat": functools.partial(fsdp1, flat=True),
    "FSDP1, decoder": functools.partial(fsdp1, units="decoder"),
    **{f"FSDP2, {units}": functools.partial(shard, units=units) for units in SHARDED},
    "FSDP2, replicate": replicated,
}


@pytest.mark.integration("DDP: packed rows", "FSDP1: packed rows", "FSDP2: packed rows")
@pytest.mark.parametrize("engine", ENGINES)
@in_each_process
def test_packed_rows(here, engine):
    """Loss and gradients are those of transformers in one process, and each layer's attention is ours."""
    check_steps(here, engine, {"position_ids": (torch.arange(LENGTH) % DOCUMENT).repeat(ROWS, 1)}, steps=1)


@pytest.mark.integration("DDP: padded rows", "FSDP1: padded rows", "FSDP2: padded rows")
@pytest.mark.parametrize("engine", ENGINES)
@in_each_process
def test_padded_rows(here, engine):
    """One process has padding, the other none: what each gathers, and in which order, is the same."""
    mask = (torch.arange(LENGTH) < torch.tensor([LENGTH - 7, LENGTH - 3, *[LENGTH] * (ROWS - 2)])[:, None]).long()
    check_steps(here, engine, {"attention_mask": mask}, steps=STEPS)


def check_steps(here, engine, more, steps):
    """Loss and gradients are those of transformers in one process, and each layer's attention is ours in the last step. more: arguments of
    the model."""
    if engine == "FSDP2, replicate":
        pytest.importorskip("torch.distributed._composable.replicate_with_fsdp")
    device = here.own_device
    inputs = batch(device, ROWS, LENGTH) | {name: value.to(device) for name, value in more.items()}
    inputs["labels"] = torch.where(inputs.get("attention_mask", inputs["labels"]) == 0, -100, inputs["labels"])
    expected = Step(model_on(device, use_cache=False), **inputs)
    module, calls = sys.modules[f"{here.qwen3.__name__}.shared.hf.attention.attention"], []
    original = module.attention
    module.attention = lambda *args, **options: calls.append(1) or original(*args, **options)
    flat = engine.startswith("FSDP1")  # whose gradients are pieces, and whose steps other tests compare
    try:
        with as_on_a_gpu(here.qwen3):
            model = here.qwen3.kernelize(model_on(device, use_cache=False))
            parallel = ENGINES[engine](here, model)
            for _ in range(steps):
                parallel.zero_grad()
                calls.clear()
                loss = parallel(**rows_of(inputs, here.rank)).loss
                (2 * loss).backward()
                total = loss.detach().clone()
                torch.distributed.all_reduce(total)
                assert_close(total, expected.loss, torch.float32, "loss", FACTOR[here.device])
                if not flat:
                    assert_gradients(gradients_of(parallel, "module."), expected.gradients, here.device)
            assert [row.reason for row in here.qwen3.explain(model).rows if row.part == "attention" and not row.fused] == []
    finally:
        module.attention = original
    # Kernels take no float32, so on a GPU SDPA has its place; so it has for rows without padding, each of one document, and where a wrapper
    # around the decoder may show what attention returns for padding.
    if here.device == "cpu" and ("position_ids" in more or (here.rank == 0 and engine != "FSDP1, decoder")):
        assert len(calls) == len(model.model.layers)


MODELS = {  # the fixture of the package's folder, and what makes a model; GLM-4-MoE and Gemma 4 have no row
    "qwen3": ("package_folder", lambda: model_on("cpu")),
    "gpt_oss": ("gpt_oss_folder", tiny_gpt_oss),
    "qwen3_moe": ("moe_folder", tiny_qwen3_moe),
    "glm4_moe": ("moe_folder", functools.partial(tiny, "glm4_moe")),
    "gemma4_text": ("decoders_folder", functools.partial(tiny, "gemma4_text")),
}
EXPLAINED = "DDP", "FSDP1", "FSDP1 flat", "FSDP2, root alone", "FSDP2, layers", "FSDP2, decoder"


def said_of(package, model):
    """What `explain` says of a model, but for where the weights lie, which engines decide, and attention, of which it knows whether it was
    asked for by name if some package was in force when the model was made."""
    rows = package.explain(model).rows
    return {(row.part, row.fused, row.reason) for row in rows if "one GEMM" not in row.part and row.part != "attention"}


def check_explained(here, folder, name, engine):
    """Before a pass, after one and after its backward pass; nothing is another one afterwards."""
    package, make = package_of(here, folder).qwen3, MODELS[name][1]
    inputs = batch("cpu", ROWS // 2, LENGTH)
    expected = said_of(package, package.kernelize(make()))
    model = package.kernelize(make())
    parallel = ENGINES[engine](here, model)
    before = [id(parameter) for parameter in model.parameters()]

    def check():
        assert not said_of(package, model) ^ expected, said_of(package, model) ^ expected

    check()
    loss = parallel(**inputs).loss
    check()
    loss.backward()
    check()
    if engine != "FSDP1":  # which makes new views in each pass
        assert [id(parameter) for parameter in model.parameters()] == before
    package.reset()


@pytest.mark.parametrize("engine", EXPLAINED)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_said_of_sharded_models(ranks, request, name, engine, device_type):
    if device_type == "cuda":
        pytest.skip("what is said does not depend on the device")
    ranks.run(check_explained, str(request.getfixturevalue(MODELS[name][0])), name, engine)


@in_each_process
def test_layers_without_a_row_inside_fsdp1(here, moe_folder):
    """They are read before FSDP1 wraps them, or their parts alone are served, and explain says what to do."""
    package = package_of(here, moe_folder).qwen3
    parallel = fsdp1(here, tiny("glm4_moe"))
    rows = {row.part: row for row in package.explain(package.kernelize(parallel.module)).rows}
    assert rows["MLP"].fused and "Call apply() or kernelize() before that" in rows["decoder layer"].reason
    package.reset()
