"""All runs that the tables need, in the order of their weight: `python -m benchmark.all --runs steps,lora --budget-s 540`.

    python -m benchmark.all --list
    python -m benchmark.all --budget-s 1200

Each run is a command of its own, with its part of the budget as a limit; one that the budget is not enough for is left out and named. The
seconds are estimates for an H200 with everything that it needs built and installed. Runs of one commit on one host make a table without
notes. Unsloth wants a transformers of its own, so its run is one for another environment.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass

from .command_line import names, new_parser
from .records import ROOT
from .report import log
from .trl_losses import LOSSES

ROUNDS = "3"
STEPS = ("--warmup", "2", "--steps", "5", "--rounds", ROUNDS)
LEAST = 0.5  # of a run's seconds: with less than that left it is not begun


@dataclass(frozen=True)
class Run:
    """A command. seconds: what it takes; shows: the tables that it fills; gpus: that it needs; budget: does it take --budget-s?"""

    module: str
    arguments: tuple[str, ...]
    seconds: int
    shows: str
    gpus: int = 1
    budget: bool = True

    def command(self, budget: float) -> list[str]:
        """Return the command line with a limit of its own."""
        limit = ("--budget-s", f"{budget:.0f}") if self.budget else ()
        return [sys.executable, "-m", self.module, *self.arguments, *limit]


def steps(*arguments: str, module: str = "benchmark.steps", seconds: int, shows: str, gpus: int = 1) -> Run:
    """Return a run of training steps."""
    return Run(module, (*arguments, *STEPS), seconds, shows, gpus)


LORA = ("--layers", "36", "--tokens", "512,1024,4096,8192")
MASKED = ("--layers", "12", "--tokens", "8192")
DENSE = ("llama_3.1_8b", "qwen2.5_7b", "mistral_7b", "phi_4", "gemma_3_12b", "smollm3_3b", "olmo_2_7b")
PEERS = ("--providers", "huggingface,liger,bastile")
HYBRID = ("--model", "qwen3.5_9b")
MOE, OSS = ("--model", "qwen3_moe_30b_a3b"), ("--model", "gpt_oss_20b")
SMALL = ("--tokens", "512,1024", "--providers", "huggingface,torch_compile,liger,bastile,bastile_captured")
LOSS = {size: ("--lora", "16", "--model", size, "--layers", layers, "--tokens", "8192") for size, layers in (("0.6b", "28"), ("8b", "12"))}
RUNS = {
    "steps": steps("--tokens", "512,1024,2048,4096,8192,16384", "--providers", "huggingface,liger,bastile,bastile_adamw",
                   seconds=450, shows="qwen3_step, first_step"),
    "steps_compiled": steps("--tokens", "512,1024,2048,4096,8192", "--providers", "torch_compile", seconds=240, shows="qwen3_step"),
    "steps_long": steps("--tokens", "18432,20480,24576,26624", "--providers", "huggingface,liger,bastile", seconds=260, shows="qwen3_step"),
    "lora": steps(*LORA, "--providers", "huggingface,liger,bastile", module="benchmark.benchmark_lora", seconds=330, shows="as_trained"),
    "lora_recompute": steps(*LORA, "--providers", "bastile_recompute", module="benchmark.benchmark_lora", seconds=110, shows="as_trained"),
    "lora_unsloth": steps(*LORA, "--providers", "unsloth", module="benchmark.benchmark_lora", seconds=200, shows="as_trained"),
    "packed": steps(*MASKED, "--documents", "8", seconds=380, shows="masked"),
    "padded": steps(*MASKED, "--rows", "4", "--padding", "0.2", seconds=380, shows="masked"),
    "moe": steps(*MOE, "--tokens", "4096,8192", seconds=330, shows="qwen3_moe_step"),
    "moe_skewed": steps(*MOE, "--tokens", "8192", "--routing", "skewed", "--providers", "huggingface,liger,bastile", seconds=230,
                        shows="qwen3_moe_step_skewed"),
    "gpt_oss": steps(*OSS, "--tokens", "4096,8192", seconds=400, shows="gpt_oss_step, gpt_oss"),
    "gpt_oss_skewed": steps(*OSS, "--tokens", "8192", "--routing", "skewed", "--providers", "huggingface_flex,liger_flex,bastile",
                            seconds=240, shows="gpt_oss_step_skewed"),
    **{f"dense_{name}": steps("--model", name, *PEERS, seconds=150, shows="dense_step") for name in DENSE},
    **{f"dense_lora_{name}": steps("--model", name, *PEERS, "--lora", "16", seconds=130, shows="dense_step_lora_16") for name in DENSE},
    "qwen3_5": steps(*HYBRID, seconds=240, shows="qwen3_5_step"),
    "qwen3_5_lora": steps(*HYBRID, "--lora", "16", "--providers", "huggingface,huggingface_fla,liger,bastile", seconds=200,
                          shows="qwen3_5_step_lora_16"),
    "operations": Run("benchmark", ("--rounds", ROUNDS), 300, "operations, linear_cross_entropy, attention, host"),
    "liger": Run("benchmark.limits", ("--rounds", ROUNDS), 300, "liger_limits"),
    "log_probs": Run("benchmark.benchmark_linear_log_probs", ("--no-compile", "--rounds", ROUNDS), 150, "linear_log_probs"),
    **{f"{loss}_{size}": steps("--loss", loss, *LOSS[size], seconds=200, shows="trl") for loss in LOSSES for size in LOSS},
    "experts": Run("benchmark.benchmark_qwen3_experts", ("--tokens", "8192", "--rounds", ROUNDS), 60, "qwen3_moe_operations"),
    "gpt_oss_experts": Run("benchmark.benchmark_experts", ("--tokens", "2048,8192", "--rounds", ROUNDS), 90, "gpt_oss_experts, gpt_oss"),
    "gpt_oss_120b": Run("benchmark.benchmark_experts", ("--model", "gpt_oss_120b", "--tokens", "2048,8192", "--rounds", ROUNDS), 120,
                        "gpt_oss_experts, gpt_oss"),
    "sinks": Run("benchmark", ("sink_attention", "--tokens", "8192", "--rounds", ROUNDS), 60, "attention"),
    "autocast": steps("--autocast", "--layers", "12", "--tokens", "512,4096", "--providers", "huggingface,liger,bastile", seconds=170,
                      shows="as_trained"),
    "autocast_fp32": steps("--autocast", "--weights", "fp32", "--layers", "12", "--tokens", "4096", "--providers",
                           "huggingface,liger,bastile", seconds=170, shows="as_trained"),
    "checkpointing": steps("--checkpointing", "--tokens", "8192,16384", "--providers", "huggingface,liger,bastile", seconds=330,
                           shows="as_trained"),
    "small": steps("--model", "qwen3_0.6b", *SMALL, seconds=240, shows="small_models"),
    "small_1.7b": steps("--model", "qwen3_1.7b", *SMALL, seconds=240, shows="small_models"),
    "generate": Run("benchmark.benchmark_generate", ("--rounds", ROUNDS), 60, "generate", budget=False),
    "adamw": Run("benchmark.benchmark_adamw", ("--rounds", ROUNDS), 60, "adamw", budget=False),
    "host": Run("benchmark.benchmark_host", ("--rounds", ROUNDS), 60, "host_time", budget=False),
    "fsdp": steps("--gpus", "2", "--tokens", "2048,8192", module="benchmark.benchmark_fsdp", seconds=400, shows="fsdp", gpus=2),
    "sanitizer": Run("tests.sanitizer", ("--tools", "memcheck,racecheck", "--record"), 900, "compute-sanitizer.txt", budget=False),
    "gpt_oss_fsdp": steps(*OSS, "--gpus", "2", "--tokens", "4096,8192", module="benchmark.benchmark_fsdp", seconds=500,
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
    p.add_argument("--budget-s", type=float, default=float("inf"), help="seconds after which nothing new is started")
    p.add_argument("--list", action="store_true", help="print the runs with their seconds and commands, and end")
    args = p.parse_args(arguments)
    if args.list:
        print(listing())
        return 0
    if unknown := set(args.runs) - set(RUNS):
        p.error(f"argument --runs: {', '.join(sorted(unknown))}, expected some of {', '.join(RUNS)}")
    end, missing = time.monotonic() + args.budget_s, []
    for name in args.runs:
        run, left = RUNS[name], end - time.monotonic()
        if left < LEAST * run.seconds:
            missing.append(name)
            continue
        log(f"\n=== {name}: {run.shows}, about {run.seconds} s, {left:.0f} s left")
        started = time.monotonic()
        done = subprocess.run(run.command(min(left, 2.0 * run.seconds)), cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"})
        log(f"=== {name}: {time.monotonic() - started:.0f} s" + (f", ended with {done.returncode}" if done.returncode else ""))
        if done.returncode:
            missing.append(name)
    log(f"\nstill owed: {','.join(missing) or 'none of these'}")
    return len(missing)


if __name__ == "__main__":
    sys.exit(main())
