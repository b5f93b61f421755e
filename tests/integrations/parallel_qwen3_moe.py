"""Qwen3-MoE in two processes: FSDP2 with experts sharded on their own, transformers' tensor parallelism and expert parallelism."""

import copy
import inspect
import warnings

import pytest
import torch
from transformers.distributed import DistributedConfig

from tests.integrations.common import FACTOR, WAYS, batch, install
from tests.integrations.qwen3_moe import moe_on
from tests.integrations.ranks import WORLD, in_each_process
from tests.integrations.sharding import HOWS, LENGTH, ROWS, assert_gradients, assert_same_step, gradients_of, own_part, whole
from tests.models import Step
from tests.tolerances import assert_close

needs_experts_plans = pytest.mark.skipif(
    "ep_size" not in inspect.signature(DistributedConfig).parameters, reason="this transformers has no plans of experts"
)
TP_EP = {"tp_size": WORLD, "ep_size": WORLD, "tp_plan": {}}
PLANS = {
    "tp_plan": {"tp_size": WORLD, "tp_plan": "auto"},
    "token dispatch": TP_EP,
    "router masking": {**TP_EP, "ep_plan": {"model.layers.*.mlp.gate": "ep_router", "model.layers.*.mlp.experts": "moe_tp_experts"}},
}


@pytest.mark.integration("FSDP2: Qwen3-MoE, also with experts sharded on their own")
@HOWS
@pytest.mark.parametrize("units", ["layers", "experts"])
@in_each_process
def test_fsdp_of_moe(here, how, units):
    from torch.distributed.fsdp import fully_shard

    for first in ("install", "shard"):
        model = moe_on(here.own_device)
        model = install(here.qwen3, model, how) if first == "install" else model
        for layer in model.model.layers:
            if units == "experts" and hasattr(layer.mlp, "experts"):
                fully_shard(layer.mlp.experts, mesh=here.mesh)
            fully_shard(layer, mesh=here.mesh)
        fully_shard(model, mesh=here.mesh)
        model = install(here.qwen3, model, how) if first == "shard" else model
        assert_same_step(here, model, moe_on(here.own_device), steps=2, factor=10)
        here.qwen3.reset()


@pytest.fixture(scope="module")
def checkpoint_of_moe(tmp_path_factory, device_type):
    folder = tmp_path_factory.mktemp("moe")
    moe_on(device_type, vocab_size=200).save_pretrained(folder)  # two processes share it evenly
    return str(folder)


@pytest.mark.integration("transformers: tensor and expert parallelism of Qwen3-MoE (tp_plan, ep_plan)")
@pytest.mark.parametrize("how", ["apply before", *WAYS])
@pytest.mark.parametrize("plan", ("tp_plan", *(pytest.param(plan, marks=needs_experts_plans) for plan in PLANS if plan != "tp_plan")))
@in_each_process
def test_plans_of_moe(here, checkpoint_of_moe, how, plan):
    """Every process has all of the batch; its parts of the gradients are those of the plain model under the same plan, and the loss is that
    of one process. torch 2.11 cannot put the plan's strided shards together again, so the parts are compared."""
    from transformers import AutoModelForCausalLM

    inputs = batch(here.own_device, ROWS, LENGTH)
    one = AutoModelForCausalLM.from_pretrained(checkpoint_of_moe, dtype=torch.float32).to(here.own_device).train()

    def step(install_before, install_after):
        install_before()
        config = DistributedConfig(**copy.deepcopy(PLANS[plan]))
        model = AutoModelForCausalLM.from_pretrained(checkpoint_of_moe, dtype=torch.float32, distributed_config=config).train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of modules that keep the forward of the plan
            install_after(model)
        found = model(**inputs)
        whole(found.loss).backward()
        here.qwen3.reset()
        return whole(found.loss).detach(), gradients_of(model, read=own_part)

    def nothing(*_):
        pass

    loss, gradients = step(nothing, nothing)
    before = how == "apply before"
    found, ours = step(here.qwen3.apply if before else nothing, nothing if before else lambda model: install(here.qwen3, model, how))
    assert_close(found, loss, torch.float32, "loss", FACTOR[here.device])
    assert_close(found, Step(one, **inputs).loss, torch.float32, "loss of one process", 10 * FACTOR[here.device])
    assert_gradients(ours, gradients, here.device, 10)
