"""FSDP2 in two processes: what it can shard on its own, its options, checkpoints, and steps of training."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

from tests.integrations.common import FACTOR, FAMILIES, batch, family_on, install, model_on
from tests.integrations.ranks import in_each_process
from tests.integrations.sharding import (
    HOWS,
    LENGTH,
    ROWS,
    UNITS,
    assert_fused,
    assert_gradients,
    assert_same_step,
    gradients_of,
    package_of,
    rows_of,
    shard,
    whole,
)
from tests.models import Step
from tests.ops.adamw import small_parameters_too
from tests.tolerances import assert_close, relative_error
from tests.versions import WRAPS_FORWARDS, set_checkpointing


def check_fsdp(here, how, units, options, changes, build=model_on):
    """Installed before and after the model is sharded."""
    device = here.own_device
    for first in ("install", "shard"):
        model = build(device, **changes)
        if first == "install":
            model = shard(here, install(here.qwen3, model, how), units, **options)
        else:
            model = install(here.qwen3, shard(here, model, units, **options), how)
        # Where the layers themselves are units of their own, their weights are whole while they run.
        call = functools.partial(assert_fused, here, model) if units in ("root alone", "layers") else model
        assert_same_step(here, model, build(device, **changes), call, steps=2)
        here.qwen3.reset()


def check_fsdp_offload(here, how):
    """Shards, gradients and optimizer on the CPU, computation on the GPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    inputs = batch(here.own_device, ROWS, LENGTH)
    expected = Step(model_on(here.own_device), **inputs)
    model = shard(here, install(here.qwen3, model_on("cuda").cpu(), how), offload_policy=CPUOffloadPolicy())
    (2 * assert_fused(here, model, **rows_of(inputs, here.rank)).loss).backward()
    found = {name: whole(p.grad.to(here.own_device)) for name, p in model.named_parameters()}
    assert_gradients(found, expected.gradients, here.device)


@pytest.mark.integration("FSDP2: layers, attention and MLP, linear layers, norms, head and embeddings sharded on their own")
@HOWS
@pytest.mark.parametrize("units", UNITS)
def test_fsdp(ranks, how, units):
    ranks.run(check_fsdp, how, units, {}, {})


@pytest.mark.integration("FSDP2: without resharding after the forward pass, tied embeddings")
@pytest.mark.parametrize("tied", [False, True])
def test_fsdp_options(ranks, tied):
    ranks.run(check_fsdp, "kernelize", "layers", {"reshard_after_forward": False}, {"tie_word_embeddings": tied})


@pytest.mark.integration("FSDP2: Llama, Gemma 3 and Phi-3")
@pytest.mark.parametrize("name", FAMILIES)
@in_each_process
def test_fsdp_of_families(here, decoders_folder, name):
    """Checks what `check_fsdp` does, with the package for every dense family."""
    check_fsdp(package_of(here, decoders_folder), "kernelize", "layers", {}, {}, functools.partial(family_on, name))


@pytest.mark.integration("FSDP2: weights and gradients kept on the CPU (CPUOffloadPolicy)", on="cuda")
def test_fsdp_offload(ranks, device_type):
    if device_type == "cpu":
        pytest.skip("there is nothing to offload from")
    ranks.run(check_fsdp_offload, "kernelize")


@pytest.mark.integration("FSDP2: MixedPrecisionPolicy, bf16 over fp32 weights")
@pytest.mark.parametrize("units", ["layers", "layers and head", "layers, norm with head", "linears"])
@pytest.mark.parametrize("output_dtype", [None, torch.float32], ids=["bf16 outputs", "fp32 outputs"])
@in_each_process
def test_fsdp_mixed_precision(here, units, output_dtype):
    """bf16 parameters, fp32 master weights and reduction: no farther from fp32 than the plain model is."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = here.own_device
    inputs = batch(device, ROWS, LENGTH)
    exact = Step(model_on(device), **inputs).gradients
    mine = rows_of(inputs, here.rank)

    def gradients(model):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for unit in UNITS[units](model):
            fully_shard(unit, mesh=here.mesh, mp_policy=policy)
        fully_shard(model, mesh=here.mesh, mp_policy=dataclasses.replace(policy, output_dtype=output_dtype))
        (2 * model(**mine).loss).backward()
        return gradients_of(model)

    before = gradients(model_on(device))
    found = gradients(install(here.qwen3, model_on(device)))
    for name, gradient in exact.items():
        assert found[name].dtype == before[name].dtype == torch.float32
        ours, theirs = relative_error(found[name], gradient), relative_error(before[name], gradient)
        assert ours <= 1.25 * theirs + 1e-3, f"{name}: relative error {ours:.2e}, without the layers {theirs:.2e}"


@pytest.mark.integration("FSDP2: gradient checkpointing, reentrant and not")
@pytest.mark.parametrize(("how", "reentrant"), [("kernelize", True), ("kernelize", False), ("apply", False)])
@in_each_process
def test_fsdp_checkpointing(here, how, reentrant):
    """Each layer is recomputed once, and FSDP2's hooks run as often as they do without us."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    device = here.own_device
    inputs = batch(device, ROWS, LENGTH)
    expected = Step(model_on(device), **inputs)
    mine, before, hooks, recomputed = rows_of(inputs, here.rank), FSDPState._pre_forward, [], []

    def pre_forward(state, module, args, kwargs):
        hooks[-1].append(type(module).__name__)
        return before(state, module, args, kwargs)

    def step(model):
        set_checkpointing(model, use_reentrant=reentrant)
        for index, layer in enumerate(model.model.layers):
            checkpoint = layer._gradient_checkpointing_func
            layer._gradient_checkpointing_func = lambda *args, f=checkpoint, i=index: recomputed.append(i) or f(*args)
        (2 * shard(here, model)(**mine).loss).backward()
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPState, "_pre_forward", pre_forward)
        for make in (lambda: model_on(device), lambda: install(here.qwen3, model_on(device), how)):
            hooks.append([])
            recomputed.clear()
            model = step(make())
            assert recomputed == list(range(len(model.model.layers)))
    assert hooks[0] == hooks[1] and hooks[0].count("FSDPQwen3DecoderLayer") == (1 if WRAPS_FORWARDS else 2) * len(recomputed)
    assert_gradients(gradients_of(model), expected.gradients, here.device)


@pytest.mark.integration("FSDP2: checkpoint_wrapper around each layer")
@pytest.mark.parametrize("reentrant", [True, False])
@in_each_process
def test_fsdp_checkpoint_wrapper(here, reentrant):
    """torch's own wrapper around each layer, as accelerate's activation_checkpointing puts it on."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

    model = install(here.qwen3, model_on(here.own_device))
    kind = wrappers.CheckpointImpl.REENTRANT if reentrant else wrappers.CheckpointImpl.NO_REENTRANT
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = wrappers.checkpoint_wrapper(layer, kind)
    model.enable_input_require_grads()
    model = shard(here, model)
    call = functools.partial(model, use_cache=False)
    assert_same_step(here, model, model_on(here.own_device), call, "._checkpoint_wrapped_module")


@in_each_process
def test_hooks_on_a_sharded_head(here):
    """Whoever listens to the head hears its logits."""
    device = here.own_device
    inputs = batch(device, ROWS, LENGTH)
    model = here.qwen3.kernelize(shard(here, model_on(device), "layers and head"))
    heard = []
    model.lm_head.register_forward_hook(lambda module, args, output: heard.append(output.shape))
    assert model(**rows_of(inputs, here.rank)).logits is not None
    assert heard == [(ROWS // 2, LENGTH, model.config.vocab_size)]


@pytest.mark.parametrize(
    "own_optimizer",
    [
        pytest.param(False, id="AdamW of PyTorch", marks=pytest.mark.integration("FSDP2: clipping, optimizer steps, evaluation")),
        pytest.param(True, id="AdamW of the package", marks=pytest.mark.integration("FSDP2: AdamW of the package")),
    ],
)
@in_each_process
def test_training_under_fsdp(here, own_optimizer):
    """Three optimizer steps with clipping, and the logits afterwards in evaluation."""
    device = here.own_device
    inputs = batch(device, ROWS, LENGTH)
    mine = rows_of(inputs, here.rank)

    def train(model, inputs, factor, optimizer_class=torch.optim.AdamW):
        optimizer = optimizer_class(model.parameters(), lr=1e-3, foreach=False)
        for _ in range(3):
            (factor * model(**inputs).loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            optimizer.step()
            optimizer.zero_grad()
        return model.eval()(input_ids=inputs["input_ids"]).logits

    expected = train(model_on(device), inputs, 1)
    sharded = shard(here, install(here.qwen3, model_on(device)))
    with small_parameters_too(here.qwen3):
        found = train(sharded, mine, 2, here.qwen3.AdamW if own_optimizer else torch.optim.AdamW)
    half = expected[here.rank * ROWS // 2 :][: ROWS // 2]
    assert_close(found, half, torch.float32, "logits", 1000 * FACTOR[here.device])
