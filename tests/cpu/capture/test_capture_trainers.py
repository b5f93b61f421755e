"""What TRL's trainers do to a model in each pass, a reference pass without adapters and without checkpoints between two of training,
leaves what was captured in force, and is replayed, too."""

import copy

import pytest

from tests.capturing import Rerun
from tests.integrations.preference import make

peft = pytest.importorskip("peft")
QWEN3 = pytest.mark.parametrize("family", (("qwen3", 2),), ids=("qwen3",), indirect=True)
STEPS = {"DPO": 10, "KTO": 6, "GRPO": 10}
OPTIONS = {"GRPO": {"beta": 0.1, "num_iterations": 2, "gradient_accumulation_steps": 2}}  # old and a reference's log-probabilities
SAME = ("loss", "kl", "grad_norm", "rewards/chosen")


def kinds_of(model) -> list:
    """The kinds of passes of a captured model, of those with gradients and of those without."""
    place = next(vars(module)[name] for module in model.modules() for name in vars(module) if name.endswith("graphs"))
    found = getattr(place, "model", place)
    return [list(each.kinds.values()) for each in (found, found.without_gradients)]


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
        options = {"gradient_checkpointing": True, "max_steps": STEPS[kind], **OPTIONS.get(kind, {})}
        trainer = make(kind, each, tmp_path, "cpu", [], **options)
        trainer.train()
        logs.append([(name, entry[name]) for entry in trainer.state.log_history for name in SAME if name in entry])
    assert [name for name, _ in logs[0]] == [name for name, _ in logs[1]]
    assert [value for _, value in logs[1]] == pytest.approx([value for _, value in logs[0]], rel=1e-4, abs=1e-6)
    assert Rerun.replays > before
    for kinds in kinds_of(model):
        assert sum(each.replays for each in kinds) > 2
        assert all(each.recordings <= 1 for each in kinds), "what a trainer switches off and on is the same again"
