"""Made-up results, and fixtures, for the tests of the benchmark."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmark import benchmark_trainers, families, providers, records, routing, stepping, steps

GPU = "NVIDIA H200"


@pytest.fixture(autouse=True)
def sources(monkeypatch, loaded):
    """The package as it is now, not as build/ has it, for whoever loads it."""
    original = providers.package
    monkeypatch.setattr(providers, "package", lambda folder=".": loaded)
    for module in (families, steps):
        monkeypatch.setattr(module, "package", lambda folder=".": loaded if folder == "." else original(folder))


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class InThisProcess:
    """Does and reports what a group of processes would, by its command line."""

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


@pytest.fixture(name="in_this_process")
def in_this_process_fixture(monkeypatch):
    """Starting a process and importing everything anew takes far longer than the steps of a tiny model."""
    monkeypatch.setattr(steps, "Group", InThisProcess)
    monkeypatch.setattr(stepping, "emit", lambda kind, **content: InThisProcess.found.append(json.dumps({"kind": kind, **content})))


def step_of(provider, model, **changes):
    """What a measuring process was told on its command line: one row of a small model."""
    given = {"layers": 1, "device": "cpu", "documents": 1, "rows": 1, "padding": 0.0, "lora": 0, "autocast": False, "weights": "bf16",
             "checkpointing": False, "routing": routing.UNIFORM}  # fmt: skip
    return argparse.Namespace(child=provider, model=model, **given | changes)


def losses_agree(found, tokens=16) -> bool:
    """Tells whether our steps have the losses of transformers', of the same weights. found: what a benchmark returned."""
    theirs, ours = (found.steps[provider, tokens] for provider in ("huggingface", "bastile"))
    return not ours.error and ours.losses == pytest.approx(theirs.losses, rel=2e-3)


def row(kernel="rms_norm", provider="bastile", mode="forward", metric="speed", x=8192, y=36.0, **config):
    known = {"model": "qwen3_8b", "dtype": "bf16", "timing": "device", "torch": "2.11.0", "driver": "580.159"}
    numbers = (None,) * 3 if y is None else (y, y * 0.99, y * 1.02)
    extra = json.dumps(known | config, sort_keys=True)
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
        routed = {"kind": "uniform", "experts": 32, "top_k": 4, "used": 32, "largest": 0.2}
        step = {"model": "gpt_oss_20b", "gpus": gpus, "layers": layers, "timing": None, "routing": routed}
        for provider, times in (("huggingface_flex", 1.5), ("liger_flex", 1.25), ("bastile", 1.0)):
            rows.append(row(kernel, provider, "full", "step_time", y=times * ms, **step))
            rows.append(row(kernel, provider, "full", "throughput", y=8192 / ms, **step))
            rows.append(row(kernel, provider, "full", "memory", y=100 * times, **step))
    return rows


STEPS = ["--device", "cpu", "--model", "tiny", "--tokens", "8,16", "--warmup", "1", "--steps", "2"]
TINY = ["--device", "cpu", "--model", "tiny", "--tokens", "16", "--ms", "1", "--rounds", "1", "--no-compile"]
