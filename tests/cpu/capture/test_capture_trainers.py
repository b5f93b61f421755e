"""What TRL's trainers do to a model in each pass, a reference pass without adapters and without checkpoints between two of training,
leaves what was captured in force."""

import copy

import pytest
from datasets import Dataset

from benchmark.benchmark_trainers import pairs
from benchmark.trl_losses import tokenizer
from tests.capturing import Rerun, whole

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
QWEN3 = pytest.mark.parametrize("family", (("qwen3", 2),), ids=("qwen3",), indirect=True)
STEPS, ROWS, LONGEST = 6, 2, 24


def data(kind: str) -> Dataset:
    """Examples of which all batches are alike: the first pairs again and again."""
    found = pairs(ROWS, LONGEST)
    if kind == "KTO":
        found = {"prompt": found["prompt"], "completion": found["chosen"], "label": [True, False]}
    return Dataset.from_dict({name: column * STEPS for name, column in found.items()})


def losses(kind: str, model, folder) -> list[float]:
    config = getattr(trl, f"{kind}Config")(
        output_dir=str(folder), max_length=LONGEST, per_device_train_batch_size=ROWS, max_steps=STEPS, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True, seed=0, learning_rate=1e-3, gradient_checkpointing=True,
    )  # fmt: skip
    trainer = getattr(trl, f"{kind}Trainer")(model=model, args=config, train_dataset=data(kind), processing_class=tokenizer())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@QWEN3
@pytest.mark.parametrize("kind", ("DPO", "KTO"))
def test_a_reference_pass_between_two_of_training(package, tiny_model, tmp_path, kind):
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    plain = package.kernelize(peft.get_peft_model(tiny_model(), adapters))
    model = copy.deepcopy(plain)
    package.capture(model)
    expected = losses(kind, plain, tmp_path)
    before = Rerun.replays
    assert losses(kind, model, tmp_path) == pytest.approx(expected, rel=1e-5)
    assert Rerun.replays - before >= (STEPS - 2) * whole() + (STEPS - 3) * whole() // 2
