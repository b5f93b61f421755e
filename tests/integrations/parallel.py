"""PyTorch's own parallel engines and transformers' tensor parallelism in two processes: gradients equal to those of one process."""

import contextlib
import copy
import dataclasses
import functools
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.integrations.common import FACTOR, FAMILIES, GPU_SIZES, WAYS, batch, family_on, install, model_on
from tests.integrations.ranks import WORLD
from tests.models import Step, tiny_gpt_oss, tiny_qwen3_5, tiny_qwen3_moe
from tests.ops.adamw import small_parameters_too
from tests.tolerances import assert_close, relative_error
from tests.versions import WRAPS_FORWARDS, set_checkpointing

HOWS = pytest.mark.parametrize("how", WAYS)
ROWS, LENGTH = 4, 24


def rows_of(inputs, rank):
    """The half of a batch that a rank has, and how many labels the whole batch counts."""
    mine = {name: tensor[rank * ROWS // 2 :][: ROWS // 2] for name, tensor in inputs.items()}
    return mine | {"num_items_in_batch": (inputs["labels"][:, 1:] != -100).sum()}


def whole(tensor):
    """All of a tensor that may be sharded."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor):
    """What this process has of a tensor that may be sharded."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradients_of(model, prefix="", read=whole):
    return {name.removeprefix(prefix): read(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients(found, expected, device, factor=1.0):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert found[name].dtype == gradient.dtype, name
        assert_close(found[name], gradient, torch.float32, name, 2 * factor * FACTOR[device])


def assert_fused(here, model, **inputs):
    """The decoder layers run as ours do when nothing is in the way."""
    decoder, calls = sys.modules[f"{here.qwen3.__name__}.shared.hf.layer.decoder_layer"], []
    original = decoder.norm_mlp
    decoder.norm_mlp = lambda *args: calls.append(1) or original(*args)
    try:
        output = model(**inputs)
    finally:
        decoder.norm_mlp = original
    assert len(calls) == 2 and output.logits is None
    return output


# ---------------------------------------------------------------- what runs in each process


def check_ddp(here, how, options, checkpointing):
    """Each process has half of the batch. DDP takes the mean of the gradients, so the sums are twice that."""
    from torch.nn.parallel import DistributedDataParallel

    device = here.own_device
    inputs = batch(device, ROWS, LENGTH)
    expected = Step(model_on(device), **inputs)
    model = install(here.qwen3, model_on(device), how)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"})
        model.config.use_cache = False
    ddp = DistributedDataParallel(model, device_ids=None if device == "cpu" else [here.rank], **options)
    mine = rows_of(inputs, here.rank)
    for _ in range(2):  # the second step finds the buckets of the first
        ddp.zero_grad()
        (2 * assert_fused(here, ddp, **mine).loss).backward()
        assert_gradients(gradients_of(ddp, "module."), expected.gradients, here.device)


def check_ddp_accumulation(here, how):
    """no_sync() over the first micro-batches."""
    from torch.nn.parallel import DistributedDataParallel

    device = here.own_device
    inputs = batch(device, ROWS, LENGTH)
    expected = Step(model_on(device), **inputs)
    ddp = DistributedDataParallel(install(here.qwen3, model_on(device), how), device_ids=None if device == "cpu" else [here.rank])
    mine = rows_of(inputs, here.rank)
    for row in range(ROWS // 2):
        part = {name: t[row : row + 1] if t.dim() else t for name, t in mine.items()}
        with ddp.no_sync() if row == 0 else contextlib.nullcontext():
            (2 * ddp(**part).loss).backward()
    assert_gradients(gradients_of(ddp, "module."), expected.gradients, here.device)


def check_ddp_lora(here, how):
    """With frozen weights, and tied embeddings."""
    from torch.nn.parallel import DistributedDataParallel

    from tests.integrations.adapters import lora

    device = here.own_device
    inputs = batch(device, ROWS, LENGTH)

    def build():
        return lora(model_on(device, tie_word_embeddings=True), target_modules=["q_proj", "down_proj"])

    expected = Step(build(), **inputs)
    ddp = DistributedDataParallel(install(here.qwen3, build(), how), device_ids=None if device == "cpu" else [here.rank])
    (2 * ddp(**rows_of(inputs, here.rank)).loss).backward()
    assert_gradients(gradients_of(ddp, "module."), expected.gradients, here.device)


UNITS = {
    "root alone": lambda model: [],
    "layers": lambda model: list(model.model.layers),
    "layers and head": lambda model: [*model.model.layers, model.lm_head],
    "layers, norm with head": lambda model: [*model.model.layers, [model.model.norm, model.lm_head]],
    "layers, head and embeddings": lambda model: [*model.model.layers, model.lm_head, model.model.embed_tokens],
    "attention and mlp": lambda model: [part for layer in model.model.layers for part in (layer.self_attn, layer.mlp, layer)],
    "linears": lambda model: [m for m in model.model.layers.modules() if isinstance(m, nn.Linear)] + list(model.model.layers),
    "norms": lambda model: [m for m in model.modules() if "Norm" in type(m).__name__] + list(model.model.layers),
}


def shard(here, model, units="layers", **options):
    from torch.distributed.fsdp import fully_shard

    for unit in UNITS[units](model):  # each a module, or several that are sharded as one
        fully_shard(unit, mesh=here.mesh, **options)
    return fully_shard(model, mesh=here.mesh, **options)


def check_fsdp(here, how, units, options, changes, build=model_on):
    """Installed before and after the model is sharded."""
    device = here.own_device
    inputs = batch(device, ROWS, LENGTH)
    expected = Step(build(device, **changes), **inputs)
    mine = rows_of(inputs, here.rank)
    for first in ("install", "shard"):
        model = build(device, **changes)
        if first == "install":
            model = shard(here, install(here.qwen3, model, how), units, **options)
        else:
            model = install(here.qwen3, shard(here, model, units, **options), how)
        for _ in range(2):
            model.zero_grad()
            # The layers themselves are units of their own, so their weights are whole while they run.
            output = assert_fused(here, model, **mine) if units in ("root alone", "layers") else model(**mine)
            assert output.logits is None  # also where the head is a unit of its own
            (2 * output.loss).backward()
            assert_gradients(gradients_of(model), expected.gradients, here.device)
        here.qwen3.reset()


def fsdp1(here, model, units="layers", flat=False, policy=None):
    """A model in FSDP's first version. flat: it trains one parameter for each unit (use_orig_params=False), not the model's own."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import CustomPolicy

    inside = [] if policy else UNITS[units](model.get_base_model() if hasattr(model, "peft_config") else model)
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
    from torch.nn.parallel import DistributedDataParallel

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
        static = {"static_graph": True} if checkpointing == "reentrant" else {}
        parallel = DistributedDataParallel(model, device_ids=None if device == "cpu" else [here.rank], **static)
    mine, counted = rows_of(inputs, here.rank), fused and dense
    for _ in range(2):  # the second step finds what the first one left
        parallel.zero_grad()
        output = assert_fused(here, parallel, use_cache=False, **mine) if counted else parallel(use_cache=False, **mine)
        assert output.logits is None
        (2 * output.loss).backward()
    loss = output.loss.detach()
    torch.distributed.all_reduce(loss)
    assert_close(loss, expected.loss, torch.float32, "loss", FACTOR[here.device])
    if kind != "FSDP2":  # whose weights are whole while a unit runs, and only then
        rows = [row for row in here.qwen3.explain(model).rows if not row.part.startswith(("kernels on", "attention"))]
        assert not any("pack" in row.advice for row in rows if of_fsdp1)  # which leaves views of a buffer where they are
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
    from kernels import get_local_kernel

    here = dataclasses.replace(here, qwen3=get_local_kernel(Path(folder), backend=here.device))
    build = functools.partial(other_on if name in OTHERS else family_on, name)
    check_kind(here, *args, build=build, dense=name not in OTHERS)


def check_fsdp_of_family(here, folder, name):
    """Checks what `check_fsdp` does, with the package for every dense family."""
    from kernels import get_local_kernel

    here = dataclasses.replace(here, qwen3=get_local_kernel(Path(folder), backend=here.device))
    check_fsdp(here, "kernelize", "layers", {}, {}, functools.partial(family_on, name))


def check_fsdp_offload(here, how):
    """Shards, gradients and optimizer on the CPU, computation on the GPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    inputs = batch(here.own_device, ROWS, LENGTH)
    expected = Step(model_on(here.own_device), **inputs)
    model = shard(here, install(here.qwen3, model_on("cuda").cpu(), how), offload_policy=CPUOffloadPolicy())
    (2 * assert_fused(here, model, **rows_of(inputs, here.rank)).loss).backward()
    found = {name: whole(p.grad.to(here.own_device)) for name, p in model.named_parameters()}
    assert_gradients(found, expected.gradients, here.device)


def check_fsdp_accumulation(here, how):
    """set_requires_gradient_sync(False) over the first micro-batches."""
    device = here.own_device
    inputs = batch(device, ROWS, LENGTH)
    expected = Step(model_on(device), **inputs)
    model = shard(here, install(here.qwen3, model_on(device), how))
    mine = rows_of(inputs, here.rank)
    for row in range(ROWS // 2):
        part = {name: t[row : row + 1] if t.dim() else t for name, t in mine.items()}
        model.set_requires_gradient_sync(row == ROWS // 2 - 1)
        (2 * model(**part).loss).backward()
    assert_gradients(gradients_of(model), expected.gradients, here.device)


def check_fsdp_mixed_precision(here, how, units, output_dtype):
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
    found = gradients(install(here.qwen3, model_on(device), how))
    for name, gradient in exact.items():
        assert found[name].dtype == before[name].dtype == torch.float32
        ours, theirs = relative_error(found[name], gradient), relative_error(before[name], gradient)
        assert ours <= 1.25 * theirs + 1e-3, f"{name}: relative error {ours:.2e}, without the layers {theirs:.2e}"


def check_hooks_on_a_sharded_head(here):
    """Whoever listens to the head hears its logits."""
    device = here.own_device
    inputs = batch(device, ROWS, LENGTH)
    model = here.qwen3.kernelize(shard(here, model_on(device), "layers and head"))
    heard = []
    model.lm_head.register_forward_hook(lambda module, args, output: heard.append(output.shape))
    assert model(**rows_of(inputs, here.rank)).logits is not None
    assert heard == [(ROWS // 2, LENGTH, model.config.vocab_size)]


def check_fsdp_plan(here, folder, how):
    """transformers' own sharding: the layers, the embeddings, and the last norm with the head."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    device = here.own_device
    inputs = batch(device, ROWS, LENGTH)
    expected = Step(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).train(), **inputs)
    config = DistributedConfig(fsdp_size=WORLD)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config).train()
    output = assert_fused(here, install(here.qwen3, model, how), **rows_of(inputs, here.rank))
    (2 * output.loss).backward()
    assert_gradients(gradients_of(model), expected.gradients, here.device)


def check_fsdp_checkpointing(here, how, reentrant):
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


def check_fsdp_checkpoint_wrapper(here, how, reentrant):
    """torch's own wrapper around each layer, as accelerate's activation_checkpointing puts it on."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

    device = here.own_device
    inputs = batch(device, ROWS, LENGTH)
    expected = Step(model_on(device), **inputs)
    model = install(here.qwen3, model_on(device), how)
    kind = wrappers.CheckpointImpl.REENTRANT if reentrant else wrappers.CheckpointImpl.NO_REENTRANT
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = wrappers.checkpoint_wrapper(layer, kind)
    model.enable_input_require_grads()
    model = shard(here, model)
    (2 * model(use_cache=False, **rows_of(inputs, here.rank)).loss).backward()
    found = {name.replace("._checkpoint_wrapped_module", ""): gradient for name, gradient in gradients_of(model).items()}
    assert_gradients(found, expected.gradients, here.device)


def check_fsdp_lora(here, how):
    from tests.integrations.adapters import lora

    device = here.own_device
    inputs = batch(device, ROWS, LENGTH)

    def build():
        return lora(model_on(device), target_modules=["q_proj", "down_proj", "lm_head"])

    expected = Step(build(), **inputs)
    model = install(here.qwen3, build(), how)
    shard(here, model.get_base_model())
    (2 * model(**rows_of(inputs, here.rank)).loss).backward()
    assert_gradients(gradients_of(model), expected.gradients, here.device)


def check_training_under_fsdp(here, how, own_optimizer):
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
    sharded = shard(here, install(here.qwen3, model_on(device), how))
    with small_parameters_too(here.qwen3):
        found = train(sharded, mine, 2, here.qwen3.AdamW if own_optimizer else torch.optim.AdamW)
    half = expected[here.rank * ROWS // 2 :][: ROWS // 2]
    assert_close(found, half, torch.float32, "logits", 1000 * FACTOR[here.device])


def check_tensor_parallel(here, folder, how, training):
    """from_pretrained(tp_plan="auto"): every process has all of the batch and half of each projection."""
    from transformers import AutoModelForCausalLM

    device = here.own_device
    inputs = batch(device, ROWS, LENGTH)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).train(training)
    if how == "apply before":
        here.qwen3.apply()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto").train(training)
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


# ---------------------------------------------------------------- the tests


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
def test_ddp(ranks, how, options, checkpointing):
    ranks.run(check_ddp, how, options, checkpointing)


@pytest.mark.integration("DDP: gradient accumulation under no_sync()")
@HOWS
def test_ddp_accumulation(ranks, how):
    ranks.run(check_ddp_accumulation, how)


@pytest.mark.integration("DDP: LoRA, tied embeddings")
@HOWS
def test_ddp_with_lora(ranks, how):
    ranks.run(check_ddp_lora, how)


@pytest.mark.integration("FSDP2: layers, attention and MLP, linear layers, norms, head and embeddings sharded on their own")
@HOWS
@pytest.mark.parametrize("units", UNITS)
def test_fsdp(ranks, how, units):
    ranks.run(check_fsdp, how, units, {}, {})


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


@pytest.mark.integration("FSDP2: without resharding after the forward pass, tied embeddings")
@pytest.mark.parametrize("tied", [False, True])
def test_fsdp_options(ranks, tied):
    ranks.run(check_fsdp, "kernelize", "layers", {"reshard_after_forward": False}, {"tie_word_embeddings": tied})


@pytest.mark.integration("FSDP2: Llama, Gemma 3 and Phi-3")
@pytest.mark.parametrize("name", FAMILIES)
def test_fsdp_of_families(ranks, decoders_folder, name):
    ranks.run(check_fsdp_of_family, str(decoders_folder), name)


@pytest.mark.integration("FSDP2: weights and gradients kept on the CPU (CPUOffloadPolicy)", on="cuda")
def test_fsdp_offload(ranks, device_type):
    if device_type == "cpu":
        pytest.skip("there is nothing to offload from")
    ranks.run(check_fsdp_offload, "kernelize")


@pytest.mark.integration("FSDP2: gradient accumulation (set_requires_gradient_sync)")
@HOWS
def test_fsdp_accumulation(ranks, how):
    ranks.run(check_fsdp_accumulation, how)


@pytest.mark.integration("FSDP2: MixedPrecisionPolicy, bf16 over fp32 weights")
@pytest.mark.parametrize("units", ["layers", "layers and head", "layers, norm with head", "linears"])
@pytest.mark.parametrize("output_dtype", [None, torch.float32], ids=["bf16 outputs", "fp32 outputs"])
def test_fsdp_mixed_precision(ranks, units, output_dtype):
    ranks.run(check_fsdp_mixed_precision, "kernelize", units, output_dtype)


@pytest.mark.integration("FSDP2: gradient checkpointing, reentrant and not")
@pytest.mark.parametrize(("how", "reentrant"), [("kernelize", True), ("kernelize", False), ("apply", False)])
def test_fsdp_checkpointing(ranks, how, reentrant):
    ranks.run(check_fsdp_checkpointing, how, reentrant)


@pytest.mark.integration("FSDP2: checkpoint_wrapper around each layer")
@pytest.mark.parametrize("reentrant", [True, False])
def test_fsdp_checkpoint_wrapper(ranks, reentrant):
    ranks.run(check_fsdp_checkpoint_wrapper, "kernelize", reentrant)


def test_hooks_on_a_sharded_head(ranks):
    ranks.run(check_hooks_on_a_sharded_head)


@pytest.mark.integration("FSDP2: LoRA")
@HOWS
def test_fsdp_with_lora(ranks, how):
    ranks.run(check_fsdp_lora, how)


@pytest.mark.integration("FSDP2: clipping, optimizer steps, evaluation")
def test_training_under_fsdp(ranks):
    ranks.run(check_training_under_fsdp, "kernelize", False)


@pytest.mark.integration("FSDP2: AdamW of the package")
def test_training_under_fsdp_with_our_adamw(ranks):
    ranks.run(check_training_under_fsdp, "kernelize", True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, device_type):
    folder = tmp_path_factory.mktemp("checkpoint")
    # Two processes share it evenly.
    model_on(device_type, vocab_size=200).save_pretrained(folder)
    return str(folder)


@pytest.mark.integration("transformers: tensor parallelism (tp_plan)")
@pytest.mark.parametrize("how", ["apply before", "apply", "kernelize", "pack"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_tensor_parallelism(ranks, checkpoint, how, training):
    ranks.run(check_tensor_parallel, checkpoint, how, training)


@pytest.mark.integration("transformers: FSDP2 plan (distributed_config)")
@HOWS
def test_fsdp_plan_of_transformers(ranks, checkpoint, how):
    ranks.run(check_fsdp_plan, checkpoint, how)


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
