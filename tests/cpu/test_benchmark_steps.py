"""Whole training steps in tiny sizes: the models, the measuring processes and their results."""

import argparse
import dataclasses
import importlib
import json
import math
import runpy
import subprocess
import sys
import types
import warnings
from pathlib import Path

import peft
import pytest
import torch
import transformers

from benchmark import all as all_runs
from benchmark import (
    benchmark_families,
    benchmark_fsdp,
    benchmark_lora,
    benchmark_qwen3,
    benchmark_trainers,
    compiled_peer,
    families,
    models,
    preloaded,
    processes,
    providers,
    published,
    records,
    routing,
    step_parts,
    step_results,
    stepping,
    steps,
    sweep,
    tables,
    trl_losses,
    varlen_peer,
)
from tests.benchmark_support import GPU, made_up_rows, one_thread, sources  # noqa: F401
from tests.integrations.preference import counted
from tests.models import tiny_model


class InThisProcess:
    """In the place of a group of processes: what the measuring process would do, by its command line, and what it would report."""

    found: list = []

    def __init__(self, script, arguments, gpus, fresh):
        [self.module] = [module for module in (steps, benchmark_trainers) if Path(script) == Path(module.__file__)]
        assert gpus == 1
        self.arguments = arguments

    def reports(self, deadline):
        provider, model = (self.arguments[self.arguments.index(name) + 1] for name in ("--child", "--model"))
        self.found.clear()
        try:
            self.module.main(self.arguments)
        finally:
            if providers.is_ours(provider):
                families.package(families.family_of(model).package).reset()
        yield from map(json.loads, self.found)

    def end(self):
        pass


@pytest.fixture
def in_this_process(monkeypatch):
    """Starting a process and importing everything anew takes far longer than the steps of a tiny model."""
    monkeypatch.setattr(steps, "Group", InThisProcess)
    monkeypatch.setattr(stepping, "emit", lambda kind, **content: InThisProcess.found.append(json.dumps({"kind": kind, **content})))


STEPS = ["--device", "cpu", "--model", "tiny", "--tokens", "8,16", "--warmup", "1", "--steps", "2"]


@pytest.mark.parametrize("given", (
    [], ["--warmup", "0", "--steps", "1"], ["--lora", "0"], ["--lora", "8", "--attention", "--checkpointing", "--weights", "fp32"],
    ["--documents", "3", "--rows", "2", "--padding", "0.25", "--parts", "--routing", "skewed", "--layers", "1", "--tokens", "8,16"],
    ["--loss", "dpo", "--autocast", "--providers", "bastile", "--rounds", "2", "--fresh", "--budget-s", "9"],
))  # fmt: skip
def test_a_measuring_process_is_told_what_its_parent_was(given):
    """Also what is 0 where that is no default."""
    p = steps.parser("", (8,))
    steps.add_recipe(p, 16)
    args = p.parse_args(["--model", "qwen3_tiny", *given])
    told = p.parse_args(steps.child_arguments(args, "liger"))
    assert told.child == "liger" and told.layers == (args.layers or 2)
    assert steps.recipe_of(told) == steps.recipe_of(args) and steps.form_of(told) == steps.form_of(args)
    assert all(getattr(told, name) == getattr(args, name) for name in ("model", "tokens", "warmup", "steps", "device", "parts"))


def test_training_steps_in_a_process_of_their_own(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = benchmark_qwen3.main([*STEPS, "--providers", "huggingface", "--results", str(tmp_path)])
    saved = records.read(tmp_path / "cpu" / "qwen3_step.csv")
    assert {r.metric_name for r in saved} == {"step_time", "throughput", "loss"}
    assert len(found.steps["huggingface", 8].ms) == 2 and len(found.steps["huggingface", 16].losses) == 3


def test_the_first_step_of_a_new_interpreter_is_measured_alone(tmp_path, in_this_process):
    benchmark_qwen3.main([*STEPS, "--fresh", "--providers", "huggingface", "--results", str(tmp_path)])
    saved = records.read(tmp_path / "cpu" / "qwen3_step.csv")
    assert {r.metric_name for r in saved} == {"first_step", "until_ready"} and all(r.y_value_50 > 0 for r in saved)


@pytest.mark.parametrize(
    ("arguments", "name"), ((["--lora", "2", "--layers", "2"], "lora_2"), (["--lora", "0", "--autocast", "--weights", "fp32"],
                                                                           "autocast_fp32"))
)
def test_steps_of_adapters_and_under_autocast(arguments, name, tmp_path, in_this_process):
    """Every provider steps the same weights: their first losses are the same."""
    pytest.importorskip("peft")
    found = benchmark_lora.main([*STEPS, *arguments, "--providers", "huggingface,bastile", "--results", str(tmp_path)])
    saved = records.read(tmp_path / "cpu" / f"qwen3_step_{name}.csv")
    assert {r.kernel_provider for r in saved} == {"huggingface", "bastile"}
    theirs, ours = (found.steps[provider, 16].losses for provider in ("huggingface", "bastile"))
    assert ours == pytest.approx(theirs, rel=2e-3)


@pytest.mark.parametrize("options", ((), ("--packing",), ("--trainer", "dpo")), ids=("padded", "packed", "dpo"))
def test_steps_of_a_trainer(options, tmp_path, in_this_process):
    pytest.importorskip("trl")
    arguments = ["--model", "qwen3_tiny", "--tokens", "64", "--device", "cpu", "--lora", "2", "--warmup", "1", "--steps", "1"]
    found = benchmark_trainers.main([*arguments, *options, "--providers", "huggingface,bastile", "--results", str(tmp_path)])
    theirs, ours = (found.steps[provider, 64] for provider in ("huggingface", "bastile"))
    assert ours.losses == pytest.approx(theirs.losses, rel=2e-3) and len(ours.losses) == 2
    assert 240 <= found.real[64] <= 512  # of eight rows of at most 64 tokens, and at least 30
    [file] = (tmp_path / "cpu").glob("*.csv")
    kind, form = "dpo" if "dpo" in options else "sft", "packed" if "--packing" in options else "padded"
    assert file.stem == f"qwen3_{kind}_lora_2_checkpointing_{form}"


def test_the_trainers_refuse_what_they_would_not_measure(capsys):
    for options, why in ((["--trainer", "dpo", "--packing"], "DPO has no packed rows"), (["--providers", "unsloth"], "expected some of")):
        with pytest.raises(SystemExit):
            benchmark_trainers.main(["--model", "qwen3_tiny", *options])
        assert why in capsys.readouterr().err


def test_a_compiled_trainer_compiles_its_model(tmp_path, in_this_process, monkeypatch):
    """By transformers' option; with batches that are not compiled the same losses."""
    pytest.importorskip("trl")
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled.append(type(model).__name__) or model)
    arguments = ["--model", "qwen3_tiny", "--tokens", "64", "--device", "cpu", "--lora", "2", "--warmup", "1", "--steps", "1"]
    found = benchmark_trainers.main([*arguments, "--providers", "huggingface,torch_compile,bastile_compiled", "--results", str(tmp_path)])
    losses = [found.steps[provider, 64].losses for provider in ("huggingface", "torch_compile", "bastile_compiled")]
    assert len(compiled) == 2 and losses[1] == losses[0] and losses[2] == pytest.approx(losses[0], rel=2e-3)


def test_a_captured_trainer_has_more_steps_ahead(tmp_path, in_this_process, monkeypatch):
    """In which lengths come again; the timed batches are those of the other providers."""
    pytest.importorskip("trl")
    captured = []
    monkeypatch.setattr(benchmark_trainers, "AHEAD", 2)
    monkeypatch.setattr(benchmark_trainers, "package", lambda folder: types.SimpleNamespace(capture=captured.append))
    arguments = ["--model", "qwen3_tiny", "--tokens", "64", "--device", "cpu", "--lora", "2", "--warmup", "1", "--steps", "2"]
    found = benchmark_trainers.main([*arguments, "--providers", "huggingface,bastile,bastile_captured", "--results", str(tmp_path)])
    plain, ours = (found.steps[provider, 64] for provider in ("bastile", "bastile_captured"))
    assert len(captured) == 1 and len(plain.ms) == len(ours.ms) == 2
    assert len(plain.losses) == 3 and ours.losses == [], "of other texts they would be compared with"


@pytest.mark.parametrize("name", benchmark_families.CASES)
def test_steps_of_families_that_are_read_or_have_experts(name, tmp_path, in_this_process):
    """By the command of all of them, whose providers step the same weights."""
    arguments = ["--cases", name, "--device", "cpu", "--tokens", "16", "--warmup", "1", "--steps", "1", "--rounds", "1"]
    layers = "10" if name == "gemma_4" else "2"
    found = benchmark_families.main([*arguments, "--layers", layers, "--providers", "huggingface,bastile", "--results", str(tmp_path)])
    assert found.whole and not found.left_out
    theirs, ours = (found.found[name].steps[provider, 16] for provider in ("huggingface", "bastile"))
    assert not ours.error and ours.losses == pytest.approx(theirs.losses, rel=2e-3)
    [file] = (tmp_path / "cpu").glob("*.csv")
    assert file.stem == benchmark_families.CASES[name].shows
    assert (16 in found.found[name].routings) == (name in ("mixtral", "glm"))


def test_a_provider_whose_losses_are_others_has_no_times(in_this_process, monkeypatch):
    monkeypatch.setattr(benchmark_families, "APART", -1.0)
    arguments = ["--cases", "qwen3_vl", "--device", "cpu", "--tokens", "16", "--warmup", "1", "--steps", "1", "--lora", "0"]
    found = benchmark_families.main([*arguments, "--layers", "1", "--providers", "huggingface,bastile"]).found["qwen3_vl"]
    times = {row.kernel_provider: row for row in found.rows() if row.metric_name == "step_time"}
    assert times["huggingface"].y_value_50 and "from transformers'" in times["bastile"].error
    found.theirs[16].append([loss + 2.0 for loss in found.theirs[16][0]])  # another round of transformers'
    assert all(row.y_value_50 for row in found.rows() if row.metric_name == "step_time"), "no farther than theirs from each other"
    left_out = benchmark_families.main(["--cases", "qwen3_vl,glm", "--budget-s", "-1"])
    assert left_out.left_out == ["qwen3_vl", "glm"] and not left_out.whole


@pytest.mark.parametrize(("model", "layers", "name"), (("gemma_tiny", "2", "dense_step"), ("qwen3.5_tiny", "4", "qwen3_5_step")))
def test_steps_of_the_other_packages_families(model, layers, name, tmp_path, in_this_process):
    arguments = [*STEPS[:2], *STEPS[4:], "--model", model, "--layers", layers, "--providers", "huggingface,bastile"]
    found = steps.main([*arguments, "--results", str(tmp_path)])
    assert {r.kernel_provider for r in records.read(tmp_path / "cpu" / f"{name}.csv")} == {"huggingface", "bastile"}
    theirs, ours = (found.steps[provider, 16].losses for provider in ("huggingface", "bastile"))
    assert ours == pytest.approx(theirs, rel=2e-3)
    assert models.title(model) in tables.table(name, found.rows())


NAMES = {
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "products",
    "bastile_grouped_outer": "products",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1_kernel0_0": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": "attention",
    "bastile_attention_forward": "attention",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>": "optimizer",
    "bastile_adamw_of_four": "optimizer",
    "_swiglu_backward_kernel": step_parts.REST,
    "bastile_add_rms_norm_backward": step_parts.REST,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_of_a_step_are_told_apart_by_their_names(name):
    assert step_parts.kind_of(name) == NAMES[name]


def test_the_parts_of_a_step_are_rows_of_a_file_of_their_own(tmp_path, in_this_process, monkeypatch):
    """In milliseconds a step, by PyTorch's profiler, which a CPU has none of."""
    assert step_parts.parts_of(lambda: None) == {} or torch.cuda.is_available()
    monkeypatch.setattr(step_parts, "parts_of", lambda step: {"products": 3.0 + len(step()), step_parts.REST: 1.5})
    arguments = [*STEPS[:2], *STEPS[4:], "--model", "gemma_tiny", "--layers", "2", "--providers", "huggingface,bastile", "--parts"]
    found = steps.main([*arguments, "--results", str(tmp_path)])
    rows = records.read(tmp_path / "cpu" / "dense_step_parts.csv")
    assert {(r.x_value, r.y_value_50) for r in rows if r.metric_name == step_parts.METRIC} == {("products", 5.0), (step_parts.REST, 1.5)}
    lines = tables.table("step_parts", found.rows()).splitlines()
    assert [line.split("|")[3].strip() for line in lines if "Gemma-Tiny" in line] == ["products", step_parts.REST] * 2
    assert any("5 ms | 5 ms" in line for line in lines), lines


BILLIONS = {
    "llama_3.1_8b": 8.0, "qwen2.5_7b": 7.6, "mistral_7b": 7.2, "phi_4": 14.7, "gemma_3_12b": 11.8, "smollm3_3b": 3.1, "olmo_2_7b": 7.3,
    "qwen3.5_9b": 9.0, "qwen3_8b": 8.2, "qwen3_moe_30b_a3b": 30.5, "qwen3_vl_8b": 8.77, "mixtral_8x7b": 46.7, "glm_4.5_air": 106.9,
    "gemma_4_e2b": 4.65,
}  # fmt: skip


@pytest.mark.parametrize("model", BILLIONS)
def test_published_models_have_their_dimensions(model):
    """transformers makes each of them, and its weights are as many as its name says."""
    assert BILLIONS.keys() >= models.DENSE.keys() | models.QWEN3_5.keys() | models.SPARSE.keys() | models.GEMMA_4.keys()
    made = published.new_model(model, None, "meta")
    assert sum(parameter.numel() for parameter in made.parameters()) / 1e9 == pytest.approx(BILLIONS[model], rel=0.02)


@pytest.fixture
def alone():
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", [name for name in models.TINY if families.family_of(name).fsdp_providers and name != "qwen3_vl_tiny"])
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


def test_sharded_training_steps(tmp_path, monkeypatch):
    """One family is enough: a model is sharded the same way in all, and the test before this one has them."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = "gpt_oss_tiny"
    arguments = [*STEPS, "--model", model, "--layers", "2", "--gpus", "2", "--providers", "bastile", "--results", str(tmp_path)]
    found = benchmark_fsdp.main(arguments)
    saved = records.read(tmp_path / "cpu" / "gpt_oss_fsdp.csv")
    assert {r.x_value for r in saved if r.metric_name == "step_time" and r.y_value_50} == {"8", "16"}
    assert {(r.config["gpus"], r.config["layers"], r.config["model"]) for r in saved} == {(2, None, models.full_name(model))}, (
        "2 layers are all"
    )
    assert len(found.steps["bastile", 16].losses) == 3


def test_steps_of_rows_that_are_spread(tmp_path, monkeypatch):
    """DeepSpeed's Ulysses, around attention of transformers here: there are no kernels on a CPU."""
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = ["--gpus", "2", "--spread", "--documents", "2", "--providers", "bastile", "--results", str(tmp_path)]
    found = benchmark_fsdp.main([*STEPS, *arguments])
    assert len(found.steps["bastile", 16].losses) == 3
    assert list((tmp_path / "cpu").glob("*_fsdp_spread*.csv"))


def test_a_provider_of_another_model_is_refused(capsys):
    with pytest.raises(SystemExit):
        benchmark_fsdp.main(["--model", "gpt_oss_20b", "--providers", "bastile,liger"])
    known = "huggingface, huggingface_flex, liger_flex, bastile, bastile_adamw, bastile_four_bits, bastile_flex"
    assert f"liger, expected some of {known} for gpt_oss_20b" in capsys.readouterr().err


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
    assert all(process.exitcode is not None for process in group.processes)


REPORTS = f"""
import json, os, sys
from types import ModuleType
found = dict(kind="found", forked="transformers" in sys.modules, arguments=sys.argv[1:], marked="marked" in sys.modules)
sys.modules["marked"] = ModuleType("marked")
print({stepping.MARK!r} + json.dumps(found | {{name: os.environ.get(name) for name in ("RANK", "GIVEN", "PYTORCH_CUDA_ALLOC_CONF")}}))
"""


def test_each_process_is_new_and_has_the_variables_of_its_own(tmp_path, monkeypatch):
    """A forked one has transformers and nothing that an earlier one did; a fresh one has imported nothing."""
    script = tmp_path / "reports.py"
    script.write_text(REPORTS)
    for fresh, value in ((False, "1"), (False, "2"), (True, "3")):
        monkeypatch.setenv("GIVEN", value)
        (found,) = processes.Group(str(script), ["--x", value], 1, fresh).reports(deadline=float("inf"))
        assert (found["forked"], found["marked"], found["arguments"]) == (not fresh, False, ["--x", value])
        assert (found["RANK"], found["GIVEN"], found["PYTORCH_CUDA_ALLOC_CONF"]) == ("0", value, "expandable_segments:True")


def test_a_process_that_is_killed_or_takes_too_long_is_reported(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text("import os, signal, sys, time\nif sys.argv[1:]: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)\n")
    (killed,) = processes.Group(str(script), ["now"], 1).reports(deadline=float("inf"))
    assert killed["error"].startswith("process 0 ended with -9")
    late = processes.Group(str(script), [], 1)
    assert list(late.reports(deadline=0.0)) == [{"kind": "late"}] and late.processes[0].exitcode == -9


def test_nothing_that_is_imported_before_the_fork_starts_cuda_or_chooses_for_all():
    """Liger-Kernel and bitsandbytes ask for the GPU, and transformers takes fla's delta rule, when they are imported."""
    code = "import sys, benchmark.preloaded; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=records.ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not {"liger_kernel", "bitsandbytes", "unsloth", "transformers.models.qwen3_5.modeling_qwen3_5", "bastile"} & loaded
    assert {f"transformers.models.{name}.modeling_{name}" for name in preloaded.FAMILIES} <= loaded


@pytest.mark.parametrize(("answer", "started"), ((0, True), (201, True), (3, False)))
def test_a_server_that_started_cuda_is_noticed(answer, started, monkeypatch):
    monkeypatch.setattr(processes.ctypes, "CDLL", lambda name: argparse.Namespace(cuCtxGetCurrent=lambda pointer: answer))
    assert processes.cuda_was_started() == started


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
    assert form.masked and all(map(math.isfinite, steps.build(args).run(tokens=48, warmup=1, steps=1)["losses"]))


def varlen_in_pytorch(q, k, v, rows, scale):
    """What PyTorch's function computes, which wants a GPU."""
    parts = []
    for start, end in zip(rows.ends[:-1].tolist(), rows.ends[1:].tolist(), strict=True):
        mine = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*mine, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    assert rows.longest == rows.ends.diff().max()
    return torch.cat(parts)


@pytest.mark.parametrize("form", (stepping.Form(documents=3), stepping.Form(rows=4, padding=0.2)), ids=lambda form: form.name)
def test_a_peer_with_attention_over_rows_of_any_lengths_computes_the_same(form, monkeypatch):
    monkeypatch.setattr(varlen_peer, "varlen", lambda: varlen_in_pytorch)
    families.QWEN3.prepare("huggingface_varlen")
    losses = {}
    for provider in ("huggingface", "huggingface_varlen"):
        args = argparse.Namespace(child=provider, model="tiny", layers=2, device="cpu", weights="fp32", documents=form.documents,
                                  rows=form.rows, padding=form.padding)
        losses[provider] = steps.build(args).run(tokens=48, warmup=1, steps=2)["losses"]
    assert losses["huggingface_varlen"] == pytest.approx(losses["huggingface"], rel=1e-5)


def test_every_peer_takes_part_in_packed_batches_with_the_attention_that_is_best_at_them():
    for family in (families.QWEN3, families.QWEN3_MOE):
        assert {"huggingface_flex", "huggingface_varlen", "liger_flex", "liger_varlen", "bastile_sdpa"} < set(family.masked_providers)
    kinds = {name: families.attention_of(name) for name in families.MASKED}
    assert kinds["liger_varlen"] == varlen_peer.NAME and kinds["liger_flex"] == "flex_attention" and kinds["bastile"] is None


@pytest.mark.parametrize("name", [name for name in models.TINY if not families.family_of(name).by_model])
def test_our_layers_are_measured_with_our_attention(name):
    """Which a model that was asked for another by name keeps out, on a GPU."""
    family = families.family_of(name)
    family.prepare("bastile")
    package = families.package(family.package)
    try:
        model = family.new_model(moe("bastile", routing.UNIFORM, model=name), "cpu")
        choice = importlib.import_module(f"{package.__name__}.shared.hf.attention.attention_choice")
        assert choice.name_that_is_kept(model.get_decoder()) == ""
        model.set_attn_implementation("eager")
        assert choice.name_that_is_kept(model.get_decoder()) == "eager"
    finally:
        package.reset()


def moe(provider, kind, weights="bf16", model="gpt_oss_tiny"):
    return argparse.Namespace(child=provider, model=model, layers=4, device="cpu", documents=1, rows=1, padding=0.0, lora=0,
                              autocast=False, weights=weights, checkpointing=False, routing=kind)


def test_tokens_go_to_as_many_experts_as_the_results_say(loaded):
    """They are the same whatever computes them, and not a few."""
    found = {}
    for kind in (routing.UNIFORM, routing.SKEWED):
        for provider in ("huggingface", "bastile"):
            families.QWEN3_MOE.prepare(provider)
            try:
                stepper = steps.build(moe(provider, kind, model="qwen3_moe_tiny"))
                found[kind, provider] = stepper.run(tokens=64, warmup=0, steps=1)["routing"]
            finally:
                loaded.reset()
    for (kind, _), each in found.items():
        assert each == pytest.approx(found[kind, "huggingface"], abs=0.05), "rounding may move a token"
        assert not routing.collapsed(kind, routing.Routing(**each))


@pytest.mark.parametrize("scaled", [True, False])
def test_a_deep_model_uses_all_experts(scaled, monkeypatch):
    """Twelve layers of it do, as wide as this; with branches that end as wide as they begin, they use a few."""
    if not scaled:
        monkeypatch.setattr(families, "BRANCH_ENDS", ())
    config = transformers.Qwen3MoeConfig(
        hidden_size=1024, num_hidden_layers=12, num_attention_heads=32, num_key_value_heads=2, head_dim=128, num_experts=64,
        num_experts_per_tok=4, moe_intermediate_size=16, vocab_size=512, norm_topk_prob=True,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    families.fill(model)
    found = routing.record(model, input_ids=torch.arange(512)[None])
    assert routing.collapsed(routing.UNIFORM, found) is not scaled


@pytest.mark.parametrize("kind", [routing.UNIFORM, routing.SKEWED])
def test_steps_whose_tokens_went_to_a_few_experts_are_not_whole(kind, capsys):
    results = step_results.Results("qwen3_moe_step", argparse.Namespace(tokens=[64], routing=kind), gpu="a GPU")
    report = {"kind": "result", "tokens": 64, "ms": [1.0], "first_ms": 1.0, "peak_gib": None, "losses": [1.0]}
    results.add("bastile", {**report, "routing": routing.Routing(32, 4, 32, 0.3).asdict()})
    assert results.whole
    results.routings.clear()
    results.add("bastile", {**report, "routing": routing.Routing(32, 4, 7, 0.91).asdict()})
    assert not results.whole and "collapsed" in "".join(capsys.readouterr())


def test_a_skewed_routing_is_one():
    config, found = argparse.Namespace(num_experts=128, num_experts_per_tok=8), {}
    for kind in (routing.UNIFORM, routing.SKEWED):
        weight = torch.empty(128, 256)
        families.fill_parameter("model.layers.0.mlp.gate.weight", weight, config, kind)
        found[kind] = routing.Routing.of([(torch.randn(4096, 256) @ weight.T).topk(8).indices], 128)
    assert found["uniform"].largest < 2 * found["uniform"].fair and 0.3 < found["skewed"].largest < 0.5
    assert found["uniform"].used == found["skewed"].used == 128


def test_weights_of_a_mixture_of_experts_keep_tokens_apart():
    """Biases of 1, or an embedding as small as all other weights, send the tokens of deeper layers to the same few experts."""
    model = families.new_gpt_oss(moe("huggingface", "uniform"), "cpu")
    families.fill(model)
    parameters = dict(model.named_parameters())
    assert all(not p.any() for n, p in parameters.items() if n.endswith(("bias", "sinks")))
    assert all((p == 1).all() for n, p in parameters.items() if n.endswith("norm.weight"))
    assert parameters["model.embed_tokens.weight"].std() > 0.9 and parameters["lm_head.weight"].std() < 0.03
    law = routing.shares(32, 4)
    assert law.sum() == pytest.approx(4) and (law.diff() <= 0).all() and law.max() <= routing.MOST
    wanted, lengths = law.flip(0), routing.row_lengths(32, 4).sort().values
    reached = [sum(torch.randn(20000).mul(length) > 1) / 20000 for length in lengths]
    assert torch.tensor(reached) == pytest.approx(wanted.float(), abs=0.02)


def test_a_collapsed_routing_is_known_as_one():
    chosen = [torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1]]), torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])]
    assert routing.Routing.of(chosen, 4) == routing.Routing(experts=4, top_k=2, used=4, largest=1.0)
    assert routing.Routing.of([chosen[0][:2]], 4).used == 3
    seven_of_32 = routing.Routing(experts=32, top_k=4, used=7, largest=0.91)
    assert routing.collapsed("uniform", seven_of_32) and routing.collapsed("skewed", seven_of_32)
    assert not routing.collapsed("uniform", routing.Routing(32, 4, 32, 0.43))


def test_compiled_steps_say_how_long_they_compiled():
    args = steps.parser("", ()).parse_args(["--tokens", "8", "--model", "tiny", "--rounds", "2"])
    found = step_results.Results("qwen3_step", args, gpu=GPU)
    for first in (9000.0, 3000.0):
        found.add("torch_compile", {"kind": "result", "tokens": 8, "ms": [2.0], "first_ms": first, "peak_gib": 1.0, "losses": []})
    rows = {r.metric_name: r for r in found.rows()}
    assert rows["compile_time"].y_value_50 == pytest.approx(8.998) and rows["step_time"].config["rounds"] == 2
    assert "2 ms · 1.0 GiB · compiled in 9 s" in tables.table("qwen3_models", found.rows())


def test_torchaos_layers_take_the_place_of_the_projections_alone(monkeypatch):
    """Of a model with adapters: not of these, nor of the head."""
    asked = {}

    def convert(model, config, module_filter_fn):
        asked.update(config=config, names=[name for name, module in model.named_modules() if module_filter_fn(module, name)])
        return model

    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=2, target_modules="all-linear"))  # PEFT looks for torchao
    recipes = types.SimpleNamespace(from_recipe_name=lambda name: name)
    there = types.SimpleNamespace(Float8LinearConfig=recipes, convert_to_float8_training=convert)
    monkeypatch.setattr(compiled_peer, "require_modules", lambda *names: None)
    monkeypatch.setitem(sys.modules, "torchao", types.SimpleNamespace(float8=there))
    monkeypatch.setitem(sys.modules, "torchao.float8", there)
    assert compiled_peer.in_eight_bits(model, "tensorwise") is model and asked["config"] == "tensorwise"
    projections = {name.rpartition(".layers.")[2] for name in asked["names"] if ".layers." in name}
    assert len(asked["names"]) == len(projections) == 7 * model.config.num_hidden_layers
    assert all(name.endswith("_proj.base_layer") for name in asked["names"])


def test_the_runs_that_fill_all_tables():
    """Their command lines are ones that the benchmarks take, and every table that a GPU fills has one."""
    assert all_runs.main(["--list"]) == 0 and set(all_runs.RUNS) >= {"steps", "lora", "packed", "padded", "moe", "gpt_oss", "operations"}
    filled = {name for run in all_runs.RUNS.values() for name in run.shows.split(", ")}
    # Others' rows, what is shown nowhere, and rows of a length that is looked for, in one turn.
    others = {"fits", "qwen3_models", "gpt_oss_operations", "liger_operations", "qwen3_5_operations", "qwen3_moe_fsdp"}
    assert filled | others == {*tables.all_tables(), "compute-sanitizer.txt"}
    for name, run in all_runs.RUNS.items():
        rounds = "1" if name == "long_row" else "3"  # of a step that takes minutes
        if name != "sanitizer":
            assert "--rounds" in run.arguments and run.arguments[run.arguments.index("--rounds") + 1] == rounds, name
        assert "--results" in run.command_line(9.0, Path("x")) or name == "sanitizer"


class Taken(Exception):
    """A command line was taken."""


@pytest.mark.parametrize("name", all_runs.RUNS)
def test_a_benchmark_takes_the_command_line_of_its_run(name, monkeypatch):
    run = all_runs.RUNS[name]
    arguments = run.command_line(9.0, Path("x"))

    def taken(*_, **__):
        raise Taken

    of_steps = {"benchmark.steps": steps, "benchmark.benchmark_lora": benchmark_lora, "benchmark.benchmark_fsdp": benchmark_fsdp}
    of_steps |= {"benchmark.benchmark_families": benchmark_families}
    if run.module in of_steps:  # which looks at more than the words
        monkeypatch.setattr(steps, "run_all", taken)
        with pytest.raises(Taken):
            of_steps[run.module].main(arguments)
        return
    parse = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self, args=None, *rest: taken(parse(self, args, *rest)))
    monkeypatch.setattr(sys, "argv", [run.module, *arguments])
    with pytest.raises(Taken), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a module that is there already
        runpy.run_module(run.module, run_name="__main__", alter_sys=False)


@pytest.fixture
def made_up_runs(monkeypatch, tmp_path):
    """In the place of all runs, three that write a row each: one takes all of its time, and one of the others fails. Returns the folder for
    results and what was started."""
    started, row = [], made_up_rows()[0]

    def run(command, timeout, **_):
        name, folder = command[2].partition("benchmark_")[2], Path(command[command.index("--results") + 1])
        started.append(name)
        records.write(folder / "nvidia-h200" / "rms_norm.csv", [dataclasses.replace(row, x_value=str(len(started)))])
        if name == "slow":
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, int(name == "failing"))

    runs = {name: all_runs.Run(f"benchmark.benchmark_{name}", (), seconds, "x")
            for name, seconds in (("failing", 10), ("large", 1000), ("slow", 10), ("small", 10))}  # fmt: skip
    monkeypatch.setattr(all_runs, "RUNS", runs)
    monkeypatch.setattr(all_runs.subprocess, "run", run)
    return tmp_path / "results", started


def test_a_run_that_is_not_whole_changes_no_result_and_is_named(made_up_runs, capsys):
    """One that the rest of the budget is not enough for is left out, and the next is done."""
    folder, started = made_up_runs
    assert all_runs.main(["--runs", "failing,large,slow,small", "--budget-s", "60", "--results", str(folder)]) == 3
    assert started == ["failing", "slow", "small"] and "still owed: failing,large,slow\n" in capsys.readouterr().out
    assert [r.x_value for r in records.read(folder / "nvidia-h200" / "rms_norm.csv")] == ["3"]
    assert {path.name for path in folder.with_name("results.unfinished").iterdir()} == {"failing", "slow"}


def test_the_rows_of_a_folder_are_merged_by_the_command_of_the_tables(made_up_runs, tmp_path, capsys):
    folder, _ = made_up_runs
    all_runs.main(["--runs", "small", "--results", str(folder)])
    liger = records.LigerRow("rms_norm", "liger", "full", "speed", "ms", "T", "tokens", "1", 1.0)
    records.write(folder / "nvidia-h200" / records.LIGER_FILE, [liger])
    kept = dataclasses.replace(made_up_rows()[0], x_value="7")
    records.write(tmp_path / "kept" / "nvidia-h200" / "rms_norm.csv", [kept])
    document = tmp_path / "numbers.md"
    document.write_text("Nothing.\n")
    assert tables.main(["--merge", str(folder), "--results", str(tmp_path / "kept"), "--write", str(document)]) == 0
    assert "merged 2 rows of rms_norm, measured at 1.0.0, an unknown version" in capsys.readouterr().out
    assert [r.x_value for r in records.read(tmp_path / "kept" / "nvidia-h200" / "rms_norm.csv")] == ["7", "1"]
    assert len(records.read(tmp_path / "kept" / "nvidia-h200" / records.LIGER_FILE, records.LigerRow)) == 1
    with pytest.raises(SystemExit):
        tables.main(["--merge", str(tmp_path / "nothing"), "--results", str(tmp_path / "kept")])


def test_steps_that_the_time_ends_are_no_whole_run(tmp_path, in_this_process, capsys):
    """They are measured in the process of benchmark.all, so that all are forked from one server."""
    arguments = (*STEPS, "--tokens", "8", "--rounds", "2", "--providers", "huggingface")
    run = all_runs.Run("benchmark.steps", arguments, 1, "x", forks=True)
    assert run.whole(60.0, tmp_path / "a") and not run.whole(-1.0, tmp_path / "b")
    assert len(records.read(tmp_path / "a" / "cpu" / "qwen3_step.csv")) > 2
    assert not dataclasses.replace(run, arguments=("--providers", "unknown")).whole(60.0, None)
    assert "unknown, expected some of" in capsys.readouterr().err


def test_a_model_without_steps_is_refused():
    with pytest.raises(ValueError, match="model is deepseek_v3, expected one of qwen3_0.6b, "):
        steps.main(["--model", "deepseek_v3"])


def test_providers_of_each_family_are_known():
    for family in families.FAMILIES.values():
        part = {*family.step_providers, *family.masked_providers, *family.fsdp_providers}
        assert part <= set(family.providers) <= set(providers.PROVIDERS)


@pytest.mark.parametrize("loss", trl_losses.LOSSES)
def test_losses_of_trl(loss, loaded):
    """TRL's trainer computes them, with its head's function and with ours, which is called where it should be."""
    pytest.importorskip("trl")
    recipe = {"lora": 4, "loss": loss, "weights": "fp32", "autocast": False, "checkpointing": False, "routing": routing.UNIFORM}
    losses, calls = {}, {}
    for provider in ("huggingface", "bastile_trl_head", "bastile"):
        families.QWEN3.prepare(provider)
        try:
            args = argparse.Namespace(child=provider, model="tiny", layers=1, device="cpu", documents=1, rows=1, padding=0.0, **recipe)
            with counted(loaded) as names:
                losses[provider] = steps.build(args).run(tokens=64, warmup=0, steps=3)["losses"]
            calls[provider] = len(names)
        finally:
            loaded.reset()
    assert calls == {"huggingface": 0, "bastile_trl_head": 0, "bastile": 3 * (2 if loss == "dpo" else 1)}, "a reference pass as well"
    assert len({f"{value:.5f}" for value in losses["huggingface"]}) > 1, "a step changes the loss"
    for found in losses.values():
        assert found == pytest.approx(losses["huggingface"], rel=1e-5)


def test_what_a_loss_of_trl_is_not_measured_with(capsys):
    for arguments, found in ((["--documents", "2"], "argument --loss"), (["--tokens", "8"], "argument --tokens: 8, expected at least 16")):
        with pytest.raises(SystemExit):
            steps.main(["--model", "tiny", "--loss", "dpo", "--lora", "4", *arguments])
        assert found in capsys.readouterr().err


@pytest.mark.parametrize("places", (["3", "5"], ["3"]))
def test_a_sweep_gives_each_gpu_a_length_and_keeps_those_that_ended_well(tmp_path, monkeypatch, places):
    started = []

    def run(command, cwd, env):
        tokens, folder = (command[command.index(name) + 1] for name in ("--tokens", "--results"))
        started.append((tokens, env["CUDA_VISIBLE_DEVICES"]))
        rows = [row for row in made_up_rows() if row.kernel_name == "qwen3_step"][:1]
        records.write(Path(folder) / records.slug(GPU) / "qwen3_step.csv", [dataclasses.replace(row, x_value=tokens) for row in rows])
        return subprocess.CompletedProcess(command, int(tokens == "2048"))

    monkeypatch.setattr(sweep, "places", lambda: places)
    monkeypatch.setattr(sweep.subprocess, "run", run)
    assert sweep.main(["--tokens", "512,2048,8192", "--rounds", "3", "--results", str(tmp_path)]) == 1
    assert {tokens for tokens, _ in started} == {"512", "2048", "8192"} and {place for _, place in started} <= {*places}
    if len(places) == 1:  # two GPUs take them in this order, and either may be the first to note its own
        assert [tokens for tokens, _ in started] == ["8192", "2048", "512"], "the longest first"
    found = records.read(tmp_path / records.slug(GPU) / "qwen3_step.csv")
    assert sorted(int(row.x_value) for row in found) == [512, 8192]


def test_the_places_of_a_sweep_are_the_gpus_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert sweep.places() == ["5", "7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert sweep.places() == ["0", "1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert sweep.places() == [""]
