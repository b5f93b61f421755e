"""Whole training steps in tiny sizes: the models, the measuring processes and their results."""

import argparse
import math

import pytest
import torch

from benchmark import (
    benchmark_fsdp,
    benchmark_lora,
    benchmark_qwen3,
    families,
    models,
    processes,
    providers,
    records,
    step_results,
    stepping,
    steps,
)
from tests.benchmark_support import GPU, one_thread, sources  # noqa: F401

STEPS = ["--device", "cpu", "--model", "tiny", "--tokens", "8,16", "--warmup", "1", "--steps", "2"]


def test_training_steps_in_a_process_of_their_own(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = benchmark_qwen3.main([*STEPS, "--providers", "huggingface", "--results", str(tmp_path)])
    saved = records.read(tmp_path / "cpu" / "qwen3_step.csv")
    assert {r.metric_name for r in saved} == {"step_time", "throughput", "loss", "first_step", "until_ready"}
    assert len(found.steps["huggingface", 8].ms) == 2 and len(found.steps["huggingface", 16].losses) == 3


@pytest.mark.parametrize(
    ("arguments", "name"), ((["--lora", "2", "--layers", "2"], "lora_2"), (["--lora", "0", "--autocast", "--weights", "fp32"],
                                                                           "autocast_fp32"))
)
def test_steps_of_adapters_and_under_autocast(arguments, name, tmp_path, monkeypatch):
    """Every provider steps the same weights: their first losses are the same."""
    pytest.importorskip("peft")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = benchmark_lora.main([*STEPS, *arguments, "--providers", "huggingface,bastile", "--results", str(tmp_path)])
    saved = records.read(tmp_path / "cpu" / f"qwen3_step_{name}.csv")
    assert {r.kernel_provider for r in saved} == {"huggingface", "bastile"}
    theirs, ours = (found.steps[provider, 16].losses for provider in ("huggingface", "bastile"))
    assert ours == pytest.approx(theirs, rel=2e-3)


@pytest.fixture
def alone():
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", models.TINY)
def test_a_model_that_is_filled_while_it_is_sharded_is_the_same(name, alone):
    args = argparse.Namespace(child="huggingface", model=name, layers=2, device="cpu")
    family = families.family_of(name)
    sharded, whole = benchmark_fsdp.shard(family.new_model(args, "meta"), "cpu"), family.new_model(args, "cpu")
    families.fill(whole)
    parameters, buffers = dict(sharded.named_parameters()), dict(sharded.named_buffers())
    assert parameters.keys() == dict(whole.named_parameters()).keys() and buffers.keys() == dict(whole.named_buffers()).keys()
    assert all(torch.equal(parameters[n].full_tensor(), p) for n, p in whole.named_parameters())
    assert all(torch.equal(buffers[n], b) for n, b in whole.named_buffers())
    found, wanted = (
        stepping.Stepper(m, families.make_optimizer(m, "cpu", "huggingface"), "cpu", 512).run(16, 1, 1)["losses"] for m in (sharded, whole)
    )
    assert found == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "kernel", "provider"), (("tiny", "qwen3_fsdp", "huggingface"), ("gpt_oss_tiny", "gpt_oss_fsdp", "bastile"))
)
def test_sharded_training_steps(model, kernel, provider, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = [*STEPS, "--model", model, "--layers", "2", "--gpus", "2", "--providers", provider, "--results", str(tmp_path)]
    found = benchmark_fsdp.main(arguments)
    saved = records.read(tmp_path / "cpu" / f"{kernel}.csv")
    assert {r.x_value for r in saved if r.metric_name == "step_time" and r.y_value_50} == {"8", "16"}
    assert {(r.config["gpus"], r.config["layers"], r.config["model"]) for r in saved} == {(2, None, models.full_name(model))}, (
        "2 layers are all"
    )
    assert len(found.steps[provider, 16].losses) == 3


def test_a_provider_of_another_model_is_refused(capsys):
    with pytest.raises(SystemExit):
        benchmark_fsdp.main(["--model", "gpt_oss_20b", "--providers", "bastile,liger"])
    assert (
        "liger, expected some of huggingface, huggingface_flex, liger_flex, bastile, bastile_adamw, bastile_flex for gpt_oss_20b"
        in capsys.readouterr().err
    )


def test_a_step_that_does_not_fit_is_recorded_for_all_longer_ones():
    args = steps.parser("", ()).parse_args(["--tokens", "8,16,32", "--model", "tiny"])
    found = step_results.Results("qwen3_step", args, gpu=GPU)
    found.add("liger", {"kind": "result", "tokens": 8, "ms": [1.0, 2.0], "first_ms": 9.0, "peak_gib": 1.0, "losses": [6.2]})
    found.add("liger", {"kind": "failed", "tokens": 16, "error": "out of memory"})
    errors = {r.x_value: r.error for r in found.rows() if r.metric_name == "step_time"}
    assert errors == {"8": "", "16": "out of memory", "32": "out of memory"}


def test_a_process_that_dies_says_why(tmp_path):
    script = tmp_path / "dies.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no such device')\ntime.sleep(60)\n")
    group = processes.Group(str(script), [], 2)
    (report,) = group.reports(deadline=float("inf"))
    assert report == {"kind": "failed", "tokens": 0, "error": "process 1 ended with 1: no such device"}
    assert all(process.returncode is not None for process in group.processes)


def test_a_training_step_of_gpt_oss():
    args = argparse.Namespace(child="huggingface", model="gpt_oss_tiny", layers=1, device="cpu", documents=1, rows=1, padding=0.0)
    found = steps.build(args).run(tokens=16, warmup=1, steps=1)
    assert len(found["ms"]) == 1 and len(found["losses"]) == 2 and all(map(math.isfinite, found["losses"]))


@pytest.mark.parametrize("form", (stepping.Form(documents=3), stepping.Form(rows=4, padding=0.2)), ids=lambda form: form.name)
def test_packed_and_padded_batches(form):
    batch = form.batch(torch.arange(1, 49)[None])
    labelled = batch["labels"] != -100
    if form.documents > 1:
        assert batch["position_ids"].eq(0).sum() == 3 and labelled.sum() == 45
    else:
        assert batch["input_ids"].shape == (4, 12) and torch.equal(labelled, batch["attention_mask"] == 1)
        assert 0.1 < 1 - labelled.float().mean() < 0.3 and len(set(labelled.sum(1).tolist())) > 1
    args = argparse.Namespace(child="huggingface", model="tiny", layers=1, device="cpu", documents=form.documents, rows=form.rows,
                              padding=form.padding)
    assert all(map(math.isfinite, steps.build(args).run(tokens=48, warmup=1, steps=1)["losses"]))


def test_a_model_without_steps_is_refused():
    with pytest.raises(ValueError, match="model is llama_3_8b, expected one of qwen3, qwen3_moe, gpt_oss"):
        steps.main(["--model", "llama_3_8b"])


def test_providers_of_each_family_are_known():
    for family in families.FAMILIES.values():
        assert set(family.step_providers) | set(family.fsdp_providers) <= set(family.providers) <= set(providers.PROVIDERS)
