"""PyTorch's own parallel engines and transformers' tensor parallelism in two processes: gradients equal to those of one process."""

import contextlib
import copy
import functools

import pytest
import torch

from tests.integrations.common import FACTOR, FAMILIES, GPU_SIZES, batch, family_on, install, model_on
from tests.integrations.ranks import WORLD, in_each_process
from tests.integrations.sharding import (
    HOWS,
    LENGTH,
    ROWS,
    UNITS,
    assert_fused,
    assert_gradients,
    assert_same_step,
    ddp,
    gradients_of,
    package_of,
    rows_of,
    shard,
    units_of,
    whole,
)
from tests.models import Step, tiny_gpt_oss, tiny_qwen3_5, tiny_qwen3_moe
from tests.tolerances import assert_close
from tests.versions import set_checkpointing


def check_accumulation(here, how, sharded):
    """no_sync() over the first micro-batches of DDP, set_requires_gradient_sync(False) of FSDP2."""
    device = here.own_device
    inputs = batch(device, ROWS, LENGTH)
    expected = Step(model_on(device), **inputs)
    model = install(here.qwen3, model_on(device), how)
    model = shard(here, model) if sharded else ddp(here, model)
    mine = rows_of(inputs, here.rank)
    for row in range(ROWS // 2):
        part, last = {name: t[row : row + 1] if t.dim() else t for name, t in mine.items()}, row == ROWS // 2 - 1
        if sharded:
            model.set_requires_gradient_sync(last)
        with contextlib.nullcontext() if sharded or last else model.no_sync():
            (2 * model(**part).loss).backward()
    assert_gradients(gradients_of(model, "module."), expected.gradients, here.device)


def check_lora(here, how, sharded):
    """With frozen weights: under DDP tied embeddings, under FSDP2 an adapter on the head."""
    from tests.integrations.adapters import lora

    targets = ["q_proj", "down_proj", *(["lm_head"] if sharded else [])]
    plain, model = (lora(model_on(here.own_device, tie_word_embeddings=not sharded), target_modules=targets) for _ in range(2))
    parallel = install(here.qwen3, model, how)
    if sharded:
        shard(here, parallel.get_base_model())
    else:
        parallel = ddp(here, parallel)
    assert_same_step(here, parallel, plain, within="module.", logits=sharded)


def fsdp1(here, model, units="layers", flat=False, policy=None):
    """A model in FSDP's first version. flat: it trains one parameter for each unit (use_orig_params=False), not the model's own."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import CustomPolicy

    inside = [] if policy else units_of(model.get_base_model() if hasattr(model, "peft_config") else model, units)
    policy = policy or CustomPolicy(lambda module: any(module is unit for unit in inside))
    device = torch.device(here.own_device)
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, use_orig_params=not flat)


def gradients_by_update(model, before):
    """The gradients of a model under FSDP1, which gives whole weights in both its ways: from what a step of SGD makes of them.

    before: the trained weights by their names without FSDP's."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    rate = 1e3  # so that the weights that the gradients are added to do not round them
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate, foreach=False).step()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        after = {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in model.named_parameters()}
    return {name: (weight - after[name]) / rate for name, weight in before.items()}


def check_kind(here, kind, checkpointing, adapted, units="layers", build=model_on, changes=(), fused=True, dense=True):
    """One kind of training in parallel: loss, gradients, and that it ran fused and says so. dense: False where layers have no MLP, or
    are more than two."""
    from tests.integrations.adapters import PROJECTIONS, lora

    device = here.own_device
    inputs = batch(device, ROWS, LENGTH)

    def make():
        made = build(device, **dict(changes))
        return lora(made, target_modules=PROJECTIONS) if adapted else made

    plain = make()
    expected = Step(plain, **inputs)
    before = {name: p.detach().clone() for name, p in plain.named_parameters() if p.requires_grad}
    model = install(here.qwen3, make())
    if checkpointing:
        set_checkpointing(model, use_reentrant=checkpointing == "reentrant")
        model.enable_input_require_grads()
    of_fsdp1 = kind.startswith("FSDP1")
    if of_fsdp1:
        policy = None
        if adapted and kind == "FSDP1 flat":
            from peft.utils.other import fsdp_auto_wrap_policy

            policy, fused = fsdp_auto_wrap_policy(model), False  # every adapter's weight is a unit of its own
        model = parallel = fsdp1(here, model, units, kind == "FSDP1 flat", policy)
    elif kind == "FSDP2":
        parallel = model
        shard(here, model.get_base_model() if adapted else model, units)
    else:
        parallel = ddp(here, model, static_graph=checkpointing == "reentrant")
    mine, counted = rows_of(inputs, here.rank), fused and dense
    for _ in range(2):  # the second step finds what the first one left
        parallel.zero_grad()
        output = assert_fused(here, parallel, use_cache=False, **mine) if counted else parallel(use_cache=False, **mine)
        assert output.logits is None
        (2 * output.loss).backward()
    loss = output.loss.detach()
    torch.distributed.all_reduce(loss)
    assert_close(loss, expected.loss, torch.float32, "loss", FACTOR[here.device])
    rows = [row for row in here.qwen3.explain(model).rows if not row.part.startswith(("kernels on", "attention"))]
    assert not any("pack" in row.advice for row in rows if "FSDP" in kind)  # which leaves views of a buffer where they are
    rows = [row for row in rows if "one GEMM" not in row.part]
    assert all(row.fused for row in rows if fused or row.part == "loss without logits"), rows
    assert fused or not all(row.fused for row in rows)
    found = gradients_by_update(model, before) if of_fsdp1 else gradients_of(parallel, "module.")
    assert_gradients(found, expected.gradients, here.device, 1 if dense else 10)


# Families with experts or delta nets: the fixture of their package's folder, what makes a model, and the sizes that kernels on a GPU take.
OTHERS = {
    "qwen3_moe": ("package_folder", tiny_qwen3_moe, GPU_SIZES),
    "gpt_oss": ("gpt_oss_folder", tiny_gpt_oss, {**GPU_SIZES, "head_dim": 64}),
    "qwen3_5": ("qwen3_5_folder", tiny_qwen3_5, {**GPU_SIZES, "head_dim": 256, "width": 128}),
}


def other_on(name, device):
    """A small model of `OTHERS` in training mode."""
    _, make, sizes = OTHERS[name]
    return make(**({} if device == "cpu" else sizes)).to(device)


def check_kind_of_family(here, folder, name, *args):
    """Checks what `check_kind` does, with the package of a family."""
    here = package_of(here, folder)
    build = functools.partial(other_on if name in OTHERS else family_on, name)
    check_kind(here, *args, build=build, dense=name not in OTHERS)


def check_trainer(here, folder, fsdp):
    """The Trainer under DDP or a version of FSDP: losses and gradient norms of the plain model under the same. fsdp: the version, or 0."""
    from tests.integrations.trainers import run

    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3}
    if fsdp:
        config = {"version": fsdp, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}
        options |= {"fsdp": True, "fsdp_config": config | ({"reshard_after_forward": True} if fsdp == 2 else {"use_orig_params": True})}
    if here.device == "cpu":
        options["ddp_backend"] = "gloo"
    device = here.device
    expected = run("hf", model_on(device), folder, device, **options)
    found = run("hf", install(here.qwen3, model_on(device)), folder, device, **options)
    if fsdp != 1:  # whose gradients lie in flat buffers
        assert ("DTensor" in type(found.gradients[0]["model.layers.0.mlp.up_proj.weight"]).__name__) == (fsdp == 2)
    for ours, theirs in ((found.losses, expected.losses), (found.norms, expected.norms)):
        assert len(ours) == 3 and ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.integration("DDP: buckets as views, static graph, unused parameters, gradient checkpointing")
@HOWS
@pytest.mark.parametrize(
    ("options", "checkpointing"),
    [
        ({}, None),
        ({"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}, None),
        ({"static_graph": True}, "reentrant"),
        ({"find_unused_parameters": True}, None),
        ({}, "not reentrant"),
    ],
    ids=["plain", "views", "static, reentrant", "unused", "not reentrant"],
)
@in_each_process
def test_ddp(here, how, options, checkpointing):
    model = install(here.qwen3, model_on(here.own_device), how)
    if checkpointing:
        set_checkpointing(model, use_reentrant=checkpointing == "reentrant")
        model.config.use_cache = False
    parallel = ddp(here, model, **options)
    call = functools.partial(assert_fused, here, parallel)
    assert_same_step(here, parallel, model_on(here.own_device), call, "module.", steps=2)


@pytest.mark.integration("DDP: gradient accumulation under no_sync()")
@HOWS
def test_ddp_accumulation(ranks, how):
    ranks.run(check_accumulation, how, False)


@pytest.mark.integration("DDP: LoRA, tied embeddings")
@HOWS
def test_ddp_with_lora(ranks, how):
    ranks.run(check_lora, how, False)


@pytest.mark.integration("FSDP1: use_orig_params both ways, whole models and LoRA, gradient checkpointing, reentrant and not")
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", ["DDP", "FSDP1", "FSDP1 flat", "FSDP2"])
def test_kinds_of_parallel_training(ranks, kind, checkpointing, adapted):
    ranks.run(check_kind, kind, checkpointing, adapted)


@pytest.mark.integration("FSDP1: layers, attention and MLP, linear layers, norms, head and embeddings as units of their own")
@pytest.mark.parametrize("flat", [False, True], ids=["original parameters", "flat"])
@pytest.mark.parametrize("units", [name for name in UNITS if name != "layers, norm with head"])
def test_units_of_fsdp1(ranks, units, flat):
    fused = units in ("root alone", "layers", "layers and head", "layers, head and embeddings")
    ranks.run(check_kind, "FSDP1 flat" if flat else "FSDP1", "not reentrant", False, units, model_on, (), fused)


@pytest.mark.integration("FSDP1: Llama, Gemma 3 and Phi-3")
@pytest.mark.parametrize("kind", ["FSDP1", "FSDP1 flat"])
@pytest.mark.parametrize("name", FAMILIES)
def test_fsdp1_of_families(ranks, decoders_folder, name, kind):
    ranks.run(check_kind_of_family, str(decoders_folder), name, kind, "not reentrant", False)


@pytest.mark.integration("FSDP1: Qwen3-MoE, GPT-OSS and Qwen3.5")
@pytest.mark.parametrize("kind", ["FSDP1", "FSDP1 flat"])
@pytest.mark.parametrize("name", OTHERS)
def test_fsdp1_of_other_layers(ranks, request, name, kind):
    folder = request.getfixturevalue(OTHERS[name][0])
    ranks.run(check_kind_of_family, str(folder), name, kind, "not reentrant", False)


@pytest.mark.integration("FSDP2: gradient accumulation (set_requires_gradient_sync)")
@HOWS
def test_fsdp_accumulation(ranks, how):
    ranks.run(check_accumulation, how, True)


@pytest.mark.integration("FSDP2: LoRA")
@HOWS
def test_fsdp_with_lora(ranks, how):
    ranks.run(check_lora, how, True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, device_type):
    folder = tmp_path_factory.mktemp("checkpoint")
    # Two processes share it evenly.
    model_on(device_type, vocab_size=200).save_pretrained(folder)
    return str(folder)


@pytest.mark.integration("transformers: tensor parallelism (tp_plan)")
@pytest.mark.parametrize("how", ["apply before", "apply", "kernelize", "pack"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@in_each_process
def test_tensor_parallelism(here, checkpoint, how, training):
    """from_pretrained(tp_plan="auto"): every process has all of the batch and half of each projection."""
    from transformers import AutoModelForCausalLM

    device = here.own_device
    inputs = batch(device, ROWS, LENGTH)
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).to(device).train(training)
    if how == "apply before":
        here.qwen3.apply()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, tp_plan="auto").train(training)
    # transformers up to 5.17 gives norms no forward of the plan.
    of_plan = any("forward" in vars(module) for module in model.modules() if "RMSNorm" in type(module).__name__)
    if how != "apply before":
        with pytest.warns(RuntimeWarning, match="Qwen3RMSNorm keeps the forward") if of_plan else contextlib.nullcontext():
            install(here.qwen3, model, how)
    expected = copy.deepcopy(plain)
    if not training:
        with torch.no_grad():
            found = model(**inputs)
            here.qwen3.reset()
            assert_close(whole(found.logits), expected(**inputs).logits, torch.float32, "logits", FACTOR[here.device])
        return
    found = model(**inputs)
    whole(found.loss).backward()
    here.qwen3.reset()
    step = Step(expected, **inputs)
    assert_close(whole(found.loss), step.loss, torch.float32, "loss", FACTOR[here.device])
    assert_gradients(gradients_of(model), step.gradients, here.device)


@pytest.mark.integration("transformers: FSDP2 plan (distributed_config)")
@HOWS
@in_each_process
def test_fsdp_plan_of_transformers(here, checkpoint, how):
    """transformers' own sharding: the layers, the embeddings, and the last norm with the head."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).to(here.own_device).train()
    config = DistributedConfig(fsdp_size=WORLD)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, distributed_config=config).train()
    model = install(here.qwen3, model, how)
    assert_same_step(here, model, plain, functools.partial(assert_fused, here, model))


@pytest.mark.parametrize(
    "fsdp",
    [
        pytest.param(0, id="DDP", marks=pytest.mark.integration("Trainer: under DDP")),
        pytest.param(1, id="FSDP1", marks=pytest.mark.integration("Trainer: under FSDP1", on="cuda")),
        pytest.param(2, id="FSDP2", marks=pytest.mark.integration("Trainer: under FSDP2", on="cuda")),
    ],
)
def test_trainer_in_two_processes(ranks, device_type, tmp_path, fsdp):
    if fsdp and device_type == "cpu":
        pytest.skip("accelerate shards on GPUs only")
    ranks.run(check_trainer, str(tmp_path), fsdp)
