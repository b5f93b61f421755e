"""Whole training runs: their losses are those of the same run without the layers."""

import copy

import pytest
import torch

from tests.models import losses_of, random_tokens, tiny_model

ROWS = random_tokens(48, 24)


def losses(model):
    return losses_of(model, torch.optim.AdamW(model.parameters(), lr=3e-3), (ROWS[4 * (step % 2) :][:4] for step in range(10)))


@pytest.mark.parametrize("tied", [False, True])
def test_ten_steps(qwen3, tied):
    model = tiny_model(tie_word_embeddings=tied)
    start = copy.deepcopy(model)
    expected = losses(model)
    qwen3.apply()
    assert losses(start) == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0]


class Rows(torch.utils.data.Dataset):
    """Rows with different numbers of counted labels, so that a wrong division by them shows."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        labels = ROWS[index].clone()
        labels[: index % 20] = -100
        return {"input_ids": ROWS[index], "labels": labels}


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer_with_gradient_accumulation(qwen3, tmp_path, bf16):
    from transformers import Trainer, TrainingArguments

    def train(model):
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=3,
            max_steps=5,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=bf16,
            disable_tqdm=True,
            seed=0,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=torch.utils.data.Subset(Rows(), range(4)))
        trainer.train()
        history = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        evaluation = trainer.evaluate()["eval_loss"]
        for name in ("_original_forward", "forward"):
            vars(model).pop(name, None)  # or the next apply() warns that accelerate wrapped it
        return history, evaluation

    expected, expected_evaluation = train(tiny_model())
    qwen3.apply()
    found, evaluation = train(tiny_model())
    assert len(found) == 5 and found != [(0.0, 0.0)] * 5
    # bf16 autocast rounds activations to 8 bits, at other places than before; the Trainer itself logs 4 decimals.
    tolerance = 5e-3 if bf16 else 1e-5
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)
    assert evaluation == pytest.approx(expected_evaluation, rel=tolerance)
