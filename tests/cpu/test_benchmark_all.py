"""The runs that fill all tables, one after the other or a length on each GPU, and what becomes of their rows."""

import argparse
import dataclasses
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from benchmark import all as all_runs
from benchmark import benchmark_families, benchmark_fsdp, benchmark_lora, records, steps, sweep, tables
from tests.benchmark_support import GPU, STEPS, in_this_process_fixture, made_up_rows, one_thread, sources  # noqa: F401


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


def test_the_runs_of_the_makefile_are_known():
    found = re.findall(r"--runs ([a-z]\S*)", (records.ROOT / "Makefile").read_text(encoding="utf-8"))
    assert found and {name for each in found for name in each.split(",")} <= all_runs.RUNS.keys()


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
