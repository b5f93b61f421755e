"""What TRL's trainers do to a model in each pass, a reference pass without adapters and without checkpoints between two of training,
leaves what was captured in force, and is replayed, too."""

import copy

import pytest

from tests.capturing import Rerun, graphs_of, whole
from tests.integrations.preference import TEXTS, make

peft = pytest.importorskip("peft")
QWEN3 = pytest.mark.parametrize("family", (("qwen3", 2),), ids=("qwen3",), indirect=True)
STEPS = {"DPO": 6, "KTO": 6, "GRPO": 10}
ALIKE = {"per_device_train_batch_size": len(TEXTS)}  # all texts are in each batch
# Of GRPO, whose answers differ in length: with old log-probabilities and a reference's.
OPTIONS = {"DPO": ALIKE, "KTO": ALIKE, "GRPO": {"beta": 0.1, "num_iterations": 2, "gradient_accumulation_steps": 2}}
SAME = ("loss", "kl", "grad_norm", "rewards/chosen")


@QWEN3
@pytest.mark.parametrize("kind", STEPS)
def test_passes_of_training_and_those_without_gradients(package, tiny_model, tmp_path, kind):
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    plain = package.kernelize(peft.get_peft_model(tiny_model(), adapters))
    model = copy.deepcopy(plain)
    package.capture(model)
    logs = []
    for each in (plain, model):
        before = Rerun.replays
        options = {"gradient_checkpointing": True, "max_steps": STEPS[kind], **OPTIONS[kind]}
        trainer = make(kind, each, tmp_path, "cpu", [], **options)
        trainer.train()
        logs.append([(name, entry[name]) for entry in trainer.state.log_history for name in SAME if name in entry])
    assert [name for name, _ in logs[0]] == [name for name, _ in logs[1]]
    assert [value for _, value in logs[1]] == pytest.approx([value for _, value in logs[0]], rel=1e-5)
    graphs = graphs_of(package, model.get_base_model())
    if OPTIONS[kind] is ALIKE:
        assert Rerun.replays - before >= (STEPS[kind] - 2) * whole() + (STEPS[kind] - 3) * whole() // 2
    for passes in (graphs, graphs.without_gradients):
        assert sum(each.replays for each in passes.kinds.values()) > 2
        assert all(each.recordings <= 1 for each in passes.kinds.values()), "what a trainer switches off and on is the same again"
