"""Measured steps of TRL's trainers, and of their losses alone, in tiny sizes."""

import types

import pytest
import torch

from benchmark import benchmark_trainers, families, steps, trl_losses
from tests.benchmark_support import in_this_process_fixture, losses_agree, one_thread, sources, step_of  # noqa: F401
from tests.integrations.preference import counted

TRAINING = ["--model", "qwen3_tiny", "--tokens", "64", "--device", "cpu", "--lora", "2", "--warmup", "1", "--steps", "1"]


@pytest.mark.parametrize("options", ((), ("--packing",), ("--trainer", "dpo")), ids=("padded", "packed", "dpo"))
def test_steps_of_a_trainer(options, tmp_path, in_this_process):
    pytest.importorskip("trl")
    found = benchmark_trainers.main([*TRAINING, *options, "--providers", "huggingface,bastile", "--results", str(tmp_path)])
    assert losses_agree(found, tokens=64) and len(found.steps["bastile", 64].losses) == 2
    assert 240 <= found.real[64] <= 512  # of eight rows of at most 64 tokens, and at least 30
    [file] = (tmp_path / "cpu").glob("*.csv")
    kind, form = "dpo" if "dpo" in options else "sft", "packed" if "--packing" in options else "padded"
    assert file.stem == f"qwen3_{kind}_lora_2_checkpointing_{form}"


@pytest.mark.parametrize("module", (benchmark_trainers, steps), ids=("trainers", "steps"))
def test_weights_in_four_bits(module, capsys):
    """Frozen, below adapters."""
    args = step_of("huggingface", "qwen3_tiny", lora=2, weights="nf4")
    args.trainer, args.packing = "sft", False
    assert any("Linear4bit" in type(each).__name__ for each in module.build(args).model.modules())
    with pytest.raises(SystemExit):
        module.main(["--model", "qwen3_tiny", "--device", "cpu", "--lora", "0", "--weights", "nf4"])
    assert "ask for --lora" in capsys.readouterr().err


def test_a_compiled_trainer_compiles_its_model(tmp_path, in_this_process, monkeypatch):
    """By transformers' option; with batches that are not compiled the same losses."""
    pytest.importorskip("trl")
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled.append(type(model).__name__) or model)
    found = benchmark_trainers.main([*TRAINING, "--providers", "huggingface,torch_compile,bastile_compiled", "--results", str(tmp_path)])
    losses = [found.steps[provider, 64].losses for provider in ("huggingface", "torch_compile", "bastile_compiled")]
    assert len(compiled) == 2 and losses[1] == losses[0] and losses[2] == pytest.approx(losses[0], rel=2e-3)


def test_a_captured_trainer_has_more_steps_ahead(tmp_path, in_this_process, monkeypatch):
    """In which lengths come again; the timed batches are those of the other providers."""
    pytest.importorskip("trl")
    captured = []
    monkeypatch.setattr(benchmark_trainers, "AHEAD", 2)
    monkeypatch.setattr(benchmark_trainers, "package", lambda folder: types.SimpleNamespace(capture=captured.append))
    arguments = [*TRAINING, "--steps", "2", "--providers", "huggingface,bastile,bastile_captured", "--results", str(tmp_path)]
    found = benchmark_trainers.main(arguments)
    plain, ours = (found.steps[provider, 64] for provider in ("bastile", "bastile_captured"))
    assert len(captured) == 1 and len(plain.ms) == len(ours.ms) == 2
    assert len(plain.losses) == 3 and ours.losses == [], "of other texts they would be compared with"


@pytest.mark.parametrize("loss", trl_losses.LOSSES)
def test_losses_of_trl(loss, loaded):
    """TRL's trainer computes them, with its head's function and with ours, which is called where it should be."""
    pytest.importorskip("trl")
    losses, calls = {}, {}
    for provider in ("huggingface", "bastile_trl_head", "bastile"):
        families.QWEN3.prepare(provider)
        try:
            args = step_of(provider, "tiny", lora=4, loss=loss, weights="fp32")
            with counted(loaded) as names:
                losses[provider] = steps.build(args).run(tokens=64, warmup=0, steps=3)["losses"]
            calls[provider] = len(names)
        finally:
            loaded.reset()
    assert calls == {"huggingface": 0, "bastile_trl_head": 0, "bastile": 3 * (2 if loss == "dpo" else 1)}, "a reference pass as well"
    assert len({f"{value:.5f}" for value in losses["huggingface"]}) > 1, "a step changes the loss"
    for found in losses.values():
        assert found == pytest.approx(losses["huggingface"], rel=1e-5)
