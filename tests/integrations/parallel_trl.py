"""The losses of TRL's trainers in two processes, with our log-probabilities in TRL's place: DDP and FSDP2, whole models and LoRA. Gradients
equal to those of TRL's own in one process."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.integrations.adapters import lora
from tests.integrations.common import batch, install, model_on
from tests.integrations.preference import Outcome, counted, train
from tests.integrations.preference import lora as adapters
from tests.integrations.sharding import LENGTH, ROWS, as_on_a_gpu, assert_gradients, gradients_of, shard, whole

OUTPUTS = ("log_probs", "entropy", "mean_logits", "is_top1")
ADVANTAGES = (1.0, -0.5, 0.3, -2.0)


def preference(output, rows, tokens):
    """DPO's, of every second row beside the one before it. rows: which of the batch; tokens: of the whole batch."""
    answers = output.log_probs.sum(1)
    return -logsigmoid(0.1 * (answers[0::2] - answers[1::2])).sum() / (ROWS // 2)


def policy(output, rows, tokens):
    """GRPO's with an entropy in it."""
    advantages = torch.tensor(ADVANTAGES, device=output.log_probs.device)[rows, None]
    ratio = torch.exp(output.log_probs - output.log_probs.detach() + 0.1)
    cost = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.05) * advantages) - 0.01 * output.entropy
    return (cost * output.label_mask).sum() / tokens


# Where the head is a unit of its own TRL 1.16 gathers its weight and reduces no gradient of it: ours gives what TRL's own gives there.
BESIDE = "layers and head"
OBJECTIVES = {"preference": preference, "policy": policy}


def check_trl_in_parallel(here, engine, objective, adapted, changes):
    from torch.nn.parallel import DistributedDataParallel
    from trl.trainer.utils import add_fused_lm_head

    device = here.own_device
    inputs = batch(device, ROWS, LENGTH)
    tokens = (inputs["labels"][:, 1:] != -100).sum()
    mine = slice(here.rank * ROWS // 2, (here.rank + 1) * ROWS // 2)

    def build(ours):
        model = model_on(device, **changes)
        if ours:
            install(here.qwen3, model)
        add_fused_lm_head(model, temperature=0.8, outputs=OUTPUTS)
        return lora(model, target_modules=["q_proj", "down_proj"]) if adapted else model

    def step(model, rows, factor):
        output = model(**{name: tensor[rows] for name, tensor in inputs.items()}, fused_lm_head=True)
        loss = OBJECTIVES[objective](output, rows, tokens)
        (factor * loss).backward()
        return loss.detach()

    single = build(ours=False)
    if engine == BESIDE:
        shard(here, single, engine)
        expected = step(single, mine, 2)
        torch.distributed.all_reduce(expected)
    else:
        expected = step(single, slice(0, ROWS), 1)
    model = build(ours=True)
    if engine == "ddp":
        parallel = DistributedDataParallel(model, device_ids=None if device == "cpu" else [here.rank])
    else:
        parallel = model
        shard(here, model.get_base_model() if adapted else model, engine)
    for _ in range(2):
        parallel.zero_grad()
        with as_on_a_gpu(here.qwen3), counted(here.qwen3) as calls:
            loss = step(parallel, mine, 2)
        assert calls == ["linear_log_probs"]
        assert_gradients(gradients_of(parallel, "module." if engine == "ddp" else ""), gradients_of(single), here.device)
        torch.distributed.all_reduce(loss)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.integration("DPOTrainer: log-probabilities without logits", "GRPOTrainer: log-probabilities without logits")
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    ("engine", "adapted", "changes"),
    [
        ("ddp", False, {}),
        ("ddp", True, {"tie_word_embeddings": True}),
        ("root alone", False, {"tie_word_embeddings": True}),
        ("layers", True, {}),
        ("layers and head", False, {}),
    ],
    ids=str,
)
def test_trl_in_parallel(ranks, engine, adapted, changes, objective):
    pytest.importorskip("trl.kernels.chunked_logprob")
    ranks.run(check_trl_in_parallel, engine, objective, adapted, changes)


def check_trainers(here, folder, engine, kind, recompute, options):
    """A trainer of TRL over both processes, with TRL's own head and with ours. accelerate shards on GPUs only, so FSDP2 is put on here."""
    from accelerate import Accelerator

    options = {**options, "ddp_backend": "gloo"} if here.device == "cpu" else options
    outcomes = []
    for ours in (False, True):
        model = model_on(here.device)
        model.config._name_or_path = folder  # by which the reference is loaded
        if ours:
            here.qwen3.kernelize(model, log_probs={"recompute": recompute})
        with as_on_a_gpu(here.qwen3), counted(here.qwen3) as calls, pytest.MonkeyPatch.context() as patch:
            if engine != "ddp":
                shard(here, model, engine)
                patch.setattr(Accelerator, "prepare_model", lambda self, model, **_: model)
            given = {**options, "peft_config": adapters()} if options.get("lora") else dict(options)
            given.pop("lora", None)
            found = train(kind, model, folder, here.device, **given)
        assert set(calls) == ({"linear_log_probs"} if ours else set())
        gradients = [{name: whole(tensor) for name, tensor in step.items()} for step in found.gradients]
        outcomes.append(Outcome(found.logs, gradients, {name: whole(tensor) for name, tensor in found.parameters.items()}))
    outcomes[1].assert_same(outcomes[0], here.device)


@pytest.mark.integration("DPOTrainer: log-probabilities without logits", "GRPOTrainer: log-probabilities without logits")
@pytest.mark.parametrize("engine", ["ddp", "layers"])
@pytest.mark.parametrize(
    ("kind", "recompute", "options"),
    [
        ("DPO", True, {}),
        ("DPO", False, {"lora": True, "gradient_accumulation_steps": 2}),
        ("GRPO", False, {"beta": 0.04, "entropy_coef": 0.1, "num_iterations": 2}),
    ],
    ids=str,
)
def test_trainers_of_trl_in_two_processes(ranks, device_type, engine, kind, recompute, options, tmp_path):
    pytest.importorskip("trl.kernels.chunked_logprob")
    model_on(device_type).save_pretrained(tmp_path)
    ranks.run(check_trainers, str(tmp_path), engine, kind, recompute, options)
