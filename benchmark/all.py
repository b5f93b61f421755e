"""All runs that the tables need, in the order of their weight: `python -m benchmark.all --runs steps,lora --budget-s 540`.

    python -m benchmark.all --list
    python -m benchmark.all --budget-s 540 --results /tmp/results

Each run is whole, every round of every peer, or changes no result: its rows join the others when it has ended. A run that the rest of the
budget is not enough for is left out and named, and the next one that fits is done. What a run had measured when the time was over lies
beside the results, in a folder whose name ends in ".unfinished". The seconds are estimates for an H200 with everything that a run needs
built and installed. Runs of one commit on one host make a table without notes. Unsloth wants a transformers of its own, so its run is one
for another environment.
"""

import importlib
import os
import shutil
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from . import records
from .benchmark_families import CASES
from .command_line import default_device, names, new_parser
from .records import ROOT
from .report import log
from .trl_losses import LOSSES

ROUNDS = "3"
STEPS = ("--warmup", "2", "--steps", "5", "--rounds", ROUNDS)
LONG = ("--warmup", "1", "--steps", "3", "--rounds", ROUNDS)  # of seconds each, which vary less


@dataclass(frozen=True)
class Run:
    """A command. seconds: what it takes; shows: the tables that it fills; gpus: that it needs; forks: does it measure training steps, whose
    processes are forked from one server for all runs? saves: does it write rows? Otherwise it takes a budget."""

    module: str
    arguments: tuple[str, ...]
    seconds: int
    shows: str
    gpus: int = 1
    forks: bool = False
    saves: bool = True

    def command_line(self, left: float, folder: Path | None) -> list[str]:
        """Return the arguments. left: the seconds that it may take; folder: for its rows."""
        results = ["--results", str(folder)] if self.saves and folder else []
        return [*self.arguments, *results, *(["--budget-s", f"{left:.0f}"] if self.forks or not self.saves else [])]

    def whole(self, left: float, folder: Path | None) -> bool:
        """Do it, and tell whether everything was measured."""
        arguments = self.command_line(left, folder)
        if self.forks:
            try:
                return importlib.import_module(self.module).main(arguments).whole
            except (Exception, SystemExit):
                traceback.print_exc()
                return False
        command, variables = [sys.executable, "-m", self.module, *arguments], os.environ | {"PYTHONUNBUFFERED": "1"}
        try:
            return subprocess.run(command, cwd=ROOT, env=variables, timeout=left if self.saves else None).returncode == 0
        except subprocess.TimeoutExpired:
            return False


def steps(
    *arguments: str, module: str = "benchmark.steps", measured: tuple[str, ...] = STEPS, seconds: int, shows: str, gpus: int = 1
) -> Run:
    """Return a run of training steps. measured: how many."""
    return Run(module, (*arguments, *measured), seconds, shows, gpus, forks=True)


LORA = ("--layers", "36", "--tokens", "512,1024,4096,8192")
MASKED = ("--layers", "12", "--tokens", "8192")
DENSE = ("llama_3.1_8b", "qwen2.5_7b", "mistral_7b", "phi_4", "gemma_3_12b", "smollm3_3b", "olmo_2_7b")
UNSLOTH = ("llama_3.1_8b", "qwen2.5_7b", "mistral_7b")  # of which it has layers of its own
PEERS = ("--providers", "huggingface,liger,bastile")
TRAINED = ("--warmup", "4", "--steps", "10", "--rounds", ROUNDS)
of_trainer = partial(steps, module="benchmark.benchmark_trainers", measured=TRAINED, shows="trainers")
TRAINERS = {"padded": (("--lora", "16"), 370), "packed": (("--lora", "16", "--packing"), 390), "full_padded": ((), 320),
            "full_packed": (("--packing",), 390)}
# Of Qwen3's all but log-probabilities, which are a run of their own.
OPERATIONS = ("rms_norm", "q_norm", "add_rms_norm", "rotary", "qk_norm_rotary", "swiglu", "linear_cross_entropy", "attention")
DELTA_NETS = ("gated_rms_norm", "short_conv", "wide_attention")
HYBRID = ("--model", "qwen3.5_9b")
CHECKPOINTED = ("--tokens", "8192,16384", "--providers", "huggingface,liger,bastile,bastile_keep_attention")
ADAPTED = ("--lora", "16", "--layers", "4", "--tokens", "2048,8192")  # on experts too
LEAST = ("--lora", "16", "--attention", "--checkpointing", "--tokens", "2048")  # memory
MOE, OSS = ("--model", "qwen3_moe_30b_a3b"), ("--model", "gpt_oss_20b")
SMALL = ("--tokens", "512,1024", "--providers", "huggingface,torch_compile,liger,bastile,bastile_captured")
LOSS = {size: ("--lora", "16", "--model", size, "--layers", layers, "--tokens", "8192") for size, layers in (("0.6b", "28"), ("8b", "12"))}
RUNS = {
    "steps": steps("--tokens", "256,512,1024,2048,4096,8192", "--providers", "huggingface,liger,bastile,bastile_adamw", seconds=260,
                   shows="qwen3_step"),
    "steps_compiled": steps("--tokens", "512,1024,2048,4096,8192", "--providers", "torch_compile", seconds=100, shows="qwen3_step"),
    "steps_captured": steps("--tokens", "256,512,1024,2048", "--providers", "bastile_captured", seconds=40, shows="qwen3_step"),
    "steps_fp8": steps("--tokens", "2048,4096,8192", "--providers", "torchao,torchao_rowwise,bastile_fp8,bastile_fp8_adamw",
                       seconds=520, shows="eight_bits"),
    "steps_fp8_captured": steps("--tokens", "2048", "--providers", "bastile_fp8_captured", seconds=45, shows="eight_bits"),
    "lora_fp8": steps(*LORA[:2], "--tokens", "4096,8192", "--providers", "torch_compile,torchao,bastile_fp8,bastile_fp8_frozen",
                      module="benchmark.benchmark_lora", seconds=520, shows="eight_bits"),
    "training": Run("benchmark.benchmark_training", ("--rounds", ROUNDS), 130, "training"),
    "steps_long": steps("--tokens", "16384,18432,20480,24576,26624", "--providers", "huggingface,liger,bastile,bastile_adamw",
                        measured=LONG, seconds=340, shows="qwen3_step"),
    "lora": steps(*LORA, "--providers", "huggingface,liger,bastile", module="benchmark.benchmark_lora", seconds=210, shows="as_trained"),
    "lora_recompute": steps(*LORA, "--providers", "bastile_recompute", module="benchmark.benchmark_lora", seconds=60, shows="as_trained"),
    "lora_unsloth": steps(*LORA, "--providers", "unsloth", module="benchmark.benchmark_lora", seconds=280, shows="as_trained"),
    **{f"sft_{name}": of_trainer(*arguments, *PEERS, seconds=seconds) for name, (arguments, seconds) in TRAINERS.items()},
    **{f"sft_{name}_captured": of_trainer(*arguments, "--providers", "bastile_captured", seconds=320)
       for name, (arguments, _) in TRAINERS.items()},
    **{f"dpo_{name}": of_trainer("--trainer", "dpo", "--lora", "16", "--providers", name, seconds=seconds)
       for name, seconds in (("huggingface", 200), ("liger", 210), ("bastile", 100), ("bastile_captured", 340))},
    **{f"sft_{name}": of_trainer("--lora", "16", "--packing", "--providers", name, seconds=seconds)
       for name, seconds in (("torch_compile", 560), ("bastile_compiled", 300))},
    "packed": steps(*MASKED, "--documents", "8", seconds=230, shows="masked"),
    "padded": steps(*MASKED, "--rows", "4", "--padding", "0.2", seconds=150, shows="masked"),
    "moe": steps(*MOE, "--tokens", "4096,8192", seconds=350, shows="qwen3_moe_step"),
    "moe_skewed": steps(*MOE, "--tokens", "8192", "--routing", "skewed", "--providers", "huggingface,liger,bastile", seconds=90,
                        shows="qwen3_moe_step_skewed"),
    "gpt_oss": steps(*OSS, "--tokens", "4096,8192", seconds=290, shows="gpt_oss_step, gpt_oss"),
    "gpt_oss_skewed": steps(*OSS, "--tokens", "8192", "--routing", "skewed", "--providers", "huggingface_flex,liger_flex,bastile",
                            seconds=110, shows="gpt_oss_step_skewed"),
    "moe_lora": steps(*MOE, *ADAPTED, *PEERS, seconds=150, shows="qwen3_moe_step_lora_16"),
    "gpt_oss_lora": steps(*OSS, *ADAPTED, "--providers", "huggingface_flex,bastile", seconds=120, shows="gpt_oss_step_lora_16"),
    "least_moe": steps(*MOE, *LEAST, "--layers", "48", "--providers", "huggingface,bastile", seconds=150,
                       shows="qwen3_moe_step_lora_16_attention_checkpointing"),
    "least_gpt_oss": steps(*OSS, *LEAST, "--layers", "24", "--providers", "huggingface_flex,bastile,bastile_four_bits", seconds=320,
                           shows="gpt_oss_step_lora_16_attention_checkpointing"),
    "long_row": steps("--layers", "36", "--lora", "16", "--checkpointing", "--tokens", "350208", "--providers", "bastile_offload",
                      measured=("--warmup", "0", "--steps", "1", "--rounds", "1"), seconds=480, shows="as_trained"),
    **{f"dense_{name}": steps("--model", name, *PEERS, seconds=75, shows="dense_step") for name in DENSE},
    **{f"dense_lora_{name}": steps("--model", name, *PEERS, "--lora", "16", seconds=75, shows="dense_step_lora_16") for name in DENSE},
    **{f"dense_unsloth_{name}": steps("--model", name, "--providers", "unsloth", "--lora", "16", seconds=180, shows="dense_step_lora_16")
       for name in UNSLOTH},
    **{name: steps("--cases", name, "--rounds", ROUNDS, module="benchmark.benchmark_families", measured=(), seconds=case.seconds,
                   shows=case.shows) for name, case in CASES.items()},
    "parts": steps("--model", "mistral_7b", "--tokens", "8192", *PEERS, "--parts", seconds=60, shows="step_parts"),
    "qwen3_5": steps(*HYBRID, seconds=360, shows="qwen3_5_step"),
    "qwen3_5_lora": steps(*HYBRID, "--lora", "16", "--providers", "huggingface,huggingface_fla,liger,bastile", seconds=260,
                          shows="qwen3_5_step_lora_16"),
    "operations": Run("benchmark", (*OPERATIONS, "--rounds", ROUNDS), 330, "operations, linear_cross_entropy, attention, host"),
    "liger": Run("benchmark.limits", ("--rounds", ROUNDS), 300, "liger_limits"),
    "delta_rule": Run("benchmark", ("gated_delta_rule", "--tokens", "8192", "--rounds", ROUNDS), 200, "gated_delta_rule"),
    "delta_nets": Run("benchmark", (*DELTA_NETS, "--tokens", "8192", "--rounds", ROUNDS), 120, "qwen3_5_operations, attention"),
    "log_probs": Run("benchmark.benchmark_linear_log_probs", ("--no-compile", "--rounds", ROUNDS), 160, "linear_log_probs"),
    **{f"{loss}_{size}": steps("--loss", loss, *LOSS[size], seconds=120, shows="trl") for loss in LOSSES for size in LOSS},
    "experts": Run("benchmark.benchmark_qwen3_experts", ("--tokens", "8192", "--rounds", ROUNDS), 240, "qwen3_moe_operations"),
    "gpt_oss_experts": Run("benchmark.benchmark_experts", ("--tokens", "2048,8192", "--rounds", ROUNDS), 30, "gpt_oss_experts, gpt_oss"),
    "gpt_oss_120b": Run("benchmark.benchmark_experts", ("--model", "gpt_oss_120b", "--tokens", "2048,8192", "--rounds", ROUNDS), 45,
                        "gpt_oss_experts, gpt_oss"),
    "sinks": Run("benchmark", ("sink_attention", "--tokens", "8192", "--rounds", ROUNDS), 60, "attention"),
    "autocast": steps("--autocast", "--layers", "12", "--tokens", "512,4096", "--providers", "huggingface,liger,bastile", seconds=45,
                      shows="as_trained"),
    "autocast_fp32": steps("--autocast", "--weights", "fp32", "--layers", "12", "--tokens", "4096", "--providers",
                           "huggingface,liger,bastile", seconds=45, shows="as_trained"),
    "checkpointing": steps("--checkpointing", *CHECKPOINTED, seconds=320, shows="as_trained"),
    "lora_checkpointing": steps("--checkpointing", "--lora", "16", *CHECKPOINTED, measured=LONG, seconds=220,
                                shows="as_trained"),
    "qlora": steps("--checkpointing", *LORA[:2], "--weights", "nf4", "--tokens", "2048,8192", "--providers",
                   "huggingface,liger,bastile", module="benchmark.benchmark_lora", measured=LONG, seconds=345,
                   shows="as_trained"),
    "small": steps("--model", "qwen3_0.6b", *SMALL, seconds=95, shows="small_models"),
    "small_1.7b": steps("--model", "qwen3_1.7b", *SMALL, seconds=120, shows="small_models"),
    "first_step": steps("--tokens", "512", "--fresh", "--providers", "huggingface,liger,bastile,bastile_adamw", seconds=220,
                        shows="first_step"),
    "generate": Run("benchmark.benchmark_generate", ("--rounds", ROUNDS), 30, "generate"),
    "adamw": Run("benchmark.benchmark_adamw", ("--rounds", ROUNDS), 30, "adamw"),
    "host": Run("benchmark.benchmark_host", ("--rounds", ROUNDS), 70, "host_time"),
    "fsdp": steps("--gpus", "2", "--tokens", "2048,8192", module="benchmark.benchmark_fsdp", seconds=210, shows="fsdp", gpus=2),
    "spread": steps("--gpus", "2", "--spread", "--documents", "8", "--layers", "12", "--tokens", "16384,32768", "--providers",
                    "huggingface_varlen,liger_varlen,bastile", module="benchmark.benchmark_fsdp", seconds=200, shows="spread", gpus=2),
    "sanitizer": Run("tests.sanitizer", ("--tools", "memcheck,racecheck", "--record"), 900, "compute-sanitizer.txt", saves=False),
    "gpt_oss_fsdp": steps(*OSS, "--gpus", "2", "--tokens", "4096,8192", module="benchmark.benchmark_fsdp", seconds=390,
                          shows="gpt_oss_fsdp, gpt_oss", gpus=2),
}


def listing() -> str:
    """Return every run with its seconds, the tables that it fills, and its command."""
    lines = []
    for name, run in RUNS.items():
        where = "" if run.gpus == 1 else f", {run.gpus} GPUs"
        lines.append(f"{name:<24}{run.seconds:>5} s{where}  {run.shows}\n    python -m {run.module} {' '.join(run.arguments)}")
    return "\n".join(lines)


def main(arguments=None) -> int:
    """Do the runs, and return how many failed or were left out."""
    p = new_parser(__doc__.partition("\n")[0])
    p.add_argument("--runs", type=names, default=tuple(name for name, run in RUNS.items() if run.gpus == 1), help=f"of {', '.join(RUNS)}")
    p.add_argument("--budget-s", type=float, default=float("inf"), help="seconds after which everything ends")
    p.add_argument("--results", type=Path, help="folder for <gpu>/<name>.csv; on a CPU nothing is written without it")
    p.add_argument("--list", action="store_true", help="print the runs with their seconds and commands, and end")
    args = p.parse_args(arguments)
    if args.list:
        print(listing())
        return 0
    if unknown := set(args.runs) - set(RUNS):
        p.error(f"argument --runs: {', '.join(sorted(unknown))}, expected some of {', '.join(RUNS)}")
    results = args.results or (records.RESULTS if default_device() == "cuda" else None)
    end, missing = time.monotonic() + args.budget_s, []
    for name in args.runs:
        run, left = RUNS[name], end - time.monotonic()
        if left < run.seconds:
            missing.append(name)
            continue
        log(f"\n=== {name}: {run.shows}, about {run.seconds} s, {left:.0f} s left")
        started, folder = time.monotonic(), results.with_name(f"{results.name}.unfinished") / name if results else None
        if folder and folder.is_dir():  # of an earlier run, whose rows would join these
            shutil.rmtree(folder)
        whole = run.whole(left, folder)
        log(f"=== {name}: {time.monotonic() - started:.0f} s" + ("" if whole else ", not whole: no result has changed"))
        if not whole:
            missing.append(name)
        elif results and folder and folder.is_dir():
            records.merge(folder, results)
            shutil.rmtree(folder)
    log(f"\nstill owed: {','.join(missing) or 'none of these'}")
    return len(missing)


if __name__ == "__main__":
    sys.exit(main())
