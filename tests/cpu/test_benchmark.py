"""The benchmark suite without a GPU: its files, its tables and pictures, and smoke runs of every benchmark in tiny sizes."""

import argparse
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from benchmark import (
    benchmark_adamw,
    benchmark_fsdp,
    benchmark_generate,
    benchmark_gpt_oss,
    benchmark_linear_cross_entropy,
    benchmark_qwen3,
    benchmark_swiglu,
    eager,
    harness,
    models,
    plots,
    providers,
    records,
    tables,
    training,
)
from benchmark.__main__ import OPERATIONS, main
from benchmark.timing import Clock, Quantiles, relative_error

GPU = "NVIDIA H200"


@pytest.fixture(autouse=True)
def sources(monkeypatch, loaded):
    """The package as it is now, not as build/ has it."""
    monkeypatch.setattr(providers, "package", lambda folder=".": loaded)


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def row(kernel="rms_norm", provider="bastile", mode="forward", metric="speed", x=8192, y=36.0, **config):
    known = {"model": "qwen3_8b", "dtype": "bf16", "timing": "device", "torch": "2.11.0", "driver": "580.159"}
    numbers = (None,) * 3 if y is None else (y, y * 0.99, y * 1.02)
    extra = json.dumps(known | config)
    return records.Row(
        kernel, provider, mode, metric, "us", "tokens", "tokens", str(x), *numbers, extra, GPU, "2026-01-02T03:04:05Z", "1.0.0"
    )


def made_up_rows():
    rows = []
    for x in (1024, 8192):
        for provider, us in (("huggingface", 441.0), ("liger", 37.6), ("bastile", 35.4), ("floor", 34.0)):
            rows.append(row(provider=provider, x=x, y=us * x / 8192))
            rows.append(row(provider=provider, x=x, y=x / 100, metric="memory"))
            ms = row("linear_cross_entropy", provider, "full", x=x, y=us * 1e3)
            rows += [ms, row("linear_cross_entropy", provider, "full", "error_dweight_ratio", x, 1.2)]
        rows.append(row(provider="liger_cutile", x=x, y=None, error="RuntimeError: only for | others"))
        for kernel, gpus in (("qwen3_step", 1), ("qwen3_fsdp", 4)):
            step = {"gpus": gpus, "layers": None, "tokens": x, "timing": None}
            for provider, ms in (("huggingface", 988.0), ("liger", 807.0), ("bastile", 770.0)):
                rows.append(row(kernel, provider, "full", "step_time", x, ms, **step))
                rows.append(row(kernel, provider, "full", "throughput", x, x / ms, **step))
                rows.append(row(kernel, provider, "full", "memory", x, ms / 10, **step))
            for metric in ("first_step", "until_ready"):
                rows.append(row(kernel, "bastile", "full", metric, 1024, 1.5, **step))
        rows.append(
            row("qwen3_step", "huggingface", "full", "step_time", 16384, None, gpus=1, layers=None, tokens=16384, error="out of memory")
        )
    for provider, us in (("huggingface", 9000.0), ("bastile", 4500.0)):
        rows += [row("generate", provider, mode, x=x, y=us, layers=4, tokens=2048) for mode in ("prefill", "decode") for x in (1, 8)]
    for provider, us in (("torch", 12.8), ("bastile", 15.0)):
        rows.append(row(provider=provider, metric="host_time", x=128, y=us))
    for provider, ms in (("torch", 26.0), ("torch_fused", 10.0), ("bastile", 6.8), ("floor", 6.5)):
        rows.append(row("adamw", provider, "full", x="bf16", y=1e3 * ms, layers=4, timing="device"))
    return rows + made_up_rows_of_gpt_oss()


def made_up_rows_of_gpt_oss():
    """Two models, two routings and two passes of the layer; steps of 12 layers on one GPU, and of all on two."""
    rows = []
    for model, factor in (("gpt_oss_20b", 1), ("gpt_oss_120b", 2)):
        for kernel in ("experts_uniform", "experts_skewed"):
            for mode, us in (("forward", 1000.0), ("full", 3000.0)):
                for provider, times in (("huggingface", 2.0), ("bastile", 1.2), ("floor", 1.0)):
                    rows.append(row(kernel, provider, mode, y=factor * times * us, model=model))
                    rows.append(row(kernel, provider, mode, "memory", y=factor * 512.0, model=model))
        rows.append(row("experts_uniform", "huggingface", "full", "error_ddown_bias", y=0.04, model=model))
    for kernel, layers, gpus, ms in (("gpt_oss_step", 12, 1, 500.0), ("gpt_oss_fsdp", None, 2, 900.0)):
        step = {"model": "gpt_oss_20b", "gpus": gpus, "layers": layers, "timing": None}
        for provider, times in (("huggingface_flex", 1.5), ("liger_flex", 1.25), ("bastile", 1.0)):
            rows.append(row(kernel, provider, "full", "step_time", y=times * ms, **step))
            rows.append(row(kernel, provider, "full", "throughput", y=8192 / ms, **step))
            rows.append(row(kernel, provider, "full", "memory", y=100 * times, **step))
    return rows


@pytest.fixture
def results(tmp_path):
    for r in made_up_rows():
        records.write(tmp_path / records.slug(GPU) / f"{r.kernel_name}.csv", [r])
    return tmp_path


# ---------------------------------------------------------------- files


def test_a_csv_file_keeps_rows_and_replaces_those_measured_again(tmp_path):
    path = tmp_path / "a" / "rms_norm.csv"
    first, other, failed = row(y=36.0), row(x=1024, y=5.5), row(provider="liger", y=None, error='said "no", twice')
    records.write(path, [first, other, failed])
    assert records.read(path) == [first, other, failed]
    assert path.read_text().splitlines()[0] == (
        "kernel_name,kernel_provider,kernel_operation_mode,metric_name,metric_unit,x_name,x_label,x_value,"
        "y_value_50,y_value_20,y_value_80,extra_benchmark_config_str,gpu_name,timestamp,version"
    )
    again = row(y=35.0)
    records.write(path, [again])
    assert records.read(path) == [other, failed, again]
    assert records.read(path)[1].error == 'said "no", twice'


def test_a_file_with_other_columns_is_refused(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="expected"):
        records.read(tmp_path / "x.csv")


def test_names():
    assert records.slug(GPU) == "nvidia-h200"
    assert models.full_name("8b") == models.full_name("Qwen3_8B") == "qwen3_8b"
    with pytest.raises(ValueError, match="expected one of"):
        models.size("7b")
    assert records.package_version().startswith("1.")


# ---------------------------------------------------------------- the reference


def test_the_formulas_are_those_of_transformers():
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 64).bfloat16(), torch.randn(64).bfloat16()
    norm = qwen3.Qwen3RMSNorm(64, eager.EPS)
    norm.weight = torch.nn.Parameter(weight)
    assert torch.equal(norm(x), eager.rms_norm(x, weight))

    config = models.configuration("tiny")
    size, tokens = models.size("tiny"), 7
    cos, sin = qwen3.Qwen3RotaryEmbedding(config)(x, torch.arange(tokens)[None])
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip((cos, sin), eager.angles(tokens, size.head_dim), strict=True))
    q, k = (torch.randn(1, heads, tokens, size.head_dim).bfloat16() for heads in (size.heads, size.kv_heads))
    wanted = qwen3.apply_rotary_pos_emb(q, k, cos, sin)
    assert all(torch.equal(a, b) for a, b in zip(wanted, eager.rotary(q, k, cos, sin), strict=True))

    mlp = qwen3.Qwen3MLP(config).bfloat16()
    assert torch.equal(mlp(x), mlp.down_proj(eager.swiglu(mlp.gate_proj(x), mlp.up_proj(x))))


def test_the_chunked_reference_is_the_formula_differentiated(monkeypatch):
    operation = benchmark_linear_cross_entropy.LINEAR_CROSS_ENTROPY
    inputs = operation.inputs(models.size("tiny"), 13, harness.Random("cpu", torch.float32, 1))
    monkeypatch.setattr(benchmark_linear_cross_entropy, "CHUNK", 4)
    chunked, whole = operation.exact(inputs), dataclasses.replace(operation, exact=None).reference(inputs)
    for a, b in zip(chunked.outputs + chunked.gradients, whole.outputs + whole.gradients, strict=True):
        assert relative_error(a, b) < 1e-12
    assert 0 < chunked.baseline["dweight"] < 1e-5


# ---------------------------------------------------------------- smoke runs

TINY = ["--device", "cpu", "--model", "tiny", "--tokens", "16", "--ms", "1", "--rounds", "1", "--no-compile"]


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_runs(name, tmp_path):
    rows = main([name, *TINY, "--results", str(tmp_path)])
    operation = OPERATIONS[name]
    saved = records.read(tmp_path / "cpu" / f"{operation.file or name}.csv")
    speed = {(r.kernel_provider, r.kernel_operation_mode) for r in rows if r.metric_name == "speed" and r.y_value_50}
    assert len(saved) == len(rows)
    for provider in ("huggingface", "bastile", "floor"):
        assert {(provider, mode) for mode in operation.modes} <= speed
    found = {r.metric_name: r.y_value_50 for r in rows if r.kernel_provider == "huggingface"}
    assert all(found[f"error_{n}"] < 1e-2 for n in operation.outputs + operation.gradients)
    assert {"torch", "model", "dtype", "timing"} <= set(saved[0].config)
    if name == "rms_norm":
        assert {r.kernel_provider for r in rows if r.metric_name == "host_time"} >= {"torch", "huggingface", "bastile"}


@pytest.mark.parametrize("operation", ("experts_uniform", "experts_skewed"))
def test_the_experts_of_gpt_oss_run(operation, tmp_path):
    arguments = ["experts", *TINY, "--results", str(tmp_path)]
    arguments[arguments.index("tiny")] = "gpt_oss_tiny"
    rows = [row for row in benchmark_gpt_oss.main(arguments) if row.kernel_name == operation]
    speed = {(r.kernel_provider, r.kernel_operation_mode) for r in rows if r.metric_name == "speed" and r.y_value_50}
    assert {(p, mode) for p in ("huggingface", "bastile", "floor") for mode in ("forward", "full")} <= speed
    errors = [r.y_value_50 for r in rows if r.metric_name.startswith("error_") and r.kernel_provider == "bastile"]
    assert len(errors) == 7 and max(errors) < 1e-2
    saved = records.read(tmp_path / "cpu" / "gpt_oss_experts.csv")
    assert "| 6 experts, uniform, forward + backward | 16 |" in tables.table("gpt_oss_experts", saved)


def test_the_gate_of_the_benchmark_is_transformers():
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    experts = types.SimpleNamespace(alpha=benchmark_gpt_oss.ALPHA, limit=benchmark_gpt_oss.LIMIT)
    gate_up = 10 * torch.randn(9, 16)
    assert torch.equal(benchmark_gpt_oss.gate(gate_up), GptOssExperts._apply_gate(experts, gate_up))


def test_a_training_step_of_gpt_oss():
    args = argparse.Namespace(child="huggingface", model="gpt_oss_tiny", layers=1, device="cpu")
    found = benchmark_gpt_oss.build(args).run(tokens=16, warmup=1, steps=1)
    assert len(found["ms"]) == 1 and len(found["losses"]) == 2 and all(map(math.isfinite, found["losses"]))


def test_a_sweep_over_models(monkeypatch):
    monkeypatch.setattr(models, "SIZES", {})
    rows = main(["swiglu", *TINY, "--sweep-mode", "model_config", "--models", "tiny", "--modes", "forward"])
    assert {(r.x_name, r.x_value, r.config["tokens"]) for r in rows} == {("model", "qwen3_tiny", 16)}


def with_providers(**loaders):
    return dataclasses.replace(benchmark_swiglu.SWIGLU, loaders=loaders)


def refuses(*_):
    raise RuntimeError("only for sm_100\nsecond line")


def run(operation, *more):
    return harness.main(operation, arguments=[*TINY, "--modes", "forward", *more])


def test_a_provider_that_refuses_is_shown_as_such(capsys):
    rows = run(with_providers(liger=lambda: refuses))
    (failed,) = [r for r in rows if r.kernel_provider == "liger"]
    assert (failed.metric_name, failed.y_value_50, failed.error) == ("speed", None, "RuntimeError: only for sm_100")
    assert "liger fails: RuntimeError: only for sm_100" in capsys.readouterr().out


def test_a_provider_that_is_wrong_is_not_timed():
    rows = run(with_providers(liger=lambda: lambda gate, up: eager.swiglu(gate, up) * 1.1))
    speed, *_ = [r for r in rows if r.kernel_provider == "liger" and r.metric_name == "speed"]
    assert speed.y_value_50 is None and "wrong result: y is off by 1.0e-01" in speed.error.replace("dup", "y").replace("dgate", "y")


def test_a_result_with_a_bound_of_its_own_may_be_off_by_more():
    operation = dataclasses.replace(with_providers(liger=lambda: lambda gate, up: eager.swiglu(gate, up) * 1.1), bounds={"y": 0.2})
    speed, *_ = [r for r in run(operation) if r.kernel_provider == "liger" and r.metric_name == "speed"]
    assert speed.y_value_50 is None and "wrong result: d" in speed.error
    everything = dict.fromkeys(operation.outputs + operation.gradients, 0.2)
    speed, *_ = [r for r in run(dataclasses.replace(operation, bounds=everything)) if r.kernel_provider == "liger" and r.metric_name == "speed"]
    assert speed.y_value_50


def test_a_provider_that_fails_while_it_is_timed_leaves_the_others_alone():
    calls = []

    def later(gate, up):
        calls.append(1)
        return refuses() if len(calls) > 2 else eager.swiglu(gate, up)

    rows = run(with_providers(liger=lambda: later))
    speed = {r.kernel_provider: r for r in rows if r.metric_name == "speed"}
    assert speed["liger"].error and speed["huggingface"].y_value_50 and speed["floor"].y_value_50


def test_a_provider_that_is_not_installed_is_left_out(capsys):
    def absent():
        raise providers.NotInstalled("liger_kernel is not installed")

    rows = run(with_providers(liger=absent))
    assert "liger" not in {r.kernel_provider for r in rows}
    assert "liger is left out: liger_kernel is not installed" in capsys.readouterr().out


def test_a_provider_that_writes_into_its_inputs_finds_them_restored():
    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            ctx.save_for_backward(gate, up)
            return eager.swiglu(gate, up)

        @staticmethod
        def backward(ctx, dy):
            with torch.enable_grad():
                gate, up = (t.detach().requires_grad_() for t in ctx.saved_tensors)
                found = torch.autograd.grad(eager.swiglu(gate, up), (gate, up), dy)
            for saved, gradient in zip(ctx.saved_tensors, found, strict=True):
                saved.data.copy_(gradient)
            return found

    operation = with_providers(liger=lambda: InPlace.apply)
    inputs = operation.inputs(models.size("tiny"), 4, harness.Random("cpu", torch.bfloat16, 0))
    work, exact = inputs.copy(), operation.reference(inputs)
    for _ in range(2):
        work.restore(inputs)
        assert max(harness.errors(operation, InPlace.apply, work, exact).values()) < 1e-2
    assert not torch.equal(work.leaves[0], inputs.leaves[0])


def test_a_misspelt_provider_ends_the_run_before_it_begins(capsys):
    for start in (run, lambda *arguments: benchmark_qwen3.main(list(arguments[1:]))):
        with pytest.raises(SystemExit):
            start(with_providers(), "--providers", "bastille")
        assert "bastille, expected some of huggingface" in capsys.readouterr().err


def test_out_of_memory_and_out_of_time(capsys):
    assert harness.message(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")) == "out of memory"
    assert run(with_providers(), "--budget-s", "-1") == []
    assert "time budget is spent" in capsys.readouterr().out


def test_quantiles_and_a_failing_call():
    assert Quantiles.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Quantiles(3.0, pytest.approx(1.8), pytest.approx(4.2))
    found = Clock("cpu", milliseconds=0.1).measure({"good": [lambda: None], "bad": [refuses]})
    assert found["good"].median > 0 and isinstance(found["bad"], RuntimeError)


# ---------------------------------------------------------------- training steps

STEPS = ["--device", "cpu", "--model", "tiny", "--tokens", "8,16", "--warmup", "1", "--steps", "2"]


def test_training_steps_in_a_process_of_their_own(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = benchmark_qwen3.main([*STEPS, "--providers", "huggingface", "--results", str(tmp_path)])
    saved = records.read(tmp_path / "cpu" / "qwen3_step.csv")
    assert {r.metric_name for r in saved} == {"step_time", "throughput", "loss", "first_step", "until_ready"}
    assert len(found.steps["huggingface", 8].ms) == 2 and len(found.steps["huggingface", 16].losses) == 3


@pytest.fixture
def alone():
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", models.TINY)
def test_a_model_that_is_filled_while_it_is_sharded_is_the_same(name, alone):
    args = argparse.Namespace(child="huggingface", model=name, layers=2, device="cpu")
    family = benchmark_fsdp.FAMILIES[models.family(name)]
    sharded, whole = benchmark_fsdp.shard(family.new_model(args, "meta"), "cpu"), family.new_model(args, "cpu")
    training.fill(whole)
    parameters, buffers = dict(sharded.named_parameters()), dict(sharded.named_buffers())
    assert parameters.keys() == dict(whole.named_parameters()).keys() and buffers.keys() == dict(whole.named_buffers()).keys()
    assert all(torch.equal(parameters[n].full_tensor(), p) for n, p in whole.named_parameters())
    assert all(torch.equal(buffers[n], b) for n, b in whole.named_buffers())
    found, wanted = (training.Stepper(m, training.make_optimizer(m, "cpu", "huggingface"), "cpu", 512).run(16, 1, 1)["losses"] for m in (sharded, whole))
    assert found == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize(("model", "kernel", "provider"), (("tiny", "qwen3_fsdp", "huggingface"), ("gpt_oss_tiny", "gpt_oss_fsdp", "bastile")))
def test_sharded_training_steps(model, kernel, provider, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = [*STEPS, "--model", model, "--layers", "2", "--gpus", "2", "--providers", provider, "--results", str(tmp_path)]
    found = benchmark_fsdp.main(arguments)
    saved = records.read(tmp_path / "cpu" / f"{kernel}.csv")
    assert {r.x_value for r in saved if r.metric_name == "step_time" and r.y_value_50} == {"8", "16"}
    assert {(r.config["gpus"], r.config["layers"], r.config["model"]) for r in saved} == {(2, None, models.full_name(model))}, "2 layers are all"
    assert len(found.steps[provider, 16].losses) == 3


def test_a_provider_of_another_model_is_refused(capsys):
    with pytest.raises(SystemExit):
        benchmark_fsdp.main(["--model", "gpt_oss_20b", "--providers", "bastile,liger"])
    assert "liger, expected some of huggingface, huggingface_flex, liger_flex, bastile, bastile_adamw for gpt_oss_20b" in capsys.readouterr().err


def test_the_step_of_the_optimizer(tmp_path):
    arguments = ["--device", "cpu", "--model", "tiny", "--layers", "1", "--ms", "1"]
    rows = benchmark_adamw.main([*arguments, "--results", str(tmp_path)])
    saved = records.read(tmp_path / "cpu" / "adamw.csv")
    assert len(saved) == len(rows) and all(r.y_value_50 for r in rows), [r.error for r in rows]
    assert {(r.kernel_provider, r.x_value) for r in saved} == {(p, c) for p in (*benchmark_adamw.PROVIDERS, "floor") for c in benchmark_adamw.CASES}


@pytest.mark.parametrize("wrong", ({"weight_decay": 0.0}, {"betas": (0.9, 0.9)}, {"betas": (0.7, 0.999)}, {"lr": 0.02}), ids=str)
def test_a_wrong_step_of_the_optimizer_is_not_timed(monkeypatch, wrong):
    right = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda params, **options: right(params, **options | wrong))
    arguments = ["--device", "cpu", "--model", "tiny", "--layers", "1", "--ms", "1", "--cases", "bf16", "--providers", "torch"]
    rows = benchmark_adamw.main(arguments)
    assert [r.error for r in rows if r.kernel_provider == "torch"][0].startswith("ArithmeticError: wrong result: ")


def test_generation(tmp_path):
    pytest.importorskip("transformers")
    arguments = ["--device", "cpu", "--model", "tiny", "--layers", "2", "--tokens", "16", "--batches", "1,2", "--ms", "1"]
    rows = benchmark_generate.main([*arguments, "--results", str(tmp_path)])
    saved = records.read(tmp_path / "cpu" / "generate.csv")
    assert len(saved) == len(rows) == 8 and all(r.y_value_50 for r in rows)
    found = {(r.kernel_provider, r.kernel_operation_mode, r.x_value) for r in saved}
    assert found == {(p, m, b) for p in ("huggingface", "bastile") for m in ("prefill", "decode") for b in ("1", "2")}


def test_a_generation_that_is_wrong_is_not_timed():
    args = type("Args", (), {"model": "tiny", "layers": 2, "tokens": 16, "device": "cpu"})
    found = benchmark_generate.generations(args, 1)
    with torch.no_grad():
        found["bastile"].model.lm_head.weight.mul_(1.1)
    with pytest.raises(ArithmeticError, match="logits of prefill are off by"):
        benchmark_generate.check(found)


def test_the_generation_benchmark_for_kernels_runs(loaded):
    bench = benchmark_generate.Qwen3GenerateBenchmark()
    bench.kernel, bench.device = loaded, "cpu"
    bench.setup()
    for name in ("prefill", "decode"):
        getattr(bench, f"benchmark_{name}")()
        assert torch.allclose(bench.out, getattr(bench, f"verify_{name}")(), atol=1e-2)


def test_a_step_that_does_not_fit_is_recorded_for_all_longer_ones():
    args = training.parser("", ()).parse_args(["--tokens", "8,16,32", "--model", "tiny"])
    found = training.Results("qwen3_step", args, gpu=GPU)
    found.add("liger", {"kind": "result", "tokens": 8, "ms": [1.0, 2.0], "first_ms": 9.0, "peak_gib": 1.0, "losses": [6.2]})
    found.add("liger", {"kind": "failed", "tokens": 16, "error": "out of memory"})
    errors = {r.x_value: r.error for r in found.rows() if r.metric_name == "step_time"}
    assert errors == {"8": "", "16": "out of memory", "32": "out of memory"}


def test_a_process_that_dies_says_why(tmp_path):
    script = tmp_path / "dies.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no such device')\ntime.sleep(60)\n")
    group = training.Group(str(script), [], 2)
    (report,) = group.reports(deadline=float("inf"))
    assert report == {"kind": "failed", "tokens": 0, "error": "process 1 ended with 1: no such device"}
    assert all(process.returncode is not None for process in group.processes)


def test_every_file_has_a_class_for_kernels_benchmark():
    """`kernels benchmark` loads each file on its own and ends at the first that defines none."""
    cli = pytest.importorskip("kernels.cli.benchmark")
    scripts = cli.discover_benchmark_scripts("bastile", records.ROOT)
    assert {"benchmark_qwen3.py", "benchmark_fsdp.py", "benchmark_rms_norm.py"} <= {s.name for s in scripts}
    for script in scripts:
        (cls,) = cli.discover_benchmark_classes(script, records.ROOT)
        assert any(name.startswith("benchmark_") for name in vars(cls) | vars(cls.__mro__[1]))
    assert issubclass(benchmark_fsdp.Qwen3ShardedStepBenchmark, harness.Benchmark)


def test_the_class_for_kernels_benchmark_runs(loaded):
    bench = type("SwiGLU", (harness.OperationBenchmark,), {"operation": benchmark_swiglu.SWIGLU})()
    bench.kernel, bench.device = loaded, "cpu"
    for name in ("forward", "full"):
        bench.setup()
        getattr(bench, f"benchmark_{name}")()
        assert torch.allclose(bench.out, getattr(bench, f"verify_{name}")(), atol=1e-2)


def test_kernels_benchmark_runs_every_file_against_a_local_build(package_folder, tmp_path):
    """The real command, on tiny sizes: it compares each result with the formula's, and ends at the first that differs."""
    pytest.importorskip("tabulate")
    shutil.copytree(records.ROOT / "benchmark", tmp_path / "benchmark", ignore=shutil.ignore_patterns("results", "__pycache__"))
    (tmp_path / "benchmarks").symlink_to("benchmark")
    (tmp_path / "build").symlink_to(package_folder / "build")
    command = [Path(sys.executable).with_name("kernels"), "benchmark", ".", "--iterations", "1", "--warmup", "0", "--output", "found.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr[-2000:]
    results = {found["workload"]: found["verified"] for found in json.loads((tmp_path / "found.json").read_text())["results"]}
    assert all(results.values())
    models_of = {"Qwen3StepBenchmark": ["step"], "Qwen3ShardedStepBenchmark": ["step"], "Qwen3GenerateBenchmark": ["prefill", "decode"], "AdamWBenchmark": ["step"]}
    whole = {f"{name}.{workload}" for name, workloads in models_of.items() for workload in workloads}
    assert whole < set(results)
    assert {name.partition(".")[2] for name in set(results) - whole} == {"forward", "full"}
    assert len(results.keys() - whole) == 2 * (len(list((records.ROOT / "benchmark").glob("benchmark_*.py"))) - len(models_of))


# ---------------------------------------------------------------- tables and pictures


def test_tables(results):
    rows = records.read_all(results / "nvidia-h200")
    assert "| RMSNorm, forward | 441 | 37.6 | fails [1] | 35.4 | 34 | 96% | 1.06 × |" in tables.table("operations", rows)
    assert "[1] Liger cuTile: RuntimeError: only for / others" in tables.table("operations", rows)
    assert "NVIDIA H200, driver 580.159, torch 2.11.0; Bastile 1.0.0, 2026-01-02." in tables.table("operations", rows)
    assert "| 8192 | 988 ms · 98.8 GiB | 807 ms · 80.7 GiB | 770 ms · 77.0 GiB | 1.05 × | 95% |" in tables.table("qwen3_step", rows)
    assert "| 16384 | out of memory |" in tables.table("qwen3_step", rows)
    assert "**4 GPUs**" in tables.table("fsdp", rows)
    assert "**Qwen3-8B**" in tables.table("qwen3_models", rows)
    assert "| with gradients | 12.8 | 15.0 | 1.17 × |" in tables.table("host", rows)
    assert "35.4 ms · 1.20" in tables.table("linear_cross_entropy", rows)
    assert "| one token, batch 8 | 9 | 4.5 | 2.00 × |" in tables.table("generate", rows)
    assert "| Bastile | 1.5 | 1.50 | 3.0 |" in tables.table("first_step", rows)
    for name in tables.TABLES:
        assert tables.table(name, []) == ("" if name in tables.TITLED else "*Not measured yet.*")


def test_the_table_of_the_optimizer(results):
    found = tables.table("adamw", records.read_all(results / "nvidia-h200"))
    assert "| parameters of | PyTorch | PyTorch, fused | Bastile | floor | Bastile: of the floor | vs best peer |" in found
    assert "| Qwen3-8B with 4 layers, bf16 | 26 ms | 10 ms | 6.8 ms | 6.5 ms | 96% | 1.47 × |" in found


def test_steps_with_our_optimizer_have_columns_of_their_own():
    """And are no peer of those without it."""
    step = {"gpus": 1, "layers": None, "tokens": 8192, "timing": None}
    times = (("liger", 807.0), ("bastile", 770.0), ("bastile_adamw", 757.0))
    rows = [row("qwen3_step", provider, "full", "step_time", y=ms, **step) for provider, ms in times]
    rows += [row("qwen3_step", provider, "full", "memory", y=ms / 10, **step) for provider, ms in times]
    found = tables.table("qwen3_step", rows)
    assert "| tokens | Liger | Bastile | Bastile with its AdamW | speed vs best peer | with its AdamW | memory vs best peer |" in found
    assert "| 8192 | 807 ms · 80.7 GiB | 770 ms · 77.0 GiB | 757 ms · 75.7 GiB | 1.05 × | 1.07 × | 95% |" in found


def test_tables_of_gpt_oss(results):
    rows = records.read_all(results / "nvidia-h200")
    experts = tables.table("gpt_oss_experts", rows)
    assert "| 32 experts, uniform, forward | 8192 | 2 ms · 0.50 GiB | 1.2 ms · 0.50 GiB | 1 ms | 120% | 1.67 × |" in experts
    assert "| 128 experts, skewed, forward + backward | 8192 | 12 ms · 1.00 GiB | 7.2 ms · 1.00 GiB | 6 ms | 120% | 1.67 × |" in experts
    assert experts.count("| 8192 |") == 8 and "against float64: Hugging Face 4.0%." in experts
    step, fsdp = (tables.table(name, rows) for name in ("gpt_oss_step", "gpt_oss_fsdp"))
    assert step.startswith("**A training step of GPT-OSS-20B with 12 of 24 layers on one GPU**")
    assert "| 8192 | 750 ms · 150.0 GiB | 625 ms · 125.0 GiB | 500 ms · 100.0 GiB | 1.25 × | 80% |" in step
    assert fsdp.startswith("**A training step of GPT-OSS-20B on 2 GPUs**") and "900 ms" in fsdp and "500 ms" not in fsdp
    short = tables.table("gpt_oss", rows)
    assert "| 128 experts, uniform routing | 12 ms · 1.00 GiB |  |  | 7.2 ms · 1.00 GiB | 1.67 × |" in short
    assert "| step of GPT-OSS-20B with 12 of 24 layers on one GPU |  | 750 ms · 150.0 GiB | 625 ms" in short


def test_steps_that_cannot_be_compared_have_tables_of_their_own():
    def step(layers, gpus, ms, kernel="gpt_oss_step"):
        return row(kernel, "bastile", "full", "step_time", y=ms, model="gpt_oss_20b", layers=layers, gpus=gpus, timing=None)

    found = tables.table("gpt_oss_step", [step(12, 1, 100.0), step(6, 1, 50.0), step(24, 2, 200.0), step(None, 2, 201.0)])
    titles = ("20B with 6 of 24 layers on one GPU", "20B with 12 of 24 layers on one GPU", "20B on 2 GPUs")
    assert [part.partition("**")[0] for part in found.split("GPT-OSS-")[1:]] == list(titles)
    assert "201 ms" in found and "200 ms" not in found, "24 layers are all, and the newer row counts"


def test_a_document_is_checked_and_written(results, tmp_path, capsys):
    document = tmp_path / "README.md"
    document.write_text("before\n<!-- table: host -->\nold\n<!-- /table -->\nafter\n<!-- table: operations -->\n<!-- /table -->\n")
    arguments = [str(document), "--results", str(results)]
    assert tables.main([*arguments, "--check"]) == 1
    assert "not as the results say: host, operations" in capsys.readouterr().out
    assert tables.main([*arguments, "--write"]) == 0
    assert tables.main([*arguments, "--check"]) == 0
    assert "before\n<!-- table: host -->\n| µs of host time |" in document.read_text()
    document.write_text("<!-- table: gpt_oss_step -->\n<!-- /table -->\n")
    assert tables.main([*arguments, "--write"]) == 0 and "**A training step of GPT-OSS-20B" in document.read_text()
    (results / "nvidia-h200" / "gpt_oss_step.csv").unlink()
    assert tables.main([*arguments, "--write"]) == 0
    assert document.read_text() == "<!-- table: gpt_oss_step -->\n<!-- /table -->\n", "nothing is shown where nothing was measured"
    document.write_text("<!-- table: speed -->\n<!-- /table -->\n")
    with pytest.raises(ValueError, match="table is speed, expected one of operations"):
        tables.main([*arguments, "--check"])


def test_plots(results):
    pytest.importorskip("matplotlib")
    made = {path.name for path in plots.main(["--results", str(results)])}
    names = {"rms_norm_forward", "linear_cross_entropy_full", "qwen3_step_qwen3_8b", "qwen3_fsdp_qwen3_8b_4_gpus"}
    names |= {"gpt_oss_step_gpt_oss_20b_12_layers", "gpt_oss_fsdp_gpt_oss_20b_2_gpus"}
    models_of = ("gpt_oss_20b", "gpt_oss_120b")
    names |= {f"experts_{r}_{mode}_{m}" for r in ("uniform", "skewed") for mode in ("forward", "full") for m in models_of}
    assert made == {f"{name}.png" for name in names}
    assert all((results / "nvidia-h200" / "plots" / name).stat().st_size > 10_000 for name in made)
