"""transformers' expert parallelism (`ep_size`) in two and four processes: our grouped products between its exchanges, with the losses and
gradients of one process."""

import copy
import inspect
import sys
import warnings

import pytest
import torch
from transformers.distributed import DistributedConfig

from tests.integrations.adapters import lora
from tests.integrations.common import FACTOR, WAYS, batch, family_on, install
from tests.integrations.qwen3_moe import EXPERTS, moe_on
from tests.integrations.ranks import Ranks
from tests.integrations.sharding import assert_gradients, gradients_of, own_part, package_of, whole
from tests.models import Step, tiny_gpt_oss
from tests.tolerances import assert_close

pytestmark = pytest.mark.skipif("ep_size" not in inspect.signature(DistributedConfig).parameters, reason="this transformers has no ep_size")
ROWS, LENGTH = 4, 24
SIZES = {"num_hidden_layers": 2, "vocab_size": 200}
GPT_OSS = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
MODELS = {
    "qwen3_moe": ("package_folder", lambda device: moe_on(device, num_experts=8, mlp_only_layers=[], **SIZES)),
    "mixtral": ("moe_folder", lambda device: family_on("mixtral", device, num_local_experts=8, **SIZES)),
    "gpt_oss": (
        "gpt_oss_folder",
        lambda device: tiny_gpt_oss(num_local_experts=8, **SIZES, **({} if device == "cpu" else GPT_OSS)).to(device),
    ),
}
MASKED = {"qwen3_moe": "model.layers.*.mlp.gate", "mixtral": "model.layers.*.mlp.gate", "gpt_oss": "model.layers.*.mlp.router"}


def config_of(family, plan, world):
    """Every process has all tokens, of which it computes a part ("dispatch"), or its own experts' part ("masked"); or rows of its own
    ("rows")."""
    options = {"fsdp_size": world} if plan == "rows" else {"tp_size": world, "tp_plan": {}}
    if plan == "masked":
        options["ep_plan"] = {MASKED[family]: "ep_router", "model.layers.*.mlp.experts": "moe_tp_experts"}
    return DistributedConfig(ep_size=world, **options)


def loaded(checkpoint, family, plan, world):
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config_of(family, plan, world))
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, distributed_config=config).train()


def one_process(checkpoint, device):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).to(device).train()


def counted(here, calls):
    """Counts the calls of our operation by modules of experts until the check has ended; gives the function that puts it back."""
    module = sys.modules[f"{here.qwen3.__name__}.shared.hf.family.experts"]
    original = module.experts
    module.experts = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    return lambda: setattr(module, "experts", original)


def stepped(model, inputs, read):
    model.zero_grad()
    output = model(**inputs)
    whole(output.loss).backward()
    return whole(output.loss).detach(), gradients_of(model, read=read)


def check_expert_parallel(here, folder, checkpoint, family, how, plan):
    here = package_of(here, folder)
    inputs, calls = batch(here.own_device, ROWS * here.world, LENGTH), []
    if plan == "rows":
        inputs = {name: tensor[here.rank * ROWS :][:ROWS] for name, tensor in inputs.items()}
    plain = loaded(checkpoint, family, plan, here.world)
    loss, gradients = stepped(plain, inputs, own_part)
    if how == "apply before":
        here.qwen3.apply()
    model = loaded(checkpoint, family, plan, here.world)
    if how != "apply before":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of routers, which keep the forward of the plan
            install(here.qwen3, model, how)
    put_back = counted(here, calls)
    try:
        found, ours = stepped(model, inputs, own_part)
        assert len(calls) == 2, "a layer's experts were not ours"
        assert_close(found, loss, torch.float32, "loss", FACTOR[here.device])
        assert_gradients(ours, gradients, here.device, 10)
        if plan != "rows":  # of a layer that FSDP2 has sharded, explain sees shards
            reasons = [str(row.reason) for row in here.qwen3.explain(model).rows]
            assert any("ep_size" in each and "Bastile's grouped products" in each for each in reasons), reasons
            expected = Step(one_process(checkpoint, here.own_device), **inputs)
            assert_close(found, expected.loss, torch.float32, "loss of one process", 10 * FACTOR[here.device])
            assert_gradients(stepped(model, inputs, whole)[1], expected.gradients, here.device, 10)
        if how != "apply before":  # there transformers' wrapper holds what the class had
            here.qwen3.reset()
            calls.clear()
            again, of_transformers = stepped(model, inputs, own_part)
            assert not calls
            assert_close(again, loss, torch.float32, "loss after reset()", FACTOR[here.device])
            assert_gradients(of_transformers, gradients, here.device, 10)
    finally:
        put_back()


def check_saved(here, folder, checkpoint, family, target):
    """A checkpoint that expert parallelism saves, and one process loads."""
    from transformers import AutoModelForCausalLM

    here = package_of(here, folder)
    model = loaded(checkpoint, family, "dispatch", here.world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        here.qwen3.kernelize(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    model.save_pretrained(target)
    torch.distributed.barrier()
    before = one_process(checkpoint, "cpu").state_dict()
    after = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[name], 2 * each) for name, each in before.items())


def check_lora(here, checkpoint):
    """On attention; on experts PEFT cannot add up an adapter and a weight of which a process has a part, and raises."""
    inputs = batch(here.own_device, ROWS * here.world, LENGTH)

    def step(how, **targets):
        model = lora(loaded(checkpoint, "qwen3_moe", "dispatch", here.world), **targets)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return stepped(how(model), inputs, own_part)

    loss, gradients = step(lambda model: model, target_modules=["q_proj", "v_proj"])
    found, ours = step(here.qwen3.kernelize, target_modules=["q_proj", "v_proj"])
    assert_close(found, loss, torch.float32, "loss", FACTOR[here.device])
    assert_gradients(ours, gradients, here.device, 10)
    with pytest.raises(RuntimeError, match="DTensor"):
        step(here.qwen3.kernelize, target_modules=["q_proj"], target_parameters=EXPERTS)


@pytest.fixture(scope="module", params=(2, 4))
def spread(request, device_type, package_folder):
    """Processes that share the experts."""
    if device_type == "cuda" and torch.cuda.device_count() < request.param:
        pytest.skip(f"fewer than {request.param} GPUs")
    found = Ranks(device_type, package_folder, request.param)
    yield found
    found.close()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, device_type):
    folders = {family: tmp_path_factory.mktemp(family) for family in MODELS}
    for family, (_, make) in MODELS.items():
        make(device_type).save_pretrained(folders[family])
    return {family: str(folder) for family, folder in folders.items()}


FAMILIES = pytest.mark.parametrize("family", MODELS)


@pytest.mark.integration("transformers: expert parallelism of Qwen3-MoE, Mixtral and GPT-OSS (ep_size)")
@FAMILIES
@pytest.mark.parametrize("plan", ("dispatch", "masked", "rows"))
def test_expert_parallel(request, spread, checkpoints, family, plan):
    spread.run(check_expert_parallel, request.getfixturevalue(MODELS[family][0]), checkpoints[family], family, "kernelize", plan)


@pytest.mark.parametrize("how", ("apply before", *(way for way in WAYS if way != "kernelize")))
def test_expert_parallel_in_any_order(ranks, package_folder, checkpoints, how):
    ranks.run(check_expert_parallel, package_folder, checkpoints["qwen3_moe"], "qwen3_moe", how, "dispatch")


@FAMILIES
def test_save_under_expert_parallelism(request, ranks, checkpoints, tmp_path, family):
    ranks.run(check_saved, request.getfixturevalue(MODELS[family][0]), checkpoints[family], family, str(tmp_path))


def test_lora_under_expert_parallelism(ranks, checkpoints):
    pytest.importorskip("peft")
    ranks.run(check_lora, checkpoints["qwen3_moe"])
