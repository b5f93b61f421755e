"""Hugging Face's Trainer and TRL's SFTTrainer: losses, gradients and metrics of the same run without the layers."""

import sys
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

from tests.integrations.common import FACTOR, WAYS, batch, install, layers_run, model_on  # noqa: F401
from tests.models import VOCABULARY, random_tokens
from tests.ops.adamw import small_parameters_too
from tests.tolerances import assert_close, relative_error

ROWS = 24
LENGTH = 20
LOGGED = 1e-4  # the Trainer rounds a loss to four decimals in its log


def rows():
    """Text with different numbers of counted labels, so that a wrong division by them shows."""
    tokens = random_tokens(ROWS, LENGTH)
    counted = [(7 * index) % (LENGTH - 3) for index in range(ROWS)]
    return [{"input_ids": row, "labels": [-100] * start + row[start:]} for row, start in zip(tokens.tolist(), counted)]


class Gradients(TrainerCallback):
    """Keeps the gradients that every optimizer step gets, and the loss of each."""

    def __init__(self):
        self.steps, self.losses, self.norms = [], [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None})

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.norms.append(logs["grad_norm"])


@dataclass
class Run:
    """What a run gave. gradients: of every step, by parameter."""

    gradients: list
    losses: list
    norms: list
    evaluation: dict = field(default_factory=dict)

    def assert_same(self, expected, device, tolerance=1.0):
        assert len(self.losses) == len(expected.losses) > 0 and len(self.gradients) == len(expected.gradients)
        assert self.losses == pytest.approx(expected.losses, rel=LOGGED * tolerance)
        assert self.norms == pytest.approx(expected.norms, rel=LOGGED * tolerance)
        for step, (ours, theirs) in enumerate(zip(self.gradients, expected.gradients)):
            assert ours.keys() == theirs.keys()
            for name, gradient in theirs.items():
                # Of later steps the parameters differ by what the optimizer makes of rounding errors.
                factor = tolerance * FACTOR[device] * (1 if step == 0 else 1000)
                assert_close(ours[name], gradient, torch.float32, f"step {step}: {name}", factor)


def tokenizer():
    """One that knows the tokens by their numbers, for TRL, which wants one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(index): index for index in range(VOCABULARY)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0")


def on_one_device(arguments):
    """Where there are more, the Trainer would split batches among all GPUs that it sees."""
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def make_trainer(kind, model, folder, device, data=None, gradients=None, **options):
    """A Trainer ("hf") or SFTTrainer ("trl") of the same arguments. What only one of them takes goes into `options`."""
    of_trainer = {
        name: options.pop(name)
        for name in ("compute_metrics", "preprocess_logits_for_metrics", "data_collator", "compute_loss_func", "peft_config",
                     "optimizer_cls_and_kwargs")
        if name in options
    }
    arguments = {
        "output_dir": str(folder),
        "max_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
        "use_cpu": device == "cpu",
        "use_liger_kernel": False,
        "bf16": False,
        "gradient_checkpointing": False,
        **options,
    }
    data = data or rows()
    of_trainer |= {"callbacks": [gradients] if gradients else []}
    if kind == "hf":
        sets = {"train_dataset": data, "eval_dataset": data[:6]}
        return Trainer(model=model, args=on_one_device(TrainingArguments(**arguments)), **sets, **of_trainer)
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    prepared = {"dataset_kwargs": {"skip_prepare_dataset": True}} if "packing" not in options else {}
    config = on_one_device(trl.SFTConfig(**arguments, **prepared))
    sets = {"train_dataset": datasets.Dataset.from_list(data), "eval_dataset": datasets.Dataset.from_list(data[:6])}
    return trl.SFTTrainer(model=model, args=config, processing_class=tokenizer(), **sets, **of_trainer)


@contextmanager
def trainer_of(*args, **options):
    """A trainer; afterwards its model is freed of the forwards that trainers wrap around it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer = make_trainer(*args, **options)
        yield trainer
    for module in trainer.model.modules():
        for name in ("_original_forward", "forward"):
            vars(module).pop(name, None)


def run(kind, model, folder, device, resume=None, evaluate=False, **options):
    gradients = Gradients()
    with trainer_of(kind, model, folder, device, gradients=gradients, **options) as trainer:
        trainer.train(resume_from_checkpoint=resume)
        evaluation = trainer.evaluate() if evaluate else {}
    return Run(gradients.steps, gradients.losses, gradients.norms, evaluation)


NAMES = ("Trainer", "SFTTrainer")
BOTH = pytest.mark.parametrize("kind", [pytest.param("hf", id="Trainer"), pytest.param("trl", id="SFTTrainer")])
HOWS = pytest.mark.parametrize("how", WAYS)


@pytest.mark.integration(*(f"{name}: gradient accumulation, gradient clipping" for name in NAMES))
@BOTH
@HOWS
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05], ids=["unclipped", "clipped"])
def test_accumulation_equals_one_large_batch(qwen3, device, kind, how, max_grad_norm, tmp_path):
    options = {"max_grad_norm": max_grad_norm}
    large = run(kind, model_on(device), tmp_path, device, per_device_train_batch_size=6, **options)
    model = install(qwen3, model_on(device), how)
    many = run(kind, model, tmp_path, device, per_device_train_batch_size=2, gradient_accumulation_steps=3, **options)
    many.assert_same(large, device)
    norm = torch.stack([g.norm() for g in large.gradients[0].values()]).norm()
    assert (norm <= 0.0501) == bool(max_grad_norm)


PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@BOTH
@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("bf16", marks=pytest.mark.integration(*(f"{name}: bf16 autocast over fp32 weights" for name in NAMES))),
        pytest.param("fp16", marks=pytest.mark.integration(*(f"{name}: fp16 autocast over fp32 weights" for name in NAMES), on="cuda")),
    ],
)
def test_autocast_of_a_trainer(qwen3, device, kind, precision, tmp_path):
    if (device, precision) == ("cpu", "fp16"):
        pytest.skip("accelerate has no fp16 autocast on a CPU: see test_autocast_with_a_gradient_scaler")
    # A norm that clips nothing: without one, gradients stay multiplied by the loss scale of fp16.
    options = {"per_device_train_batch_size": 4, "max_steps": 1, "max_grad_norm": 1e6}
    exact = run(kind, model_on(device), tmp_path, device, **options)
    options[precision] = True
    before = run(kind, model_on(device), tmp_path, device, **options)
    found = run(kind, install(qwen3, model_on(device)), tmp_path, device, **options)
    assert found.losses == pytest.approx(before.losses, rel=5e-3)
    for name, gradient in exact.gradients[0].items():
        assert found.gradients[0][name].dtype == torch.float32 and torch.isfinite(before.gradients[0][name]).all()
        mine, others = (relative_error(each.gradients[0][name], gradient) for each in (found, before))
        assert mine <= 1.25 * others + 1e-3, f"{name}: relative error {mine:.2e}, without the layers {others:.2e}"


@pytest.mark.integration("PyTorch: autocast in bf16 and fp16 over fp32 weights, GradScaler")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_autocast_with_a_gradient_scaler(qwen3, device, precision):
    inputs = batch(device, 4, LENGTH)

    def gradients(model, dtype=None):
        scaler = torch.amp.GradScaler(device, init_scale=2.0**12)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with torch.autocast(device, dtype, enabled=dtype is not None):
            loss = model(**inputs).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**12, "a gradient overflowed"
        return found

    dtype = PRECISIONS[precision]
    exact = gradients(model_on(device))
    before, found = gradients(model_on(device), dtype), gradients(install(qwen3, model_on(device)), dtype)
    for name, gradient in exact.items():
        mine, others = (relative_error(each[name], gradient) for each in (found, before))
        assert mine <= 1.25 * others + 1e-3, f"{name}: relative error {mine:.2e}, without the layers {others:.2e}"


def accuracy(prediction):
    """Returns the accuracy of the next token and the logits' mean square, which shows that all of them are there."""
    logits, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    counted = labels != -100
    return {"accuracy": float((logits.argmax(-1) == labels)[counted].mean()), "square": float((logits**2).mean())}


@pytest.mark.integration(*(f"{name}: evaluation with and without compute_metrics" for name in NAMES))
@BOTH
@pytest.mark.parametrize("with_metrics", [False, True], ids=["loss alone", "compute_metrics"])
def test_evaluation(qwen3, device, kind, with_metrics, tmp_path):
    options = {"evaluate": True, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 3, "max_steps": 1}
    if with_metrics:
        options["compute_metrics"] = accuracy
    expected = run(kind, model_on(device), tmp_path, device, **options).evaluation
    found = run(kind, install(qwen3, model_on(device)), tmp_path, device, **options).evaluation
    names = {"eval_loss"} | ({"eval_accuracy", "eval_square"} if with_metrics else set())
    names |= {"eval_mean_token_accuracy", "eval_entropy"} if kind == "trl" else set()
    assert names <= found.keys() == expected.keys()
    for name in names:
        assert found[name] == pytest.approx(expected[name], rel=LOGGED), name


@pytest.mark.integration("SFTTrainer: token accuracy and entropy while it trains")
def test_metrics_of_training(qwen3, device, tmp_path):
    """They come from TRL's own head, so a model whose loss needs no logits has them too."""

    def log(model):
        with trainer_of("trl", model, tmp_path, device, per_device_train_batch_size=4) as trainer:
            trainer.train()
            return [entry for entry in trainer.state.log_history if "loss" in entry]

    expected, found = log(model_on(device)), log(install(qwen3, model_on(device)))
    for name in ("mean_token_accuracy", "entropy", "num_tokens", "loss"):
        assert [entry[name] for entry in found] == pytest.approx([entry[name] for entry in expected], rel=LOGGED)


@pytest.mark.integration(*(f"{name}: label smoothing, compute_loss_func" for name in NAMES))
@BOTH
@pytest.mark.parametrize("what", ["label_smoothing_factor", "compute_loss_func"])
def test_losses_that_read_the_logits(qwen3, device, kind, what, tmp_path):
    def squares(outputs, labels, num_items_in_batch=None):
        return outputs.logits.float().square().mean()

    options = {what: 0.2 if what == "label_smoothing_factor" else squares, "per_device_train_batch_size": 4}
    expected = run(kind, model_on(device), tmp_path, device, **options)
    run(kind, install(qwen3, model_on(device)), tmp_path, device, **options).assert_same(expected, device)


@pytest.mark.parametrize("what", ["label_smoothing_factor", "compute_loss_func"])
@BOTH
def test_options_that_do_not_reach_the_loss_of_a_trainer_are_named(qwen3, device, kind, what, tmp_path, monkeypatch):
    """Both trainers compute that loss from logits, and TRL's runs its own head without gradients beside it."""
    monkeypatch.setattr(sys.modules[f"{qwen3.__name__}.shared.hf.parts.explanation"], "_warned", set())
    qwen3.apply(fused_linear_cross_entropy={"lse_square_scale": 1e-3})
    given = 0.2 if what == "label_smoothing_factor" else lambda outputs, labels, num_items_in_batch=None: outputs.logits.square().mean()
    with pytest.warns(RuntimeWarning, match=r"lse_square_scale of apply\(.*\) do not reach a loss"):
        run(kind, model_on(device), tmp_path, device, per_device_train_batch_size=4, max_steps=1, **{what: given})


def ragged(data):
    """Rows of different lengths, which packing puts into one."""
    return [{name: values[: 5 + 3 * (index % 6)] for name, values in row.items()} for index, row in enumerate(data)]


@pytest.mark.integration("Trainer: packed sequences (position_ids that start again)")
def test_packed_sequences(qwen3, device, tmp_path):
    """Packs sequences into one row, with positions that start again: the gradients of the same sequences in rows of their own, padded."""
    data = ragged(rows())
    options = {"data": data, "per_device_train_batch_size": 4, "max_grad_norm": 0.0}

    def padded(examples):
        length = max(len(example["input_ids"]) for example in examples)
        fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        found = [{**example, "attention_mask": [1] * len(example["input_ids"])} for example in examples]
        return {name: torch.tensor([e[name] + [pad] * (length - len(e[name])) for e in found]) for name, pad in fill.items()}

    apart = run("hf", model_on(device), tmp_path, device, data_collator=padded, **options)
    packed = run("hf", model_on(device), tmp_path, device, data_collator=DataCollatorWithFlattening(), **options)
    packed.assert_same(apart, device)
    model = install(qwen3, model_on(device))
    run("hf", model, tmp_path, device, data_collator=DataCollatorWithFlattening(), **options).assert_same(apart, device)


@pytest.mark.integration("SFTTrainer: packed sequences (position_ids that start again)")
def test_packing_of_trl(qwen3, device, tmp_path):
    data = [{"input_ids": row["input_ids"]} for row in ragged(rows())]
    options = {"data": data, "packing": True, "max_length": 32, "per_device_train_batch_size": 2, "max_grad_norm": 0.0}
    expected = run("trl", model_on(device), tmp_path, device, **options)
    run("trl", install(qwen3, model_on(device)), tmp_path, device, **options).assert_same(expected, device)


@pytest.mark.integration(*(f"{name}: resume from a checkpoint" for name in NAMES))
@BOTH
@pytest.mark.parametrize("how", ["kernelize", "pack"])
def test_resume_from_a_checkpoint(qwen3, device, kind, how, tmp_path):
    """Steps 3 and 4 after a checkpoint at 2: those of the run that was not interrupted, and of one without the layers."""
    options = {"per_device_train_batch_size": 4, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    expected = run(kind, model_on(device), tmp_path / "plain", device, **options)
    whole = run(kind, install(qwen3, model_on(device), how), tmp_path / "ours", device, **options)
    whole.assert_same(expected, device)
    model = install(qwen3, model_on(device), how)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # what it has must come from the checkpoint
    rest = run(kind, model, tmp_path / "ours", device, resume=str(tmp_path / "ours/checkpoint-2"), **options)
    rest.assert_same(Run(whole.gradients[2:], whole.losses[2:], whole.norms[2:]), device)


@pytest.mark.integration(*(f"{name}: AdamW of the package" for name in NAMES))
@BOTH
def test_adamw_of_a_trainer(qwen3, device, kind, tmp_path):
    """By optimizer_cls_and_kwargs: the run of PyTorch's AdamW, and after its checkpoint the rest of it."""
    options = {"per_device_train_batch_size": 4, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "weight_decay": 0.1}
    ours = {"optimizer_cls_and_kwargs": (qwen3.AdamW, {"lr": 1e-3})}
    expected = run(kind, model_on(device), tmp_path / "plain", device, **options)
    with small_parameters_too(qwen3):
        found = run(kind, install(qwen3, model_on(device)), tmp_path / "ours", device, **ours, **options)
        found.assert_same(expected, device)
        resumed = {"resume": str(tmp_path / "plain/checkpoint-2"), **ours, **options}
        rest = run(kind, install(qwen3, model_on(device)), tmp_path / "rest", device, **resumed)
        rest.assert_same(Run(expected.gradients[2:], expected.losses[2:], expected.norms[2:]), device)


@pytest.mark.integration(*(f"{name}: gradient checkpointing" for name in NAMES))
@BOTH
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_gradient_checkpointing_of_a_trainer(qwen3, device, kind, reentrant, tmp_path):
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    expected = run(kind, model_on(device), tmp_path, device, per_device_train_batch_size=4)
    run(kind, install(qwen3, model_on(device)), tmp_path, device, per_device_train_batch_size=4, **options).assert_same(expected, device)


@pytest.mark.integration("SFTTrainer: its defaults (bf16, gradient checkpointing)")
def test_the_defaults_of_trl(qwen3, device, tmp_path):
    options = {"bf16": None, "gradient_checkpointing": True, "per_device_train_batch_size": 4, "max_steps": 4}
    expected = run("trl", model_on(device), tmp_path, device, **options)
    found = run("trl", install(qwen3, model_on(device)), tmp_path, device, **options)
    assert found.losses == pytest.approx(expected.losses, rel=5e-3)
    assert found.norms == pytest.approx(expected.norms, rel=2e-2)


@pytest.mark.integration("SFTTrainer: LoRA")
def test_trl_with_lora(qwen3, device, tmp_path):
    from peft import LoraConfig

    config = LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")

    def trained(prepare):
        torch.manual_seed(0)
        model = prepare(model_on(device))
        torch.manual_seed(1)  # LoRA draws its weights
        return run("trl", model, tmp_path, device, per_device_train_batch_size=4, peft_config=config)

    expected = trained(lambda model: model)
    assert all("lora" in name for name in expected.gradients[0])
    trained(lambda model: install(qwen3, model)).assert_same(expected, device)
