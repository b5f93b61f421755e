"""Smoke runs of the benchmarks of operations in tiny sizes, and what a provider that fails does to them."""

import argparse
import dataclasses
import importlib

import pytest
import torch

from benchmark import (
    benchmark_adamw,
    benchmark_fits,
    benchmark_generate,
    benchmark_host,
    benchmark_training,
    correctness,
    eager,
    harness,
    models,
    operations_rows,
    providers,
    records,
    registry,
    report,
    steps,
    suites,
    tables,
)
from benchmark.__main__ import main
from benchmark.operation import Random
from interpreter.backend import forget_launches
from tests.benchmark_support import TINY, one_thread, sources  # noqa: F401
from tests.ops.common import runtime_of

QWEN3_OPERATIONS = {operation.name: operation for operation in registry.of_suite(suites.QWEN3)}


@pytest.mark.parametrize("name", QWEN3_OPERATIONS)
def test_each_operation_runs(name, tmp_path):
    rows = main([name, *TINY, "--results", str(tmp_path)])
    operation = QWEN3_OPERATIONS[name]
    saved = records.read(tmp_path / "cpu" / f"{operation.csv_name}.csv")
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
    arguments = [operation, *TINY, "--results", str(tmp_path)]
    arguments[arguments.index("tiny")] = "gpt_oss_tiny"
    rows = main(arguments)
    assert {row.kernel_name for row in rows} == {operation}
    speed = {(r.kernel_provider, r.kernel_operation_mode) for r in rows if r.metric_name == "speed" and r.y_value_50}
    assert {(p, mode) for p in ("huggingface", "bastile", "floor") for mode in ("forward", "full")} <= speed
    errors = [r.y_value_50 for r in rows if r.metric_name.startswith("error_") and r.kernel_provider == "bastile"]
    assert len(errors) == 7 and max(errors) < 1e-2
    saved = records.read(tmp_path / "cpu" / "gpt_oss_experts.csv")
    routing = operation.partition("_")[2]
    table = tables.table("gpt_oss_experts", saved)
    assert f"| 6 experts, {routing}, forward + backward [1] | 16 |" in table and "[1] Rounds: 1, instead of 3." in table


def test_a_sweep_over_models():
    rows = main(["swiglu", *TINY, "--sweep-mode", "model_config", "--models", "tiny", "--modes", "forward"])
    assert {(r.x_name, r.x_value, r.config["tokens"]) for r in rows} == {("model", "qwen3_tiny", 16)}


def with_providers(**loaders):
    return dataclasses.replace(operations_rows.SWIGLU, peers=loaders)


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
    speed, *_ = [
        r for r in run(dataclasses.replace(operation, bounds=everything)) if r.kernel_provider == "liger" and r.metric_name == "speed"
    ]
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
    inputs = operation.inputs(models.size("tiny"), 4, Random("cpu", torch.bfloat16, 0))
    work, exact = inputs.copy(), correctness.reference(operation, inputs)
    for _ in range(2):
        work.restore(inputs)
        assert max(correctness.errors(operation, InPlace.apply, work, exact).values()) < 1e-2
    assert not torch.equal(work.leaves[0], inputs.leaves[0])


def test_a_misspelt_provider_ends_the_run_before_it_begins(capsys):
    for start in (run, lambda *arguments: steps.main(list(arguments[1:]))):
        with pytest.raises(SystemExit):
            start(with_providers(), "--providers", "bastille")
        assert "bastille, expected some of huggingface" in capsys.readouterr().err


def test_out_of_memory_and_out_of_time(capsys):
    assert report.message(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")) == "out of memory"
    assert run(with_providers(), "--budget-s", "-1") == []
    assert "time budget is spent" in capsys.readouterr().out


def test_the_step_of_the_optimizer(tmp_path):
    arguments = ["--device", "cpu", "--model", "tiny", "--layers", "1", "--ms", "1"]
    rows = benchmark_adamw.main([*arguments, "--results", str(tmp_path)])
    saved = records.read(tmp_path / "cpu" / "adamw.csv")
    assert len(saved) == len(rows) and all(r.y_value_50 for r in rows), [r.error for r in rows]
    assert {(r.kernel_provider, r.x_value) for r in saved} == {
        (p, c) for p in (*benchmark_adamw.PROVIDERS, "floor") for c in benchmark_adamw.CASES
    }


@pytest.mark.parametrize("wrong", ({"weight_decay": 0.0}, {"betas": (0.9, 0.9)}, {"betas": (0.7, 0.999)}, {"lr": 0.02}), ids=str)
def test_a_wrong_step_of_the_optimizer_is_not_timed(monkeypatch, wrong):
    right = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda params, **options: right(params, **options | wrong))
    arguments = ["--device", "cpu", "--model", "tiny", "--layers", "1", "--ms", "1", "--cases", "bf16", "--providers", "torch"]
    rows = benchmark_adamw.main(arguments)
    assert [r.error for r in rows if r.kernel_provider == "torch"][0].startswith("ArithmeticError: wrong result: ")


def test_the_hosts_time(tmp_path, monkeypatch, loaded):
    pytest.importorskip("peft")
    runtime = runtime_of(loaded)
    monkeypatch.setattr(runtime.launch, "backend", runtime.launch.backend)
    driver = importlib.import_module(f"{loaded.__name__}.shared.runtime.driver")
    for name in ("raw_stream", "current_device"):
        monkeypatch.setattr(driver, name, getattr(driver, name))
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)  # which takes half a minute
    rows = benchmark_host.main(["--device", "cpu", "--layers", "1", "--cases", ",".join(benchmark_host.CASES), "--results", str(tmp_path)])
    launched = {kernel.names[0] for kernel in list(runtime.launch.tuner.kernels) if kernel._prepared}
    forget_launches(runtime)
    loaded.reset()
    expected = {"rms_norm_forward", "rms_norm_apply", "add_rms_norm_backward", "qk_norm_rotary_backward", "swiglu_backward_recompute"}
    assert {*expected, "adamw"} <= launched, "with the kernels' launches"
    saved = records.read(tmp_path / "cpu" / "host.csv")
    assert len(saved) == len(rows) and all(r.y_value_50 for r in rows), [r.error for r in rows]
    assert {(r.kernel_provider, r.x_value) for r in saved} == {(p, c) for c, case in benchmark_host.CASES.items() for p in case.providers}
    assert all(title in benchmark_host.table(rows) for title in ("RMSNorm, without", "decoder layer with LoRA", "LoRA of 1 layers"))


def test_generation(tmp_path):
    pytest.importorskip("transformers")
    arguments = ["--device", "cpu", "--model", "tiny", "--layers", "2", "--tokens", "16", "--batches", "1,2", "--ms", "1"]
    rows = benchmark_generate.main([*arguments, "--results", str(tmp_path)])
    saved = records.read(tmp_path / "cpu" / "generate.csv")
    assert len(saved) == len(rows) == 8 and all(r.y_value_50 for r in rows)
    found = {(r.kernel_provider, r.kernel_operation_mode, r.x_value) for r in saved}
    assert found == {(p, m, b) for p in ("huggingface", "bastile") for m in ("prefill", "decode") for b in ("1", "2")}


def test_the_longest_row_is_searched_where_the_peak_says(tmp_path):
    tried = []

    def search(a_token, first, cap, most, slack=1.0):
        tried.clear()
        fits = lambda tokens: tried.append(tokens) or first + tokens * a_token * slack <= cap  # noqa: E731
        return benchmark_fits.longest(fits, lambda tokens: first + tokens * a_token, cap, most)

    assert search(1000, 10**6, 10**8, 10**6) == (96256, False) and len(tried) == 1
    assert search(1000, 10**6, 10**8, 20000) == (19456, True), "a row of whole 1024s"
    tokens, bounded = search(1000, 10**6, 10**8, 10**6, slack=1.1)
    assert not bounded and tokens == tried[-1] < tried[0] and tokens * 1100 + 10**6 <= 10**8 and len(tried) == 3
    assert search(1000, 10**6, 10**8, 10**6, slack=2) == (0, False) and len(tried) == benchmark_fits.TRIES
    assert benchmark_fits.longest(None, lambda tokens: None, 1, 1) == (0, False), "not even a short one"


def test_what_fits(tmp_path):
    pytest.importorskip("peft")
    arguments = ["--device", "cpu", "--model", "tiny", "--layers", "2", "--tokens", "16,32", "--warmup", "1", "--steps", "2"]
    arguments += ["--providers", "huggingface", "--ways", "checkpoints", "--results", str(tmp_path)]
    rows = benchmark_fits.main(arguments)
    saved = records.read(tmp_path / "cpu" / "fits.csv")
    assert len(saved) == len(rows) == 2 and all(r.y_value_50 and r.config["lora"] == 16 for r in saved)
    report = {"kind": "fits", "way": "offload", "cap": 24, "tokens": 1024, "bounded": True, "ms": 5.0}
    args = argparse.Namespace(model="qwen3_tiny", layers=2, lora=16, weights="bf16")
    row = benchmark_fits.row_of(args, "bastile", report, "cpu")
    assert (row.y_value_50, row.x_value, row.config["bounded"]) == (1024.0, "24", True)
    assert "1024 tokens or more, in 5 ms" in benchmark_fits.said_of("bastile", report)
    assert benchmark_fits.row_of(args, "bastile", {**report, "tokens": 0}, "cpu").error.endswith("no row fits")


TRAINING = ["--device", "cpu", "--model", "tiny", "--layers", "2", "--batch", "2", "--length", "16", "--validation", "2"]


def test_a_training_in_eight_bits(tmp_path, monkeypatch, loaded):
    """Beside one in bf16: the same weights and batches, other products."""
    monkeypatch.setattr(importlib.import_module(f"{loaded.__name__}.shared.decoder.eight_bits"), "FEWEST", 16)
    arguments = [*TRAINING, "--steps", "4", "--rounds", "2", "--providers", "huggingface,bastile,bastile_fp8"]
    rows = benchmark_training.main([*arguments, "--results", str(tmp_path)])
    saved = records.read(tmp_path / "cpu" / "training.csv")
    assert len(saved) == len(rows) == 3 * 2 * 4 * 2 and all(r.y_value_50 for r in rows), [r.error for r in rows]
    assert {r.kernel_operation_mode for r in saved} == {"seed 0", "seed 1"} and {r.x_value for r in saved} == set("1234")
    found = {(r.kernel_provider, r.kernel_operation_mode, r.metric_name, r.x_value): r.y_value_50 for r in saved}
    for seed in ("seed 0", "seed 1"):
        each = ("huggingface", "bastile", "bastile_fp8")
        plain, ours, eight = ([found[provider, seed, "validation_loss", x] for x in "14"] for provider in each)
        assert plain[1] < plain[0] and eight != ours
        assert eight == pytest.approx(ours, rel=2e-3) and ours == pytest.approx(plain, rel=1e-3)
    assert found["bastile", "seed 0", "training_loss", "2"] != found["bastile", "seed 1", "training_loss", "2"]
    assert "eight bits are within bf16's spread" in benchmark_training.table(rows)


def test_a_training_whose_products_stay_in_bf16_has_no_number(loaded):
    """There are too few tokens, so the rows would say nothing about eight bits."""
    rows = benchmark_training.main([*TRAINING, "--steps", "5", "--rounds", "1", "--providers", "bastile_fp8"])
    assert len(rows) == 1 and "0 products in eight bits in the first step, of 32 tokens" in rows[0].error
    assert "fails [1]" in benchmark_training.table(rows) and "spread" not in benchmark_training.table(rows)


@pytest.mark.parametrize("eight, said", (((2.0, 2.1, 2.19), "within"), ((2.2, 2.3, 2.5), "outside"), ((2.0, 2.1), "")))
def test_whether_eight_bits_lie_within_the_spread(eight, said):
    args = argparse.Namespace(model="qwen3_tiny", layers=2, batch=2, length=16, rounds=3, steps=10, device="cpu")
    text = benchmark_training.read_text()
    rows = [
        row
        for provider, losses in (("bastile", (2.0, 2.1, 2.2)), ("bastile_fp8", eight))
        for seed, loss in enumerate(losses)
        for row in benchmark_training.rows_of(args, provider, seed, [benchmark_training.Reached(10, 2.0, loss)], text)
    ]
    table = benchmark_training.table(rows)
    assert f"eight bits are {said} bf16's spread" in table if said else "spread" not in table
    assert "2.1000 (2.0000 to 2.2000)" in table


def test_the_text_of_a_training(tmp_path):
    """Every twentieth file is held out, and none of a user's is read."""
    for place in range(40):
        (tmp_path / f"{place:02}.py").write_bytes(bytes([place]) * 3)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "a.py").write_text("other")
    text = benchmark_training.read_text(tmp_path)
    assert text.validation.tolist() == [19] * 3 + [39] * 3 and len(text.training) == 3 * 38
    (tmp_path / "00.py").write_text("else")
    assert benchmark_training.read_text(tmp_path).digest != text.digest


def test_a_generation_that_is_wrong_is_not_timed():
    args = type("Args", (), {"model": "tiny", "layers": 2, "tokens": 16, "device": "cpu"})
    found = benchmark_generate.generations(args, 1)
    with torch.no_grad():
        found["bastile"].model.lm_head.weight.mul_(1.1)
    with pytest.raises(ArithmeticError, match="logits of prefill are off by"):
        benchmark_generate.check(found)
